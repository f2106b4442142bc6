"""The planner of all shards at one moment: what it keeps, what is exhausted, what it reports."""

from dataclasses import replace

import pytest

from kclrun.errors import NotFound, Throttled
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.spark.offsets import Offset, StreamIs
from kclrun.spark.options import SourceSettings, StreamAddress
from kclrun.spark.planning.batch_planner import BatchPlanner
from kclrun.spark.planning.shard_cursor import (
    AskListing,
    AskPage,
    Density,
    Finding,
    Gone,
    Listed,
    NotListed,
    Paged,
    Slowed,
)
from kclrun.spark.positions import SHARD_END, after, before
from tests.support.tables import over_rows

SETTINGS = SourceSettings(address=StreamAddress(stream="orders"))
STREAMS = {"": StreamIs("arn", 1)}


def shards(count, *, closed=()):
    """So many, over the key space, as a listing has them."""
    step = (HASH_KEY_MAX + 1) // count
    return [
        Shard(
            f"s{number:03}",
            HashRange(
                number * step, HASH_KEY_MAX if number + 1 == count else (number + 1) * step - 1
            ),
            "0",
            "9" if number in closed else None,
        )
        for number in range(count)
    ]


def planner_at(count, *, closed=(), position=after("5"), listed_at=0.0, **settings):
    """A planner that knows a listing, at a batch that begins after record 5 of each shard."""
    made = BatchPlanner(replace(SETTINGS, **settings), 0.0, 0.0)
    made.listing.listed(shards(count, closed=closed), listed_at)
    start = Offset(streams=STREAMS, shards={each.shard_id: position for each in shards(count)})
    made.begin(start, 0.0, is_first=False)
    return made


@over_rows(
    ("count", "inline_bytes_max", "kept"),
    [
        (1, 0, 256 * 1024),
        (1, 512 * 1024, 512 * 1024),
        (128, 512 * 1024, 512 * 1024),
        (256, 512 * 1024, 256 * 1024),
        (1_024, 512 * 1024, 64 * 1024),
    ],
)
def test_the_shards_share_the_bytes_of_kept_rows(count, inline_bytes_max, kept):
    planner = planner_at(1, inline_bytes_max=inline_bytes_max)
    planner.begin(
        Offset(streams=STREAMS, shards={f"s{number:03}": after("5") for number in range(count)}),
        0.0,
        is_first=False,
    )

    assert {each.cursor.rows_bytes_max for each in planner.searches.values()} == {kept}


# What is known of a shard when the records that exist now are wanted. The service's time lies
# between 9.0 and 10.001 s then. Is that all of the shard?
@over_rows(
    ("finding", "head_s", "tip_ms", "closed", "is_all"),
    [
        (None, None, None, False, False),
        (None, None, 8_999, False, False),
        (None, None, 9_000, False, True),
        (None, None, 9_000, True, False),  # its children may hold more
        (Finding(SHARD_END), None, None, True, True),
        (Finding(after("7")), None, None, False, False),
        (Finding(after("7"), None, 9_000), None, None, False, True),
        (Finding(after("7"), None, 8_999), None, None, False, False),
        (Finding(before("7"), 10_000), None, None, False, False),
        (Finding(before("7"), 11_001), None, None, False, True),
        (Finding(before("7"), 11_001), None, None, True, True),
        (None, 10.0, None, False, False),
        (None, 11.001, None, False, True),
        (Finding(before("7"), 10_000), 11.001, None, False, False),
    ],
)
def test_all_that_exists_is_read_at_a_tip_seen_since_or_at_a_record_that_came_later(
    finding, head_s, tip_ms, closed, is_all
):
    planner = planner_at(1, closed=[0] if closed else ())
    planner.service.add_sample(10.0, 10.0, 10.0)
    planner.service.add_sample(9.5, 9.5, 10.5)
    now = 10.0
    early, late = planner.service.surely_past_ms(now), planner.service.surely_ahead_ms(now)
    planner.end_at_now(now)
    planner.listing.listed(shards(1, closed=[0] if closed else ()), 10.1)
    cursor = planner.searches["s000"].cursor
    shift = early - 9_000
    assert late == 11_001
    if head_s is not None:
        record = Record(b"", "k", "6", head_s)
        cursor.kept.absorb(Paged("t", FetchedPage([record], "u", 5), 0.0, 0.0), 0)
    cursor.kept.tip_ms = None if tip_ms is None else tip_ms + shift
    if finding is not None and finding.tip_ms is not None:
        finding = Finding(finding.bound, None, finding.tip_ms + shift)
    cursor.finding = finding

    assert planner.must_go_on
    assert planner.is_exhausted() is is_all
    assert planner.may_offer(now) is is_all
    planner.listing.list_now()
    assert not planner.is_exhausted(), "shards may have come since the last listing"
    planner.end_nowhere()
    assert not planner.must_go_on
    assert not planner.is_exhausted()


