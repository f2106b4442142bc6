"""One process with one planted bug, exploring one tiny world until a rule breaks.

    python -m tests.simulation.mutants.exploring NAME WORLD SECONDS_MAX

WORLD is the name of a tiny world, or `world:fault` with that fault alone. Prints what broke, and
exits with 1; with 0 if nothing did. Nothing of the product is imported before the bug is planted.
"""

import sys

import msgspec

from tests.simulation.mutants.planting import plant_named

# The deepest of the planted bugs is found within a hundred thousand.
STATES_MAX = 1_000_000


def main(name: str, where: str, seconds_max: float) -> int:
    """1 if a rule broke, else 0. `seconds_max` is of CPU time."""
    plant_named(name)
    from tests.simulation.tiny_worlds.search import Search
    from tests.simulation.tiny_worlds.worlds import WORLDS

    world_name, _, fault = where.partition(":")
    world = next(world for world in WORLDS if world.name == world_name)
    if fault:
        world = msgspec.structs.replace(world, faults=frozenset({fault}))
    found = Search(world, states_max=STATES_MAX, seconds_max=seconds_max).run()
    print(found.violation.words if found.violation is not None else found.line())
    return int(found.violation is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
