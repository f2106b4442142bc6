"""The kinds of errors in a lease table, how grave each is, and what it means for the records.

Rule: an error never occurs in a healthy table, at no stage of a reshard; a warning is a delay or a
setting; a note is only worth knowing.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from kclrun.leases.shard_sync import Listing
from kclrun.leases.table_view import Observation, TableView, is_unowned
from kclrun.model.lease import ASK_STALE_AFTER_S, Lease, LeaseKey, Owner, OwnerId
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream import StreamKey, display_name, stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.protocol.writes import (
    Amend,
    Claim,
    CreateLease,
    DeleteTrimmed,
    NameChildren,
    Release,
    ResumeLease,
    Take,
    keys_of,
)

# All changes that a repair may write.
RepairingChange = (
    CreateLease | DeleteTrimmed | Take | Claim | NameChildren | Amend | Release | ResumeLease
)


class Gravity(enum.IntEnum):
    """How serious a finding is. ERROR: records are lost, doubled, out of order or never read."""

    ERROR = 0
    WARNING = 1
    NOTE = 2


class Kind(enum.Enum):
    """The kind of an error; `means` describes its effect on the records."""

    HOLE = "hole"
    CHILD_MISSING = "child-missing"
    CHILD_UNKNOWN = "child-unknown"
    ENDED_OPEN = "ended-open"
    BEGUN_EARLY = "begun-early"
    OVERLAP = "overlap"
    PARENTS_WRONG = "parents-wrong"
    BEYOND_END = "beyond-end"
    BEFORE_START = "before-start"
    COUNTER_BACK = "counter-back"
    POSITION_BACK = "position-back"
    RECREATED = "recreated"
    WRONG_STREAM = "wrong-stream"
    MIXED_KEYS = "mixed-keys"
    BROKEN_ROW = "broken-row"
    KCL3_NATIVE = "kcl3-native"
    ORPHAN = "orphan"
    HALT_EXPIRED = "halt-expired"
    HALTED = "halted"
    PAUSED_LONG = "paused-long"
    UNSERVED = "unserved"
    STUCK_ASK = "stuck-ask"
    STUCK_OFFER = "stuck-offer"
    CHECKPOINT_OWNER_LEFT = "checkpoint-owner-left"
    LATEST_UNPINNED = "latest-unpinned"
    RANGE_DIFFERS = "range-differs"
    FAILOVER_DIFFERS = "failover-differs"
    HOPPING = "hopping"
    ORPHAN_ENDED = "orphan-ended"
    OTHER_STREAM = "other-stream"
    PAUSED = "paused"
    OFFER_LEFT = "offer-left"
    TAKEN_FROM_LEFT = "taken-from-left"
    PENDING_LEFT = "pending-left"
    FOREIGN_ROWS = "foreign-rows"
    RESHARDING = "resharding"
    NO_LEASES = "no-leases"
    NO_LIVE_OWNER = "no-live-owner"

    @property
    def gravity(self) -> Gravity:
        return _ABOUT[self][0]

    @property
    def means(self) -> str:
        """The effect on the records."""
        return _ABOUT[self][1]

    @property
    def is_repairable(self) -> bool:
        """Whether there is a repair for it, where the owner of the row is not alive."""
        return self in _REPAIRED or self.needs_consent

    @property
    def healing(self) -> Healing | None:
        """What a running manager does about it, so that no repair is needed."""
        return _HEALED.get(self)

    @property
    def needs_consent(self) -> bool:
        """Whether a person must decide: it repeats records, gives some up or deletes rows."""
        return self in _NEEDS_CONSENT


class Healing(msgspec.Struct, frozen=True):
    """What a manager does about a kind by itself, and how soon: `does` in words, after at most so
    many failovers and seconds. Where managers share the work: one failover for each, if that is
    longer. `by_take`: it comes with the take of the lease, which an owner that is alive prevents.
    """

    does: str
    failovers: int = 0
    seconds: float = 0.0
    is_shared: bool = False
    by_take: bool = False

    def within_s(self, failover_s: float, managers: int) -> float:
        failovers = max(self.failovers, managers) if self.is_shared else self.failovers
        return failovers * failover_s + self.seconds

    @property
    def bound(self) -> str:
        """The longest time, in words."""
        if not self.failovers:
            return f"{self.seconds:g} s"
        failovers = "1 failover" if self.failovers == 1 else f"{self.failovers} failovers"
        return f"{failovers} (or one a manager)" if self.is_shared else failovers


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One error, as two looks at the table showed it.

    `keys` are the leases it is about; `evidence` proves it. `repair` are the writes that repair it.
    They are made in their order, each under its own condition, and stop at the first that does not
    apply. It is empty where a running program has to change and not the table, or where a manager
    heals it. `advice` is for a person: the next action, the time to wait for a manager, or the
    decision that a repair with consent makes.
    """

    kind: Kind
    keys: tuple[str, ...] = ()
    evidence: str
    repair: tuple[RepairingChange, ...] = ()
    advice: str = ""

    @property
    def gravity(self) -> Gravity:
        return self.kind.gravity


