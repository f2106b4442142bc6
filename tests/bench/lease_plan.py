"""Row `plan`: how long a manager thinks after a scan of 10,000 leases of 1,000 owners."""

import random
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from bench.figures import Figure, Target, figure
from bench.measuring import timed
from kclrun.leases import events
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import STEADY_AFTER_S
from kclrun.model.lease import Lease, LeaseKey, Load, OwnerId
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import Instant

_ROW: Final = "plan"
_LEASES: Final = 10_000
_OWNERS: Final = 1_000
# Above 16 owners most managers scan every two failovers [P9].
_SCAN_EVERY_S: Final = 20.0
# Until a second scan nothing can be known to be renewed or expired.
_WARM_UP: Final = 2
# Scans until leases count as steady, so that loads are looked at.
_STEADY: Final = int(STEADY_AFTER_S / _SCAN_EVERY_S) + 2
_HOT: Final = 7
_TARGET: Final = Target(at_most=50.0)


def plan_time(rounds: int) -> list[Figure]:
    """CPU milliseconds from the scan to all that it leads to: expiry, counts, takes, asks, audit.

    Four managers: one at rest in the fleet, one that just came (it asks for eight leases), one that
    sees a tenth of the fleet dead (it takes its share of a thousand expired leases), and a heavy
    one that tries all other owners for an exchange and finds none, because its hot lease is too
    heavy for any.
    """
    return [
        _figure("at rest", rounds, me=_owner(7), is_dead=lambda _: False),
        _figure("a newcomer", rounds, me=OwnerId("kclrun:az1:new:n"), is_dead=lambda _: False),
        _figure("a tenth is dead", rounds, me=_owner(7), is_dead=lambda owner: owner % 10 == 0),
        _figure("a heavy owner", rounds, me=_owner(7), is_dead=lambda _: False, scans=_STEADY),
    ]


def _figure(
    what: str,
    rounds: int,
    *,
    me: OwnerId,
    is_dead: Callable[[int], bool],
    scans: int = _WARM_UP + 1,
) -> Figure:
    spent = []
    leases = _table()
    for _ in range(rounds):
        manager = LeaseManager(ManagerPolicy(me=me), random.Random(1).random)
        manager.handle(events.Started(), Instant(0.0))
        rows = leases
        for scan in range(scans):
            now = Instant(_SCAN_EVERY_S * scan)
            manager.handle(events.Ticked(), now)
            sample = timed(partial(_commands, manager, events.LeasesScanned(rows), now))
            rows = tuple(
                lease
                if is_dead(number % _OWNERS)
                else msgspec.structs.replace(lease, counter=lease.counter + 1)
                for number, lease in enumerate(rows)
            )
        spent.append(sample.cpu_s * 1_000)
    return figure(_ROW, what, "ms", spent, target=_TARGET)


def _commands(manager: LeaseManager, event: events.Event, now: Instant) -> float:
    return float(len(manager.handle(event, now)))


def _owner(number: int) -> OwnerId:
    return OwnerId(f"kclrun:az{number % 3}:host{number}:nonce")


def _table() -> tuple[Lease, ...]:
    """Ten leases each; all children of shards that are gone, as in a stream of some age."""
    width = (HASH_KEY_MAX + 1) // _LEASES + 1
    return tuple(
        Lease(
            key=LeaseKey(f"shardId-{number:012d}"),
            checkpoint=TRIM_HORIZON,
            owner=_owner(number % _OWNERS),
            hash_range=HashRange(number * width, min(HASH_KEY_MAX, (number + 1) * width - 1)),
            parents=frozenset({f"shardId-gone-{number}"}),
            load=Load(9_000.0, 0.9) if number == _HOT else Load(90.0 + number % 7, 0.01),
        )
        for number in range(_LEASES)
    )
