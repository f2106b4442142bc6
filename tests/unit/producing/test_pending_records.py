"""What a producer sends next: order per key, full requests, the service's bounds, no dead end."""

from itertools import pairwise
from math import inf

import pytest

from kclrun.codec.kpl import effective_hash_key, open_aggregates
from kclrun.errors import (
    InvalidRequest,
    LimitExceeded,
    OutcomeUnknown,
    SettingsError,
    Throttled,
    Unavailable,
)
from kclrun.model.record import PutEntry, PutResult, Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.producing.backlog import Outcome
from kclrun.producing.flow_control import Flow, ProducerSettings
from kclrun.producing.packing import AGGREGATE_BYTES_MAX
from kclrun.producing.pending_records import PendingRecords

HALF = 2**127
LOW, HIGH = "shardId-000000000000", "shardId-000000000001"
TWO = (Shard(LOW, HashRange(0, HALF - 1), "1"), Shard(HIGH, HashRange(HALF, HASH_KEY_MAX), "1"))
THROTTLED = PutResult(error_code="ProvisionedThroughputExceededException")


def pending(shards=TWO, **reported):
    return PendingRecords(shards, ProducerSettings(**reported), Flow())


def entry(number, key, hash_key=None):
    return PutEntry(b"%d" % number, key, hash_key)


def low(number, key="low"):
    return entry(number, key, "0")


def high(number, key="high"):
    return entry(number, key, str(HASH_KEY_MAX))


def shard_of(put):
    return LOW if effective_hash_key(put.partition_key, put.explicit_hash_key) < HALF else HIGH


def taken(request):
    return tuple(PutResult("1", shard_of(put)) for put in request.entries)


def refused(request, code="ProvisionedThroughputExceededException"):
    return tuple(PutResult(error_code=code) for _ in request.entries)


def numbers(request):
    """The user records of a request, aggregates opened."""
    records = [Record(put.data, put.partition_key, "1") for put in request.entries]
    return [int(record.data) for record in open_aggregates(records)]


@pytest.fixture
def core():
    return pending()


def test_a_producer_that_has_sent_nothing_tells_of_no_pause_and_no_recovery():
    reported = pending().metrics(0.0)

    assert (reported.pause_max_s, reported.recovery_max_s, reported.full_batch_share) == (
        0.0,
        0.0,
        1.0,
    )


def test_a_request_waits_until_it_is_full_or_has_lingered(core):
    for number in range(499):
        core.add(entry(number, f"key{number}"))

    assert core.take(now=0.0) is None
    assert core.due_at(0.05) == pytest.approx(0.1)
    assert len(core.take(now=0.1).entries) == 499


def test_a_full_request_goes_at_once(core):
    for number in range(600):
        core.add(entry(number, f"key{number}"))

    assert len(core.take(now=0.0).entries) == 500
    assert core.take(now=0.0) is None
    assert len(core.take(now=0.0, hurried=True).entries) == 100


def test_a_request_holds_one_record_of_a_key_and_the_next_waits_for_its_answer(core):
    for number in range(3):
        core.add(entry(number, "a"))
        core.add(entry(number, "b"))

    first = core.take(now=0.0, hurried=True)
    meanwhile = core.take(now=0.0, hurried=True)
    core.settle(first, taken(first), now=0.1)
    second = core.take(now=0.1, hurried=True)

    assert sorted(numbers(first)) == [0, 0]
    assert meanwhile is None
    assert sorted(numbers(second)) == [1, 1]


def test_a_refused_record_holds_back_its_key_and_nothing_else(core):
    for number in range(2):
        core.add(low(number, "refused"))
        core.add(high(number, "taken"))

    first = core.take(now=0.0, hurried=True)
    results = [
        THROTTLED if put.partition_key == "refused" else PutResult("1", HIGH)
        for put in first.entries
    ]
    core.settle(first, results, now=0.0)
    at_once = core.take(now=0.0, hurried=True)
    later = core.take(now=0.1, hurried=True)

    assert [(put.partition_key, put.data) for put in at_once.entries] == [("taken", b"1")]
    assert [(put.partition_key, put.data) for put in later.entries] == [("refused", b"0")]


