"""What the driver decides, over the stream model in virtual time: one claim of A1 to A9 (A2, A7 and
A8 among them) each."""

import itertools
import json
from bisect import bisect_left

import msgspec
import pytest

from kclrun.errors import (
    DataLoss,
    InvalidRequest,
    NotFound,
    OffsetRefused,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import ShardGraph
from kclrun.model.time import backoff_s
from kclrun.spark.offset_planner import DriverClock, OffsetPlanner
from kclrun.spark.offsets import decode_offset, encode_offset, ranges_between
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.planning import shard_listing as lines_module
from kclrun.spark.planning import shard_searches
from kclrun.spark.planning.batch_planner import REPORTED_MAX
from kclrun.spark.positions import (
    SHARD_END,
    TRIM_HORIZON,
    PositionKind,
    after,
    at_timestamp,
    before,
)
from tests.support.stream_ports import ModelStream

EPOCH = 1_700_000_000.0
S0, S1, S2 = (f"shardId-{number:012d}" for number in range(3))
EARLIEST, LATEST = Start(StartKind.EARLIEST), Start(StartKind.LATEST)


class World:
    """A stream, its time, the calls that were made, and stamps that need not grow."""

    def __init__(self, shards=1):
        self.elapsed = 0.0
        self.kinesis = Kinesis(KinesisSettings(), b"unit".ljust(32))
        self.kinesis.create_stream("s", shards, EPOCH)
        self.model = ModelStream(self.kinesis, "s", lambda: self.at)
        self.calls = []
        self.stamps = {}
        self.numbers = {}
        self.events = []
        self.host_ahead_s = 0.0
        self.gap_pages = 0
        self.throttled = 0
        self.refused = 0
        self.tells_time = True

    @property
    def at(self):
        return EPOCH + self.elapsed

    @property
    def stream(self):
        return self.kinesis.stream("s", None, self.at)

    def wait(self, pause_s):
        until = self.elapsed + pause_s
        while self.events and self.events[0][0] <= until:
            at, event = self.events.pop(0)
            self.elapsed = max(self.elapsed, at)
            event()
        self.elapsed = until

    def put(self, shard=0, stamp=None, data=b"x"):
        keys = self.stream.open_shards()[shard].hash_range
        entry = PutEntry(data, "k", str(keys.start))
        result = self.kinesis.put(self.stream, entry, self.at)
        self.stamps[result.sequence_number] = self.at if stamp is None else stamp
        self.numbers.setdefault(result.shard_id, []).append(result.sequence_number)
        return result.sequence_number

    def split(self, shard=0):
        whole = self.stream.open_shards()[shard]
        middle = (whole.hash_range.start + whole.hash_range.end) // 2
        self.stream.split(whole.shard_id, middle, self.at)

    def summary(self):
        return self.model.summary()

    def list_shards(self, shard_filter=None):
        self.calls.append("list")
        return self.model.list_shards(shard_filter)

    def iterator(self, shard_id, start):
        self.calls.append(start.kind.name)
        if start.kind is IteratorType.AT_TIMESTAMP:
            self._require_past(shard_id, start)
            numbers = self.numbers.get(shard_id, [])
            late = [n for n in numbers if self.stamps[n] >= start.timestamp - 1e-6]
            if not late:
                return self.model.iterator(shard_id, StartPoint(IteratorType.LATEST))
            start = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, late[0])
        return self.model.iterator(shard_id, start)

    def _require_past(self, shard_id, start):
        try:
            self.model.iterator(shard_id, start)
        except InvalidRequest:
            self.refused += 1
            raise

    def fetch(self, iterator, limit):
        self.calls.append("fetch")
        self.limit = limit
        self.elapsed += 0.001
        if self.throttled:
            self.throttled -= 1
            raise Throttled("too many", operation="GetRecords")
        if self.gap_pages:
            self.gap_pages -= 1
            return FetchedPage([], iterator, 1000, served_at=float(int(self.at)))
        page = self.model.fetch(iterator, limit)
        records = [
            Record(r.data, r.partition_key, r.sequence_number, self.stamps[r.sequence_number])
            for r in page.records
        ]
        served_at = float(int(self.at)) if self.tells_time else None
        behind_ms = page.millis_behind_latest
        return FetchedPage(records, page.next_iterator, behind_ms, page.children, 0, served_at)

    def query(self, start=EARLIEST, **settings):
        return OffsetPlanner(
            self,
            self,
            SourceSettings(address=StreamAddress(stream="s"), start=start, **settings),
            clock=DriverClock(lambda: self.elapsed, lambda: self.at + self.host_ahead_s, self.wait),
            chance=lambda: 0.5,
            calls_at_once=0,
        )

    def rows(self, start, end):
        found = []
        for each in ranges_between(start, end):
            numbers = self.numbers.get(each.shard_id, [])
            if each.begin.kind is not PositionKind.TIMESTAMP:
                first, behind = (
                    bisect_left(numbers, True, key=lambda n, to=to: not to.covers(n))
                    for to in (each.begin, each.end)
                )
                found += numbers[first:behind]
        return found


