import pytest

from kclrun.local.server import start_embedded
from tests.support.postgres import running_postgres


@pytest.fixture(scope="session")
def aws():
    """One embedded AWS for all files: each test has names of its own in it."""
    with start_embedded() as embedded:
        yield embedded


@pytest.fixture(scope="session")
def postgres():
    with running_postgres() as server:
        yield server
