"""The lines about leases that people read: the state of a row in a word, its lag, positions and
times in short. `kclrun leases`, `kclrun lag` and `kclrun page` show the same.

They hold only values that were read. A checkpoint has no time, and none is guessed from its digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kclrun.model.lease import ANYBODY, OFFERED, Lease, Owner
from kclrun.model.sequence import AT_TIMESTAMP, LATEST
from kclrun.model.time import WallTime, utc_text

_LONG_NUMBER: Final = re.compile(r"\b(\d{5})\d{20,}(\d{6})\b")


class LeaseSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One printed lease. `state`: ended, halted, paused, unowned, offered or owned. A pause that
    is over is not shown; one on a halted lease, or on one without an owner, is in `note`.
    `starts_at`: the instant, in seconds since 1970, that a checkpoint LATEST or AT_TIMESTAMP
    stands for.

    `is_renewed` None is "not watched". The loads are those of the row: KiB/s, and the share of a
    core; None before they were measured.
    """

    shard: str
    state: str
    owner: str
    group: str
    checkpoint: str
    counter: int
    owner_switches: int
    is_hopping: bool
    halt_reason: str = ""
    parents: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    is_renewed: bool | None = None
    load_kbps: float | None = None
    load_cpu: float | None = None
    note: str = ""
    starts_at: float | None = None


def lease_summary(lease: Lease, now: WallTime) -> LeaseSummary:
    """The line of one row. `now` judges a pause."""
    pause = lease.pause
    is_paused = pause is not None and pause.stands_at(now) and not lease.is_ended
    paused = pause.in_words() if pause is not None and is_paused else ""
    owner = Owner.parse(lease.owner) if lease.owner is not None else None
    return LeaseSummary(
        shard=lease.key,
        state=_state(lease, is_paused=is_paused),
        owner=lease.owner or "",
        group=owner.group if owner is not None else "",
        checkpoint=str(lease.checkpoint),
        counter=lease.counter,
        owner_switches=lease.owner_switches,
        is_hopping=lease.is_hopping,
        halt_reason=lease.halt.reason if lease.halt is not None else "",
        parents=tuple(sorted(lease.parents)),
        children=tuple(sorted(lease.children)),
        load_kbps=lease.load.kbps if lease.load is not None else None,
        load_cpu=lease.load.cpu if lease.load is not None else None,
        note="; ".join(note for note in (paused, _hand_off(lease)) if note),
        starts_at=_starts_at(lease),
    )


def _starts_at(lease: Lease) -> float | None:
    at = lease.checkpoint
    if at == LATEST:
        return lease.latest_pinned_at
    is_instant = at.sequence_number == AT_TIMESTAMP.sequence_number and at.sub_sequence_number
    return at.sub_sequence_number / 1000 if is_instant else None


def _state(lease: Lease, *, is_paused: bool) -> str:
    if lease.is_ended:
        return "ended"
    if lease.halt is not None:
        return "halted"
    if lease.owner == OFFERED:
        return "offered"
    if is_paused and lease.owner is not None and Owner.parse(lease.owner) is not None:
        return "paused"
    return "unowned" if lease.owner is None else "owned"


def _hand_off(lease: Lease) -> str:
    """The state of a handoff, from the row."""
    if lease.owner == OFFERED:
        giver = f"given away by {lease.offered_by}" if lease.offered_by else "given away"
        return f"{giver}, meant for {lease.offered_to}" if lease.offered_to else giver
    if lease.handoff is None:
        return ""
    asker = "an operator" if lease.handoff.to == ANYBODY else lease.handoff.to
    return f"asked for by {asker}"


def shortened(checkpoint: str) -> str:
    """`49671…8322`: both ends identify a position within a shard; --json has all digits."""
    digits, slash, sub = checkpoint.partition("/")
    if not digits.isdecimal() or len(digits) <= 12:
        return checkpoint
    return f"{digits[:5]}…{digits[-6:]}{slash}{sub}"