_IN_ORDER: Final = tuple(Kind)


def most_serious_first(finding: Finding) -> tuple[int, int, tuple[str, ...]]:
    """The order in which findings are reported and repaired."""
    return finding.gravity, _IN_ORDER.index(finding.kind), finding.keys


_E, _W, _N = Gravity.ERROR, Gravity.WARNING, Gravity.NOTE
_ABOUT: Final = {
    Kind.HOLE: (_E, "lost: no owner reads this shard"),
    Kind.CHILD_MISSING: (_E, "lost: its parents were read to their ends and no owner goes on"),
    Kind.CHILD_UNKNOWN: (_E, "lost, if that child ever held records: no owner reads it"),
    Kind.ENDED_OPEN: (_E, "lost: the shard still takes records, and its lease is over"),
    Kind.BEGUN_EARLY: (_E, "out of order: newer records of a key came before older ones"),
    Kind.OVERLAP: (_E, "out of order: older and newer records of a key are read side by side"),
    Kind.PARENTS_WRONG: (_E, "out of order or delayed: its turn is judged by the wrong parents"),
    Kind.BEYOND_END: (_E, "delayed for ever: the shard has no such position to go on from"),
    Kind.BEFORE_START: (_E, "delayed for ever: the shard has no such position to go on from"),
    Kind.COUNTER_BACK: (_E, "doubled: a counter that goes back lets two owners write"),
    Kind.POSITION_BACK: (_E, "doubled: what was processed is read again"),
    Kind.RECREATED: (_E, "not read: no manager starts, for old checkpoints mean nothing in it"),
    Kind.WRONG_STREAM: (_E, "lost: no owner reads the shards of this stream"),
    Kind.MIXED_KEYS: (_E, "doubled: the same shard can have a lease under either name"),
    Kind.BROKEN_ROW: (_E, "delayed for ever: no owner takes a row that it cannot read"),
    Kind.KCL3_NATIVE: (_E, "delayed: no kclrun that starts is let in, and Java workers starve"),
    Kind.ORPHAN: (_E, "lost: what was not read of this shard has expired with it"),
    Kind.HALT_EXPIRED: (_E, "lost: what arrived before or soon after the halt has expired"),
    Kind.HALTED: (_W, "delayed until it is resumed; lost once the retention has passed"),
    Kind.PAUSED_LONG: (_W, "lost soon: records that came with the pause expire next"),
    Kind.UNSERVED: (_W, "delayed: no owner reads this shard now"),
    Kind.STUCK_ASK: (_W, "none: the lease cannot move"),
    Kind.STUCK_OFFER: (_W, "delayed: the lease was given away and no owner took it"),
    Kind.CHECKPOINT_OWNER_LEFT: (_W, "delayed: the hand-off waits for a worker that is gone"),
    Kind.LATEST_UNPINNED: (_W, "lost, if it restarts before its first checkpoint"),
    Kind.RANGE_DIFFERS: (_W, "none: holes are looked for with the wrong range"),
    Kind.FAILOVER_DIFFERS: (_W, "doubled, if the impatient owner takes what the other still reads"),
    Kind.HOPPING: (_W, "delayed, and doubled: each owner begins it anew and none gets on"),
    Kind.ORPHAN_ENDED: (_N, "none: it was read to its end and has expired"),
    Kind.OTHER_STREAM: (_N, "none here: this application does not read that stream"),
    Kind.PAUSED: (_N, "delayed by an operator, until the pause is over"),
    Kind.OFFER_LEFT: (_N, "none: the next take by kclrun removes it"),
    Kind.TAKEN_FROM_LEFT: (_N, "delayed by one failover when it is taken"),
    Kind.PENDING_LEFT: (_N, "none: a two-phase checkpoint of the Java KCL that was not finished"),
    Kind.FOREIGN_ROWS: (_N, "none: KCL 3 keeps its own state in the table"),
    Kind.RESHARDING: (_N, "none: a reshard is under way, so holes cannot be judged now"),
    Kind.NO_LEASES: (_N, "none yet: the first start makes the leases"),
    Kind.NO_LIVE_OWNER: (_N, "delayed: no owner renews a lease; the application is stopped"),
}
_REPAIRED: Final = frozenset({Kind.HOLE, Kind.PARENTS_WRONG, Kind.RANGE_DIFFERS})
# A silent lease is free after one failover; an owner at its target takes it after three, and sees
# it with the scan after them.
_TAKEN: Final = 4
# Rows are created by the listing after the scan that shows their absence; scans are half a failover
# apart. A trimmed shard is taken, and ended after two listings a failover apart. The row of an
# ended one goes after two listings of one manager, and of all managers two list in each cycle.
# An offer waits for its first taker (1.2 s), its giver (2 s) and those at their targets (2 s more).
_HEALED: Final = {
    Kind.HOLE: Healing("creates the row", 1),
    Kind.CHILD_MISSING: Healing("creates the rows", 1),
    Kind.ORPHAN: Healing(
        "ends it, with records_expired in its log, or deletes the row", 5, is_shared=True
    ),
    Kind.ORPHAN_ENDED: Healing(
        "deletes the row, unless leases.cleanup is false", 2, is_shared=True
    ),
    Kind.STUCK_ASK: Healing("removes the request", _TAKEN, by_take=True),
    Kind.STUCK_OFFER: Healing("reads on", seconds=5.0, by_take=True),
    Kind.CHECKPOINT_OWNER_LEFT: Healing("removes checkpointOwner", _TAKEN, by_take=True),
    Kind.LATEST_UNPINNED: Healing("notes the instant of LATEST", _TAKEN, by_take=True),
    Kind.OFFER_LEFT: Healing("removes what is left of the offer", _TAKEN, by_take=True),
    Kind.TAKEN_FROM_LEFT: Healing("removes takenFrom a failover later", _TAKEN + 1, by_take=True),
}
_NEEDS_CONSENT: Final = frozenset(
    {
        Kind.CHILD_UNKNOWN,
        Kind.ENDED_OPEN,
        Kind.BEGUN_EARLY,
        Kind.OVERLAP,
        Kind.BEYOND_END,
        Kind.BEFORE_START,
        Kind.WRONG_STREAM,
        Kind.MIXED_KEYS,
        Kind.OTHER_STREAM,
        Kind.HALTED,
        Kind.HALT_EXPIRED,
    }
)


