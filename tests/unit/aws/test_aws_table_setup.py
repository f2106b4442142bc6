"""Is the lease table there, and may we write to it? Over moto on loopback, and scripted races."""

import itertools
from typing import Any

import botocore.session
import msgspec
import pytest
from botocore.exceptions import ReadTimeoutError

from kclrun.aws.lease_table import OWNER_INDEX, DynamoCoordinatorState
from kclrun.aws.table_setup import TableReport, ensure_table, inspect_table, require_usable
from kclrun.cli.messages import report_error
from kclrun.errors import AccessDenied, InvalidRequest, TableRefused, Unavailable
from kclrun.model.time import Instant
from tests.patience import HUNG_S
from tests.unit.aws.conftest import Reply
from tests.unit.aws.held_plane import HeldPlane

_numbers = itertools.count()


@pytest.fixture
def plane(moto_url):
    made = HeldPlane(moto_url)
    yield made
    made.close()


@pytest.fixture
def scripted(server):
    made = HeldPlane(server.url)
    yield made
    made.close()


@pytest.fixture
def name():
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
def test_an_answer_torn_inside_its_head_is_asked_for_again_and_no_bug(server, scripted, torn):
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


def test_an_absent_table_is_created_with_its_index_and_tags(plane, name):
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


class LostAnswers(HeldPlane):
    """The answers to so many CreateTable are lost; the requests arrive, or do not."""

    def __init__(self, url: str, count: int, *, arrive: bool) -> None:
        super().__init__(url)
        self.asked = 0
        self._count = count
        self._arrive = arrive

    def _client(self, service: str, attempts: int) -> Any:
        client = super()._client(service, attempts)
        create = client.create_table

        def create_table(**arguments: Any) -> Any:
            self.asked += 1
            is_lost = self.asked <= self._count
            answer = create(**arguments) if self._arrive or not is_lost else None
            if is_lost:
                raise ReadTimeoutError(endpoint_url="http://dynamodb")
            return answer

        client.create_table = create_table
        return client


@pytest.mark.parametrize(("arrive", "asked"), [(True, 1), (False, 3)])
def test_a_table_whose_creation_is_not_answered_is_looked_for_and_asked_for_again(
    moto_url, name, arrive, asked
):
    plane = LostAnswers(moto_url, 2, arrive=arrive)
    try:
        assert ensured(plane, name) == TableReport(name, "ACTIVE", True, has_owner_index=True)
        assert plane.asked == asked
    finally:
        plane.close()


@pytest.mark.seconds
def test_a_table_whose_creation_is_never_answered_ends_the_start_in_time(moto_url, name):
    plane = LostAnswers(moto_url, 1_000, arrive=False)
    try:
        with pytest.raises(Unavailable, match="is CREATING after 30 s, and not ACTIVE"):
            ensured(plane, name)
    finally:
        plane.close()


def test_a_table_that_exists_is_used_as_it_is(plane, name):
    ensured(plane, name)

    assert ensured(plane, name, create=False) == TableReport(
        name, "ACTIVE", created=False, has_owner_index=True
    )


def test_a_table_without_the_index_works_and_is_reported(plane, name):
    plain_table(plane, name, ("leaseKey", "HASH"))

    assert ensured(plane, name).has_owner_index is False


def test_an_absent_table_is_refused_where_creation_is_off(plane, name):
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
def test_a_table_with_another_key_is_refused(plane, name, keys, kind):
    plain_table(plane, name, *keys, kind=kind)

    with pytest.raises(TableRefused, match="not a lease table"):
        ensured(plane, name)


NATIVE = ["CLIENT_VERSION_3X", "CLIENT_VERSION_3X_WITH_ROLLBACK"]
# The way back from each: the setting alone changes nothing once a fleet went there by itself.
ADVICE = {
    "CLIENT_VERSION_3X": "does not roll back from this state: stop every worker, delete",
    "CLIENT_VERSION_3X_WITH_ROLLBACK": "changes nothing now: roll back with the KCL's migration",
}
SHARED = ["CLIENT_VERSION_2X", "CLIENT_VERSION_UPGRADE_FROM_2X", "CLIENT_VERSION_INIT"]


@pytest.mark.parametrize("version", NATIVE)
def test_a_kcl_3_fleet_in_its_own_mode_is_left_alone(plane, name, version):
    ensured(plane, name)
    plane.dynamodb_writes().put_item(
        TableName=name, Item={"leaseKey": {"S": "Migration3.0"}, "cv": {"S": version}}
    )

    with pytest.raises(TableRefused, match=rf"\({version}\)(.|\n)*{ADVICE[version]}"):
        ensured(plane, name)


@pytest.mark.parametrize("version", NATIVE)
def test_an_early_kcl_3_fleet_keeps_its_mode_in_a_table_of_its_own(plane, name, version):
    client = plain_table(plane, f"{name}-CoordinatorState", ("key", "HASH"))
    client.put_item(
        TableName=f"{name}-CoordinatorState",
        Item={"key": {"S": "Migration3.0"}, "cv": {"S": version}},
    )

    with pytest.raises(TableRefused, match=version):
        ensured(plane, name)


def test_the_mode_of_an_early_kcl_3_fleet_is_seen_once_it_has_come(
    plane, name, moto_url, make_client
):
    wire = make_client(moto_url, service="dynamodb", read_timeout_s=HUNG_S)
    coordinator = DynamoCoordinatorState(wire, name, "leases")
    seen = [coordinator.mode()]

    client = plain_table(plane, f"{name}-CoordinatorState", ("key", "HASH"))
    seen.append(coordinator.mode())
    client.put_item(
        TableName=f"{name}-CoordinatorState",
        Item={"key": {"S": "Migration3.0"}, "cv": {"S": "CLIENT_VERSION_3X"}},
    )
    seen.append(coordinator.mode())

    assert seen == [None, None, "CLIENT_VERSION_3X"]


