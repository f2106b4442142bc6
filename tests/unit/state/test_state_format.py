"""Versions of the state: names, bytes, chains, where a lease begins, and what may be deleted."""

from typing import Any

import msgspec
import pytest

from kclrun.codec.kpl import effective_hash_key
from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import OF_PARENTS
from kclrun.state import chain as chains
from kclrun.state.beginning import (
    Empty,
    OwnVersion,
    ParentVersions,
    beginning,
    inherited,
    parents_to_read,
)
from kclrun.state.chain import DELTAS_MAX, Chain, garbage, outlived, parts_of, read_chain
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.timers import WATERMARK, Step, Timer, entry_of
from kclrun.state.versions import (
    FORMAT,
    Change,
    Version,
    decode_version,
    encode_version,
    token_of,
    version_name,
)
from tests.support.memory_versions import MemoryVersions, Versions
from tests.support.tables import over_rows

SHARD = "shardId-000000000001"
BEGUN = ExtendedSequenceNumber("7")
V1 = version_name(9, 1, "0badcafe")


def name_of(number: int, token: int = 9) -> str:
    return version_name(token, number, "0badcafe")


def encoded(number: int, base: int | None, *changes: Change, **given: Any) -> bytes:
    version = Version(
        name=name_of(number),
        shard=SHARD,
        cursor=str(number),
        token=9,
        attempt=number,
        base=None if base is None else name_of(base),
        changes=list(changes),
    )
    return encode_version(msgspec.structs.replace(version, **given))


def test_a_name_is_short_says_its_token_and_sorts_by_it():
    names = [version_name(token, 1, "ffffffff") for token in (2, 10, 10**10)]
    assert names == sorted(names)
    assert [token_of(name) for name in names] == [2, 10, 10**10]
    assert len(V1) == 26
    assert [token_of(name) for name in ("probe", OF_PARENTS, "x" + V1, V1 + ".tmp")] == [None] * 4


def test_a_version_reads_back_as_it_was_written():
    content = encoded(1, None, ("a", "n", b"\x01"), ("b", "n", None))
    version = decode_version(V1, content)
    assert (version.name, version.shard, version.base) == (V1, SHARD, None)
    assert version.changes == [("a", "n", b"\x01"), ("b", "n", None)]


@over_rows(
    ("content", "words"),
    [
        (b"", "is not one"),
        (b"PAR1" + encoded(1, None), "is not one"),
        (encoded(1, None)[:-1], "is damaged"),
        (encoded(1, None, ("a", "n", b"1"))[:-1] + b"2", "is damaged"),
        (encoded(2, None), "is a copy of"),
        (encoded(1, None, format=FORMAT + 1), "a newer kclrun wrote it"),
    ],
)
def test_what_is_not_the_version_is_refused_in_words(content, words):
    with pytest.raises(SettingsError, match=words):
        decode_version(V1, content)


def test_a_chain_is_its_snapshot_with_the_changes_of_its_deltas_in_order():
    stored = {
        name_of(1): encoded(1, None, ("a", "n", b"1"), ("b", "n", b"1")),
        name_of(2): encoded(2, 1, ("a", "n", b"2"), ("c", "n", b"1")),
        name_of(4): encoded(4, 2, ("b", "n", None), ("a", "m", b"3")),
    }
    entries, chain, cursor = read_chain(name_of(4), SHARD, stored.get)
    assert entries == {"a": {"n": b"2", "m": b"3"}, "c": {"n": b"1"}}
    assert (chain.names, cursor) == ((name_of(1), name_of(2), name_of(4)), "4")
    assert chain.delta_bytes == len(stored[name_of(2)]) + len(stored[name_of(4)])


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_chain_with_a_missing_version_is_no_state(missing):
    stored = {name_of(n): encoded(n, n - 1 or None) for n in (1, 2, 3) if n != missing}
    with pytest.raises(SettingsError, match=f"{name_of(missing)} of {SHARD}.* is missing"):
        read_chain(name_of(3), SHARD, stored.get)


def test_a_chain_of_another_shard_or_without_an_end_is_refused():
    with pytest.raises(SettingsError, match="not of shardId-2"):
        read_chain(V1, "shardId-2", {V1: encoded(1, None)}.get)
    with pytest.raises(SettingsError, match=f"rests on more than {DELTAS_MAX}"):
        read_chain(V1, SHARD, {V1: encoded(1, 1)}.get)


def test_the_next_version_is_a_snapshot_after_64_deltas_or_when_they_exceed_it():
    assert not Chain().takes_delta(0)
    chain = Chain((name_of(0),), 1000)
    assert chain.takes_delta(1000)
    assert not chain.takes_delta(1001)
    for number in range(1, DELTAS_MAX + 1):
        assert chain.takes_delta(1)
        chain = chain.followed_by(name_of(number), 1, is_delta=True)
    assert not chain.takes_delta(1)
    assert chain.followed_by("next", 5, is_delta=False) == Chain(("next",), 5)


