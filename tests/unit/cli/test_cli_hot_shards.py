"""`kclrun leases --hot`: which managers it asks, what it says where none answers, and its keys."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.cli.leases import hot
from kclrun.cli.leases.hot import show_hot
from kclrun.codec.aggregator import Aggregator
from kclrun.codec.kpl import effective_hash_key
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError, Throttled, Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.time import WallTime
from tests.support.http_service import HttpService
from tests.support.tables import over_rows
from tests.unit.cli.memory_site import Clock

BODY = b'{"status": "ok", "application": "orders", "leases": [{"shard": "s0", "state": "running"}]}'


def aws_of(observe: str = "{}") -> Any:
    text = f"application: orders\nstream: orders\nprocessor: a:B\nobserve: {observe}\n"
    settings = settings_of(text, environment={}, now=WallTime(1_780_000_000.0))
    return SimpleNamespace(settings=settings)


def show(*urls: str, observe: str = "{}") -> int:
    return show_hot(aws_of(observe), urls, as_json=False, with_keys=False)


class Managers:
    """What each manager answers."""

    body = BODY


@pytest.fixture
def port():
    with HttpService(lambda *_: (200, {}, Managers.body)) as manager:
        yield manager.port


@pytest.mark.parametrize("listen", ["{port}", "'0.0.0.0:{port}'", "'127.0.0.1:{port}'"])
def test_the_manager_of_this_host_is_asked_where_it_listens(port, listen, capsys):
    assert show(observe=f"{{listen: {listen.format(port=port)}}}") == 0

    assert "s0     running  not known yet" in capsys.readouterr().out


def test_several_managers_are_asked(port, capsys):
    url = f"http://127.0.0.1:{port}"

    assert show(url, url) == 0

    assert capsys.readouterr().out.count("s0 ") == 2


def test_a_manager_without_leases_is_said(port, monkeypatch, capsys):
    monkeypatch.setattr(Managers, "body", b'{"status": "starting"}')

    assert show(f"http://127.0.0.1:{port}") == 0

    assert capsys.readouterr().out == "The managers that were asked have no lease.\n"


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"leases": 7}', b"\xff"])
def test_what_is_no_manager_is_named(port, body, monkeypatch):
    monkeypatch.setattr(Managers, "body", body)

    with pytest.raises(Unavailable, match=f"no manager answers at http://127.0.0.1:{port}: "):
        show(f"http://127.0.0.1:{port}")


def test_another_application_s_manager_is_refused(port, monkeypatch):
    monkeypatch.setattr(Managers, "body", b'{"application": "returns"}')

    with pytest.raises(SettingsError, match="is of application returns, not orders"):
        show(f"http://127.0.0.1:{port}")


def test_where_nobody_listens_the_reason_is_reported():
    with pytest.raises(Unavailable, match="ConnectionRefusedError"):
        show("http://127.0.0.1:9")


@over_rows(
    "url",
    [
        "127.0.0.1:9464",
        "https://127.0.0.1:9464",
        "http://127.0.0.1",
        "http://127.0.0.1:9464/health",
        "http://user:password@127.0.0.1:9464",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://:9464",
    ],
)
def test_an_address_of_another_form_is_refused(url):
    with pytest.raises(SettingsError, match="--endpoint: expected http://HOST:PORT"):
        show(url)


@pytest.mark.parametrize(
    ("observe", "words"),
    [("{}", "observe.listen is not set"), ("{listen: 0}", "the log line endpoint_listening")],
)
def test_without_an_address_the_remedy_is_reported(observe, words):
    with pytest.raises(SettingsError, match=words):
        show(observe=observe)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("9464", "http://127.0.0.1:9464"),
        ("0.0.0.0:9464", "http://127.0.0.1:9464"),
        ("'[::]:9464'", "http://[::1]:9464"),
        ("'[::1]:9464'", "http://[::1]:9464"),
    ],
)
def test_a_manager_that_listens_everywhere_is_asked_on_this_host(listen, url):
    assert hot._url_of(aws_of(f"{{listen: {listen}}}").settings) == url


# What is shown


def traffic(load: float, *keys: tuple[str, float]) -> dict[str, Any]:
    return {
        "in_bytes_per_s": 940_000.0,
        "in_records_per_s": 312.0,
        "load": load,
        "read_bytes_per_s": 1.0,
        "throttled": 0.25,
        "covered_s": 60.0,
        "error": 0.05,
        "keys": [{"hash_key": name, "share": share} for name, share in keys],
    }


def body(**leases: dict[str, Any]) -> bytes:
    rows = [{"shard": name, "state": "running", **more} for name, more in leases.items()]
    return json.dumps({"application": "orders", "leases": rows}).encode()


HOT = {"reason": "90% of the limit", "advice": "split \x1b it"}
KEYS = (("77", 0.5), ("99", 0.25))
LEASES = body(
    new={},
    cool={"traffic": traffic(0.3)},
    also_cool={"traffic": traffic(0.3)},
    warm={"traffic": traffic(0.9, *KEYS), "hot": HOT},
)


def test_the_most_loaded_come_first_and_those_not_measured_yet_last(monkeypatch, capsys):
    monkeypatch.setattr(hot, "_body", lambda _: LEASES)

    assert show("http://h:1") == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["shard", "warm", "also_cool", "cool", "new"]
    assert lines[1].split()[-5:] == ["90%", "25%", "50%", "77", "HOT"]
    assert lines[2].split()[-3:] == ["25%", "-", "no"]
    assert lines[4].split()[1:] == ["running", "not", "known", "yet", "-", "-", "-", "-"]
    assert lines[5:] == ["", "warm: 90% of the limit", "  50% 77", "  25% 99", "  split � it"]


class Reader:
    """Answers with these pages, one after the other, and keeps what it was asked for."""

    def __init__(self, *pages: FetchedPage | Exception) -> None:
        self.pages = list(pages)
        self.asked: list[object] = []

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        self.asked.append((shard_id, start.kind, start.timestamp))
        return "i"

    def fetch(self, _: str, limit: int) -> FetchedPage:
        self.asked.append(limit)
        page = self.pages.pop(0)
        if isinstance(page, Exception):
            raise page
        return page


def page(*keys: str, is_last: bool = False) -> FetchedPage:
    records = [Record(b"x", key, "1", 1.0) for key in keys]
    return FetchedPage(records, None if is_last else "i", 5)


def hash_of(key: str) -> str:
    return str(effective_hash_key(key, None))


def named(monkeypatch: pytest.MonkeyPatch, reader: Reader, *wanted: str) -> list[tuple[str, str]]:
    clock = Clock()
    monkeypatch.setattr(hot, "time", clock)
    found = list(hot._looked_up(reader, "shardId-1", {hash_of(key) for key in wanted}))
    reader.asked.append(clock.slept)
    assert reader.asked[0] == ("shardId-1", IteratorType.AT_TIMESTAMP, Clock().now - 120.0)
    return found


def test_keys_are_looked_up_until_all_are_met_and_in_five_pages_at_most(monkeypatch, capsys):
    both = Reader(page("x", "a", "a"), page("b"), page("c"))
    assert named(monkeypatch, both, "a", "b") == [(hash_of("a"), "a"), (hash_of("b"), "b")]
    assert both.asked[1:] == [1000, 1000, [0.4]]

    never = Reader(*[page("x")] * 9)
    assert named(monkeypatch, never, "a") == []
    assert never.asked[1:] == [*[1000] * 5, [0.4] * 5]

    over = Reader(page("x", is_last=True))
    assert named(monkeypatch, over, "a") == []
    assert over.asked[1:] == [1000, []]

    packed = Aggregator()
    packed.add("inner", b"1")
    aggregate = Record(packed.finish().data, "outer", "1", 1.0)
    inside = Reader(FetchedPage([aggregate], "i", 5))
    assert named(monkeypatch, inside, "inner", "outer") == [
        (hash_of("outer"), "outer"),
        (hash_of("inner"), "inner"),
    ]

    assert named(monkeypatch, Reader(page("a"), Throttled("slow")), "a", "b") == [
        (hash_of("a"), "a")
    ]
    assert capsys.readouterr().err == "shardId-1: keys not looked up: slow\n"
    long = Record(b"x", "k", "1", 1.0, explicit_hash_key=str(2**128))
    assert named(monkeypatch, Reader(FetchedPage([long], None, 0), page()), "k") == []


def test_with_their_keys_hot_shards_are_shown_by_name(monkeypatch, capsys):
    looked_up: list[tuple[str, set[str]]] = []

    def look_up(_: object, shard: str, wanted: set[str]) -> Any:
        looked_up.append((shard, wanted))
        yield "77", "the key"

    monkeypatch.setattr(hot, "_body", lambda _: LEASES)
    monkeypatch.setattr(hot, "_looked_up", look_up)
    monkeypatch.setattr(
        "kclrun.cli.services.open_streams", lambda _: {"": SimpleNamespace(reader=None)}
    )

    assert show_hot(aws_of(), ["http://h:1"], as_json=False, with_keys=True) == 0
    assert "  50% 'the key' (77)" in capsys.readouterr().out.splitlines()
    # Only of shards that have heavy keys.
    assert looked_up == [("warm", {"77", "99"})]

    assert show_hot(aws_of(), ["http://h:1"], as_json=True, with_keys=True) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [each["shard"] for each in plain] == ["warm", "also_cool", "cool", "new"]
    assert plain[0]["traffic"]["keys"] == [
        {"hash_key": "77", "share": 0.5, "partition_key": "the key"},
        {"hash_key": "99", "share": 0.25},
    ]
    assert (plain[0]["hot"]["advice"], plain[3]["traffic"], plain[3]["hot"]) == (
        HOT["advice"],
        None,
        None,
    )
    assert show_hot(aws_of(), ["http://h:1"], as_json=True, with_keys=False) == 0
    assert "the key" not in capsys.readouterr().out