def news(query, start, **kind):
    """The end of the next batch, in as many triggers as it takes."""
    for _ in range(100):
        end = query.latest_offset(start, **kind)
        if end is not start:
            return end
    raise AssertionError("no news")


def batches(world, query, start, triggers=60):
    """Batches until there are no news for a while: [(start, end, rows)]."""
    found = []
    for _ in range(triggers):
        end = query.latest_offset(start)
        if end is not start:
            found.append((start, end, world.rows(start, end)))
            start = end
    return found


@pytest.mark.seconds
def test_an_idle_stream_makes_one_batch_an_hour():
    world = World(2)
    world.put()
    query = world.query(poll_interval_s=60.0)
    start = news(query, query.initial_offset())

    ends = []
    while world.elapsed < 4 * 3600:
        end = query.latest_offset(start)
        ends += [end] if end is not start else []
        start = end

    assert 3 <= len(ends) <= 4
    assert all(world.rows(one, two) == [] for one, two in itertools.pairwise(ends))
    assert start.as_of_ms[S0] > (EPOCH + 2 * 3600) * 1000


def test_batch_zero_is_replayed_from_its_end_alone():
    # Hole 1: nobody stores the first batch's start; a restart begins elsewhere.
    world = World()
    first = world.query(LATEST)
    began = first.initial_offset()
    numbers = [world.put() for _ in range(4)]
    end = news(first, began)
    world.wait(10)

    again = world.query(LATEST).initial_offset()

    assert again.shards != began.shards
    assert world.rows(began, end) == numbers
    assert world.rows(again, decode_offset(json.loads(json.dumps(encode_offset(end))))) == numbers


def test_a_first_batch_without_news_is_replayed_too():
    world = World()
    began = world.query(LATEST).initial_offset()
    world.wait(10)

    assert ranges_between(world.query(LATEST).initial_offset(), began) == ()


def test_latest_leaves_out_what_was_there_before():
    world = World()
    world.put()
    world.wait(0.3)
    query = world.query(LATEST)
    start = query.initial_offset()
    number = world.put()

    assert world.rows(start, news(query, start)) == [number]


def catch_up(world, delay_s=5.0, **settings):
    """How many rows come behind the watermark of the batches before, at this delay."""
    query = world.query(**settings)
    high, late, total = 0.0, 0, 0
    for _, _, rows in batches(world, query, query.initial_offset()):
        stamps = [world.stamps[each] for each in rows]
        late += sum(stamp < high - delay_s for stamp in stamps)
        total += len(stamps)
        high = max([high, *stamps])
    return late, total


def test_a_dense_and_a_sparse_shard_stay_together_in_catch_up():
    # Hole 2: an inclusive end on the sparse shard would jump ahead by up to twenty minutes.
    world = World(2)
    for minute in range(120):
        world.wait(60)
        for _ in range(5):
            world.put(0)
        if minute % 20 == 0:
            world.put(1)

    assert catch_up(world, target_batch_s=5.0) == (0, 606)


