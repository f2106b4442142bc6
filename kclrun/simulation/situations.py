"""The situations that storms must reach, by name, and a count of those that were seen.

A simulator proves nothing about a situation that it never meets. A name that no storm ever reports
is a blind spot of the workload, and a failure. The module does not know how a situation is reached.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import InvariantViolation
from kclrun.local.stream import parse
from kclrun.model.sequence import ExtendedSequenceNumber


# The times in which no process read a shard although it had something to read.
#
# A shard is readable from its creation, a child from its parents' last record on, and over with
# its own. It is read while a process may begin batches of it and its host is not frozen. This part
# does not know leases or owners.
class Gap(msgspec.Struct, frozen=True):
    """One such time of one shard."""

    key: str
    began_s: float
    length_s: float


class ReadingGaps:
    """Gets the begin and the end of each reading; keeps every gap that ended."""

    def __init__(self) -> None:
        self.ended: list[Gap] = []
        self._unread_since: dict[str, float] = {}
        self._readers: dict[str, object] = {}
        self._were_read: set[str] = set()
        self._blocked: set[str] = set()
        self._over: set[str] = set()

    def readable(self, key: str, now: float) -> None:
        """The shard has something to read from now on."""
        was_blocked = key in self._blocked
        self._blocked.discard(key)
        if was_blocked and key not in self._readers and key in self._unread_since:
            self._unread_since[key] = now
        elif key not in self._were_read:
            self._unread_since.setdefault(key, now)

    def unreadable(self, key: str) -> None:
        """It must not be read for now: a parent is read again, and it is `readable` after that."""
        self._blocked.add(key)

    def begins(self, key: str, reader: object, now: float) -> None:
        """`reader` may begin batches; repeated at each renewal."""
        if self._readers.get(key) is reader or key in self._over:
            return
        self._readers[key] = reader
        since = self._unread_since.pop(key, None)
        if since is not None:
            self.ended.append(Gap(key, since, now - since))
        self._were_read.add(key)

    def ends(self, key: str, reader: object, now: float) -> None:
        """`reader` may not, or cannot, read any more. Ignored for another reader than the last."""
        if self._readers.get(key) is reader:
            del self._readers[key]
            self._unread_since[key] = now

    def over(self, key: str) -> None:
        """Its last record is processed: it has nothing left to read, also if a gate opens later (a
        renewal's answer may be on its way)."""
        self._over.add(key)
        self._readers.pop(key, None)
        self._unread_since.pop(key, None)
        self._were_read.add(key)

    def unread(self) -> dict[str, float]:
        """The shards without a reader now, and since when."""
        unread = self._unread_since.items()
        return {key: since for key, since in unread if key not in self._blocked}

    def since(self, began_s: float, *, until_s: float = float("inf")) -> Iterable[Gap]:
        """The gaps that began in a time."""
        return (gap for gap in self.ended if began_s <= gap.began_s < until_s)


# The events of each lease, as far as they are kept, and the error that contains them.
#
# An entry stores the values themselves. They become text only on request: most runs end well and
# need none.
# The last events of a lease in a failure's report: a few failovers of its life.
_ENTRIES_MAX: Final = 60


class RuleBroken(Exception):
    """A promise of the README did not hold: which one, for which lease.

    It never leaves the simulation: `Fleet` raises an InvariantViolation instead, with the story.
    """

    def __init__(self, rule: str, key: str, words: str) -> None:
        super().__init__(f"{rule}: {words}")
        self.key = key


class Stories:
    """The last events of every lease."""

    def __init__(self) -> None:
        self._of: dict[str, deque[tuple[float, str, str, Any]]] = {}

    def note(self, key: str, time_s: float, who: str, what: str, detail: Any = "") -> None:
        entries = self._of.get(key)
        if entries is None:
            entries = self._of[key] = deque(maxlen=_ENTRIES_MAX)
        entries.append((time_s, who, what, detail))

    def tell(self, key: str) -> str:
        """The story of one lease, a line an event."""
        return "\n".join(
            f"  {clock(time_s)}  {who:<24} {what} {_words(detail)}".rstrip()
            for time_s, who, what, detail in self._of.get(key, ())
        )

    def tell_all(self) -> str:
        """Every story, in the order of the keys."""
        return "\n".join(f"{key}\n{self.tell(key)}" for key in sorted(self._of))


def _words(detail: Any) -> str:
    """A value as one line that is the same in every process: sets in order."""
    if isinstance(detail, frozenset):
        return "{" + ", ".join(sorted(map(_words, detail))) + "}"
    if isinstance(detail, tuple):
        return "(" + ", ".join(map(_words, detail)) + ")"
    if isinstance(detail, ExtendedSequenceNumber):
        number = parse(detail.sequence_number)
        return str(detail) if number is None else f"record {number.counter}"
    if not isinstance(detail, msgspec.Struct):
        return str(detail)
    fields = msgspec.structs.asdict(detail).items()
    said = (f"{name}={_words(value)}" for name, value in fields if _tells(name, value))
    return f"{type(detail).__name__}({', '.join(said)})"


def _tells(name: str, value: Any) -> bool:
    """Whether a field has content; the key is left out, because the story is under it."""
    return name != "key" and value is not None and value is not False and value != ""


def clock(time_s: float) -> str:
    """Virtual time in readable form."""
    minutes, seconds = divmod(time_s, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:09.6f}"


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
