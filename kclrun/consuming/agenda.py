"""Which write of the lease's row is due: the state's own, a checkpoint, or a renewal."""

from __future__ import annotations

from typing import Final

from kclrun.consuming.ledger import CheckpointLedger
from kclrun.consuming.own_row import OwnRow
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.requests import CheckpointRequests
from kclrun.consuming.states import State
from kclrun.model.changes import Checkpoint, Claim, End, LateCheckpoint, NameChildren, Renew
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant

__all__ = ["Agenda"]

# A checkpoint at half of `uncheckpointed_max`, due or not, keeps the cap from stopping deliveries.
EARLY_SHARE: Final = 0.5
# The Java KCL 3 smooths `throughputKBps` by half and keeps six decimals.
THROUGHPUT_ALPHA: Final = 0.5
THROUGHPUT_DECIMALS: Final = 6


class Agenda:
    """Looks at the row, the ledger and the clock; says the next write, or None."""

    def __init__(self, policy: LifePolicy, own: OwnRow, requests: CheckpointRequests) -> None:
        self._policy = policy
        self._own = own
        self._requests = requests
        self._saved_instant = Instant(0.0)
        self._put_off_until = Instant(0.0)
        self._bytes = 0
        self._measured_since = Instant(0.0)
        self._throughput_kbps = 0.0

    def begin(self, now: Instant) -> None:
        """The lease is claimed: time counts from here."""
        self._saved_instant = now
        self._measured_since = now

    def note_saved(self, now: Instant) -> None:
        self._saved_instant = now

    def put_off(self, until: Instant) -> None:
        """The last checkpoint did not come about: no other before `until`."""
        self._put_off_until = until

    def note_bytes(self, payload_bytes: int) -> None:
        self._bytes += payload_bytes

    def due_instant(self, ledger: CheckpointLedger, *, renews: bool) -> Instant | None:
        """When something may have to be written next, while nothing is under way."""
        if self._own.next_owner is not None:
            return None  # nothing is written before the batch has ended
        renewing = self._own.renewal_instant if renews else None
        saving = self.save_instant(ledger)
        if renewing is None or saving is None:
            return saving if renewing is None else renewing
        return min(renewing, saving)

    def save_instant(self, ledger: CheckpointLedger) -> Instant | None:
        """When the next automatic checkpoint is due, if something is unsaved."""
        if self._policy.checkpoint_mode != "auto" or not ledger.has_unsaved:
            return None
        due = Instant(self._saved_instant + self._policy.checkpoint_every_s)
        return max(due, self._put_off_until)

    def checkpoint(self, state: State, ledger: CheckpointLedger, now: Instant) -> Checkpoint | None:
        """The checkpoint that is due: asked for, by time, by number, or before a halt."""
        wanted = self._requests.highest
        if wanted is None and not ledger.has_unsaved:
            return None
        if self._must_save(state, ledger, now):
            wanted = ledger.processed if wanted is None else max(wanted, ledger.processed)
        if wanted is None or wanted <= ledger.checkpointed or now < self._put_off_until:
            return None
        own, row = self._own, self._own.confirmed
        # A renewal may have shown a late checkpoint of a former owner: never below it (N1).
        position = max(wanted, row.checkpoint)
        return Checkpoint(own.key, own.me, own.counter, position, row.checkpoint)

    def is_renewal_due(self, now: Instant) -> bool:
        due = self._own.renewal_instant
        assert due is not None, "no renewal before the claim"
        return now >= due

    def renewal(self, now: Instant, *, drops_ask: bool) -> Renew:
        """The heartbeat; it takes an ask along that nobody answers [P16]."""
        self._measure(now)
        own = self._own
        return Renew(own.key, own.me, own.counter, self._throughput_kbps, drops_ask)

    def claim(self) -> Claim:
        """The first write of all; it expects the counter of the manager's take [P4]."""
        own = self._own
        return Claim(own.key, own.me, own.counter, self._policy.has_waited)

    def naming(self, children: tuple[str, ...]) -> NameChildren:
        own = self._own
        return NameChildren(own.key, own.me, own.counter, frozenset(children))

    def end(self) -> End:
        own = self._own
        return End(own.key, own.me, own.counter, own.confirmed.checkpoint)

    def final_position(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """What a last write may claim: all that was processed, or what user code asked for."""
        if self._policy.is_manual:
            return self._requests.highest or self.unacknowledged(ledger)
        return max(ledger.processed, self._requests.highest or ledger.processed)

    def unacknowledged(self, ledger: CheckpointLedger) -> ExtendedSequenceNumber:
        """The furthest position that may still be written for a lease that took no more writes.

        With automatic checkpoints all that was processed. With manual ones what user code waited
        for when the writing ended, if its batch then returned all the same: one that raised, on
        being refused, has taken its rows back.
        """
        if not self._policy.is_manual:
            return ledger.processed
        refused = self._requests.refused
        is_processed = refused is not None and refused <= ledger.processed
        return (
            max(refused, ledger.checkpointed) if refused and is_processed else ledger.checkpointed
        )

    def late_checkpoint(self, ledger: CheckpointLedger) -> LateCheckpoint | None:
        """What a lost lease leaves for the next owner, if it is anything [P19].

        Not with keyed state, whose snapshot belongs to each position; not where the row is gone.
        The lower bound is the last position acknowledged to us: below it an operator has reset
        the lease on purpose.
        """
        position = self.unacknowledged(ledger)
        is_barred = self._policy.has_keyed_state or self._own.is_gone
        if is_barred or position <= ledger.checkpointed:
            return None
        return LateCheckpoint(self._own.key, self._own.me, ledger.checkpointed, position)

    def _must_save(self, state: State, ledger: CheckpointLedger, now: Instant) -> bool:
        if self._policy.is_manual or not ledger.has_unsaved:
            return False
        if state is State.FAILING:
            return True
        if self._policy.checkpoint_mode == "batch" and ledger.has_uncounted:
            return True
        if ledger.uncheckpointed >= self._policy.uncheckpointed_max * EARLY_SHARE:
            return True
        return now >= self._saved_instant + self._policy.checkpoint_every_s

    def _measure(self, now: Instant) -> None:
        elapsed_s = now - self._measured_since
        if elapsed_s <= 0:
            return
        rate_kbps = self._bytes / 1024 / elapsed_s
        smoothed = THROUGHPUT_ALPHA * rate_kbps + (1 - THROUGHPUT_ALPHA) * self._throughput_kbps
        self._throughput_kbps = round(smoothed, THROUGHPUT_DECIMALS)
        self._bytes = 0
        self._measured_since = now
