"""What user code holds as its Checkpointer: asks the lease thread, and waits for its answer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Final

from kclrun.consuming.commands import AnswerCheckpoint, CheckpointAnswer
from kclrun.consuming.events import CheckpointRequested
from kclrun.errors import LeaseLost, StaleCheckpoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.processor import Checkpointer

__all__ = ["CheckpointDesk"]

# How often a waiting call looks whether the process is ending under it.
LOOK_S: Final = 0.5


class CheckpointDesk:
    """Requests of user code, by number, from any of its threads.

    `ask` posts to the lease thread; `cover` is told first, so that rows emitted until now become
    part of the checkpoint; `is_over` says that no answer will come any more.
    """

    def __init__(
        self,
        ask: Callable[[CheckpointRequested], None],
        cover: Callable[[ExtendedSequenceNumber | None], None],
        is_over: Callable[[], bool],
    ) -> None:
        self.checkpointer = Checkpointer(self._checkpoint)
        self.durable: ExtendedSequenceNumber | None = None
        self._ask = ask
        self._cover = cover
        self._is_over = is_over
        self._numbers = itertools.count(1)
        self._answered = threading.Condition()
        self._answers: dict[int, AnswerCheckpoint] = {}
        self._waiting: set[int] = set()

    def answer(self, answer: AnswerCheckpoint) -> None:
        """The lease thread's side."""
        with self._answered:
            if answer.request in self._waiting:
                self._answers[answer.request] = answer
                self._answered.notify_all()

    def note_durable(self, position: ExtendedSequenceNumber) -> None:
        """A checkpoint at `position` is on the row; records up to it are not given again."""
        self.durable = position

    def _checkpoint(self, position: ExtendedSequenceNumber | None) -> None:
        self._cover(position)
        with self._answered:
            request = next(self._numbers)
            self._waiting.add(request)
        self._ask(CheckpointRequested(request, position))
        answer = self._wait(request)
        if answer is None or answer.answer is CheckpointAnswer.LOST:
            detail = answer.detail if answer is not None else "the process ends"
            raise LeaseLost(f"not checkpointed: {detail}")
        if answer.answer is CheckpointAnswer.STALE:
            raise StaleCheckpoint(answer.detail)

    def _wait(self, request: int) -> AnswerCheckpoint | None:
        with self._answered:
            while request not in self._answers and not self._is_over():
                self._answered.wait(LOOK_S)
            self._waiting.discard(request)
            return self._answers.pop(request, None)
