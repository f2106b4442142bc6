import base64
import functools
import json
import unicodedata
from typing import cast

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.cli.tail import for_people, json_line, require_one_shard, start_of, tail
from kclrun.errors import ExpiredIterator, NotFound, SettingsError, Throttled, Unavailable
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.text import escaped, escaped_in_json, sanitize
from kclrun.model.time import WallTime
from kclrun.ports import ShardReader
from kclrun.reading.readers import ShardLineage, ShardPages
from kclrun.reading.starts import first_listing, shard_starts
from tests.support.build import shard
from tests.unit.cli.memory_site import Clock

NOW = WallTime(1_800_000_000.0)
ALL = HashRange(0, HASH_KEY_MAX)


def record(data: bytes, key: str = "key", **more: object) -> Record:
    return msgspec.structs.replace(Record(data, key, "4961", 1_772_345_678.9), **more)


# Where it begins


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("LATEST", StartPoint(IteratorType.LATEST)),
        ("trim_horizon", StartPoint(IteratorType.TRIM_HORIZON)),
        ("10m", StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(NOW - 600))),
        ("4961", StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number="4961")),
        (
            "2026-03-01T06:00:00Z",
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(1_772_344_800.0)),
        ),
    ],
)
def test_where_to_begin_is_a_sentinel_a_time_or_a_position(text, start, monkeypatch):
    monkeypatch.setattr("kclrun.cli.times.time", Clock(NOW))

    assert start_of(from_option(text)) == start


@pytest.mark.parametrize("text", ["yesterday", "2999-01-01T00:00:00Z", "2026-03-01T06:00:00", "-5"])
def test_a_beginning_that_is_none_is_refused_by_the_options_name(text):
    with pytest.raises(click.BadParameter) as refused:
        from_option(text)

    assert refused.value.format_message().startswith("Invalid value for '--from': ")


def from_option(text):
    option = next(each for each in tail.params if each.name == "begin")
    return option.type.convert(text, option, click.Context(tail))


def test_only_shards_that_can_hold_a_record_are_listed():
    at = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=NOW)

    assert first_listing(StartPoint(IteratorType.TRIM_HORIZON)) is None
    assert first_listing(StartPoint(IteratorType.LATEST)).kind == "AT_LATEST"
    assert first_listing(at).timestamp == NOW


def test_a_child_of_a_shard_that_is_read_begins_at_its_beginning():
    start = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=NOW)

    starts = shard_starts([shard(1, 0), shard(2, 1), shard(3)], [], start)

    kinds = {name[-1]: each.start.kind.value for name, each in starts.items()}
    assert kinds == {"1": "AT_TIMESTAMP", "2": "TRIM_HORIZON", "3": "AT_TIMESTAMP"}


def test_named_shards_are_those_and_unknown_ones_are_refused():
    start = StartPoint(IteratorType.TRIM_HORIZON)
    shards = [shard(number) for number in range(20)]

    assert list(shard_starts(shards, ["shardId-000000000004"] * 2, start)) == [
        "shardId-000000000004"
    ]
    with pytest.raises(NotFound, match="20 in all"):
        shard_starts(shards, ["shardId-000000000077"], start)


def test_a_position_needs_its_one_shard():
    at = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, sequence_number="7")

    for named in ([], [shard(0).shard_id, shard(1).shard_id]):
        with pytest.raises(SettingsError, match="--shard"):
            require_one_shard(at, named)
    require_one_shard(at, ["7", "7"])


# Who is read when


def test_children_wait_for_both_parents_of_a_merge():
    lineage = ShardLineage({"a": (), "b": ("gone",)})

    assert set(lineage.may_begin()) == {"a", "b"}
    lineage.add({"ab": ("a", "b")})
    lineage.end("a")
    assert lineage.may_begin() == ()
    lineage.add({"ab": ("a", "b")})
    lineage.end("b")
    assert lineage.may_begin() == ("ab",)
    assert lineage.may_begin() == ()
    lineage.end("ab")
    assert lineage.is_over


def test_a_merge_with_a_grandchild_waits_for_what_is_not_known_yet():
    """1 is split into 2 and 3, then 0 and 2 are merged: 4 is named by 0 before anybody named 2."""
    lineage = ShardLineage({"0": (), "1": ()})
    lineage.may_begin()

    lineage.add({"4": ("0", "2")})
    lineage.end("0")
    assert lineage.may_begin() == ()
    lineage.add({"2": ("1",), "3": ("1",)})
    lineage.end("1")
    assert set(lineage.may_begin()) == {"2", "3"}
    lineage.end("2")
    assert lineage.may_begin() == ("4",)


def test_a_parent_that_nobody_will_name_any_more_keeps_nobody_waiting():
    lineage = ShardLineage({"0": (), "1": ()})
    lineage.may_begin()
    lineage.add({"4": ("0", "2")})
    lineage.end("0")

    lineage.trim({"1", "4"})

    assert lineage.may_begin() == ("4",)
    assert not lineage.is_over


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_in_any_order_of_ends_each_shard_begins_once_and_after_its_parents(generations, random):
    """A stream that is split and merged at random: what hypothesis prints replays it."""
    choice = random.choice
    graph: dict[str, tuple[str, ...]] = {"0": (), "1": ()}
    tips = ["0", "1"]
    for _ in range(generations):
        if choice((True, False)) and len(tips) > 1:
            first, second = tips.pop(), tips.pop()
            tips.append(str(len(graph)))
            graph[tips[-1]] = (first, second)
        else:
            parent = tips.pop(0)
            for _ in range(2):
                tips.append(str(len(graph)))
                graph[tips[-1]] = (parent,)
    lineage = ShardLineage({"0": (), "1": ()})
    begun: list[str] = []
    ended: list[str] = []
    reading = set(lineage.may_begin())
    while reading:
        begun += reading - set(begun)
        over = choice(sorted(reading))
        lineage.add({name: parents for name, parents in graph.items() if over in parents})
        lineage.end(over)
        ended.append(over)
        reading.discard(over)
        ready = lineage.may_begin()
        assert all(set(graph[name]) <= set(ended) for name in ready)
        reading |= set(ready)

    assert lineage.is_over
    assert sorted(begun) == sorted(graph)
    assert sorted(ended) == sorted(graph)


