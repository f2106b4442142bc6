"""One lease that this manager holds: its states, and every step from one state to the next.

Holds data and the table of steps; `held_leases.py` decides. Rules: a step that the table does not
name is a bug of ours and raises; only states without a process may write the row [P5].

    taking ──taken──► waiting
    taking ──found halted──► halted
    taking ──not ours──► gone
    examining ──still ours──► backing off
    examining ──found halted──► halted
    examining ──to be halted──► halting
    examining ──not ours──► gone
    backing off ──pause over──► waiting
    backing off ──to be released──► releasing
    backing off ──not ours──► gone
    waiting ──parents over──► renewing before start
    waiting ──to be released──► releasing
    waiting ──not ours──► gone
    renewing before start ──started──► starting
    renewing before start ──to quarantine──► quarantined
    renewing before start ──to be released──► releasing
    renewing before start ──not ours──► gone
    quarantined ──quarantine over──► renewing before start
    quarantined ──found halted──► halted
    quarantined ──to be released──► releasing
    quarantined ──not ours──► gone
    starting ──claimed──► running
    starting ──told to drain──► draining
    starting ──not started──► backing off
    starting ──reported end──► exiting
    starting ──died──► examining
    running ──told to drain──► draining
    running ──reported end──► exiting
    running ──died──► examining
    draining ──not started──► backing off
    draining ──reported end──► exiting
    draining ──died──► examining
    exiting ──died──► examining
    exiting ──given up──► gone
    halting ──halted──► halted
    halting ──not ours──► gone
    halted ──resumed──► waiting
    halted ──to be released──► releasing
    halted ──not ours──► gone
    releasing ──released──► gone
    releasing ──not ours──► gone
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.leases.commands import Command, Note
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import is_nobody
from kclrun.model.lease import OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import (
    CreateLease,
    HaltLease,
    Offer,
    Release,
    Renew,
    Take,
    keys_of,
)

# L7 allows five restarts of a crash loop; the fifth death in a row is the last one that counts.
DEATHS_MAX: Final = 5
# Where there is not another host to try, two deaths more, after pauses of 8 and 16 s. So an
# accident of the host that lasts for half a minute is outlasted, and a poison record halts in 31 s
# instead of 7.
DEATHS_ALONE_MAX: Final = 7
# At once, after a second, after two. If a host lacks processes, memory or descriptors for longer,
# another host is likelier to have them.
FAILED_STARTS_MAX: Final = 3
_PAUSE_FIRST_S: Final = 1.0
# Long enough that a host short of memory recovers, short enough that an operator is not paged.
_PAUSE_MAX_S: Final = 30.0
# An idle shard has nothing to checkpoint, so a life as long as this counts as progress, too. It
# is four times the default `stall` (2 min): a process that does nothing was noticed long before.
_LONG_LIFE_S: Final = 480.0


class Verdict(enum.Enum):
    """The conclusion from the failures of a lease's processes here."""

    TRY_AGAIN = "try again here"
    GIVE_AWAY = "another host tries"
    HALT = "stand still until an operator resumes it"


