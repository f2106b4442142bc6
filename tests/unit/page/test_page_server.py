"""The server of the pages over real sockets: what a browser, and an attacker through one, gets."""

import http.client
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest

from kclrun.model.time import WallTime
from kclrun.observe.endpoint import HttpEndpoint
from kclrun.page.server import serve_pages
from kclrun.page.snapshot import Snapshot
from tests.patience import HUNG_S
from tests.unit.page.fleet import ABOUT, key, lease, small_fleet, snapshot_of

PATHS = (
    "/",
    "/shards",
    f"/shard?key={key(1)}",
    "/lineage",
    "/outputs",
    "/settings",
    "/style.css",
    "/live.js",
)


@pytest.fixture
def server():
    made = serve_pages("127.0.0.1", 0, ABOUT, small_fleet)
    yield made
    made.close()


def ask(
    server: HttpEndpoint, path: str, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=HUNG_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


@pytest.mark.parametrize("path", PATHS)
def test_every_page_forbids_other_scripts_frames_and_other_origins(server, path):
    status, headers, body = ask(server, path)

    assert (status, bool(body)) == (200, True)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src 'self'; connect-src 'self';" in policy
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_a_page_loads_nothing_but_its_own_style_sheet_and_script(server):
    for path in PATHS[:-2]:
        _, _, page = ask(server, path)
        assert page.count("<link ") == 1
        assert re.findall("<script.*?</script>", page) == [
            '<script src="/live.js" defer="defer"></script>'
        ]
        assert "style=" not in page
        assert page.count("src=") == 1
        assert "http:" not in page
        assert "https:" not in page


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", ""],
)
def test_a_site_that_points_its_name_at_this_address_gets_nothing(server, host):
    status, _, body = ask(server, "/", Host=host)

    assert status == 403
    assert "orders" not in body


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_script_of_another_site_gets_nothing(server, origin):
    status, _, body = ask(server, "/", Origin=origin)

    assert status == 403
    assert "orders" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_served(server, method):
    assert ask(server, "/", method)[0] == 405
    assert ask(server, "/", "HEAD")[2] == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [("192.0.2.7:8080", 200), ("[2001:db8::7]:8080", 200), ("evil.example", 403)],
)
def test_on_another_address_than_loopback_it_is_asked_by_an_address(host, status):
    made = serve_pages("0.0.0.0", 0, ABOUT, small_fleet)
    try:
        assert ask(made, "/", Host=host)[0] == status
    finally:
        made.close()


@pytest.mark.seconds
def test_clients_that_say_nothing_do_not_keep_the_page_from_others(server):
    address = ("127.0.0.1", urlsplit(server.url).port or 0)
    silent = [socket.create_connection(address, timeout=HUNG_S) for _ in range(4)]
    try:
        assert ask(server, "/")[0] == 200
    finally:
        for connection in silent:
            connection.close()


def listening(server: HttpEndpoint, **headers: str) -> socket.socket:
    """A connection that asked for the events."""
    address = ("127.0.0.1", urlsplit(server.url).port or 0)
    connection = socket.create_connection(address, timeout=HUNG_S)
    named = {"Host": f"127.0.0.1:{address[1]}"} | headers
    fields = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    connection.sendall(f"GET /live HTTP/1.1\r\n{fields}\r\n".encode())
    return connection


def until(connection: socket.socket, part: bytes) -> bytes:
    received = b""
    while part not in received:
        piece = connection.recv(4096)
        assert piece, received
        received += piece
    return received


def test_a_host_without_a_thread_for_the_events_serves_the_pages_all_the_same(monkeypatch):
    server = serve_pages("127.0.0.1", 0, ABOUT, lambda: snapshot_of(lease(0)))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kclrun-feed":
            raise RuntimeError("can't start new thread")
        start(thread)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(5):  # more than the server has threads
                with listening(server) as refused:
                    assert b" 503 " in until(refused, b"\r\n\r\n")
        assert ask(server, "/")[0] == 200
        with listening(server) as served:
            until(served, b"retry: 5000\n\n")
    finally:
        server.close()


@pytest.mark.seconds
def test_listeners_are_told_of_news_take_no_thread_are_limited_and_end_with_the_server():
    read_at = [WallTime(0.0)]

    def look() -> Snapshot:
        return snapshot_of(lease(0), table_at=read_at[0])

    server = serve_pages("127.0.0.1", 0, ABOUT, look)
    listeners = [listening(server) for _ in range(32)]
    try:
        for each in listeners:
            assert b"text/event-stream" in until(each, b"retry: 5000\n\n")
        with listening(server) as one_more:
            assert b" 503 " in until(one_more, b"\r\n\r\n")
        with listening(server, Origin="http://evil.example") as other:
            assert b" 403 " in until(other, b"\r\n\r\n")
        assert ask(server, "/")[0] == 200
        read_at[0] = WallTime(1.0)
        for each in listeners:
            until(each, b"event: changed\ndata:\n\n")
    finally:
        server.close()
        for each in listeners:
            assert each.recv(4096) == b""
            each.close()
