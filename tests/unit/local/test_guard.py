"""Web pages of other sites get nothing from any door of the embedded AWS; programs are served."""

import contextlib
import json
import socket
from urllib.parse import urlsplit

import pytest

from kclrun.codec.cbor import decode_cbor
from kclrun.local import kinesis_process, moto_process
from kclrun.local.forwarding import Forwarder
from kclrun.local.guard import Guard
from kclrun.local.http_server import HttpServer
from kclrun.local.in_process import InProcessAws
from kclrun.local.server import ProcessSettings
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.signatures import Credentials
from tests.patience import HUNG_S
from tests.unit.local.http2_client import connect, serving
from tests.unit.local.serving import ask, served

EVIL = "http://evil.example"
LIST = {"X-Amz-Target": "Kinesis_20131202.ListStreams"}
TABLES = {"X-Amz-Target": "DynamoDB_20120810.ListTables"}


class Moto:
    """Stands for moto's application: it notes the paths that reach it."""

    def __init__(self):
        self.paths = []

    def __call__(self, environ, start_response):
        self.paths.append(environ["PATH_INFO"])
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"moto"]


@pytest.fixture
def moto(monkeypatch):
    stub = Moto()
    monkeypatch.setattr(moto_process, "dispatcher", lambda: stub)
    monkeypatch.setattr("kclrun.local.changes.tables.feed", lambda _: None)
    return stub


@contextlib.contextmanager
def kinesis_alone(moto, settings):
    with served(kinesis_process._application(settings)) as endpoint:
        yield endpoint


@contextlib.contextmanager
def moto_alone(moto, settings):
    with served(moto_process._moto_application(settings)) as endpoint:
        yield endpoint


@contextlib.contextmanager
def both(moto, settings):
    """The endpoint of `kclrun local` and of `aws.endpoint: embedded`."""
    with served(moto_process._moto_application(settings)) as behind:
        forwarder = Forwarder(urlsplit(behind).port)
        face = HttpServer(Kinesis(KinesisSettings(), b"s" * 32), forwarder, settings.credentials)
        guard = Guard(face, names=settings.names, serves_moto_api=settings.serves_moto_api)
        with served(guard, forwarder) as endpoint:
            yield endpoint


@contextlib.contextmanager
def of_a_test(moto, settings):
    """The endpoint of the pytest plugin."""
    with served(moto_process._moto_application(ProcessSettings(serves_moto_api=True))) as behind:
        forwarder = Forwarder(urlsplit(behind).port)
        aws = InProcessAws()
        aws._start_moto = lambda: forwarder
        try:
            yield aws.endpoint
        finally:
            aws.close()


DOORS = [kinesis_alone, moto_alone, both, of_a_test]
doors = pytest.mark.parametrize("door", DOORS, ids=[door.__name__ for door in DOORS])


def statuses(endpoint, headers, *, method="POST", path="/"):
    """Of a request to Kinesis and of one to DynamoDB."""
    return [ask(endpoint, method, path, b"{}", target | headers)[0] for target in (LIST, TABLES)]


FOREIGN = [
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost"},
    {"Host": "evil.example"},
    {"Host": "evil.example:4567", "Origin": "http://evil.example:4567"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "localhost.evil.example:4567"},
    {"Host": "127.0.0.1@evil.example"},
    {"Host": ""},
    {"Host": "["},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Access-Control-Request-Method": "POST"},
]


@doors
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_a_request_of_a_page_of_another_site_is_refused(door, moto, method):
    with door(moto, ProcessSettings()) as endpoint:
        for headers in FOREIGN:
            assert statuses(endpoint, headers, method=method) == [403, 403], headers
            answered = ask(endpoint, method, "/", b"{}", LIST | headers)[1]
            allowed = [name for name in answered if name.lower().startswith("access-control")]
            assert not allowed, headers
    assert moto.paths == []