def test_a_snapshot_in_parts_reads_back_and_its_parts_are_no_deltas():
    stored = {
        name_of(1): encoded(1, None, ("a", "n", b"1")),
        name_of(2): encoded(2, 1, ("b", "n", b"1"), is_part=True),
        name_of(3): encoded(3, 2, ("a", "n", b"2")),
    }
    entries, chain, _ = read_chain(name_of(3), SHARD, stored.get)
    assert entries == {"a": {"n": b"2"}, "b": {"n": b"1"}}
    sizes = [len(content) for content in stored.values()]
    assert chain == Chain(tuple(stored), sizes[0] + sizes[1], sizes[2], parts=2)
    many = Chain()
    for number in range(100):
        many = many.with_part(name_of(number), 10)
    assert many.takes_delta(1000)
    assert not many.takes_delta(1001)


def test_a_large_state_is_divided_into_parts_and_an_empty_one_has_one(monkeypatch):
    monkeypatch.setattr(chains, "PART_BYTES", 4)
    changes: list[Change] = [(key, "n", b"12") for key in "abcde"]
    assert list(parts_of(changes)) == [
        changes[:1],
        changes[1:2],
        changes[2:3],
        changes[3:4],
        changes[4:],
    ]
    assert list(parts_of([])) == [[]]


@pytest.mark.parametrize(("ages", "number"), [((100.0, 100.0), 2), ((100.0, 99.0), 0)])
def test_versions_of_a_shard_without_a_row_go_once_all_are_old(ages, number):
    listed = [(name_of(at), age_s) for at, age_s in enumerate(ages, 1)]
    assert len(outlived([*listed, ("probe", 0.0)], 100.0)) == number


@over_rows(
    ("name", "age_s", "is_garbage"),
    [
        (name_of(1), 100.0, True),
        (name_of(1), 99.0, False),  # younger than `retain`
        (name_of(2), 100.0, False),  # of the chain
        (name_of(3), 100.0, False),
        (name_of(9, token=8), 100.0, True),  # of a former owner
        (name_of(9, token=10), 100.0, False),  # of a later one: V6
        ("probe", 100.0, False),
    ],
)
def test_only_what_no_row_can_name_is_deleted(name, age_s, is_garbage):
    chain = Chain((name_of(2), name_of(3)), 10, 5)
    assert garbage([(name, age_s)], chain, 9, 100.0) == ((name,) if is_garbage else ())


def lease(checkpoint: ExtendedSequenceNumber, version: str | None, *parents: str) -> Lease:
    return Lease(
        key=LeaseKey("child"),
        checkpoint=checkpoint,
        parents=frozenset(parents),
        state_version=version,
        outputs=StoredCursors(checkpoint, ()),
    )


ENDED = {name: lease(SHARD_END, V1) for name in ("p", "q")}


@over_rows(
    ("row", "parents", "begins"),
    [
        (lease(TRIM_HORIZON, None), {}, Empty()),
        (lease(LATEST, None), {}, Empty()),
        # The first rows of an application: shards that had parents before it.
        (lease(TRIM_HORIZON, None, "p"), {"p": None}, Empty()),
        (lease(BEGUN, V1, "p"), {}, OwnVersion(V1)),
        (lease(TRIM_HORIZON, V1), {}, OwnVersion(V1)),
        (lease(TRIM_HORIZON, OF_PARENTS, "p"), ENDED, ParentVersions((("p", V1),))),
        (lease(TRIM_HORIZON, None, "p"), ENDED, ParentVersions((("p", V1),))),
        (lease(TRIM_HORIZON, OF_PARENTS, "q", "p"), ENDED, ParentVersions((("p", V1), ("q", V1)))),
        (lease(BEGUN, None), {}, "its row names no version"),
        (lease(BEGUN, OF_PARENTS, "p"), ENDED, "its row names no version"),
        (lease(TRIM_HORIZON, OF_PARENTS, "p"), {"p": None}, "the row of p is gone"),
        (lease(TRIM_HORIZON, OF_PARENTS, "p", "q"), {"p": ENDED["p"], "q": None}, "row of q is"),
        (lease(TRIM_HORIZON, None, "p"), {"p": lease(SHARD_END, None)}, "names no version"),
        (lease(TRIM_HORIZON, None, "p"), {"p": lease(SHARD_END, OF_PARENTS)}, "names no version"),
        (lease(TRIM_HORIZON, None, "p"), {"p": lease(BEGUN, V1)}, "has not ended"),
    ],
)
def test_a_lease_begins_with_its_own_state_or_its_parents_and_empty_only_at_first(
    row, parents, begins
):
    known = {key: parents.get(key) for key in parents_to_read(row)}
    if isinstance(begins, str):
        with pytest.raises(SettingsError, match=begins):
            beginning(row, known)
    else:
        assert beginning(row, known) == begins


