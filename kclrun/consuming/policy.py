"""What the settings and the start command say about one lease."""

from __future__ import annotations

from typing import Literal

import msgspec

from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.time import Instant

__all__ = ["LifePolicy"]


class LifePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`failover_s` is the smallest in the fleet; `expires_instant` ends an unclaimed start [P4]."""

    key: LeaseKey
    shard_id: str
    me: OwnerId
    seen_counter: int
    expires_instant: Instant
    failover_s: float
    checkpoint_mode: Literal["auto", "batch", "manual"] = "auto"
    checkpoint_every_s: float = 10.0
    uncheckpointed_max: int = 100_000

    @property
    def is_manual(self) -> bool:
        """Only the processor moves the checkpoint."""
        return self.checkpoint_mode == "manual"