def test_the_report_names_the_twenty_worst_shards_and_adds_up_all():
    planner = planner_at(22)
    for number, running in enumerate(planner.searches.values()):
        running.cursor.lag_ms = None if number == 21 else number
        running.cursor.density = Density(1 / 3, 10 / 3, 10.0) if number < 2 else None
        running.throttles = 2 if number == 1 else 0
        running.cursor.kept.tip_ms = 7 if number < 5 else None
    planner.tick_s = 1.2345
    planner.losses = list("abcdefg")

    reported = planner.report()

    assert list(reported["shards"]) == [f"s{number:03}" for number in range(20, 0, -1)]
    del reported["shards"]
    assert reported == {
        "stream": "orders",
        "shardsTotal": 22,
        "shardsAtTip": 5,
        "recordsPerSecond": 0.667,
        "bytesPerSecond": 6.7,
        "throttles": 2,
        "lagMsMax": 20,
        "tickMs": 1234,
        "losses": list("cdefg"),
        "lossesTotal": 7,
    }
    assert planner_at(1).report()["lagMsMax"] is None
    for running in planner.searches.values():
        running.cursor.lag_ms = 0
    assert [*planner.report()["shards"]][:2] == ["s001", "s000"], "then those throttled most"


def test_a_tick_asks_each_shard_once_and_the_listing_when_it_is_due():
    planner = planner_at(2, poll_interval_s=2.0)
    planner.service.add_sample(100.0, 0.0, 0.0)
    asked = planner.asks(0.0)
    assert [type(each) for each in asked] == [AskPage, AskPage]
    assert planner.asks(1.0) == []
    assert planner.next_at(0.0) == 0.25, "slower shards join the next batch then"
    assert planner.next_at(0.25) == 2.0, "the next tick"
    assert not planner.may_offer(0.0)
    for ask in asked:
        assert not planner.may_offer(0.249)
        page = FetchedPage([], "next", 0)
        planner.take(ask, Paged("t", page, 0.0, 0.1), 0.1, 0.5)
    assert planner.may_offer(0.1)
    assert len(planner.asks(2.0)) == 2

    assert planner.next_at(9.0) < 10.0
    (listing,) = (each for each in planner.asks(10.0) if each == AskListing())
    assert AskListing() not in planner.asks(11.0), "one listing at a time"
    planner.take(listing, NotListed(Throttled("no")), 11.0, 0.5)
    assert AskListing() not in planner.asks(11.9)
    assert AskListing() in planner.asks(12.0)
    planner.take(listing, Listed(tuple(shards(2)), 12.0), 12.1, 0.5)
    assert AskListing() not in planner.asks(21.9)
    assert AskListing() in planner.asks(22.0)


def test_a_throttle_lengthens_the_next_tick():
    planner = planner_at(1)
    planner.service.add_sample(100.0, 0.0, 0.0)
    (ask,) = planner.asks(0.0)
    planner.take(ask, Slowed(None, Throttled("no")), 0.1, 0.5)
    assert planner.tick_s == 1.0
    planner.asks(1.0)

    assert planner.tick_s == 1.5


def test_a_shard_that_was_called_unknown_is_asked_again_once_a_later_listing_has_it():
    planner = planner_at(1)
    planner.service.add_sample(100.0, 0.0, 0.0)
    (ask,) = planner.asks(0.0)
    planner.take(ask, Gone(NotFound("no such shard"), 0.1), 0.2, 0.5)
    for sent_at, is_asked in ((0.1, False), (0.3, True)):
        planner.take(AskListing(), Listed(tuple(shards(1)), sent_at), 0.4, 0.5)
        assert [type(each) for each in planner.asks(0.5)] == [AskPage] * is_asked
    assert planner.losses == []


@pytest.mark.parametrize(("inline_bytes_max", "calls_left"), [(0, 3), (512 * 1024, 4)])
def test_a_batch_whose_rows_do_not_travel_costs_a_call_and_its_bytes_again(
    inline_bytes_max, calls_left
):
    planner = planner_at(1, inline_bytes_max=inline_bytes_max)
    planner.service.add_sample(100.0, 0.0, 0.0)
    (ask,) = planner.asks(0.0)
    rows = [Record(b"x" * 99_900, "k", number, 1.0) for number in ("5", "6", "7")]
    planner.take(ask, Paged("t", FetchedPage(rows, "u", 0), 0.0, 0.0), 0.0, 0.5)
    planner.searches["s000"].cursor.find(after("7"), tip_ms=1)
    end = planner.offer(0.0)
    assert end.shards == {"s000": after("7")}

    budget = planner.searches["s000"].budget
    rests_until = 1.0 if inline_bytes_max == 0 else 0.0  # 200,000 bytes, a tenth of the rate
    assert budget.ready_at(0.0) == rests_until
    for _ in range(calls_left):
        assert budget.ready_at(0.0) == rests_until
        budget.spend(0.0)
    budget.spend(0.0, calls=2.0)
    assert budget.ready_at(0.0) > rests_until
