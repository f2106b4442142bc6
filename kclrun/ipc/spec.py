"""All that a lease process is told at its start, as plain values.

Holds: `StartSpec` and its parts. May not know: where the values come from (settings, the table).
Rule: representations end up in logs, so none shows credentials, proxies (their URLs carry
passwords) or the user's options. Look next: `messages.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint

__all__ = [
    "CheckpointSpec",
    "FetchSpec",
    "LogSpec",
    "OnErrorSpec",
    "StartSpec",
]


class FetchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`fetch:` of the configuration. `kpl_range` is what becomes of user records out of range.

    `floor_s` is the least time between two GetRecords: 5 a second and shard is the service's limit.
    """

    mode: Literal["polling"]
    idle_s: float
    floor_s: float = 0.2
    buffer_bytes: int
    batch_max: int
    kpl_range: Literal["keep", "drop"]


class CheckpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoint:` of the configuration: every `every_s` (auto), each batch, or by user code."""

    mode: Literal["auto", "batch", "manual"]
    every_s: float
    uncheckpointed_max: int


class OnErrorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`on_error:` of the configuration."""

    retries: int
    backoff_s: float


class LogSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`log:` of the configuration, with its format decided: JSON lines or text."""

    level: str
    json: bool


class StartSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The start of one lease process.

    `seen_counter` is the row's counter after the manager's take: the claim expects it [P4].
    `expires_instant` is where on CLOCK_BOOTTIME the command lapses: exit unclaimed after it.
    `failover_s` is the smallest of the fleet [P7]. `start_timestamp` is where AT_TIMESTAMP, or a
    pinned LATEST [P14], begins. `hash_range_start` and `_end` are decimal: they have 128 bits.
    `options` are values as YAML has them. `has_waited`: a failover has passed since a take by force
    [P18]; `others_in_sight`: another kclrun owner is there to take what is offered [P17].
    """

    application: str
    stream_name: str
    stream_arn: str | None = None
    lease_key: str
    shard_id: str
    owner: str
    seen_counter: int
    place: int
    incarnation: int
    expires_instant: Instant
    failover_s: float
    has_waited: bool = False
    others_in_sight: bool = False
    start_timestamp: WallTime | None = None
    hash_range_start: str | None = None
    hash_range_end: str | None = None
    processor: str
    import_paths: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    fetch: FetchSpec
    checkpoint: CheckpointSpec
    on_error: OnErrorSpec
    output_path: str | None = None
    table_name: str
    kinesis: WireEndpoint
    dynamodb: WireEndpoint
    credentials: WireCredentials
    lock_path: str
    log: LogSpec
    nice: int = 0

    def __repr__(self) -> str:
        return (
            f"StartSpec(lease_key={self.lease_key!r}, place={self.place},"
            f" incarnation={self.incarnation})"
        )

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("lease_key", self.lease_key)]
