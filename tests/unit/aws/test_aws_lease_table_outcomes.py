"""What becomes of a write to the lease table, for each way its request can go."""

from collections.abc import Callable

import msgspec
import pytest

from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.rows import encode_row
from kclrun.aws.wire import WireClient
from kclrun.errors import InvalidRequest, TableRefused, Throttled, Unavailable
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol import writes as outcomes
from kclrun.protocol.writes import (
    Applied,
    Claim,
    ConditionFailed,
    CreateChildren,
    CreateLease,
    DeleteEnded,
    HeldParent,
    OutcomeUnknown,
    Refused,
    Renew,
)

MakeClient = Callable[..., WireClient]
ME = OwnerId("kclrun:a:h:1")
KEY = LeaseKey("shardId-0")
ROW = Lease(key=KEY, checkpoint=ExtendedSequenceNumber("5"), counter=4, owner=ME)
CLAIM = Claim(KEY, ME, 3)
CHILDREN = tuple(
    Lease(key=LeaseKey(f"shardId-{number}"), checkpoint=TRIM_HORIZON) for number in (1, 2)
)
CREATE = CreateChildren(CHILDREN, (HeldParent(KEY, ME, 4),))


@pytest.fixture
def table(server, make_client):
    return DynamoLeaseTable(make_client(server.url, service="dynamodb"), "leases")


@pytest.fixture
def impatient(server, make_client):
    """For a server that is silent; one that is slow must not seem so."""
    client = make_client(server.url, service="dynamodb", read_timeout_s=0.3)
    return DynamoLeaseTable(client, "leases")


def cancelled(*reasons: str) -> bytes:
    return msgspec.json.encode(
        {
            "__type": "com.amazonaws.dynamodb.v20120810#TransactionCanceledException",
            "Message": "Transaction cancelled",
            "CancellationReasons": [{"Code": reason} for reason in reasons],
        }
    )


def test_a_success_carries_the_row_after_the_write(server, table):
    server.reply(body=msgspec.json.encode({"Attributes": encode_row(ROW)}))

    assert table.write(CLAIM) == Applied(ROW)

    request = msgspec.json.decode(server.requests[0].body)
    assert request["ReturnValues"] == "ALL_NEW"
    assert request["ReturnValuesOnConditionCheckFailure"] == "ALL_OLD"


def test_a_counter_that_our_own_write_took_past_its_limit_is_read(server, table):
    row = msgspec.structs.replace(ROW, counter=2**62)
    server.reply(body=msgspec.json.encode({"Attributes": encode_row(row)}))

    assert table.write(CLAIM) == Applied(row)


@pytest.mark.parametrize("change", [CreateLease(ROW), DeleteEnded(KEY), CREATE])
def test_a_write_that_has_no_row_to_show_needs_none(server, table, change):
    assert table.write(change) == Applied(None)


@pytest.mark.parametrize("consistent", [True, False])
def test_a_scan_is_as_consistent_as_it_is_asked_to_be(server, table, consistent):
    server.reply(body=msgspec.json.encode({"Items": [encode_row(ROW)]}))

    (page,) = table.scan(consistent=consistent)

    assert page.leases == (ROW,)
    assert msgspec.json.decode(server.requests[0].body)["ConsistentRead"] is consistent


def test_a_failed_condition_carries_the_row_that_stands_there(server, table):
    body = {"__type": "x#ConditionalCheckFailedException", "message": "no"}
    server.reply(400, msgspec.json.encode(body | {"Item": encode_row(ROW)}))
    server.reply(400, msgspec.json.encode(body))
    server.reply(400, msgspec.json.encode(body | {"Item": {"leaseKey": {"S": "shardId-0"}}}))

    assert table.write(CLAIM) == ConditionFailed(ROW)
    assert table.write(CLAIM) == ConditionFailed(None)
    broken = table.write(CLAIM)
    assert isinstance(broken, Refused), "a broken row is not a missing one"
    assert broken.code == "BrokenRow"


