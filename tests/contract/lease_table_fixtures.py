"""The lease tables under test: in memory, and DynamoDB over the wire client.

DynamoDB is moto's here, on loopback: real HTTP, real expressions.
"""

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from werkzeug.serving import make_server

from kclrun.aws.lease_table import INDEX_KEYS, OWNER_INDEX, DynamoLeaseTable
from kclrun.aws.operations import CREATE_TABLE, GET_ITEM, PUT_ITEM
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.cli.startup import Aws
from kclrun.config.load import settings_of
from kclrun.local.lease_rows import LeaseRows
from kclrun.local.moto_process import dispatcher
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import LeaseTable
from tests.acceptance.account import Account, given
from tests.contract.lease_tables import Subject
from tests.patience import HUNG_S
from tests.seeds import seed_of


class OneAtATime:
    """moto looks at a condition and writes in two steps: two threads can both pass it.

    DynamoDB is linearizable row by row, so requests are let in one by one.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._lock:
            return self._app(environ, start_response)


@pytest.fixture(scope="session")
def moto_url():
    server = make_server("127.0.0.1", 0, OneAtATime(dispatcher()), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=HUNG_S)
    server.server_close()


_numbers = itertools.count()


# In `bin/aws-acceptance` the service itself is the only subject.
SUBJECTS = ["account"] if given() else ["memory", "dynamodb"]


@pytest.fixture(params=SUBJECTS)
def subject(request):
    """A table without the owner index, as the Java KCL 2.x makes it."""
    yield from opened(request, has_owner_index=False)


@pytest.fixture(params=["dynamodb by its ARN"])
def by_its_arn(request):
    """A table that is made and used by its ARN, and that its name finds as well."""
    yield from opened(request, has_owner_index=True)


@pytest.fixture(params=SUBJECTS)
def indexed(request):
    """A table with the owner index, as kclrun makes it."""
    yield from opened(request, has_owner_index=True)


def opened(request: pytest.FixtureRequest, *, has_owner_index: bool) -> Iterator[Subject]:
    if request.param == "memory":
        yield memory_subject(has_owner_index=has_owner_index)
        return
    if request.param == "account":
        yield from account_subject(given(), has_owner_index=has_owner_index)
        return
    client = WireClient(
        WireEndpoint(request.getfixturevalue("moto_url"), "eu-west-1", "eu-west-1"),
        HeldCredentials(WireCredentials("AKID", "secret")),
        service="dynamodb",
    )
    name = f"leases-{next(_numbers)}"
    if request.param == "dynamodb by its ARN":
        arn = f"arn:aws:dynamodb:eu-west-1:123456789012:table/{name}"
        dynamodb_subject(client, arn, has_owner_index=has_owner_index)
        by_name = _subject(client, name)
        yield Subject(_subject(client, arn).open_table, by_name.plant, by_name.raw)
    else:
        yield dynamodb_subject(client, name, has_owner_index=has_owner_index)
    client.close()


def memory_subject(*, has_owner_index: bool) -> Subject:
    seed = seed_of()
    rows = LeaseRows(
        lock=threading.Lock(),
        has_owner_index=has_owner_index,
        choose=random.Random(seed).sample,
    )

    def open_table(page_rows_max: int) -> LeaseTable:
        rows._page_rows_max = page_rows_max
        return rows

    return Subject(open_table, rows.plant, rows.raw)


def account_subject(found: Account, *, has_owner_index: bool) -> Iterator[Subject]:
    """One table for all tests, without rows: tables take long to make."""
    name = f"{found.table}-contract{'-indexed' if has_owner_index else ''}"
    client = found.client("dynamodb")
    try:
        client.create_table(
            TableName=name,
            Tags=[{"Key": key, "Value": value} for key, value in found.tags.items()],
            **_table(has_owner_index=has_owner_index),
        )
    except client.exceptions.ResourceInUseException:
        for page in client.get_paginator("scan").paginate(TableName=name, ConsistentRead=True):
            for item in page["Items"]:
                client.delete_item(TableName=name, Key={"leaseKey": item["leaseKey"]})
    client.get_waiter("table_exists").wait(TableName=name, WaiterConfig={"Delay": 2})
    aws = {"region": found.region} | ({"endpoint": found.endpoint} if found.endpoint else {})
    text = f"{{application: {name}, stream: s, processor: 'm:C', aws: {json.dumps(aws)}}}"
    wire = Aws(settings_of(text, environment={}, now=WallTime(time.time()))).dynamodb_client
    yield _subject(wire, name)
    wire.close()


def _table(*, has_owner_index: bool) -> dict[str, Any]:
    attributes = ["leaseKey"]
    index: dict[str, Any] = {}
    if has_owner_index:
        attributes.append("leaseOwner")
        index["GlobalSecondaryIndexes"] = [
            {
                "IndexName": OWNER_INDEX,
                "KeySchema": [{"AttributeName": n, "KeyType": role} for n, role in INDEX_KEYS],
                "Projection": {"ProjectionType": "KEYS_ONLY"},
            }
        ]
    return {
        "AttributeDefinitions": [{"AttributeName": n, "AttributeType": "S"} for n in attributes],
        "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        "BillingMode": "PAY_PER_REQUEST",
        **index,
    }


def dynamodb_subject(client: WireClient, name: str, *, has_owner_index: bool) -> Subject:
    body = {"TableName": name, **_table(has_owner_index=has_owner_index)}
    client.call(CREATE_TABLE, msgspec.json.encode(body))
    return _subject(client, name)


def _subject(client: WireClient, name: str) -> Subject:
    def call(operation: Any, **request: Any) -> Any:
        body = msgspec.json.encode({"TableName": name, **request})
        return msgspec.json.decode(client.call(operation, body).body)

    return Subject(
        lambda page_rows_max: DynamoLeaseTable(client, name, page_rows_max=page_rows_max),
        lambda item: call(PUT_ITEM, Item=item),
        lambda key: call(GET_ITEM, Key={"leaseKey": {"S": key}}, ConsistentRead=True).get("Item"),
    )