def test_a_batch_in_catch_up_ends_before_a_record_never_after_it():
    world = World(2)
    for _ in range(30):
        world.wait(30)
        world.put(0)
        world.put(1)
    query = world.query()

    first = batches(world, query, query.initial_offset(), triggers=1)[0][1]

    assert all(bound.is_before for bound in first.shards.values())


def test_a_shard_that_left_the_listing_unread_is_a_loss():
    # Hole 4: dropping it in silence would lose what had not been read.
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.put()
    world.split()
    world.wait(25 * 3600)

    with pytest.raises(DataLoss, match=f"{S0} is gone"):
        news(world.query(), start)


class Lag:
    """After a reshard: ListShards shows the stream of before, and the children are not found."""

    def __init__(self, world):
        self.world, self.before = world, world.model.list_shards()
        self.lists, self.iterates = world.model.list_shards, world.model.iterator
        world.model.list_shards = lambda _=None: self.before
        world.model.iterator = self.iterator

    def iterator(self, shard_id, start):
        if shard_id not in {shard.shard_id for shard in self.before}:
            raise NotFound("no such shard", operation="GetShardIterator")
        return self.iterates(shard_id, start)

    def end(self):
        self.world.model.list_shards, self.world.model.iterator = self.lists, self.iterates


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("restarts", [False, True], ids=["the same query", "a new query"])
def test_children_that_are_too_new_for_a_lagging_service_are_read_from_their_first_record(
    fails, restarts
):
    world = World()
    world.put()
    query = world.query(fails_on_data_loss=fails)
    start = news(query, query.initial_offset())
    lag = Lag(world)
    world.split()
    numbers = [world.put(0), world.put(1)]
    found = batches(world, query, start, triggers=20)
    start = found[-1][1] if found else start
    if restarts:
        query = world.query(fails_on_data_loss=fails)
        found += batches(world, query, start, triggers=20)
        start = found[-1][1] if found else start
    lag.end()

    found += batches(world, query, start, triggers=20)

    assert sorted(row for _, _, rows in found for row in rows) == numbers
    assert query.report()["losses"] == []


def test_an_offset_of_children_alone_waits_for_a_service_that_lags():
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    lag = Lag(world)
    world.split()
    numbers = [world.put(0), world.put(1)]
    children = msgspec.structs.replace(
        start, shards={S0: SHARD_END, S1: TRIM_HORIZON, S2: TRIM_HORIZON}
    )
    query = world.query(fails_on_data_loss=False)
    assert batches(world, query, children, triggers=30) == []
    lag.end()

    found = batches(world, query, children, triggers=30)

    assert sorted(row for _, _, rows in found for row in rows) == numbers


def test_one_answer_and_one_listing_prove_no_loss():
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.put()
    world.split()
    world.wait(25 * 3600)
    query = world.query()
    began = world.elapsed

    with pytest.raises(DataLoss, match="records after that, if it had any"):
        news(query, start)

    assert world.elapsed - began >= 5.0


def test_an_allowed_loss_is_noted_and_leaves_an_empty_range():
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.put()
    world.split()
    world.wait(25 * 3600)
    query = world.query(fails_on_data_loss=False)

    end = news(query, start)

    assert end.shards[S0] == SHARD_END
    assert ranges_between(start, end) == ()
    assert len(query.report()["losses"]) == 1
    assert set(news(query, end).shards) == {S1, S2}


