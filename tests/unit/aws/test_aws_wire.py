"""The wire client against a scripted server: what came back, what did not, and what that means."""

import contextlib
import email.utils
import logging
import multiprocessing
import socket
import subprocess
import sys
import zlib
from typing import Any

import msgspec
import pytest

from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import GET_RECORDS, OPERATIONS, PUT_ITEM, UPDATE_ITEM
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    ExpiredKeys,
    InvalidRequest,
    InvariantViolation,
    NotFound,
    NothingListens,
    OutcomeUnknown,
    ServiceError,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S
from tests.support.tables import over_rows


def dated(seconds: float) -> dict[str, str]:
    return {"Date": email.utils.formatdate(seconds, usegmt=True)}


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# What is sent, and what comes back


def test_a_call_sends_one_signed_json_post(server, make_client):
    server.reply(body=b'{"ok":1}', headers=dated(1_700_000_000))
    client = make_client(server.url, credentials=WireCredentials("AKID", "secret", "a-token"))

    reply = client.call(GET_RECORDS, b'{"Limit":1}')

    assert (reply.status, reply.body, reply.date_at) == (200, b'{"ok":1}', 1_700_000_000)
    (request,) = server.requests
    assert request.line == "POST / HTTP/1.1"
    assert request.body == b'{"Limit":1}'
    assert request.headers["x-amz-target"] == "Kinesis_20131202.GetRecords"
    assert request.headers["content-type"] == "application/x-amz-json-1.1"
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.headers["x-amz-security-token"] == "a-token"
    assert "x-amz-security-token" in request.headers["authorization"].split("SignedHeaders=")[1]


def test_a_connection_is_kept_and_used_again(server, make_client):
    client = make_client(server.url)

    for _ in range(5):
        client.call(GET_RECORDS, b"{}")

    assert server.connections == 1


def test_a_connection_is_kept_after_an_error_reply(server, make_client):
    server.refuse(400, "ProvisionedThroughputExceededException")
    client = make_client(server.url)

    with pytest.raises(Throttled):
        client.call(GET_RECORDS, b"{}")
    client.call(GET_RECORDS, b"{}")

    assert server.connections == 1


def test_a_body_of_fifteen_megabytes_arrives_whole(server, make_client):
    body = b"x" * 15_000_000
    server.reply(body=body)

    assert make_client(server.url, read_timeout_s=60.0).call(GET_RECORDS, b"{}").body == body


def test_an_endless_body_is_refused(server, make_client, monkeypatch):
    monkeypatch.setattr("kclrun.aws.http.pool.BODY_BYTES_MAX", 1000)
    server.reply(body=b"x" * 2000)

    with pytest.raises(Unavailable, match="longer than 1000 bytes"):
        make_client(server.url).call(GET_RECORDS, b"{}")


def test_a_checksum_is_compared(server, make_client):
    good, bad = zlib.crc32(b"{}"), zlib.crc32(b"[]")
    server.reply(headers={"x-amz-crc32": str(good)})
    server.reply(headers={"x-amz-crc32": str(bad)})
    client = make_client(server.url)

    client.call(UPDATE_ITEM, b"{}")
    with pytest.raises(OutcomeUnknown, match="checksum"):
        client.call(UPDATE_ITEM, b"{}")


# No answer


def test_a_refused_connection_means_nothing_was_sent(make_client):
    client = make_client(f"http://127.0.0.1:{closed_port()}")

    for operation in (GET_RECORDS, UPDATE_ITEM):
        with pytest.raises(NothingListens, match=r"nothing listens at 127\.0\.0\.1:") as raised:
            client.call(operation, b"{}")
        assert raised.value.operation == operation.name
        assert "connection refused" in str(raised.value)


def test_a_name_that_does_not_resolve_means_nothing_was_sent(make_client):
    with pytest.raises(Unavailable, match="before anything was sent"):
        make_client("http://does-not-exist.invalid").call(UPDATE_ITEM, b"{}")


def test_a_tls_handshake_that_fails_means_nothing_was_sent(server, make_client):
    server.hang_up()
    client = make_client(f"https://127.0.0.1:{server.port}", connect_timeout_s=0.3)

    with pytest.raises(Unavailable, match="before anything was sent"):
        client.call(UPDATE_ITEM, b"{}")


@pytest.mark.seconds
@pytest.mark.parametrize("trouble", ["be_silent", "hang_up"])
def test_no_answer_leaves_a_write_unknown_and_a_read_unavailable(server, make_client, trouble):
    client = make_client(server.url, read_timeout_s=0.3)

    getattr(server, trouble)()
    with pytest.raises(OutcomeUnknown, match="after it was sent"):
        client.call(UPDATE_ITEM, b"{}")
    getattr(server, trouble)()
    with pytest.raises(Unavailable):
        client.call(GET_RECORDS, b"{}")

    assert len(server.requests) == 2, "nothing is sent twice"


