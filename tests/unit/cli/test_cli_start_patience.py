"""A fleet that starts together: what a start does while AWS throttles it."""

import collections
import heapq
import random

import pytest

from kclrun.aws.patience import THROTTLED_PATIENCES, WHILE_THROTTLED
from kclrun.cli.startup import _described, patiently
from kclrun.errors import AccessDenied, Throttled, Unavailable
from kclrun.leases.auditing import StreamWatch
from kclrun.leases.shard_sync import Listing
from kclrun.model.retries import Retries
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.time import backoff_s
from tests.unit.cli.test_cli_streams import ONE, Site

MANAGERS = 1000
DESCRIPTIONS_PER_S = 20  # DescribeStreamSummary, of one account
LISTINGS_PER_S = 1000  # ListShards, of one stream
START_TIMEOUT_S = 60.0
PAGES_OF_10_000_SHARDS = 10
# At the start, and by who finds the table empty: everything, and from where it begins.
LISTINGS_OF_A_START = 3
THROTTLED, AWAY = Throttled("slow down"), Unavailable("no answer")
SHARDS = (Shard("s0", HashRange(0, HASH_KEY_MAX), "1"),)


def asks_again(described_s, listed_s):
    watch = StreamWatch(ONLY_STREAM, 5.0, described_s)
    return watch.asks_at_first(None, Listing(SHARDS, 0.0, listed_s))


def cold_start(first_listing_after_s):
    """When each start was described, and how many calls that took in all. A manager lists for the
    first time after its start; what it asks then competes with starts."""
    chance = random.Random(1)
    calls, described = 0, []
    asks = [(chance.uniform(0.0, 1.0), manager, 1, True) for manager in range(MANAGERS)]
    heapq.heapify(asks)
    left, last_s = float(DESCRIPTIONS_PER_S), 0.0
    while asks:
        at_s, manager, attempt, is_start = heapq.heappop(asks)
        left = min(DESCRIPTIONS_PER_S, left + (at_s - last_s) * DESCRIPTIONS_PER_S)
        last_s, calls = at_s, calls + 1
        if left < 1:
            patient_s = WHILE_THROTTLED.pause_s(THROTTLED, attempt, chance.random())
            pause_s = patient_s if is_start else backoff_s(attempt + 1, chance.random())
            heapq.heappush(asks, (at_s + pause_s, manager, attempt + 1, is_start))
            continue
        left -= 1
        if is_start:
            described.append(at_s)
            listed_s = at_s + chance.uniform(*first_listing_after_s)
            if asks_again(at_s, listed_s):
                heapq.heappush(asks, (listed_s, manager, 1, False))
    return described, calls


# Most list within seconds; where the host is slow as well, a part of them has to ask again.
@pytest.mark.parametrize("first_listing_after_s", [(0.5, 3.0), (1.0, 5.3)])
def test_a_thousand_managers_that_start_together_are_all_described_in_time(first_listing_after_s):
    described, calls = cold_start(first_listing_after_s)

    assert len(described) == MANAGERS
    assert max(described) < 70 < START_TIMEOUT_S * THROTTLED_PATIENCES
    assert calls < 7_500


def test_their_listings_are_no_more_than_a_stream_answers():
    """On an empty table nobody is in sight, so each of them lists all of it; descriptions pace
    them."""
    described, _ = cold_start((0.5, 3.0))
    starts_in_a_second = collections.Counter(map(int, described))

    per_start = LISTINGS_OF_A_START * PAGES_OF_10_000_SHARDS
    # The burst of the first second, and then what is served.
    assert sorted(starts_in_a_second.values())[-2] * per_start <= LISTINGS_PER_S
    assert max(starts_in_a_second.values()) * per_start < 1.5 * LISTINGS_PER_S


def test_a_service_that_is_away_is_asked_again_within_three_seconds():
    assert max(Retries().pause_s(AWAY, n, 0.999) for n in range(1, 20)) < 3.0


def test_a_start_knows_when_the_answer_was_asked_for_that_counts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kclrun.cli.startup.boottime", lambda: now[0])
    monkeypatch.setattr(
        "kclrun.aws.patience.time.sleep", lambda pause_s: now.append(now.pop() + 40.0)
    )
    site = Site(ONE)
    admin = site.admin_of("orders")
    refusals = [Throttled("wait", operation="DescribeStreamSummary", code="")]
    answer = admin.summary
    monkeypatch.setattr(admin, "summary", lambda: throw(refusals) or answer())

    opened, described_instant = _described(site, deadline=1e12, patience_s=60.0)

    assert (list(opened), described_instant) == ([ONLY_STREAM], 140.0)


def throw(errors):
    if errors:
        raise errors.pop()


class Waiting:
    """Time that only pauses move; each ask of a service that has no answer is noted."""

    def __init__(self, monkeypatch, trouble):
        self.now, self.asked, self._trouble = 0.0, [], trouble
        monkeypatch.setattr("kclrun.aws.patience.time.monotonic", lambda: self.now)
        monkeypatch.setattr("kclrun.aws.patience.time.sleep", self._sleep)

    def _sleep(self, pause_s):
        self.now += pause_s

    def ask(self):
        self.asked.append(self.now)
        raise self._trouble("no", operation="DescribeStreamSummary", code="X")


# The longest pause is 20 s where it throttles, 3 s where it is away.
@pytest.mark.parametrize(
    ("trouble", "from_s", "to_s"), [(Throttled, 100.0, 120.0), (Unavailable, 57.0, 60.0)]
)
def test_a_start_asks_until_its_time_out_and_while_it_is_throttled_for_twice_as_long(
    monkeypatch, trouble, from_s, to_s
):
    waiting = Waiting(monkeypatch, trouble)

    with pytest.raises(Unavailable, match="has not answered for 60 s") as raised:
        patiently(waiting.ask, START_TIMEOUT_S, START_TIMEOUT_S, what="the stream")

    assert from_s <= waiting.asked[-1] < to_s
    assert (raised.value.operation, raised.value.code) == ("DescribeStreamSummary", "X")


def test_a_start_asks_again_for_no_other_trouble(monkeypatch):
    waiting = Waiting(monkeypatch, AccessDenied)

    with pytest.raises(AccessDenied):
        patiently(waiting.ask, START_TIMEOUT_S, START_TIMEOUT_S, what="the stream")

    assert waiting.asked == [0.0]
