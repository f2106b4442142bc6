"""Checks every interleaving of the tiny worlds, one after the other: `bin/prove worlds`.

PYTHONPATH=. python -m tests.simulation.tiny_worlds.program WORLD PATH   tells one story again
"""

import resource
import sys

from tests.simulation.tiny_worlds.search import Search, Violation
from tests.simulation.tiny_worlds.stories import tell
from tests.simulation.tiny_worlds.worlds import WORLDS

_KIB_PER_MIB = 1024


def run(states_max: int, seconds_max: float) -> int:
    """Explore world after world, up to so many states in all and so many seconds of CPU time.

    What one world leaves of its share goes to those after it. Prints a line a world and a sum;
    returns 0, or 1 with the story of the first violation.
    """
    states = transitions = complete = 0
    seconds = 0.0
    for place, world in enumerate(WORLDS):
        left = len(WORLDS) - place
        share = (states_max - states) // left
        found = Search(world, states_max=share, seconds_max=(seconds_max - seconds) / left).run()
        print(found.line(), flush=True)
        if found.violation is not None:
            print(tell(world, found.violation), flush=True)
            return 1
        states += found.states
        transitions += found.transitions
        seconds += found.seconds
        complete += found.is_complete
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // _KIB_PER_MIB
    print(
        f"{len(WORLDS)} worlds, {complete} of them complete: {states:,} states,"
        f" {transitions:,} transitions, {seconds:.0f} s, {memory_mib} MiB",
        flush=True,
    )
    return 0


def _tell_again(name: str, path: str) -> int:
    world = next((each for each in WORLDS if each.name == name), None)
    if world is None:
        print(f"no world {name!r}; there are {', '.join(each.name for each in WORLDS)}")
        return 64
    places = tuple(int(place) for place in path.split("."))
    print(tell(world, Violation(f"world {name}, {len(places)} moves", places)))
    return 0


if __name__ == "__main__":
    _, asked, moves = sys.argv
    sys.exit(_tell_again(asked, moves))
