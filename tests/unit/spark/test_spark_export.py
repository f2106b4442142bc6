"""A query's positions as leases: asked of the stream model, planned over rows."""

import hashlib
import json

import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.codec.kpl import MAGIC, drop_until, open_aggregates
from kclrun.errors import InvalidRequest, OffsetRefused, SettingsError, Unavailable
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark import export, positions
from kclrun.spark.export import (
    Create,
    Keep,
    LeaseCheckpoint,
    Move,
    checkpoint_for,
    local_folder,
    offset_of_stream,
    plan_rows,
    read_committed,
)
from kclrun.spark.offsets import Offset, StreamIs, encode_offset, together
from kclrun.spark.positions import after, at_timestamp, before
from tests.support.tables import over_rows
from tests.unit.spark.reading_world import HOUR_S, World, empty

END = LeaseCheckpoint(SHARD_END)


def number(text, sub=0):
    return ExtendedSequenceNumber(text, sub)


def aggregate(*payloads):
    return build_aggregate([("key", payload, None) for payload in payloads])


def standing(world, position):
    return checkpoint_for(world, world.shard_ids[0], position, wait=world.sleep)


def read_by_a_fleet(world, checkpoint):
    """What a lease process gives first: AT the record, what is at or below it dropped."""
    shard_id = world.shard_ids[0]
    if checkpoint == TRIM_HORIZON:
        token = world.iterator(shard_id, StartPoint(IteratorType.TRIM_HORIZON))
    else:
        at = {"sequence_number": checkpoint.sequence_number}
        token = world.iterator(shard_id, StartPoint(IteratorType.AT_SEQUENCE_NUMBER, **at))
    records = world.fetch(token, 10_000).records
    return [each.data for each in drop_until(open_aggregates(records), checkpoint)]


# A position as a checkpoint.


def test_no_number_but_those_of_records_is_one_for_the_service():
    world = World()
    [first] = world.put()

    with pytest.raises(InvalidRequest, match="did not come from this shard"):
        world.iterator(
            world.shard_ids[0],
            StartPoint(IteratorType.AT_SEQUENCE_NUMBER, str(int(first) - 1)),
        )


@pytest.mark.parametrize("page_max", [1, 10_000])
def test_before_a_record_is_after_the_one_before_it(page_max):
    world = World(page_max=page_max)
    first, second, third = world.put(3)

    assert standing(world, before(third)) == LeaseCheckpoint(number(second))
    assert world.limits[:2] == [1, 1_000]
    assert standing(world, before(second)) == LeaseCheckpoint(number(first))
    world.page_max = 10_000
    assert read_by_a_fleet(world, number(first)) == [b"1", b"2"]


def test_before_the_first_record_there_is_is_the_horizon():
    world = World()
    first, *_ = world.put(3)

    found = standing(world, before(first))

    assert found == LeaseCheckpoint(TRIM_HORIZON)
    assert read_by_a_fleet(world, found.checkpoint) == [b"0", b"1", b"2"]


def test_a_record_that_the_stream_stops_to_show_is_looked_for_three_times():
    world = World()
    [first] = world.put()
    answers = iter([None])
    world.fault = lambda call: next(answers, empty("here")) if call == "fetch" else None
    began = world.now

    with pytest.raises(Unavailable, match=r"held record .* a moment ago and does not show it now"):
        standing(world, before(first))

    assert world.calls.count("fetch") == 1 + 3
    assert world.now - began == pytest.approx(0.9)


@pytest.mark.parametrize(("gap_s", "looks"), [(0.5, 1), (5.0, 2), (500.0, 4), (20 * HOUR_S, 6)])
def test_the_record_before_is_found_however_long_ago_it_was(gap_s, looks):
    world = World()
    *_, last = world.put(5)
    world.now += gap_s
    [wanted, _] = world.put(2)

    assert standing(world, before(wanted)) == LeaseCheckpoint(number(last))
    assert world.calls.count("AT_TIMESTAMP") == looks


def test_the_record_before_may_be_an_aggregate_and_is_done_to_its_last_user_record():
    world = World()
    [first] = world.put(data=aggregate(b"a", b"b", b"c"))
    [second] = world.put(data=aggregate(b"d", b"e"))

    found = standing(world, before(second))

    assert found == LeaseCheckpoint(number(first, 2))
    assert read_by_a_fleet(world, found.checkpoint) == [b"d", b"e"]


def test_after_an_aggregate_is_after_its_last_user_record():
    world = World()
    [first] = world.put(data=aggregate(b"a", b"b", b"c"))
    world.put(data=b"next")

    found = standing(world, after(first))

    assert found == LeaseCheckpoint(number(first, 2))
    assert read_by_a_fleet(world, found.checkpoint) == [b"next"]
    assert standing(world, after(first, 1)) == LeaseCheckpoint(number(first, 1))
    assert read_by_a_fleet(world, number(first, 1)) == [b"c", b"next"]


