"""The fetch thread over the embedded Kinesis model: the pitfalls D1 to D6, each a test."""

import itertools
import time
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    MalformedBody,
    NotFound,
    Throttled,
    Unavailable,
)
from kclrun.lease.policy import Pacing
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.reading import FetchedPage, Replay
from kclrun.model.record import IteratorType, PutEntry, Record, StartPoint
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.worker.delivery_queue import Batch, DeliveryQueue, Exhausted, QueueClosed, QueueLimits
from tests.patience import HUNG_S, until
from tests.support.stream_ports import ModelStream
from tests.unit.worker.one_shard import BEGINNING, FIRST, Fetching, Quick, Shard

EXPIRED = ExpiredIterator("too old")
THROTTLED = Throttled("slow down")
KMS = Unavailable("KMSDisabledException")


@pytest.fixture
def shard():
    return Shard()


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (EXPIRED, 0.0),
        (THROTTLED, "after throttle"),
        (KMS, "after error"),
        (MalformedBody("cut off"), "after error"),
    ],
)
def test_what_follows_a_failed_request_is_a_pause_by_its_kind(shard, error, pause):
    class Named(Pacing):
        def after_throttle(self, chance):
            return "after throttle"

        def after_error(self, chance):
            return "after error"

    thread = Fetching(shard, pacing=Named(1.0)).thread

    assert thread._pause_after(error, time.monotonic()) == pause
    assert (thread._outage._since is not None) == (pause == "after error")


def test_an_expired_iterator_goes_on_after_the_last_record_received(shard):
    last = [shard.put(b"a"), shard.put(b"b")][-1]
    with Fetching(shard) as fetching:
        assert fetching.payloads(2) == [b"a", b"b"]
        shard.trouble.append(EXPIRED)
        until(lambda: len(shard.starts) == 2)
        shard.put(b"c")
        assert fetching.payloads(1) == [b"c"]

    assert shard.starts == [BEGINNING, StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, last)]
    assert fetching.warnings == []


def test_an_empty_page_at_the_tip_idles(shard):
    with Fetching(shard, pacing=Pacing(0.3, floor_s=0.001)) as fetching:
        until(lambda: len(shard.fetched_at) >= 2)
        assert fetching.thread.view.at_tip

    assert shard.fetched_at[1] - shard.fetched_at[0] >= 0.29


def test_a_shard_that_trickles_is_read_no_more_often_than_every(shard):
    pacing = Pacing(0.05, floor_s=0.001, every_s=0.05)
    with Fetching(shard, pacing=pacing) as fetching:
        for number in range(6):
            shard.put(str(number).encode())
            assert fetching.payloads(1) == [str(number).encode()]

    gaps = [after - before for before, after in itertools.pairwise(shard.fetched_at)]
    assert min(gaps) >= 0.049


def test_throttling_keeps_the_iterator_and_is_no_outage(shard):
    shard.trouble += [THROTTLED, THROTTLED, THROTTLED]
    shard.put(b"a")

    with Fetching(shard) as fetching:
        assert fetching.payloads(1) == [b"a"]

    assert len(shard.starts) == 1
    assert len(set(shard.iterators[:4])) == 1
    assert fetching.warnings == []


def test_records_that_come_with_the_end_are_delivered_before_it(shard):
    shard.put(b"a")
    shard.split()

    with Fetching(shard) as fetching:
        assert fetching.payloads(1) == [b"a"]
        end = fetching.task()
        fetching.thread.join(HUNG_S)
        assert not fetching.thread.is_alive()

    assert isinstance(end, Exhausted)
    assert [child.shard_id for child in end.children] == [
        "shardId-000000000001",
        "shardId-000000000002",
    ]


