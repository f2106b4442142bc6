"""Several streams as one source: names, offsets, starts, limits and reports; in virtual time."""

import itertools
import json

import msgspec
import pytest

from kclrun.errors import NotFound, OffsetRefused, SettingsError
from kclrun.local.lease_rows import LeaseRows
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import LATEST, ExtendedSequenceNumber
from kclrun.model.stream import qualified, stream_key
from kclrun.protocol.writes import CreateLease
from kclrun.spark.offset_planner import DriverClock, OffsetPlanner, leases_of
from kclrun.spark.offsets import (
    decode_offset,
    encode_offset,
    parts_of,
    ranges_between,
)
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.options import LeasesAt, SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before
from kclrun.spark.stream_set import StreamsAdmin, StreamsReader, summary_of
from tests.support.stream_ports import ModelStream

EPOCH = 1_700_000_000.0
NAMES = ("orders", "returns")
FIRST = "shardId-000000000000"
O0, R0 = f"orders:{FIRST}", f"returns:{FIRST}"


class World:
    """Two streams of one account, and their clock."""

    def __init__(self, shards=1):
        self.at = EPOCH
        self.shards = shards
        self.kinesis = Kinesis(KinesisSettings(), b"unit".ljust(32))
        for name in NAMES:
            self.kinesis.create_stream(name, shards, self.at)
        self.ports = {name: ModelStream(self.kinesis, name, self.now) for name in NAMES}

    def now(self):
        self.at += 0.0001
        return self.at

    def wait(self, pause_s):
        self.at += max(0.001, pause_s)

    def put(self, name, shard=0):
        stream = self.kinesis.stream(name, None, self.at)
        entry = PutEntry(b"x", "k", str(stream.open_shards()[shard].hash_range.start))
        return self.kinesis.put(stream, entry, self.at).sequence_number

    def split(self, name, shard=0):
        stream = self.kinesis.stream(name, None, self.at)
        keys = stream.open_shards()[shard].hash_range
        middle = (keys.start + keys.end) // 2
        stream.split(stream.open_shards()[shard].shard_id, middle, self.at)

    def query(self, *names, start=StartKind.EARLIEST, table=None, **settings):
        several = len(names) > 1
        ports = {name: self.ports[name] for name in names}
        start = start if isinstance(start, Start) else Start(start)
        return OffsetPlanner(
            StreamsReader(ports) if several else ports[names[0]],
            StreamsAdmin(ports) if several else ports[names[0]],
            SourceSettings(address=StreamAddress(stream=",".join(names)), start=start, **settings),
            clock=DriverClock(lambda: self.at, lambda: self.at, self.wait),
            chance=lambda: 0.5,
            calls_at_once=0,
            table=table,
        )


def logged(offset):
    """As Spark gives it back after a restart."""
    return decode_offset(json.loads(json.dumps(encode_offset(offset))))


def news(query, start):
    for _ in range(200):
        if (end := query.latest_offset(start)) is not start:
            return end
    raise AssertionError("no news")


def until(query, start, is_there):
    while not is_there(start):
        start = news(query, start)
    return start


@pytest.fixture
def world():
    return World()


def test_the_option_takes_names_in_any_order_and_one_checkpoint_comes_of_it():
    one, other = (
        read_source_options({"streamName": text}, Use.STREAM).address
        for text in ("returns, orders", "orders,returns")
    )

    assert one == other
    assert [each.stream for each in one.each()] == ["orders", "returns"]
    assert one.named(R0) == ("returns", FIRST)
    assert StreamAddress(stream="orders").named(FIRST) == ("orders", FIRST)


def test_each_part_is_the_offset_that_its_stream_has_alone(world):
    world.put("orders")
    query = world.query("orders")
    alone = news(query, query.initial_offset())
    both = world.query(*NAMES)
    among = news(both, both.initial_offset())

    (part,) = (each for name, each in parts_of(logged(among)).items() if name == "orders")
    assert (part.streams, part.shards) == (alone.streams, alone.shards)