def test_an_answer_cut_short_leaves_a_write_unknown(server, make_client):
    server.reply(body=b'{"Attributes":{}}', cut_at=5)
    client = make_client(server.url)

    with pytest.raises(OutcomeUnknown):
        client.call(UPDATE_ITEM, b"{}")


@pytest.mark.parametrize(
    ("operation", "troubles", "raised", "connections"),
    [
        (GET_RECORDS, ["be_silent"], pytest.raises(Unavailable, match="silent for"), [1, 1]),
        (GET_RECORDS, ["hang_up"], contextlib.nullcontext(), [1, 1, 2]),
        (GET_RECORDS, ["hang_up", "hang_up"], pytest.raises(Unavailable), [1, 1, 2]),
        (UPDATE_ITEM, ["hang_up"], pytest.raises(OutcomeUnknown), [1, 1]),
    ],
    ids=["a read in vain", "a read on a closed one", "a read, a third time", "a write"],
)
def test_on_a_kept_connection_only_a_read_is_sent_again_and_once_if_that_was_just_closed(
    server, make_client, operation, troubles, raised, connections
):
    # Only silence is waited for; on a busy machine any answer may take longer than that.
    client = make_client(server.url, read_timeout_s=0.3 if "be_silent" in troubles else HUNG_S)
    client.call(operation, b"{}")
    for trouble in troubles:
        getattr(server, trouble)()

    with raised:
        client.call(operation, b"{}")

    assert [request.connection for request in server.requests] == connections


def test_a_connection_seen_closed_is_replaced_before_sending(server, make_client):
    server.reply(then_close=True)
    client = make_client(server.url)
    client.call(UPDATE_ITEM, b"{}")
    connection = next(iter(server._threads))
    connection.join(timeout=HUNG_S)

    client.call(UPDATE_ITEM, b"{}")

    assert [request.connection for request in server.requests] == [1, 2]


# Error replies


CASES = [
    # status, code, a read's error, a write's error
    (400, "ProvisionedThroughputExceededException", Throttled, Throttled),
    (400, "ThrottlingException", Throttled, Throttled),
    (429, "", Throttled, Throttled),
    (400, "KMSThrottlingException", Throttled, Throttled),
    (400, "KMSAccessDeniedException", Unavailable, Unavailable),
    (400, "KMSDisabledException", Unavailable, Unavailable),
    (400, "ExpiredIteratorException", ExpiredIterator, ExpiredIterator),
    (400, "ResourceNotFoundException", NotFound, NotFound),
    (400, "AccessDeniedException", AccessDenied, AccessDenied),
    (400, "UnrecognizedClientException", AccessDenied, AccessDenied),
    (403, "", AccessDenied, AccessDenied),
    (400, "ExpiredTokenException", ExpiredKeys, ExpiredKeys),
    (400, "ValidationException", InvalidRequest, InvalidRequest),
    (400, "InvalidArgumentException", InvalidRequest, InvalidRequest),
    (400, "TransactionConflictException", Unavailable, Unavailable),
    (500, "InternalServerError", Unavailable, OutcomeUnknown),
    (500, "", Unavailable, OutcomeUnknown),
    (503, "ServiceUnavailable", Unavailable, OutcomeUnknown),
    (504, "", Unavailable, OutcomeUnknown),
]


@pytest.mark.parametrize("status", [None, 500])
def test_what_changes_something_has_an_unknown_outcome_once_its_answer_is_lost(status):
    for operation in OPERATIONS:
        only_looks = operation.name.startswith(
            ("Describe", "List", "Get", "Head", "Scan", "Query", "BatchGet", "Assume", "Subscribe")
        )

        error = service_error(operation, ErrorReply(message="timed out"), status)

        expected = Unavailable if only_looks else OutcomeUnknown
        assert type(error) is expected, operation.name


