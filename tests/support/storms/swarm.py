"""Draws storms from seeds: the faults of a storm, how hard they strike, and a fleet for them.

Swarm testing: each storm has a random few of all the faults, because a fault that is always present
hides the behaviour without it. Each part of a profile is drawn from a source of its own, so that a
new part changes no other part of existing storms. The module does not know how a storm is played.
"""

import math
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec

from kclrun.simulation.arrivals import RECORD_BYTES
from kclrun.simulation.network import FaultRates
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings
from tests.support.storms.profile import Profile, Strike, StrikeKind

Choice = TypeVar("Choice")

# As in FoundationDB: a fault that is possible at all is active in a quarter of the runs.
_ACTIVE: Final = 0.25
# 98 % of the failures in a study need at most three nodes (OSDI '14, Yuan).
_HOSTS_MAX: Final = 5
_ADDED_HOSTS_MAX: Final = 3
_SHARDS_MAX: Final = 16
_HOURS_MAX: Final = 6.0
# Hosts boot and take their first leases before the first strike; about half a minute.
_FIRST_STRIKE_S: Final = 30.0
# The interval of one kind of strike: a fleet needs a minute to settle, and in half an hour the last
# strike has no effect any more.
_STRIKES_EVERY_S: Final = (60.0, 1800.0)
# Shares of requests: from a rare fault to a brown-out, in which every third still gets through.
_SHARE: Final = (0.001, 0.15)
# A shard whose row is deleted is read again from the start, if another manager comes before its
# owner: all records come twice, which hides other duplicates. So it is in fewer storms than others.
_ROWS_DELETED: Final = 0.1
# Later strikes hit a fleet that stops: so it is in few storms, and once.
_STREAM_RECREATED: Final = 0.05
_ACTIVE_OF: Final[Mapping[StrikeKind, float]] = {
    "delete_row": _ROWS_DELETED,
    "recreate_stream": _STREAM_RECREATED,
}
_STRIKES_MAX: Final[Mapping[StrikeKind, int]] = {
    "add_host": _ADDED_HOSTS_MAX,
    "recreate_stream": 1,
}
# The time in which the first hosts boot and fork their first lease processes: half a second each.
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
_FAN_OUT: Final = 0.4
_JAVA_WORKERS_MAX: Final = 3
_POISONED: Final = 0.3
# From several in a batch to one in an hour or so.
_POISON_EVERY: Final = (20, 4_000)
# A cap of so many batches' records. Each batch takes at most half of the records that the cap
# allows during one call of user code, so that a reader that is behind can catch up.
_CAPS: Final = (4.0, 200.0)
# Beside the batch: a checkpoint, and the answer that makes room.
_BETWEEN_BATCHES_S: Final = 0.05
# Skewed traffic of records so large that handoffs for load pay: at 0.1 to 4 records a second and
# shard these are 25 KiB/s to 1 MiB/s, the most that a shard takes in.
_SKEWED: Final = 0.2
_SKEWS: Final = (0.5, 1.5)
_SKEWED_RECORD_BYTES: Final = 256 * 1024
# From less than the time of a renewal to ten failovers, and over the watchdog's patience.
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
    user_code = _poisoned(_chance(seed, "poison"), user_code)
    settings = _settings(_chance(seed, "settings"), hosts, shards)
    load = _chance(seed, "load")
    is_skewed = load.random() < _SKEWED
    cap = _cap(_chance(seed, "cap"), records_per_s * (user_code.batch_s + _BETWEEN_BATCHES_S))
    return Profile(
        seed=seed,
        hosts=hosts,
        groups=fleet.randint(1, min(3, hosts)),
        java_workers=_java_workers(_chance(seed, "java")),
        shards=shards,
        records_per_s=records_per_s,
        record_bytes=_SKEWED_RECORD_BYTES if is_skewed else RECORD_BYTES,
        skew=round(load.uniform(*_SKEWS), 2) if is_skewed else 0.0,
        settings=msgspec.structs.replace(
            settings,
            uncheckpointed_max=cap,
            fan_out=_chance(seed, "fan-out").random() < _FAN_OUT,
        ),
        storm_s=storm_s,
        table_faults=_shares(_chance(seed, "table"), FaultRates),
        scan_page_rows=_now_and_then(_chance(seed, "pages"), 2, 1000),
        stream_faults=_stream_faults(_chance(seed, "stream")),
        user_code=user_code,
        strikes=tuple(sorted(_strikes(seed, storm_s), key=lambda strike: strike.at_s)),
    )


def _settings(chance: random.Random, hosts: int, shards: int) -> FleetSettings:
    """Settings that are often at an edge, where bounds meet."""
    fair = math.ceil(shards / hosts)
    return FleetSettings(
        failover_s=chance.choice([3.0, 10.0, 20.0, round(chance.uniform(3.0, 20.0), 1)]),
        poll_s=chance.choice([1.0, 5.0, round(chance.uniform(1.0, 5.0), 1)]),
        checkpoint_every_s=chance.choice([1.0, 10.0, 60.0]),
        leases_max=chance.choice([64, 2 * shards, fair + 1, fair]),
    )


def _cap(chance: random.Random, records_per_batch: float) -> int:
    """The default, or a cap that is often reached: merges may leave one shard with all records."""
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


def _poisoned(chance: random.Random, user_code: UserCode) -> UserCode:
    """In some storms records fail for ever, and are given up."""
    every, then = chance.randint(*_POISON_EVERY), chance.choice(["dead-letter", "skip"])
    if chance.random() >= _POISONED:
        return user_code
    return msgspec.structs.replace(user_code, poison_every=every, then=then)


def _strikes(seed: int, storm_s: float) -> Iterator[Strike]:
    for kind in get_args(StrikeKind):
        chance = _chance(seed, kind)
        if chance.random() < _ACTIVE_OF.get(kind, _ACTIVE):
            yield from list(_strikes_of(kind, chance, storm_s))[: _STRIKES_MAX.get(kind)]
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
    """A share of requests: zero in most storms."""
    return round(_now_and_then(chance, _between(chance, *_SHARE), 0.0), 5)


def _now_and_then(chance: random.Random, seldom: Choice, mostly: Choice) -> Choice:
    return seldom if chance.random() < _ACTIVE else mostly


def _between(chance: random.Random, low: float, high: float) -> float:
    """Each power of ten is as likely as the next."""
    return math.exp(chance.uniform(math.log(low), math.log(high)))


def _chance(seed: int, part: str) -> random.Random:
    return random.Random(f"{seed}:{part}")
