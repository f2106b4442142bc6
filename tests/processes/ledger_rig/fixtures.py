"""Fixtures over the rig: one embedded AWS a session, applications that are ended in any case."""

import pytest

from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.producing import Producer


@pytest.fixture(scope="session")
def embedded_aws():
    aws = Aws()
    yield aws
    aws.close()


@pytest.fixture
def application(tmp_path, embedded_aws):
    """Makes an application: `application(stream, machine="a", **settings)`."""
    made = []

    def make(stream, /, **settings):
        made.append(Application(tmp_path, embedded_aws, stream, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def producer(embedded_aws):
    """Makes a producer: `producer(stream, total, seed=…)`; not started."""
    made = []

    def make(stream, total, **more):
        made.append(Producer(embedded_aws.kinesis, stream, total, **more))
        return made[-1]

    yield make
    for one in made:
        one.stop()
