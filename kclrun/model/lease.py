"""A lease: one row of the table that all owners share, as a value."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, NewType

import msgspec

from kclrun.errors import LimitExceeded
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.table import beside
from kclrun.model.time import WallTime, utc_text

# The message for lost children of a trimmed shard: children that were trimmed like it.
#
# Such a child never had a lease, so an event of its own cannot name it or report its loss.
CHILDREN_EXPIRED: Final = (
    "Kinesis has deleted children of this shard as well, before they had a lease: all that they"
    " held is lost. What came of them is read from its beginning"
)


def are_children_lost(whole: HashRange | None, children: Iterable[HashRange]) -> bool:
    """Whether some hash keys of a trimmed shard belong to no listed child. `children` are the
    ranges of the listed children. False if the shard's own range is not known."""
    if whole is None:
        return False
    following = whole.start
    for child in sorted(children):
        if child.start > following:
            break
        following = max(following, child.end + 1)
    return following <= whole.end


LeaseKey = NewType("LeaseKey", str)
OwnerId = NewType("OwnerId", str)

OWNER_PREFIX: Final = "kclrun:"
# The owner of a row that was given away and waits for its taker. It counts as no owner [P17].
OFFERED: Final = OwnerId(f"{OWNER_PREFIX}offered")
# The asker in an operator's ask: release the lease to any owner [P16].
ANYBODY: Final = OwnerId(f"{OWNER_PREFIX}anybody")
# An ask that was seen on its row for so long is stale [P16]: several renewals and a long batch fit
# into it. Measured by the observer's own clock: the time on the row is from an unknown clock.
ASK_STALE_AFTER_S: Final = 30.0
# A shorter failover loses leases by one slow garbage collection or disk flush. A failover longer
# than a quarter of an hour is a wrong unit. The KCL's own default is 10 s.
FAILOVER_MIN_S: Final = 1.0
FAILOVER_MAX_S: Final = 900.0
# From this `ownerSwitchesSinceCheckpoint` on a lease is shown as hopping: it changed its owner five
# times without one checkpoint.
HOPPING_SWITCHES: Final = 5
# An owner whose row was deleted writes it again with a counter that is higher by this number. It
# must exceed every counter that another owner can have seen in the meantime. A Java worker also
# moves the counter with each checkpoint: after each of the five reads a second that Kinesis allows,
# for the longest failover at most. These are 4,500.
WRITTEN_AGAIN_AHEAD: Final = 5_000


class Owner(msgspec.Struct, frozen=True):
    """`kclrun:<group>:<host slot>:<nonce>` in parts; the nonce is new at every manager start."""

    group: str
    slot: str
    nonce: str

    def __post_init__(self) -> None:
        for part in (self.group, self.slot, self.nonce):
            if ":" in part:
                raise LimitExceeded(f"owner part {part!r} contains a colon")

    @property
    def id(self) -> OwnerId:
        return OwnerId(f"{OWNER_PREFIX}{self.group}:{self.slot}:{self.nonce}")

    @classmethod
    def slot_of(cls, owner_id: OwnerId) -> str:
        """The host slot of an owner. An id that is not one of ours counts as a host of its own."""
        parsed = cls.parse(owner_id)
        return parsed.slot if parsed is not None else owner_id

    @classmethod
    def parse(cls, owner_id: str) -> Owner | None:
        """The parts of one of our owner ids; None for any other id (a Java worker's)."""
        if not owner_id.startswith(OWNER_PREFIX):
            return None
        parts = owner_id[len(OWNER_PREFIX) :].split(":")
        return cls(*parts) if len(parts) == 3 else None


class PendingCheckpoint(msgspec.Struct, frozen=True):
    """The first half of a two-phase checkpoint of the Java KCL; kept until our first checkpoint.

    `position` is where the Java worker wanted to checkpoint; `state` the bytes that its application
    stored with it, None if it stored none.
    """

    position: ExtendedSequenceNumber
    state: bytes | None = None


class ClaimedLease(msgspec.Struct, kw_only=True):
    """The lease of a processor, as the claim found it. On Spark `fencing_token` grows when the next
    task goes on with it."""

    application: str
    stream: str
    shard_id: str
    key: str
    position: ExtendedSequenceNumber
    fencing_token: int
    pending: PendingCheckpoint | None = None


class Halt(msgspec.Struct, frozen=True):
    """Why a lease stands still by decision: owned, renewed, not processed, until resumed.

    `waiting_since` is the arrival time of the oldest record known not to be processed; older ones
    may wait, too. Rows of earlier versions do not carry it (None).
    """

    reason: str
    halted_at: WallTime
    waiting_since: WallTime | None = None


class Scope(enum.Enum):
    """How much one pause covers. Wider scopes come later."""

    SHARD = "shard"
    STREAM = "stream"
    ALL = "all"