def names_position(named: str, position: str) -> bool:
    """Whether `named` is a short form of a position, or of its sequence number: `49671…8322` as in
    lists (three dots do as well), its beginning, or its end."""
    head, dots, tail = named.replace("...", "…").partition("…")
    forms = {position, position.partition("/")[0]}
    if dots:
        return any(
            len(head) + len(tail) <= len(form) and form.startswith(head) and form.endswith(tail)
            for form in forms
        )
    return any(form.startswith(named) or form.endswith(named) for form in forms)


def with_short_positions(text: str) -> str:
    """A sentence with its sequence numbers in short: they have 56 digits, and say nothing more to a
    reader."""
    return _LONG_NUMBER.sub(r"\1…\2", text)


def host_of(owner: str) -> str:
    """Group and host slot of one of our owners; of another, its id."""
    parsed = Owner.parse(owner)
    return owner if parsed is None else f"{parsed.group} {parsed.slot}".lstrip()


def on_one_line(text: str) -> str:
    """A text of several lines as one, in which none of its words is missing."""
    return " ".join(text.split())


def unended_parents(lease: Lease, leases: Mapping[str, Lease]) -> tuple[str, ...]:
    """The parents that must end before this lease may be read."""
    return tuple(
        parent
        for parent in sorted(lease.parents)
        if parent in leases and not leases[parent].is_ended
    )


class Lag(msgspec.Struct, frozen=True):
    """The lag of a position. `behind_s` None is "unknown", and `note` has the reason.

    The lag is the age of the oldest record above the checkpoint, by the service's clock. A reader
    of the results waits for this record, and retention will trim it. Only the checkpoint is known
    here, so an application that is up to date has a lag of up to `checkpoint.every`.

    `oldest_at` is the arrival of the oldest record above the position, None if it does not exist or
    was not found; `is_trimmed`: records above the position may be trimmed already.
    """

    behind_s: float | None
    oldest_at: WallTime | None = None
    is_trimmed: bool = False
    note: str = ""


class LagSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One shard. Times are in seconds. None is unknown; for `loss_in_s` also "nothing to lose"."""

    shard: str
    state: str
    owner: str
    checkpoint: str
    behind_s: float | None
    oldest_at: str | None
    loss_in_s: float | None
    is_trimmed: bool
    note: str


def lag_summary(
    *, shard: str, state: str, owner: str, checkpoint: str, lag: Lag, retention_s: float, note: str
) -> LagSummary:
    """The line of a measured lag, with the time to loss by the stream's retention."""
    oldest_at = lag.oldest_at
    loss_in_s = None
    if oldest_at is not None and lag.behind_s is not None:
        loss_in_s = 0.0 if lag.is_trimmed else max(0.0, retention_s - lag.behind_s)
    return LagSummary(
        shard=shard,
        state=state,
        owner=owner,
        checkpoint=checkpoint,
        behind_s=None if lag.behind_s is None else round(lag.behind_s, 3),
        oldest_at=None if oldest_at is None else utc_text(oldest_at, "milliseconds"),
        loss_in_s=None if loss_in_s is None else round(loss_in_s, 3),
        is_trimmed=lag.is_trimmed,
        note="; ".join(part for part in (note, lag.note) if part),
    )


def worst(lines: Sequence[LagSummary]) -> LagSummary | None:
    """The line with the largest known lag."""
    known = [line for line in lines if line.behind_s is not None]
    return max(known, key=lambda line: line.behind_s or 0.0, default=None)


def soonest(lines: Sequence[LagSummary]) -> LagSummary | None:
    """The line whose records are lost first."""
    known = [line for line in lines if line.loss_in_s is not None]
    return min(known, key=lambda line: line.loss_in_s or 0.0, default=None)


def duration_text(seconds: float | None) -> str:
    """In two units at most: `0.4s`, `12s`, `4m 10s`, `1h 3m`, `2d 4h`; `?` if unknown."""
    if seconds is None:
        return "?"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit_s, unit, smaller_s, smaller in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= unit_s:
            rest = whole % unit_s // smaller_s
            return (
                f"{whole // unit_s}{unit} {rest}{smaller}" if rest else f"{whole // unit_s}{unit}"
            )
    return f"{whole}s"
