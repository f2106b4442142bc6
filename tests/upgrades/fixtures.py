"""Fixtures: the last release's code, and fleets of it and the head over the watched AWS."""

import pytest

from tests.processes.ledger_rig.application import Application
from tests.upgrades.mixed_fleet import MixedFleet
from tests.upgrades.versions import HEAD, Unobtainable, older_version


@pytest.fixture(scope="session")
def older(tmp_path_factory):
    """The last release; skips where the checkout does not hold it."""
    try:
        version = older_version(tmp_path_factory.mktemp("older"))
    except Unobtainable as why:
        pytest.skip(str(why))
    version.check()
    HEAD.check()
    print(f"the last release: {version.name}")
    return version


@pytest.fixture
def mixed_fleet(tmp_path, watched_aws):
    """Makes a fleet without machines: `mixed_fleet(stream, failover_s=…)`."""
    made = []

    def application(stream, **settings):
        made.append(Application(tmp_path, watched_aws, stream, **settings))
        return made[-1]

    yield lambda stream, **settings: MixedFleet(application, watched_aws, stream, **settings)
    for one in made:
        one.close()
