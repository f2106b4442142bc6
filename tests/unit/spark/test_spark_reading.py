"""A6: ranges of shards read to their exact ends, over the stream model in virtual time."""

import logging
import random
import re
import threading
import time
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from kclrun.codec.aggregator import build_aggregate
from kclrun.errors import AccessDenied, DataLoss, InvalidRequest, Unavailable
from kclrun.local.limits import AWS_LIMITS
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, StartPoint
from kclrun.spark.executor.reading import Clocks
from kclrun.spark.offsets import Hint, ShardRange
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, at_timestamp, before
from tests.patience import HUNG_S, until
from tests.unit.spark.reading_world import HOUR_S, World, empty, refusal


def warnings_in(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def hinted(world, position, **more):
    """A hint whose token stands at a record (`before`) or behind it, made now."""
    at = IteratorType.AT_SEQUENCE_NUMBER
    kind = at if position.is_before else IteratorType.AFTER_SEQUENCE_NUMBER
    token = world.port.iterator(world.shard_ids[0], StartPoint(kind, position.number))
    return Hint(iterator=token, iterator_at=world.now, **more)


@pytest.fixture
def world():
    """A stream of one shard."""
    return World()


# Ends


@pytest.mark.parametrize("page_max", [1, 3, 10_000])
def test_a_range_is_read_from_its_beginning_to_its_end_and_no_further(page_max):
    world = World(page_max=page_max)
    n = world.put(20)

    assert world.numbers(world.range(before(n[3]), after(n[8]))) == n[3:9]
    assert world.numbers(world.range(before(n[3]), before(n[8]))) == n[3:8]
    assert world.numbers(world.range(after(n[3]), after(n[8]))) == n[4:9]
    assert world.numbers(world.range(after(n[3]), before(n[8]))) == n[4:8]
    assert world.numbers(world.range(TRIM_HORIZON, after(n[8]))) == n[:9]
    assert world.numbers(world.range(after(n[3]), before(n[4]))) == []


def test_a_range_from_a_time_begins_with_the_first_record_that_arrived_by_then(world):
    world.put(5, every_s=1)
    at_ms = int(world.now * 1000)
    n = world.put(5, every_s=1)

    assert world.numbers(world.range(at_timestamp(at_ms), after(n[3]))) == n[:4]


@pytest.mark.parametrize("starts_at", ["horizon", "before", "after"])
@pytest.mark.parametrize("lags_ms", [(0,), (0, 5000)])
def test_neither_empty_pages_nor_zero_lag_nor_time_end_a_range(starts_at, lags_ms, caplog):
    world = World(page_max=1)
    n = world.put(6)
    begin, first = {
        "horizon": (TRIM_HORIZON, 0),
        "before": (before(n[0]), 0),
        "after": (after(n[0]), 1),
    }[starts_at]
    hidden_until = world.now + 1800

    def lagging_front_end(call):
        seen = world.calls.count("fetch")
        if call == "fetch" and seen > 1 and world.now < hidden_until:
            return empty(token, behind_ms=lags_ms[seen % len(lags_ms)])
        return None

    token = world.port.iterator(
        world.shard_ids[0], StartPoint(IteratorType.AFTER_SEQUENCE_NUMBER, n[0])
    )
    world.fault = lagging_front_end

    assert world.numbers(world.range(begin, after(n[5]))) == n[first:]
    assert world.now >= hidden_until
    assert world.calls.count("fetch") > 1000
    [warning] = warnings_in(caplog)
    assert f"has given no record for 120 s, still waiting for {n[5]}" in warning


def test_a_null_iterator_before_the_bound_is_an_error(world):
    n = world.put(4)
    world.stream.split(world.shard_ids[0], 2**127, world.wall())
    beyond = str(int(n[3]) + 1)

    with pytest.raises(DataLoss, match=f"ended before the record .* {beyond}"):
        world.read(world.range(before(n[0]), after(beyond)))


def test_a_null_iterator_that_names_no_children_is_not_believed_at_once():
    world = World(page_max=2)
    n = world.put(6)
    parent = world.shard_ids[0]
    world.stream.split(parent, 2**127, world.wall())
    said = []

    def service_that_loses_its_place(call):
        if call == "fetch" and world.calls.count("fetch") == 2:
            said.append(world.now)
            return FetchedPage(records=[], next_iterator=None, millis_behind_latest=0)
        return None

    world.fault = service_that_loses_its_place

    assert world.numbers(world.range(before(n[0]), SHARD_END, shard=parent)) == n
    assert said


# Losses


def trimmed(**options):
    """Ten records, of which the retention has taken the first five."""
    world = World(**options)
    old = world.put(5)
    world.now += 20 * HOUR_S
    tip_ms = int(world.now * 1000)
    world.now += HOUR_S
    new = world.put(5)
    world.now += 4 * HOUR_S
    return world, old + new, tip_ms


def test_records_that_were_trimmed_before_they_were_read_are_a_loss():
    world, n, _ = trimmed()

    with pytest.raises(DataLoss, match=f"begins with, {n[2]}, was trimmed"):
        world.read(world.range(before(n[2]), after(n[8])))
    with pytest.raises(DataLoss, match=f"goes on after, {n[2]}, was trimmed") as raised:
        world.read(world.range(after(n[2]), after(n[8])))

    assert world.shard_ids[0] in str(raised.value)
    assert "failOnDataLoss" in str(raised.value)


def test_a_trimmed_position_is_no_loss_if_the_tip_was_seen_less_than_the_retention_ago():
    world, n, tip_ms = trimmed()

    found = world.numbers(world.range(after(n[4]), after(n[8]), as_of_ms=tip_ms))

    assert found == n[5:9]
    assert world.calls.count("summary") == 1


def test_a_trimmed_position_is_a_loss_if_the_tip_was_seen_longer_ago_than_the_retention():
    world, n, tip_ms = trimmed()
    long_ago = tip_ms - int(20 * HOUR_S * 1000)

    with pytest.raises(DataLoss, match="longer ago than the 24 h"):
        world.read(world.range(after(n[4]), after(n[8]), as_of_ms=long_ago))


def test_a_clock_of_this_host_that_is_wrong_neither_makes_a_loss_nor_hides_one():
    world, n, tip_ms = trimmed()
    long_ago = tip_ms - int(20 * HOUR_S * 1000)
    fast = replaced(world.clocks, wall=lambda: world.now + 100 * HOUR_S)
    slow = replaced(world.clocks, wall=lambda: world.now - 100 * HOUR_S)

    read = world.range(after(n[4]), after(n[8]), as_of_ms=tip_ms)
    assert world.numbers(read, clocks=fast) == n[5:9]
    with pytest.raises(DataLoss):
        world.numbers(world.range(after(n[4]), after(n[8]), as_of_ms=long_ago), clocks=slow)


def test_a_record_that_is_still_to_be_read_is_lost_whenever_the_tip_was_seen():
    world, n, tip_ms = trimmed()

    with pytest.raises(DataLoss, match="begins with"):
        world.read(world.range(before(n[4]), after(n[8]), as_of_ms=tip_ms))
    with pytest.raises(DataLoss, match="that the lease was at"):
        world.read(world.range(after(n[4], 2), after(n[8]), as_of_ms=tip_ms))


def test_where_loss_is_tolerated_one_warning_is_logged_and_the_rest_is_read(caplog):
    world, n, _ = trimmed()

    found = world.numbers(world.range(before(n[2]), after(n[8])), fails_on_data_loss=False)

    assert found == n[5:9]
    assert len(warnings_in(caplog)) == 1
    assert "goes on with what is left" in warnings_in(caplog)[0]


def test_where_the_bound_is_gone_too_a_tolerant_reader_ends_before_the_first_record_beyond(caplog):
    world, n, _ = trimmed()

    pages = list(world.pages(world.range(before(n[1]), after(n[3])), fails_on_data_loss=False))

    assert [(page.records, page.is_last) for page in pages] == [([], True)]
    assert len(warnings_in(caplog)) == 1
    with pytest.raises(DataLoss):
        world.read(world.range(TRIM_HORIZON, after(n[3])))


def test_a_shard_that_is_trimmed_to_nothing_is_a_loss_and_no_endless_wait(world, caplog):
    n = world.put(5)
    world.now += 30 * HOUR_S
    began = world.now

    with pytest.raises(DataLoss, match="was trimmed"):
        world.read(world.range(after(n[0]), after(n[3])))
    assert world.read(world.range(after(n[0]), after(n[3])), fails_on_data_loss=False) == []

    assert len(warnings_in(caplog)) == 1
    assert world.now - began < 300


@pytest.mark.parametrize("begin", [TRIM_HORIZON, at_timestamp(1_700_000_000_000)])
def test_a_range_from_the_horizon_or_a_time_does_not_wait_for_ever_for_what_was_trimmed(
    world, begin, caplog
):
    n = world.put(5)
    world.now += 30 * HOUR_S

    with pytest.raises(DataLoss, match=f"ends at, {n[3]}, was trimmed"):
        world.read(world.range(begin, after(n[3])))
    assert warnings_in(caplog) == []
    assert world.read(world.range(begin, after(n[3]), is_from_horizon=True)) == []
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("count", [0, 5])
def test_a_shard_that_ends_late_is_waited_for(world, count):
    n = world.put(count)
    parent = world.shard_ids[0]
    closes_at = world.now + 600

    def closes_late(call):
        if world.now >= closes_at and len(world.stream.open_shards()) == 1:
            world.stream.split(parent, 2**127, world.wall())

    world.fault = closes_late

    assert world.numbers(world.range(TRIM_HORIZON, SHARD_END, shard=parent)) == n
    assert world.now >= closes_at


def test_a_shard_that_the_stream_has_forgotten_is_a_loss(world, caplog):
    n = world.put(5)
    parent = world.shard_ids[0]
    world.stream.split(parent, 2**127, world.wall())
    world.now += 30 * HOUR_S
    wanted = world.range(after(n[0]), SHARD_END, shard=parent)

    with pytest.raises(DataLoss, match="shard is not in the stream any more"):
        world.read(wanted)
    tolerant = list(world.pages(wanted, fails_on_data_loss=False))

    assert [(page.records, page.is_last) for page in tolerant] == [([], True)]
    assert len(warnings_in(caplog)) == 1


def test_a_start_at_the_horizon_only_warns_when_the_horizon_has_moved(caplog):
    world, n, _ = trimmed()

    found = world.numbers(world.range(before(n[0]), after(n[8]), is_from_horizon=True))

    assert found == n[5:9]
    assert len(warnings_in(caplog)) == 1


def test_a_closed_shard_of_which_nothing_is_left_ends_without_waiting(world):
    n = world.put(5)
    parent = world.shard_ids[0]
    world.now += 23 * HOUR_S
    tip_ms = int(world.now * 1000)
    world.stream.split(parent, 2**127, world.wall())
    world.now += 2 * HOUR_S

    assert world.numbers(world.range(after(n[4]), SHARD_END, shard=parent, as_of_ms=tip_ms)) == []
    assert world.calls == ["AT_SEQUENCE_NUMBER", "fetch", "summary"]
    with pytest.raises(DataLoss):
        world.read(world.range(after(n[3]), SHARD_END, shard=parent))


def test_a_closed_shard_that_is_trimmed_in_part_is_a_loss_too(world):
    n = world.put(5)
    parent = world.shard_ids[0]
    world.now += 23 * HOUR_S
    world.stream.split(parent, 2**127, world.wall())
    world.now += 2 * HOUR_S

    with pytest.raises(DataLoss, match="goes on after"):
        world.read(world.range(after(n[0]), SHARD_END, shard=parent))


def test_losses_name_no_key_and_no_payload(world, caplog):
    n = world.put(3, data=b"SECRETPAYLOAD")
    world.now += 30 * HOUR_S
    world.put(1)

    with pytest.raises(DataLoss) as raised:
        world.read(world.range(after(n[0]), after(n[2])))
    world.read(world.range(after(n[0]), after(n[2])), fails_on_data_loss=False)

    reported = str(raised.value) + "".join(warnings_in(caplog))
    assert "SECRET" not in reported
    assert "key-" not in reported


# Hints


@pytest.mark.parametrize("where", [after, before])
def test_a_fresh_token_of_the_driver_is_read_at_once(world, where):
    n = world.put(9)
    begin = where(n[2])

    found = world.numbers(world.range(begin, after(n[7]), hint=hinted(world, begin)))

    assert found == (n[3:8] if where is after else n[2:8])
    assert world.calls == ["fetch"]


def test_a_token_that_expired_on_the_way_or_is_garbage_costs_only_a_call(world):
    n = world.put(9)
    for hint in (
        Hint(iterator=hinted(world, after(n[2])).iterator, iterator_at=world.now + 400),
        Hint(iterator="garbage", iterator_at=world.now + 400),
    ):
        world.calls.clear()
        world.now += 301

        assert world.numbers(world.range(after(n[2]), after(n[7]), hint=hint)) == n[3:8]
        assert world.calls == ["fetch", "AT_SEQUENCE_NUMBER", "fetch"]


@pytest.mark.parametrize("begin_at", [after, before])
@pytest.mark.parametrize("stands_at", [0, 1, 3, 5, 8])
def test_a_token_that_stands_elsewhere_changes_no_row(world, begin_at, stands_at):
    # A token a few records too far within the range is the one thing that cannot be told: the
    # driver's own rule is to hand over only the token it holds at the very position.
    n = world.put(9)
    begin = begin_at(n[3])
    wrong = hinted(world, after(n[stands_at]))

    found = world.numbers(world.range(begin, after(n[5]), hint=wrong))

    assert found == (n[4:6] if begin_at is after else n[3:6])


def test_rows_of_the_driver_need_no_request(world):
    n = world.put(5)
    rows = tuple(world.read(world.range(after(n[0]), after(n[3]))))
    world.calls.clear()

    found = list(world.pages(world.range(after(n[0]), after(n[3]), hint=Hint(rows=rows))))

    assert [record for page in found for record in page.records] == list(rows)
    assert [page.is_last for page in found] == [True]
    assert world.calls == []


def test_an_expectation_that_was_too_low_is_exceeded_in_steps_and_then_given_up(world):
    n = world.put(2_000)
    last = 1_600

    found = world.numbers(world.range(after(n[0]), after(n[last]), hint=Hint(records_expected=100)))

    assert found == n[1 : last + 1]
    assert world.limits == [112, 250, 522, 1566]


# Aggregates


def aggregate(*payloads):
    return build_aggregate([("key", payload, None) for payload in payloads])


def test_aggregates_are_opened_and_begin_inside_one_is_respected(world):
    [first] = world.put(data=aggregate(b"a", b"b", b"c"))
    [second] = world.put(data=b"plain")
    [third] = world.put(data=aggregate(b"d", b"e"))

    def payloads(begin, **options):
        return [each.data for each in world.read(world.range(begin, after(third)), **options)]

    assert payloads(before(first)) == [b"a", b"b", b"c", b"plain", b"d", b"e"]
    assert payloads(after(first, 0)) == [b"b", b"c", b"plain", b"d", b"e"]
    assert payloads(after(first, 2)) == [b"plain", b"d", b"e"]
    assert payloads(after(first)) == [b"plain", b"d", b"e"]
    assert payloads(after(second)) == [b"d", b"e"]
    closed = payloads(after(first, 1), opens_aggregates=False)
    assert closed == [aggregate(b"a", b"b", b"c"), b"plain", aggregate(b"d", b"e")]
    # Of these records nothing is left: a lease's position is always one of a user record.
    for begin, left in ((after(first, 2), [b"plain"]), (after(second, 0), [])):
        closed = payloads(begin, opens_aggregates=False)
        assert closed == [*left, aggregate(b"d", b"e")]


def test_a_page_of_large_aggregates_is_opened_in_pieces(world):
    [first, *_, last] = world.put(6, data=aggregate(*[b"x" * 900_000]))

    found = list(world.pages(world.range(before(first), after(last))))

    assert [len(page.records) for page in found] == [2, 2, 2]
    assert [page.is_last for page in found] == [False, False, True]


# Several shards


def test_every_range_is_read_in_its_order_and_ends_once():
    world = World(shards=20, page_max=7)
    n = {shard: world.put(30, shard=shard) for shard in world.shard_ids}
    ranges = [world.range(after(n[each][0]), before(n[each][25]), shard=each) for each in n]

    pages = list(world.pages(*ranges))

    for shard, numbers in n.items():
        mine = [page for page in pages if page.range.shard_id == shard]
        assert [each.sequence_number for page in mine for each in page.records] == numbers[1:25]
        assert [page.is_last for page in mine] == [False] * (len(mine) - 1) + [True]


def test_eight_shards_are_opened_at_once_and_no_more():
    world = World(shards=21)
    n = {shard: world.put(3, shard=shard) for shard in world.shard_ids}
    wanted = [
        world.range(before(each[0]), after(each[2]), shard=shard) for shard, each in n.items()
    ]
    known = replace(wanted[0], hint=Hint(rows=()))
    arrived = threading.Semaphore(0)
    may_go_on = threading.Event()
    open_iterator = world.iterator

    def held_back(*wanted):
        arrived.release()
        assert may_go_on.wait(HUNG_S)
        return open_iterator(*wanted)

    world.iterator = held_back
    pages = world.pages(known, *wanted[1:])
    next(pages)

    # All eight have asked before any was answered; that is all the threads there are.
    assert all(arrived.acquire(timeout=HUNG_S) for _ in range(8))
    assert len(_reading_threads()) == 8
    may_go_on.set()
    assert sum(len(page.records) for page in pages) == 60


def test_no_shard_is_read_more_than_a_page_ahead():
    world = World(page_max=10)
    n = world.put(200)
    taken = 0
    ahead = []
    # Beside the page that is worked on, which counts as taken once it is handed out.
    world.fault = lambda call: ahead.append(world.calls.count("fetch") - 1 - taken)

    for _ in world.pages(world.range(before(n[0]), after(n[199]))):
        # The page that waits, and none besides, however long this one is worked on.
        taken += 1
        _until_fetched(world, min(taken + 1, 20))

    assert taken == 20
    assert max(ahead) <= 1


def _fails():
    raise refusal("down")


@pytest.mark.parametrize(
    "answer", [lambda: empty("anywhere"), _fails], ids=["waiting for records", "in an outage"]
)
@pytest.mark.parametrize("rate", [0.001, 1e9])
def test_a_closed_iterator_leaves_no_thread_behind(answer, rate):
    world = World(shards=3)
    n = {shard: world.put(3, shard=shard) for shard in world.shard_ids}
    world.fault = lambda call: answer() if call == "fetch" else None
    wanted = [
        world.range(before(each[0]), after(each[2]), shard=shard) for shard, each in n.items()
    ]
    known = replace(wanted[0], hint=Hint(rows=()))

    # After the first calls a pause of a thousand seconds, or none ever.
    pages = world.pages(known, *wanted[1:], clocks=Clocks(), reads_per_second_max=rate)
    next(pages)
    _until_fetched(world, 2)
    began = time.monotonic()
    pages.close()

    assert time.monotonic() - began < HUNG_S
    assert _reading_threads() == []


def test_an_error_of_one_shard_ends_the_reading_of_all():
    world = World(shards=4)
    n = {shard: world.put(3, shard=shard) for shard in world.shard_ids}
    wanted = [
        world.range(before(each[0]), after(each[2]), shard=shard) for shard, each in n.items()
    ]
    wanted[2] = world.range(TRIM_HORIZON, after("5"), shard="shardId-000000000099")
    world.fault = lambda call: empty("anywhere") if call == "fetch" else None

    # A missing shard is looked for during ten seconds of this clock.
    hurried = Clocks(
        monotonic=lambda: 100 * time.monotonic(), sleep=lambda seconds: time.sleep(seconds / 100)
    )

    with pytest.raises(DataLoss, match="shardId-000000000099"):
        world.read(*wanted, clocks=hurried)

    assert _reading_threads() == []


def _reading_threads():
    return [each for each in threading.enumerate() if each.name.startswith("kclrun-read")]


def _until_fetched(world, count):
    until(lambda: world.calls.count("fetch") >= count, every_s=0.001)


# Pace, throttling, outages


def test_a_shard_is_read_at_the_rate_that_is_set():
    world = World(page_max=10)
    n = world.put(200)
    began = world.now
    times = []
    world.fault = lambda call: times.append(world.now - began) if call == "fetch" else None

    world.read(world.range(before(n[0]), after(n[199])), reads_per_second_max=2.5)

    assert times[:2] == [0, 0]
    assert times[-1] == pytest.approx((20 - 2) / 2.5)
    assert all(later - at >= 2 - 1e-6 for at, later in zip(times[2:], times[7:], strict=False))


def test_throttling_by_the_service_is_waited_out():
    world = World(page_max=5, limits=AWS_LIMITS)
    n = world.put(100)

    found = world.numbers(world.range(before(n[0]), after(n[99])), reads_per_second_max=50)

    assert found == n
    assert world.calls.count("fetch") > 20


def test_an_outage_is_waited_out_without_end_and_said_once(world, caplog):
    n = world.put(10)
    up_at = world.now + 2 * HOUR_S

    def outage(call):
        if world.now < up_at:
            raise refusal("down")

    world.fault = outage
    # No iterator lives that long: the token made before the outage is of no use after it.
    found = world.numbers(world.range(after(n[0]), after(n[9]), hint=hinted(world, after(n[0]))))

    assert found == n[1:]
    assert len(warnings_in(caplog)) == 1
    assert re.search(r"cannot be read for 3\d s now, still trying", warnings_in(caplog)[0])


@pytest.mark.parametrize(("outage_s", "said"), [(25.0, 0), (35.0, 2)])
def test_an_outage_of_half_a_minute_is_said_each_time(outage_s, said, caplog):
    world = World(page_max=1)
    n = world.put(3)
    began = []

    def outages(call):
        reads = world.calls.count("fetch")
        if call == "fetch" and reads > len(began) < 2:
            began.append(world.now)
        if began and world.now < began[-1] + outage_s:
            world.calls.remove("fetch")  # it counts once it is answered
            raise refusal("down")

    world.fault = outages

    assert world.numbers(world.range(before(n[0]), after(n[2]))) == n
    assert len(warnings_in(caplog)) == said


def test_attempts_can_be_bounded(world):
    n = world.put(2)

    def outage(call):
        raise refusal("down")

    world.fault = outage

    with pytest.raises(Unavailable, match=world.shard_ids[0]):
        world.read(world.range(before(n[0]), after(n[1])), retry_attempts=3)
    assert world.calls == ["AT_SEQUENCE_NUMBER"] * 3


def test_iterators_that_always_expire_are_bounded_too(world):
    n = world.put(2)

    def broken(call):
        if call == "fetch":
            raise refusal("expired")

    world.fault = broken

    with pytest.raises(Exception, match="expired"):
        world.read(world.range(before(n[0]), after(n[1])), retry_attempts=4)
    assert world.calls.count("fetch") == 4


def test_what_no_attempt_would_repair_is_raised_at_once_and_says_what_may(world):
    n = world.put(2)

    def denied(call):
        raise AccessDenied("GetRecords: AccessDeniedException: no", operation="GetRecords")

    world.fault = denied
    with pytest.raises(AccessDenied, match="kinesis:GetShardIterator") as raised:
        world.read(world.range(before(n[0]), after(n[1])))
    assert world.shard_ids[0] in str(raised.value)

    world.fault = lambda call: None
    with pytest.raises(InvalidRequest, match="new checkpoint location"):
        world.read(world.range(before("123"), after("456")))
    assert len(world.calls) == 2


# Everything together


@pytest.mark.parametrize("seed", range(60))
def test_a_range_gives_the_same_records_whatever_goes_wrong(seed):
    chance = random.Random(seed)
    world = World(page_max=chance.choice([1, 3, 10, 10_000]))
    n = world.put(40)
    closed = chance.random() < 0.3
    parent = world.shard_ids[0]
    if closed:
        world.stream.split(parent, 2**127, world.wall())
    first, last = sorted(chance.sample(range(40), 2))
    begin = chance.choice([TRIM_HORIZON, before(n[first]), after(n[first])])
    end = chance.choice([SHARD_END] if closed else [before(n[last]), after(n[last])])
    low = {TRIM_HORIZON: 0, before(n[first]): first}.get(begin, first + 1)
    high = {before(n[last]): last, after(n[last]): last + 1}.get(end, 40)
    hint = Hint(records_expected=chance.choice([None, 1, 10, 100]))
    if begin != TRIM_HORIZON and chance.random() < 0.5:
        hint = hinted(world, begin, records_expected=hint.records_expected)

    def trouble(call):
        world.now += chance.choice([0, 0, 0, 1, 100, 301])
        if (bad := chance.random()) < 0.3:
            raise refusal(chance.choice(["throttled", "down", "expired"]))
        if call == "fetch" and bad < 0.4:
            raise refusal("expired")

    world.fault = trouble

    found = world.numbers(world.range(begin, end, shard=parent, hint=hint))

    assert found == n[low:high], f"seed {seed}: {begin} to {end}"


def test_a_generation_is_read_to_its_end_before_the_next_is_begun():
    world = World(shards=4)
    shards = world.shard_ids
    ranges = []
    for turn, shard_id in enumerate(reversed(shards)):
        last = world.put(30, shard=shard_id)[-1]
        ranges.append(ShardRange(shard_id, TRIM_HORIZON, after(last), generation=turn // 2))

    read = [page.range.generation for page in world.pages(*reversed(ranges))]

    assert read == sorted(read)
    assert set(read) == {0, 1}
