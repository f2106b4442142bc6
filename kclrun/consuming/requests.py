"""Checkpoints that user code asked for and waits on."""

from __future__ import annotations

from kclrun.consuming.commands import AnswerCheckpoint, CheckpointAnswer
from kclrun.consuming.ledger import CheckpointLedger
from kclrun.errors import StaleCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["CheckpointRequests"]


class CheckpointRequests:
    """The waiting ones. User code may ask from several threads; one write answers all it covers."""

    def __init__(self) -> None:
        self._waiting: dict[int, ExtendedSequenceNumber] = {}
        # The furthest that was waited for when no checkpoint could be written any more.
        self.refused: ExtendedSequenceNumber | None = None
        self._closed_because: str | None = None

    @property
    def highest(self) -> ExtendedSequenceNumber | None:
        """The position one write must reach to answer everybody."""
        return max(self._waiting.values()) if self._waiting else None

    def admit(
        self, request: int, position: ExtendedSequenceNumber | None, ledger: CheckpointLedger
    ) -> tuple[AnswerCheckpoint, ...]:
        """Let a request in; those that need no write, or can have none, are answered at once."""
        if self._closed_because is not None:
            return (AnswerCheckpoint(request, CheckpointAnswer.LOST, self._closed_because),)
        try:
            wanted = ledger.admit(position)
        except StaleCheckpoint as refusal:
            return (AnswerCheckpoint(request, CheckpointAnswer.STALE, str(refusal)),)
        if wanted == ledger.checkpointed:
            return (AnswerCheckpoint(request, CheckpointAnswer.DURABLE),)
        self._waiting[request] = wanted
        return ()

    def answer(self, durable: ExtendedSequenceNumber) -> tuple[AnswerCheckpoint, ...]:
        """Everything up to `durable` is on the row."""
        covered = [request for request, wanted in self._waiting.items() if wanted <= durable]
        for request in covered:
            del self._waiting[request]
        return tuple(AnswerCheckpoint(request, CheckpointAnswer.DURABLE) for request in covered)

    def refuse_all(self, reason: str) -> tuple[AnswerCheckpoint, ...]:
        """No checkpoint can be written any more: nobody needs to wait any longer, or to ask.

        The first reason stands: what follows is its consequence.
        """
        self._closed_because = self._closed_because or reason
        self.refused = self.highest or self.refused
        waiting = tuple(self._waiting)
        self._waiting.clear()
        return tuple(AnswerCheckpoint(each, CheckpointAnswer.LOST, reason) for each in waiting)