class Look(msgspec.Struct, frozen=True):
    """One whole scan, and after it one complete listing of every stream of the application.

    The doctor takes two looks, some time apart. Rule: a single look is never enough for a finding:
    a scan is not a snapshot, and an error that the managers repair is gone by the second look.

    `broken` are the keys of rows that cannot be read, and why; `foreign` counts the rows of another
    `entityType`; `kcl3_mode` is the state of a KCL 3 fleet, if a row holds one.
    """

    leases: tuple[Lease, ...]
    listings: Mapping[StreamKey, Listing]
    broken: Mapping[str, str] = {}
    foreign: int = 0
    kcl3_mode: str | None = None


class StreamFacts(msgspec.Struct, frozen=True):
    """Facts about a stream: where its shards without a lease begin, its retention, and when it was
    created (None: the service was not asked)."""

    start: ExtendedSequenceNumber = TRIM_HORIZON
    start_text: str = TRIM_HORIZON.sequence_number
    retention_s: float = 86_400.0
    created_at: WallTime | None = None


class Circumstances(msgspec.Struct, frozen=True):
    """Facts beside the rows. `me` is the owner id for the repairs; `watched_s` the time between the
    looks, at least `failover_s`; `now` the wall-clock time of the second look."""

    me: OwnerId
    failover_s: float
    watched_s: float
    now: WallTime
    streams: Mapping[StreamKey, StreamFacts]


