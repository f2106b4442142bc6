"""Every write of the lease table in every form that its expression has. Not a test.

The first of each kind has a value for all that it expects, and a position inside an aggregate.
"""

from kclrun.model.lease import DiedOn, Halt, Handoff, LeaseKey, Load, OwnerId, Pause, Scope
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.protocol import writes as ch

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
    *(ch.Take(KEY, ME, seen, 4, 10.0, "LATEST") for seen in (OTHER, None, ME)),
    ch.Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True),
    *(
        ch.Take(KEY, ME, seen, 4, 10.0, "LATEST", latest_pinned_at=WallTime(9.0))
        for seen in (OTHER, None, ME)
    ),
    ch.Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True, latest_pinned_at=WallTime(9.0)),
    *(
        ch.Ask(KEY, ME, OTHER, WallTime(9.0), seen=Handoff(OTHER, WallTime(seen_at)))
        for seen_at in (2.0, 0.0)
    ),
    ch.Ask(KEY, ME, OTHER, WallTime(9.0)),
    ch.Withdraw(KEY, ME),
    ch.Decline(KEY, ME, 4),
    *(ch.Claim(KEY, ME, 4, has_waited=waited) for waited in (False, True)),
    *(
        ch.Renew(KEY, ME, 4, measured, drops, load)
        for measured in (None, 1.5)
        for drops in (False, True)
        for load in (None, Load(1.5, 0.25))
    ),
    ch.NameChildren(KEY, ME, 4, frozenset({"c"})),
    *(
        ch.Amend(KEY, ME, 4, parents, HashRange(0, 5))
        for parents in (frozenset({"p"}), frozenset[str]())
    ),
    ch.HaltLease(KEY, ME, 4, Halt("why", WallTime(1.0))),
    ch.ResumeLease(KEY),
    ch.ResumeLease(KEY, forgets_outputs=True),
    ch.ChangePause(KEY, Pause(WallTime(7.0)), Pause(WallTime(7.0), WallTime(9.0), Scope.ALL)),
    ch.ChangePause(KEY, Pause(WallTime(7.0), WallTime(9.0), Scope.ALL), None),
    ch.ChangePause(KEY, None, Pause(WallTime(7.0))),
    *(ch.NoteLetters(KEY, ME, NEXT, seen) for seen in (INSIDE, WHOLE, None)),
    ch.DeleteEnded(KEY),
    *(ch.DeleteTrimmed(KEY, seen, 4) for seen in (OTHER, None)),
    *(
        ch.Checkpoint(KEY, ME, 4, NEXT, last, load, *kept)
        for last in (INSIDE, WHOLE)
        for load in (None, Load(1.5, 0.25))
        for kept in KEPT
    ),
    *(ch.End(KEY, ME, 4, last, *kept) for last in (INSIDE, WHOLE) for kept in KEPT),
    *(
        ch.Release(KEY, ME, 4, to, last, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for kept in KEPT
    ),
    *(
        ch.Offer(KEY, ME, 4, to, last, asker, None, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for asker in (OTHER, None)
        for kept in KEPT
    ),
    *(ch.Offer(KEY, ME, 4, last, last, None, DiedOn("h", last)) for last in (INSIDE, WHOLE)),
    *(
        ch.HandOver(KEY, ME, OTHER, 4, to, last, *kept)
        for last in (INSIDE, WHOLE)
        for to in (last, NEXT)
        for kept in KEPT
    ),
    *(
        ch.LateCheckpoint(KEY, ME, last, to, *kept, generation, noted)
        for last in (INSIDE, WHOLE)
        for to in (NEXT_INSIDE, NEXT)
        for kept in KEPT
        for generation, noted in ((2, WHOLE), (0, None), (2, None))
    ),
    *(
        ch.ResetLease(KEY, seen, 4, last, TRIM_HORIZON, 2, Halt("why", WallTime(1.0)), pinned_at)
        for seen in (OTHER, None)
        for last in (INSIDE, WHOLE)
        for pinned_at in (WallTime(9.0), None)
    ),
    *(ch.HaltForReset(KEY, seen, 4, Halt("why", WallTime(1.0))) for seen in (OTHER, None)),
    *(ch.DeleteReset(KEY, seen, 4) for seen in (OTHER, None)),
    *(ch.FinishReset(KEY, generation, "why") for generation in (2, 0)),
)
PARENTS = (
    ch.HeldParent(KEY, ME, 4, Pause(WallTime(7.0), WallTime(9.0))),
    ch.HeldParent(KEY, ME, 4),
    ch.EndedParent(KEY),
    ch.ExistingParent(KEY),
)
ALL = (*CHANGES, *PARENTS)