@pytest.mark.parametrize(
    ("per_second", "size_bytes", "inline_bytes_max"),
    [
        (20, 1_000, 0),
        (100, 1_000, 0),
        # All that is planned is read again: a tenth of the shard's 2 MB/s holds so much [A5].
        (500, 200, 0),
        (500, 1_000, 512 * 1024),
        (1_000, 900, 512 * 1024),
    ],
)
def test_records_stamped_ahead_of_time_do_not_stall_the_shard(
    per_second, size_bytes, inline_bytes_max
):
    # Hole 5: for twenty seconds, every time leads to the same early record.
    world = World()
    early, data = [], b"x" * size_bytes

    def put():
        if world.elapsed > 5.0 and len(early) < 40:
            early.append(world.put(stamp=world.at + 20.0, data=data))
        else:
            world.put(data=data)

    world.events = [(n / per_second, put) for n in range(30 * per_second)]
    query = world.query(inline_bytes_max=inline_bytes_max)
    start = query.initial_offset()
    delays = []
    while world.elapsed < 29.0:
        end = news(query, start)
        delays += [world.at - world.stamps[row] for row in world.rows(start, end)]
        start = end

    assert start.shards[S0].covers(early[-1])
    assert len(delays) > 25 * per_second
    # Longest where the shard is written at its full rate; the others are below 3 s.
    assert max(delays) < 3.5


def test_a_gap_is_walked_once_and_then_costs_one_call_a_poll():
    # Hole 6: a walk that began at the last bound would cross the gap at every poll.
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.wait(20 * 3600)
    world.gap_pages = 240
    while world.gap_pages:
        start = query.latest_offset(start)
    start = query.latest_offset(start)
    world.calls.clear()
    polls_from = world.elapsed

    for _ in range(10):
        assert query.latest_offset(start) is start

    polled_s = world.elapsed - polls_from
    assert world.calls.count("fetch") <= polled_s + 4
    world.put()
    assert news(query, start).shards != start.shards


def delay_of_busy_batches(world, query, bursts=5):
    """The longest time from a put to the batch that has it, of some bursts in a row."""
    start = query.initial_offset()
    delays = []
    for _ in range(bursts):
        put_at, numbers = world.elapsed, [world.put(data=b"x" * 1000) for _ in range(300)]
        while not start.shards[S0].covers(numbers[-1]):
            start = news(query, start)
        delays.append(world.elapsed - put_at)
    return max(delays)


@pytest.mark.parametrize("start", [EARLIEST, LATEST])
@pytest.mark.parametrize("host_ahead_s", [-3600.0, -2.0, 2.0, 3600.0])
def test_a_wrong_clock_of_the_driver_neither_asks_for_the_future_nor_delays(start, host_ahead_s):
    # Hole 7: AT_TIMESTAMP refuses the future; the service's own time is what is asked for.
    world = World()
    world.host_ahead_s = host_ahead_s
    query = world.query(start, inline_bytes_max=0)

    assert delay_of_busy_batches(world, query) < 5.0
    assert "AT_TIMESTAMP" in world.calls
    assert world.refused == 0


def test_where_the_service_tells_no_time_a_refused_one_is_not_the_end():
    world = World()
    world.tells_time = False
    world.host_ahead_s = 20.0
    query = world.query(inline_bytes_max=0)

    assert delay_of_busy_batches(world, query, bursts=20) < 5.0
    # Each time it believes its clock less: by 1 s, 3 s, 7 s, 15 s, 31 s.
    assert world.refused == 5


def test_a_start_in_the_future_is_waited_for():
    world = World()
    query = world.query(Start(StartKind.TIMESTAMP, round((EPOCH + 30) * 1000)))
    start = query.initial_offset()
    world.put()
    while world.elapsed < 25:
        assert query.latest_offset(start) is start
    world.wait(10)
    number = world.put()

    assert world.rows(start, news(query, start)) == [number]


def test_a_limit_of_records_bounds_a_batch_about():
    world = World(2)
    for _ in range(2_000):
        world.wait(0.5)
        world.put(0)
        world.put(1)
    query = world.query(records_per_trigger_max=100)

    found = batches(world, query, query.initial_offset(), triggers=200)

    sizes = [len(rows) for _, _, rows in found]
    assert sum(sizes) == 4_000
    assert max(sizes) <= 200
    assert len(sizes) >= 20


