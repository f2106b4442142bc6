"""What all states of one search share: the real cores and rows, put into one state at a time."""

from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.local.lease_rows import LeaseRows
from tests.simulation.tiny_worlds.snapshots import CoreOfHost
from tests.simulation.tiny_worlds.states import BOOTED_S, Ledger, LiveHost, State
from tests.simulation.tiny_worlds.worlds import FAILOVER_S, OWNERS, TICK_S, World


def chance() -> float:
    """What is left to chance is the same in every state: half of each back-off."""
    return 0.5


class Shells:
    """`log` is where what happens is written down while a story is told; `applied` the kinds of
    writes that were seen to apply."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows = LeaseRows()
        self.log = None
        self.applied = set()
        self.cores = []
        self.clocks = []
        for owner, rate in zip(OWNERS, world.rates, strict=True):
            # Ended rows go at once: a minute of these worlds would be out of reach.
            policy = ManagerPolicy(me=owner, failover_s=FAILOVER_S, ended_rows_stay_s=0.0)
            self.cores.append(CoreOfHost(LeaseManager(policy, chance)))
            self.clocks.append(rate * TICK_S)
        self._unborn = [core.save() for core in self.cores]
        self.keys = tuple(shard.shard_id for shard in world.shards)

    def unborn(self) -> State:
        """Before the managers start."""
        hosts = tuple(LiveHost() for _ in OWNERS)
        for host, mind in zip(hosts, self._unborn, strict=True):
            host.mind = mind
        return State(
            rows=self.world.rows(),
            hosts=hosts,
            ledgers={key: self._ledger(key) for key in self.keys},
            ticks=0,
            faults_left=self.world.faults_max,
            drains_left=self.world.drains_max,
        )

    def _ledger(self, key: str) -> Ledger:
        done = self.world.records if key in self.world.ended else 0
        return Ledger(done, done)

    def instant(self, index: int, ticks: int) -> float:
        """By the clock of a host."""
        return BOOTED_S + self.clocks[index] * ticks

    def tick_of(self, index: int, instant: float) -> float:
        """World time, in ticks, of a host's instant."""
        return (instant - BOOTED_S) / self.clocks[index]