def test_without_order_only_what_was_refused_is_sent_again():
    core = pending(keeps_order=False)
    for number in range(4):
        core.add(low(number))

    first = core.take(now=0.0, hurried=True)
    core.settle(first, [PutResult("1", LOW), THROTTLED, PutResult("3", LOW), THROTTLED], now=0.0)
    again = core.take(now=1.0, hurried=True)

    assert numbers(first) == [0, 1, 2, 3]
    assert numbers(again) == [1, 3]


def test_what_waits_of_a_shard_goes_as_one_aggregate_and_one_record_as_it_is():
    core = pending(aggregates=True)
    for number in range(100):
        core.add(low(number, f"key{number % 7}"))
    core.add(high(100, "alone"))

    request = core.take(now=0.0, hurried=True)
    core.settle(request, taken(request), now=0.0)

    assert [put.user_records for put in request.entries] == [100, 1]
    assert sorted(numbers(request)) == list(range(101))
    assert request.entries[1].data == b"100"
    assert (core.metrics(0.0).records, core.metrics(0.0).user_records) == (2, 101)


def test_an_aggregate_stops_at_its_size():
    core = pending(aggregates=True)
    payload = b"x" * 20_000
    for _ in range(4):
        core.add(PutEntry(payload, "a", "0"))

    sizes = []
    while (request := core.take(now=0.0, hurried=True)) is not None:
        sizes.append([(put.user_records, put.size_bytes) for put in request.entries])
        core.settle(request, taken(request), now=0.0)

    assert [count for [(count, _)] in sizes] == [2, 2]
    assert all(size <= AGGREGATE_BYTES_MAX == 51_200 for [(_, size)] in sizes)


CHILDREN = (
    Shard(LOW, HashRange(0, HALF - 1), "1", "9"),
    Shard("left", HashRange(0, HALF // 2 - 1), "9"),
    Shard("right", HashRange(HALF // 2, HALF - 1), "9"),
    TWO[1],
)


def test_an_aggregate_in_the_wrong_child_sends_again_what_does_not_belong_there():
    """The service splits the lower shard while an aggregate of both halves is under way."""
    core = pending(aggregates=True)
    core.add(entry(0, "left", "0"))
    core.add(entry(1, "right", str(HALF - 1)))
    core.add(entry(2, "left", "0"))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult("7", "left")], now=0.0)
    core.add(entry(3, "right", str(HALF - 1)))

    assert (core.backlog.records, core.is_stale, core.waits_for_listing) == (4, True, True)
    assert core.take(now=9.0, hurried=True) is None, "its keys are under way"
    core.remap(TWO)  # a listing that is too old
    assert (core.is_stale, core.take(now=9.0, hurried=True)) == (True, None)
    core.remap(CHILDREN)
    again = core.take(now=9.0, hurried=True)

    assert numbers(again) == [1, 3]
    core.settle(again, [PutResult("8", "right")], now=9.0)
    assert (core.backlog.records, core.backlog.bytes, core.is_stale) == (0, 0, False)
    assert core.metrics(9.0).user_records == 4


@pytest.mark.parametrize(
    ("relist", "tries"),
    [(lambda core: core.remap(TWO), 5), (lambda core: core.listing_failed(), 60)],
    ids=["listings without it", "no listing at all"],
)
def test_an_aggregate_in_a_shard_that_is_never_listed_is_sent_again(relist, tries):
    core = pending(aggregates=True)
    core.add(entry(0, "left", "0"))
    core.add(entry(1, "right", str(HALF - 1)))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult("7", "gone")], now=0.0)
    listings = 0
    while core.waits_for_listing:
        relist(core)
        listings += 1

    assert listings == tries
    assert sorted(numbers(core.take(now=9.0, hurried=True))) == [0, 1]


class Kept:
    def __init__(self, deadline=inf):
        self.deadline = deadline


def errors_by_receipt(core):
    return {
        receipt: settled.outcome.error
        for settled in core.backlog.settled
        for receipt in settled.receipts
    }


def test_a_receipt_has_the_place_of_its_record_in_the_stream():
    core = pending(aggregates=True, fails_alone=True)
    receipts = [Kept() for _ in range(4)]
    for number, receipt in enumerate(receipts[:3]):
        core.add_checked(low(number, f"key{number}"), 5, receipt)
    core.add_checked(high(3), 5, receipts[3])
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult("11", LOW), PutResult("22", HIGH)], now=0.0)

    assert sorted(core.backlog.settled, key=lambda settled: settled.outcome.shard_id) == [
        (receipts[:3], Outcome(LOW, "11", 0)),
        (receipts[3:], Outcome(HIGH, "22", None)),
    ]