def test_a_limit_holds_for_closed_shards_too():
    world = World()
    for _ in range(1_000):
        world.wait(0.5)
        world.put()
    world.split()
    world.wait(3600)
    query = world.query(records_per_trigger_max=100)

    found = batches(world, query, query.initial_offset(), triggers=100)

    assert max(len(rows) for _, _, rows in found) <= 200
    assert found[-1][1].shards.keys() == {S1, S2}


def test_all_that_is_available_ignores_the_limits():
    world = World()
    for _ in range(1_000):
        world.wait(5)
        world.put()
    query = world.query(records_per_trigger_max=10)
    start = query.initial_offset()

    assert len(world.rows(start, news(query, start, takes_all=True))) == 1_000


@pytest.mark.parametrize("records_per_trigger_max", [None, 10])
def test_all_that_is_available_holds_what_arrived_a_moment_ago(records_per_trigger_max):
    # No time that may be asked for lies behind records so young: all are read one after the other.
    world = World()
    for _ in range(3_000):
        world.put(data=b"x" * 1_000)
    query = world.query(records_per_trigger_max=records_per_trigger_max)
    start = query.initial_offset()

    assert len(world.rows(start, news(query, start, takes_all=True))) == 3_000


def test_throttles_lengthen_the_tick_and_quiet_brings_it_back():
    world = World()
    query = world.query()
    start = query.initial_offset()
    query.latest_offset(start)
    world.throttled = 5
    ticks = []
    for _ in range(60):
        query.latest_offset(start)
        ticks.append(query.report()["tickMs"])

    assert max(ticks) > 1400
    assert ticks[-1] == 1000
    assert query.report()["throttles"] == 5


def test_rows_stay_at_home_where_inlining_is_off():
    world = World()
    world.put()
    query = world.query(inline_bytes_max=0)
    start = query.initial_offset()

    assert query.hints(start, news(query, start))[S0].rows is None


def test_hints_are_for_the_batch_just_decided_only():
    world = World()
    world.put()
    query = world.query()
    start = query.initial_offset()
    end = news(query, start)

    assert query.hints(end, end) == {}
    assert world.query().hints(start, end) == {}


def test_children_are_read_in_the_batch_they_enter_from_their_first_records_on():
    world = World()
    world.put()
    world.split()
    numbers = [world.put(0), world.put(1)]
    query = world.query()

    found = batches(world, query, query.initial_offset())

    assert [len(rows) for _, _, rows in found] == [1, 2]
    assert found[0][1].shards == {S0: SHARD_END}
    assert found[1][1].shards == {S1: after(numbers[0]), S2: after(numbers[1])}
    assert found[1][1].began == {S1: before(numbers[0]), S2: before(numbers[1])}


def test_a_start_at_a_time_goes_through_reshards_without_reading_older_records():
    world = World()
    world.wait(10)
    query = world.query(Start(StartKind.TIMESTAMP, round((EPOCH + 20) * 1000)))
    start = query.initial_offset()
    world.split()
    world.put(0)
    world.wait(20)
    number = world.put(0)

    rows = [row for _, _, found in batches(world, query, start) for row in found]

    assert rows == [number]


def test_available_now_ends_while_records_still_come():
    world = World(2)
    numbers = [world.put(index % 2) for index in range(50)]
    query = world.query()
    start = query.initial_offset()
    world.events = [(world.elapsed + n * 0.05, lambda: world.put(0)) for n in range(1, 2_000)]
    query.prepare_available_now()

    rows = []
    while (end := query.latest_offset(start)) is not start:
        rows += world.rows(start, end)
        start = end
        world.wait(0.3)

    assert set(numbers) <= set(rows)
    assert world.elapsed < 20
    assert query.latest_offset(start) is start


def test_a_deleted_and_re_created_stream_is_refused():
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.wait(5)
    world.kinesis.delete_stream(world.stream, world.at)
    world.kinesis.create_stream("s", 1, world.at)

    with pytest.raises(OffsetRefused, match="deleted and re-created"):
        world.query().latest_offset(start)
    with pytest.raises(OffsetRefused, match="deleted and re-created"):
        query.latest_offset(start)


