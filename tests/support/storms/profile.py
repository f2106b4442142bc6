"""The description of one storm: a fleet, a stream, the faults of the network, and all strikes.

A profile contains everything in advance. So the same file plays the same storm, and a storm gets
smaller when parts of its profile are left out. The module does not know how a storm is played.
"""

from typing import Literal

import msgspec

from kclrun.simulation.arrivals import RECORD_BYTES
from kclrun.simulation.network import FaultRates
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings

StrikeKind = Literal[
    "kill_process",  # SIGKILL of one lease process; its manager lives
    "freeze_process",  # SIGSTOP of one lease process, SIGCONT after `lasts_s`
    "kill_manager",  # SIGKILL of a manager alone: its lease processes find out; started again later
    "freeze_manager",  # SIGSTOP of a manager alone
    "kill_host",  # power loss: manager and lease processes at once; a new one after `lasts_s`
    "freeze_host",  # a suspended machine
    "drain_host",  # SIGTERM; a new manager in its place after `lasts_s`
    "add_host",  # one more host, permanently
    "cut_host",  # no request of this host gets through for `lasts_s`
    "fail_forks",  # no process can be started on this host for `lasts_s`
    "split_shard",
    "merge_shards",
    "release_lease",  # an operator's request: `leases release`
    "move_lease",  # `leases move`
    "expire_shards",  # the retention passes over shards that have been closed for `lasts_s`
    "delete_row",  # a lease row is deleted from outside
    "recreate_stream",  # the stream is deleted and created again under its name: the end
]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """An event that hits the fleet. `target` selects, modulo their number, one of the possible
    targets at that time, in the order of their names; without any target nothing happens."""

    at_s: float
    kind: StrikeKind
    target: int = 0
    lasts_s: float = 0.0


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One storm, then calm. Faults and strikes end with `storm_s`. In the calm that follows, hosts
    that are cut, frozen or without forks are healed, lost hosts stay lost, and the liveness
    promises are demanded. `seed` determines everything that is left to chance; `scan_page_rows`
    bounds a page of a scan. `skew` and `record_bytes` are those of `Traffic`. `with_state`: lease
    processes have keyed state and get single records (`states.py`). `pause_every_s`: an
    operator pauses or resumes so often; 0 for never."""

    seed: int
    hosts: int
    groups: int = 1
    java_workers: int = 0
    shards: int = 4
    records_per_s: float = 16.0
    record_bytes: int = RECORD_BYTES
    skew: float = 0.0
    settings: FleetSettings = FleetSettings()
    storm_s: float = 3600.0
    table_faults: FaultRates = FaultRates()
    scan_page_rows: int = 1000
    stream_faults: StreamFaults = StreamFaults()
    user_code: UserCode = UserCode()
    strikes: tuple[Strike, ...] = ()
    with_state: bool = False
    pause_every_s: float = 0.0
