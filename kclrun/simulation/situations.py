"""The situations that storms must reach, by name, and who of them was seen.

A simulator proves nothing about what it never meets. Each name is a corner of the protocol that
somebody thought of; whoever sees it tells. A name that no storm ever tells is a blind spot of the
workload, and a failure. May not know: how one is reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from kclrun.errors import InvariantViolation

__all__ = ["SITUATIONS", "STORIES", "Situations"]

# What each name means.
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
    # Asks and offers.
    "asked": "a manager asked for a lease that another one renews",
    "ask_lost_to_another": "two managers asked for the same lease, and one came second",
    "ask_answered_by_offer": "an owner offered the lease to the one who asked",
    "ask_removed_as_stale": "an owner took an old ask off its row with a renewal",
    "ask_outlived_by_the_end": "a shard ended with an ask on its row",
    "ask_removed_by_take": "a lease was taken while a third one's ask stood on its row",
    "operators_ask_answered": "a lease was given away because an operator asked for it",
    "passed_on_for_a_dead_owner": "a manager offered a silent owner's lease to whoever has room",
    "offer_without_a_process": "a manager gave away a row that had no lease process",
    "release_with_nobody_in_sight": "a lease was released because no other owner was in sight",
    # Outcomes that nobody was told.
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
    "end_put_off": "a shard could not end yet, for the other parent had no lease",
    "child_split_again_before_it_was_read": "a child was closed before its parents had ended",
    # Rows that go and come.
    "row_cleaned_up": "the row of an ended shard was deleted",
    "row_deleted_by_somebody": "somebody deleted a lease row under a running fleet",
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
    "lease_halted": "user code failed for good, and the lease stands still",
    "lease_resumed": "an operator resumed a halted lease",
    "delivery_stopped_at_the_cap": "no batch was given because too much was not checkpointed",
    "checkpoint_by_hand": "user code asked for a checkpoint, and it is durable",
    "checkpoint_by_hand_refused": "user code asked for a checkpoint of a lost lease",
    "repeated_after_an_unclean_end": "records were given again, for their reader ended uncleanly",
    "iterator_expired": "an iterator expired and was replaced at the position",
    "reads_throttled": "the stream throttled a reader",
}

SITUATIONS: Final = frozenset(STORIES)


class Situations:
    """What was seen in one storm, and how often."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def seen(self, name: str) -> None:
        """It just happened. Raises: InvariantViolation for a name that is not declared."""
        if name not in SITUATIONS:
            raise InvariantViolation(f"no situation is called {name!r}")
        self.counts[name] += 1

    @property
    def names(self) -> frozenset[str]:
        """All that were seen."""
        return frozenset(self.counts)

    def missing(self) -> frozenset[str]:
        """Those that were not."""
        return SITUATIONS - self.counts.keys()