@pytest.mark.parametrize("aggregates", [False, True])
def test_records_that_wait_beyond_their_deadline_fail_alone_and_those_under_way_do_not(aggregates):
    core = pending(aggregates=aggregates, fails_alone=True)
    early, late, other = Kept(10.0), Kept(20.0), Kept(10.0)
    core.add_checked(low(0, "a"), 2, early)
    core.add_checked(low(1, "a"), 2, late)
    core.add_checked(high(2, "b"), 2, other)
    request = core.take(now=0.0, hurried=True)
    results = [
        THROTTLED if shard_of(put) == LOW else PutResult("1", HIGH) for put in request.entries
    ]
    core.expire(10.0)
    assert core.backlog.settled == [], "they are under way"
    core.settle(request, results, now=10.0)
    core.expire(10.0)

    failed = errors_by_receipt(core)
    assert isinstance(failed[early], Throttled)
    assert LOW in str(failed[early])
    assert failed[other] is None
    assert late not in failed
    assert (core.backlog.records, core.backlog.bytes) == (1, 2)
    core.expire(20.0)
    assert core.backlog.settled[-1].receipts == [late]
    assert (core.backlog.records, core.take(now=99.0, hurried=True)) == (0, None)
    assert core.metrics(0.0).failed_records == 2


def test_a_record_that_is_refused_for_good_fails_alone():
    core = pending(fails_alone=True)
    refused_one, taken_one = Kept(), Kept()
    core.add_checked(low(0, "a"), 2, refused_one)
    core.add_checked(low(1, "b"), 2, taken_one)
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult(error_code="AccessDenied"), PutResult("1", LOW)], now=0.0)

    found = errors_by_receipt(core)
    assert isinstance(found[refused_one], InvalidRequest)
    assert found[taken_one] is None
    assert core.backlog.records == 0


def test_a_request_that_is_refused_for_good_fails_its_records_and_the_next_of_their_keys_go_on():
    core = pending(fails_alone=True)
    receipts = [Kept(), Kept()]
    for number, receipt in enumerate(receipts):
        core.add_checked(low(number, "a"), 2, receipt)
    error = InvalidRequest("no", operation="PutRecords")
    core.drop(core.take(now=0.0, hurried=True), error)

    assert [settled.outcome.error for settled in core.backlog.settled] == [error]
    assert numbers(core.take(now=0.0, hurried=True)) == [1]


def test_what_is_an_aggregate_already_is_not_put_into_another():
    core = pending(aggregates=True)
    for user_records in (1, 1, 7, 1):
        core.add(PutEntry(b"x", "a", user_records=user_records))

    sent = []
    while (request := core.take(now=0.0, hurried=True)) is not None:
        sent += [put.user_records for put in request.entries]
        core.settle(request, taken(request), now=0.0)

    assert sent == [2, 7, 1]


def test_a_record_too_large_for_an_aggregate_goes_in_its_turn():
    core = pending(aggregates=True)
    for data in (b"0", b"1", b"x" * 100_000, b"3"):
        core.add(PutEntry(data, "a"))

    order = []
    while (request := core.take(now=0.0, hurried=True)) is not None:
        order += [
            put.user_records if put.user_records > 1 else len(put.data) for put in request.entries
        ]
        core.settle(request, taken(request), now=0.0)

    assert order == [2, 100_000, 1]


def test_requests_keep_the_bytes_of_the_service():
    core = pending(record_bytes_max=10 * 2**20)
    for number in range(8):
        core.add(PutEntry(b"x" * (2**20 - 3), f"k-{number}"))
    core.add(PutEntry(b"x" * (8 * 2**20), "large"))

    sizes = []
    while (request := core.take(now=0.0)) is not None:
        sizes.append([put.size_bytes for put in request.entries])

    # Full by bytes, so that none of them lingers; a record above the bytes goes alone.
    assert len(sizes) >= 3
    assert all(sum(size) <= 5 * 2**20 or len(size) == 1 for size in sizes)
    assert sum(len(size) for size in sizes) == 9


