"""Row `poison`: what one record at fault costs the 9,999 others of its batch."""

import random
from collections import Counter
from typing import Any, Final

from bench.figures import Figure, Target, figure
from kclrun.model.record import RecordBatch
from kclrun.processor import Checkpointer, RecordProcessor
from kclrun.testing import run_processor

_ROW: Final = "poison"
_RECORDS: Final = 10_000
_POISON: Final = b"poison"


class _Processor(RecordProcessor):
    """`done` counts how often the work on each record was done."""

    def __init__(self) -> None:
        self.done: Counter[bytes] = Counter()


class InALoop(_Processor):
    """One record after the other: the traceback shows the one at fault."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for record in batch:
            if record.data == _POISON:
                raise ValueError("poison")
            self.done[record.data] += 1


class AtOnce(_Processor):
    """All or nothing, as a bulk insert: nothing tells which record is at fault."""

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        every = [each.data for each in batch]
        if _POISON in every:
            raise ValueError("poison")
        self.done.update(every)


def poison(rounds: int) -> list[Figure]:
    """One record of a batch of 10,000 fails always, at several places; `retries: 0`, so that what
    is counted is the search for it. By the test kit, whose decisions are those of a lease process:
    counts, which no machine changes. Not counted: the first call, and that with all behind it."""
    chance = random.Random(1)
    edges = [0, 1, _RECORDS // 2 - 1, _RECORDS // 2, _RECORDS - 2, _RECORDS - 1]
    places = [*edges, *(chance.randrange(_RECORDS) for _ in range(rounds))]
    figures = []
    for kind, what in (
        (InALoop, "a loop over the batch"),
        (AtOnce, "all or nothing"),
    ):
        counts = [_counted(kind, place) for place in places]
        figures += [
            figure(
                *(_ROW, f"{what}: calls to find it", "calls"),
                [calls for calls, _ in counts],
                target=Target(at_most=15.0),
                judged_percentile=100.0,
            ),
            figure(
                *(_ROW, f"{what}: most often that another record was done", "times"),
                [times for _, times in counts],
                target=Target(at_most=2.0),
                judged_percentile=100.0,
            ),
        ]
    return figures


def _counted(kind: type[_Processor], place: int) -> tuple[float, float]:
    records: list[Any] = [str(number).encode() for number in range(_RECORDS)]
    records[place] = _POISON
    run = run_processor(
        kind, records, settings={"fetch": {"batch_max": _RECORDS}, "on_error": {"then": "skip"}}
    )
    (processor,) = run.processors
    assert isinstance(processor, kind)
    assert len(processor.done) == _RECORDS - 1, "a record was not processed"
    assert [each.data for each in run.given_up] == [_POISON], "another record was given up"
    # Behind it all that is left is one call again, in place of the first one.
    calls = sum(call.name == "process_records" for call in run.calls)
    behind = int(calls > 1 and place < _RECORDS - 1)
    return float(calls - 1 - behind), float(max(processor.done.values()))
