"""The HTTP server over a real socket: what it answers, what it refuses, and that it stays."""

import http.client
import socket
from urllib.parse import urlsplit

import pytest

from kclrun.errors import SettingsError
from kclrun.observe.endpoint import Answer, HttpEndpoint
from tests.patience import HUNG_S


def _broken(_):
    raise RuntimeError("a bug, with a secret in its text")


ROUTES = {
    "/health": lambda _: Answer(b'{"status": "failing"}', "application/json", 503),
    "/metrics": lambda _: Answer(b"up 1\n"),
    "/broken": _broken,
}


@pytest.fixture
def endpoint():
    made = HttpEndpoint("127.0.0.1", 0, ROUTES)
    yield made
    made.close()


def address(endpoint):
    parts = urlsplit(endpoint.url)
    return parts.hostname, parts.port


def ask(endpoint, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*address(endpoint), timeout=HUNG_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def said(endpoint, request):
    """What comes back for these bytes, until the server closes."""
    with socket.create_connection(address(endpoint), timeout=HUNG_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_route_answers_with_its_status_type_and_body(endpoint):
    status, headers, body = ask(endpoint, "/health")

    assert (status, headers["Content-Type"]) == (503, "application/json")
    assert body == b'{"status": "failing"}'
    assert headers["Connection"] == "close"
    assert headers["Cache-Control"] == "no-store"


def test_a_query_is_left_aside(endpoint):
    assert ask(endpoint, "/metrics?name=up")[2] == b"up 1\n"


def test_a_route_gets_the_query_and_of_a_repeated_name_the_first_value():
    made = HttpEndpoint("127.0.0.1", 0, {"/": lambda query: Answer(repr(query).encode())})
    try:
        assert eval(ask(made, "/?a=1&b=%3A+x&a=2&c=")[2]) == {"a": "1", "b": ": x"}
        assert ask(made, "/?" + "&".join("a=1" for _ in range(9)))[0] == 400
    finally:
        made.close()


def test_further_fields_are_in_every_answer_also_in_a_refusal():
    made = HttpEndpoint("127.0.0.1", 0, ROUTES, fields={"X-Frame-Options": "DENY"})
    try:
        for path in ("/metrics", "/not-there"):
            assert ask(made, path)[1]["X-Frame-Options"] == "DENY"
    finally:
        made.close()


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:9464", 200),
        ("https://localhost:9464", 200),
        ("http://localhost:9465", 403),
        ("http://evil.example", 403),
        ("null", 403),
    ],
)
def test_a_script_of_another_site_gets_nothing(endpoint, origin, status):
    assert ask(endpoint, "/metrics", Host="localhost:9464", Origin=origin)[0] == status


def test_head_gets_the_head(endpoint):
    status, headers, body = ask(endpoint, "/metrics", "HEAD")

    assert (status, headers["Content-Length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/", "GET", 404), ("/metrics/", "GET", 404), ("/metrics", "POST", 405)],
)
def test_what_is_not_there_is_refused(endpoint, path, method, status):
    assert ask(endpoint, path, method)[0] == status


def test_a_route_that_fails_is_a_500_without_its_words_and_the_server_stays(endpoint):
    status, _, body = ask(endpoint, "/broken")

    assert (status, b"secret" in body) == (500, False)
    assert ask(endpoint, "/metrics")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9464", 200), ("[::1]:9464", 200), ("evil.example", 403), ("", 403)],
)
def test_on_loopback_only_a_name_of_this_host_is_served(endpoint, host, status):
    assert ask(endpoint, "/metrics", Host=host)[0] == status


def test_on_every_address_any_name_is_served():
    made = HttpEndpoint("0.0.0.0", 0, ROUTES)
    try:
        assert ask(made, "/metrics", Host="box.example")[0] == 200
    finally:
        made.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"GET /metrics\r\n\r\n",
        b"GET /metrics SPDY/3\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\xfe\x00 \x00 HTTP/9\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: [\r\n\r\n",
        b"GET /" + b"a" * 8300,
    ],
    ids=["no", "two parts", "another protocol", "no URL", "noise", "no host", "too long"],
)
def test_what_is_no_request_is_a_400(endpoint, request_bytes):
    assert said(endpoint, request_bytes).startswith(b"HTTP/1.1 400 ")
    assert ask(endpoint, "/metrics")[0] == 200


@pytest.mark.parametrize(("size", "status"), [(8192, b"200"), (8193, b"400")])
def test_a_request_may_have_eight_kibibytes(endpoint, size, status):
    begun = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nCookie: "

    answer = said(endpoint, begun.ljust(size - 4, b"x") + b"\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 " + status)


def test_the_host_is_read_from_its_own_field_whatever_its_case_and_port(endpoint):
    for head in (b"x-host: evil.example\r\nHOST:localhost", b"host:  127.0.0.1:80 "):
        request = b"GET /metrics HTTP/1.0\r\n" + head + b"\r\n\r\n"
        assert said(endpoint, request).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_request_in_pieces_is_put_together(endpoint):
    with socket.create_connection(address(endpoint), timeout=HUNG_S) as connection:
        for piece in (b"GET /metr", b"ics HTTP/1.1\r\nHost: local", b"host\r\n\r", b"\n"):
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert answer.endswith(b"up 1\n")


def test_a_client_that_leaves_in_the_middle_is_forgotten(endpoint):
    for _ in range(20):
        with socket.create_connection(address(endpoint), timeout=HUNG_S) as connection:
            connection.sendall(b"GET /metr")

    assert ask(endpoint, "/metrics")[0] == 200


def test_an_address_that_is_taken_is_an_error_that_says_what_to_do(endpoint):
    host, port = address(endpoint)

    with pytest.raises(SettingsError) as caught:
        HttpEndpoint(host, port, ROUTES)

    assert f"observe.listen: cannot listen on 127.0.0.1:{port}" in str(caught.value)
    assert "0 takes a free one" in str(caught.value)


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(SettingsError, match=r"observe\.listen: cannot listen on 192\.0\.2\.1:0"):
        HttpEndpoint("192.0.2.1", 0, ROUTES)


def test_after_the_close_the_port_is_free_and_no_thread_is_left():
    made = HttpEndpoint("127.0.0.1", 0, ROUTES)
    ask(made, "/metrics")
    host, port = address(made)

    made.close()

    for thread in made._connections.threads:
        thread.join(HUNG_S)
        assert not thread.is_alive()
    HttpEndpoint(host, port, ROUTES).close()