@pytest.mark.parametrize("change", [CLAIM, CreateLease(ROW), DeleteEnded(KEY), CREATE])
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "ProvisionedThroughputExceededException", outcomes.Throttled),
        (400, "RequestLimitExceeded", outcomes.Throttled),
        (400, "TransactionConflictException", outcomes.Unavailable),
        (400, "ExpiredTokenException", outcomes.Unavailable),
        (500, "InternalServerError", OutcomeUnknown),
        (503, "", OutcomeUnknown),
        (400, "ResourceNotFoundException", Refused),
        (400, "AccessDeniedException", Refused),
        (400, "ValidationException", Refused),
    ],
)
def test_a_refusal_is_a_value(server, table, change, status, code, expected):
    server.refuse(status, code, "because")

    outcome = table.write(change)

    assert type(outcome) is expected
    if isinstance(outcome, Refused):
        assert outcome.code == code
    assert len(server.requests) == 1


@pytest.mark.parametrize("change", [CLAIM, CreateLease(ROW), DeleteEnded(KEY), CREATE])
@pytest.mark.parametrize("trouble", ["be_silent", "hang_up"])
def test_silence_leaves_a_write_unknown(server, impatient, change, trouble):
    getattr(server, trouble)()

    assert isinstance(impatient.write(change), OutcomeUnknown)
    assert len(server.requests) == 1, "no write is sent twice"


def test_a_refused_connection_leaves_nothing_written(make_client):
    table = DynamoLeaseTable(make_client("http://127.0.0.1:9", service="dynamodb"), "leases")

    assert isinstance(table.write(CLAIM), outcomes.Unavailable)


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"<html>", b'{"Attributes":{}}', b'{"Attributes":{"leaseKey":{"S":"x"}}}'],
)
def test_a_success_that_cannot_be_read_is_read_back(server, table, body):
    server.reply(body=body)

    assert isinstance(table.write(Renew(KEY, ME, 3)), OutcomeUnknown)


# Children


def test_children_that_exist_are_left_out_and_the_rest_is_sent_again(server, table):
    server.reply(400, cancelled("None", "ConditionalCheckFailed", "None"))

    assert table.write(CREATE) == Applied(None)

    first, second = (msgspec.json.decode(request.body) for request in server.requests)
    assert [next(iter(part)) for part in first["TransactItems"]] == ["ConditionCheck", "Put", "Put"]
    assert [next(iter(part)) for part in second["TransactItems"]] == ["ConditionCheck", "Put"]
    assert second["TransactItems"][1] == first["TransactItems"][2]
    assert "ClientRequestToken" not in first


def test_the_second_sending_can_be_unknown_too(server, table):
    server.reply(400, cancelled("None", "ConditionalCheckFailed", "None"))
    server.hang_up()

    assert isinstance(table.write(CREATE), OutcomeUnknown)


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        (("None", "ConditionalCheckFailed", "ConditionalCheckFailed"), Applied(None)),
        (("ConditionalCheckFailed", "None", "None"), ConditionFailed(None)),
        (("ConditionalCheckFailed", "ConditionalCheckFailed", "None"), ConditionFailed(None)),
        (
            ("None", "TransactionConflict", "None"),
            outcomes.Throttled("TransactWriteItems: TransactionConflict"),
        ),
        (
            ("ConditionalCheckFailed", "TransactionConflict", "None"),
            outcomes.Throttled("TransactWriteItems: TransactionConflict"),
        ),
        *(
            (("None", busy, "None"), outcomes.Throttled(f"TransactWriteItems: {busy}"))
            for busy in ("ThrottlingError", "ProvisionedThroughputExceeded")
        ),
        (
            ("None", "ItemCollectionSizeLimitExceeded", "None"),
            Refused(
                "ItemCollectionSizeLimitExceeded",
                "TransactWriteItems: ItemCollectionSizeLimitExceeded",
            ),
        ),
    ],
)
def test_a_cancelled_transaction_is_read_by_its_reasons(server, table, reasons, expected):
    server.reply(400, cancelled(*reasons))

    assert table.write(CREATE) == expected
    assert len(server.requests) == 1


