"""The situations that storms must reach, by name, and a count of those that were seen.

A simulator proves nothing about a situation that it never meets. A name that no storm ever reports
is a blind spot of the workload, and a failure. The module does not read cores.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

from kclrun.errors import InvariantViolation
from kclrun.lease.commands import ExitCause
from kclrun.model.lease import ANYBODY, OFFERED, OWNER_PREFIX, Lease, Owner
from kclrun.protocol.reports import ProcessWarned, Report
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
from kclrun.simulation.observer import Coverage
from kclrun.simulation.shards import ShardStream
from tests.support.oracles.watch import Oracles

# The meaning of each name.
STORIES: Final[Mapping[str, str]] = {
    # Takes.
    "take_of_unowned": "a lease that nobody had was taken",
    "take_of_expired": "a lease was taken whose owner had stopped renewing",
    "take_by_the_asker": "an offered row was taken by the one who had asked for it",
    "take_by_another_than_the_asker": "an offered row went to another than the one who had asked",
    "take_of_an_offer_to_anybody": "a row that was offered to whoever comes was taken",
    "take_back_by_the_giver": "an offered row was taken back by the manager that gave it away",
    "take_of_a_former_nonce": "a manager took the rows of its former self on the same host",
    "take_of_a_halted_lease": "a halt travelled with its lease to another owner",
    "take_lost_to_another": "two managers took the same lease, and one came second",
    # Handoff requests and offers.
    "asked": "a manager asked for a lease that another one renews",
    "ask_lost_to_another": "two managers asked for the same lease, and one came second",
    "ask_answered_by_offer": "an owner offered the lease to the one who asked",
    "ask_removed_as_stale": "an owner took an old ask off its row with a renewal",
    "ask_outlived_by_the_end": "a shard ended with an ask on its row",
    "ask_removed_by_take": "a lease was taken while a third one's ask stood on its row",
    "ask_withdrawn_by_a_drain": "a manager that drains took back what it had asked for",
    "offer_declined_by_a_drain": "a manager that drains offered on what was offered to it",
    "operators_ask_answered": "a lease was given away because an operator asked for it",
    "passed_on_for_a_dead_owner": "a manager offered a silent owner's lease to whoever has room",
    "offer_without_a_process": "a manager gave away a row that had no lease process",
    "release_with_nobody_in_sight": "a lease was released because no other owner was in sight",
    # Outcomes that the sender did not learn.
    "unknown_take_had_applied": "a take timed out and had applied",
    "unknown_claim_had_applied": "a claim timed out and had applied",
    "unknown_renewal_had_applied": "a renewal timed out and had applied",
    "unknown_checkpoint_had_applied": "a checkpoint timed out and had applied",
    "unknown_end_had_applied": "a shard end timed out and had applied",
    "unknown_offer_had_applied": "an offer or release timed out and had applied",
    "unknown_children_had_applied": "the creation of children timed out and had applied",
    "late_write_applied": "a write arrived after its sender had given up waiting, and applied",
    "late_write_refused": "a write arrived after its sender had given up waiting, and was refused",
    # Positions.
    "late_checkpoint_applied": "who had lost a lease still saved what it had processed",
    "late_checkpoint_refused": "a late checkpoint came too late",
    "late_checkpoint_under_a_new_owner": "a late checkpoint moved a row under its new owner",
    "position_adopted": "an owner found the row's position ahead of its own, and adopted it",
    # Shards that end.
    "shard_ended": "a shard was read to its end, and its row says so",
    "merge_with_parents_on_two_hosts": "two owners ended the two parents of one child",
    "merge_with_a_parent_ended_long_before": "one parent of a merge had ended a minute before",
    "children_existed_already": "the children of an ended shard had rows already",
    "child_created_by_the_healer": "a manager created the missing child of an ended shard",
    "held_shard_expired": "a shard was trimmed while its lease was held, and ended in words",
    "stream_recreated": "a manager found the stream deleted and made again, and stopped for good",
    "end_put_off": "a shard could not end yet, for the other parent had no lease",
    "child_split_again_before_it_was_read": "a child was closed before its parents had ended",
    # Rows that are deleted and created.
    "row_cleaned_up": "the row of an ended shard was deleted",
    "row_deleted_from_outside": "somebody deleted a lease row under a running fleet",
    "row_written_again_by_its_process": "a lease process wrote its vanished row again",
    "row_written_again_by_its_manager": "a manager wrote a vanished row again, without a process",
    "first_sync_by_two": "two managers created the rows of an empty table at once",
    # Lease processes.
    "process_restarted_by_a_living_manager": "a lease process died and its manager started another",
    "killed_before_its_claim": "a lease process was killed before it had claimed",
    "killed_inside_user_code": "a lease process was killed in the middle of a batch",
    "killed_with_a_write_under_way": "a lease process was killed while it waited for the table",
    "frozen_inside_user_code": "a lease process stood still in the middle of a batch",
    "fence_passed_mid_batch": "a fence passed while user code was at work",
    "fence_passed_mid_fetch": "a page came when the fence had passed",
    "start_unclaimed": "a lease process gave up before it had claimed",
    "lease_lost": "a lease process found its lease lost",
    "orphan_gave_its_lease_away": "a lease process without a manager gave its lease away in order",
    "orphan_exited_at_its_fence": "a lease process without a manager ended at its fence",
    "fork_failed": "a lease process could not be started",
    "drain_with_a_start_under_way": "a manager was drained while it started a lease process",
    # User code and the stream.
    "user_code_raised_and_held": "user code raised, was given the batch again, and held",
    "record_given_up": "a record failed again and again, and was given up",
    "lease_halted": "user code failed for good, and the lease stands still",
    "lease_resumed": "an operator resumed a halted lease",
    "delivery_stopped_at_the_cap": "no batch was given because too much was not checkpointed",
    "checkpoint_by_hand": "user code asked for a checkpoint, and it is durable",
    "checkpoint_by_hand_refused": "user code asked for a checkpoint of a lost lease",
    "repeated_after_an_unclean_end": "records were given again, for their reader ended uncleanly",
    "iterator_expired": "an iterator expired and was replaced at the position",
    "reads_throttled": "the stream throttled a reader",
    "subscription_refused": "a subscription was refused, for another one had just begun",
    "subscription_taken_over": "a subscription ended, for another owner's took it over",
    "subscription_broke": "a subscription broke, and its reader went on by polling",
}

SITUATIONS: Final = frozenset(STORIES)


class Situations:
    """The situations that one storm has seen, and how often."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def seen(self, name: str) -> None:
        """Count one. Raises: InvariantViolation for a name that is not declared."""
        if name not in SITUATIONS:
            raise InvariantViolation(f"no situation is called {name!r}")
        self.counts[name] += 1

    @property
    def names(self) -> frozenset[str]:
        """All names that were seen."""
        return frozenset(self.counts)

    def missing(self) -> frozenset[str]:
        """All names that were not seen."""
        return SITUATIONS - self.counts.keys()


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


