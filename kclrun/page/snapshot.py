"""The values that a page shows, and when they were read. Pure; readers make it, views show it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.shard import Shard
from kclrun.model.stream import display_name
from kclrun.model.text import escaped
from kclrun.model.time import Instant, WallTime
from kclrun.operating.doctor.findings import Finding
from kclrun.operating.summaries import (
    Lag,
    LagSummary,
    LeaseSummary,
    lag_summary,
    lease_summary,
    unended_parents,
)

# How urgent a row of a list is: an operator is needed; the lease does not move; it works; it ended.
URGENT, IDLE, WORKING, OVER = range(4)
_NOBODY: Final = OwnerId("kclrun::page:0")


class ShownOutput(msgspec.Struct, frozen=True):
    """An output of the settings: its name, its setting as errors name it, its destination without
    secrets, and how long a roll is open."""

    name: str
    setting: str
    where: str
    roll_s: float = 0.0


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The values that stay the same while the page runs. The commands name the table as its
    operator does.

    `plan` are the settings, in sections of names and values, without secrets. `letters` is where
    dead letters are, in words; empty if none are kept.
    """

    application: str
    streams: str
    table: str
    place: str
    leases_command: str
    doctor_command: str
    letters_command: str
    story_command: str = "kclrun why"
    unpause_command: str = "kclrun resume"
    letters: str = ""
    has_actions: bool = False
    refresh_s: int = 10
    outputs: tuple[ShownOutput, ...] = ()
    plan: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()

    def of_shard(self, command: str, key: str) -> str:
        """A command for one shard. A key is quoted, so that none becomes another command."""
        return f"{command} {shlex.quote(escaped(display_name(key)))}"


class ReadProblem(msgspec.Struct, frozen=True):
    """Why a value is not known, or is known only from an earlier reading."""

    about: str
    message: str
    since: WallTime


class Owners(msgspec.Struct, frozen=True):
    """The result of several scans: `silent` owners wrote none of their rows for a failover, and
    `expired` are the keys of those rows."""

    silent: frozenset[OwnerId] = frozenset()
    expired: frozenset[LeaseKey] = frozenset()


class ShardRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of shards: a lease, a shard without one, or a row that is broken. The
    lag is that of `taken_at`; with `is_lag_least` it may be larger."""

    key: str
    state: str
    owner: str = ""
    checkpoint: str = ""
    urgency: int = WORKING
    parents: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    note: str = ""
    lag: LagSummary | None = None
    is_lag_least: bool = False


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All values that were read until `taken_at`. None: not read yet; `findings` need two scans."""

    taken_at: WallTime
    table_at: WallTime | None = None
    lags_at: WallTime | None = None
    findings_at: WallTime | None = None
    leases: Mapping[str, Lease] = {}
    broken: Mapping[str, str] = {}
    shards: Mapping[str, Shard] = {}
    lags: Mapping[str, LagSummary] = {}
    history: Mapping[str, bytes] = {}
    owners: Owners = Owners()
    findings: tuple[Finding, ...] | None = None
    problems: tuple[ReadProblem, ...] = ()


def owners_seen(
    leases: tuple[Lease, ...], broken: Iterable[str], observation: Observation, now: Instant
) -> Owners:
    """The owners that write no more, by the counters of the scans so far [P9], as every manager
    judges them."""
    observation.update(leases, now)
    view = TableView(leases, tuple(broken), observation, me=_NOBODY, gone=frozenset(), now=now)
    return Owners(view.silent, view.expired)


def rows_of(snapshot: Snapshot) -> tuple[ShardRow, ...]:
    """Every lease, listed shard without one, and broken row, in the order of their keys."""
    rows = [
        _of_lease(lease_summary(lease, snapshot.taken_at), lease, snapshot)
        for lease in snapshot.leases.values()
    ]
    rows += [
        ShardRow(key=key, state="unreadable", urgency=URGENT, note=why)
        for key, why in snapshot.broken.items()
    ]
    rows += [
        ShardRow(
            key=lag.shard,
            state=lag.state,
            urgency=WORKING if _waits(lag.shard, snapshot) else IDLE,
            note=lag.note,
            lag=lag,
        )
        for lag in snapshot.lags.values()
        if lag.shard not in snapshot.leases and lag.shard not in snapshot.broken
    ]
    return tuple(sorted(rows, key=lambda row: row.key))