@pytest.mark.parametrize(("more", "requests"), [(0, [2]), (1, [1, 1])])
def test_a_request_is_filled_to_the_last_byte(more, requests):
    core = pending(record_bytes_max=10 * 2**20)
    for key, extra in (("a", 0), ("b", more)):
        core.add(PutEntry(b"x" * (5 * 2**19 - 1 + extra), key))

    taken_now = []
    while (request := core.take(now=0.0, hurried=True)) is not None:
        taken_now.append(len(request.entries))

    assert taken_now == requests


def test_a_slowed_shard_whose_only_request_failed_is_sent_it_again(core):
    core.add(low(0))
    core.settle(request := core.take(now=0.0, hurried=True), refused(request), now=0.0)
    now = 0.0
    for _ in range(3):
        now = core.due_at(now, hurried=True)
        slowed = core.take(now, hurried=True)
        assert numbers(slowed) == [0]
        assert core.take(now, hurried=True) is None
        core.fail(slowed, Unavailable("no", operation="PutRecords"), now=now, chance=0.5)


@pytest.mark.parametrize("order", [(low, high), (high, low)])
def test_a_request_with_records_of_a_slowed_shard_is_not_sent_at_full_speed(core, order):
    core.add(low(0))
    core.settle(request := core.take(now=0.0, hurried=True), refused(request), now=0.0)
    assert request.is_full_speed
    for number, of_shard in enumerate(order, 1):
        core.add(of_shard(number))

    together = core.take(now=core.due_at(0.0, hurried=True) + 1.0, hurried=True)

    assert {shard_of(put) for put in together.entries} == {LOW, HIGH}
    assert not together.is_full_speed


def test_a_refusing_shard_slows_down_by_itself(core):
    for number in range(300):
        core.add(low(number, f"low{number}"))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, refused(request), now=0.0)
    for number in range(500):
        core.add(high(number, f"high{number}"))

    healthy = core.take(now=0.0)
    resting = core.take(now=0.05, hurried=True)
    slowed = core.take(now=0.1, hurried=True)
    one_at_a_time = core.take(now=10.0, hurried=True)

    assert {shard_of(put) for put in healthy.entries} == {HIGH}
    assert resting is None
    assert [shard_of(put) for put in slowed.entries] == [LOW] * 250
    assert one_at_a_time is None
    metrics = core.metrics(10.0)
    assert (metrics.shards[LOW].batch_records, metrics.shards[LOW].pause_s) == (250, 0.1)
    assert (metrics.shards[HIGH].batch_records, metrics.shards[HIGH].pause_s) == (500, 0.0)


def test_a_slowed_shard_has_one_request_under_way_whatever_the_others_do(core):
    for number in range(100):
        core.add(low(number, f"low{number}"))
        core.add(high(number, f"high{number}"))
    first = core.take(now=0.0, hurried=True)
    core.settle(first, refused(first), now=0.0)
    both = core.take(now=0.1, hurried=True)
    core.settle(
        both,
        [THROTTLED if shard_of(put) == HIGH else PutResult("1", LOW) for put in both.entries],
        now=0.1,
    )
    for number in range(1000):
        core.add(low(number, f"more{number}"))
    only_low = core.take(now=0.25, hurried=True)

    for number in range(100):
        core.add(high(number, f"again{number}"))
    later = core.take(now=5.0, hurried=True)
    core.settle(later, taken(later), now=5.0)
    no_low_yet = core.take(now=10.0, hurried=True)

    assert {shard_of(put) for put in only_low.entries} == {LOW}
    assert {shard_of(put) for put in later.entries} == {HIGH}
    assert no_low_yet is None or {shard_of(put) for put in no_low_yet.entries} == {HIGH}


def test_a_shard_left_alone_for_long_is_sent_full_batches_again(core):
    core.add(low(0))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, refused(request), now=0.0)
    request = core.take(now=0.1, hurried=True)
    core.settle(request, taken(request), now=0.1)
    slow = core.metrics(0.1).shards[LOW].batch_records

    for number in range(600):
        core.add(low(number, f"key{number}"))
    request = core.take(now=60.0)

    assert slow < 500
    assert len(request.entries) == 500
    assert request.is_full_speed


def test_the_shards_take_turns_where_a_request_has_no_room_for_all():
    core = pending(record_bytes_max=5 * 2**20)
    for number in range(3):
        core.add(PutEntry(b"x" * (4 * 2**20), f"low{number}", "0"))
        core.add(PutEntry(b"x" * (4 * 2**20), f"high{number}", str(HASH_KEY_MAX)))

    turns = [[shard_of(put) for put in core.take(now=0.0).entries] for _ in range(4)]

    assert turns == [[LOW], [HIGH], [LOW], [HIGH]]


