"""The sample of a manager at one moment, and the report of a run: plain values.

None means "not known", never zero. No field holds a payload, a key or a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from kclrun.traffic.hot_keys import ShardHeat
from kclrun.traffic.hot_shards import HotShard

# Used if the configuration file of the application is not known.
LEASES_COMMAND: Final = "kclrun leases --config FILE"


def how_to_resume(leases_command: str | None, shard: str) -> str:
    """How an operator resumes a halted shard, in words.

    `leases_command` is `kclrun leases` with the options that reach the table; None if the table
    exists only during the run, as in the embedded AWS.
    """
    if leases_command is None:
        return "fix the cause, then run the application again"
    return f"fix the cause, then: {leases_command} resume {shard} --yes"


def how_to_unpause(leases_command: str | None, shard: str) -> str:
    """How an operator ends the pause of a shard, in words. `leases_command` as above."""
    if leases_command is None:
        return "it goes on when the pause is over"
    command = leases_command.replace(" leases", " resume", 1)
    return f"to go on: {command} {shard} --yes"


class LeaseSample(msgspec.Struct, frozen=True, kw_only=True):
    """One lease of a manager; on Spark, one shard that is read.

    `state` is one short word (starting, running, failing, ending, ended, halted, paused, backing
    off, waiting). Failing: user code raised, and the call is repeated. Waiting: for the end of its
    parents, or, with `destination_away_s`, for a destination.
    `records_total` and `bytes_total` count the records that the processor returned for since this
    manager started, over restarts of the lease process; `LeaseStatus` defines the other totals.
    `records_per_s` is over the last few samples. `lag_ms` is `millis_behind_latest` of
    `metrics.py`, `output_lag_ms` is `output_lag`, None while no row waits. `still_s` is the time
    without progress; None while no progress is expected (its parents are not ended, or it is halted
    or paused). `destination_away_s` is the time since an output, the store of the state or the
    place of dead letters began to fail; None while all answer. `cpu_percent` and `memory_bytes` are
    measured for the live table only. `note` says why a lease does not advance, or is empty. `heat`
    is the traffic of the shard, None while it is not known; `hot` is set while the shard is hot.
    """

    shard: str
    state: str
    records_total: int = 0
    bytes_total: int = 0
    retries_total: int = 0
    dead_letters_total: int = 0
    skipped_total: int = 0
    output_lag_ms: int | None = None
    records_per_s: float = 0.0
    lag_ms: int | None = None
    still_s: float | None = None
    destination_away_s: float | None = None
    restarts: int = 0
    pid: int | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    note: str = ""
    heat: ShardHeat | None = None
    hot: HotShard | None = None

    @property
    def given_up_total(self) -> int:
        return self.dead_letters_total + self.skipped_total

    @property
    def counted(self) -> dict[str, int]:
        """The counts, by the names of their metrics."""
        return {
            "records": self.records_total,
            "bytes": self.bytes_total,
            "retries": self.retries_total,
            "dead_letters": self.dead_letters_total,
            "skipped": self.skipped_total,
        }


class OutageSample(msgspec.Struct, frozen=True):
    """A request that fails and is repeated until it works, and the time since it began to fail.

    Without a vital request, leases are lost; without another one, they are only slower.
    """

    operation: str
    error: str
    lasted_s: float
    is_vital: bool = True


class ManagerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One manager at one moment: for the live table, the metrics and /health.

    `uptime_s` counts from its start. The totals are those of the last scan and listing; None
    before. `needed_workers` is that of `traffic/scaling.py`. `leases_elsewhere` counts leases of
    other owners, `leases_free` leases without an owner, `ended_total` the shards that this manager
    has read to their end. `records_departed` counts the records of leases that it had and that are
    not in `leases` any more: ended, released or lost. `given_up_total` counts the dead letters and
    the skipped records of all of them.

    The times are None while their condition does not hold: `draining_s` is the time since a stop
    began, until all leases are given away; `launcher_away_s` is the time since no lease process
    could be started; `host_short_s` is the time since the host could run only `host_runs` leases,
    because of `host_reason`, and got no more. `native_mode` is the state of a KCL 3 fleet that uses
    this table in a protocol that we do not share any more. `unpublished_total` counts the data
    points that could not be published, and were dropped.

    Without leases (`has_leases`), on Spark, `leases` are the shards that are read. `doing` says in
    a few words which event the run waits for while no shard is shown. `leases_command` is for
    `how_to_resume`.
    """

    application: str
    stream: str
    owner: str
    uptime_s: float
    total_leases: int | None = None
    total_shards: int | None = None
    unclaimed_leases: int | None = None
    worker_leases: int = 0
    worker_leases_max: int = 0
    needed_workers: int | None = None
    leases: tuple[LeaseSample, ...] = ()
    leases_elsewhere: int = 0
    leases_free: int = 0
    ended_total: int = 0
    records_departed: int = 0
    given_up_total: int = 0
    outages: tuple[OutageSample, ...] = ()
    launcher_away_s: float | None = None
    host_short_s: float | None = None
    host_runs: int = 0
    host_reason: str = ""
    is_draining: bool = False
    draining_s: float | None = None
    native_mode: str | None = None
    unpublished_total: int = 0
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

    @property
    def lags_unknown(self) -> int:
        """The number of shards that should be read, and whose lag is not known."""
        return sum(lease.lag_ms is None and lease.still_s is not None for lease in self.leases)

    @property
    def of_fleet(self) -> dict[str, int]:
        """The metrics that do not belong to a single lease, as far as they are known."""
        values = {
            "total_leases": self.total_leases,
            "total_shards": self.total_shards,
            "unclaimed_leases": self.unclaimed_leases,
            "worker_leases": self.worker_leases,
            "halted_leases": sum(lease.state == "halted" for lease in self.leases),
            "paused_leases": sum(lease.state == "paused" for lease in self.leases),
            "hot_leases": sum(lease.hot is not None for lease in self.leases),
            "needed_workers": self.needed_workers,
        }
        return {name: value for name, value in values.items() if value is not None}


class ShardReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shard in the report of a run.

    On the fleet, `first_position` and `last_position` are those of processed records; a restart
    reads records that were not checkpointed again, and counts them again. On Spark they bound the
    records of committed batches, `checkpoint` is the position in the checkpoint, `records` counts
    rows (None where this Spark cannot count them by shard) and `lag_ms` is the lag after the last
    batch. `passed_over` counts records of other keys than those of a replay.
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
    retries: int | UnsetType = UNSET
    dead_letters: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET
    passed_over: int | UnsetType = UNSET
    lag_ms: int | UnsetType | None = UNSET

    @property
    def counted(self) -> dict[str, int]:
        """The counts, by the names of their metrics."""
        return {
            "records": self.records or 0,
            "bytes": self.bytes or 0,
            "retries": self.retries or 0,
            "dead_letters": self.dead_letters or 0,
            "skipped": self.skipped or 0,
        }


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """The sums over all shards."""

    shards: int
    ended: int
    records: int
    bytes: int | None
    batches: int
    processing_seconds: float
    restarts: int
    retries: int | UnsetType = UNSET
    dead_letters: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET
    passed_over: int | UnsetType = UNSET


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
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
