"""A query begins where a fleet's leases stand: the driver over the stream model and a table."""

import logging

import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.errors import NotFound, SettingsError
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.protocol.writes import Applied, CreateLease
from kclrun.spark.offset_planner import DriverClock, OffsetPlanner
from kclrun.spark.offsets import decode_offset, encode_offset, ranges_between
from kclrun.spark.options import LeasesAt, SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.positions import after, at_timestamp
from tests.unit.spark.reading_world import STREAM, World


def table(world, *leases):
    rows = LeaseRows()
    shards = {each.shard_id: each for each in world.port.list_shards()}
    for shard_id, checkpoint, more in leases:
        lease = Lease(
            key=LeaseKey(shard_id),
            checkpoint=checkpoint,
            parents=frozenset(shards[shard_id].parents),
            hash_range=shards[shard_id].hash_range,
            **more,
        )
        assert rows.write(CreateLease(lease)) == Applied()
    return rows


def query(world, rows):
    start = Start(StartKind.LEASES, leases=LeasesAt("shop"))
    return OffsetPlanner(
        world.port,
        world.port,
        SourceSettings(address=StreamAddress(stream=STREAM), start=start, inline_bytes_max=0),
        clock=DriverClock(world.wall, world.wall, world.sleep),
        chance=lambda: 0.5,
        calls_at_once=0,
        table=rows,
    )


def first_batch(world, rows):
    """As Spark does it: the end is stored, as JSON; the start is not."""
    asked = query(world, rows)
    start = asked.initial_offset()
    end = asked.latest_offset(start)
    return start, decode_offset(encode_offset(end))


def data(world, start, end):
    return [each.data for each in world.read(*ranges_between(start, end))]


def test_the_first_batch_begins_inside_the_aggregate_and_is_the_same_when_it_is_read_again():
    world = World()
    payload = build_aggregate([("k", b"%d" % each, None) for each in range(5)])
    [number] = world.put(data=payload)
    world.put(data=b"next")
    rows = table(world, (world.shard_ids[0], ExtendedSequenceNumber(number, 2), {}))

    start, end = first_batch(world, rows)
    world.put(data=b"later")
    moved = table(world, (world.shard_ids[0], TRIM_HORIZON, {}))
    started_again = query(world, moved).initial_offset()

    assert start.shards == {world.shard_ids[0]: after(number, 2)}
    assert end.began == start.shards
    assert data(world, start, end) == [b"3", b"4", b"next"]
    assert data(world, started_again, end) == [b"3", b"4", b"next"]


def test_a_batch_read_from_leases_reads_what_lies_after_them():
    world = World()
    first, _ = world.put(2)
    [parent] = world.shard_ids
    world.stream.split(parent, world.stream.open_shards()[0].hash_range.end // 2, world.wall())
    world.now += 60
    left, right = world.shard_ids[1:]
    world.put(data=b"left", shard=left)
    world.put(data=b"right", shard=right)
    world.now += 60

    ended = query(world, table(world, (parent, SHARD_END, {}))).bounded()
    begun = query(world, table(world, (parent, ExtendedSequenceNumber(first), {}))).bounded()

    assert sorted(data(world, *ended)) == [b"left", b"right"]
    assert sorted(data(world, *begun)) == [b"1", b"left", b"right"]


def test_a_pinned_latest_is_its_instant_and_one_without_is_now():
    world = World(shards=2)
    first, second = world.shard_ids
    world.put(data=b"before", shard=first)
    pinned_at = world.now
    world.now += 5
    world.put(data=b"after", shard=first)
    world.put(data=b"before", shard=second)
    world.now += 5
    rows = table(world, (first, LATEST, {"latest_pinned_at": pinned_at}), (second, LATEST, {}))

    start, end = first_batch(world, rows)

    assert start.shards[first] == at_timestamp(round(pinned_at * 1000))
    assert data(world, start, end) == [b"after"]


def test_a_shard_without_a_lease_begins_at_the_horizon_and_is_named(caplog):
    world = World(shards=2)
    first, second = world.shard_ids
    rows = table(world, (first, TRIM_HORIZON, {}))

    with caplog.at_level(logging.WARNING):
        query(world, rows).initial_offset()

    assert [each.getMessage() for each in caplog.records] == [
        f"table shop has no row of {second}: read from the oldest record"
    ]


@pytest.mark.parametrize(
    ("owners", "said"),
    [(1, "(w0)"), (5, "(w0, w1, w2, w3, w4)"), (6, "(w0, w1, w2, w3, w4, …)")],
)
def test_leases_that_have_owners_are_warned_of_and_read(caplog, owners, said):
    world = World(shards=owners)
    owned = [
        (each, TRIM_HORIZON, {"owner": f"w{number}"}) for number, each in enumerate(world.shard_ids)
    ]
    rows = table(world, *owned)

    with caplog.at_level(logging.WARNING):
        query(world, rows).initial_offset()

    [warning] = caplog.records
    assert f"still have owners {said}:" in warning.getMessage()


def test_of_a_table_of_several_streams_only_the_rows_of_this_one_count():
    world = World()
    [shard_id] = world.shard_ids
    [number] = world.put()
    summary = world.port.summary()
    ours = f"{summary.arn.split(':')[4]}:{STREAM}:{int(summary.created_at)}:{shard_id}"
    rows = LeaseRows()
    for key, sub in ((ours, 3), (ours.replace(STREAM, "other"), 4)):
        lease = Lease(key=LeaseKey(key), checkpoint=ExtendedSequenceNumber(number, sub))
        assert rows.write(CreateLease(lease)) == Applied()

    assert query(world, rows).initial_offset().shards == {shard_id: after(number, 3)}


def test_an_empty_table_is_no_start():
    world = World()

    with pytest.raises(SettingsError, match="table shop holds no lease of orders"):
        query(world, LeaseRows()).initial_offset()


def test_a_table_that_is_not_there_is_named():
    class Absent(LeaseRows):
        def scan(self):
            raise NotFound("no such table", operation="Scan", code="ResourceNotFoundException")

    with pytest.raises(NotFound, match="there is no lease table shop"):
        query(World(), Absent()).initial_offset()


def test_rows_that_cannot_be_read_are_not_passed_over():
    world = World()
    rows = table(world, (world.shard_ids[0], TRIM_HORIZON, {}))
    rows.plant({"leaseKey": {"S": "shardId-000000000009"}, "checkpoint": {"S": "x"}})

    with pytest.raises(SettingsError, match="1 rows cannot be read as leases"):
        query(world, rows).initial_offset()