def test_a_listing_without_the_lowest_range_does_no_harm():
    third = 2**128 // 3
    core = pending(
        shards=[
            Shard("b", HashRange(third, 2 * third - 1), "1"),
            Shard("c", HashRange(2 * third, HASH_KEY_MAX), "1"),
        ]
    )
    core.add(low(1))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, refused(request), now=0.0)

    assert core.metrics(0.0).shards["b"].refusals == 1
    assert numbers(core.take(now=1.0, hurried=True)) == [1]


@pytest.mark.parametrize(
    ("lows", "highs", "sent"),
    [
        (2000, 100, (400, 100)),
        (100, 2000, (100, 400)),
        (2000, 2000, (250, 250)),
        (2000, 0, (500, 0)),
    ],
)
def test_every_shard_gets_its_share_of_a_request(core, lows, highs, sent):
    for number in range(lows):
        core.add(low(number, f"low{number}"))
    for number in range(highs):
        core.add(high(number, f"high{number}"))

    shards = [shard_of(put) for put in core.take(now=0.0).entries]

    assert (shards.count(LOW), shards.count(HIGH)) == sent


def test_a_key_that_is_under_way_makes_no_request_due_however_it_grows(core):
    core.add(low(0))
    request = core.take(now=0.0, hurried=True)
    for number in range(1, 600):
        core.add(low(number))

    assert core.due_at(0.0, hurried=True) == inf
    assert core.take(now=0.0, hurried=True) is None
    core.settle(request, taken(request), now=0.0)
    assert core.due_at(0.0, hurried=True) == 0.0
    assert numbers(core.take(now=0.0)) == [1], "599 records wait, more than a request takes"


def test_a_request_is_due_with_the_first_shard_whose_pause_ends(core):
    core.add(low(0))
    core.add(high(1))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, refused(request), now=0.0)
    request = core.take(now=0.1, hurried=True)
    one_each = [
        THROTTLED if shard_of(put) == LOW else PutResult("1", HIGH) for put in request.entries
    ]
    core.settle(request, one_each, now=0.1)
    core.add(high(2))

    assert core.due_at(0.1, hurried=True) == pytest.approx(0.2)  # LOW pauses for 0.2 s, until 0.3
    assert numbers(core.take(now=0.2, hurried=True)) == [2]
    assert core.due_at(0.2, hurried=True) == pytest.approx(0.3)


def test_each_shard_that_pauses_is_woken_at_the_end_of_its_own_pause():
    third, flow = 2**128 // 3, Flow()
    ends = {"a": 0.1, "b": 0.2, "c": 0.4}
    shards = [
        Shard(name, HashRange(at * third, (at + 1) * third - 1), "1")
        for at, name in enumerate(ends)
    ]
    for name, end in ends.items():
        flow.of(name).refused(sent_at=end - 0.1, now=end - 0.1)
    core = PendingRecords(shards, ProducerSettings(), flow)
    for number in range(3):
        core.add(entry(number, f"key{number}", str(number * third)))
    assert core.take(now=0.0, hurried=True) is None

    for number, end in enumerate(ends.values()):
        assert core.due_at(0.0, hurried=True) == pytest.approx(end)
        assert core.take(now=end - 0.01, hurried=True) is None
        assert numbers(core.take(now=end + 0.001, hurried=True)) == [number]


def test_the_pauses_after_failed_requests_begin_anew_after_an_answer(core):
    core.add(low(0))
    now, pauses = 0.0, []
    for outcome in ("failed", "failed", "failed", "refused", "failed"):
        request = core.take(now, hurried=True)
        if outcome == "refused":
            core.settle(request, refused(request), now)
        else:
            core.fail(request, Unavailable("no", operation="PutRecords"), now, chance=0.5)
        pauses.append(round(core.due_at(now, hurried=True) - now, 3))
        now = core.due_at(now, hurried=True)

    assert pauses == [0.15, 0.3, 0.6, 0.1, 0.15]