class FleetCoverage(Coverage):
    """Sees them in the writes of the lease table, and in the lives of lease processes. `now` is the
    world's time. Renewals come by the thousand, so one line handles them."""

    def __init__(self, stream: ShardStream, now: Callable[[], float]) -> None:
        self.situations = Situations()
        self._seen = self.situations.seen
        self._stream = stream
        self._now = now
        # The leases whose last process of an owner was killed.
        self._killed: set[tuple[str, str]] = set()
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

    def seen(self, situation: str) -> None:
        self._seen(situation)

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

    # Lease processes.

    def started(self, owner: str, key: str) -> None:
        """A process was forked for a lease of this owner."""
        if (owner, key) in self._killed:
            self._killed.discard((owner, key))
            self._seen("process_restarted_by_a_living_manager")

    def killed(
        self, owner: str, key: str, *, has_claimed: bool, is_writing: bool, in_user_code: bool
    ) -> None:
        """A process was killed by a signal, or with its machine."""
        self._killed.add((owner, key))
        if not has_claimed:
            self._seen("killed_before_its_claim")
        if is_writing:
            self._seen("killed_with_a_write_under_way")
        if in_user_code:
            self._seen("killed_inside_user_code")

    def exited(self, cause: ExitCause, *, is_orphan: bool) -> None:
        """A process exited by itself."""
        if cause is ExitCause.UNCLAIMED:
            self._seen("start_unclaimed")
        elif cause in {ExitCause.LOST, ExitCause.REPLACED}:
            self._seen("orphan_exited_at_its_fence" if is_orphan else "lease_lost")
        elif cause is ExitCause.DONE and is_orphan:
            self._seen("orphan_gave_its_lease_away")

    def reported(self, report: Report) -> None:
        """A process sent a report to its manager."""
        if isinstance(report, ProcessWarned) and "has no lease yet" in report.detail:
            self._seen("end_put_off")

    # Writes that apply, and refusals.

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


class StormOracles(Oracles):
    """The oracles of a fleet whose situations are counted."""

    def __init__(self, stream: ShardStream, *arguments: Any, **named: Any) -> None:
        super().__init__(stream, *arguments, **named)
        self.coverage = FleetCoverage(stream, self._now)

    @property
    def situations(self) -> Situations:
        return self.coverage.situations