@over_rows(
    ("row", "parents", "begins"),
    [
        (lease(BEGUN, None), {}, Empty()),
        (lease(BEGUN, V1), {}, OwnVersion(V1)),
        (lease(TRIM_HORIZON, None, "p"), {"p": lease(SHARD_END, None)}, Empty()),
        (
            lease(TRIM_HORIZON, OF_PARENTS, "p", "q"),
            {"p": ENDED["p"], "q": lease(SHARD_END, None)},
            ParentVersions((("p", V1),)),
        ),
        (lease(BEGUN, OF_PARENTS, "p"), ENDED, "its row names no version"),
        (lease(TRIM_HORIZON, OF_PARENTS, "p"), {"p": lease(SHARD_END, None)}, "names no version"),
        (lease(TRIM_HORIZON, OF_PARENTS, "p"), {"p": None}, "the row of p is gone"),
        (lease(TRIM_HORIZON, None, "p"), {"p": lease(BEGUN, None)}, "names no version"),
    ],
)
def test_state_that_is_added_to_an_application_begins_empty_only_where_no_row_names_a_version(
    row, parents, begins
):
    known = {key: parents.get(key) for key in parents_to_read(row)}
    if isinstance(begins, str):
        with pytest.raises(SettingsError, match=begins):
            beginning(row, known, may_begin_empty=True)
    else:
        assert beginning(row, known, may_begin_empty=True) == begins


def test_a_split_gives_each_child_its_keys_and_a_merge_gives_them_back():
    entries = {f"key-{n}": {"n": str(n).encode()} for n in range(40)}
    middle = 2**127
    halves = [HashRange(0, middle - 1), HashRange(middle, HASH_KEY_MAX)]
    low, high = (inherited([entries], each) for each in halves)
    assert low.keys() | high.keys() == entries.keys()
    assert not low.keys() & high.keys()
    assert all(effective_hash_key(key, None) < middle for key in low)
    assert inherited([low, high], HashRange(0, HASH_KEY_MAX)) == entries
    assert inherited([], halves[0]) == {}


def test_keys_are_not_divided_without_a_range_nor_when_both_parents_have_one():
    with pytest.raises(SettingsError, match="has no hash range"):
        inherited([{}], None)
    with pytest.raises(SettingsError, match="both parents have state for one key"):
        inherited([{"a": {"n": b"1"}}] * 2, HashRange(0, HASH_KEY_MAX))


def test_only_a_version_with_timers_needs_a_release_that_knows_them():
    stored = Versions()
    written = StateVersions(MemoryVersions(stored), SHARD, 2, "ffffffff")
    written.begin(Cursor(TRIM_HORIZON))
    formats = []
    for number, change in enumerate([("a", "n", b"1"), entry_of(Timer(5.0, "a"))], 1):
        at = Cursor(ExtendedSequenceNumber(str(number)))
        written.add([(*change, None)], at)
        written.commit()
        assert written.version is not None
        formats.append(
            decode_version(written.version, stored.content[SHARD, written.version]).format
        )
    assert formats == [1, FORMAT] == [1, 2]


def test_timers_go_with_their_keys_and_of_two_watermarks_the_smaller_counts():
    whole = HashRange(0, HASH_KEY_MAX)
    shard, name = WATERMARK

    def parent(key: str, watermark: Step | None) -> dict[str, dict[str, bytes]]:
        _, timer, value = entry_of(Timer(5.0, key))
        step = {} if watermark is None else {shard: {name: msgspec.msgpack.encode(watermark)}}
        return {key: {timer: value}, **step}

    # The last record moved the watermark to 9, and nothing was written since.
    ahead, behind = parent("a", Step(8.0, 8.0, 9.0, "77")), parent("b", Step(7.0, 7.0))
    merged = inherited([ahead, behind], whole)
    assert msgspec.msgpack.decode(merged.pop(shard)[name], type=Step) == Step(7.0, 7.0)
    assert merged.keys() == {"a", "b"}
    alone = inherited([ahead, parent("b", None)], whole)
    assert msgspec.msgpack.decode(alone[shard][name], type=Step) == Step(9.0, 9.0)
    a_half = effective_hash_key("a", None)
    split = inherited([ahead | parent("b", Step(7.0, 7.0))], HashRange(a_half, a_half))
    assert split.keys() == {shard, "a"}
    assert shard not in inherited([parent("a", None)], whole)


@pytest.mark.parametrize(
    ("position", "then"),
    [
        (("6", 0), Step(3.0, 5.0, 9.0, "7", 1)),
        (("7", 0), Step(3.0, 5.0, 9.0, "7", 1)),
        (("7", 1), Step(9.0, 5.0)),
        (("8", 0), Step(9.0, 9.0)),
    ],
    ids=["before", "an earlier part", "its record", "after"],
)
def test_the_next_watermark_holds_from_its_record_on_and_its_timers_fire_behind_it(position, then):
    step = Step(3.0, 5.0, 9.0, "7", 1)

    assert step.at(ExtendedSequenceNumber(*position)) == then
