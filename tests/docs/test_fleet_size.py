"""Run and size a fleet: the requests of its table are those of a simulated fleet at rest."""

import math
import re

import msgspec
import pytest

from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.world import FleetSettings
from tests.docs.pages import DOCS

PAGE = DOCS / "how-to" / "run-a-fleet.md"
READ_UNIT_BYTES = 4096
LEASES, MACHINES, MINUTES = 12, 3, 10


def units_of(label):
    """The units a minute of the row with this label."""
    found = re.search(
        rf"^\| {label} \|.*\| (\d+) (?:write|read) units", PAGE.read_text(), re.MULTILINE
    )
    assert found is not None, label
    return int(found[1])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("records_per_s", "label"),
    [(40.0, "each lease with records"), (0.0, "each lease without records")],
)
def test_a_simulated_fleet_uses_the_units_of_the_page(records_per_s, label):
    settings = FleetSettings(failover_s=10.0, checkpoint_every_s=10.0)
    fleet = Fleet(
        5,
        shards=LEASES,
        traffic=Traffic(records_per_s=records_per_s),
        settings=settings,
        observer_kind=FleetRecord,
    )
    for name in "abc"[:MACHINES]:
        fleet.add_host(name, name)
    fleet.run_for(180.0)  # until it is at rest
    before = msgspec.structs.replace(fleet.table.costs)

    fleet.run_for(MINUTES * 60.0)

    costs = fleet.table.costs
    pages = math.ceil(LEASES * fleet.table._row_size() / READ_UNIT_BYTES)
    reads = MACHINES * (units_of("each machine, of at most 16") * pages + units_of("each machine"))
    writes = LEASES * units_of(label)
    assert costs.write_units - before.write_units == pytest.approx(writes * MINUTES, rel=0.1)
    assert costs.read_units - before.read_units == pytest.approx(reads * MINUTES, rel=0.1)