class Restarts(msgspec.Struct):
    """The failures of one lease that this manager holds, and their consequences.

    `deaths` are crashes in a row without progress. `failed_starts` are starts in a row that failed
    because of our host or of kclrun itself.

    The process is started again at once the first time (most deaths are accidents), then slower and
    slower. A lease leaves a host that fails: three starts that failed in a row, or five deaths
    without progress, give the lease to another owner, if there is one. A failed start never halts a
    lease. Deaths halt it once a second host has counted five as well, or this host two more:
    because there is not another owner to try, or because the lease came back without progress. So a
    lease that kills every process stands still after ten deaths on two hosts, or twelve if it comes
    back to the first [L7]. Each of its hosts gives it away once at most, because the first host
    writes its slot on the row.

    A lack of memory, descriptors or disk in user code at a record counts as a death, too: another
    host may have enough, and a record that needs more than any host has must not move between hosts
    for ever.
    """

    deaths: int = 0
    failed_starts: int = 0
    _stops: int = 0
    _started_instant: Instant | None = None

    def started(self, now: Instant) -> None:
        self._started_instant = now

    def progressed(self) -> None:
        """The checkpoint moved, or an operator resumed the lease: all counts are reset."""
        self.deaths = 0
        self.failed_starts = 0
        self._stops = 0

    def crashed(self, now: Instant) -> None:
        """The process ended without a report: counts towards the halt."""
        self.stopped(now)
        self.deaths += 1

    def failed(self, now: Instant) -> None:
        """The process could not be started, did not claim before its start command expired, or
        ended because of a fault of its host or of kclrun itself."""
        self.stopped(now)
        self.failed_starts += 1

    def broke(self, now: Instant, *, at_records: bool) -> None:
        """The process ended because its host, or kclrun, lacked something. Before records this
        counts as a failed start; at records as a death, since one record may need more than any
        host has."""
        if at_records:
            self.crashed(now)
        else:
            self.failed(now)

    def stopped(self, now: Instant) -> None:
        """Its claim was refused, or it lost the lease: only delays the next start."""
        if self._started_instant is not None and now - self._started_instant >= _LONG_LIFE_S:
            self.progressed()
        self._started_instant = None
        self._stops += 1

    @property
    def has_tripped(self) -> bool:
        """Whether there were too many deaths for an accident."""
        return self.deaths >= DEATHS_MAX

    @property
    def started_instant(self) -> Instant | None:
        """When the running process was started; None if none runs."""
        return self._started_instant

    def verdict(self, *, slot: str, failed_slot: str | None, are_others: bool) -> Verdict:
        """The conclusion for our host `slot`. `failed_slot` is the host that the row names as the
        one where its processes died before, at the position where the row still stands.
        `are_others`: another owner can take the leases that we give away."""
        if self.has_tripped:
            if failed_slot not in {None, slot} or self.deaths >= DEATHS_ALONE_MAX:
                return Verdict.HALT
            if are_others and failed_slot is None:
                return Verdict.GIVE_AWAY
        is_failing = self.failed_starts >= FAILED_STARTS_MAX
        return Verdict.GIVE_AWAY if is_failing and are_others else Verdict.TRY_AGAIN

    @property
    def pause_s(self) -> float:
        """The pause before the next start: 0, then 1, 2, 4 … up to 30 seconds."""
        if self._stops <= 1:
            return 0.0
        return min(_PAUSE_MAX_S, _PAUSE_FIRST_S * 2.0 ** min(self._stops - 2, 16))


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


class Places:
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

    def __init__(self, leases_max: int, out: list[Command]) -> None:
        self._leases_max = leases_max
        self._out = out
        self.count = leases_max
        # The leases that ran at the last failure, or were proven to run since; and the failure's
        # reason.
        self.proven = leases_max
        self.reason = ""
        self.short_since: Instant | None = None
        self._expired_starts = 0
        self._step = 1
        self._pause_s = _FEWER_FIRST_S
        self._raised_instant: Instant | None = None
        self._raise_instant: Instant | None = None

    @property
    def is_short(self) -> bool:
        """Whether our host proved able to run fewer leases than we may hold."""
        return self._raise_instant is not None

    def failed(self, running: int, reason: str, now: Instant) -> None:
        """A lease is given away because its process could not be started or kept alive here."""
        if self._raised_instant is not None:
            self._pause_s = min(_FEWER_MAX_S, self._pause_s * 2)
            self._raised_instant = None
        if not self.is_short:
            note = Note("capacity_short", "warning")
            note.fields.update(leases=running, leases_max=self._leases_max, reason=reason)
            self._out.append(note)
            self.short_since = now
        self.count = self.proven = min(self.count, running)
        self.reason, self._step = reason, 1
        self._raise_instant = Instant(now + self._pause_s)

    def start_expired(self, running: int, reason: str, now: Instant) -> None:
        """A start command expired unclaimed. By then another owner has taken the lease, so a single
        lease of ours never counts to three. Therefore the count is over all leases of the host,
        until one is claimed."""
        self._expired_starts += 1
        if self._expired_starts >= FAILED_STARTS_MAX:
            self.failed(running, reason, now)

    def claimed(self) -> None:
        """A process claimed its lease in time."""
        self._expired_starts = 0

    def moved(self, started_instant: Instant | None, now: Instant) -> None:
        """A lease moved its checkpoint; its process was started at that instant."""
        since, started = self._raised_instant, started_instant
        if since is not None and started is not None and started >= since:
            self.proven = self.count
            self._raise(now)

    def tick(self, now: Instant) -> None:
        """Time passed: raise the number if that is due."""
        if self._raise_instant is not None and now >= self._raise_instant:
            self._raise(now)

    def _raise(self, now: Instant) -> None:
        self.count += self._step
        self._step *= 2
        self._raised_instant = now
        self._raise_instant = Instant(now + _FEWER_FIRST_S)
        if self.count >= self._leases_max:
            self.count = self.proven = self._leases_max
            self.reason, self.short_since = "", None
            self._pause_s = _FEWER_FIRST_S
            self._raised_instant = self._raise_instant = None
            self._out.append(Note("capacity_enough"))


