"""The state of a manager at one moment, and the report of a run: plain values.

None means "not known", never zero. No field holds a payload, a key or a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

# Used if the configuration file of the application is not known.
LEASES_COMMAND: Final = "kclrun leases --config FILE"


def how_to_resume(leases_command: str | None, shard: str) -> str:
    """How an operator resumes a halted shard, in words.

    `leases_command` is `kclrun leases` with the options that reach the table; None if the table
    exists only during the run, as in the embedded AWS.
    """
    if leases_command is None:
        return "mend the cause, then run the application again"
    return f"mend the cause, then: {leases_command} resume {shard} --yes"


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of this manager.

    `state` is one short word (starting, running, failing, ending, ended, halted, backing off,
    waiting). Failing: user code raised, and the call is repeated.
    `records_total` counts the records that the processor returned for since this manager started,
    over restarts of the lease process; `records_per_s` is over the last few seconds. `lag_ms` is
    that of `millis_behind_latest` in `metrics.py`. `note` says why a lease does not advance, or is
    empty.
    """

    shard: str
    state: str
    owner: str = ""
    records_total: int = 0
    records_per_s: float = 0.0
    lag_ms: int | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    pid: int | None = None
    restarts: int = 0
    note: str = ""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One manager at one moment. `uptime_s` counts from its start.

    `leases_elsewhere` counts leases of other owners, `leases_free` leases without an owner,
    `ended_total` the shards that this manager has read to their end. `records_departed` counts the
    records of leases that it had and that are not in `leases` any more: ended, released or lost.
    Without leases (`has_leases`), on Spark, `leases` are the shards that are read. `doing` says in
    a few words which event the run waits for while no shard is shown. `leases_command`
    is for `how_to_resume`.
    """

    application: str
    stream: str
    owner: str
    uptime_s: float
    leases: tuple[LeaseView, ...] = ()
    leases_elsewhere: int = 0
    leases_free: int = 0
    ended_total: int = 0
    records_departed: int = 0
    is_draining: bool = False
    has_leases: bool = True
    doing: str = ""
    leases_command: str | None = LEASES_COMMAND

    @property
    def records_total(self) -> int:
        """Records of the whole run, including those of shards that ended."""
        return sum(lease.records_total for lease in self.leases) + self.records_departed

    @property
    def records_per_s(self) -> float:
        return sum(lease.records_per_s for lease in self.leases)

    @property
    def lag_ms_max(self) -> int | None:
        """The lag of the shard that is furthest behind; None while no lag is known."""
        return max(
            (lease.lag_ms for lease in self.leases if lease.lag_ms is not None), default=None
        )


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shard in the report of a run.

    On the fleet, `first_position` and `last_position` are those of processed records; a restart
    reads records that were not checkpointed again, and counts them again. On Spark they bound the
    records of committed batches, `checkpoint` is the position in the checkpoint, `records` counts
    rows (None where this Spark cannot count them by shard) and `lag_ms` is the lag after the last
    batch.
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
    """The sums over all shards."""

    shards: int
    ended: int
    records: int
    bytes: int | None
    batches: int
    processing_seconds: float
    restarts: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, per shard and in total, as `--report FILE` writes it on both engines.

    The manager fills it from its lease processes, the Spark runner from its batches. None means
    "not known", never zero; a field that an engine does not have is left out.
    """

    application: str
    stream: str
    owner: str
    exit_reason: str
    seconds: float
    totals: Totals
    shards: Mapping[str, ShardReport]