class Pair:
    """Two looks side by side. `alive` are the owners that wrote a row between them [P9]."""

    def __init__(self, first: Look, second: Look, circumstances: Circumstances) -> None:
        self.first, self.second = first, second
        self.circumstances = circumstances
        observation = Observation(circumstances.failover_s)
        self._first_view = _view(first, observation, circumstances.me, 0.0)
        self.view = _view(second, observation, circumstances.me, circumstances.watched_s)
        self.alive = self._alive()
        streams = set(circumstances.streams)
        for view in (self._first_view, self.view):
            streams.update(map(stream_of, (*view.rows, *view.broken)))
        self._earlier = self._first_view.by_stream(streams)
        self._now = self.view.by_stream(streams)

    def views_of(self, stream: StreamKey) -> tuple[TableView, TableView]:
        """The rows of one stream of the application, at the first and at the second look."""
        return self._earlier[stream], self._now[stream]

    def rows_of(self, keys: Iterable[str]) -> Iterator[Lease]:
        """The readable rows among these keys at the second look."""
        found = (self.view.rows.get(LeaseKey(key)) for key in keys)
        return (lease for lease in found if lease is not None)

    def before(self, key: LeaseKey) -> Lease | None:
        """The row at the first look."""
        return self._first_view.rows.get(key)

    def stood_still(self, lease: Lease) -> bool:
        """Whether owner and counter were the same at both looks."""
        before = self.before(lease.key)
        return before is not None and (before.owner, before.counter) == (lease.owner, lease.counter)

    def living_owner(self, lease: Lease) -> OwnerId | None:
        """The owner of the row, or the one that hands it over, if it is alive."""
        return next((o for o in (lease.owner, lease.checkpoint_owner) if o in self.alive), None)

    @property
    def managers(self) -> int:
        """How many of the live owners are kclrun managers."""
        return sum(Owner.parse(owner) is not None for owner in self.alive)

    def _alive(self) -> frozenset[OwnerId]:
        moved = {
            lease.owner
            for lease in self.second.leases
            if lease.owner is not None and not is_unowned(lease.owner) and not self._is_old(lease)
        }
        return frozenset(moved)

    def _is_old(self, lease: Lease) -> bool:
        return self.stood_still(lease) and (lease.is_ended or lease.key in self.view.expired)


def watch_s(leases: tuple[Lease, ...], failover_s: float) -> float:
    """How far apart the looks must be: the longest failover. With an ask on a row: as long as an
    ask may stand there, plus a failover, in which its owner would have dropped it [P16]."""
    longest_s = max([failover_s, *(lease.failover_s or 0.0 for lease in leases)])
    if any(lease.handoff is not None for lease in leases):
        return longest_s + ASK_STALE_AFTER_S
    return longest_s


def _view(look: Look, observation: Observation, me: OwnerId, at_s: float) -> TableView:
    at = Instant(at_s)
    observation.update(look.leases, at)
    return TableView(look.leases, tuple(look.broken), observation, me=me, gone=frozenset(), now=at)


# These writes need no ownership: they may be made beside an owner.
_OWNERLESS: Final = (CreateLease, ResumeLease)


