"""The state that all hosts of a fleet share: time, table, stream, observer, settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from kclrun.leases.policy import Balance
from kclrun.model.lease import Owner, OwnerId
from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.observer import Observer
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.table import SimulatedTable
from kclrun.simulation.user_code import UserCode

# Scans every half failover (5 s of 10), then the take, the fork and the claim.
_AFTER_FAILOVER_S: Final = 7.0


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The application's settings, the same on every host. `poll_s` is `fetch.idle`,
    `grace_s` is `shutdown.grace`, `stall_s` is `stall`; `fan_out` is `fetch.mode: fan-out`;
    `balance` is `leases.balance`."""

    failover_s: float = 10.0
    checkpoint_every_s: float = 10.0
    poll_s: float = 1.0
    leases_max: int = 64
    grace_s: float = 60.0
    stall_s: float = 120.0
    uncheckpointed_max: int = 100_000
    fan_out: bool = False
    balance: Balance = "load"

    @property
    def read_again_s(self) -> float:
        """L1: a lease that lost its reader has another one by then."""
        return self.failover_s + _AFTER_FAILOVER_S

    def owner_id(self, host: str) -> OwnerId:
        """The owner id of a host called `<group>:<slot>:<nonce>`."""
        return Owner(*host.split(":")).id


@dataclass
class SimulatedWorld:
    """One for a fleet. New lease processes run `user_code`."""

    scheduler: Scheduler
    table: SimulatedTable
    stream: ShardStream
    observer: Observer
    settings: FleetSettings
    user_code: UserCode