class CapacityWatch:
    """Logs leases that are not taken [L1]. It sees scan after scan.

    Two states need an operator: `capacity_short`, this manager is full while leases are unclaimed;
    and `leases_left_unread`, some lease stood free for three failovers and no manager took it.
    Rule: one line for each change, none in between.
    """

    def __init__(self, policy: ManagerPolicy, out: list[Command]) -> None:
        self._leases_max = policy.leases_max
        self._out = out
        self._short_scans = 0
        self._left_unread = 0

    def after_scan(
        self, unread: Sequence[LeaseKey], unclaimed: int, *, held: int, is_short: bool
    ) -> None:
        """`unread` are the leases that were not taken in time; `unclaimed` counts the leases that
        are free now. `is_short`: `Places` has logged that our host can run no more leases."""
        self._note_left_unread(unread, held)
        if is_short:
            return
        if unclaimed > 0 and held >= self._leases_max:
            self._short_scans += 1
            if self._short_scans == _SCANS_IN_A_ROW:
                self._note("capacity_short", free=unclaimed, leases_max=self._leases_max)
        else:
            if self._short_scans >= _SCANS_IN_A_ROW:
                self._out.append(Note("capacity_enough"))
            self._short_scans = 0

    def _note_left_unread(self, keys: Sequence[LeaseKey], held: int) -> None:
        if len(keys) == self._left_unread:
            return
        self._left_unread = len(keys)
        if keys:
            named = ", ".join(sorted(keys)[:_KEYS_NAMED_MAX])
            self._note(
                "leases_left_unread",
                what=len(keys),
                keys=named,
                leases=held,
                leases_max=self._leases_max,
            )

    def _note(self, event: str, **fields: str | int) -> None:
        self._out.append(Note(event, "warning", fields={**fields}))


# The writes of a manager to a row that it holds. All name an owner and the counter seen, except
# the creation, which writes a row again that vanished while we held it.
HeldLeaseChange = Take | Renew | HaltLease | Release | Offer | CreateLease


class Fate(enum.Enum):
    """The conclusion from a row that was read after a write [P6].

    An unchanged counter means *still unknown*, because the write may yet arrive. The write can no
    longer apply only once the counter has moved. So a resend keeps its expected counter and applies
    at most once.
    """

    APPLIED = "it applied"
    UNMOVED = "the row is as it was: the write may still arrive"
    MISSING = "the row is ours, but what we wrote is not on it: issue it again, from this row"
    LOST = "the row belongs to somebody else, or to nobody"


class UnresolvedWrite(msgspec.Struct):
    """One change that was sent and not settled.

    `sent_instant` is that of the *earliest* attempt: any attempt may be the one that applies, and a
    permission counted from a later one would be too long [P7].
    """

    change: HeldLeaseChange
    sent_instant: Instant
    attempts: int = 1
    may_have_applied: bool = False


def judge(change: HeldLeaseChange, row: Lease, me: OwnerId) -> Fate:
    """Compare a row, read consistently, with a change whose outcome is not known."""
    if isinstance(change, Take):
        return _judge_take(change, row, me)
    if isinstance(change, CreateLease):
        return _judge_creation(change, row, me)
    if row.owner != me:
        return Fate.APPLIED if _was_given(change, row, me) else Fate.LOST
    if row.counter == change.seen_counter:
        return Fate.UNMOVED
    if isinstance(change, Renew):
        return Fate.APPLIED
    has_contents = isinstance(change, HaltLease) and row.halt == change.halt
    return Fate.APPLIED if has_contents else Fate.MISSING