@doors
def test_a_request_of_a_program_is_served(door, moto):
    with door(moto, ProcessSettings()) as endpoint:
        for headers in (
            {},
            {"Host": "localhost:4567"},
            {"Host": "LOCALHOST."},
            {"Host": "bucket.localhost:4567"},
            {"Host": "[::1]:4567"},
            {"Host": "192.0.2.7:4567"},  # a container that has the address of its host
            {"Host": "127.0.0.1:80", "Origin": "http://127.0.0.1:80"},
            {"Sec-Fetch-Site": "none"},
            {"sec-fetch-mode": "cors"},  # as Node's `fetch` sends it
            {"User-Agent": "aws-cli/2.0"},
        ):
            assert 403 not in statuses(endpoint, headers), headers


@pytest.mark.parametrize("door", [kinesis_alone, moto_alone, both])
@pytest.mark.parametrize(
    ("host", "is_served"),
    [
        ("kinesis:4567", True),
        ("KINESIS.", True),
        ("bucket.kinesis:4567", True),
        ("other", False),
        ("notkinesis", False),
        ("kinesis.evil.example", False),
    ],
)
def test_a_name_that_the_user_gave_is_served(door, moto, host, is_served):
    with door(moto, ProcessSettings(names=("0.0.0.0", "Kinesis"))) as endpoint:
        assert (403 in statuses(endpoint, {"Host": host})) != is_served


@doors
def test_the_interface_of_moto_is_refused(door, moto):
    with door(moto, ProcessSettings()) as endpoint:
        for path in (
            "/moto-api/reset",
            "/moto-api",
            "/moto-api/recorder/upload-recording",
            "/%6doto-api/reset",
            "//moto-api/reset",
        ):
            for method in ("POST", "GET"):
                status, _, body = ask(endpoint, method, path)
                assert status == 403, (method, path)
                assert b"--moto-api" in body, (method, path)
    assert moto.paths == []


@pytest.mark.parametrize("door", [moto_alone, both])
def test_the_interface_of_moto_is_served_to_programs_alone_when_the_user_asks(door, moto):
    with door(moto, ProcessSettings(serves_moto_api=True)) as endpoint:
        assert ask(endpoint, "POST", "/moto-api/reset", headers={"Origin": EVIL})[0] == 403
        assert moto.paths == []
        assert ask(endpoint, "POST", "/moto-api/reset")[0] == 200
    assert moto.paths == ["/moto-api/reset"]


@doors
def test_a_request_without_a_host_is_no_page(door, moto):
    with door(moto, ProcessSettings()) as endpoint:
        where = urlsplit(endpoint)
        with socket.create_connection((where.hostname, where.port), HUNG_S) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b" 403 " not in connection.recv(65_536).partition(b"\r\n")[0]


def test_a_refusal_comes_before_the_signature_is_looked_at(moto):
    settings = ProcessSettings(credentials=Credentials("key", "secret"))
    for door in (kinesis_alone, moto_alone, both):
        with door(moto, settings) as endpoint:
            assert statuses(endpoint, {"Origin": EVIL}) == [403, 403]


def test_a_page_gets_nothing_by_http_2_either():
    async def scenario(port, _state):
        client = await connect(port)
        for more in ([("origin", EVIL)], [("sec-fetch-site", "cross-site")]):
            assert (await client.answer(await client.ask(more=more)))[0] == "403"
        # The authority of the client is `here:1`.
        assert (await client.answer(await client.ask()))[0] == "403"

    serving(scenario, Guard(HttpServer(Kinesis(KinesisSettings(), b"s" * 32), None)))


def test_a_program_can_read_why_it_is_refused(moto):
    with both(moto, ProcessSettings()) as endpoint:
        foreign = {"Host": "kinesis:4567"}
        status, _, body = ask(endpoint, "POST", "/", b"{}", LIST | foreign)
        said = json.loads(body)
        assert (status, said["__type"]) == (403, "AccessDeniedException")
        assert "'kinesis:4567'" in said["message"]
        assert "--host" in said["message"]

        cbor = {"Content-Type": "application/x-amz-cbor-1.1"}
        _, _, body = ask(endpoint, "POST", "/", b"", LIST | foreign | cbor)
        assert decode_cbor(body) == said

        _, headers, body = ask(endpoint, "GET", "/bucket/key", headers={"Host": "<x>&y"})
        assert headers["content-type"] == "application/xml"
        assert b"<Code>AccessDenied</Code>" in body
        assert b"<x>" not in body
