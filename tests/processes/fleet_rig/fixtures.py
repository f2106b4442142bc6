"""Fixtures over the rig: one watched embedded AWS a session; fleets whose machines are ended."""

import pytest

from tests.processes.fleet_rig.aws import WatchedAws
from tests.processes.fleet_rig.fleet import Fleet
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.producing import Producer

# Not by `ledger_rig.fixtures`: those share one embedded AWS that nobody watches.


@pytest.fixture(scope="session")
def watched_aws(tmp_path_factory):
    aws = WatchedAws(tmp_path_factory.mktemp("notes") / "notes")
    yield aws
    aws.close()


@pytest.fixture
def fleet(tmp_path, watched_aws):
    """Makes a fleet: `fleet(stream, failover_s=3.0, **settings)`."""
    made = []

    def application(stream, **settings):
        made.append(Application(tmp_path, watched_aws, stream, **settings))
        return made[-1]

    def make(stream, **settings):
        return Fleet(application, watched_aws, stream, **settings)

    yield make
    for one in made:
        one.close()


@pytest.fixture
def load(watched_aws):
    """Makes and starts a producer: `load(stream, rate=…, seed=…)`."""
    made = []

    def make(stream, *, rate, seed, **more):
        made.append(Producer(watched_aws.kinesis, stream, 10**9, rate=rate, seed=seed, **more))
        return made[-1].start()

    yield make
    for one in made:
        one.stop()
