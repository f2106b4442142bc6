"""Play a storm from its profile: the storm, then calm, and what the calm must bring.

`play` gives what was seen. Rule: the same profile plays the same storm, in any process. Look next:
`profile.py` (what a storm is), `strikes.py` (what strikes), `oracles/` (what is watched).
"""

from __future__ import annotations

import hashlib
from functools import partial

import msgspec

from kclrun.leases.manager import LeaseManager
from kclrun.simulation.calm import Calm
from kclrun.simulation.fleet import BOOT_SPREAD_S, Fleet
from kclrun.simulation.holdings import require_all_bounded
from kclrun.simulation.java.calm import MixedCalm
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.profile import Profile
from kclrun.simulation.strikes import Strikes

__all__ = ["Played", "play"]


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What a storm was, once it is over. `strikes` are those that hit something; `situations` the
    named ones that occurred; `is_short`: the hosts that were left could not hold all leases, so
    liveness could not be demanded; `story_hash` digests all that happened."""

    virtual_s: float
    events: int
    faults: int
    strikes: int
    is_short: bool
    situations: frozenset[str]
    records: int
    duplicates: int
    story_hash: str


def play(
    profile: Profile,
    *,
    replay: str = "",
    core_kind: type[LeaseManager] = LeaseManager,
    process_kind: type[LeaseProcess] = LeaseProcess,
) -> Played:
    """Play a storm and the calm after it. `core_kind` and `process_kind` are for planted bugs.

    Raises: InvariantViolation where a promise broke, with the story of the lease and `replay`.
    """
    fleet = Fleet(
        profile.seed,
        shards=profile.shards,
        records_per_s=profile.records_per_s,
        settings=profile.settings,
        user_code=profile.user_code,
        scan_page_rows=profile.scan_page_rows,
        replay=replay,
        core_kind=core_kind,
        process_kind=process_kind,
    )
    strikes = Strikes(fleet)
    _switch_on(fleet, profile)
    strikes.plan(profile.strikes)
    fleet.table.faults = profile.table_faults
    fleet.stream.faults = profile.stream_faults
    fleet.table.kinesis_failing = (
        profile.stream_faults.throttled + profile.stream_faults.unreachable
    )
    fleet.run_for(profile.storm_s)
    fleet.judge(partial(require_all_bounded, fleet))
    calm = MixedCalm(fleet) if profile.java_workers else Calm(fleet)
    strikes.end()
    calm.begin()
    is_short = not calm.demand_all()
    return _played(fleet, strikes, is_short=is_short)


def _switch_on(fleet: Fleet, profile: Profile) -> None:
    """All hosts boot, dealt out to the groups in turn."""
    boots = fleet.scheduler.chance("boots")
    for number in range(profile.hosts):
        group = chr(ord("a") + number % profile.groups)
        fleet.after(boots.uniform(0, BOOT_SPREAD_S), partial(fleet.add_host, group, f"h{number}"))
    for number in range(profile.java_workers):
        group, slot = chr(ord("a") + number % profile.groups), f"j{number}"
        fleet.after(boots.uniform(0, BOOT_SPREAD_S), partial(fleet.add_java_worker, group, slot))


def _played(fleet: Fleet, strikes: Strikes, *, is_short: bool) -> Played:
    tally, costs = fleet.oracles.tally, fleet.table.costs
    return Played(
        virtual_s=fleet.scheduler.now,
        events=fleet.scheduler.events_total,
        faults=costs.faults,
        strikes=strikes.hits,
        is_short=is_short,
        situations=fleet.oracles.situations.names,
        records=tally.records,
        duplicates=tally.duplicates,
        story_hash=_digest(fleet),
    )


def _digest(fleet: Fleet) -> str:
    """Of the last events of every lease, to the microsecond, and of all counts: what took another
    turn anywhere on the way comes to other times here."""
    told = fleet.stories.tell_all()
    counts = (fleet.scheduler.events_total, fleet.table.costs, fleet.oracles.tally)
    return hashlib.sha256(f"{told}\n{counts}".encode()).hexdigest()
