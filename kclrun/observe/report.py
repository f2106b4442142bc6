"""What `--report FILE` holds: what one run did, per shard and in all, the same on both engines.

Nouns only; the manager fills them from its lease processes, the Spark runner from its batches.
Rule: None means "not known", never zero; a field that an engine does not have is left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, UnsetType

__all__ = ["Report", "ShardReport", "Totals"]


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shard.

    On the fleet, `first_position` and `last_position` are those of processed records; a restart
    reads again what was not checkpointed, and counts it again. On Spark they bound what committed
    batches read, `checkpoint` is the position in the checkpoint, `records` counts rows (None
    where this Spark cannot count them by shard) and `lag_ms` is what the last batch left behind.
    """

    records: int | None = 0
    bytes: int | None = 0
    batches: int = 0
    processing_seconds: float = 0.0
    first_position: str | None = None
    last_position: str | None = None
    checkpoint: str | None = None
    restarts: int = 0
    is_ended: bool = False
    lag_ms: int | UnsetType | None = UNSET


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """All shards together."""

    shards: int
    ended: int
    records: int
    bytes: int | None
    batches: int
    processing_seconds: float
    restarts: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, as it is written."""

    application: str
    stream: str
    owner: str
    exit_reason: str
    seconds: float
    totals: Totals
    shards: Mapping[str, ShardReport]