class Pause(msgspec.Struct, frozen=True):
    """An operator's pause: the lease is owned, renewed, and not read, until an operator resumes it
    or `until` is over. `until` 0 is a pause without an end. Both times are the service's."""

    paused_at: WallTime
    until: WallTime = WallTime(0.0)
    scope: Scope = Scope.SHARD

    def stands_at(self, at: WallTime) -> bool:
        """Whether it is not over at this time of the service."""
        return not self.until or at < self.until

    def in_words(self) -> str:
        """`paused since 2026-03-01T06:00:00Z with its stream, until 2026-03-01T06:30:00Z`."""
        end = f", until {utc_text(self.until)}" if self.until else ", until it is resumed"
        return f"paused since {utc_text(self.paused_at)}{_COVERS[self.scope]}{end}"


_COVERS: Final = {Scope.SHARD: "", Scope.STREAM: " with its stream", Scope.ALL: " with all others"}


class DiedOn(msgspec.Struct, frozen=True):
    """The host, by its slot, where the lease's processes died again and again at `position`.

    Written with the offer by which that host gave the lease away. It counts only while the row is
    at `position`: an owner that gets further, even a Java worker, proves it out of date.
    """

    slot: str
    position: ExtendedSequenceNumber


class Handoff(msgspec.Struct, frozen=True):
    """An ask on a row: `to` would like to have the lease, since `asked_at` by the asker's clock."""

    to: OwnerId
    asked_at: WallTime


# A lease's load is its mean over two minutes: long enough for polls, batches and checkpoints to
# even out, short beside the hours in which traffic changes.
LOAD_MEAN_S: Final = 120.0


class Load(msgspec.Struct, frozen=True, gc=False):
    """The cost of a lease to its owner: the payload delivered in KiB/s, and the share of one core
    that its lease process used. Means over `LOAD_MEAN_S`, measured by one process."""

    kbps: float
    cpu: float


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row, as last read. Attributes: the KCL 2.x schema, then ours.

    `owner` None is an unowned lease. `counter` grows by one with every write of an owner and is the
    fencing token. `parents` and `children` are lease keys: bare shard ids, or with several streams
    qualified like this row's own (`stream.py`). `failover_s` and `start` are the values that the
    owner published at its take; None from a Java owner. `stream_created_at` is the creation time of
    the stream that the row was made or taken for, None if it was not known. `handoff` is an ask to
    the owner [P16]. `offered_to` names the owner that an offered row is meant for, None for any
    owner; `offered_by` names its giver [P17]. `taken_from` names the Java owner it was taken from
    by force, until the first claim that waited [P18]. `died_on` is the host where its processes
    died without progress. `load` is the last measured one; it stays when the owner changes.
    `outputs` is how far the outputs have the rows, None before their first checkpoint [K2];
    `generation` counts the resets by an operator [K4]. `state_version` names the version of the
    keyed state at `outputs.at`. All three change only with the checkpoint. `pause` may be over.
    `letters_to`: of records up to there an owner may have kept dead letters [K20].
    `endpoint` is the `ADDRESS:PORT` at which the owner of the last take serves its detail, a hint
    alone: a Java worker leaves it as it was.
    """

    key: LeaseKey
    checkpoint: ExtendedSequenceNumber
    counter: int = 0
    owner: OwnerId | None = None
    owner_switches: int = 0
    parents: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()
    hash_range: HashRange | None = None
    checkpoint_owner: OwnerId | None = None
    pending: PendingCheckpoint | None = None
    throughput_kbps: float | None = None
    failover_s: float | None = None
    start: str | None = None
    stream_created_at: WallTime | None = None
    latest_pinned_at: WallTime | None = None
    halt: Halt | None = None
    handoff: Handoff | None = None
    offered_to: OwnerId | None = None
    offered_by: OwnerId | None = None
    taken_from: OwnerId | None = None
    died_on: DiedOn | None = None
    load: Load | None = None
    outputs: StoredCursors | None = None
    generation: int = 0
    state_version: str | None = None
    pause: Pause | None = None
    letters_to: ExtendedSequenceNumber | None = None
    endpoint: str | None = None

    @property
    def is_ended(self) -> bool:
        """Whether every record of the shard was processed (checkpoint SHARD_END)."""
        return self.checkpoint.sequence_number == SHARD_END.sequence_number

    @property
    def has_begun(self) -> bool:
        """Whether a record of the shard was checkpointed, or the shard has ended."""
        return self.is_ended or not self.checkpoint.is_sentinel

    @property
    def has_open_letters(self) -> bool:
        """Whether dead letters may have been kept of records that the checkpoint does not cover."""
        return self.letters_to is not None and self.letters_to > self.checkpoint

    @property
    def failed_slot(self) -> str | None:
        """The host where its processes died at the row's current position, if there is one."""
        died, at = self.died_on, self.checkpoint.of_record
        return died.slot if died is not None and died.position == at else None

    @property
    def is_moved_past_outputs(self) -> bool:
        """Whether another program moved the checkpoint since the outputs' cursors, or the version
        of the state, were written with it: a Java worker, or a person [K2]."""
        if self.outputs is None:
            return self.state_version is not None
        return self.outputs.at != self.checkpoint

    @property
    def may_forget_outputs(self) -> bool:
        """Whether an operator's resume lets the outputs begin at the checkpoint where it is. With
        keyed state it does not: there is no state for that position."""
        return self.is_moved_past_outputs and self.state_version is None

    @property
    def has_foreign_owner(self) -> bool:
        """Whether it has not ended and its owner is not a kclrun manager: a Java worker owns it."""
        owner = self.owner
        return owner is not None and not self.is_ended and not owner.startswith(OWNER_PREFIX)

    @property
    def is_hopping(self) -> bool:
        return self.owner_switches >= HOPPING_SWITCHES


