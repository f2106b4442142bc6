"""Every write of the lease table in every form that its expression has. Not a test.

The first of each kind has a value for all that it expects, and a position inside an aggregate.
"""

from __future__ import annotations

from kclrun.model.lease import DiedOn, Halt, Handoff, LeaseKey, Load, OwnerId, Pause, Scope
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Amend,
    Ask,
    ChangePause,
    Checkpoint,
    Claim,
    Decline,
    DeleteEnded,
    DeleteReset,
    DeleteTrimmed,
    End,
    EndedParent,
    ExistingParent,
    FinishReset,
    HaltForReset,
    HaltLease,
    HandOver,
    HeldParent,
    LateCheckpoint,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResetLease,
    ResumeLease,
    Take,
    Withdraw,
)

KEY, ME, OTHER = LeaseKey("k"), OwnerId("kclrun:a:h:1"), OwnerId("java")
WHOLE, INSIDE, NEXT, NEXT_INSIDE = (
    ExtendedSequenceNumber("5"),
    ExtendedSequenceNumber("5", 1),
    ExtendedSequenceNumber("9"),
    ExtendedSequenceNumber("9", 3),
)
CURSORS = (("rows", Cursor(NEXT)), ("sql", Cursor(ExtendedSequenceNumber("12", 1), 2)))
# Cursors of outputs and the version of the state, as a write carries them: none, and each part.
KEPT = ((None, None), (CURSORS, None), (CURSORS, "v2"), (CURSORS, ""), (None, "v2"))
CHANGES = (
    *(Take(KEY, ME, seen, 4, 10.0, "LATEST") for seen in (OTHER, None, ME)),
    Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True),
    *(
        Take(KEY, ME, seen, 4, 10.0, "LATEST", latest_pinned_at=WallTime(9.0))
        for seen in (OTHER, None, ME)
    ),
    Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True, latest_pinned_at=WallTime(9.0)),
    *(
        Ask(KEY, ME, OTHER, WallTime(9.0), seen=Handoff(OTHER, WallTime(seen_at)))
        for seen_at in (2.0, 0.0)
    ),
    Ask(KEY, ME, OTHER, WallTime(9.0)),
    Withdraw(KEY, ME),
    Decline(KEY, ME, 4),
    *(Claim(KEY, ME, 4, has_waited=waited) for waited in (False, True)),
    *(
        Renew(KEY, ME, 4, measured, drops, load)
        for measured in (None, 1.5)
        for drops in (False, True)
        for load in (None, Load(1.5, 0.25))
    ),
    NameChildren(KEY, ME, 4, frozenset({"c"})),
    *(
        Amend(KEY, ME, 4, parents, HashRange(0, 5), pinned_at)
        for parents in (frozenset({"p"}), frozenset[str]())
        for pinned_at in (None, WallTime(9.0))
    ),
    HaltLease(KEY, ME, 4, Halt("why", WallTime(1.0))),
    ResumeLease(KEY),
    ResumeLease(KEY, forgets_outputs=True),
    ChangePause(KEY, Pause(WallTime(7.0)), Pause(WallTime(7.0), WallTime(9.0), Scope.ALL)),
    ChangePause(KEY, Pause(WallTime(7.0), WallTime(9.0), Scope.ALL), None),
    ChangePause(KEY, None, Pause(WallTime(7.0))),
    DeleteEnded(KEY),
    *(DeleteTrimmed(KEY, seen, 4) for seen in (OTHER, None)),
    *(
        Checkpoint(KEY, ME, 4, NEXT, last, load, *kept)
        for last in (INSIDE, WHOLE)
        for load in (None, Load(1.5, 0.25))
        for kept in KEPT
    ),
    *(End(KEY, ME, 4, last, *kept) for last in (INSIDE, WHOLE) for kept in KEPT),
    *(
        Release(KEY, ME, 4, to, last, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for kept in KEPT
    ),
    *(
        Offer(KEY, ME, 4, to, last, asker, None, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for asker in (OTHER, None)
        for kept in KEPT
    ),
    *(Offer(KEY, ME, 4, last, last, None, DiedOn("h", last)) for last in (INSIDE, WHOLE)),
    *(
        HandOver(KEY, ME, OTHER, 4, to, last, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for kept in KEPT
    ),
    *(
        LateCheckpoint(KEY, ME, last, to, *kept, generation=generation)
        for last in (INSIDE, WHOLE)
        for to in (NEXT_INSIDE, NEXT)
        for kept in KEPT
        for generation in (2, 0)
    ),
    *(
        ResetLease(KEY, seen, 4, last, TRIM_HORIZON, 2, Halt("why", WallTime(1.0)), pinned_at)
        for seen in (OTHER, None)
        for last in (INSIDE, WHOLE)
        for pinned_at in (WallTime(9.0), None)
    ),
    *(HaltForReset(KEY, seen, 4, Halt("why", WallTime(1.0))) for seen in (OTHER, None)),
    *(DeleteReset(KEY, seen, 4) for seen in (OTHER, None)),
    *(FinishReset(KEY, generation, "why") for generation in (2, 0)),
)
PARENTS = (
    HeldParent(KEY, ME, 4, Pause(WallTime(7.0), WallTime(9.0))),
    HeldParent(KEY, ME, 4),
    EndedParent(KEY),
    ExistingParent(KEY),
)
ALL = (*CHANGES, *PARENTS)
