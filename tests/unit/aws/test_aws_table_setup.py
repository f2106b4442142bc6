"""Is the lease table there, and may we write to it? Over moto on loopback, and scripted races."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kclrun.aws.owner_index import OWNER_INDEX
from kclrun.aws.table_setup import TableReport, ensure_table, inspect_table
from kclrun.errors import AccessDenied, ServiceError, TableRefused, Unavailable
from kclrun.model.time import Instant
from tests.unit.aws.held_plane import HeldPlane

_numbers = itertools.count()


@pytest.fixture
def plane(moto_url: str) -> Iterator[HeldPlane]:
    made = HeldPlane(moto_url)
    yield made
    made.close()


@pytest.fixture
def scripted(server: Any) -> Iterator[HeldPlane]:
    made = HeldPlane(server.url)
    yield made
    made.close()


@pytest.fixture
def name() -> str:
    return f"app-{next(_numbers)}"


class Waiting:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> Instant:
        return Instant(self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def ensured(plane: HeldPlane, name: str, *, create: bool = True, **options: Any) -> TableReport:
    waiting = Waiting()
    return ensure_table(
        plane,
        name,
        application=name,
        create=create,
        tags=options.get("tags", {}),
        clock=waiting.clock,
        wait=waiting.wait,
        timeout_s=30.0,
    )


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param({"headers": {"x-amz-crc32": ""}}, id="inside the checksum"),
        pytest.param({"body": b""}, id="before the length"),
    ],
)
def test_an_answer_torn_inside_its_head_is_asked_for_again_and_no_bug(
    server: Any, scripted: HeldPlane, torn: dict[str, Any]
) -> None:
    server.reply(**torn)

    with pytest.raises(Unavailable, match="DescribeTable: no answer"):
        inspect_table(scripted.dynamodb_reads(), "t")


def plain_table(plane: HeldPlane, name: str, *keys: tuple[str, str], kind: str = "S") -> Any:
    client = plane.dynamodb_writes()
    client.create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": kind} for key, _ in keys],
        KeySchema=[{"AttributeName": key, "KeyType": role} for key, role in keys],
    )
    return client


def test_an_absent_table_is_created_with_its_index_and_tags(plane: HeldPlane, name: str) -> None:
    report = ensured(plane, name, tags={"team": "data"})

    assert report == TableReport(name, "ACTIVE", created=True, has_owner_index=True)
    client = plane.dynamodb_reads()
    table = client.describe_table(TableName=name)["Table"]
    assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
    assert table["KeySchema"] == [{"AttributeName": "leaseKey", "KeyType": "HASH"}]
    (index,) = table["GlobalSecondaryIndexes"]
    assert index["IndexName"] == OWNER_INDEX
    assert index["KeySchema"] == [
        {"AttributeName": "leaseOwner", "KeyType": "HASH"},
        {"AttributeName": "leaseKey", "KeyType": "RANGE"},
    ]
    assert index["Projection"]["ProjectionType"] == "KEYS_ONLY"
    tags = client.list_tags_of_resource(ResourceArn=table["TableArn"])["Tags"]
    assert tags == [{"Key": "team", "Value": "data"}]


def test_a_table_that_exists_is_used_as_it_is(plane: HeldPlane, name: str) -> None:
    ensured(plane, name)

    assert ensured(plane, name, create=False) == TableReport(
        name, "ACTIVE", created=False, has_owner_index=True
    )


def test_a_table_without_the_index_works_and_is_reported(plane: HeldPlane, name: str) -> None:
    plain_table(plane, name, ("leaseKey", "HASH"))

    assert ensured(plane, name).has_owner_index is False


def test_an_absent_table_is_refused_where_creation_is_off(plane: HeldPlane, name: str) -> None:
    with pytest.raises(TableRefused, match=r"leases\.create: on"):
        ensured(plane, name, create=False)
    assert inspect_table(plane.dynamodb_reads(), name) is None


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ((("id", "HASH"),), "S"),
        ((("leaseKey", "HASH"), ("x", "RANGE")), "S"),
        ((("leaseKey", "HASH"),), "N"),
    ],
)
def test_a_table_with_another_key_is_refused(
    plane: HeldPlane, name: str, keys: tuple[tuple[str, str], ...], kind: str
) -> None:
    plain_table(plane, name, *keys, kind=kind)

    with pytest.raises(TableRefused, match="no lease table"):
        ensured(plane, name)


NATIVE = ["CLIENT_VERSION_3X", "CLIENT_VERSION_3X_WITH_ROLLBACK"]
SHARED = ["CLIENT_VERSION_2X", "CLIENT_VERSION_UPGRADE_FROM_2X", "CLIENT_VERSION_INIT"]


@pytest.mark.parametrize("version", NATIVE)
def test_a_kcl_3_fleet_in_its_own_mode_is_left_alone(
    plane: HeldPlane, name: str, version: str
) -> None:
    ensured(plane, name)
    plane.dynamodb_writes().put_item(
        TableName=name, Item={"leaseKey": {"S": "Migration3.0"}, "cv": {"S": version}}
    )

    with pytest.raises(TableRefused, match=version):
        ensured(plane, name)


@pytest.mark.parametrize("version", NATIVE)
def test_an_early_kcl_3_fleet_keeps_its_mode_in_a_table_of_its_own(
    plane: HeldPlane, name: str, version: str
) -> None:
    client = plain_table(plane, f"{name}-CoordinatorState", ("key", "HASH"))
    client.put_item(
        TableName=f"{name}-CoordinatorState",
        Item={"key": {"S": "Migration3.0"}, "cv": {"S": version}},
    )

    with pytest.raises(TableRefused, match=version):
        ensured(plane, name)


@pytest.mark.parametrize("version", SHARED)
def test_a_kcl_3_fleet_that_is_compatible_is_joined(
    plane: HeldPlane, name: str, version: str
) -> None:
    ensured(plane, name)
    plane.dynamodb_writes().put_item(
        TableName=name, Item={"leaseKey": {"S": "Migration3.0"}, "cv": {"S": version}}
    )

    assert ensured(plane, name).created is False


# Races and refusals that an emulator does not play


def described(status: str) -> bytes:
    return msgspec.json.encode(
        {
            "Table": {
                "TableStatus": status,
                "KeySchema": [{"AttributeName": "leaseKey", "KeyType": "HASH"}],
                "AttributeDefinitions": [{"AttributeName": "leaseKey", "AttributeType": "S"}],
            }
        }
    )


def test_of_two_managers_that_create_at_once_both_go_on(server: Any, scripted: HeldPlane) -> None:
    server.refuse(400, "ResourceNotFoundException")
    server.refuse(400, "ResourceInUseException", "Table already exists")
    server.reply(body=described("CREATING"))
    server.refuse(400, "ResourceNotFoundException")  # the view of another server, a moment behind
    server.reply(body=described("ACTIVE"))
    server.reply(body=b"{}")
    server.refuse(400, "ResourceNotFoundException")

    report = ensured(scripted, "leases")

    assert report == TableReport("leases", "ACTIVE", created=False, has_owner_index=False)


def test_a_table_that_never_becomes_active_is_unavailable(server: Any, scripted: HeldPlane) -> None:
    server.default.body = described("CREATING")

    with pytest.raises(Unavailable, match="not ACTIVE after 30 s"):
        ensured(scripted, "leases")


def test_a_table_being_given_an_index_is_usable(server: Any, scripted: HeldPlane) -> None:
    server.reply(body=described("UPDATING"))
    server.reply(body=b"{}")
    server.refuse(400, "ResourceNotFoundException")

    assert ensured(scripted, "leases").status == "UPDATING"


def test_where_the_coordinator_table_may_not_be_read_it_is_not_looked_at(
    server: Any, scripted: HeldPlane
) -> None:
    server.reply(body=described("ACTIVE"))
    server.reply(body=b"{}")
    server.refuse(400, "AccessDeniedException", "not authorized to perform: dynamodb:GetItem")

    assert ensured(scripted, "leases").status == "ACTIVE"


def test_a_missing_permission_names_the_policy_that_has_it(
    server: Any, scripted: HeldPlane
) -> None:
    server.refuse(400, "ResourceNotFoundException")
    server.refuse(400, "AccessDeniedException", "not authorized to perform: dynamodb:CreateTable")

    with pytest.raises(AccessDenied, match=r"kclrun iam --for provision") as raised:
        ensured(scripted, "leases")
    assert "dynamodb:CreateTable" in str(raised.value)
    assert len(server.requests) == 2


def test_a_creation_without_an_answer_is_told_apart(server: Any, scripted: HeldPlane) -> None:
    server.refuse(400, "ResourceNotFoundException")
    server.hang_up()

    with pytest.raises(ServiceError) as raised:
        ensured(scripted, "leases")
    assert raised.value.operation == "CreateTable"
    assert len(server.requests) == 2