@pytest.mark.parametrize("silent", [{}, {"Code": None}, {"Code": ""}])
def test_a_part_of_a_cancelled_transaction_without_a_reason_did_not_cancel_it(
    server, table, silent
):
    body = msgspec.json.decode(cancelled("None", "ConditionalCheckFailed", "None"))
    body["CancellationReasons"][0] = body["CancellationReasons"][2] = silent
    server.reply(400, msgspec.json.encode(body))

    assert table.write(CREATE) == Applied(None)

    _, again = (msgspec.json.decode(request.body) for request in server.requests)
    assert [next(iter(part)) for part in again["TransactItems"]] == ["ConditionCheck", "Put"]


def test_a_cancelled_transaction_without_sound_reasons_is_refused(server, table):
    for reasons in ((), ("None",), ("None", "None", "None")):
        server.reply(400, cancelled(*reasons))
        assert isinstance(table.write(CREATE), Refused)
    # As many reasons as there are parts, and another refusal.
    other = cancelled("None", "ConditionalCheckFailed", "None")
    server.reply(400, other.replace(b"TransactionCanceledException", b"ValidationException"))
    refused = table.write(CREATE)
    assert isinstance(refused, Refused)
    assert refused.code == "ValidationException"


# Reading


def test_reads_are_consistent(server, table):
    server.reply(body=msgspec.json.encode({"Item": encode_row(ROW)}))
    server.reply(body=msgspec.json.encode({"Items": [encode_row(ROW)]}))

    assert table.read(KEY) == ROW
    assert [page.leases for page in table.scan()] == [(ROW,)]

    asked = [msgspec.json.decode(request.body) for request in server.requests]
    assert all(request["ConsistentRead"] for request in asked)
    assert not any("Limit" in request for request in asked)


def test_a_table_of_another_program_is_reported(server, table):
    server.reply(body=msgspec.json.encode({"Items": [{"id": {"S": "x"}}]}))
    for words in (
        "The provided key element does not match the schema",
        "The number of conditions on the keys is invalid",
    ):
        server.refuse(400, "ValidationException", words)

    with pytest.raises(TableRefused, match="leases is not a lease table"):
        list(table.scan())
    for _ in range(2):
        with pytest.raises(TableRefused, match=r"Name another with leases\.table"):
            table.read(KEY)


def test_a_scan_that_breaks_off_raises(server, table):
    page = {"Items": [encode_row(ROW)], "LastEvaluatedKey": {"leaseKey": {"S": KEY}}}
    server.reply(body=msgspec.json.encode(page))
    server.refuse(400, "ProvisionedThroughputExceededException")
    pages = table.scan()

    assert next(pages).leases == (ROW,)
    with pytest.raises(Throttled):
        next(pages)
    assert msgspec.json.decode(server.requests[1].body)["ExclusiveStartKey"] == {
        "leaseKey": {"S": KEY}
    }


def test_a_scan_without_end_is_an_error(server, table, monkeypatch):
    monkeypatch.setattr("kclrun.aws.lease_table.PAGES_MAX", 3)
    page = {"Items": [], "LastEvaluatedKey": {"leaseKey": {"S": KEY}}}
    server.default.body = msgspec.json.encode(page)

    with pytest.raises(InvalidRequest, match="more than 3 pages"):
        list(table.scan())


@pytest.mark.parametrize(
    "body",
    [b"<html>", b'{"Item":{"a":{"S":"\xff"}},"Items":["\xff"]}', b'{"more":' + b"[" * 100_000],
)
def test_a_garbled_answer_to_a_read_is_asked_for_again(server, table, body):
    server.default.body = body

    with pytest.raises(Unavailable):
        table.read(KEY)
    with pytest.raises(Unavailable):
        list(table.scan())


@pytest.mark.parametrize("change", [CLAIM, CreateLease(ROW), DeleteEnded(KEY), CREATE])
@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"more":' + b"[" * 100_000])
def test_a_write_whose_answer_cannot_be_read_is_unknown(server, table, change, body):
    server.default.body = body

    assert isinstance(table.write(change), OutcomeUnknown)


@pytest.mark.parametrize("body", [b"{}", b'{"Count":0}', b'{"Items":null}'])
def test_an_answer_without_items_is_not_an_empty_table(server, table, body):
    server.default.body = body

    with pytest.raises(Unavailable, match="not a page of items"):
        list(table.scan())
    with pytest.raises(Unavailable, match="not a page of items"):
        table.offered(10)
