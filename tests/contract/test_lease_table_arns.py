"""A lease table that is named by its ARN, over DynamoDB."""

from kclrun.model.lease import OFFERED, LeaseKey
from kclrun.protocol.writes import Applied, ConditionFailed, CreateChildren, HeldParent, Renew
from tests.contract.lease_tables import CHILD_1, CHILD_2, HELD, KEY, ME, OTHER, changed
from tests.contract.test_lease_table import CHILDREN

pytest_plugins = ("tests.contract.lease_table_fixtures",)


def test_a_table_that_is_named_by_its_arn_is_read_written_and_searched_as_any(by_its_arn):
    offered = changed(HELD, key=LeaseKey("shardId-offered"), owner=OFFERED, offered_by=ME)
    table = by_its_arn.with_rows(HELD, offered)

    assert table.write(Renew(KEY, ME, 4)) == Applied(changed(HELD, counter=5))
    failed = CreateChildren(CHILDREN, (HeldParent(KEY, OTHER, 5),))
    assert table.write(failed) == ConditionFailed(None)
    assert table.read(CHILD_1) is None
    assert table.write(CreateChildren(CHILDREN, (HeldParent(KEY, ME, 5),))) == Applied(None)

    scanned = {lease.key for page in table.scan() for lease in page.leases}
    assert scanned == {KEY, CHILD_1, CHILD_2, offered.key}
    assert table.offered(10) == (offered,)
