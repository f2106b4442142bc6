"""An operator who pauses and resumes in the middle of a storm, by the plans of the verbs. Not a
test."""

from kclrun.model.lease import Scope
from kclrun.model.time import WallTime
from kclrun.operating.changes import ChosenLeases, plan_pause, plan_unpause
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.fleet import Fleet

# None: until it is resumed.
_LASTING_S = (None, 2.0, 15.0, 60.0)


class Pausing:
    """`every_s`: the mean time between two decisions, until `until_s`."""

    def __init__(self, fleet: Fleet, every_s: float, until_s: float) -> None:
        self._fleet = fleet
        self._chance = fleet.scheduler.chance("operator")
        at_s = 0.0
        while (at_s := at_s + self._chance.expovariate(1 / every_s)) < until_s:
            fleet.after(at_s, self._decide)

    def _decide(self) -> None:
        rows = sorted(self._fleet.table.leases(), key=lambda row: row.key)
        if not rows:
            return
        one = ChosenLeases(Scope.SHARD, frozenset({self._chance.choice(rows).key}))
        reach = self._chance.choice([ChosenLeases(Scope.ALL), one])
        plans = plan_unpause(rows, reach, self._now())
        if self._chance.random() < 0.5:
            plans = plan_pause(rows, reach, self._now(), self._chance.choice(_LASTING_S))
        for each in plans:
            if each.change is not None:
                self._fleet.table.write("operator", each.change, lambda _: None)

    def _now(self) -> WallTime:
        return WallTime(WORLD_BEGAN_AT + self._fleet.scheduler.now)


def end_pauses(fleet: Fleet) -> None:
    """`kclrun resume --all`."""
    for each in plan_unpause(list(fleet.table.leases()), ChosenLeases(Scope.ALL), WallTime(0.0)):
        if each.change is not None:
            fleet.table.write("operator", each.change, lambda _: None)