def _of_lease(line: LeaseSummary, lease: Lease, snapshot: Snapshot) -> ShardRow:
    lag, is_lag_least = _lag_now(line, lease, snapshot)
    waits = unended_parents(lease, snapshot.leases)
    is_expired = lease.key in snapshot.owners.expired
    if line.state == "ended":
        urgency = OVER
    elif line.state == "halted" or line.is_hopping:
        urgency = URGENT
    elif (
        is_expired or line.state == "paused" or (line.state in {"unowned", "offered"} and not waits)
    ):
        urgency = IDLE
    else:
        urgency = WORKING
    notes = [
        f"waits for {' and '.join(map(display_name, waits[:2]))}" if waits else "",
        "its owner is silent" if is_expired else "",
        line.halt_reason,
        line.note,
        "hopping: passed on again and again without a checkpoint" if line.is_hopping else "",
        "" if lag is None or lag.behind_s is not None else lag.note,
    ]
    return ShardRow(
        key=line.shard,
        state=line.state,
        owner="" if line.state == "offered" else line.owner,
        checkpoint=line.checkpoint,
        urgency=urgency,
        parents=line.parents,
        children=line.children,
        note="; ".join(note for note in notes if note),
        lag=lag if line.state != "ended" else None,
        is_lag_least=is_lag_least,
    )


def _lag_now(
    line: LeaseSummary, lease: Lease, snapshot: Snapshot
) -> tuple[LagSummary | None, bool]:
    """The lag of a lease at `taken_at`, and whether that is only the least that it can be.

    The checkpoint of a shard that is not read stands still: its oldest unread record grows older
    from one measurement to the next, and also while none succeeds. A halt whose lag is not known
    counts from the oldest record that is known to wait.
    """
    lag = snapshot.lags.get(line.shard)
    is_read = line.state == "owned" and lease.key not in snapshot.owners.expired
    if lag is not None and lag.behind_s is not None:
        is_known = is_read or lag.oldest_at is None or snapshot.lags_at is None
        return (lag if is_known else _aged(lag, snapshot)), False
    halt = lease.halt
    since = (halt.waiting_since or halt.halted_at) if halt is not None else None
    if not since:
        return lag, False
    waits = Lag(max(0.0, snapshot.taken_at - since), None, note=lag.note if lag else "")
    return lag_summary(
        shard=line.shard,
        state=line.state,
        owner=line.owner,
        checkpoint=line.checkpoint,
        lag=waits,
        retention_s=0.0,
        note="",
    ), True


def _aged(lag: LagSummary, snapshot: Snapshot) -> LagSummary:
    past_s = max(0.0, snapshot.taken_at - (snapshot.lags_at or snapshot.taken_at))
    left_s = lag.loss_in_s
    return msgspec.structs.replace(
        lag,
        behind_s=(lag.behind_s or 0.0) + past_s,
        loss_in_s=None if left_s is None else max(0.0, left_s - past_s),
    )


def _waits(key: str, snapshot: Snapshot) -> bool:
    """Whether a shard gets its lease only when its parents have ended."""
    shard = snapshot.shards.get(key)
    parents = (snapshot.leases.get(parent) for parent in (shard.parents if shard else ()))
    return any(parent is not None and not parent.is_ended for parent in parents)


def is_idle(row: ShardRow) -> bool:
    """Whether the shard has no owner although it could be read now."""
    return row.urgency == IDLE and row.state in {"unowned", "offered", "no lease"}


def most_urgent_first(row: ShardRow) -> tuple[int, float, str]:
    """The order of rows by urgency, then by their lag."""
    behind_s = row.lag.behind_s if row.lag is not None else None
    return row.urgency, -(behind_s or 0.0), row.key
