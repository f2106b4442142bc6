import pytest

from tests.support.databases import running_mariadb, running_postgres


@pytest.fixture(scope="session")
def aws(shared_aws):
    return shared_aws


@pytest.fixture(scope="session")
def postgres():
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def mariadb():
    with running_mariadb() as server:
        yield server
