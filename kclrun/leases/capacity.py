"""How many leases our host can run, and which leases no owner takes.

Knows: starts and deaths on this host, and what a scan shows as not taken. Must not know: rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kclrun.leases.commands import Note
from kclrun.leases.restarts import FAILED_STARTS_MAX
from kclrun.model.lease import LeaseKey
from kclrun.model.time import Instant

# One scan may show leases that another manager is taking at that moment; three in a row do not.
_SCANS_IN_A_ROW: Final = 3
_KEYS_NAMED_MAX: Final = 10
# A full disk or a burst of processes lasts at least half a minute. Each try that fails costs one
# lease a few seconds of reading, so a host that stays sick tries every 8 minutes.
_FEWER_FIRST_S: Final = 30.0
_FEWER_MAX_S: Final = 480.0
# From the last failure until a host may hold all of `leases.max` again: the longest pause, and ten
# more steps (1, 2, 4 ... 512) for 1,024 leases.
RECOVERY_MAX_S: Final = _FEWER_MAX_S + 10 * _FEWER_FIRST_S
# Leases that stood free for three failovers are tried by a host that failed, too, as many at a
# time as a manager takes at its start. No other owner has room for them, so nothing is lost.
STRETCH: Final = 8


class HostCapacity:
    """How many leases our host proves able to run: `leases_max` until it fails.

    `leases.max` bounds the leases that we hold, and so does this number. Without it, a manager that
    cannot start processes, or cannot keep them alive, would hold its share of the fleet's leases
    and read none of them. Other owners take the leases that it gave away; it gets back to its share
    step by step [L1].

    After a failure the number is the count of running leases. After a pause it rises by one, and
    while nothing fails by two, four and so on, each after half a minute, or at once when a lease
    that was tried since the last rise moved its checkpoint. A try that fails doubles the pause.
    Times are those of `now`.
    """

    def __init__(self, leases_max: int) -> None:
        self._leases_max = leases_max
        self.count = leases_max
        # The leases that ran at the last failure, or were proven to run since; and the failure's
        # reason.
        self.proven = leases_max
        self.reason = ""
        # Whether our host proved able to run fewer leases than we may hold.
        self.is_short = False
        self.short_since: Instant | None = None
        self._expired_starts = 0
        self._step = 1
        self._pause_s = _FEWER_FIRST_S
        self._raised_instant: Instant | None = None
        self._raise_instant: Instant | None = None

    def failed(self, running: int, reason: str, now: Instant) -> list[Note]:
        """A lease is given away because its process could not be started or kept alive here."""
        if self._raised_instant is not None:
            self._pause_s = min(_FEWER_MAX_S, self._pause_s * 2)
            self._raised_instant = None
        notes = []
        if not self.is_short:
            note = Note("capacity_short", "warning")
            note.fields.update(leases=running, leases_max=self._leases_max, reason=reason)
            notes.append(note)
            self.is_short, self.short_since = True, now
        self.count = self.proven = min(self.count, running)
        self.reason, self._step = reason, 1
        self._raise_instant = Instant(now + self._pause_s)
        return notes

    def start_expired(self, running: int, reason: str, now: Instant) -> list[Note]:
        """A start command expired unclaimed. By then another owner has taken the lease, so a single
        lease of ours never counts to three. Therefore the count is over all leases of the host,
        until one is claimed."""
        self._expired_starts += 1
        if self._expired_starts >= FAILED_STARTS_MAX:
            return self.failed(running, reason, now)
        return []

    def claimed(self) -> None:
        """A process claimed its lease in time."""
        self._expired_starts = 0

    def moved(self, started_instant: Instant | None, now: Instant) -> list[Note]:
        """A lease moved its checkpoint; its process was started at that instant."""
        since, started = self._raised_instant, started_instant
        if since is not None and started is not None and started >= since:
            self.proven = self.count
            return self._raise(now)
        return []

    def tick(self, now: Instant) -> list[Note]:
        """Time passed: raise the number if that is due."""
        if self._raise_instant is not None and now >= self._raise_instant:
            return self._raise(now)
        return []

    def _raise(self, now: Instant) -> list[Note]:
        self.count += self._step
        self._step *= 2
        self._raised_instant = now
        self._raise_instant = Instant(now + _FEWER_FIRST_S)
        if self.count >= self._leases_max:
            self.count = self.proven = self._leases_max
            self.reason, self.is_short, self.short_since = "", False, None
            self._pause_s = _FEWER_FIRST_S
            self._raised_instant = self._raise_instant = None
            return [Note("capacity_enough")]
        return []


class CapacityWatch:
    """Logs leases that are not taken [L1]. It sees scan after scan.

    Two states need an operator: `capacity_short`, this manager is full while leases are unclaimed;
    and `leases_left_unread`, some lease stood free for three failovers and no manager took it.
    Rule: one line for each change, none in between.
    """

    def __init__(self, leases_max: int) -> None:
        self._leases_max = leases_max
        self._short_scans = 0
        self._left_unread = 0

    def after_scan(
        self, unread: Sequence[LeaseKey], unclaimed: int, *, held: int, is_short: bool
    ) -> list[Note]:
        """`unread` are the leases that were not taken in time; `unclaimed` counts the leases that
        are free now. `is_short`: `HostCapacity` has logged that our host can run no more leases."""
        notes = []
        if len(unread) != self._left_unread:
            self._left_unread = len(unread)
            if unread:
                named = ", ".join(sorted(unread)[:_KEYS_NAMED_MAX])
                note = Note("leases_left_unread", "warning")
                note.fields.update(
                    what=len(unread), keys=named, leases=held, leases_max=self._leases_max
                )
                notes.append(note)
        if is_short:
            return notes
        if unclaimed > 0 and held >= self._leases_max:
            self._short_scans += 1
            if self._short_scans == _SCANS_IN_A_ROW:
                fields = {"free": unclaimed, "leases_max": self._leases_max}
                notes.append(Note("capacity_short", "warning", fields={**fields}))
        else:
            if self._short_scans >= _SCANS_IN_A_ROW:
                notes.append(Note("capacity_enough"))
            self._short_scans = 0
        return notes
