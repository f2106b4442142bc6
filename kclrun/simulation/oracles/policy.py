"""The promises that follow from the settings of a watched fleet."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kclrun.model.lease import OWNER_PREFIX, LeaseKey, OwnerId


class WatchPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet's settings. `is_manual`: checkpoints only when user code asks, so that records
    without a checkpoint may come again."""

    failover_s: float = 10.0
    checkpoint_every_s: float = 10.0
    uncheckpointed_max: int = 100_000
    is_manual: bool = False


class Reader(Protocol):
    """One incarnation of a lease process, or of a Java consumer. `who` begins with the name of its
    host; a lease process adds a slash and its number."""

    key: LeaseKey
    who: str


def owner_of(who: str) -> OwnerId:
    """The owner in whose name a kclrun manager, or one of its lease processes, writes."""
    return OwnerId(OWNER_PREFIX + who.partition("/")[0])