def test_shards_of_the_same_id_split_on_their_own_and_parents_come_first(world):
    world.put("orders")
    world.split("orders")
    world.put("orders", 1)
    world.put("returns")
    query = world.query(*NAMES)

    end = until(query, query.initial_offset(), lambda each: O0 not in each.shards)

    named = sorted(end.shards)
    assert named == ["orders:shardId-000000000001", "orders:shardId-000000000002", R0]
    assert end.shards[R0] != SHARD_END


def test_a_limit_is_one_of_all_streams(world):
    numbers = {O0: [], R0: []}
    for _ in range(300):
        for name in NAMES:
            numbers[f"{name}:{FIRST}"].append(world.put(name))
        world.wait(1)
    query = world.query(*NAMES, records_per_trigger_max=50, target_batch_s=1000)
    start, sizes = query.initial_offset(), []
    while sum(sizes) < 600:
        end = news(query, start)
        sizes.append(
            sum(
                not each.begin.covers(number) and each.end.covers(number)
                for each in ranges_between(start, end)
                for number in numbers[each.shard_id]
            )
        )
        start = end

    assert max(sizes) <= 100, sizes


@pytest.mark.parametrize("start", [StartKind.EARLIEST, StartKind.LATEST])
def test_a_stream_is_added_to_the_checkpoint_of_one_by_a_batch_without_rows(world, start):
    world.put("orders")
    first = world.query("orders")
    stood = logged(news(first, first.initial_offset()))
    world.put("returns")
    query = world.query(*NAMES, start=start)
    world.wait(2)

    entered = query.latest_offset(stood)

    assert entered.streams.keys() == set(NAMES)
    assert entered.began.keys() == {R0}
    assert entered.aligned_ms == (stood.aligned_ms if start is StartKind.LATEST else 0)
    assert stood.aligned_ms > 0
    unread = query.latest_offset(first.initial_offset())
    assert unread.began.keys() == {O0, R0}, "where one begins is not exact before its first record"
    begin, end = query.known(stood), logged(entered)
    assert ranges_between(begin, end) == ()
    assert entered.shards[O0] == stood.shards[FIRST]
    assert (entered.shards[R0] == TRIM_HORIZON) == (start is StartKind.EARLIEST)
    # Started again elsewhere, the batch that was logged says it all.
    again = world.query(*NAMES, start=start)
    numbers = {"orders": world.put("orders"), "returns": world.put("returns")}
    ends = {O0: after(numbers["orders"]), R0: after(numbers["returns"])}
    assert until(again, end, lambda each: each.shards == ends).streams == entered.streams


def test_rows_of_a_stream_that_is_added_with_a_backlog_come_in_the_order_of_time(world):
    arrived = {O0: {}, R0: {}}

    def put(shard):
        arrived[shard][world.put(shard.split(":")[0])] = world.at

    for _ in range(120):
        put(R0)
        world.wait(30)
    first = world.query("orders")
    put(O0)
    start = logged(news(first, first.initial_offset()))
    # The clock of the service tells whole seconds: so much apart, all of these come after.
    world.wait(60)
    for _ in range(5):
        put(O0)
        put(R0)
        world.wait(1)
    query, found = world.query(*NAMES), []
    start = query.known(start)
    while len([at for batch in found for at in batch]) < 130:
        end = news(query, start)
        found.append(
            [
                at
                for each in ranges_between(start, end)
                for number, at in arrived[each.shard_id].items()
                if not each.begin.covers(number) and each.end.covers(number)
            ]
        )
        start = end

    batches = [each for each in found if each]
    assert len(batches) > 3, "the backlog is not one batch"
    for one, two in itertools.pairwise(batches):
        assert max(one) < min(two) + 2


def test_a_spark_that_asks_once_has_the_rows_of_a_stream_that_is_added(world):
    world.put("orders")
    first = world.query("orders")
    stood = logged(first.everything(first.initial_offset()))
    number = world.put("returns")
    world.wait(5)
    query = world.query(*NAMES)

    end = logged(query.everything(stood))

    (only,) = ranges_between(query.known(stood), end)
    assert (only.shard_id, only.begin, only.end) == (R0, before(number), after(number))


