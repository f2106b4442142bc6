"""The gate before user code: until when, and how far, batches may start [P7, I7]."""

from __future__ import annotations

from kclrun.consuming.commands import OpenGate, ShutGate
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.model.time import Instant

__all__ = ["GateKeeper"]


class GateKeeper:
    """Remembers what the gate was last told, so that only changes are commands."""

    def __init__(self, *, one_batch_a_checkpoint: bool) -> None:
        self._one_batch_a_checkpoint = one_batch_a_checkpoint
        self._told: OpenGate | None = None
        self.is_shut = True

    def open(self, fence: Instant, ledger: CheckpointLedger) -> tuple[OpenGate, ...]:
        """Batches may start: with one batch a checkpoint, only when nothing is uncheckpointed."""
        allowed = ledger.delivered_max
        start_below = ledger.checkpointed_total + 1 if self._one_batch_a_checkpoint else allowed
        told = self._told
        if told is not None and (fence, start_below, allowed) == (
            told.fence,
            told.start_below,
            told.delivered_max,
        ):
            return ()
        self._told = OpenGate(fence, start_below, allowed)
        self.is_shut = False
        return (self._told,)

    def shut(self) -> tuple[ShutGate, ...]:
        """Ask for quiet; it is shut once GateShut says that no user code runs."""
        self._told = None
        self.is_shut = False
        return (ShutGate(),)