def test_an_empty_aggregate_counts_as_one_record():
    world = World()
    message = b"\x0a\x01k"  # a table of one key, and no user record
    digest = hashlib.md5(message, usedforsecurity=False).digest()
    [first] = world.put(data=MAGIC + message + digest)
    page = world.fetch(world.iterator(world.shard_ids[0], StartPoint(IteratorType.TRIM_HORIZON)), 1)
    assert open_aggregates(page.records) == []

    assert standing(world, after(first)) == LeaseCheckpoint(number(first))


@pytest.mark.parametrize("later", [0, 1])
def test_records_that_expired_unread_are_reported(later):
    world = World()
    [first] = world.put()
    world.now += 25 * HOUR_S
    world.put(later)

    found = standing(world, before(first))

    assert found.checkpoint == TRIM_HORIZON
    assert "expired" in found.note
    assert "expired" in standing(world, after(first)).note


def test_sentinels_are_what_they_are_and_a_time_is_a_pinned_latest():
    world = World()

    assert standing(world, positions.TRIM_HORIZON) == LeaseCheckpoint(TRIM_HORIZON)
    assert standing(world, positions.SHARD_END) == END
    assert standing(world, at_timestamp(1_500)) == LeaseCheckpoint(LATEST, 1.5)
    assert world.calls == []


# Positions and rows into steps.

HALF = (HASH_KEY_MAX + 1) // 2


def shard(name, first, last, parents=(), *, is_open=True):
    keys = HashRange(first * HALF, (last + 1) * HALF - 1)
    return Shard(name, keys, "0", None if is_open else "9", *parents)


P = shard("p", 0, 1, is_open=False)
L, R = shard("l", 0, 0, ("p",)), shard("r", 1, 1, ("p",))
ALL = ShardGraph((P, L, R))
HERE = LeaseCheckpoint(number("50", 2))


def row(name, checkpoint, **more):
    return Lease(key=LeaseKey(name), checkpoint=checkpoint, **more)


def planned(standings, *rows, graph=ALL):
    return plan_rows(standings, graph, {each.key: each for each in rows})


def test_an_ended_shard_gets_a_row_that_names_its_children_after_theirs():
    first, second, parent = planned({"p": END})

    assert [each.lease.key for each in (first, second, parent)] == ["l", "r", "p"]
    assert first.lease.checkpoint == TRIM_HORIZON
    assert parent.lease.checkpoint == SHARD_END
    assert parent.lease.children == {"l", "r"}


def test_a_child_that_the_query_has_begun_gets_one_row_and_keeps_its_place():
    steps = planned({"p": END, "l": HERE})

    assert sorted((each.lease.key, each.lease.checkpoint) for each in steps) == [
        ("l", HERE.checkpoint),
        ("p", SHARD_END),
        ("r", TRIM_HORIZON),
    ]


def test_children_of_a_shard_that_is_not_ended_come_with_its_end():
    assert [each.lease.key for each in planned({"p": HERE})] == ["p"]


def test_a_row_further_back_is_moved_and_one_further_on_is_not():
    back, on = planned({"l": HERE, "r": HERE}, row("l", number("49", 9)), row("r", number("50", 3)))

    assert back == Move(row("l", number("49", 9)), number("50", 2))
    assert isinstance(on, Keep)
    assert "further than the query" in on.why


def test_a_row_that_stands_there_is_kept():
    [kept] = planned({"l": HERE}, row("l", HERE.checkpoint))

    assert kept == Keep("l", row("l", HERE.checkpoint), f"stands there already ({HERE.checkpoint})")


MERGED = Shard("m", P.hash_range, "0", None, "l", "r")


@over_rows(
    ("checkpoints", "listed", "rows", "created"),
    [
        ({"l": END, "r": END}, (L, R), (), ["m"]),
        ({"l": END}, (L, R), (), []),
        ({"l": END}, (L,), (), ["m"]),
        ({"l": END, "r": HERE}, (L,), (), []),
        ({"l": END, "r": END}, (L, R), (row("m", TRIM_HORIZON),), []),
        ({}, (L, R), (), []),
    ],
)
def test_a_merged_shard_gets_a_row_once_all_its_parents_that_are_left_have_ended(
    checkpoints, listed, rows, created
):
    steps = planned(checkpoints, *rows, graph=ShardGraph((*listed, MERGED)))

    assert [
        each.lease.key
        for each in steps
        if isinstance(each, Create) and each.lease.key not in checkpoints
    ] == created


@pytest.mark.parametrize("former", [LATEST, TRIM_HORIZON, number("3"), SHARD_END])
@pytest.mark.parametrize("to", [LeaseCheckpoint(LATEST, 1.5), LeaseCheckpoint(TRIM_HORIZON)])
def test_a_row_never_goes_to_a_sentinel(former, to):
    assert isinstance(planned({"l": to}, row("l", former))[0], Keep)


def test_the_row_of_a_shard_the_query_is_past_is_ended():
    steps = planned({"l": HERE, "r": HERE}, row("p", number("7")), row("l", TRIM_HORIZON))

    moved = {each.row.key: each for each in steps if isinstance(each, Move)}
    assert moved["p"].to == SHARD_END
    assert moved["p"].children == {"l", "r"}
    assert moved["l"].to == number("50", 2)
    assert [each.lease.key for each in steps if isinstance(each, Create)] == ["r"]


