"""A lease: one row of the table that all owners share, as a value."""

from __future__ import annotations

from typing import Final, NewType

import msgspec

from kclrun.errors import LimitExceeded
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime

__all__ = [
    "HOPPING_SWITCHES",
    "OWNER_PREFIX",
    "Halt",
    "Lease",
    "LeaseKey",
    "Owner",
    "OwnerId",
    "PendingCheckpoint",
]

LeaseKey = NewType("LeaseKey", str)
OwnerId = NewType("OwnerId", str)

OWNER_PREFIX: Final = "kclrun:"
# `ownerSwitchesSinceCheckpoint` from which a lease is shown as hopping: it was passed on five
# times and nobody got as far as one checkpoint.
HOPPING_SWITCHES: Final = 5


class Owner(msgspec.Struct, frozen=True):
    """`kclrun:<group>:<host slot>:<nonce>` in parts; the nonce is new at every manager start."""

    group: str
    slot: str
    nonce: str

    def __post_init__(self) -> None:
        for part in (self.group, self.slot, self.nonce):
            if ":" in part:
                raise LimitExceeded(f"owner part {part!r} contains a colon")

    @property
    def id(self) -> OwnerId:
        return OwnerId(f"{OWNER_PREFIX}{self.group}:{self.slot}:{self.nonce}")

    @classmethod
    def parse(cls, owner_id: str) -> Owner | None:
        """The parts of one of our owner ids, or None for anybody else's (a Java worker's)."""
        if not owner_id.startswith(OWNER_PREFIX):
            return None
        parts = owner_id[len(OWNER_PREFIX) :].split(":")
        return cls(*parts) if len(parts) == 3 else None


class PendingCheckpoint(msgspec.Struct, frozen=True):
    """The first half of a two-phase checkpoint of the Java KCL; kept until our first checkpoint."""

    position: ExtendedSequenceNumber
    state: bytes | None = None


class Halt(msgspec.Struct, frozen=True):
    """Why a lease stands still by decision: owned, renewed, not processed, until resumed."""

    reason: str
    halted_at: WallTime


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One row, as last read. Attributes: the KCL 2.x schema, then ours.

    `owner` None is an unowned lease. `counter` grows by one with every write of an owner and is
    the fencing token. `parents` and `children` are shard ids. `failover_s` and `start` are what
    the owner published at its take; None from a Java owner.
    """

    key: LeaseKey
    checkpoint: ExtendedSequenceNumber
    counter: int = 0
    owner: OwnerId | None = None
    owner_switches: int = 0
    parents: frozenset[str] = frozenset()
    children: frozenset[str] = frozenset()
    hash_range: HashRange | None = None
    checkpoint_owner: OwnerId | None = None
    pending: PendingCheckpoint | None = None
    throughput_kbps: float | None = None
    failover_s: float | None = None
    start: str | None = None
    latest_pinned_at: WallTime | None = None
    halt: Halt | None = None

    @property
    def is_ended(self) -> bool:
        """Everything in the shard was processed (checkpoint SHARD_END)."""
        return self.checkpoint.sequence_number == SHARD_END.sequence_number

    @property
    def is_hopping(self) -> bool:
        return self.owner_switches >= HOPPING_SWITCHES
