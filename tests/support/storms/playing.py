"""Plays a storm, then calm, and says what was seen; and holds that a core stays within its bounds.

I12: a core holds no more than its rows, its shards and its fleet give reason for. Its containers
are found by their attributes, so that a new one is watched from the day it is written.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Set
from functools import partial
from typing import Any, Final

import msgspec

from kclrun.leases.manager import LeaseManager
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import BOOT_SPREAD_S, Fleet
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.stories import RuleBroken
from tests.support.java.fleet import MixedFleet
from tests.support.storms.calm import Calm, MixedCalm
from tests.support.storms.pausing import Pausing
from tests.support.storms.profile import Profile
from tests.support.storms.strikes import Strikes

# What a core holds beside its rows and shards: tables of handlers, a few events under way.
HELD_BESIDES_MAX: Final = 64
# Objects that belong to a core; what they point to elsewhere (settings, chance) is not its own.
_CORES: Final = ("kclrun.leases", "kclrun.lease")


def require_bounded(who: str, key: str, core: object, held_max: int) -> None:
    """Raises: RuleBroken for a container of `core` with more than `held_max` entries, and what it
    holds besides."""
    for path, size in sizes_of(core):
        if size > held_max + HELD_BESIDES_MAX:
            words = f"{who} holds {size} entries in {path}, and {held_max} have a reason"
            raise RuleBroken("I12", key, words)


def sizes_of(core: object) -> Iterator[tuple[str, int]]:
    """Every container that hangs on a core, with its path and its size."""
    seen: set[int] = set()
    name = type(core).__name__
    waiting: deque[tuple[str, object]] = deque((f"{name}.{k}", v) for k, v in _attributes(core))
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping | Set | list | deque | tuple):
            yield path, len(thing)
            if (some := _one_of(thing)) is not None:
                waiting.append((f"{path}[]", some))
        elif type(thing).__module__.startswith(_CORES):
            waiting.extend((f"{path}.{name}", value) for name, value in _attributes(thing))


def _one_of(container: Any) -> object | None:
    """The first part of a core in it (of its values, if it is a mapping), to look into: the others
    are of its kind."""
    values = container.values() if isinstance(container, Mapping) else container
    return next((each for each in values if type(each).__module__.startswith(_CORES)), None)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, msgspec.Struct):
        yield from ((name, getattr(thing, name)) for name in thing.__struct_fields__)
    else:
        yield from vars(thing).items() if hasattr(thing, "__dict__") else ()


def require_all_bounded(fleet: Fleet) -> None:
    """Look into every core that lives. Raises: RuleBroken.

    A manager has reason to hold its rows, its shards and those who ever owned one. A lease process
    has reason to hold one entry a batch until the next checkpoint, which comes after
    `checkpoint.every`, or a failover later where the table is away: two batches a poll, as a
    backlog is cut at the cap; over a subscription one a record; without checkpoints, one a record
    up to the cap. Where rows go to outputs, the checkpoint waits for them besides.
    """
    settings, user_code, stream = fleet.world.settings, fleet.world.user_code, fleet.stream
    rows = sum(1 for _ in fleet.table.leases())
    for_manager = rows + len(fleet.stream.shards()) + len(fleet.hosts)
    for host in fleet.hosts_up():
        require_bounded(host.name, "", host.core, for_manager)
        for process in host.living():
            waiting_s = settings.checkpoint_every_s + settings.failover_s
            waiting_s += getattr(process, "rows_wait_s", 0.0)
            for_process = int(2 * waiting_s / settings.poll_s)
            if user_code.is_manual:
                for_process = settings.uncheckpointed_max
            rate = stream.records.records_per_s(process.key)
            events_max = waiting_s * rate if settings.fan_out else 0
            held_max = for_process + int(events_max)
            require_bounded(process.who, process.key, process.life, held_max)


# `play` plays a storm from its profile: the storm, then calm, and what the calm must bring. The
# same profile plays the same storm, in any process.
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
    fleet = MixedFleet(
        profile.seed,
        shards=profile.shards,
        traffic=Traffic(
            records_per_s=profile.records_per_s,
            record_bytes=profile.record_bytes,
            skew=profile.skew,
        ),
        settings=profile.settings,
        user_code=profile.user_code,
        scan_page_rows=profile.scan_page_rows,
        replay=replay,
    )
    fleet.core_kind, fleet.process_kind = core_kind, process_kind
    strikes = Strikes(fleet)
    _switch_on(fleet, profile)
    strikes.plan(profile.strikes)
    if profile.pause_every_s:
        Pausing(fleet, profile.pause_every_s, profile.storm_s)
    fleet.table.faults = profile.table_faults
    fleet.stream.faults = profile.stream_faults
    fleet.table.network.kinesis_failing = (
        profile.stream_faults.throttled + profile.stream_faults.unreachable
    )
    fleet.run_for(profile.storm_s)
    fleet.judge(partial(require_all_bounded, fleet))
    calm = MixedCalm(fleet) if profile.java_workers else Calm(fleet)
    strikes.end()
    calm.begin()
    is_short = not calm.demand_all()
    return _played(fleet, strikes, is_short=is_short)


def _switch_on(fleet: MixedFleet, profile: Profile) -> None:
    """All hosts boot, dealt out to the groups in turn."""
    boots = fleet.scheduler.chance("boots")
    for number in range(profile.hosts):
        group = chr(ord("a") + number % profile.groups)
        fleet.after(boots.uniform(0, BOOT_SPREAD_S), partial(fleet.add_host, group, f"h{number}"))
    for number in range(profile.java_workers):
        group, slot = chr(ord("a") + number % profile.groups), f"j{number}"
        fleet.after(boots.uniform(0, BOOT_SPREAD_S), partial(fleet.add_java_worker, group, slot))


def _played(fleet: Fleet, strikes: Strikes, *, is_short: bool) -> Played:
    tally, costs = fleet.observer.tally, fleet.table.costs
    return Played(
        virtual_s=fleet.scheduler.now,
        events=fleet.scheduler.events_total,
        faults=costs.faults,
        strikes=strikes.hits,
        is_short=is_short,
        situations=fleet.observer.situations.names,
        records=tally.records,
        duplicates=tally.duplicates,
        story_hash=_digest(fleet),
    )


def _digest(fleet: Fleet) -> str:
    """Of the last events of every lease, to the microsecond, and of all counts: what took another
    turn anywhere on the way comes to other times here."""
    reported = fleet.stories.whole_text()
    counts = (fleet.scheduler.events_total, fleet.table.costs, fleet.observer.tally)
    return hashlib.sha256(f"{reported}\n{counts}".encode()).hexdigest()
