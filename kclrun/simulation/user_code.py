"""The behaviour of user code, drawn batch by batch: honest, slow, stalling, raising, forgetful.

It does not know the permit or the lease. The real error policy decides about raised errors, in
`delivery_queue.py`. Each question takes one draw, and none where the answer is certain, so that
honest user code costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kclrun.model.policies import Then

# Of the batches that raise, one in so many holds a poison record and raises for ever. The others
# succeed after one to five attempts, as many as the default `on_error.retries` repeats.
_POISONED_ONE_IN: Final = 16
_RAISES_MAX: Final = 5
# Of the manual checkpoints, one in so many names a record in the middle of its batch.
_IN_THE_MIDDLE_ONE_IN: Final = 4


class UserCode(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of processors. Shares are of batches: those that raise, those that take
    `stall_s`. `checkpoints_by_hand`: user code asks for checkpoints itself; `never_checkpoints`: it
    should, and does not. Both are `checkpoint: manual`.

    Every `poison_every`-th record of a shard makes each call raise that has it; 0: none does.
    `then` is `on_error.then`.
    """

    batch_s: float = 0.02
    raising: float = 0.0
    stalling: float = 0.0
    stall_s: float = 0.0
    checkpoints_by_hand: bool = False
    never_checkpoints: bool = False
    poison_every: int = 0
    then: Then = "halt"

    def first_poison(self, first: int, last: int) -> int | None:
        """The number of the first record among these that makes a call raise."""
        if not self.poison_every:
            return None
        number = -(-first // self.poison_every) * self.poison_every
        return number if number <= last else None

    @property
    def is_manual(self) -> bool:
        """Whether only the processor moves the checkpoint."""
        return self.checkpoints_by_hand or self.never_checkpoints


class Attempt(msgspec.Struct, frozen=True):
    """One call of `process_records`: its duration, the share of the batch that it then checkpoints
    (None: no checkpoint), and whether it raises in the end."""

    duration_s: float
    checkpointed_share: float | None = None
    raises: bool = False


class BatchUserCode:
    """The user code of one lease process. `chance` gives numbers in [0, 1)."""

    def __init__(self, kind: UserCode, chance: Callable[[], float]) -> None:
        self._chance = chance
        self.improve(kind)

    def improve(self, kind: UserCode) -> None:
        """Deploy a new version: from the next call on it behaves like this."""
        self.kind = kind
        self._raises_left = 0.0
        self._always = Attempt(kind.batch_s)
        self._is_honest = not (kind.raising or kind.stalling or kind.checkpoints_by_hand)

    def begin(self) -> Attempt:
        """It gets a batch for the first time."""
        if self._is_honest:
            return self._always
        self._raises_left = self._raises() if self._draws(self.kind.raising) else 0.0
        return self.again()

    def again(self) -> Attempt:
        """It gets the same batch again."""
        if self._is_honest:
            return self._always
        raises = self._raises_left > 0
        self._raises_left -= raises
        is_stalling = self._draws(self.kind.stalling)
        return Attempt(
            self.kind.stall_s if is_stalling else self.kind.batch_s, self._saves(), raises
        )

    def _raises(self) -> float:
        if self._draws(1 / _POISONED_ONE_IN):
            return float("inf")
        return 1 + int(self._chance() * _RAISES_MAX)

    def _saves(self) -> float | None:
        if not self.kind.checkpoints_by_hand:
            return None
        return self._chance() if self._draws(1 / _IN_THE_MIDDLE_ONE_IN) else 1.0

    def _draws(self, share: float) -> bool:
        return share > 0 and self._chance() < share
