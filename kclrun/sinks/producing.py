"""What a Kinesis producer is told, and what it tells: its settings and its metrics."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.sinks.flow_control import ShardMetrics

__all__ = ["RECORD_BYTES_MAX", "REQUEST_BYTES_MAX", "ProducerMetrics", "ProducerSettings"]

# PutRecords: keys included, 1 MiB a record unless the stream is set to take up to 10 MiB, and
# 5 MiB a request in every region and mode; a larger record goes in a request of its own.
RECORD_BYTES_MAX: Final = 2**20
REQUEST_BYTES_MAX: Final = 5 * 2**20


class ProducerSettings(msgspec.Struct, frozen=True):
    """How records are sent.

    `keeps_order`: the records of a partition key arrive in the order they were added. A request
    then holds one record of a key: many keys make full requests, a single one gets as many records
    a second as requests take turns (25 at 40 ms). `aggregates` is for such keys: what waits of one
    goes as one KPL aggregate, in order too; readers must open aggregates, as every KCL does.
    `concurrency`: requests under way at once. One takes about 40 ms, so four are 50,000 records/s;
    the wire client has eight connections.
    `linger_s`: how long a record may wait for others before a part-filled request goes (the KPL's
    100 ms).
    `give_up_after_s`: how long a shard, or the service, may take nothing at all before the producer
    raises. A minute is six of the longest pauses, after the ten seconds it takes to get to them.
    `buffer_records_max`, `buffer_bytes_max`: what waits or is under way; `add` blocks at either.
    50,000 records are what one shard takes in 50 s: so long may it lag before it holds up the
    others. An empty record costs about 1 kB here, so they are not more memory than the bytes.
    """

    keeps_order: bool = True
    aggregates: bool = False
    concurrency: int = 4
    linger_s: float = 0.1
    give_up_after_s: float = 60.0
    buffer_records_max: int = 50_000
    buffer_bytes_max: int = 64 * 2**20
    record_bytes_max: int = RECORD_BYTES_MAX
    request_bytes_max: int = REQUEST_BYTES_MAX


class ProducerMetrics(msgspec.Struct, frozen=True):
    """What one producer did so far, and how its shards are doing.

    `records` were acknowledged, `user_records` of them or in them, `bytes` as the service counts
    them. `requests` were answered; `full_requests` of them held no shard that flow control slowed.
    `refused_records` were sent again, counted each time; `failed_requests` failed as a whole.
    `waiting_records` and `waiting_bytes` are not acknowledged yet. `shards` is by shard id, and
    includes what earlier producers left in a shared `Flow`.
    """

    records: int
    user_records: int
    bytes: int
    requests: int
    full_requests: int
    refused_records: int
    failed_requests: int
    waiting_records: int
    waiting_bytes: int
    shards: dict[str, ShardMetrics]

    @property
    def full_batch_share(self) -> float:
        """The share of requests at full batch; 1 before the first."""
        return self.full_requests / self.requests if self.requests else 1.0

    @property
    def pause_max_s(self) -> float:
        """The largest pause any shard was given."""
        return max((shard.pause_max_s for shard in self.shards.values()), default=0.0)

    @property
    def recovery_max_s(self) -> float:
        """The longest a shard took from its last refusal to full batches without a pause."""
        return max((shard.recovery_max_s for shard in self.shards.values()), default=0.0)