@pytest.mark.parametrize(("status", "code", "read_error", "write_error"), CASES)
def test_an_error_reply_says_what_to_do_next(
    server, make_client, status, code, read_error, write_error
):
    client = make_client(server.url)
    for operation, expected in ((GET_RECORDS, read_error), (PUT_ITEM, write_error)):
        server.refuse(status, code, "because")
        with pytest.raises(ServiceError) as raised:
            client.call(operation, b"{}")
        assert type(raised.value) is expected
        assert raised.value.operation == operation.name
        assert raised.value.code == (code or f"HTTP {status}")
        assert "because" in str(raised.value)
    assert len(server.requests) == 2, "nothing is retried"


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>bad gateway</html>", b"[1]", b'{"__type":5}', b"\xff\xfe", b"[" * 5000, b"null"],
)
def test_a_malformed_error_body_is_judged_by_its_status(server, make_client, body):
    client = make_client(server.url)
    server.reply(502, body)
    with pytest.raises(OutcomeUnknown):
        client.call(UPDATE_ITEM, b"{}")
    server.reply(400, body)
    with pytest.raises(InvalidRequest):
        client.call(UPDATE_ITEM, b"{}")


def test_an_error_named_in_a_header_is_understood(server, make_client):
    named = {"x-amzn-ErrorType": "ResourceNotFoundException:http://internal.amazon.com/doc"}
    server.reply(400, b'{"Message":"no such stream"}', headers=named)

    with pytest.raises(NotFound, match="no such stream"):
        make_client(server.url).call(GET_RECORDS, b"{}")


# This host's clock


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    "code", ["RequestTimeTooSkewed", "RequestExpired", "InvalidSignatureException"]
)
def test_a_clock_that_is_off_is_corrected_by_the_services(server, make_client, code):
    body = msgspec.json.encode({"__type": code, "message": "Signature expired"})
    server.reply(400, body, headers=dated(NOW))
    client = make_client(server.url, clock=Clock(NOW - 3600))

    client.call(UPDATE_ITEM, b"{}")
    client.call(UPDATE_ITEM, b"{}")

    dates = [request.headers["x-amz-date"] for request in server.requests]
    assert dates == ["20231114T211320Z", "20231114T221320Z", "20231114T221320Z"]


def test_the_time_of_the_service_is_its_last_date_and_what_passed_since(server, make_client):
    clock = Clock(NOW + 3600)
    client = make_client(server.url, clock=clock)
    assert client.service_time() == NOW + 3600

    server.reply(headers=dated(NOW))
    client.call(UPDATE_ITEM, b"{}")
    clock.now += 7.5

    assert client.service_time() == NOW + 7.5


@pytest.mark.parametrize(
    ("code", "late_s"), [("InvalidSignatureException", 5), ("AccessDeniedException", 3600)]
)
def test_a_wrong_key_is_not_taken_for_a_wrong_clock(server, make_client, code, late_s):
    body = msgspec.json.encode({"__type": code, "message": "no"})
    server.reply(400, body, headers=dated(NOW))

    with pytest.raises(AccessDenied):
        make_client(server.url, clock=Clock(NOW - late_s)).call(UPDATE_ITEM, b"{}")

    assert len(server.requests) == 1


def test_what_a_corrected_clock_still_shows_is_no_reason_to_correct_it_again(server, make_client):
    for code in ("RequestExpired", "", "InvalidSignatureException", "", "RequestTimeTooSkewed"):
        body = msgspec.json.encode({"__type": code, "message": "no"} if code else {})
        server.reply(400 if code else 200, body, headers=dated(NOW))
    client = make_client(server.url, clock=Clock(NOW - 3600))

    client.call(UPDATE_ITEM, b"{}")
    with pytest.raises(AccessDenied):
        client.call(UPDATE_ITEM, b"{}")
    client.call(UPDATE_ITEM, b"{}")
    client.call(UPDATE_ITEM, b"{}")

    # Such a refusal is surely by the clock, however small the difference is.
    assert len(server.requests) == 6


def test_a_clock_is_corrected_only_once_a_call(server, make_client):
    for _ in range(2):
        body = msgspec.json.encode({"__type": "RequestTimeTooSkewed"})
        server.reply(403, body, headers=dated(NOW))

    with pytest.raises(AccessDenied):
        make_client(server.url, clock=Clock(NOW - 3600)).call(UPDATE_ITEM, b"{}")

    assert len(server.requests) == 2


# Processes, credentials, secrets


def test_renewed_credentials_sign_the_next_request(server):
    held = HeldCredentials(WireCredentials("AKIDOLD", "old"))
    client = WireClient(WireEndpoint(server.url, "r", "r"), held, service="kinesis")

    client.call(GET_RECORDS, b"{}")
    held.replace(WireCredentials("AKIDNEW", "new", "new-token"))
    client.call(GET_RECORDS, b"{}")
    client.close()

    assert "AKIDOLD" in server.requests[0].headers["authorization"]
    assert "AKIDNEW" in server.requests[1].headers["authorization"]
    assert server.requests[1].headers["x-amz-security-token"] == "new-token"


