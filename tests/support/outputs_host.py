"""The lease process as its outputs see it, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class FakeHost:
    """Implements `OutputsHost`: events go to `post`; `held` has True for each hold, and False for
    each release."""

    def __init__(
        self, post: Callable[[Any], object] = lambda _: None, held: list[bool] | None = None
    ) -> None:
        self.post = post
        self.held: list[bool] = [] if held is None else held

    @property
    def is_held(self) -> bool:
        return bool(self.held) and self.held[-1]

    def hold(self) -> None:
        self.held.append(True)

    def release(self) -> None:
        self.held.append(False)