def freed(
    lease: Lease,
    circumstances: Circumstances,
    *,
    position: ExtendedSequenceNumber | None = None,
    children: Iterable[str] = (),
    listed: Shard | None = None,
) -> tuple[RepairingChange, ...]:
    """The writes that take the row, repair it and release it: without owner, ask, offer,
    `takenFrom` and `checkpointOwner`; at `position`, if given; with these children, if any; with
    parents and range of the shard `listed`, if given.

    The looks were a failover apart, so an owner that the row was taken from by force has stopped by
    now [P18].
    """
    me, key = circumstances.me, lease.key
    counters = itertools.count(lease.counter + 1)
    facts = circumstances.streams.get(stream_of(key), StreamFacts())
    failover_s = lease.failover_s or circumstances.failover_s
    start = lease.start or facts.start_text
    writes: list[RepairingChange] = [
        Take(
            key,
            me,
            lease.owner,
            lease.counter,
            failover_s,
            start,
            stream_created_at=lease.stream_created_at,
        ),
    ]
    if lease.taken_from is not None:
        writes.append(Claim(key, me, next(counters), has_waited=True))
    if names := frozenset(children):
        writes.append(NameChildren(key, me, next(counters), names))
    if listed is not None:
        parents = frozenset(listed.parents)
        writes.append(Amend(key, me, next(counters), parents, listed.hash_range))
    last = lease.checkpoint
    writes.append(Release(key, me, next(counters), position or last, last=last))
    return tuple(writes)


def deleted(leases: Iterable[Lease]) -> tuple[RepairingChange, ...]:
    """The writes that delete these rows: they are not needed here, and the backup has them."""
    return tuple(DeleteTrimmed(lease.key, lease.owner, lease.counter) for lease in leases)


def with_allowed_repairs(findings: Iterable[Finding], pair: Pair) -> tuple[Finding, ...]:
    """The findings in the order of their gravity, each with the repair that is allowed.

    Rule: only a live owner writes its own row. Of several findings about one row only the gravest
    repairs it, because each write moves the counter that the next write would name.
    """
    repaired: set[str] = set()
    settled: list[Finding] = []
    for finding in sorted(findings, key=most_serious_first):
        allowed = _allowed(finding, pair, repaired)
        repaired.update(key for change in allowed.repair for key in keys_of(change))
        settled.append(allowed)
    return tuple(settled)


def _advice_to_wait(finding: Finding, healing: Healing, pair: Pair) -> str:
    """How long a manager needs to heal it, or what keeps managers from that."""
    for row in pair.rows_of(finding.keys):
        if finding.kind is Kind.ORPHAN and row.halt is not None:
            return (
                "it is halted, so it is not read. Resume it:  kclrun leases resume"
                f" {display_name(row.key)} --yes  ; its owner then ends it by itself, says so with"
                " records_expired, and its children are read"
            )
        owner = pair.living_owner(row) if healing.by_take else None
        if owner is not None:
            return f"{owner} is alive and has this row; the next manager to take it {healing.does}"
    does = f"takes it and {healing.does}" if healing.by_take else healing.does
    within = (
        f"by itself within {healing.within_s(pair.circumstances.failover_s, pair.managers):g} s"
    )
    if not pair.managers:
        return f"start a manager: it {does}, {within}"
    room = " with room" if healing.by_take else ""
    return f"a manager{room} {does}, {within}; if this finding stays, see the logs of the managers"


def _allowed(finding: Finding, pair: Pair, repaired: set[str]) -> Finding:
    healing = finding.kind.healing
    if healing is not None and not finding.repair:
        return msgspec.structs.replace(finding, advice=_advice_to_wait(finding, healing, pair))
    touched = {
        key
        for change in finding.repair
        if not isinstance(change, _OWNERLESS)
        for key in keys_of(change)
    }
    for key in sorted(touched):
        row = pair.view.rows[key]
        if (owner := pair.living_owner(row)) is not None:
            advice = f"{owner} is alive and has this row, so it is not touched: stop it, look again"
            return msgspec.structs.replace(finding, repair=(), advice=advice)
    if repaired.intersection(key for change in finding.repair for key in keys_of(change)):
        advice = "the findings of this row above come first; then look again"
        return msgspec.structs.replace(finding, repair=(), advice=advice)
    return finding
