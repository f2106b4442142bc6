"""A lease: one row of the table that all owners share, as a value."""

from __future__ import annotations

from typing import Final, NewType

import msgspec

from kclrun.errors import LimitExceeded
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime

__all__ = [
    "ANYBODY",
    "ASK_STALE_AFTER_S",
    "FAILOVER_MAX_S",
    "FAILOVER_MIN_S",
    "HOPPING_SWITCHES",
    "OFFERED",
    "OWNER_PREFIX",
    "WRITTEN_AGAIN_AHEAD",
    "Halt",
    "Handoff",
    "Lease",
    "LeaseKey",
    "Owner",
    "OwnerId",
    "PendingCheckpoint",
]

LeaseKey = NewType("LeaseKey", str)
OwnerId = NewType("OwnerId", str)

OWNER_PREFIX: Final = "kclrun:"
# The owner of a row that was given away and waits for its taker: nobody, for every count [P17].
OFFERED: Final = OwnerId(f"{OWNER_PREFIX}offered")
# Whom an operator asks on behalf of who only wants a lease released, to whoever comes [P16].
ANYBODY: Final = OwnerId(f"{OWNER_PREFIX}anybody")
# An ask that was seen on its row for so long is stale [P16]: several renewals and a long batch
# fit into it. By the observer's own clock; the time written on the row is of no clock we know.
ASK_STALE_AFTER_S: Final = 30.0
# Shorter, and one slow garbage collection or disk flush costs a lease; longer than a quarter of
# an hour is a unit mistaken. The KCL's own default is 10 s.
FAILOVER_MIN_S: Final = 1.0
FAILOVER_MAX_S: Final = 900.0
# `ownerSwitchesSinceCheckpoint` from which a lease is shown as hopping: it was passed on five
# times and nobody got as far as one checkpoint.
HOPPING_SWITCHES: Final = 5
# A row that its owner writes again, for somebody deleted it, stands further on than anybody can
# have counted who had it in the meantime: a Java worker moves the counter with each checkpoint,
# too, after each of the five reads a second that Kinesis allows, for the longest failover at most:
# 4,500.
WRITTEN_AGAIN_AHEAD: Final = 5_000


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


class Handoff(msgspec.Struct, frozen=True):
    """An ask on a row: `to` would like to have the lease; since `asked_at`, by its own clock."""

    to: OwnerId
    asked_at: WallTime


class Lease(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row, as last read. Attributes: the KCL 2.x schema, then ours.

    `owner` None is an unowned lease. `counter` grows by one with every write of an owner and is
    the fencing token. `parents` and `children` are lease keys: bare shard ids, or with several
    streams qualified like this row's own (`stream_key.py`). `failover_s` and `start` are what
    the owner published at its take; None from a Java owner. `handoff` is an ask to the owner
    [P16]; `offered_to` and `offered_by` say whom an offered row is meant for, if anybody, and who
    gave it away [P17]; `taken_from` names the Java owner it was taken from by force, until the
    first claim that waited [P18].
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
    handoff: Handoff | None = None
    offered_to: OwnerId | None = None
    offered_by: OwnerId | None = None
    taken_from: OwnerId | None = None

    @property
    def is_ended(self) -> bool:
        """Everything in the shard was processed (checkpoint SHARD_END)."""
        return self.checkpoint.sequence_number == SHARD_END.sequence_number

    @property
    def is_hopping(self) -> bool:
        return self.owner_switches >= HOPPING_SWITCHES
