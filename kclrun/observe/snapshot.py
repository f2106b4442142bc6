"""What a manager shows of itself at one moment: plain values for the live table and the reports.

Filled by the manager from the status board and the lease rows; read by `cli/live_table.py`.
Rule: None means "not known", never zero; no payload, no key, no secret has a field here.
"""

from __future__ import annotations

import msgspec

__all__ = ["LeaseView", "Snapshot"]


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of this manager.

    `state` is one short word (starting, running, ending, ended, halted, backing off, waiting).
    `records_total` counts what the processor was given since this manager started, over restarts
    of the lease process; `records_per_s` is over the last few seconds. `lag_ms` is
    MillisBehindLatest of the last read. `note` says why a lease stands still, or is empty.
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

    `leases_elsewhere` counts leases that other owners hold, `leases_free` those that nobody does,
    `ended_total` the shards this manager has brought to their end, `records_departed` the records
    of leases it had and that are not in `leases` any more: ended, released or lost. Without leases
    (`has_leases`), on Spark, `leases` are the shards that are read.
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

    @property
    def records_total(self) -> int:
        """Of the whole run: a shard that ended does not take its records along."""
        return sum(lease.records_total for lease in self.leases) + self.records_departed

    @property
    def records_per_s(self) -> float:
        return sum(lease.records_per_s for lease in self.leases)

    @property
    def lag_ms_max(self) -> int | None:
        """The lag of the shard that is furthest behind; None while no shard has said."""
        return max(
            (lease.lag_ms for lease in self.leases if lease.lag_ms is not None), default=None
        )