def test_an_end_without_children_is_believed_only_from_the_listing(shard):
    shard.silent_end = True
    shard.put(b"a")
    last = shard.put(b"b")
    shard.trouble.append(FetchedPage([], None, 0))  # the shard is open: the service lost its place

    with Fetching(shard) as fetching:
        assert fetching.payloads(2) == [b"a", b"b"]
        shard.trouble.append(FetchedPage([], None, 0))
        until(lambda: len(shard.starts) == 3)
        shard.split()
        assert fetching.task() == Exhausted(())

    assert shard.starts[:3] == [
        BEGINNING,
        BEGINNING,
        StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, last),
    ]


@pytest.mark.parametrize("error", [KMS, AccessDenied("no"), MalformedBody("cut off")])
def test_errors_are_waited_out_with_one_warning_for_the_outage_and_one_for_its_end(shard, error):
    shard.trouble += [error] * 5
    shard.put(b"a")

    # A million times as fast: the outage lasts some seconds of that.
    with Fetching(shard, now=lambda: time.monotonic() * 1e6) as fetching:
        assert fetching.payloads(1) == [b"a"]
        until(lambda: len(fetching.warnings) == 2)

    assert "reading the shard fails and is tried again" in fetching.warnings[0]
    assert "works again after" in fetching.warnings[1]
    assert len(shard.starts) == 1


class Patient(Quick):
    """Waits long after an error."""

    def after_error(self, chance):
        return HUNG_S


def test_after_a_failed_request_no_answer_is_awaited(shard):
    shard.trouble.append(KMS)

    with Fetching(shard, pacing=Patient()) as fetching:
        until(lambda: not shard.trouble)
        until(lambda: fetching.thread.view.asking_since_instant == 0.0)

        assert len(shard.fetched_at) == 1


def test_a_page_wholly_at_the_checkpoint_is_left_out(shard):
    number = shard.put(b"a")
    with Fetching(
        shard,
        start=StartPoint(IteratorType.AT_SEQUENCE_NUMBER, number),
        checkpoint=ExtendedSequenceNumber(number),
    ) as fetching:
        until(lambda: len(shard.fetched_at) > 1)
        shard.put(b"b")
        assert [record.data for record in fetching.task().records] == [b"b"]


def test_a_page_whose_user_records_are_all_dropped_moves_the_position_on(shard):
    number = shard.put(build_aggregate([("k", b"x", str(2**127)), ("k", b"y", str(2**127 + 1))]))

    with Fetching(shard, kpl_range="drop", hash_range=HashRange(0, 2**127 - 1)) as fetching:
        batch = fetching.task()

    assert batch == Batch((), ExtendedSequenceNumber(number), 0, batch.millis_behind_latest)


def test_an_error_that_is_none_of_the_services_is_reported_and_not_swallowed(shard):
    shard.trouble.append(ZeroDivisionError("a bug"))

    with Fetching(shard) as fetching:
        until(lambda: fetching.broken)

    assert isinstance(fetching.broken[0], ZeroDivisionError)


def test_a_full_queue_holds_the_fetch_thread_and_closing_it_lets_it_go(shard):
    fetching = Fetching(shard)
    fetching.queue = DeliveryQueue(QueueLimits(buffer_bytes=1, batch_max=1), time.monotonic)
    fetching.thread._queue = fetching.queue
    shard.put(b"a")
    fetching.thread.start()
    until(lambda: len(shard.fetched_at) > 1)
    shard.put(b"b")
    until(lambda: shard.iterators)

    fetching.queue.close()
    fetching.thread.join(HUNG_S)

    assert not fetching.thread.is_alive()
    assert fetching.queue.next_task() == QueueClosed()


def test_among_several_streams_the_children_of_a_shard_are_qualified_with_its_stream():
    orders = "123456789012:orders:1700000000"
    shard = Shard()
    shard.split()

    with Fetching(shard, stream=orders) as fetching:
        task = fetching.task()

    assert isinstance(task, Exhausted)
    assert {child.shard_id for child in task.children} == {
        f"{orders}:shardId-000000000001",
        f"{orders}:shardId-000000000002",
    }
    assert {child.parents for child in task.children} == {(f"{orders}:{FIRST}",)}


