"""What can be wrong with a lease table: the kinds, how grave each is, and what it means.

Rule: an error is what a healthy table never shows, at no stage of a reshard; a warning is a delay
or a setting; a note is only worth knowing.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from kclrun.model.changes import (
    Amend,
    Claim,
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    NameChildren,
    Release,
    ResumeLease,
    Take,
)

__all__ = ["Finding", "Gravity", "Kind", "MendingChange", "most_serious_first"]

# All that a mend may write.
MendingChange = (
    CreateLease
    | CreateChildren
    | DeleteTrimmed
    | Take
    | Claim
    | NameChildren
    | Amend
    | Release
    | ResumeLease
)


class Gravity(enum.IntEnum):
    """How serious a finding is. ERROR: records are lost, doubled, out of order or never read."""

    ERROR = 0
    WARNING = 1
    NOTE = 2


class Kind(enum.Enum):
    """What is wrong; `means` says what that is to the records."""

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
    WRONG_STREAM = "wrong-stream"
    MIXED_KEYS = "mixed-keys"
    BROKEN_ROW = "broken-row"
    ORPHAN = "orphan"
    HALT_EXPIRED = "halt-expired"
    HALTED = "halted"
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
    OFFER_LEFT = "offer-left"
    TAKEN_FROM_LEFT = "taken-from-left"
    PENDING_LEFT = "pending-left"
    FOREIGN_ROWS = "foreign-rows"
    RESHARDING = "resharding"
    NO_LEASES = "no-leases"
    NOBODY_ALIVE = "nobody-alive"

    @property
    def gravity(self) -> Gravity:
        return _ABOUT[self][0]

    @property
    def means(self) -> str:
        """What becomes of the records."""
        return _ABOUT[self][1]

    @property
    def is_mendable(self) -> bool:
        """Whether there is a mend for it, where the owner of the row is not alive."""
        return self in _MENDABLE or self.needs_consent

    @property
    def needs_consent(self) -> bool:
        """Whether its mend repeats records, gives some up or deletes rows: a person's decision."""
        return self in _NEEDS_CONSENT


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, as two looks at the table showed it.

    `keys` are the leases it is about; `evidence` is how one knows. `mend` are the writes that
    repair it, to be made in their order, each under its own condition, and no further once one
    does not apply; empty where what runs has to change and not the table. `advice` tells a person
    what to do, or what it is that a mend which needs consent decides.
    """

    kind: Kind
    keys: tuple[str, ...] = ()
    evidence: str
    mend: tuple[MendingChange, ...] = ()
    advice: str = ""

    @property
    def gravity(self) -> Gravity:
        return self.kind.gravity


_IN_ORDER: Final = tuple(Kind)


def most_serious_first(finding: Finding) -> tuple[int, int, tuple[str, ...]]:
    """The order in which findings are told and mended."""
    return finding.gravity, _IN_ORDER.index(finding.kind), finding.keys


_E, _W, _N = Gravity.ERROR, Gravity.WARNING, Gravity.NOTE
_ABOUT: Final = {
    Kind.HOLE: (_E, "lost: nobody reads this shard"),
    Kind.CHILD_MISSING: (_E, "lost: its parents were read to their ends and nobody goes on"),
    Kind.CHILD_UNKNOWN: (_E, "lost, if that child ever held records: nobody reads it"),
    Kind.ENDED_OPEN: (_E, "lost: the shard still takes records, and its lease is over"),
    Kind.BEGUN_EARLY: (_E, "out of order: newer records of a key came before older ones"),
    Kind.OVERLAP: (_E, "out of order: older and newer records of a key are read side by side"),
    Kind.PARENTS_WRONG: (_E, "out of order or delayed: its turn is judged by the wrong parents"),
    Kind.BEYOND_END: (_E, "delayed for ever: the shard has no such position to go on from"),
    Kind.BEFORE_START: (_E, "delayed for ever: the shard has no such position to go on from"),
    Kind.COUNTER_BACK: (_E, "doubled: a counter that goes back lets two owners write"),
    Kind.POSITION_BACK: (_E, "doubled: what was processed is read again"),
    Kind.WRONG_STREAM: (_E, "lost: nobody reads the shards of this stream"),
    Kind.MIXED_KEYS: (_E, "doubled: the same shard can have a lease under either name"),
    Kind.BROKEN_ROW: (_E, "delayed for ever: no owner takes a row that it cannot read"),
    Kind.ORPHAN: (_E, "lost: what was not read of this shard has expired with it"),
    Kind.HALT_EXPIRED: (_E, "lost: what arrived before or soon after the halt has expired"),
    Kind.HALTED: (_W, "delayed until it is resumed; lost once the retention has passed"),
    Kind.UNSERVED: (_W, "delayed: nobody reads this shard now"),
    Kind.STUCK_ASK: (_W, "none: the lease cannot move"),
    Kind.STUCK_OFFER: (_W, "delayed: the lease was given away and nobody took it"),
    Kind.CHECKPOINT_OWNER_LEFT: (_W, "delayed: the hand-off waits for a worker that is gone"),
    Kind.LATEST_UNPINNED: (_W, "lost, if it restarts before its first checkpoint"),
    Kind.RANGE_DIFFERS: (_W, "none: holes are looked for with the wrong range"),
    Kind.FAILOVER_DIFFERS: (_W, "doubled, if the impatient owner takes what the other still reads"),
    Kind.HOPPING: (_W, "delayed, and doubled: each owner begins it anew and none gets on"),
    Kind.ORPHAN_ENDED: (_N, "none: it was read to its end and has expired"),
    Kind.OTHER_STREAM: (_N, "none here: this application does not read that stream"),
    Kind.OFFER_LEFT: (_N, "none: the next take by kclrun removes it"),
    Kind.TAKEN_FROM_LEFT: (_N, "delayed by one failover when it is taken"),
    Kind.PENDING_LEFT: (_N, "none: a two-phase checkpoint of the Java KCL that was not finished"),
    Kind.FOREIGN_ROWS: (_N, "none: KCL 3 keeps its own state in the table"),
    Kind.RESHARDING: (_N, "none: a reshard is under way, so holes cannot be judged now"),
    Kind.NO_LEASES: (_N, "none yet: the first start makes the leases"),
    Kind.NOBODY_ALIVE: (_N, "delayed: nobody renews a lease; the application is stopped"),
}
_MENDABLE: Final = frozenset(
    {
        Kind.HOLE,
        Kind.CHILD_MISSING,
        Kind.PARENTS_WRONG,
        Kind.RANGE_DIFFERS,
        Kind.LATEST_UNPINNED,
        Kind.ORPHAN,
        Kind.ORPHAN_ENDED,
        Kind.STUCK_ASK,
        Kind.STUCK_OFFER,
        Kind.CHECKPOINT_OWNER_LEFT,
        Kind.OFFER_LEFT,
        Kind.TAKEN_FROM_LEFT,
    }
)
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