def _judge_take(change: Take, row: Lease, me: OwnerId) -> Fate:
    if row.owner == me:
        return Fate.APPLIED
    is_as_seen = row.owner == change.seen_owner and row.counter == change.seen_counter
    return Fate.UNMOVED if is_as_seen else Fate.LOST


def _judge_creation(change: CreateLease, row: Lease, me: OwnerId) -> Fate:
    """Judge a creation: any row that is there makes a later arrival fail, so it is settled."""
    if row.owner != me:
        return Fate.LOST
    return Fate.APPLIED if row.counter == change.lease.counter else Fate.MISSING


def _was_given(change: HeldLeaseChange, row: Lease, me: OwnerId) -> bool:
    """Whether the row has no owner because of this very release or offer."""
    if isinstance(change, Offer):
        return row.owner == OFFERED and row.offered_by == me
    return isinstance(change, Release) and is_nobody(row.owner)


class State(enum.Enum):
    """The state of a lease that this manager holds."""

    TAKING = "taking"  # our take is under way
    EXAMINING = "examining"  # without a process; the row is being read
    BACKING_OFF = "backing off"  # ours; a pause before the next process
    WAITING = "waiting"  # ours; a parent is not ended, or not known to be
    RENEWING_BEFORE_START = (
        "renewing before start"  # ours; one more renewal applies before the start
    )
    QUARANTINED = "quarantined"  # taken by force; its former owner may still be at work [P18]
    STARTING = "starting"  # a start was requested; the process has not claimed yet
    RUNNING = "running"  # it claimed; only it writes the row
    DRAINING = "draining"  # it was asked to finish, release and exit
    EXITING = "exiting"  # it reported its end; its exit is not proven yet
    HALTING = "halting"  # the reason of the halt is being written
    HALTED = "halted"  # ours and renewed, not processed, until an operator resumes it
    RELEASING = "releasing"  # the release, or the offer, is under way
    GONE = "gone"  # not ours any more

    # By identity: each event looks at the states of all held leases, and the hash of an Enum is
    # Python code. Members are single, in every process.
    __hash__ = object.__hash__


class Step(enum.Enum):
    """A step of a lease from one state to the next."""

    TAKEN = "taken"
    FOUND_HALTED = "found halted"
    STILL_OURS = "still ours"
    PAUSE_OVER = "pause over"
    PARENTS_OVER = "parents over"
    TO_QUARANTINE = "to quarantine"
    QUARANTINE_OVER = "quarantine over"
    STARTED = "started"
    NOT_STARTED = "not started"
    CLAIMED = "claimed"
    TOLD_TO_DRAIN = "told to drain"
    REPORTED_END = "reported end"
    DIED = "died"
    GIVEN_UP = "given up"
    TO_BE_HALTED = "to be halted"
    HALTED = "halted"
    RESUMED = "resumed"
    TO_BE_RELEASED = "to be released"
    RELEASED = "released"
    NOT_OURS = "not ours"


WITH_PROCESS: Final = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.EXITING})

