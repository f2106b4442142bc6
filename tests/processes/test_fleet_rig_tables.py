"""The contract of the lease table, over the rig's own DynamoDB: else it would prove nothing."""

import pytest

from tests.contract.lease_table_fixtures import opened
from tests.contract.test_lease_table import *  # noqa: F403 - the same tests, over another table
from tests.contract.test_lease_table_handoffs import *  # noqa: F403
from tests.contract.test_lease_table_late import *  # noqa: F403
from tests.processes.fleet_rig.aws import WatchedAws

# The star brings tests, and the name of a plug-in whose fixtures those below replace.
pytest_plugins = ()
pytestmark = pytest.mark.slow


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
