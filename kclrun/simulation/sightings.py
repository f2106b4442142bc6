"""Sees named situations in the writes of a lease table: applied writes, and answers.

It does not read cores. Renewals come by the thousand, so one line handles them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from kclrun.model.lease import ANYBODY, OFFERED, OWNER_PREFIX, Lease, Owner
from kclrun.protocol.writes import (
    Ask,
    Checkpoint,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    Decline,
    DeleteEnded,
    End,
    EndedParent,
    HaltLease,
    HeldParent,
    LateCheckpoint,
    Offer,
    Outcome,
    OutcomeUnknown,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
    keys_of,
)
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.situations import Situations

# A merge waits for its other parent for a second or two; a minute is much longer.
_LONG_BEFORE_S: Final = 60.0

_UNKNOWN: Final[Mapping[type[Any], str]] = {
    Take: "unknown_take_had_applied",
    Claim: "unknown_claim_had_applied",
    Renew: "unknown_renewal_had_applied",
    Checkpoint: "unknown_checkpoint_had_applied",
    End: "unknown_end_had_applied",
    Offer: "unknown_offer_had_applied",
    Release: "unknown_offer_had_applied",
    CreateChildren: "unknown_children_had_applied",
}


class RowSightings:
    """`now` is the world's time."""

    def __init__(
        self, situations: Situations, stream: ShardStream, now: Callable[[], float]
    ) -> None:
        self._seen = situations.seen
        self._stream = stream
        self._now = now
        # Of each row, its last applied write and its last timeout: a handful of objects a lease.
        self._applied: dict[str, Any] = {}
        self._timed_out: dict[str, Any] = {}
        self._ended: dict[str, tuple[float, str]] = {}  # the time, and the sender
        self._look_at: Mapping[type[Any], Callable[[str, Any, Lease, Lease], None]] = {
            Take: self._taken,
            Ask: self._asked,
            Withdraw: lambda *_: self._seen("ask_withdrawn_by_a_drain"),
            Decline: lambda *_: self._seen("offer_declined_by_a_drain"),
            Offer: self._given,
            Release: self._given,
            LateCheckpoint: self._saved_late,
            End: self._shard_ended,
            CreateChildren: self._children_existed,
            HaltLease: lambda *_: self._seen("lease_halted"),
            ResumeLease: lambda *_: self._seen("lease_resumed"),
        }

    def written(self, sender: str, change: Any, before: Lease | None, after: Lease | None) -> None:
        """A write applied and changed a row."""
        kind = type(change)
        if before is not None and after is not None:
            self._note_applied(after.key, change)
            if kind is Renew:
                if change.drops_ask and before.handoff is not None:
                    self._seen("ask_removed_as_stale")
            elif (look := self._look_at.get(kind)) is not None:
                look(sender, change, before, after)
        elif after is not None:
            self._note_applied(after.key, change)
            self._created(sender, change, after)
        elif kind is DeleteEnded:
            self._seen("row_cleaned_up")

    def answered(self, change: Any, outcome: Outcome) -> None:
        """The sender's answer: the write did not apply, or its outcome is unknown."""
        kind, key = type(change), keys_of(change)[0]
        if isinstance(outcome, OutcomeUnknown):
            if self._applied.get(key) is change and kind in _UNKNOWN:
                self._seen(_UNKNOWN[kind])
            elif self._applied.get(key) is not change:
                self._timed_out[key] = change
        elif isinstance(outcome, ConditionFailed):
            self._refused(kind, change, outcome.row)

    def refused_in_silence(self, change: Any) -> None:
        """It arrived after its sender had stopped waiting, and its condition failed."""
        if self._timed_out.get(keys_of(change)[0]) is change:
            self._seen("late_write_refused")

    def _note_applied(self, key: str, change: Any) -> None:
        self._applied[key] = change
        if self._timed_out and self._timed_out.get(key) is change:
            del self._timed_out[key]
            self._seen("late_write_applied")

    def _refused(self, kind: type[Any], change: Any, row: Lease | None) -> None:
        if kind is Take:
            self._seen("take_lost_to_another")
        elif kind is Ask:
            self._seen("ask_lost_to_another")
        elif kind is LateCheckpoint:
            self._seen("late_checkpoint_refused")
        elif kind is CreateLease and change.lease.owner is None:
            self._seen("first_sync_by_two")
        elif kind in {Checkpoint, Offer, Release, End} and row is not None:
            is_held = row.owner == change.owner and row.counter == change.seen_counter
            if is_held and row.checkpoint > change.last:
                self._seen("position_adopted")

    # Rows that change owners.

    def _taken(self, _: str, change: Take, before: Lease, __: Lease) -> None:
        if before.owner is None:
            self._seen("take_of_unowned")
        elif before.owner == OFFERED:
            self._took_an_offer(change, before)
        elif _is_former_self(before.owner, change.owner):
            self._seen("take_of_a_former_nonce")
        else:
            self._seen("take_of_expired")
        if before.halt is not None:
            self._seen("take_of_a_halted_lease")
        if before.handoff is not None and before.handoff.to != change.owner:
            self._seen("ask_removed_by_take")

    def _took_an_offer(self, change: Take, before: Lease) -> None:
        if before.offered_by == change.owner:
            self._seen("take_back_by_the_giver")
        elif before.offered_to is None:
            self._seen("take_of_an_offer_to_anybody")
        elif before.offered_to == change.owner:
            self._seen("take_by_the_asker")
        else:
            self._seen("take_by_another_than_the_asker")

    def _asked(self, *_: Any) -> None:
        self._seen("asked")

    def _given(self, sender: str, change: Offer | Release, before: Lease, _: Lease) -> None:
        if before.owner != f"{OWNER_PREFIX}{sender.partition('/')[0]}":
            self._seen("passed_on_for_a_dead_owner")
            return
        if isinstance(change, Release):
            self._seen("release_with_nobody_in_sight")
        elif change.offered_to is not None:
            self._seen("ask_answered_by_offer")
        elif before.handoff is not None and before.handoff.to == ANYBODY:
            self._seen("operators_ask_answered")
        if "/" not in sender:
            self._seen("offer_without_a_process")

    # Positions and ends.

    def _saved_late(self, _: str, __: LateCheckpoint, before: Lease, ___: Lease) -> None:
        self._seen("late_checkpoint_applied")
        if before.owner not in {None, OFFERED}:
            self._seen("late_checkpoint_under_a_new_owner")

    def _shard_ended(self, sender: str, _: End, before: Lease, after: Lease) -> None:
        self._seen("shard_ended")
        if before.handoff is not None:
            self._seen("ask_outlived_by_the_end")
        self._ended[after.key] = (self._now(), sender.partition("/")[0])
        for child in self._stream.children_of(after.key):
            others = [parent for parent in child.parents if parent != after.key]
            if any(self._is_of_another(parent, after.key) for parent in others):
                self._seen("merge_with_parents_on_two_hosts")
            if self._stream.is_closed(child.shard_id):
                self._seen("child_split_again_before_it_was_read")

    def _is_of_another(self, parent: str, key: str) -> bool:
        ended = self._ended.get(parent)
        return ended is not None and ended[1] != self._ended[key][1]

    # Rows that come and go.

    def _created(self, sender: str, change: Any, row: Lease) -> None:
        if isinstance(change, CreateChildren):
            self._created_children(change)
        elif isinstance(change, CreateLease) and row.owner is not None:
            by = "process" if "/" in sender else "manager"
            self._seen(f"row_written_again_by_its_{by}")

    def _children_existed(self, _: str, change: CreateChildren, before: Lease, __: Lease) -> None:
        """Called for each child: count once."""
        if before.key == change.children[0].key:
            self._seen("children_existed_already")
            self._created_children(change)

    def _created_children(self, change: CreateChildren) -> None:
        if any(isinstance(parent, EndedParent) for parent in change.parents):
            self._seen("child_created_by_the_healer")
        for parent in change.parents:
            ended = self._ended.get(parent.key)
            is_old = ended is not None and self._now() - ended[0] >= _LONG_BEFORE_S
            if is_old and not isinstance(parent, HeldParent):
                self._seen("merge_with_a_parent_ended_long_before")


def _is_former_self(former: str, owner: str) -> bool:
    """Whether it has the same group and slot, and another nonce."""
    mine, theirs = Owner.parse(owner), Owner.parse(former)
    return (
        mine is not None
        and theirs is not None
        and (mine.group, mine.slot) == (theirs.group, theirs.slot)
    )
