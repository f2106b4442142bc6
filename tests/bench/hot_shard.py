"""One shard becomes hot while others are written at a rate they can take: what becomes of both.

Over the embedded Kinesis with the service's limits (1,000 records/s and 1 MiB/s a shard, as much
in reserve as a second brings). Four phases, without a gap between them: the healthy shards alone;
the hot one too, at two and a half times what it takes; it cools down to a fifth of what it takes,
until the producer's flow control is off again; what is left. Then everything is read back.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from bench.servers import CREDENTIALS, endpoint_at
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import effective_hash_key
from kclrun.errors import Throttled
from kclrun.local.server import start_embedded
from kclrun.model.record import IteratorType, PutEntry, Record, StartPoint
from kclrun.model.shard import Shard
from kclrun.producing.flow_control import ProducerMetrics
from kclrun.producing.kinesis_producer import KinesisProducer

HEALTHY_SHARDS: Final = 8
# A healthy shard has a fifth of its quota to spare.
HEALTHY_PER_S: Final = 800
HOT_PER_S: Final = 2_500
COOL_PER_S: Final = 200
ALONE_S: Final = 6.0
HOT_S: Final = 6.0
# The hot phase leaves 9,000 records, 9 s of its shard's quota, and recovery is slow by design.
COOL_S_MAX: Final = 60.0
# Each shard's records have this many keys: enough for a request of one record a key.
KEYS: Final = 500
PAYLOAD_BYTES: Final = 200
_TICK_S: Final = 0.01
_LOOK_S: Final = 0.05
_STREAM: Final = "hot-shard"
_CREATE: Final = Operation("kinesis", "CreateStream", is_write=True)


class Outcome(msgspec.Struct, frozen=True):
    """What happened. Rates are records/s by the service's clock, of one healthy shard each."""

    sent: int
    alone_rates: tuple[float, ...]
    hot_rates: tuple[float, ...]
    recovered_after_s: float
    metrics: ProducerMetrics
    hot_shard: str
    lost: int
    twice: int
    out_of_order: int
    took_s: float

    @property
    def least_healthy_share(self) -> float:
        """Of the healthy shards, the worst: its rate in the hot phase over its rate alone."""
        pairs = zip(self.hot_rates, self.alone_rates, strict=True)
        return min(hot / alone for hot, alone in pairs)

    @property
    def full_batch_time_share(self) -> float:
        """The share of time at full batch, over all shards."""
        slow_s = sum(shard.slow_s for shard in self.metrics.shards.values())
        return 1 - slow_s / (self.took_s * len(self.metrics.shards))

    @property
    def hot_full_batch_time_share(self) -> float:
        return 1 - self.metrics.shards[self.hot_shard].slow_s / self.took_s


def run(alone_s: float = ALONE_S, hot_s: float = HOT_S) -> Outcome:
    """About half a minute; the hot phase takes the most, with what it leaves. Raises: what the
    producer raises."""
    with start_embedded(limits=True) as embedded:
        client = wire_client(embedded.kinesis_endpoint)
        create = {"StreamName": _STREAM, "ShardCount": HEALTHY_SHARDS + 1}
        client.call(_CREATE, msgspec.json.encode(create))
        shards = WireStreamAdmin(client, _STREAM).list_shards()
        producer = KinesisProducer(WirePutter(client, _STREAM), shards)
        try:
            writing = _Writing(producer, shards)
            writing.go_through_the_phases(alone_s, hot_s)
        finally:
            producer.close()
        reader = PollingReader(client, _STREAM)
        read = {shard.shard_id: [*_records(reader, shard.shard_id)] for shard in shards}
        client.close()
    return writing.outcome(read)


def wire_client(url: str) -> WireClient:
    return WireClient(endpoint_at(url), lambda: CREDENTIALS, service="kinesis")