def test_a_batch_that_was_left_over_by_one_stream_is_read_as_it_was(world):
    number = world.put("orders")
    first = world.query("orders")
    start = first.initial_offset()
    end = logged(news(first, start))
    query = world.query(*NAMES)

    (only,) = ranges_between(*(query.known(each) for each in (start, end)))

    assert (only.shard_id, only.begin, only.end) == (O0, before(number), after(number))


def test_a_stream_left_out_or_made_again_is_refused_by_its_name(world):
    query = world.query(*NAMES)
    stood = query.initial_offset()

    with pytest.raises(OffsetRefused, match=r"stream/orders, .*none left out\n.*orders,returns"):
        world.query("returns").known(stood)
    world.kinesis.delete_stream(world.kinesis.stream("returns", None, world.at), world.at)
    world.wait(600)
    world.kinesis.create_stream("returns", 1, world.at)
    world.wait(600)
    with pytest.raises(OffsetRefused, match="returns was deleted and re-created"):
        world.query(*NAMES).known(stood)


def test_one_stream_that_is_deleted_while_the_query_runs_is_named(world):
    world.kinesis.delete_stream(world.kinesis.stream("returns", None, world.at), world.at)
    world.wait(600)

    with pytest.raises(NotFound, match="the stream returns is gone"):
        StreamsAdmin(world.ports).list_shards()


def test_positions_are_given_by_stream_and_shard(world):
    numbers = {name: [world.put(name) for _ in range(3)] for name in NAMES}
    second = after(numbers["orders"][1])
    start = Start(StartKind.POSITIONS, positions={O0: second, "*": TRIM_HORIZON})

    found = world.query(*NAMES, start=start).initial_offset()

    assert found.shards == {O0: second, R0: TRIM_HORIZON}
    unnamed = msgspec.structs.replace(start, positions={O0: TRIM_HORIZON})
    with pytest.raises(SettingsError, match=f"where do {R0} begin"):
        world.query(*NAMES, start=unnamed).initial_offset()


def test_leases_of_a_table_of_several_streams_are_each_their_own(world):
    numbers = {name: [world.put(name) for _ in range(2)] for name in NAMES}
    rows = LeaseRows()
    for name in NAMES:
        summary = world.ports[name].summary()
        (shard,) = world.ports[name].list_shards()
        key = qualified(stream_key(summary.arn, summary.created_at), FIRST)
        checkpoint = ExtendedSequenceNumber(numbers[name][0], 0)
        keys = shard.hash_range if name == "returns" else None
        rows.write(CreateLease(Lease(key=LeaseKey(key), checkpoint=checkpoint, hash_range=keys)))
    rows.write(CreateLease(Lease(key=LeaseKey(FIRST), checkpoint=LATEST)))  # of no known stream
    start = Start(StartKind.LEASES, leases=LeasesAt("shop"))

    found = world.query(*NAMES, start=start, table=rows).initial_offset().shards

    assert {shard: at.number for shard, at in found.items()} == {
        O0: numbers["orders"][0],
        R0: numbers["returns"][0],
    }
    streams = {name: world.ports[name].summary() for name in NAMES}
    leased = leases_of(rows, "shop", streams)
    assert leased.keys() == {O0, R0}
    assert leased[O0].hash_range is None
    assert leased[R0].hash_range == StreamsAdmin(world.ports).list_shards()[1].hash_range


def test_the_report_has_totals_of_each_stream(world):
    world.put("orders")
    query = world.query(*NAMES)
    start = query.initial_offset()
    until(query, start, lambda each: each.shards[O0] != TRIM_HORIZON)

    report = query.report()

    assert report["shardsTotal"] == 2
    assert {name: each["shardsTotal"] for name, each in report["streams"].items()} == {
        "orders": 1,
        "returns": 1,
    }


def test_a_summary_is_of_the_shards_own_stream(world):
    admin = StreamsAdmin(world.ports)

    assert [summary_of(admin, each).name for each in (O0, R0)] == ["orders", "returns"]