def highest_generation(rows: Iterable[Lease]) -> int:
    """How many resets these rows have seen: a row that is created after them, or from them, belongs
    to that generation [K4]."""
    return max((row.generation for row in rows), default=0)


def inherited_pause(rows: Iterable[Lease]) -> Pause | None:
    """The pause of a row that is created from these: the widest, and of those the one that ends
    last. It may be over: then it is over for the new row, too."""
    pauses = (row.pause for row in rows if row.pause is not None)
    return max(pauses, key=_reach, default=None)


def pause_of_stream(rows: Iterable[Lease]) -> Pause | None:
    """The pause of a stream with these rows as a whole: a row that comes without a parent has it,
    too."""
    return inherited_pause(row for row in rows if row.pause and row.pause.scope is not Scope.SHARD)


def _reach(pause: Pause) -> tuple[int, float]:
    return list(Scope).index(pause.scope), pause.until or float("inf")


# The mode of a KCL 3 fleet on the same table: its possible states, and the advice for each.
#
# A KCL 3 fleet keeps its state in an item beside the leases, `Migration3.0`, attribute `cv`.
# Workers of 3.0 to 3.4 keep it in a table of its own, `<application>-CoordinatorState`, which the
# first of them creates. The workers move the state by themselves. Rule: in a native state a leader
# assigns the leases, to workers that report metrics only. Takers like us would fight the leader,
# and it would give us no lease [P8].
KCL3_MODE_KEY: Final = "Migration3.0"

_ROLLBACK: Final = "CLIENT_VERSION_3X_WITH_ROLLBACK"
_NATIVE: Final = frozenset({"CLIENT_VERSION_3X", _ROLLBACK})
_COMPATIBLE: Final = "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"
_DELETE: Final = (
    f"stop every worker, delete the one item {KCL3_MODE_KEY} (in the lease table; of KCL 3.0"
    " to 3.4 in <application>-CoordinatorState), and start them with"
    f" clientVersionConfig = {_COMPATIBLE}: leases and checkpoints stay. Where no Java worker is"
    " left, only delete the item"
)
_ALONE: Final = (
    "No Java worker owns a lease any more. If none comes back, delete the one item"
    f" {KCL3_MODE_KEY} (in the lease table; of KCL 3.0 to 3.4 in <application>-CoordinatorState):"
    " kclrun goes on meanwhile, leases and checkpoints stay. Until then no kclrun can start"
)
# A compatible fleet flips ten minutes after the last owner without metrics has gone (seen: 641 s).
_ADVICE: Final = {
    "CLIENT_VERSION_3X": (
        "A worker was started without clientVersionConfig, and the KCL's migration tool does not"
        f" roll back from this state: {_DELETE}"
    ),
    _ROLLBACK: (
        f"Workers set to {_COMPATIBLE} came to this by themselves, ten minutes after the last owner"
        " of a lease that reports no metrics, as kclrun, was gone. The setting alone changes"
        f" nothing now: roll back with the KCL's migration tool (KclMigrationTool.py); or {_DELETE}"
    ),
    "CLIENT_VERSION_UPGRADE_FROM_2X": (
        "It shares the table. Do not leave kclrun off, or without a lease, for ten minutes: the KCL"
        " then moves on to its own mode, and kclrun is refused"
    ),
    "CLIENT_VERSION_2X": (
        "It was rolled back, and shares the table. It goes on towards its own mode only when the"
        " KCL's migration tool says so"
    ),
    "CLIENT_VERSION_INIT": "It has not decided yet; look again when a Java worker is up",
}


def replay_tables(application: str) -> str:
    """The first characters of the lease tables of the replays of an application."""
    return f"{application}-replay-"


def coordinator_table(application: str, leases: str) -> str:
    """The table in which workers of KCL 3.0 to 3.4 keep the state, beside the lease table: an item
    of the same key."""
    return beside(leases, f"{application}-CoordinatorState")


def is_native(mode: str | None) -> bool:
    """Whether a leader of the KCL 3 assigns the leases."""
    return mode in _NATIVE


def mode_advice(mode: str, *, has_java: bool = True) -> str:
    """The advice for a fleet in this state, in a few sentences without a full stop at the end.
    `has_java`: whether a Java worker owns a lease, as far as it is known."""
    if is_native(mode) and not has_java:
        tool = " The KCL's migration tool can roll it back, too" if mode == _ROLLBACK else ""
        return f"{_ALONE}.{tool}" if tool else _ALONE
    return _ADVICE.get(mode, f"This state is not known: share the table only with {_COMPATIBLE}")