def test_an_ancestor_that_only_rows_know_is_ended_too():
    steps = planned(
        {"l": HERE, "r": HERE},
        row("p", SHARD_END, parents=frozenset({"expired"})),
        row("other", SHARD_END, parents=frozenset("xyz")),
        row("expired", number("1")),
        graph=ShardGraph((L, R)),
    )

    assert [(each.row.key, each.to) for each in steps if isinstance(each, Move)] == [
        ("expired", SHARD_END)
    ]


def test_a_shard_that_expired_gets_no_row():
    [ended] = planned({"gone": END}, graph=ShardGraph(()))
    [lost] = planned({"gone": HERE}, graph=ShardGraph(()))

    assert ended.why == "ended and expired"
    assert "lost" in lost.why


# Spark's files.

ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/orders"


def offset(arn=ARN):
    return Offset(streams={"": StreamIs(arn, 5)}, shards={"shardId-000000000000": before("9")})


def checkpoint(folder, sources, *, offsets=3, commits=3, version="v1"):
    for name in ("offsets", "commits"):
        (folder / name).mkdir()
    for batch in range(offsets + 1):
        lines = [version, "{}", *sources]
        (folder / "offsets" / str(batch)).write_text("\n".join(lines))
        (folder / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    for batch in range(commits + 1):
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def text_of(arn=ARN):
    return json.dumps(encode_offset(offset(arn)))


def test_the_last_committed_batch_counts_and_one_that_was_only_begun_is_reported(tmp_path):
    sources = ["-", '{"topic":{"0":1}}', "17", text_of()]
    batch = read_committed(checkpoint(tmp_path, sources, offsets=11, commits=10))

    assert (batch.batch_id, batch.is_another_begun) == (10, True)
    assert offset_of_stream(batch, ARN) == offset()
    for entry in tmp_path.rglob("11"):
        entry.unlink()
    assert not read_committed(tmp_path).is_another_begun


def test_an_empty_file_of_offsets_is_refused(tmp_path):
    checkpoint(tmp_path, [text_of()])
    (tmp_path / "offsets" / "3").write_text("")

    with pytest.raises(OffsetRefused, match="offsets/3 is of version ''"):
        read_committed(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        json.dumps(encode_offset(together({"a": offset(ARN + "2"), "b": offset()}, 0))),
        json.dumps({"v": 1, "stream": ARN, "created": 5, "shards": {"shardId-000000000000": "@9"}}),
    ],
)
def test_the_stream_may_be_one_of_several_and_an_offset_the_least_there_is(tmp_path, source):
    assert offset_of_stream(read_committed(checkpoint(tmp_path, [source])), ARN) == offset()


def test_a_file_that_is_too_large_for_spark_or_not_text_is_refused(tmp_path, monkeypatch):
    checkpoint(tmp_path, [text_of()])
    file = tmp_path / "offsets" / "3"
    monkeypatch.setattr(export, "_FILE_BYTES_MAX", file.stat().st_size)
    assert read_committed(tmp_path).batch_id == 3

    for content, reported in {
        file.read_bytes() + b" ": "is larger",
        b"\xff": "is not text",
    }.items():
        file.write_bytes(content)
        with pytest.raises(OffsetRefused, match=reported):
            read_committed(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="is not a checkpoint of Structured Streaming"):
        read_committed(tmp_path)


def test_a_query_that_has_committed_nothing_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="no batch is committed"):
        read_committed(checkpoint(tmp_path, [text_of()], offsets=0, commits=-1))


def test_offsets_that_were_deleted_are_missed(tmp_path):
    with pytest.raises(SettingsError, match="offsets/3 is missing"):
        read_committed(checkpoint(tmp_path, [text_of()], offsets=2, commits=3))


def test_another_version_of_the_log_is_not_guessed_at(tmp_path):
    with pytest.raises(OffsetRefused, match="version 'v2'"):
        read_committed(checkpoint(tmp_path, [text_of()], version="v2"))


@pytest.mark.parametrize(
    ("sources", "reported"),
    [
        ([text_of(), text_of()], "in 2 sources"),
        ([text_of(ARN + "2")], f"it has {ARN}2"),
        (["17"], "no kclrun source at all"),
    ],
)
def test_the_source_is_the_one_of_the_stream(tmp_path, sources, reported):
    batch = read_committed(checkpoint(tmp_path, sources))

    with pytest.raises(OffsetRefused, match=reported):
        offset_of_stream(batch, ARN)


def test_a_place_in_s3_is_to_be_copied_first():
    with pytest.raises(SettingsError, match="aws s3 sync s3://bucket/orders checkpoint"):
        local_folder("s3a://bucket/orders")


def test_a_file_url_is_a_folder(tmp_path):
    assert local_folder((tmp_path / "a b").as_uri()) == tmp_path / "a b"
    assert local_folder("file:/x/y") == local_folder("/x/y")
    with pytest.raises(SettingsError, match="expected a folder"):
        local_folder("hdfs://name/x")
