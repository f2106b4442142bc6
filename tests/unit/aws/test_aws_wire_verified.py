"""The wire client signs by itself; here a server checks every signature it makes."""

import boto3
import pytest

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.errors import AccessDenied
from kclrun.local.server import start_embedded
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.protocol.writes import Applied, CreateLease, Refused

KEY, SECRET = "AKIDVERIFIED", "a-secret/with+odd=signs"
REGION = "eu-west-1"
# A service with moto in it takes seconds to start.
pytestmark = pytest.mark.seconds


@pytest.fixture(scope="module")
def verifying_aws():
    with start_embedded(credentials=(KEY, SECRET)) as embedded:
        settings = {
            "endpoint_url": embedded.endpoint,
            "region_name": REGION,
            "aws_access_key_id": KEY,
            "aws_secret_access_key": SECRET,
        }
        kinesis = boto3.client("kinesis", **settings)
        kinesis.create_stream(StreamName="orders", ShardCount=1)
        kinesis.put_record(StreamName="orders", Data=b"paid", PartitionKey="k")
        dynamodb = boto3.client("dynamodb", **settings)
        dynamodb.create_table(
            TableName="orders",
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
        kinesis.close()
        dynamodb.close()
        yield embedded


@pytest.fixture
def client(verifying_aws):
    made = []

    def make(service, secret=SECRET, key=KEY, token=None):
        endpoint = WireEndpoint(verifying_aws.endpoint, REGION, REGION)
        held = HeldCredentials(WireCredentials(key, secret, token))
        made.append(WireClient(endpoint, held, service=service))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("token", [None, "a-session-token"])
def test_a_verifying_server_accepts_reads_of_the_stream(client, token):
    kinesis = client("kinesis", token=token)
    reader = PollingReader(kinesis, "orders")

    (shard,) = WireStreamAdmin(kinesis, "orders").list_shards()
    page = reader.fetch(reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON)), 10)

    assert [record.data for record in page.records] == [b"paid"]


def test_a_verifying_server_accepts_writes_of_lease_rows(client):
    table = DynamoLeaseTable(client("dynamodb"), "orders")
    lease = Lease(key=LeaseKey("shardId-000000000000"), checkpoint=TRIM_HORIZON)

    assert isinstance(table.write(CreateLease(lease)), Applied)
    assert table.read(lease.key) == lease


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [
        (KEY, "another-secret", "InvalidSignatureException"),
        ("AKIDUNKNOWN", SECRET, "UnrecognizedClientException"),
    ],
)
def test_a_wrong_secret_or_key_is_refused_as_aws_refuses_it(client, key, secret, code):
    with pytest.raises(AccessDenied) as refused:
        WireStreamAdmin(client("kinesis", secret, key), "orders").list_shards()
    outcome = DynamoLeaseTable(client("dynamodb", secret, key), "orders").write(
        CreateLease(Lease(key=LeaseKey("shardId-000000000009"), checkpoint=TRIM_HORIZON))
    )

    assert refused.value.code == code
    assert secret not in str(refused.value)
    assert isinstance(outcome, Refused)
    assert outcome.code == code
