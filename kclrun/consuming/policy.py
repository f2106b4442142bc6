"""What the settings and the start command say about one lease."""

from __future__ import annotations

from typing import Literal

import msgspec

from kclrun.model.lease import LeaseKey, OwnerId
from kclrun.model.time import Instant

__all__ = ["LifePolicy", "batch_records_max"]


def batch_records_max(uncheckpointed_max: int) -> int:
    """The most records of one batch: half of the cap, so that there is room for another one.

    A checkpoint inside a batch counts none of it as covered. If a batch filled the whole cap, a
    processor that checkpoints all but its last records would have made no room: nothing more could
    be delivered, and the lease be halted for want of a checkpoint.
    """
    return max(1, uncheckpointed_max // 2)


class LifePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """`failover_s` is the smallest in the fleet; `expires_instant` ends an unclaimed start [P4].

    `has_waited`: a failover has passed since a take by force [P18]. `others_in_sight`: another
    kclrun owner is there to take what is offered [P17]. `has_keyed_state`: then no position is
    ever written without its snapshot, so no late checkpoint [P19].
    """

    key: LeaseKey
    me: OwnerId
    seen_counter: int
    expires_instant: Instant
    failover_s: float
    checkpoint_mode: Literal["auto", "batch", "manual"] = "auto"
    checkpoint_every_s: float = 10.0
    uncheckpointed_max: int = 100_000
    has_waited: bool = False
    others_in_sight: bool = False
    has_keyed_state: bool = False

    @property
    def is_manual(self) -> bool:
        """Only the processor moves the checkpoint."""
        return self.checkpoint_mode == "manual"
