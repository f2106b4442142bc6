"""`kclrun leases --hot`: which managers it asks, and what it says where none answers."""

import http.server
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.cli.leases.hot import show_hot
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError, Unavailable
from kclrun.model.time import WallTime

BODY = b'{"status": "ok", "application": "orders", "leases": [{"shard": "s0", "state": "running"}]}'


def aws_of(observe: str = "{}") -> Any:
    text = f"application: orders\nstream: orders\nprocessor: a:B\nobserve: {observe}\n"
    settings = settings_of(text, environment={}, now=WallTime(1_780_000_000.0))
    return SimpleNamespace(settings=settings)


def show(*urls: str, observe: str = "{}") -> int:
    return show_hot(aws_of(observe), urls, as_json=False, with_keys=False)


class Answers(http.server.BaseHTTPRequestHandler):
    body = BODY

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("listen", ["{port}", "'0.0.0.0:{port}'", "'127.0.0.1:{port}'"])
def test_the_manager_of_this_host_is_asked_where_it_listens(
    port: int, listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(observe=f"{{listen: {listen.format(port=port)}}}") == 0

    assert "s0     running  not known yet" in capsys.readouterr().out


def test_several_managers_are_asked(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{port}"

    assert show(url, url) == 0

    assert capsys.readouterr().out.count("s0 ") == 2


def test_a_manager_without_leases_is_said(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Answers, "body", b'{"status": "starting"}')

    assert show(f"http://127.0.0.1:{port}") == 0

    assert capsys.readouterr().out == "The managers that were asked have no lease.\n"


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"leases": 7}', b"\xff"])
def test_what_is_no_manager_is_named(
    port: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "body", body)

    with pytest.raises(Unavailable, match=f"no manager answers at http://127.0.0.1:{port}: "):
        show(f"http://127.0.0.1:{port}")


def test_another_application_s_manager_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answers, "body", b'{"application": "returns"}')

    with pytest.raises(SettingsError, match="is of application returns, not orders"):
        show(f"http://127.0.0.1:{port}")


def test_where_nobody_listens_the_reason_is_told() -> None:
    with pytest.raises(Unavailable, match="ConnectionRefusedError"):
        show("http://127.0.0.1:9")


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9464",
        "https://127.0.0.1:9464",
        "http://127.0.0.1",
        "http://127.0.0.1:9464/health",
        "http://user:password@127.0.0.1:9464",
        "http://127.0.0.1:99999",
        "http://[::1",
    ],
)
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="--endpoint: expected http://HOST:PORT"):
        show(url)


@pytest.mark.parametrize(
    ("observe", "words"),
    [("{}", "observe.listen is not set"), ("{listen: 0}", "the log line endpoint_listening")],
)
def test_without_an_address_the_remedy_is_told(observe: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        show(observe=observe)
