"""Draws storms: which faults a seed has, how hard they strike, and a fleet for them to befall.

Swarm testing: each storm has a random few of all the faults, for a fault that is always there hides
what happens without it. May not know: how a storm is played. Rule: each part of a profile is drawn
from a source of its own, so that a new part changes no other part of the storms there were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, Final, TypeVar, get_args

import msgspec

from kclrun.simulation.profile import Profile, StreamFaults, Strike, StrikeKind, UserCode
from kclrun.simulation.table import FaultRates
from kclrun.simulation.world import FleetSettings

__all__ = ["draw_profile"]

Choice = TypeVar("Choice")

# FoundationDB's: a fault that is possible at all is active in a quarter of the runs.
_ACTIVE: Final = 0.25
# 98 % of the failures that anybody has studied need three nodes at the most (OSDI '14, Yuan).
_HOSTS_MAX: Final = 5
_ADDED_HOSTS_MAX: Final = 3
_SHARDS_MAX: Final = 16
_HOURS_MAX: Final = 6.0
# Hosts boot and take their first leases before the first strike; half a minute, give or take.
_FIRST_STRIKE_S: Final = 30.0
# One kind of strike comes this often: a fleet needs a minute to settle, and in half an hour it has
# forgotten the last one.
_STRIKES_EVERY_S: Final = (60.0, 1800.0)
# Shares of requests: from the odd one to a brown-out, in which every third still gets through.
_SHARE: Final = (0.001, 0.15)
# Whose row somebody deletes is read again from the start, if another manager is there before its
# owner: everything twice, which hides whatever else comes twice. So in fewer storms than others.
_ROWS_DELETED: Final = 0.1
# While the first hosts boot and fork their first lease processes: some half a second each.
_BOOTING_S: Final = 2.5
_AT_BOOT_MAX: Final = 3
_AT_BOOT: Final[tuple[StrikeKind, ...]] = (
    "kill_process",
    "freeze_process",
    "kill_manager",
    "freeze_manager",
    "kill_host",
    "freeze_host",
    "drain_host",
    "cut_host",
    "fail_forks",
    "split_shard",
)
_MIXED: Final = 0.2
_JAVA_WORKERS_MAX: Final = 3
# A cap of so many batches' records, and each batch at most half of what the cap lets through while
# user code is at work: whoever falls behind must be able to catch up.
_CAPS: Final = (4.0, 200.0)
# Beside the batch: a checkpoint, and the answer that makes room.
_BETWEEN_BATCHES_S: Final = 0.05
# From less than a renewal takes to ten failovers, and over the watchdog's patience.
_LASTS_S: Final = (0.1, 200.0)
_STALL_S: Final = 120.0


def draw_profile(seed: int) -> Profile:
    """The storm of a seed."""
    storm_s = 3600.0 * _chance(seed, "hours").uniform(1.0, _HOURS_MAX)
    fleet = _chance(seed, "fleet")
    hosts = fleet.randint(1, _HOSTS_MAX)
    shards = fleet.randint(1, _SHARDS_MAX)
    records_per_s = shards * _between(_chance(seed, "records"), 0.1, 4.0)
    user_code = _user_code(_chance(seed, "user code"))
    settings = _settings(_chance(seed, "settings"), hosts, shards)
    cap = _cap(_chance(seed, "cap"), records_per_s * (user_code.batch_s + _BETWEEN_BATCHES_S))
    return Profile(
        seed=seed,
        hosts=hosts,
        groups=fleet.randint(1, min(3, hosts)),
        java_workers=_java_workers(_chance(seed, "java")),
        shards=shards,
        records_per_s=records_per_s,
        settings=msgspec.structs.replace(settings, uncheckpointed_max=cap),
        storm_s=storm_s,
        table_faults=_shares(_chance(seed, "table"), FaultRates),
        scan_page_rows=_now_and_then(_chance(seed, "pages"), 2, 1000),
        stream_faults=_stream_faults(_chance(seed, "stream")),
        user_code=user_code,
        strikes=tuple(sorted(_strikes(seed, storm_s), key=lambda strike: strike.at_s)),
    )


def _settings(chance: random.Random, hosts: int, shards: int) -> FleetSettings:
    """Often at an edge: there bounds meet."""
    fair = math.ceil(shards / hosts)
    return FleetSettings(
        failover_s=chance.choice([3.0, 10.0, 20.0, round(chance.uniform(3.0, 20.0), 1)]),
        poll_s=chance.choice([1.0, 5.0, round(chance.uniform(1.0, 5.0), 1)]),
        checkpoint_every_s=chance.choice([1.0, 10.0, 60.0]),
        leases_max=chance.choice([64, 2 * shards, fair + 1, fair]),
    )


def _cap(chance: random.Random, records_per_batch: float) -> int:
    """The default, or one that is often reached: merges may leave one shard with all records."""
    seldom = math.ceil(max(1.0, records_per_batch) * _between(chance, *_CAPS))
    return _now_and_then(chance, seldom, FleetSettings().uncheckpointed_max)


def _java_workers(chance: random.Random) -> int:
    return chance.randint(1, _JAVA_WORKERS_MAX) if chance.random() < _MIXED else 0


def _stream_faults(chance: random.Random) -> StreamFaults:
    return StreamFaults(
        throttled=_share(chance),
        unreachable=_share(chance),
        expired_iterator=_share(chance),
        listing_lag_max_s=_now_and_then(chance, _between(chance, 0.5, 30.0), 0.0),
    )


def _user_code(chance: random.Random) -> UserCode:
    batch_s = _now_and_then(chance, _between(chance, 0.05, 5.0), 0.02)
    by_hand, never = chance.random() < _ACTIVE, chance.random() < _ACTIVE / 2
    stall_s = _now_and_then(chance, 1.5 * _STALL_S, _between(chance, 5.0, 60.0))
    return UserCode(
        batch_s=batch_s,
        raising=_share(chance) / 10,
        stalling=_share(chance) / 100,
        stall_s=stall_s,
        checkpoints_by_hand=by_hand and not never,
        never_checkpoints=never,
    )


def _strikes(seed: int, storm_s: float) -> Iterator[Strike]:
    for kind in get_args(StrikeKind):
        chance = _chance(seed, kind)
        if chance.random() < (_ROWS_DELETED if kind == "delete_row" else _ACTIVE):
            strikes = _strikes_of(kind, chance, storm_s)
            yield from list(strikes)[: _ADDED_HOSTS_MAX if kind == "add_host" else None]
    yield from _strikes_at_boot(_chance(seed, "boot"))


def _strikes_at_boot(chance: random.Random) -> Iterator[Strike]:
    for _ in range(_now_and_then(chance, chance.randint(1, _AT_BOOT_MAX), 0)):
        yield _strike(chance, chance.choice(_AT_BOOT), chance.uniform(0, _BOOTING_S))


def _strikes_of(kind: StrikeKind, chance: random.Random, storm_s: float) -> Iterator[Strike]:
    every_s = _between(chance, *_STRIKES_EVERY_S)
    at_s = _FIRST_STRIKE_S + chance.expovariate(1 / every_s)
    while at_s < storm_s:
        yield _strike(chance, kind, at_s)
        at_s += chance.expovariate(1 / every_s)


def _strike(chance: random.Random, kind: StrikeKind, at_s: float) -> Strike:
    return Strike(
        at_s=round(at_s, 3),
        kind=kind,
        target=chance.randrange(1000),
        lasts_s=round(_between(chance, *_LASTS_S), 3),
    )


def _shares(chance: random.Random, kind: type[FaultRates]) -> FaultRates:
    names: list[Any] = [field.name for field in msgspec.structs.fields(kind)]
    return kind(**{name: _share(chance) for name in names})


def _share(chance: random.Random) -> float:
    """Of requests: none in most storms."""
    return round(_now_and_then(chance, _between(chance, *_SHARE), 0.0), 5)


def _now_and_then(chance: random.Random, seldom: Choice, mostly: Choice) -> Choice:
    return seldom if chance.random() < _ACTIVE else mostly


def _between(chance: random.Random, low: float, high: float) -> float:
    """Each power of ten as likely as the next."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def _chance(seed: int, part: str) -> random.Random:
    return random.Random(f"{seed}:{part}")