def test_ten_listings_with_a_hole_a_second_apart_are_enough(monkeypatch):
    world = World(2)
    left = world.model.list_shards()[1:]
    monkeypatch.setattr(world.model, "list_shards", lambda _: left)

    with pytest.raises(Unavailable, match="10 listings of s did not cover its key space"):
        world.query().initial_offset()
    assert (world.calls.count("list"), world.elapsed) == (10, 10.0)


@pytest.mark.parametrize("start", [LATEST, Start(StartKind.TIMESTAMP, round(EPOCH * 1000) + 3_000)])
@pytest.mark.parametrize("ahead_s", [-3_600, 3_600])
def test_a_start_by_time_is_one_of_the_services_clock_and_of_one_page(start, ahead_s):
    world = World(2)
    world.host_ahead_s = ahead_s
    world.wait(5.25)
    world.calls.clear()

    initial = world.query(start).initial_offset()

    begins = [each.timestamp_ms / 1000 for each in initial.shards.values()]
    at = 5.0 if start is LATEST else 3.0
    assert begins == [pytest.approx(EPOCH + at, abs=1.0)] * 2
    assert (world.calls.count("fetch"), world.limit) == (1, 1)
    if start is LATEST:
        whole = round(max(begins) * 1000) - initial.aligned_ms
        assert whole == int((world.at + ahead_s) * 1000) % 1000 > 0


def test_a_checkpoint_of_another_stream_is_refused():
    world = World()
    query = world.query()
    other = decode_offset({**encode_offset(query.initial_offset()), "stream": "arn:other"})

    with pytest.raises(OffsetRefused, match="another stream"):
        query.known(other)


def test_a_batch_read_holds_parents_and_descendants_at_once():
    world = World()
    numbers = [world.put()]
    world.split()
    numbers += [world.put(0), world.put(1)]
    query = world.query()

    start, end = query.bounded()

    assert sorted(world.rows(start, end)) == sorted(numbers)
    assert world.rows(world.query().initial_offset(), end) == world.rows(start, end)


def test_a_batch_read_at_the_tip_is_planned_by_one_look_and_not_by_waiting():
    world = World()
    world.put()
    world.wait(5.0)
    began = world.elapsed

    start, end = world.query().bounded()

    assert len(world.rows(start, end)) == 1
    assert world.elapsed - began < 0.05


def test_a_batch_read_ends_before_the_first_record_at_its_time():
    world = World()
    numbers = []
    for _ in range(10):
        world.wait(10)
        numbers.append(world.put())
    until = Start(StartKind.TIMESTAMP, round((EPOCH + 55) * 1000))
    query = world.query(end=until)

    start, end = query.bounded()

    assert end.shards == {S0: before(numbers[5])}
    assert world.rows(start, end) == numbers[:5]


def test_positions_must_speak_for_every_shard():
    world = World(2)
    query = world.query(Start(StartKind.POSITIONS, positions={S0: TRIM_HORIZON}))

    with pytest.raises(SettingsError, match=f"where do {S1} begin"):
        query.initial_offset()


def test_positions_may_leave_the_rest_to_a_star():
    world = World(2)
    number = world.put(0)
    positions = {S0: after(number), "*": TRIM_HORIZON}
    query = world.query(Start(StartKind.POSITIONS, positions=positions))

    assert query.initial_offset().shards == {S0: after(number), S1: TRIM_HORIZON}


def test_positions_of_a_shard_and_its_child_are_refused():
    world = World()
    world.split()
    positions = {S0: TRIM_HORIZON, S1: TRIM_HORIZON}

    with pytest.raises(SettingsError, match="is a descendant"):
        world.query(Start(StartKind.POSITIONS, positions=positions)).initial_offset()


@pytest.mark.parametrize("step_s", [-3_600.0, 3_600.0])
def test_after_a_step_of_the_clock_iterators_have_the_age_that_executors_see(step_s):
    world = World()
    world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.host_ahead_s += step_s
    world.put()
    hint = query.hints(start, news(query, start))[S0]

    assert hint.iterator is not None
    assert 0.0 <= world.at + world.host_ahead_s - hint.iterator_at < 60.0


