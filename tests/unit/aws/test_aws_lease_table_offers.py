"""How offered rows are found: what is asked, and what becomes of each answer [P17]."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kclrun.aws.lease_table import OWNER_INDEX, DynamoLeaseTable
from kclrun.aws.rows import encode_row
from kclrun.aws.wire import WireClient
from kclrun.errors import (
    AccessDenied,
    IndexMissing,
    InvalidRequest,
    NotFound,
    Throttled,
    Unavailable,
)
from kclrun.model.lease import OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import TRIM_HORIZON

MakeClient = Callable[..., WireClient]
ROWS = [
    Lease(key=LeaseKey(f"shardId-{number:012}"), checkpoint=TRIM_HORIZON, owner=OFFERED)
    for number in range(250)
]


@pytest.fixture
def table(server, make_client):
    return DynamoLeaseTable(make_client(server.url, service="dynamodb"), "leases")


def index_of(rows: list[Lease]) -> bytes:
    keys = [{"leaseKey": {"S": row.key}, "leaseOwner": {"S": row.owner}} for row in rows]
    return msgspec.json.encode({"Items": keys, "Count": len(keys)})


def batch_of(rows: list[Lease], **more: Any) -> bytes:
    return msgspec.json.encode({"Responses": {"leases": [encode_row(row) for row in rows]}} | more)


def bodies(server: Any) -> list[Any]:
    return [msgspec.json.decode(request.body) for request in server.requests]


def test_the_index_is_asked_for_one_page_and_the_rows_are_read_consistently(server, table):
    server.reply(body=index_of(ROWS[:2]))
    server.reply(body=batch_of(ROWS[:2]))

    assert table.offered(64) == tuple(ROWS[:2])

    assert bodies(server) == [
        {
            "TableName": "leases",
            "IndexName": "LeaseOwnerToLeaseKeyIndex",
            "KeyConditionExpression": "leaseOwner = :offered",
            "ExpressionAttributeValues": {":offered": {"S": "kclrun:offered"}},
            "Limit": 1000,
        },
        {
            "RequestItems": {
                "leases": {
                    "Keys": [{"leaseKey": {"S": row.key}} for row in ROWS[:2]],
                    "ConsistentRead": True,
                }
            }
        },
    ]
    targets = [request.headers["x-amz-target"] for request in server.requests]
    assert targets == ["DynamoDB_20120810.Query", "DynamoDB_20120810.BatchGetItem"]


def test_where_nothing_is_offered_no_row_is_read(server, table):
    server.reply(body=index_of([]))

    assert table.offered(64) == ()
    assert len(server.requests) == 1


def test_no_request_names_more_than_a_hundred_rows(server, table):
    server.reply(body=index_of(ROWS))
    for start in (0, 100, 200):
        server.reply(body=batch_of(ROWS[start : start + 100]))

    assert table.offered(len(ROWS)) == tuple(ROWS)
    asked = [body["RequestItems"]["leases"]["Keys"] for body in bodies(server)[1:]]
    assert [len(keys) for keys in asked] == [100, 100, 50]
    assert [key["leaseKey"]["S"] for keys in asked for key in keys] == [row.key for row in ROWS]


def test_only_as_many_rows_are_read_as_are_wanted(server, table):
    server.reply(body=index_of(ROWS))
    server.reply(body=batch_of(ROWS[:10]))

    table.offered(10)

    (_, batch) = bodies(server)
    asked = [key["leaseKey"]["S"] for key in batch["RequestItems"]["leases"]["Keys"]]
    assert len(set(asked)) == 10
    assert set(asked) <= {row.key for row in ROWS}


def test_a_row_taken_since_the_index_saw_it_is_not_offered(server, table):
    taken = msgspec.structs.replace(ROWS[1], owner=OwnerId("kclrun:a:h:1"))
    server.reply(body=index_of(ROWS[:3]))
    server.reply(body=batch_of([ROWS[0], taken]))  # and the third is gone

    assert table.offered(64) == (ROWS[0],)


def test_rows_that_the_service_did_not_get_to_are_left_to_the_next_look(server, table):
    left = {"leases": {"Keys": [{"leaseKey": {"S": ROWS[1].key}}], "ConsistentRead": True}}
    server.reply(body=index_of(ROWS[:2]))
    server.reply(body=batch_of(ROWS[:1], UnprocessedKeys=left))

    assert table.offered(64) == (ROWS[0],)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "message",
    [
        f"The table does not have the specified index: {OWNER_INDEX}",
        f"Cannot read from backfilling global secondary index: {OWNER_INDEX}",
    ],
)
def test_an_index_that_cannot_be_asked_is_missing(server, table, message):
    server.refuse(400, "ValidationException", message)

    with pytest.raises(IndexMissing, match=f"leases has no index {OWNER_INDEX}"):
        table.offered(64)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "ResourceNotFoundException", NotFound),
        (400, "ValidationException", InvalidRequest),
        (400, "SerializationException", InvalidRequest),
        (400, "ProvisionedThroughputExceededException", Throttled),
        (400, "AccessDeniedException", AccessDenied),
        (500, "InternalServerError", Unavailable),
    ],
)
@pytest.mark.parametrize("at", ["Query", "BatchGetItem"])
def test_a_refusal_is_raised_as_what_it_is(server, table, at, status, code, expected):
    if at == "BatchGetItem":
        server.reply(body=index_of(ROWS[:1]))
    about = OWNER_INDEX if code == "SerializationException" else "because"
    server.refuse(status, code, about)

    with pytest.raises(expected) as raised:
        table.offered(64)
    assert type(raised.value) is expected
    assert at in str(raised.value)


@pytest.mark.parametrize("garbled", [b"<html>", b'{"Items":5}', b'{"Responses":[]}'])
def test_a_garbled_answer_is_unavailable_and_not_an_empty_one(server, table, garbled):
    server.reply(body=index_of(ROWS[:1]) if b"Responses" in garbled else garbled)
    server.reply(body=garbled)

    with pytest.raises(Unavailable):
        table.offered(64)
