"""What the settings of a watched fleet promise."""

from __future__ import annotations

import msgspec

__all__ = ["WatchPolicy"]


class WatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """As the fleet's settings have it. `is_manual`: checkpoints only when user code asks, so that
    what it did not checkpoint may come again."""

    failover_s: float = 10.0
    checkpoint_every_s: float = 10.0
    uncheckpointed_max: int = 100_000
    is_manual: bool = False