# One shard: the pauses between its pages


def tail_of_a_shard() -> ShardPages:
    return ShardPages("s", StartPoint(IteratorType.LATEST), cast("ShardReader", None))


def test_an_expired_iterator_is_replaced_at_once():
    tail = tail_of_a_shard()

    assert tail.pause_after(ExpiredIterator("old")) == 0


def test_a_tail_takes_half_of_a_shards_reads_and_a_fifth_at_the_tip():
    """Five a second is the service's limit for all readers of a shard together."""
    tail = tail_of_a_shard()

    assert tail.pause_s(FetchedPage([record(b"x")], "i", 0)) == 0.4
    assert tail.pause_s(FetchedPage([], "i", 5_000)) == 0.4
    assert tail.pause_s(FetchedPage([], "i", 0)) == 1.0


def test_failures_in_a_row_are_asked_again_more_and_more_slowly():
    tail = tail_of_a_shard()

    throttled = [tail.pause_after(Throttled("slow down")) for _ in range(8)]
    away = tail.pause_after(Unavailable("away"))

    assert throttled[0] < 0.5 < throttled[-1] <= 5.0
    assert away <= 3.0


# What is shown


@given(st.binary(max_size=200), st.text(max_size=20))
def test_json_gives_every_byte_back_on_one_line(data, key):
    line = json_line("shardId-000000000007", record(data, key))
    shown = json.loads(line)

    text = shown["data"]
    decoded = base64.b64decode(text) if shown["encoding"] == "base64" else text.encode()
    assert decoded == data
    assert shown["partition_key"] == key
    assert "\n" not in line


@given(st.binary(max_size=300), st.integers(40, 200))
def test_a_line_for_people_is_one_line_and_fits_the_terminal(data, columns):
    from rich.cells import cell_len

    show = for_people(columns_max=max(columns, 60), with_date=True, with_colours=False)
    line = show("shardId-000000000007", record(data))

    assert line == escaped(line)
    assert cell_len(line) <= max(columns, 60)


def test_a_line_names_time_shard_key_and_data():
    whole = for_people(columns_max=None, with_date=True, with_colours=False)
    short = for_people(columns_max=50, with_date=False, with_colours=False)
    coloured = for_people(columns_max=None, with_date=False, with_colours=True)
    of = record(b"x" * 500, "UA")

    assert whole("shardId-000000000007", of) == (
        "2026-03-01 06:14:38.900    7  UA            " + "x" * 500
    )
    assert short("shardId-000000000007", of) == "06:14:38.900    7  UA            " + "x" * 16 + "…"
    assert "\x1b[" in coloured("shardId-000000000007", of)
    assert "(a malformed aggregate)" in whole("s", record(b"\xf3\x89\x9a\xc2", malformed=True))


def test_a_stretched_record_says_what_it_is():
    shown = json.loads(
        json_line("s", record(b"x", malformed=True, explicit_hash_key="7", sub_sequence_number=3))
    )

    assert "Zoë" in json_line("s", record("Zoë".encode()))
    assert shown["malformed"] is True
    assert shown["explicit_hash_key"] == "7"
    assert shown["sub_sequence_number"] == 3
    assert shown["arrived_at"] == "2026-03-01T06:14:38.900Z"


# What never leaves as it is


@functools.cache
def unsafe() -> frozenset[str]:
    categories = {"Cc", "Cf", "Zl", "Zp", "Cs"}
    every = map(chr, range(0x110000))
    found = {each for each in every if unicodedata.category(each) in categories}
    return frozenset(found - {"\t", "\n"})


def test_no_control_and_no_formatting_character_passes():
    """Tags spell invisible words, U+061C reorders, U+00AD and U+200B hide where a word ends."""
    text = "x".join(sorted(unsafe()))

    assert unsafe() >= set("\u061c\u200b\ufeff\xad\ufff9\ufffb\U000e0041\u202e\x1b\x9b")
    assert not unsafe() & set(sanitize(text))
    assert escaped(text).isascii()
    assert escaped(text, keeps_lines=True).isascii()
    assert escaped("a\tb\n") == "a\\tb\\n"
    assert sanitize("a\tb\n") == escaped("a\tb\n", keeps_lines=True) == "a\tb\n"


def test_words_of_any_language_pass():
    text = "Zoë, 日本語, עברית, हिन्दी, ❤️ 👍🏽, ½ €"

    assert sanitize(text) == escaped(text) == escaped_in_json(text) == text


def test_json_shows_no_such_character_and_says_the_same():
    payload = "".join(each for each in sorted(unsafe()) if not "\ud800" <= each <= "\udfff")
    line = json_line("shardId-000000000007", Record(payload.encode(), "k\u202ey", "7"))

    assert not unsafe() & set(line)
    assert json.loads(line)["data"] == payload
    assert json.loads(line)["partition_key"] == "k\u202ey"
