"""The health of a manager, from its own sample: a verdict with its reasons.

Pure: the sample and its age are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from kclrun.observe.logs import clean_text
from kclrun.observe.sample import LeaseSample, ManagerSample, how_to_resume, how_to_unpause
from kclrun.traffic.hot_keys import ShardHeat
from kclrun.traffic.hot_shards import HotShard

Status = Literal["ok", "starting", "draining", "degraded", "failing"]

# One lease may be stopped by its own records; two at once rarely are.
_STILL_LEASES_MIN: Final = 2
# Enough for an exception's class and message. It is cleaned as for the log, for it is of user code.
_NOTE_CHARACTERS_MAX: Final = 400
_MODE_CHARACTERS_MAX: Final = 64


class HealthLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The longest times. `stall_s` is how long a lease that should advance may stand still.

    `look_age_max_s` is the `failover`, 10 s at least: a manager that did not look for so long
    renews nothing. `drain_max_s` is the longest duration of a stop. `output_lag_max_s` is how long
    rows may wait for an output, its roll included.
    """

    stall_s: float
    look_age_max_s: float
    drain_max_s: float
    output_lag_max_s: float


class HealthReason(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `is_failing` makes it a 503."""

    text: str
    is_failing: bool = False
    shard: str | None = None


class HealthVerdict(msgspec.Struct, frozen=True):
    """The state of a manager and its problems; the reasons that make it fail come first."""

    status: Status
    reasons: tuple[HealthReason, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether /health answers 200."""
        return self.status != "failing"


def judge(sample: ManagerSample | None, *, age_s: float, limits: HealthLimits) -> HealthVerdict:
    """The verdict on the last sample, taken `age_s` ago.

    Before the first sample it is None, and `age_s` counts from the start of the manager.

    Health means progress, not existence, and 503 means that another machine would do better. So
    these are failing: a manager that does not look any more, that cannot reach its table or stream,
    that cannot start lease processes or keep one alive, or whose stop does not end; and leases that
    do not advance, all of them and at least two, after a restart did not help.
    One lease that does not advance, or is halted, is degraded and answers 200: its own records are
    the likely cause, and would stop the next machine, too. So would a destination that fails. A
    paused lease is degraded, never stalled. The metrics and the log show such a lease. Idle is
    healthy: with fewer shards than machines, some machines have no lease.
    """
    if sample is None or age_s >= limits.look_age_max_s:
        return _unseen(sample, age_s, limits)
    reasons = sorted(_reasons(sample, limits), key=lambda reason: not reason.is_failing)
    return HealthVerdict(_status(sample, reasons), tuple(reasons))


def _unseen(sample: ManagerSample | None, age_s: float, limits: HealthLimits) -> HealthVerdict:
    is_starting = sample is None and age_s < limits.stall_s
    text = f"the manager has not looked after its leases for {age_s:.0f} s"
    if is_starting:
        return HealthVerdict("starting", (HealthReason(text="the manager is starting"),))
    return HealthVerdict("failing", (HealthReason(text=text, is_failing=True),))


def _status(sample: ManagerSample, reasons: list[HealthReason]) -> Status:
    if any(reason.is_failing for reason in reasons):
        return "failing"
    if sample.draining_s is not None:
        return "draining"
    if sample.total_leases is None:
        return "starting"
    return "degraded" if reasons else "ok"


def _reasons(sample: ManagerSample, limits: HealthLimits) -> Iterator[HealthReason]:
    if sample.draining_s is not None:
        yield HealthReason(
            text=f"a stop has been under way for {sample.draining_s:.0f} s",
            is_failing=sample.draining_s >= limits.drain_max_s,
        )
    elif sample.total_leases is None:
        yield HealthReason(
            text=f"the lease table has not been read yet, {sample.uptime_s:.0f} s after the start",
            is_failing=sample.uptime_s >= limits.stall_s,
        )
    for outage in sample.outages:
        yield HealthReason(
            text=f"{outage.operation}: failing for {outage.lasted_s:.0f} s: {outage.error}",
            is_failing=outage.is_vital and outage.lasted_s >= limits.stall_s,
        )
    if sample.launcher_away_s is not None:
        yield HealthReason(
            text=f"no lease process can be started for {sample.launcher_away_s:.0f} s",
            is_failing=sample.launcher_away_s >= limits.stall_s,
        )
    if sample.native_mode is not None:
        mode = clean_text(sample.native_mode, _MODE_CHARACTERS_MAX)
        yield HealthReason(
            text=f"a KCL 3 fleet has the lease table in its own mode ({mode}): the next start of"
            " kclrun is refused until that is undone"
        )
    if sample.host_short_s is not None:
        why = clean_text(sample.host_reason, _NOTE_CHARACTERS_MAX)
        yield HealthReason(
            text=f"this host runs {sample.host_runs} leases, of {sample.worker_leases_max} at most,"
            f" and has given others away for {sample.host_short_s:.0f} s: {why}",
            is_failing=sample.host_runs == 0 and sample.host_short_s >= limits.stall_s,
        )
    yield from _of_leases(sample, limits)


def _of_leases(sample: ManagerSample, limits: HealthLimits) -> Iterator[HealthReason]:
    should_move = [
        lease
        for lease in sample.leases
        if lease.still_s is not None and lease.destination_away_s is None
    ]
    # A stalled process is restarted after `stall`: after twice that time, the restart did not help.
    is_hopeless = len(should_move) >= _STILL_LEASES_MIN and all(
        (lease.still_s or 0.0) >= 2 * limits.stall_s for lease in should_move
    )
    if is_hopeless:
        yield HealthReason(
            text=f"none of {len(should_move)} leases has made progress for"
            f" {2 * limits.stall_s:.0f} s",
            is_failing=True,
        )
    for lease in sample.leases:
        if lease.state == "halted":
            remedy = how_to_resume(sample.leases_command, lease.shard)
            yield HealthReason(text=f"{_with_note('halted', lease)}; {remedy}", shard=lease.shard)
        elif lease.state == "paused":
            remedy = how_to_unpause(sample.leases_command, lease.shard)
            yield HealthReason(text=f"{_note(lease)}; {remedy}", shard=lease.shard)
        elif lease.state == "running" and lease.note:  # no page of it is read
            text = lease.state if lease.lag_ms else f"{lease.state}, and its lag is not known"
            yield HealthReason(text=_with_note(text, lease), shard=lease.shard)
        elif lease.still_s is not None and lease.still_s >= limits.stall_s:
            text = f"{lease.state}, and no progress for {lease.still_s:.0f} s"
            yield HealthReason(text=_with_note(text, lease), shard=lease.shard)
        elif lease.state in {"backing off", "failing"} or (
            lease.state == "waiting" and lease.destination_away_s is not None
        ):
            yield HealthReason(text=_with_note(lease.state, lease), shard=lease.shard)
        elif (lag_s := (lease.output_lag_ms or 0) / 1000) >= limits.output_lag_max_s:
            text = (
                f"rows have waited for an output for {lag_s:.0f} s, and no checkpoint passes them"
            )
            yield HealthReason(text=f"{text}; the log says which one and why", shard=lease.shard)


def _with_note(text: str, lease: LeaseSample) -> str:
    return f"{text}: {_note(lease)}" if lease.note else text


def _note(lease: LeaseSample) -> str:
    return clean_text(lease.note, _NOTE_CHARACTERS_MAX)


def health_body(sample: ManagerSample | None, verdict: HealthVerdict) -> dict[str, Any]:
    """The body of /health as plain values for JSON."""
    body: dict[str, Any] = {
        "status": verdict.status,
        "reasons": [
            {"text": reason.text} | ({"shard": reason.shard} if reason.shard else {})
            for reason in verdict.reasons
        ],
    }
    if sample is None:
        return body
    return body | {
        "application": sample.application,
        "stream": sample.stream,
        "owner": sample.owner,
        "uptime_s": round(sample.uptime_s, 1),
        "leases": [msgspec.to_builtins(_lease_body(lease)) for lease in sample.leases],
    }


class KeyBody(msgspec.Struct, frozen=True):
    """A heavy key in /health. Never its text, which is the users' data."""

    hash_key: str
    share: float


class TrafficBody(msgspec.Struct, frozen=True):
    """The traffic of a shard in /health; `load` is the share of what a shard takes, and `error`
    that of the shares of the keys. The other values are those of `ShardHeat`."""

    in_bytes_per_s: float
    in_records_per_s: float
    load: float
    read_bytes_per_s: float
    throttled: float
    covered_s: float
    error: float
    keys: tuple[KeyBody, ...]


class LeaseBody(msgspec.Struct, frozen=True):
    """A lease in /health."""

    shard: str
    state: str
    still_s: float | None = None
    destination_away_s: float | None = None
    lag_ms: int | None = None
    output_lag_ms: int | None = None
    restarts: int = 0
    note: str = ""
    traffic: TrafficBody | None = None
    hot: HotShard | None = None


def _lease_body(lease: LeaseSample) -> LeaseBody:
    return LeaseBody(
        shard=lease.shard,
        state=lease.state,
        still_s=round(lease.still_s, 1) if lease.still_s is not None else None,
        destination_away_s=(
            round(lease.destination_away_s, 1) if lease.destination_away_s is not None else None
        ),
        lag_ms=lease.lag_ms,
        output_lag_ms=lease.output_lag_ms,
        restarts=lease.restarts,
        note=_note(lease),
        traffic=traffic_body(lease.heat) if lease.heat is not None else None,
        hot=lease.hot,
    )


def traffic_body(heat: ShardHeat) -> TrafficBody:
    """The traffic of a shard as its answers show it, rounded."""
    return TrafficBody(
        in_bytes_per_s=round(heat.in_bytes_per_s, 1),
        in_records_per_s=round(heat.in_records_per_s, 2),
        load=round(heat.load, 4),
        read_bytes_per_s=round(heat.read_bytes_per_s, 1),
        throttled=round(heat.throttled, 4),
        covered_s=round(heat.covered_s, 1),
        error=round(heat.error, 4),
        keys=tuple(KeyBody(key.hash_key, round(key.share, 4)) for key in heat.keys),
    )