def test_a_shard_that_was_trimmed_while_it_was_held_ends_after_two_listings(shard):
    shard.put(b"lost")
    shard.split()
    shard.expire()

    with Fetching(shard) as fetching:
        assert fetching.task() == Exhausted((), is_expired=True)

    assert shard.listings == 2


def test_what_was_fetched_before_the_shard_was_trimmed_is_given_before_its_end(shard):
    shard.put(b"a")
    with Fetching(shard) as fetching:
        until(lambda: len(shard.fetched_at) > 1)
        shard.split()
        shard.expire()
        assert fetching.payloads(1) == [b"a"]
        assert fetching.task().is_expired


def test_records_that_expired_before_a_start_are_reported_and_reading_goes_on():
    hour_s, clock = 3600, [WallTime(1_000_000_000.0)]
    kinesis = Kinesis(KinesisSettings(), b"head".ljust(32))
    kinesis.create_stream("s", 1, clock[0])
    clock[0] += 60
    stream = ModelStream(kinesis, "s", lambda: clock[0])
    numbers = []
    for data in (b"processed", b"expired", b"left"):
        [put] = stream.put([PutEntry(data, "k")])
        numbers.append(put.sequence_number)
        clock[0] += 6 * hour_s
    clock[0] += 13 * hour_s  # 31, 25 and 19 hours ago: the first two are gone
    start = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, numbers[0])
    position = ExtendedSequenceNumber(numbers[0])

    with Fetching(stream, start=start, checkpoint=position) as fetching:
        assert fetching.payloads(1) == [b"left"]

    [(last, text)] = fetching.lost
    assert last == position
    assert "keeps records for 24 h" in text


def test_records_are_lost_after_what_was_fetched_last_or_else_after_the_checkpoint(shard):
    at, fetched = ExtendedSequenceNumber("5"), ExtendedSequenceNumber("7")
    fetching = Fetching(shard, checkpoint=at)
    thread = fetching.thread
    thread._head = SimpleNamespace(took=lambda page: False, loss=lambda: "gone")

    thread._check_head(None)
    thread.view = msgspec.structs.replace(thread.view, fetched=fetched)
    thread._check_head(None)

    assert fetching.lost == [(at, "gone"), (fetched, "gone")]


def test_a_listing_that_fails_is_no_evidence_and_is_made_again(shard):
    shard.split()
    shard.expire()
    shard.listing_trouble.extend([Unavailable("503"), NotFound("the stream is being deleted")])

    with Fetching(shard) as fetching:
        assert fetching.task().is_expired

    assert shard.listings == 4


def test_a_page_of_tiny_user_records_is_laid_down_in_parts_as_there_is_room():
    shard = Shard()
    last = [shard.put(build_aggregate([("k", b"", None)] * 20_000)) for _ in range(4)][-1]

    with Fetching(shard) as fetching:
        sizes = []
        while sum(sizes) < 80_000:
            # Less than the queue's 30,000 and one aggregate more are ever on it.
            assert fetching.queue._fetched.records_ahead < 30_000 + 40_000
            batch = fetching.task()
            sizes.append(len(batch.records))

    assert (sum(sizes), max(sizes)) == (80_000, 10_000)
    assert batch.last == ExtendedSequenceNumber(last, 19_999)


class Meter:
    """Notes what it is given; has a report for each page."""

    def __init__(self):
        self.pages, self.users, self.throttles = [], [], 0

    def took(self, records, behind_ms, now):
        self.pages.append((list(records), behind_ms))

    def opened(self, records):
        self.users.append(list(records))

    def throttled(self, now):
        self.throttles += 1

    def report(self, now):
        return len(self.pages)