class _Writing:
    """Offers records at the rates of the phases. The first shard becomes the hot one."""

    def __init__(self, producer: KinesisProducer, shards: Sequence[Shard]) -> None:
        self._producer = producer
        self._hot = shards[0].shard_id
        self._healthy = [shard.shard_id for shard in shards[1:]]
        self._keys = _keys(shards)
        self._sent = 0
        self._looked_s = 0.0
        self._began = time.monotonic()
        self._began_at = time.time()

    def go_through_the_phases(self, alone_s: float, hot_s: float) -> None:
        self._offer(0, alone_s)
        self._alone_until_s = self._hot_from_s = self._now_s()
        self._offer(HOT_PER_S, hot_s)
        self._hot_until_s = self._now_s()
        self._offer(COOL_PER_S, COOL_S_MAX, until_healthy=True)
        self._recovered_s = self._now_s()
        self._producer.flush()
        self._metrics = self._producer.metrics()
        self._took_s = self._now_s()

    def outcome(self, read: dict[str, list[Record]]) -> Outcome:
        found = Counter(_number(record) for records in read.values() for record in records)
        return Outcome(
            sent=self._sent,
            # The first second fills connections and caches.
            alone_rates=self._rates(read, 1.0, self._alone_until_s),
            hot_rates=self._rates(read, self._hot_from_s, self._hot_until_s),
            recovered_after_s=self._recovered_s - self._hot_until_s,
            metrics=self._metrics,
            hot_shard=self._hot,
            lost=self._sent - len(found),
            twice=found.total() - len(found),
            out_of_order=sum(_out_of_order(records) for records in read.values()),
            took_s=self._took_s,
        )

    def _offer(self, hot_per_s: int, for_s: float, *, until_healthy: bool = False) -> None:
        began_s = self._now_s()
        offered = Counter[str]()
        while (elapsed_s := self._now_s() - began_s) < for_s:
            for shard in self._healthy:
                self._add(shard, int(elapsed_s * HEALTHY_PER_S) - offered[shard], offered)
            self._add(self._hot, int(elapsed_s * hot_per_s) - offered[self._hot], offered)
            if until_healthy and self._is_healthy():
                return
            time.sleep(_TICK_S)

    def _add(self, shard: str, count: int, offered: Counter[str]) -> None:
        keys = self._keys[shard]
        for _ in range(count):
            data = b"%012d" % self._sent + b"x" * (PAYLOAD_BYTES - 12)
            self._producer.add(PutEntry(data, keys[offered[shard] % KEYS]))
            self._sent += 1
            offered[shard] += 1

    def _is_healthy(self) -> bool:
        """Whether the hot shard is at full speed again. Looks at most each `_LOOK_S`."""
        now_s = self._now_s()
        if now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        return self._producer.metrics().shards[self._hot].pause_s == 0.0

    def _rates(
        self, read: dict[str, list[Record]], from_s: float, until_s: float
    ) -> tuple[float, ...]:
        from_at, until_at = self._began_at + from_s, self._began_at + until_s
        return tuple(
            sum(
                from_at <= record.approximate_arrival_timestamp < until_at for record in read[shard]
            )
            / (until_s - from_s)
            for shard in self._healthy
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._began


def _keys(shards: Sequence[Shard]) -> dict[str, list[str]]:
    """Partition keys that belong to each shard."""
    keys: dict[str, list[str]] = {shard.shard_id: [] for shard in shards}
    number = 0
    while any(len(each) < KEYS for each in keys.values()):
        hash_key = effective_hash_key(f"key-{number}", None)
        shard = next(each for each in shards if hash_key in each.hash_range)
        keys[shard.shard_id].append(f"key-{number}")
        number += 1
    return keys


def _records(reader: PollingReader, shard: str) -> Iterator[Record]:
    iterator: str | None = reader.iterator(shard, StartPoint(IteratorType.TRIM_HORIZON))
    while iterator is not None:
        try:
            page = reader.fetch(iterator, 10_000)
        except Throttled:
            time.sleep(0.2)  # five calls a second
            continue
        yield from page.records
        iterator = None if page.millis_behind_latest == 0 else page.next_iterator


def _number(record: Record) -> int:
    return int(record.data[:12])


def _out_of_order(records: Sequence[Record]) -> int:
    """How often a record of a key comes before an earlier one."""
    last: dict[str, int] = {}
    count = 0
    for record in records:
        number = _number(record)
        count += number < last.get(record.partition_key, -1)
        last[record.partition_key] = number
    return count
