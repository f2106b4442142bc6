"""What the Java twin writes does to our rows what the same parameters do to a DynamoDB."""

import boto3
import pytest
from moto import mock_aws

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, PendingCheckpoint
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.protocol.writes import Applied, ConditionFailed
from tests.support.java import rows
from tests.support.java.rows import DeleteItem, PutNewItem

pytestmark = pytest.mark.seconds

TABLE, KEY = "leases", "shardId-000000000000"
RANGE = HashRange(0, 99)
AT_7 = ExtendedSequenceNumber("7", 2)
OFFERED = {
    "leaseKey": {"S": KEY},
    "leaseCounter": {"N": "4"},
    "leaseOwner": {"S": "kclrun:offered"},
    "checkpoint": {"S": "5"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "offeredTo": {"S": "kclrun:a:h:1"},
    "takenFrom": {"S": "b-worker"},
    "somebodyElses": {"S": "stays"},
}
PENDING = OFFERED | {
    "pendingCheckpoint": {"S": "6"},
    "pendingCheckpointSubSequenceNumber": {"N": "0"},
    "pendingCheckpointState": {"B": "aGk="},
}


def seen(owner="kclrun:offered", counter=4):
    return Lease(key=KEY, checkpoint=TRIM_HORIZON, counter=counter, owner=owner)


def updated(counter=4, **changed):
    wanted = {"pending": None, "owner_switches": 0, "children": (), "hash_range": RANGE}
    return rows.update(KEY, counter, AT_7, **(wanted | changed))


@pytest.fixture
def dynamo():
    with mock_aws():
        client = boto3.client(
            "dynamodb", "eu-central-1", aws_access_key_id="a", aws_secret_access_key="b"
        )
        client.create_table(
            TableName=TABLE,
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        yield client


def send(dynamo, write):
    """To a DynamoDB; whether it applied."""
    operations = {PutNewItem: dynamo.put_item, DeleteItem: dynamo.delete_item}
    operation = operations.get(type(write), dynamo.update_item)
    try:
        operation(TableName=TABLE, **write.parameters())
    except dynamo.exceptions.ConditionalCheckFailedException:
        return False
    return True


def comparable(item):
    """Sets have no order; binary values come decoded from the client."""
    if item is None:
        return None
    return {
        name: sorted(value["SS"]) if "SS" in value else str(next(iter(value.values())))
        for name, value in item.items()
        if name != "pendingCheckpointState"
    }


@pytest.mark.parametrize(
    ("item", "write", "applies"),
    [
        (OFFERED, rows.renew(KEY, 4), True),
        (OFFERED, rows.renew(KEY, 3), False),
        (None, rows.renew(KEY, 0), False),
        (OFFERED, rows.take(seen(), "a-worker"), True),
        (OFFERED, rows.take(seen(owner=None), "a-worker"), True),  # the owner is no condition
        (OFFERED, rows.take(seen(counter=5), "a-worker"), False),
        (OFFERED, updated(), True),
        (PENDING, updated(owner_switches=0), True),
        (OFFERED, updated(pending=PendingCheckpoint(AT_7), owner_switches=3), True),
        (OFFERED, updated(children={"shardId-000000000002", "shardId-000000000001"}), True),
        (OFFERED, updated(counter=9), False),
        (OFFERED, rows.name_children(KEY, {"shardId-000000000001"}), True),
        (None, rows.name_children(KEY, {"shardId-000000000001"}), False),
        (None, rows.create(KEY, ("shardId-000000000009",), RANGE), True),
        (OFFERED, rows.create(KEY, (), RANGE), False),
        (OFFERED, rows.delete(KEY), True),
        (None, rows.delete(KEY), True),
    ],
)
def test_a_raw_write_does_to_our_rows_what_it_does_to_a_dynamodb(dynamo, item, write, applies):
    ours = LeaseRows()
    if item is not None:
        ours.plant(item)
        dynamo.put_item(TableName=TABLE, Item=item)

    outcome = write.apply_to(ours)

    assert isinstance(outcome, Applied if applies else ConditionFailed)
    assert send(dynamo, write) == applies
    stored = dynamo.get_item(TableName=TABLE, Key={"leaseKey": {"S": KEY}}).get("Item")
    # Our table writes out the switches that a row lacks.
    expected = comparable(stored)
    if expected is not None:
        expected.setdefault("ownerSwitchesSinceCheckpoint", "0")
    assert comparable(ours.raw(KEY)) == expected


def test_a_checkpoint_of_the_twin_is_read_as_one_and_keeps_what_it_does_not_know():
    ours = LeaseRows()
    ours.plant(PENDING)

    updated().apply_to(ours)

    row = ours.read(KEY)
    assert (row.checkpoint, row.counter, row.pending) == (AT_7, 5, None)
    assert (row.offered_to, row.taken_from) == ("kclrun:a:h:1", "b-worker")
    assert ours.raw(KEY)["somebodyElses"] == {"S": "stays"}


def test_a_created_row_is_unowned_and_at_its_shards_beginning():
    ours = LeaseRows()

    rows.create(KEY, ("shardId-000000000009",), RANGE).apply_to(ours)

    row = ours.read(KEY)
    assert (row.owner, row.counter, row.checkpoint) == (None, 0, TRIM_HORIZON)
    assert (row.parents, row.hash_range) == ({"shardId-000000000009"}, RANGE)
    assert row.checkpoint != SHARD_END