TRANSITIONS: Final[Mapping[State, Mapping[Step, State]]] = {
    State.TAKING: {
        Step.TAKEN: State.WAITING,
        Step.FOUND_HALTED: State.HALTED,
        Step.NOT_OURS: State.GONE,
    },
    State.EXAMINING: {
        Step.STILL_OURS: State.BACKING_OFF,
        Step.FOUND_HALTED: State.HALTED,
        Step.TO_BE_HALTED: State.HALTING,
        Step.NOT_OURS: State.GONE,
    },
    State.BACKING_OFF: {
        Step.PAUSE_OVER: State.WAITING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.WAITING: {
        Step.PARENTS_OVER: State.RENEWING_BEFORE_START,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.RENEWING_BEFORE_START: {
        Step.STARTED: State.STARTING,
        Step.TO_QUARANTINE: State.QUARANTINED,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.QUARANTINED: {
        Step.QUARANTINE_OVER: State.RENEWING_BEFORE_START,
        Step.FOUND_HALTED: State.HALTED,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.STARTING: {
        Step.CLAIMED: State.RUNNING,
        Step.TOLD_TO_DRAIN: State.DRAINING,
        Step.NOT_STARTED: State.BACKING_OFF,
        Step.REPORTED_END: State.EXITING,
        Step.DIED: State.EXAMINING,
    },
    State.RUNNING: {
        Step.TOLD_TO_DRAIN: State.DRAINING,
        Step.REPORTED_END: State.EXITING,
        Step.DIED: State.EXAMINING,
    },
    State.DRAINING: {
        Step.NOT_STARTED: State.BACKING_OFF,
        Step.REPORTED_END: State.EXITING,
        Step.DIED: State.EXAMINING,
    },
    State.EXITING: {
        Step.DIED: State.EXAMINING,
        Step.GIVEN_UP: State.GONE,
    },
    State.HALTING: {
        Step.HALTED: State.HALTED,
        Step.NOT_OURS: State.GONE,
    },
    State.HALTED: {
        Step.RESUMED: State.WAITING,
        Step.TO_BE_RELEASED: State.RELEASING,
        Step.NOT_OURS: State.GONE,
    },
    State.RELEASING: {
        Step.RELEASED: State.GONE,
        Step.NOT_OURS: State.GONE,
    },
    State.GONE: {},
}


class HeldLease(msgspec.Struct, kw_only=True):
    """All that we know about one lease that this manager holds.

    `row` is the row as last confirmed (None until the take applied). `is_proven`: a write of ours
    succeeded since the last process of this lease was proven to have ended, so a write that the
    process left in flight can no longer apply [P5]. `confirmed_instant` is when that write was
    sent. `misses` counts writes in a row that no success reply settled: the next ones are sent
    slower.
    `is_over`: the process ended or released the lease, acknowledged. `failure`: why the lease
    halts. `has_broken`: the process ends for a fault that is not the processor's; `has_starved`:
    that happened while user code was at records. `trouble`: the last error.
    `waiting_since` is the arrival time of the oldest record known not to be processed, or None.
    `ours_instant` is when we learned that the row is ours. `has_waited`: a failover has passed
    since then, and the row was read again [P18]. `was_restored`: the row vanished, and we wrote it
    again.
    """

    key: LeaseKey
    state: State
    row: Lease | None = None
    unresolved: UnresolvedWrite | None = None
    is_reading: bool = False
    misses: int = 0
    is_proven: bool = False
    confirmed_instant: Instant = Instant(0.0)
    renew_instant: Instant = Instant(0.0)
    rest_until: Instant = Instant(0.0)
    should_ask_parents: bool = True
    is_asking_parents: bool = False
    are_parents_over: bool = False
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    ours_instant: Instant | None = None
    has_waited: bool = False
    was_restored: bool = False
    is_over: bool = False
    failure: str | None = None
    waiting_since: WallTime | None = None
    has_broken: bool = False
    has_starved: bool = False
    trouble: str = ""

    def step(self, step: Step) -> None:
        """Move on. Raises: InvariantViolation if the table does not name the step here."""
        following = TRANSITIONS[self.state].get(step)
        if following is None:
            raise InvariantViolation(f"lease {self.key} cannot be {step.value}: {self.state.value}")
        self.state = following

    @property
    def has_process(self) -> bool:
        return self.state in WITH_PROCESS

    @property
    def counts_as_held(self) -> bool:
        """Whether it fills one of our places: not once it has ended, was given up or was lost."""
        return self.state is not State.GONE and not self.is_over

    def check(self) -> None:
        """The invariants of one held lease. Raises: InvariantViolation."""
        if self.state in WITH_PROCESS:
            if self.unresolved is not None:
                raise self._broken("has a write of ours under way")
            if self.is_reading:
                raise self._broken("has a read of ours under way")
            if self.row is None:
                raise self._broken("was started without a row")
            if not self.is_proven:
                raise self._broken("was started without a confirmed write")
            if not self.are_parents_over:
                raise self._broken("was started before its parents ended")
        elif self.unresolved is not None and keys_of(self.unresolved.change) != (self.key,):
            raise self._broken("has another lease's write")

    def _broken(self, complaint: str) -> InvariantViolation:
        return InvariantViolation(f"lease {self.key}, {self.state.value}, {complaint}")