def test_a_new_listing_moves_what_waits_and_forgets_the_turns_and_weights_of_the_old_one(core):
    for number in range(600):
        core.add(low(number, f"low{number}"))
        core.add(high(number, f"high{number}"))
    core.remap([Shard("shardId-000000000002", HashRange(0, HASH_KEY_MAX), "2")])

    assert [len(core.take(now=0.0).entries) for _ in range(2)] == [500, 500]
    assert core.take(now=0.0) is None, "200 wait, which is not a full request"
    assert len(core.take(now=0.0, hurried=True).entries) == 200
    assert core.due_at(0.0, hurried=True) == inf


def test_of_more_shards_than_a_request_has_room_for_each_gets_one_record():
    bounds = [2**128 * number // 600 for number in range(601)]
    shards = [
        Shard(f"shardId-{number:012}", HashRange(first, last - 1), "1")
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    core = pending(shards)
    for number in range(1200):
        core.add(entry(number, f"key{number}", str(bounds[number % 600])))

    request = core.take(now=0.0)

    assert len(request.entries) == len({put.explicit_hash_key for put in request.entries}) == 500


def test_a_shard_that_takes_nothing_for_its_budget_ends_in_an_error_that_says_so():
    core = pending(give_up_after_s=60.0)
    now = 0.0
    core.add(low(1, "secret key"))

    def send_on():
        nonlocal now
        while True:
            core.add(high(2))  # the other shard takes everything, which is no excuse
            request = core.take(now, hurried=True)
            core.settle(
                request,
                [
                    THROTTLED if shard_of(put) == LOW else PutResult("1", HIGH)
                    for put in request.entries
                ],
                now,
            )
            now = core.due_at(now, hurried=True)

    with pytest.raises(Throttled) as raised:
        send_on()

    assert 60.0 <= now <= 70.0  # at most one of the longest pauses late
    assert LOW in str(raised.value)
    assert "1 records are not acknowledged" in str(raised.value)
    assert raised.value.code == "ProvisionedThroughputExceededException"
    assert "secret" not in str(raised.value)


def test_a_shard_that_takes_a_little_is_not_given_up():
    core = pending(give_up_after_s=60.0)
    for number in range(150):
        core.add(low(number, f"key{number}"))

    now = 0.0
    while core.backlog.records:
        request = core.take(now, hurried=True)
        only_one = [PutResult("1", LOW), *[THROTTLED] * (len(request.entries) - 1)]
        core.settle(request, only_one, now)
        now = max(now, core.due_at(now, hurried=True)) if core.backlog.records else now

    assert now > 600
    assert core.metrics(now).records == 150


def test_the_budget_starts_anew_with_each_record_taken():
    core = pending(give_up_after_s=60.0)
    for number in range(5):
        core.add(low(number))

    for now in range(0, 250, 25):  # the same key each time: refused, taken, refused, taken
        request = core.take(float(now), hurried=True)
        is_taken = now % 50 == 25
        core.settle(request, taken(request) if is_taken else refused(request), float(now))

    assert core.backlog.records == 0


def test_an_internal_failure_is_sent_again_and_is_unavailable_in_the_end():
    core = pending(give_up_after_s=1.0)
    core.add(low(1))

    def fail_for_ever():
        now = 0.0
        while True:
            request = core.take(now, hurried=True)
            core.settle(request, refused(request, "InternalFailure"), now)
            now = core.due_at(now, hurried=True)

    with pytest.raises(Unavailable, match="InternalFailure"):
        fail_for_ever()


def test_a_record_refused_for_good_is_an_error_at_once(core):
    core.add(low(1))
    request = core.take(now=0.0, hurried=True)

    with pytest.raises(InvalidRequest, match="ValidationException"):
        core.settle(request, refused(request, "ValidationException"), now=0.0)


@pytest.mark.parametrize("leaf", [Throttled, Unavailable, OutcomeUnknown])
def test_a_request_that_failed_as_a_whole_is_sent_again_in_order_after_a_pause(leaf):
    core = pending(give_up_after_s=10.0)
    for number in range(5):
        core.add(low(number, f"key{number}"))
    first = core.take(now=0.0, hurried=True)
    core.fail(first, leaf("no", operation="PutRecords", code="X"), now=0.0, chance=0.5)

    at = core.due_at(0.0, hurried=True)

    assert core.take(now=at - 0.001, hurried=True) is None
    again = core.take(now=at, hurried=True)
    assert numbers(again) == numbers(first)
    with pytest.raises(leaf, match="5 records are not acknowledged"):
        core.fail(again, leaf("no", operation="PutRecords", code="X"), now=10.0, chance=0.5)


def test_each_request_that_failed_as_a_whole_is_counted_once_and_its_records_are_not_refused(core):
    core.add(low(0))
    core.add(high(1))
    now = 0.0
    for failed in (1, 2, 3):
        request = core.take(now, hurried=True)
        core.fail(request, Unavailable("no", operation="PutRecords"), now=now, chance=0.5)
        assert core.metrics(now).failed_requests == failed
        now = core.due_at(now, hurried=True)
    request = core.take(now, hurried=True)
    core.settle(request, (taken(request)[0], THROTTLED), now)

    reported = core.metrics(now)
    assert (reported.failed_requests, reported.requests, reported.refused_records) == (3, 1, 1)


def test_an_answer_from_an_unknown_shard_makes_the_map_stale_and_a_new_one_moves_what_waits(core):
    for number in range(2):
        core.add(high(number))
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult("1", "shardId-000000000003")], now=0.0)
    assert core.is_stale

    core.remap(
        [
            TWO[0],
            Shard("shardId-000000000003", TWO[1].hash_range, "2"),
            Shard(HIGH, TWO[1].hash_range, "1", ending_sequence_number="2"),
        ]
    )
    request = core.take(now=0.0, hurried=True)
    core.settle(request, [PutResult("2", "shardId-000000000003")], now=0.0)

    assert not core.is_stale
    assert core.backlog.records == 0
    assert set(core.metrics(0.0).shards) == {LOW, "shardId-000000000003"}


