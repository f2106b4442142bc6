"""What one storm is: a fleet, a stream, the faults of the network, and each thing that strikes.

A profile says all of it beforehand, so that the same file plays the same storm, and a storm gets
smaller by leaving things out of its profile. May not know: how a storm is played. Look next:
`swarm.py` draws profiles, `playing.py` plays them, `shrinking.py` makes them smaller.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.table import FaultRates
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings

__all__ = ["Profile", "StreamFaults", "Strike", "StrikeKind", "UserCode"]

StrikeKind = Literal[
    "kill_process",  # SIGKILL of one lease process; its manager lives
    "freeze_process",  # SIGSTOP of one lease process, SIGCONT after `lasts_s`
    "kill_manager",  # SIGKILL of a manager alone: its lease processes find out; started again later
    "freeze_manager",  # SIGSTOP of a manager alone
    "kill_host",  # power: manager and lease processes at one stroke; a new one after `lasts_s`
    "freeze_host",  # a suspended machine
    "drain_host",  # SIGTERM; a new manager in its place after `lasts_s`
    "add_host",  # one more, for good
    "cut_host",  # no request of this host gets through for `lasts_s`
    "fail_forks",  # no process can be started on this host for `lasts_s`
    "split_shard",
    "merge_shards",
    "release_lease",  # an operator's ask: `leases release`
    "move_lease",  # `leases move`
    "delete_row",  # somebody deletes a lease row
]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """Something that befalls the fleet. `target` picks, modulo their number, one of those it can
    hit at that time, in the order of their names; without any, nothing happens."""

    at_s: float
    kind: StrikeKind
    target: int = 0
    lasts_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One storm, then calm. Faults and strikes end with `storm_s`; in the calm that follows, hosts
    that are cut, frozen or without forks are healed, dead ones stay dead, and the liveness
    promises are demanded. `seed` is for everything that is left to chance, `scan_page_rows` bounds
    a page of a scan."""

    seed: int
    hosts: int
    groups: int = 1
    java_workers: int = 0
    shards: int = 4
    records_per_s: float = 16.0
    settings: FleetSettings = FleetSettings()
    storm_s: float = 3600.0
    table_faults: FaultRates = FaultRates()
    scan_page_rows: int = 1000
    stream_faults: StreamFaults = StreamFaults()
    user_code: UserCode = UserCode()
    strikes: tuple[Strike, ...] = ()
