"""The keys that carry a shard, and where a split halves it: measured from pages of records."""

import hashlib
import random

import msgspec
import pytest

from kclrun.codec.aggregator import build_aggregate
from kclrun.codec.kpl import MAGIC, open_aggregates
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.traffic.hot_keys import (
    ERROR_MAX,
    KEYS_COUNTED_MAX,
    KEYS_NAMED_MAX,
    LOAD_WEIGHED_MIN,
    HotKey,
    KeyMeter,
    ShardHeat,
    split_point,
)
from tests.support.tables import over_rows

WHOLE = HashRange(0, HASH_KEY_MAX)
WINDOW_S = 60.0


def md5(key):
    return int.from_bytes(hashlib.md5(key.encode()).digest(), "big")


def key_in(hash_range, name="key"):
    return next(key for n in range(10_000) if md5(key := f"{name}-{n}") in hash_range)


def record(key, size=100, at=0.0):
    return Record(b"x" * (size - len(key)), key, "1", at)


class Reading:
    """Five pages a second of a stream, by a clock of its own."""

    def __init__(self, hash_range=WHOLE, window_s=WINDOW_S):
        self.now = 1_000.0
        self.meter = KeyMeter(hash_range, window_s, self.now)
        self.heat = None

    def read(self, seconds, page, *, behind_ms=0, every_s=0.2):
        """`page` makes the records of a moment. The last report."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now += every_s
            records = page(self.now)
            self.meter.took(records, behind_ms, self.now)
            opened = open_aggregates(records)
            if opened is not records:
                self.meter.opened(opened)
            self.heat = self.meter.report(self.now) or self.heat
        return self.heat


def mixed(shares, rest=None, count=60, size=100, seed=1):
    """Pages of keys by their shares; what is left are keys that come once."""
    chance = random.Random(seed)
    keys = [*shares]
    weights = [shares[key] for key in keys]

    def page(at):
        named = chance.choices([*keys, None], [*weights, 1 - sum(weights)], k=count)
        unique = rest or (lambda: f"once-{chance.getrandbits(64)}")
        return [record(key or unique(), size, at) for key in named]

    return page


def test_a_report_comes_twice_a_window_and_not_with_each_page():
    reading = Reading()
    reading.read(60.0, mixed({}))
    reports = 0
    for _ in range(300):
        reading.now += 0.2
        reading.meter.took([], 0, reading.now)
        reports += reading.meter.report(reading.now) is not None

    assert reports == 2


def test_a_heavy_key_is_named_by_its_hash_key_with_its_share_and_never_by_its_text():
    heat = Reading().read(120.0, mixed({"customer-4711": 0.71}))

    assert heat.keys[0].hash_key == str(md5("customer-4711"))
    assert heat.keys[0].share == pytest.approx(0.71, abs=heat.error)
    assert "4711" not in repr(heat).replace(heat.keys[0].hash_key, "")
    assert heat.error < 0.08
    assert heat.routing == "keys"


def test_a_share_is_of_the_bytes_and_not_of_the_records():
    def page(at):
        large = [record("large", 15_000, at) for _ in range(10)]
        return [*(record("small", 1_000, at) for _ in range(50)), *large]

    heat = Reading().read(120.0, page)

    assert heat.keys[0].hash_key == str(md5("large"))
    assert heat.keys[0].share == pytest.approx(0.75, abs=heat.error)
    assert heat.error < ERROR_MAX


def test_at_most_five_keys_are_named_the_heaviest_first():
    heat = Reading().read(120.0, mixed({f"k{n}": 0.1 + n / 100 for n in range(7)}, count=300))

    assert len(heat.keys) == KEYS_NAMED_MAX
    assert [key.share for key in heat.keys] == sorted((k.share for k in heat.keys), reverse=True)


def test_a_key_is_forgotten_after_two_windows():
    reading = Reading()
    assert reading.read(120.0, mixed({"yesterday": 0.9})).keys

    reading.read(121.0, mixed({}))

    assert reading.heat.keys == ()


def test_the_rates_are_what_producers_put_and_what_was_read():
    heat = Reading().read(120.0, mixed({}, count=40, size=1_000))

    assert heat.in_records_per_s == pytest.approx(200, rel=0.02)
    assert heat.in_bytes_per_s == pytest.approx(200_000, rel=0.02)
    assert heat.read_bytes_per_s == pytest.approx(200_000, rel=0.02)


def test_throttled_requests_are_a_share_of_all():
    reading = Reading()
    for _ in range(300):
        reading.now += 0.4
        reading.meter.throttled(reading.now)
        reading.meter.took([], 5_000, reading.now)
    heat = reading.read(10.0, mixed({}))

    assert heat.throttled == pytest.approx(0.45, abs=0.06)


def test_a_few_samples_say_nothing_about_keys():
    heat = Reading().read(120.0, lambda at: [record("only", 5_000_000, at)], every_s=10.0)

    assert heat.load > LOAD_WEIGHED_MIN
    assert (heat.error, heat.routing, heat.keys, heat.split_at) == (1.0, "unknown", (), "")
    assert heat.in_records_per_s == pytest.approx(0.1, abs=0.02)


LOWER = HashRange(0, HASH_KEY_MAX // 4)


def test_explicit_hash_keys_of_producers_show_in_keys_that_lie_elsewhere():
    elsewhere = key_in(HashRange(HASH_KEY_MAX // 2, HASH_KEY_MAX))
    heat = Reading(LOWER).read(120.0, mixed({elsewhere: 0.8}))

    assert heat.routing == "hidden"
    assert heat.split_at == ""
    assert Reading(None).read(120.0, mixed({"a": 0.8})).routing == "hidden"


def aggregates(users, outer, count=5):
    """Pages of aggregates; `users` gives the user records of one."""

    def page(at):
        return [Record(build_aggregate(users()), outer(), "1", at) for _ in range(count)]

    return page


def test_user_records_that_were_aggregated_by_shard_decide_by_their_own_hash_keys():
    heavy, other = key_in(LOWER, "heavy"), key_in(LOWER, "other")

    def users():
        return [(heavy, b"x" * 5_000, None)] * 3 + [(other, b"x" * 5_000, None)]

    # As the KPL puts them: the key is `a`, and the explicit hash key cannot be seen.
    assert md5("a") not in HashRange(HASH_KEY_MAX // 2, HASH_KEY_MAX)
    heat = Reading(LOWER).read(120.0, aggregates(users, lambda: "a"))

    assert heat.routing == "keys"
    assert heat.keys[0] == HotKey(str(md5(heavy)), heat.keys[0].share)
    assert heat.keys[0].share == pytest.approx(0.75, abs=heat.error)
    low, high = sorted((md5(heavy), md5(other)))
    assert low < int(heat.split_at) <= high
    assert heat.in_records_per_s == pytest.approx(25, rel=0.05), "an aggregate is one record"


def test_explicit_hash_keys_inside_of_an_aggregate_are_seen_and_decide():
    def users():
        return [("same", b"x" * 9_000, "7"), ("same", b"x" * 9_000, str(LOWER.end))]

    heat = Reading(LOWER).read(120.0, aggregates(users, lambda: "a"))

    assert {key.hash_key for key in heat.keys} == {"7", str(LOWER.end)}
    assert heat.split_share == pytest.approx(0.5, abs=0.06)


def test_aggregates_of_any_user_records_decide_by_their_own_partition_keys():
    one, two = key_in(LOWER, "one"), key_in(LOWER, "two")
    chance = random.Random(3)

    def users():
        return [(f"user-{chance.getrandbits(64)}", b"x" * 2_000, None) for _ in range(8)]

    heat = Reading(LOWER).read(120.0, aggregates(users, lambda: chance.choice((one, two))))

    assert heat.routing == "aggregates"
    assert {key.hash_key for key in heat.keys} == {str(md5(one)), str(md5(two))}
    low, high = sorted((md5(one), md5(two)))
    assert low < int(heat.split_at) <= high
    assert heat.split_share == pytest.approx(0.5, abs=0.08)


def test_an_explicit_hash_key_that_is_not_a_number_has_no_position():
    reading = Reading()
    wrong = Record(b"x" * 99, "k", "1", explicit_hash_key="zzz", aggregated=True)
    for _ in range(600):
        reading.read(0.2, lambda at: [Record(MAGIC + b"x" * 9_000, "a", "1", at)] * 10)
        reading.meter.opened([wrong] * 10)
    reading.read(30.0, lambda at: [])

    assert reading.heat.error < ERROR_MAX
    assert reading.heat.routing == "aggregates"
    assert [key.hash_key for key in reading.heat.keys] == [str(md5("a"))]


QUARTER = HASH_KEY_MAX // 4


@over_rows(
    ("shares", "at", "heavier"),
    [
        # An even rest only: the middle.
        ({}, 2 * QUARTER, 0.5),
        # A heavy key low down moves the split down: 0.4 + 0.6 x = 0.5.
        ({5: 0.4}, int(HASH_KEY_MAX / 6), 0.5),
        # A key at a quarter: on the right, 0.15 and 0.85; on the left, 0.55 and 0.45.
        ({QUARTER: 0.4}, QUARTER + 1, 0.55),
        # At three quarters the other way round: the key begins the second shard.
        ({3 * QUARTER: 0.4}, 3 * QUARTER, 0.55),
        # Two equal keys: between them.
        ({QUARTER: 0.5, 3 * QUARTER: 0.5}, QUARTER + 1, 0.5),
        # A key in the middle with most of the weight: one side keeps it.
        ({2 * QUARTER: 0.8}, 2 * QUARTER, 0.9),
        # A key outside of the range is not weighed here.
        ({-1: 0.5}, 2 * QUARTER, 0.5),
    ],
)
def test_a_split_leaves_half_of_the_measured_weight_on_each_side(shares, at, heavier):
    found, share = split_point(shares, WHOLE)

    assert found == pytest.approx(at, rel=1e-9, abs=2)
    assert share == pytest.approx(heavier, abs=1e-6)


@pytest.mark.parametrize(
    ("hash_range", "at"),
    [
        (HashRange(10, 10), None),
        (HashRange(10, 12), None),
        (HashRange(10, 13), 12),
        (HashRange(10, 14), 12),
    ],
)
def test_a_split_is_one_that_the_service_takes(hash_range, at):
    found, _ = split_point({hash_range.start: 0.9}, hash_range)

    assert found == at


SOUND = ShardHeat(60.0, 1e6, 900.0, 1e6, 0.0, 0, 0.02, "keys", (HotKey("7", 0.5),), "9", 0.5)


@over_rows(
    "changes",
    [
        {"covered_s": float("nan")},
        {"in_bytes_per_s": -1.0},
        {"in_records_per_s": float("inf")},
        {"throttled": 1.1},
        {"error": -0.1},
        {"behind_ms": -1},
        {"keys": (HotKey("customer-4711", 0.5),)},
        {"keys": (HotKey("7", 1.5),)},
        {"keys": (HotKey("9" * 40, 0.5),)},
        {"keys": (HotKey(str(HASH_KEY_MAX + 1), 0.5),)},
        {"keys": (HotKey("7", 0.1),) * (KEYS_NAMED_MAX + 1)},
        {"split_at": "half"},
        {"split_share": 2.0},
    ],
)
def test_what_no_meter_can_have_made_is_not_sound(changes):
    assert SOUND.is_sound
    assert not msgspec.structs.replace(SOUND, **changes).is_sound


def test_the_counts_are_bounded_whatever_comes_and_a_heavy_key_stays_in_them():
    """A queue of few records: each page of aggregates is opened in many parts."""
    meter = KeyMeter(WHOLE, WINDOW_S, 0.0)
    for second in range(100):
        meter.took([Record(MAGIC + b"x" * 9_000, "whole", "1", 0.0)], 0, float(second))
        for part in range(200):
            key = "heavy" if part % 10 == 0 else f"{second}-{part}"
            meter.opened([Record(b"x" * 100, key, "1", 0.0, aggregated=True)])

    for window in (meter._former, meter._present):
        assert len(window.keys.weights) == KEYS_COUNTED_MAX
        assert window.keys.weights["heavy", ""] == pytest.approx(window.keys.total / 10, rel=0.2)
