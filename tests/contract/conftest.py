import pytest

from tests.support.postgres import running_postgres


@pytest.fixture(scope="session")
def aws(shared_aws):
    return shared_aws


@pytest.fixture(scope="session")
def postgres():
    with running_postgres() as server:
        yield server