def test_a_client_refuses_another_process(server, make_client):
    client = make_client(server.url)
    client._pid += 1  # as a fork would leave it

    with pytest.raises(InvariantViolation, match="after the fork"):
        client.call(GET_RECORDS, b"{}")

    assert server.connections == 0


def test_a_client_is_useless_in_a_forked_child_and_sound_in_its_parent():
    """In a process of its own: a fork must not happen among other tests' threads."""
    script = """
import os, sys
from kclrun.aws.operations import GET_RECORDS
from kclrun.aws.wire import HeldCredentials, WireClient
from kclrun.errors import InvariantViolation, Unavailable
from kclrun.model.wire import WireCredentials, WireEndpoint
endpoint = WireEndpoint("http://127.0.0.1:9", "r", "r")
client = WireClient(endpoint, HeldCredentials(WireCredentials("k", "s")), service="kinesis")
expected = InvariantViolation if (child := os.fork()) == 0 else Unavailable
try:
    client.call(GET_RECORDS, b"{}")
except expected:
    status = 0
else:
    status = 1
if child == 0:
    os._exit(status)
sys.exit(status or os.waitpid(child, 0)[1])
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=HUNG_S).returncode == 0


def test_a_lease_process_needs_no_botocore():
    script = """
import sys
import kclrun.aws.kinesis, kclrun.aws.lease_table, kclrun.aws.wire
sys.exit(any(name.split(".")[0] in {"boto3", "botocore", "s3transfer"} for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=HUNG_S).returncode == 0


def _call_in_child(url: str, result: Any) -> None:
    endpoint = WireEndpoint(url, "r", "r")
    client = WireClient(endpoint, HeldCredentials(WireCredentials("k", "s")), service="kinesis")
    result.send_bytes(client.call(GET_RECORDS, b"{}").body)
    client.close()


def test_a_client_is_made_from_plain_values_in_a_fresh_process(server):
    server.reply(body=b"from afar")
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_call_in_child, args=(server.url, sending))
    child.start()
    assert receiving.poll(HUNG_S)
    assert receiving.recv_bytes() == b"from afar"
    child.join(timeout=HUNG_S)
    receiving.close()
    sending.close()


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://kinesis.eu-west-1.amazonaws.com/", "kinesis.eu-west-1.amazonaws.com"),
        ("https://h:443/", "h"),
        ("http://h:443", "h:443"),
        ("http://[::1]:80", "[::1]"),
        ("http://[::1]:4567", "[::1]:4567"),
    ],
)
def test_the_signed_host_is_the_one_that_is_sent(make_client, url, host):
    assert repr(make_client(url)) == f"WireClient(kinesis at {host})"


@over_rows(
    "url", ["ftp://x", "localhost:80", "http://", "http://h/?x=1", "http://h:x", "http://u:p@h"]
)
def test_an_address_that_is_none_is_a_settings_error(url):
    with pytest.raises(SettingsError):
        WireClient(
            WireEndpoint(url, "r", "r"), HeldCredentials(WireCredentials("a", "b")), service="s"
        )


def test_no_secret_reaches_an_error_a_repr_or_a_log(server, make_client, caplog):
    """Canaries in every place a secret can sit; services quote requests back."""
    caplog.set_level(logging.DEBUG)
    token = "CANARY" + "t" * 300
    iterator = "AAAAAAAAAACANARY" + "i" * 200
    secrets = WireCredentials("AKIDCANARY", "SECRETCANARY", token)
    client = make_client(server.url, credentials=secrets)
    quoted = f"The Canonical String should have been\nx-amz-security-token:{token}"
    shown = [repr(client), repr(secrets), str(secrets), repr(client._signer)]
    for status, code, message in [
        (400, "InvalidSignatureException", quoted.replace("\n", " ")),
        (400, "ValidationException", f"Value '{iterator}' at 'shardIterator' failed"),
        (500, "InternalFailure", f"first line\n{token}"),
        (500, "InternalFailure", "first line\nshort CANARY"),
        (400, "Unheard", token),
    ]:
        server.refuse(status, code, message)
        with pytest.raises(ServiceError) as raised:
            client.call(GET_RECORDS, msgspec.json.encode({"ShardIterator": iterator}))
        shown += [str(raised.value), repr(raised.value), repr(raised.value.__context__)]
    server.hang_up()
    server.hang_up()
    with pytest.raises(Unavailable) as unanswered:
        client.call(GET_RECORDS, msgspec.json.encode({"ShardIterator": iterator}))
    shown += [repr(unanswered.value), repr(unanswered.value.__context__)]
    reply = client.call(GET_RECORDS, b"{}")
    shown += [repr(reply), caplog.text]

    assert len(server.requests) == 8
    assert not [text for text in shown if "CANARY" in text]
