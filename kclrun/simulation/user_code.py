"""How user code behaves, drawn batch by batch: honest, slow, stalling, raising, or forgetful.

May not know: the gate, the lease. What a raise leads to is decided by the real error policy, in
`desk.py`. Rule: one draw a question, and none where the answer is certain, so that honest user
code costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

__all__ = ["Attempt", "BatchUserCode", "UserCode"]

# Of the batches that raise, one in so many holds a poison record and raises for ever; the others
# hold after one to five times, as many as the default `on_error.retries` repeats.
_POISONED_ONE_IN: Final = 16
_RAISES_MAX: Final = 5
# Of the checkpoints made by hand, one in so many names a record in the middle of its batch.
_IN_THE_MIDDLE_ONE_IN: Final = 4


class UserCode(msgspec.Struct, frozen=True, kw_only=True):
    """How processors behave. Shares are of batches: one that raises, one that takes `stall_s`;
    `checkpoints_by_hand`: user code asks for checkpoints itself; `never_checkpoints`: it should,
    and does not. Both are `checkpoint: manual`."""

    batch_s: float = 0.02
    raising: float = 0.0
    stalling: float = 0.0
    stall_s: float = 0.0
    checkpoints_by_hand: bool = False
    never_checkpoints: bool = False

    @property
    def is_manual(self) -> bool:
        """Only the processor moves the checkpoint."""
        return self.checkpoints_by_hand or self.never_checkpoints


class Attempt(msgspec.Struct, frozen=True):
    """One call of `process_records`: how long it takes, up to which share of the batch it then
    checkpoints (None: not at all), and whether it raises in the end."""

    duration_s: float
    checkpointed_share: float | None = None
    raises: bool = False


class BatchUserCode:
    """Of one lease process. `chance` gives numbers in [0, 1)."""

    def __init__(self, kind: UserCode, chance: Callable[[], float]) -> None:
        self._chance = chance
        self.improve(kind)

    def improve(self, kind: UserCode) -> None:
        """A new version of it: from the next call on it behaves like this."""
        self.kind = kind
        self._raises_left = 0.0
        self._always = Attempt(kind.batch_s)
        self._is_honest = not (kind.raising or kind.stalling or kind.checkpoints_by_hand)

    def begin(self) -> Attempt:
        """A batch is given to it for the first time."""
        if self._is_honest:
            return self._always
        self._raises_left = self._raises() if self._draws(self.kind.raising) else 0.0
        return self.again()

    def again(self) -> Attempt:
        """The same batch, once more."""
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