def test_a_position_whose_record_expired_gives_no_short_cuts():
    # The reader must see for itself what is gone: rows read past the loss would hide it.
    world = World()
    number = world.put()
    query = world.query()
    start = news(query, query.initial_offset())
    world.put()
    world.wait(25 * 3600)
    world.put()
    query = world.query()

    end = news(query, start)
    hint = query.hints(start, end)[S0]

    assert start.shards[S0] == after(number)
    assert (hint.rows, hint.iterator) == (None, None)


def expired_generations(world):
    """An offset whose children have all expired, with their grandchildren still there."""
    world.put()
    world.split()
    query = world.query()
    start = news(query, query.initial_offset())
    assert start.shards == {S0: SHARD_END}
    world.split(0)
    world.split(2)
    world.wait(25 * 3600)
    return start


def test_a_line_whose_children_all_expired_is_a_loss():
    world = World()
    start = expired_generations(world)

    with pytest.raises(DataLoss, match=f"all children of {S0} expired"):
        news(world.query(), start)


def test_an_allowed_loss_of_a_line_goes_on_at_the_oldest_shards_left():
    world = World()
    start = expired_generations(world)
    number = world.put(1)

    found = batches(world, world.query(fails_on_data_loss=False), start)

    assert sorted(found[0][1].shards) == [f"shardId-{each:012d}" for each in (3, 4, 5, 6)]
    assert [row for _, _, rows in found for row in rows] == [number]


def test_latest_takes_in_a_shard_that_ended_and_whose_children_are_not_listed_yet():
    # Hole 3: leaving it out would leave its children out for good.
    world = World()
    before_split = world.model.list_shards()
    world.split()
    now_listed = world.model.list_shards
    world.model.list_shards = lambda _=None: before_split
    query = world.query(LATEST)
    start = query.initial_offset()
    assert set(start.shards) == {S0}
    world.model.list_shards = now_listed
    number = world.put(1)

    rows = [row for _, _, found in batches(world, query, start) for row in found]

    assert rows == [number]


def test_a_tip_that_is_throttled_on_one_shard_goes_on_on_the_others():
    world = World(2)
    query = world.query()
    start = news(query, query.initial_offset()) if world.put(0) else None
    world.wait(2)
    number = world.put(1)
    world.throttled = 1

    assert world.rows(start, news(query, start)) == [number]


def test_an_end_is_not_asked_of_the_earliest_record():
    with pytest.raises(SettingsError, match="cannot end at the earliest"):
        World().query(end=EARLIEST).bounded()


@pytest.mark.parametrize(("at_s", "filters"), [(EPOCH + 2.5, [EPOCH + 2.5]), (EPOCH + 99.0, [])])
def test_a_start_at_a_time_lists_the_shards_that_were_open_then(at_s, filters):
    world = World()
    world.wait(10.0)
    seen, list_shards = [], world.list_shards

    def noting(shard_filter=None):
        if shard_filter is not None:
            assert shard_filter.kind == "AT_TIMESTAMP"
            seen.append(shard_filter.timestamp)
        return list_shards(shard_filter)

    world.list_shards = noting
    start = world.query(Start(StartKind.TIMESTAMP, round(at_s * 1000))).initial_offset()

    assert seen == filters
    assert start.shards == {S0: at_timestamp(round(at_s * 1000))}
    assert start.aligned_ms == round(at_s * 1000)


@pytest.mark.parametrize(
    ("attempts_max", "failures", "waits"), [(None, 3, 3), (4, 3, 3), (3, 3, 2), (1, 1, 0)]
)
def test_a_call_that_must_succeed_is_repeated_after_pauses_that_grow(attempts_max, failures, waits):
    world = World()
    world.put()
    query = world.query(retry_attempts=attempts_max)
    left, paused = [failures], []
    list_shards = world.list_shards

    def throttled(shard_filter=None):
        if left[0]:
            left[0] -= 1
            raise Throttled("too many", operation="ListShards")
        return list_shards(shard_filter)

    world.list_shards = throttled
    query._wait = paused.append
    if waits < failures:
        with pytest.raises(Throttled):
            query.initial_offset()
    else:
        query.initial_offset()

    assert paused == [backoff_s(attempt + 1, 0.5) for attempt in range(waits)]


