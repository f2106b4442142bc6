"""Every state that a tiny world can come to, breadth first: so the first violation is a shortest.

For each state the fair schedule's next state is kept. At the end each state is followed along it:
one that never comes to where every lease is read is stuck.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable

import msgspec

from kclrun.errors import InvariantViolation
from tests.simulation.tiny_worlds.motions import begin
from tests.simulation.tiny_worlds.moves import moves, step
from tests.simulation.tiny_worlds.shapes import Shapes
from tests.simulation.tiny_worlds.shells import Shells
from tests.simulation.tiny_worlds.states import State
from tests.simulation.tiny_worlds.worlds import OWNERS, World

_UNKNOWN = -1
# What is known of a state: every lease is read in it or soon after; it is being followed just now.
_CALM, _ON_PATH = 1, 2
# A look at the clock can cost as much as a state: one in so many, a tenth of a second apart.
_CLOCK_EVERY = 256


class Violation(msgspec.Struct, frozen=True):
    """What was broken, and the moves that lead to it from the start: each by its place among all
    that could happen."""

    words: str
    places: tuple[int, ...]


class Found(msgspec.Struct):
    """What one search came to. `is_complete`: nothing is left unexplored. `judged` states were
    followed by the fair schedule until every lease is read. `applied` are the kinds of writes that
    were seen to apply.
    """

    world: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    is_complete: bool = False
    judged: int = 0
    applied: tuple[str, ...] = ()
    violation: Violation | None = None

    def line(self) -> str:
        """For people."""
        extent = "complete" if self.is_complete else "cut"
        verdict = "broken" if self.violation else "holds"
        return (
            f"{self.world}: {verdict}, {extent}: {self.states:,} states,"
            f" {self.transitions:,} transitions, depth {self.depth},"
            f" {self.judged:,} followed to rest, {self.seconds:.1f} s,"
            f" {self.states / max(self.seconds, 1e-9):,.0f} states/s; {' '.join(self.applied)}"
        )


class Search:
    """One search of one world. `seconds_max` are of this process' own CPU time, so that a limit
    means the same on a busy machine."""

    def __init__(
        self,
        world: World,
        *,
        states_max: int,
        seconds_max: float,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._shells = Shells(world)
        self._shapes = Shapes(self._shells)
        self._states_max = states_max
        self._clock = clock
        self._ends_at = clock() + seconds_max
        self._numbers: dict[int, int] = {}
        self._parents = array("l")
        self._places = array("H")  # of the move among all of its state
        self._fair = array("l")
        self._calm = bytearray()
        self._looked = 0
        self.found = Found(world.name)

    def run(self) -> Found:
        """Explore until all is seen, something is broken, or a limit is reached."""
        found, began = self.found, self._clock()
        start = begin(self._shells)
        frontier = deque([(start, self._meet(start, self._shapes.key(start), _UNKNOWN, 0), 0)])
        while frontier and self._may_go_on():
            state, number, depth = frontier.popleft()
            found.depth = depth
            self._expand(state, number, depth, frontier)
        found.is_complete = not frontier and found.violation is None
        if found.violation is None:
            self._follow_all(frontier)
        found.states = len(self._numbers)
        found.applied = tuple(sorted(self._shells.applied))
        found.seconds = self._clock() - began
        return found

    def _may_go_on(self) -> bool:
        if self.found.violation is not None or len(self._numbers) >= self._states_max:
            return False
        self._looked += 1
        is_time_to_look = self._looked % _CLOCK_EVERY == 0
        return not is_time_to_look or self._clock() < self._ends_at

    def _expand(self, state: State, number: int, depth: int, frontier) -> None:
        for place, move in enumerate(moves(self._shells, state)):
            self.found.transitions += 1
            try:
                following = step(self._shells, state, move)
            except (AssertionError, InvariantViolation) as broken:
                self.found.violation = Violation(str(broken), (*self._trail(number), place))
                return
            key = self._shapes.key(following)
            known = self._numbers.get(key)
            if known is None:
                known = self._meet(following, key, number, place)
                frontier.append((following, known, depth + 1))
            if place == 0:
                self._fair[number] = known

    def _meet(self, state: State, key: int, parent: int, place: int) -> int:
        number = self._numbers[key] = len(self._numbers)
        self._parents.append(parent)
        self._places.append(place)
        self._fair.append(_UNKNOWN)
        self._calm.append(is_settled(self._shells, state))
        return number

    def _trail(self, number: int) -> tuple[int, ...]:
        """The places of the moves from the start to this state."""
        places = []
        while self._parents[number] != _UNKNOWN:
            places.append(self._places[number])
            number = self._parents[number]
        return tuple(reversed(places))

    def _follow_all(self, frontier) -> None:
        """Liveness: from every state that was explored, the fair schedule comes to rest. Where it
        leads out of what was explored, it is left for a longer search to say."""
        calm, fair = self._calm, self._fair
        for _, number, _ in frontier:
            calm[number] = _CALM
        for begun in range(len(calm)):
            number, path = begun, []
            while not calm[number]:
                calm[number] = _ON_PATH
                path.append(number)
                number = fair[number]
            if calm[number] == _ON_PATH and path:
                self._stuck(number)
                return
            for each in path:
                calm[each] = _CALM
            self.found.judged += len(path)

    def _stuck(self, number: int) -> None:
        words = "L1: the fair schedule never comes to where every lease is read"
        self.found.violation = Violation(words, self._trail(number))


def is_settled(shells: Shells, state: State) -> bool:
    """Every lease that may be read is owned by a manager that takes part, and read to its end; or
    no manager takes part any more."""
    takes_part = {
        owner
        for owner, host in zip(OWNERS, state.hosts, strict=True)
        if host.has_manager and not host.is_draining and not host.is_finished
    }
    if not takes_part:
        return True
    return all(_is_read(shells, state, key, takes_part) for key in shells.keys)


def _is_read(shells: Shells, state: State, key: str, takes_part) -> bool:
    row = state.rows.get(key)
    ledger = state.ledgers[key]
    if row is None or row.is_ended:
        return ledger.processed >= shells.world.records and shells.world.is_closed(key)
    if row.owner not in takes_part or ledger.processed < shells.world.records:
        return False
    process = state.hosts[OWNERS.index(row.owner)].processes.get(key)
    return process is not None and process.life.state.value == "processing"
