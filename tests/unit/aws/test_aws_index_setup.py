"""The owner index for a table that lacks it: over moto on loopback, and scripted answers."""

import itertools
from typing import Any

import msgspec
import pytest

from kclrun.aws.lease_table import OWNER_INDEX
from kclrun.aws.table_setup import IndexState, add_owner_index, inspect_owner_index, inspect_table
from kclrun.errors import AccessDenied, ServiceError, TableRefused, Unavailable
from kclrun.model.time import Instant
from tests.unit.aws.held_plane import HeldPlane

_numbers = itertools.count()
# A clock of seconds since some boot: later than every wait here is long.
BEGAN = 5_000.0


class Plane(HeldPlane):
    """One attempt: a scripted refusal is not asked for again."""

    def _client(self, service: str, attempts: int) -> Any:
        return super()._client(service, 1)


@pytest.fixture
def plane(moto_url):
    made = Plane(moto_url)
    yield made
    made.close()


@pytest.fixture
def scripted(server):
    made = Plane(server.url)
    yield made
    made.close()


class Adding:
    """One run of `add_owner_index`, in a time of its own."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.reported: list[str] = []

    def run(self, plane: Plane, table: str, timeout_s: float = 600.0) -> None:
        add_owner_index(
            plane,
            table,
            report=self.reported.append,
            clock=lambda: Instant(self.now),
            wait=self.wait,
            timeout_s=timeout_s,
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds


def table_without_index(plane: Plane, **billing: Any) -> str:
    """As the Java KCL 2.x makes it."""
    name = f"java-{next(_numbers)}"
    plane.dynamodb_writes().create_table(
        TableName=name,
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        **(billing or {"BillingMode": "PAY_PER_REQUEST"}),
    )
    return name


def index_of(plane: Plane, table: str) -> Any:
    described = plane.dynamodb_reads().describe_table(TableName=table)["Table"]
    (index,) = described["GlobalSecondaryIndexes"]
    return index


def test_the_index_is_added_as_the_java_kcl_3_has_it(plane):
    table = table_without_index(plane)
    assert inspect_owner_index(plane.dynamodb_reads(), table) == IndexState(None)

    Adding().run(plane, table)

    index = index_of(plane, table)
    assert index["IndexName"] == OWNER_INDEX
    assert index["KeySchema"] == [
        {"AttributeName": "leaseOwner", "KeyType": "HASH"},
        {"AttributeName": "leaseKey", "KeyType": "RANGE"},
    ]
    assert index["Projection"]["ProjectionType"] == "KEYS_ONLY"
    report = inspect_table(plane.dynamodb_reads(), table)
    assert report is not None
    assert report.has_owner_index


def test_an_index_that_is_there_is_left_alone(plane):
    table = table_without_index(plane)
    Adding().run(plane, table)
    before = index_of(plane, table)

    again = Adding()
    again.run(plane, table)

    assert index_of(plane, table) == before
    assert again.now == BEGAN


def test_the_index_of_a_provisioned_table_is_provisioned_like_it(plane):
    units = {"ReadCapacityUnits": 10, "WriteCapacityUnits": 20}
    table = table_without_index(plane, ProvisionedThroughput=units)
    assert inspect_owner_index(plane.dynamodb_reads(), table).capacity == (10, 20)

    Adding().run(plane, table)

    throughput = index_of(plane, table)["ProvisionedThroughput"]
    assert {name: throughput[name] for name in units} == units


def test_without_a_table_there_is_nothing_to_add(plane):
    with pytest.raises(TableRefused, match="does not exist"):
        Adding().run(plane, "absent")


# What an emulator does not play


def described(status: str | None, keys: tuple[str, str] = ("leaseOwner", "leaseKey")) -> bytes:
    index = {
        "IndexName": OWNER_INDEX,
        "IndexStatus": status,
        "KeySchema": [
            {"AttributeName": name, "KeyType": role}
            for name, role in zip(keys, ("HASH", "RANGE"), strict=True)
        ],
    }
    table = {
        "TableStatus": "ACTIVE",
        "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        "AttributeDefinitions": [{"AttributeName": "leaseKey", "AttributeType": "S"}],
        "BillingModeSummary": {"BillingMode": "PAY_PER_REQUEST"},
        "GlobalSecondaryIndexes": [index] if status else [],
    }
    return msgspec.json.encode({"Table": table})


def requested(server: Any) -> list[str]:
    return [request.headers["x-amz-target"].rpartition(".")[2] for request in server.requests]


def test_it_waits_until_the_index_is_active_and_tells_how_it_goes(server, scripted):
    server.reply(body=described(None))
    server.reply()
    server.reply(body=described(None))  # the view of another server, a moment behind
    for _ in range(30):
        server.reply(body=described("CREATING"))
    server.reply(body=described("ACTIVE"))

    adding = Adding()
    adding.run(scripted, "leases")

    assert requested(server).count("UpdateTable") == 1
    assert adding.now == BEGAN + 160.0, "32 looks, five seconds apart"
    assert adding.reported == [
        f"{OWNER_INDEX} is CREATING since 1 min",
        f"{OWNER_INDEX} is CREATING since 2 min",
    ]


def test_an_index_under_way_is_waited_for_and_not_asked_for_again(server, scripted):
    server.reply(body=described("CREATING"))
    server.reply(body=described("ACTIVE"))

    Adding().run(scripted, "leases")

    assert requested(server) == ["DescribeTable", "DescribeTable"]


def test_its_patience_ends(server, scripted):
    server.default.body = described("CREATING")

    adding = Adding()
    with pytest.raises(Unavailable, match="goes on being built"):
        adding.run(scripted, "leases", timeout_s=600.0)
    assert adding.now == BEGAN + 600.0


def test_an_outage_does_not_end_the_wait(server, scripted):
    server.reply(body=described("CREATING"))
    server.refuse(500, "InternalServerError")
    server.refuse(400, "ThrottlingException")
    server.reply(body=described("ACTIVE"))

    Adding().run(scripted, "leases")

    assert len(server.requests) == 4


@pytest.mark.parametrize("trouble", ["another was faster", "no answer"])
def test_whatever_became_of_the_request_the_table_decides(server, scripted, trouble):
    server.reply(body=described(None))
    if trouble == "no answer":
        server.hang_up()
    else:
        server.refuse(400, "ValidationException", "Attempting to create an index which exists")
    server.reply(body=described("CREATING"))
    server.reply(body=described("ACTIVE"))

    Adding().run(scripted, "leases")

    assert requested(server).count("UpdateTable") == 1


def test_a_request_without_effect_is_reported(server, scripted):
    server.reply(body=described(None))
    server.hang_up()
    server.reply(body=described(None))

    with pytest.raises(ServiceError) as raised:
        Adding().run(scripted, "leases")
    assert raised.value.operation == "UpdateTable"


def test_a_missing_permission_names_the_policy_that_has_it(server, scripted):
    server.reply(body=described(None))
    server.refuse(400, "AccessDeniedException", "not authorized to perform: dynamodb:UpdateTable")
    server.reply(body=described(None))

    with pytest.raises(AccessDenied, match=r"kclrun iam --purpose provision") as raised:
        Adding().run(scripted, "leases")
    assert "dynamodb:UpdateTable" in str(raised.value)


def test_an_index_of_that_name_with_other_keys_is_refused(server, scripted):
    server.reply(body=described("ACTIVE", ("leaseKey", "leaseOwner")))

    with pytest.raises(TableRefused, match="other keys"):
        Adding().run(scripted, "leases")


def test_an_index_being_built_is_not_yet_there_for_the_fleet(server, scripted):
    server.reply(body=described("CREATING"))

    report = inspect_table(scripted.dynamodb_reads(), "leases")

    assert report is not None
    assert not report.has_owner_index


def test_an_index_that_is_being_deleted_is_waited_for_and_added_again(server, scripted):
    for status in ("DELETING", "DELETING", None, None):
        server.reply(body=described(status))
    server.reply()
    server.reply(body=described("CREATING"))
    server.reply(body=described("ACTIVE"))

    Adding().run(scripted, "leases")

    assert requested(server).count("UpdateTable") == 1


def test_an_index_that_stays_being_deleted_is_named(server, scripted):
    server.default.body = described("DELETING")

    with pytest.raises(Unavailable, match=r"is DELETING after 10 min\nWhen it is gone, the same"):
        Adding().run(scripted, "leases")