def test_an_answer_that_names_no_shard_says_nothing_about_the_map(core):
    core.add(high(1))
    request = core.take(now=0.0, hurried=True)

    core.settle(request, [PutResult("1")], now=0.0)

    assert not core.is_stale
    assert core.backlog.records == 0


def test_a_stream_without_an_open_shard_is_refused():
    with pytest.raises(SettingsError, match="no open shard"):
        pending(shards=[])


@pytest.mark.parametrize(
    "impossible",
    [
        PutEntry(b"", ""),
        PutEntry(b"", "k" * 257),
        PutEntry(b"", "\ud800"),
        PutEntry(b"", "k", "-1"),
        PutEntry(b"", "k", str(2**128)),
        PutEntry(b"x" * 2**20, "k"),
    ],
    ids=["empty key", "long key", "no UTF-8", "negative hash", "hash above", "too large"],
)
def test_an_impossible_record_is_refused_and_not_held(core, impossible):
    with pytest.raises(LimitExceeded):
        core.add(impossible)

    assert core.backlog.records == 0
    assert core.take(now=1.0, hurried=True) is None


@pytest.mark.parametrize(
    "possible",
    [
        PutEntry(b"", "k"),
        PutEntry(b"", "k" * 256),
        PutEntry(b"", "k", "0"),
        PutEntry(b"", "k", str(HASH_KEY_MAX)),
        PutEntry(b"x" * (2**20 - 1), "k"),
    ],
    ids=["one character", "256 characters", "lowest hash", "highest hash", "a whole mebibyte"],
)
def test_the_largest_and_the_smallest_record_that_the_service_takes_is_accepted(core, possible):
    core.add(possible)

    assert core.take(now=0.0, hurried=True).entries == (possible,)


@pytest.mark.parametrize(("size_bytes", "fills"), [(10_485, 500), (20_969, 500), (20_970, 250)])
def test_a_record_weighs_as_many_records_as_it_takes_the_place_of(core, size_bytes, fills):
    """5 MiB are 500 records of 10,485 bytes. A request is due once what waits would fill it."""
    for number in range(fills - 1):
        core.add(PutEntry(b"x" * (size_bytes - 5), f"{number:05}"))
    assert core.take(now=0.0) is None

    core.add(PutEntry(b"x" * (size_bytes - 5), "last!"))

    assert core.take(now=0.0) is not None


def test_the_buffer_is_full_by_records_and_by_bytes():
    by_records = pending(buffer_records_max=2)
    by_bytes = pending(buffer_bytes_max=1000)
    by_records.add(low(1))
    by_bytes.add(PutEntry(b"x" * 999, "k"))

    assert by_bytes.backlog.is_full
    assert not by_records.backlog.is_full
    by_records.add(low(2))
    assert by_records.backlog.is_full
