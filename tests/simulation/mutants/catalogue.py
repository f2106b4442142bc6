"""All planted bugs, by name."""

from collections.abc import Mapping

from tests.simulation.mutants.mutant import Mutant
from tests.simulation.mutants.of_conditions import OF_CONDITIONS
from tests.simulation.mutants.of_lease_processes import OF_LEASE_PROCESSES
from tests.simulation.mutants.of_managers import OF_MANAGERS
from tests.simulation.mutants.of_the_edges import OF_THE_EDGES

MUTANTS: Mapping[str, Mutant] = {
    mutant.name: mutant
    for mutant in (*OF_LEASE_PROCESSES, *OF_MANAGERS, *OF_CONDITIONS, *OF_THE_EDGES)
}
