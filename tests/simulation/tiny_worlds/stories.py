"""Tells what happened on the way to a violation: each move, what the cores said to it, the rows."""

from collections.abc import Iterable, Iterator

from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, Lease
from tests.simulation.tiny_worlds.motions import begin
from tests.simulation.tiny_worlds.moves import moves, step
from tests.simulation.tiny_worlds.search import Violation
from tests.simulation.tiny_worlds.shells import Shells
from tests.simulation.tiny_worlds.worlds import World


def tell(world: World, violation: Violation) -> str:
    """The whole story, as many lines as it takes."""
    lines = [f"{violation.words}", f"world {world.name}: {world.says}"]
    lines += _reported(world, violation.places)
    lines.append(f"replay: {replay_line(world, violation.places)}")
    return "\n".join(lines)


def replay_line(world: World, places: Iterable[int]) -> str:
    """A command that tells the same story again."""
    path = ".".join(map(str, places))
    return f"PYTHONPATH=. python -m tests.simulation.tiny_worlds.program {world.name} {path}"


def _shown(row: Lease) -> str:
    """What a reader looks for."""
    reported = f"{row.key}: {row.owner or 'nobody'} at counter {row.counter}, {row.checkpoint}"
    asked = f", asked for by {row.handoff.to}" if row.handoff else ""
    offered = f", offered to {row.offered_to or 'anybody'}" if row.owner == OFFERED else ""
    return f"{reported}{asked}{offered}"


def _reported(world: World, places: Iterable[int]) -> Iterator[str]:
    shells = Shells(world)
    state = begin(shells)
    for number, place in enumerate(places, start=1):
        verb, index, what = moves(shells, state)[place]
        of = "" if verb == "tick" else f" host {'ab'[index]} {'' if what is None else what}"
        yield f"{number:3}. at {state.ticks} s: {verb}{of}".rstrip()
        shells.log = []
        try:
            following = step(shells, state, (verb, index, what))
        except (AssertionError, InvariantViolation) as broken:
            yield from (f"       {line}" for line in shells.log)
            yield f"       {broken}"
            return
        yield from (f"       {line}" for line in shells.log)
        if following.rows is not state.rows:
            yield from (f"       row {_shown(row)}" for _, row in sorted(following.rows.items()))
        state = following