@pytest.mark.parametrize(
    ("code", "failure"),
    [("AccessDeniedException", AccessDenied), ("ValidationException", InvalidRequest)],
)
def test_a_mode_that_cannot_be_read_is_an_error_and_not_absent(server, make_client, code, failure):
    server.refuse(400, code)

    with pytest.raises(failure):
        DynamoCoordinatorState(
            make_client(server.url, service="dynamodb"), "orders", "orders"
        ).mode()

    asked = msgspec.json.decode(server.requests[0].body)
    assert (asked["TableName"], asked["ConsistentRead"]) == ("orders-CoordinatorState", True)


@pytest.mark.parametrize("version", SHARED)
def test_a_kcl_3_fleet_that_is_compatible_is_joined(plane, name, version):
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


def test_of_two_managers_that_create_at_once_both_go_on(server, scripted):
    server.refuse(400, "ResourceNotFoundException")
    server.refuse(400, "ResourceInUseException", "Table already exists")
    server.reply(body=described("CREATING"))
    server.refuse(400, "ResourceNotFoundException")  # the view of another server, a moment behind
    server.reply(body=described("ACTIVE"))
    server.reply(body=b"{}")
    server.refuse(400, "ResourceNotFoundException")

    report = ensured(scripted, "leases")

    assert report == TableReport("leases", "ACTIVE", created=False, has_owner_index=False)


def test_a_table_that_never_becomes_active_is_unavailable(server, scripted):
    server.default.body = described("CREATING")

    with pytest.raises(Unavailable, match="is CREATING after 30 s, and not ACTIVE"):
        ensured(scripted, "leases")


def test_a_table_being_given_an_index_is_usable(server, scripted):
    server.reply(body=described("UPDATING"))
    server.reply(body=b"{}")
    server.refuse(400, "ResourceNotFoundException")

    assert ensured(scripted, "leases").status == "UPDATING"


def test_the_mode_of_a_kcl_3_fleet_is_read_consistently(server, scripted):
    server.reply(body=described("ACTIVE"))
    server.reply(body=b"{}")
    server.refuse(400, "ResourceNotFoundException")

    ensured(scripted, "leases")

    assert [b'"ConsistentRead": true' in each.body for each in server.requests[1:]] == [True, True]


def test_where_the_coordinator_table_may_not_be_read_it_is_not_looked_at(server, scripted):
    server.reply(body=described("ACTIVE"))
    server.reply(body=b"{}")
    server.refuse(400, "AccessDeniedException", "not authorized to perform: dynamodb:GetItem")

    assert ensured(scripted, "leases").status == "ACTIVE"


def test_a_missing_permission_names_the_policy_that_has_it(server, scripted):
    server.refuse(400, "ResourceNotFoundException")
    server.refuse(400, "AccessDeniedException", "not authorized to perform: dynamodb:CreateTable")

    with pytest.raises(AccessDenied, match=r"kclrun iam --purpose provision") as raised:
        ensured(scripted, "leases")
    assert "dynamodb:CreateTable" in str(raised.value)
    assert len(server.requests) == 2


# Every TableStatus of the API reference


STATUSES = {
    "ACTIVE": None,
    "UPDATING": None,
    "CREATING": (Unavailable, 69, "It is being made"),
    "DELETING": (Unavailable, 69, "when it is gone, the next start makes a new one"),
    "INACCESSIBLE_ENCRYPTION_CREDENTIALS": (TableRefused, 78, "KMS key.*\\nEnable the key"),
    "ARCHIVING": (TableRefused, 78, "backup\\nRestore it"),
    "ARCHIVED": (TableRefused, 78, "backup\\nRestore it"),
    "REPLICATION_NOT_AUTHORIZED": (TableRefused, 78, "replicate"),
    "OF_THE_FUTURE": (Unavailable, 69, "Wait until it is ACTIVE"),
}


def test_the_statuses_are_those_of_the_api_reference():
    session = botocore.session.Session()
    listed = session.get_service_model("dynamodb").shape_for("TableStatus").enum
    assert set(listed) <= STATUSES.keys()


@pytest.mark.parametrize("status", STATUSES)
def test_each_status_of_the_table_is_said_with_what_to_do(status, server, scripted, capsys):
    server.default = Reply(body=described(status))
    expected = STATUSES[status]
    if expected is None:
        assert require_usable(inspect_table(scripted.dynamodb_reads(), "t")) is None
        return
    kind, code, words = expected

    for call in (
        lambda: ensured(scripted, "t"),
        lambda: require_usable(inspect_table(scripted.dynamodb_reads(), "t")),
    ):
        with pytest.raises(kind, match=f"lease table t is {status}(?s:.)*{words}") as raised:
            call()
        assert report_error(raised.value, "run") == code
        assert "network" not in capsys.readouterr().err


def test_a_status_that_a_person_has_to_end_is_not_waited_for(server, scripted):
    server.default = Reply(body=described("ARCHIVED"))
    with pytest.raises(TableRefused):
        ensured(scripted, "t")
    assert len(server.requests) == 1


def test_a_table_that_is_being_deleted_is_made_again_when_it_is_gone(server, scripted):
    server.reply(body=described("DELETING"))
    server.refuse(400, "ResourceNotFoundException")
    server.reply(body=b"{}")
    server.reply(body=described("ACTIVE"))

    assert ensured(scripted, "t").created

    targets = [request.headers["x-amz-target"].split(".")[1] for request in server.requests]
    assert targets[:4] == ["DescribeTable", "DescribeTable", "CreateTable", "DescribeTable"]
