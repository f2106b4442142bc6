"""The typed options of source and sink: what the readers and the writer are given.

Pure nouns; texts become these in `options.py` (source) and `sink/options.py`. No secret has a
field here: these values stand in plans.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from kclrun.spark.positions import Position

__all__ = ["LeasesAt", "Reached", "SourceSettings", "Start", "StartKind"]


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A stream and how to reach it; credentials come from the chain of each process.

    `stream` is a name or an ARN.
    """

    stream: str
    region: str | None = None
    endpoint_url: str | None = None
    role_arn: str | None = None
    role_external_id: str | None = None
    role_session_name: str | None = None

    @property
    def name(self) -> str:
        """The stream's bare name."""
        return self.stream.rpartition("/")[2]


class StartKind(enum.Enum):
    """Where a query without a checkpoint begins, or where a batch read ends."""

    LATEST = "latest"
    EARLIEST = "earliest"
    TIMESTAMP = "a timestamp"
    POSITIONS = "positions by shard"
    LEASES = "the checkpoints of a lease table"


class LeasesAt(msgspec.Struct, frozen=True):
    """A lease table and where DynamoDB answers for it; `endpoint_url` None is as for the stream."""

    table: str
    endpoint_url: str | None = None


class Start(msgspec.Struct, frozen=True):
    """A kind, with the time (milliseconds since the epoch), the positions or the table it needs.

    `positions` may name `"*"` for every shard it does not name.
    """

    kind: StartKind
    timestamp_ms: int = 0
    positions: Mapping[str, Position] = {}
    leases: LeasesAt | None = None


class SourceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All options of the source, in types; units last. Defaults are those of the option table.

    `bytes_per_trigger_max` None is 64 MiB for every shard that is read.
    """

    reached: Reached
    start: Start = Start(StartKind.LATEST)
    end: Start = Start(StartKind.LATEST)
    fails_on_data_loss: bool = True
    records_per_trigger_max: int | None = None
    bytes_per_trigger_max: int | None = None
    target_batch_s: float = 30.0
    poll_interval_s: float = 1.0
    reads_per_second_max: float = 2.5
    shards_per_task: int = 8
    partitions_max: int | None = None
    inline_bytes_max: int = 512 * 1024
    aligns_shards: bool = True
    opens_aggregates: bool = True
    shard_list_interval_s: float = 10.0
    retry_attempts: int | None = None
    retry_backoff_max_s: float = 3.0