def test_a_missing_stream_is_said_to_be_missing():
    world = World()
    query = world.query()
    world.kinesis.delete_stream(world.stream, world.at)

    with pytest.raises(NotFound):
        query.initial_offset()


def test_a_single_answer_holds_parents_and_children_whatever_the_limits():
    # PySpark 4.0 and 4.1 ask once under AvailableNow, and end with success behind the answer.
    world = World()
    for _ in range(40):
        world.put()
        world.wait(100)
    world.split()
    for _ in range(10):
        world.put(0)
        world.put(1)
    query = world.query(records_per_trigger_max=5)

    end = query.everything(query.initial_offset())

    assert len(world.rows(query.initial_offset(), end)) == 60
    assert end.parents == {S1: (S0,), S2: (S0,)}
    assert query.everything(end) is end


def test_what_comes_after_a_single_answer_is_new():
    world = World()
    world.put()
    query = world.query()
    start = query.everything(query.initial_offset())
    world.wait(60)
    numbers = [world.put() for _ in range(3)]

    assert world.rows(start, news(query, start)) == numbers


def test_what_a_progress_holds_is_bounded_by_the_worst_shards_not_by_all():
    # Spark keeps a hundred progress events, with the two offsets and the report of each.
    world = World(300)
    for shard in range(300):
        world.put(shard)
    query = world.query()
    start = news(query, query.initial_offset())
    report = query.report()
    event = [encode_offset(start), encode_offset(start), report]

    assert len(report["shards"]) == REPORTED_MAX
    assert report["shardsTotal"] == 300
    assert report["shardsAtTip"] <= 300
    assert len(json.dumps(event)) < 11_000


def test_a_look_at_which_all_shards_end_relates_the_shards_a_few_times_not_once_a_shard(
    monkeypatch,
):
    made = []

    class Counted(ShardGraph):
        def __init__(self, shards):
            super().__init__(shards)
            made.append(len(self))

    monkeypatch.setattr(lines_module, "ShardGraph", Counted)
    world = World(100)
    query = world.query()
    start = query.latest_offset(query.initial_offset())
    for shard in world.stream.open_shards():
        keys = shard.hash_range
        world.stream.split(shard.shard_id, (keys.start + keys.end) // 2, world.at)
    made.clear()

    for _ in range(20):
        world.wait(1.0)
        start = query.latest_offset(start)
        if len(start.shards) == 200:
            break

    assert len(start.shards) == 200
    # A listing makes two, the answers of a look one more.
    assert len(made) <= 3 * world.calls.count("list")


@pytest.mark.parametrize("shards", [4, 32])
def test_what_the_driver_keeps_of_all_shards_stays_within_one_budget(monkeypatch, shards):
    # 0.65 MB a shard were 6 GB of a driver that plans for ten thousand.
    budget = 2**20
    monkeypatch.setattr(shard_searches, "ROWS_BYTES_TOTAL", budget)
    world = World(shards)
    for _ in range(30):
        world.wait(20)
        for shard in range(shards):
            world.put(shard, data=bytes(10_000))
    query = world.query()
    start = query.initial_offset()

    kept = []
    for _ in range(8):
        start = query.latest_offset(start)
        stretches = [
            page_run
            for each in query._planner.searches.values()
            for page_run in (each.cursor.kept, each.cursor.ahead)
            if page_run is not None
        ]
        ends = [each for one in stretches for each in (one.first, one.last) if each is not None]
        rows = [row for one in stretches for row in one.rows or ()]
        kept.append(sum(len(row.data) for row in {id(row): row for row in [*rows, *ends]}.values()))

    assert max(kept) <= budget
