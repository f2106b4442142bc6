"""Flights as records, some of them poison, and their rows, computed from the lines alone."""

import csv
import itertools
import random
from datetime import UTC, datetime, timedelta

from processors.flights import FIELDS, demo_records
from tests.processes.ledger_rig.producing import Producer

# More columns than the sample knows: it raises.
_SURPLUS = b",surplus"


class Flights:
    """The first `count` flights; `poisons` of them, drawn by `seed`, cannot be read."""

    def __init__(self, count, poisons, seed):
        self.poisons = set(random.Random(f"poison {seed}").sample(range(count), poisons))
        self.records = [
            (key, data + _SURPLUS if number in self.poisons else data)
            for number, (key, data) in enumerate(itertools.islice(demo_records(), count))
        ]
        assert len(self.records) == count, "there are not so many flights"

    @property
    def poisoned(self):
        """Key and payload of each record that becomes a dead letter."""
        return sorted(self.records[number] for number in self.poisons)

    def rows(self, *, with_poisoned):
        """Every row that an output must have, sorted."""
        lines = (
            data.removesuffix(_SURPLUS).decode()
            for number, (_, data) in enumerate(self.records)
            if with_poisoned or number not in self.poisons
        )
        return sorted(_row(dict(zip(FIELDS, line, strict=True))) for line in csv.reader(lines))


def _row(of):
    departs = datetime.fromisoformat(of["time_hour"]).astimezone(UTC)
    departs += timedelta(minutes=int(of["minute"]))
    start = departs.replace(minute=departs.minute // 15 * 15)
    is_missing = of["dep_delay"] == "NA"
    return (
        f"{of['carrier']}{of['flight']} {of['origin']} {of['time_hour']} {of['minute']}",
        of["carrier"],
        start.strftime("%Y-%m-%dT%H:%M:%SZ"),
        1,
        0 if is_missing else 1,
        0 if is_missing else int(of["dep_delay"]),
    )


class FlightProducer(Producer):
    """Puts the flights under their own keys, in their order; `entries` counts what is put."""

    def __init__(self, kinesis, stream, records, **more):
        super().__init__(kinesis, stream, len(records), **more)
        self.entries = 0
        self._records = records

    def _put(self, size):
        part = self._records[self.entries : self.entries + size]
        answer = self._kinesis.put_records(
            StreamName=self._stream,
            Records=[{"PartitionKey": key, "Data": data} for key, data in part],
        )
        assert answer["FailedRecordCount"] == 0, "the rig's puts are never refused"
        self.entries += len(part)
        return len(part)
