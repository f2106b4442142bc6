"""What one tiny world is: two managers, one to three shards, and a handful of things that go wrong.

Time passes in steps of a second, and `failover` is two of them; both numbers are far smaller than
anybody's settings, but every rule is in fractions or multiples of `failover`. The two hosts may
have clocks that differ in rate by as much as the promise allows (`drifts`).
"""

from typing import Final

import msgspec

from kclrun.model.lease import Lease, LeaseKey, Owner
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange, Shard

TICK_S: Final = 1.0
FAILOVER_S: Final = 2.0
OWNERS: Final = tuple(Owner("", name, "1").id for name in ("a", "b"))
# Binary fractions, so that instants of a clock compare exactly: 0.49 % from the true rate, and
# 0.98 % from each other; the promise (I4) is 1 %.
_FAST: Final = 1 + 5 / 1024
_SLOW: Final = 1 - 5 / 1024
_HALF: Final = (HASH_KEY_MAX + 1) // 2


class World(msgspec.Struct, frozen=True, kw_only=True):
    """`shards`, each with so many `records`; rows stand there for those without parents, and for
    the children of those that have `ended` before the managers start. `faults`
    names what may go wrong, `faults_max` times in all; `drains_max` managers are told to drain, at
    any time. `drifts`: one clock is as slow, the other as fast, as the promise allows.
    """

    name: str
    says: str
    shards: tuple[Shard, ...]
    records: int = 1
    ended: frozenset[str] = frozenset()
    faults: frozenset[str] = frozenset()
    faults_max: int = 0
    drains_max: int = 0
    drifts: bool = False

    @property
    def rates(self) -> tuple[float, float]:
        return (_SLOW, _FAST) if self.drifts else (1.0, 1.0)

    @property
    def is_symmetric(self) -> bool:
        """Whether the two hosts are alike, so that a state and its mirror image are one."""
        return not self.drifts

    def rows(self) -> dict[str, Lease]:
        """The table as it is when the managers start: synced, nothing owned."""
        return {
            shard.shard_id: Lease(
                key=LeaseKey(shard.shard_id),
                checkpoint=SHARD_END if shard.shard_id in self.ended else TRIM_HORIZON,
                parents=frozenset(shard.parents),
                children=frozenset(
                    child.shard_id
                    for child in self.children_of(shard.shard_id)
                    if shard.shard_id in self.ended
                ),
                hash_range=shard.hash_range,
            )
            for shard in self.shards
            if not shard.parents or self.ended.intersection(shard.parents)
        }

    def children_of(self, key: str) -> tuple[ChildShard, ...]:
        return tuple(
            ChildShard(shard.shard_id, shard.parents, shard.hash_range)
            for shard in self.shards
            if key in shard.parents
        )

    def parents_of(self, key: str) -> tuple[str, ...]:
        return next(shard.parents for shard in self.shards if shard.shard_id == key)

    def is_closed(self, key: str) -> bool:
        return any(shard.shard_id == key and not shard.is_open for shard in self.shards)


def _shard(name: str, first: int, last: int, *parents: str, is_closed: bool = False) -> Shard:
    hash_range = HashRange(first * _HALF, (last + 1) * _HALF - 1)
    return Shard(name, hash_range, "1", "9" if is_closed else None, *parents)


_ONE = (_shard("s0", 0, 1),)
_TWO = (_shard("s0", 0, 0), _shard("s1", 1, 1))
_SPLIT = (
    _shard("s0", 0, 1, is_closed=True),
    _shard("s1", 0, 0, "s0"),
    _shard("s2", 1, 1, "s0"),
)
_MERGE = (
    _shard("s0", 0, 0, is_closed=True),
    _shard("s1", 1, 1, is_closed=True),
    _shard("s2", 0, 1, "s0", "s1"),
)
_NETWORK: Final = ("lose request", "lose reply", "late", "slow")


def _world(
    name: str,
    says: str,
    shards: tuple[Shard, ...],
    *faults: str,
    times: int = 1,
    records: int = 1,
    drains_max: int = 0,
    drifts: bool = False,
    ended: frozenset[str] = frozenset(),
) -> World:
    return World(
        name=name,
        says=says,
        shards=shards,
        faults=frozenset(faults),
        faults_max=times if faults else 0,
        records=records,
        drains_max=drains_max,
        drifts=drifts,
        ended=ended,
    )


# From the smallest to the largest: a run that is cut short has seen the smallest whole.
WORLDS: Final = (
    _world("calm", "two managers start, and nothing goes wrong", _ONE, records=2),
    _world("drift", "their clocks differ as much as is promised", _ONE, records=2, drifts=True),
    _world("drain", "one of them drains", _ONE, drains_max=1),
    _world("ask", "an operator asks for the lease", _ONE, "ask"),
    _world("kill", "a lease process is killed, its write on its way", _ONE, "kill process"),
    _world("host", "a host is lost", _ONE, "kill host"),
    _world("manager", "a manager is killed, its lease process is not", _ONE, "kill manager"),
    _world("restart", "a lease process ends, and keeps its lease", _ONE, "restart"),
    _world("stale", "a scan is told late", _ONE, "stale"),
    _world("network", "a write or its answer is lost, or late", _ONE, *_NETWORK),
    _world("end", "a closed shard is read to its end, and split", _SPLIT),
    _world("merge", "two closed shards, merged into a third", _MERGE),
    _world("half-merge", "the same, one of the two has ended", _MERGE, ended=frozenset({"s0"})),
    _world("two", "two leases for two managers", _TWO),
    _world("drift-network", "the network, and clocks that differ", _ONE, *_NETWORK, drifts=True),
    _world("drain-network", "a drain, and the network", _ONE, *_NETWORK, drains_max=1),
    _world("stale-host", "a host is lost, a scan is late", _ONE, "stale", "kill host", times=2),
    _world(
        "kill-late", "a process is killed, writes are late", _ONE, "kill process", "late", times=2
    ),
    _world("drains", "both managers drain, one after the other", _ONE, *_NETWORK, drains_max=2),
    _world("ask-network", "an ask, and the network", _ONE, "ask", *_NETWORK, times=2),
    _world("two-ask", "two leases, and an ask of an operator", _TWO, "ask"),
    _world("split-kill", "a split, and a process is killed", _SPLIT, "kill process"),
    _world("merge-kill", "a merge, and a process is killed", _MERGE, "kill process"),
    _world("split-network", "a split, and the network", _SPLIT, *_NETWORK),
    _world("merge-network", "a merge, and the network", _MERGE, *_NETWORK),
    _world("split-host", "a split, and a host is lost", _SPLIT, "kill host"),
    _world("restart-network", "the same, and the network", _ONE, "restart", *_NETWORK, times=2),
    _world("network-twice", "the network fails twice", _ONE, *_NETWORK, times=2),
    _world(
        "three",
        "three faults of any kind",
        _ONE,
        *_NETWORK,
        "ask",
        "kill process",
        "kill host",
        "stale",
        times=3,
    ),
)