def test_each_page_is_measured_as_the_service_counts_it_and_as_its_user_records(shard):
    users = [("a", b"1", None), ("b", b"2", None)]
    shard.put(build_aggregate(users))
    shard.trouble.append(THROTTLED)
    shard.behind = 9
    meter = Meter()

    with Fetching(shard, meter=meter) as fetching:
        assert fetching.payloads(2) == [b"1", b"2"]
        until(lambda: len(fetching.heats) >= 2)

    (page, behind_ms), (empty, _) = meter.pages[:2]
    assert ([len(page), len(empty)], behind_ms) == ([1, 0], 9)
    assert [[record.partition_key for record in part] for part in meter.users] == [["a", "b"]]
    assert meter.throttles == 1
    assert fetching.heats[:2] == [1, 2]


def test_a_page_without_aggregates_is_measured_once(shard):
    shard.put(b"a")
    meter = Meter()

    with Fetching(shard, meter=meter) as fetching:
        assert fetching.payloads(1) == [b"a"]

    assert meter.users == []


T2 = WallTime(1_000.0)


def page(arrivals, *, behind=0, served_at=None, following="next"):
    records = [Record(b"%d" % n, "k", str(n), float(at)) for n, at in arrivals]
    return FetchedPage(records, following, behind, served_at=served_at)


@pytest.mark.parametrize(
    ("pages", "delivered"),
    [
        # The first record at or after the end decides, also where a later one is before it.
        ([page([(1, 998), (2, 999.999), (3, 1000), (4, 999)])], [b"1", b"2"]),
        ([page([(1, 1)]), page([(2, 1000)])], [b"1"]),
        # Without such a record: the open shard is read beyond the end, and the service says so.
        ([page([(1, 1)]), page([], behind=0, served_at=1002.4), page([(2, 999)]),
          page([], behind=7_500, served_at=1010.0)], [b"1", b"2"]),
    ],
)  # fmt: skip
def test_a_replay_ends_at_its_first_record_behind_the_range_or_behind_the_range_itself(
    shard, pages, delivered
):
    shard.trouble.extend(pages)

    with Fetching(shard, replay=Replay(until_at=T2)) as fetching:
        assert fetching.payloads(len(delivered)) == delivered
        tasks = [fetching.task()]
        while not isinstance(tasks[-1], Exhausted):
            tasks.append(fetching.task())
        assert not fetching.thread.view.at_tip

    assert [task.records for task in tasks[:-1]] == [[]] * (len(tasks) - 1)
    assert tasks[-1] == Exhausted(())
    assert not shard.trouble


def test_a_replay_reads_a_closed_shard_to_its_end_because_children_may_be_of_the_range(shard):
    shard.silent_end = True
    shard.split()
    shard.trouble.append(page([], served_at=9_999.0))  # past the range, and the shard is closed

    with Fetching(shard, replay=Replay(until_at=T2)) as fetching:
        end = fetching.task()

    assert [child.shard_id for child in end.children] == [
        "shardId-000000000001",
        "shardId-000000000002",
    ]


def test_records_of_other_keys_than_those_of_a_replay_are_counted_and_move_the_position_on(shard):
    records = [Record(b"%d" % n, f"key-{n % 3}", str(n), 1.0) for n in range(1, 6)]
    shard.trouble.append(FetchedPage(records, "next", 0))

    with Fetching(shard, replay=Replay(until_at=T2, keys=("key-1",))) as fetching:
        batch = fetching.task()
        until(lambda: fetching.thread.view.passed_over_total == 3)

    assert [record.data for record in batch.records] == [b"1", b"4"]
    assert batch.last == ExtendedSequenceNumber("5")


def test_a_shard_is_idle_since_the_first_answer_without_a_record_at_its_end(shard):
    thread = Fetching(shard).thread
    seen = []
    for each in (
        page([], behind=5_000, served_at=10.0),  # a gap before the end
        page([], served_at=11.0),
        page([], served_at=13.0),
        page([(1, 13.5)], served_at=14.0),
        page([]),  # an answer without a time says nothing
        page([], served_at=16.0),
    ):
        assert thread._put(each)
        seen.append(thread.view.quiet)

    assert seen == [None, (11.0, 11.0), (11.0, 13.0), None, None, (16.0, 16.0)]
