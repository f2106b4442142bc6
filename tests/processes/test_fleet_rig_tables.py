"""The contract of the lease table, over the rig's own DynamoDB: else it would prove nothing."""

import pytest

from tests.contract.lease_table_fixtures import opened
from tests.contract.test_lease_table import *  # noqa: F403 - the same tests, over another table
from tests.contract.test_lease_table_handoffs import *  # noqa: F403
from tests.contract.test_lease_table_late import *  # noqa: F403
from tests.processes.fleet_rig.aws import WatchedAws

# The names that the star brings are test functions; this one would be a second plug-in.
pytest_plugins = ()


@pytest.fixture(scope="module")
def moto_url(tmp_path_factory):
    aws = WatchedAws(tmp_path_factory.mktemp("notes") / "notes")
    yield aws.embedded.dynamodb_endpoint
    aws.close()


@pytest.fixture(params=["dynamodb"])
def subject(request):
    yield from opened(request, has_owner_index=False)


@pytest.fixture(params=["dynamodb"])
def indexed(request):
    yield from opened(request, has_owner_index=True)
