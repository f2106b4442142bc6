"""Which partition keys carry a shard, and where a split halves it, measured while it is read. Pure.

A sample of the records goes through a sketch of fixed size. What leaves this module (`ShardHeat`)
names a key by its hash key only: partition keys reach no log, metric or row.
`hot_shards.py` decides what is hot.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from kclrun.codec.kpl import MAGIC, effective_hash_key
from kclrun.errors import LimitExceeded
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import Instant
from kclrun.protocol.reports import Report

# A key is only interesting from a few percent on: 128 counters name each key above 0.8 %, and take
# 128 times the length of a key (256 characters at most) and 200 bytes: 60 KiB at most in ASCII.
COUNTERS_MAX: Final = 128

# A partition key, and the explicit hash key of a user record ("" for none).
Key = tuple[str, str]


class SpaceSaving:
    """The heaviest keys of a stream of weighted keys, in a fixed number of counters.

    After A. Metwally, D. Agrawal, A. El Abbadi, "Efficient Computation of Frequent and Top-k
    Elements in Data Streams", ICDT 2005 (LNCS 3363), with weights in place of single counts. A key
    without a counter takes over the smallest one, and its weight as a possible error.

    With a total weight of W and k counters, for each counted key

        weight - error <= true weight <= weight,   error <= W / k

    and each key with a true weight above W / k is counted. The reason: each addition goes to one
    counter, so the counters add up to W, and the smallest is at most W / k. A taken-over weight is
    the smallest of its time. A key without a counter never weighed more than the smallest.

    The smallest counter is found by a heap of the weights as they were when last looked at. A
    weight only grows, so a heap entry is never too large: if the top entry is current, it is the
    smallest. An addition to a counted key touches the dictionary only.
    """

    def __init__(self, counters_max: int = COUNTERS_MAX) -> None:
        self.total = 0
        self._counters_max = counters_max
        self._weights: dict[Key, int] = {}
        self._errors: dict[Key, int] = {}
        # The ordinal breaks ties: the counter that was taken over first goes first.
        self._heap: list[tuple[int, int, Key]] = []
        self._ordinal = 0

    def add(self, key: Key, weight: int) -> None:
        """Add so much weight, 0 or more, to a key."""
        self.total += weight
        if key in self._weights:
            self._weights[key] += weight
            return
        self._ordinal += 1
        if len(self._weights) < self._counters_max:
            self._weights[key] = weight
            heapq.heappush(self._heap, (weight, self._ordinal, key))
            return
        least, former = self._smallest()
        del self._weights[former]
        self._errors.pop(former, None)
        self._weights[key] = least + weight
        self._errors[key] = least
        heapq.heapreplace(self._heap, (least + weight, self._ordinal, key))

    def counted(self) -> Iterator[tuple[Key, int, int]]:
        """Each counted key with its weight and its error."""
        for key, weight in self._weights.items():
            yield key, weight, self._errors.get(key, 0)

    def _smallest(self) -> tuple[int, Key]:
        heap, weights = self._heap, self._weights
        while True:
            seen, ordinal, key = heap[0]
            weight = weights[key]
            if seen == weight:
                return weight, key
            heapq.heapreplace(heap, (weight, ordinal, key))


# A sample costs some 1.5 µs, most of it the sketch. A page costs some 400 µs (request, signature,
# decoding) and 1.2 µs a record. So three samples a page and one for each 256 records are below 1 %
# (`bin/bench hot-keys` measures it).
SAMPLES_MIN: Final = 3
RECORDS_A_SAMPLE: Final = 256
# The golden ratio times 2**32: the multiples of it, modulo 2**32, are evenly distributed.
_GOLDEN: Final = 2_654_435_769
_PHASES: Final = 2**32

RecordT = TypeVar("RecordT")


class Sampling:
    """Takes every n-th record of each page, beginning a little further on in each page.

    The number of samples depends on the length of a page only. The beginnings are the multiples of
    the golden ratio, so over the pages each place of a page is taken equally often, and a producer
    that sends its keys in turn does not meet the same key each time.

    The error: a sample stands for as many records as lie between two samples. A key with the share
    p of n samples of about equal size has a standard error of at most sqrt(p (1 - p) / n), which is
    at most 1 / (2 sqrt(n)); twice that covers 95 % of the cases. Samples of unequal weights w count
    as n = (sum of w)**2 / (sum of w**2). Five pages a second of three samples are 900 samples a
    minute: an error of 3.3 %, and 0.8 % of the sketch.
    """

    def __init__(self) -> None:
        self._phase = 0

    def of(self, records: Sequence[RecordT]) -> list[RecordT]:
        """The samples of a page or a part of it, in their order."""
        count = len(records)
        taken = min(count, SAMPLES_MIN + count // RECORDS_A_SAMPLE)
        self._phase = (self._phase + _GOLDEN) % _PHASES
        first = self._phase * count // _PHASES
        return [records[(number * count + first) // taken] for number in range(taken)]


class _Window:
    """What was read in one window of time."""

    def __init__(self, began: Instant) -> None:
        self.began = began
        # Keys of records and of user records, weighted by bytes; and the keys of whole aggregates.
        self.keys = SpaceSaving()
        self.aggregates = SpaceSaving()
        self.squares = 0
        self.records = 0
        self.bytes = 0
        self.requests = 0
        self.throttled = 0
        self.arrivals: list[float] = []

    def arrived(self, at: float) -> None:
        """Keep the first and the last arrival."""
        if at > 0.0:
            self.arrivals = [min([at, *self.arrivals]), max([at, *self.arrivals])]


class HotKey(msgspec.Struct, frozen=True, array_like=True):
    """A key by its hash key (decimal), and the least share of the shard's bytes that it carries."""

    hash_key: str
    share: float


# The hash keys that the measured keys have are those that route the records ("keys"), or those of
# the whole aggregates are ("aggregates"), or neither: explicit hash keys, which no consumer sees.
Routing = Literal["keys", "aggregates", "hidden"]

# So many keys are named, from this share on.
KEYS_NAMED_MAX: Final = 5
SHARE_NAMED_MIN: Final = 0.05
# The share of the measured weight that has to lie within the shard's hash range, so that its hash
# keys can be those that route the records. Not all of it: a reshard leaves a few records astray.
_WITHIN_MIN: Final = 0.95
# An error above this (100 samples) says nothing about a key.
ERROR_MAX: Final = 0.12
_DIGITS_MAX: Final = 39
# More than any stream has; user code shares the memory of the ring, and may have written any value.
_RATE_MAX: Final = 1e12


class ShardHeat(Report, frozen=True):
    """The traffic of one shard over the last one to two windows, for its manager.

    `covered_s` is the time that it covers. `in_bytes_per_s` and `in_records_per_s` are what
    producers put, as the service counts (a whole aggregate is one record; its partition key counts
    as bytes). `read_bytes_per_s` is what we read. `throttled` is the share of our requests that
    were throttled. `behind_ms` is the last MillisBehindLatest.

    `keys` are the heaviest keys, heaviest first, with shares within `error`; empty while the error
    is too large. `split_at` is the hash key that halves the weight, "" without a position, and
    `split_share` the share of the heavier side then.
    """

    covered_s: float
    in_bytes_per_s: float
    in_records_per_s: float
    read_bytes_per_s: float
    throttled: float
    behind_ms: int
    error: float
    routing: Routing
    keys: tuple[HotKey, ...] = ()
    split_at: str = ""
    split_share: float = 1.0

    @property
    def is_sound(self) -> bool:
        """Whether each value is one that `KeyMeter` can have made."""
        rates = (self.in_bytes_per_s, self.in_records_per_s, self.read_bytes_per_s, self.covered_s)
        shares = (self.throttled, self.split_share, *(key.share for key in self.keys))
        hash_keys = [key.hash_key for key in self.keys]
        return (
            all(0.0 <= rate <= _RATE_MAX for rate in rates)
            and all(0.0 <= share <= 1.0 for share in shares)
            and 0.0 <= self.error <= _RATE_MAX
            and self.behind_ms >= 0
            and len(hash_keys) <= KEYS_NAMED_MAX
            and all(_is_hash_key(text) for text in hash_keys)
            and (not self.split_at or _is_hash_key(self.split_at))
        )


def _is_hash_key(text: str) -> bool:
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    return is_number and int(text) <= HASH_KEY_MAX


# Each window is reported so many times.
_REPORTS_A_WINDOW: Final = 6


class KeyMeter:
    """Measures one shard; `took` for each page, then `opened` for its user records.

    Two windows of `window_s` follow each other: a report covers the former one and what is there of
    the present one. So a key is forgotten after two windows at most, and a report rests on one
    whole window at least. None is made before.
    """

    def __init__(self, hash_range: HashRange | None, window_s: float, now: Instant) -> None:
        self._hash_range = hash_range
        self._window_s = window_s
        self._sampling = Sampling()
        self._present = _Window(now)
        self._former: _Window | None = None
        self._reported = now
        self._behind_ms = 0

    def took(self, records: Sequence[Record], behind_ms: int | None, now: Instant) -> None:
        """A page was read, with its records as the service counts them."""
        self._turn(now)
        window = self._present
        window.requests += 1
        self._behind_ms = max(0, behind_ms or 0)
        if not records:
            return
        samples = self._sampling.of(records)
        count, taken = len(records), len(samples)
        window.records += count
        window.arrived(records[0].approximate_arrival_timestamp)
        window.arrived(records[-1].approximate_arrival_timestamp)
        for record in samples:
            key = record.partition_key
            weight = (len(record.data) + len(key)) * count // taken
            window.bytes += weight
            if record.data[:4] == MAGIC:
                window.aggregates.add((key, ""), weight)
            else:
                window.keys.add((key, ""), weight)
                window.squares += weight * weight

    def opened(self, records: Sequence[Record]) -> None:
        """User records of the page. Those that are whole records were counted by `took`."""
        if not records:
            return
        samples = self._sampling.of(records)
        window, count, taken = self._present, len(records), len(samples)
        for record in samples:
            if record.aggregated:
                key = record.partition_key
                weight = (len(record.data) + len(key)) * count // taken
                window.keys.add((key, record.explicit_hash_key or ""), weight)
                window.squares += weight * weight

    def throttled(self, now: Instant) -> None:
        """A request was throttled."""
        self._turn(now)
        self._present.requests += 1
        self._present.throttled += 1

    def report(self, now: Instant) -> ShardHeat | None:
        """The measurement, if one is due."""
        self._turn(now)
        former = self._former
        if former is None or now - self._reported < self._window_s / _REPORTS_A_WINDOW:
            return None
        self._reported = now
        return self._measured((former, self._present), now)

    def _turn(self, now: Instant) -> None:
        passed_s = now - self._present.began
        if passed_s < self._window_s:
            return
        # A process that stood still (a full queue, an outage) has not read the former window.
        is_next = passed_s < 2 * self._window_s
        self._former = self._present if is_next else None
        self._present = _Window(now)

    def _measured(self, windows: tuple[_Window, _Window], now: Instant) -> ShardHeat:
        covered_s = max(now - windows[0].began, 1e-3)
        size, records = (sum(getattr(w, name) for w in windows) for name in ("bytes", "records"))
        requests = sum(window.requests for window in windows)
        seconds = self._arrived_in_s([at for w in windows for at in w.arrivals], covered_s)
        weighed = _Weighed.of([window.keys for window in windows])
        squares = sum(window.squares for window in windows)
        error = math.sqrt(squares) / weighed.total + 1 / COUNTERS_MAX if weighed.total else 1.0
        routing, routed = self._routing(weighed, windows)
        at, heavier = None, 1.0
        if routing != "hidden" and self._hash_range is not None and error <= ERROR_MAX:
            at, heavier = split_point(routed.shares, self._hash_range)
        return ShardHeat(
            covered_s=covered_s,
            in_bytes_per_s=size / seconds,
            in_records_per_s=records / seconds,
            read_bytes_per_s=size / covered_s,
            throttled=sum(window.throttled for window in windows) / max(requests, 1),
            behind_ms=self._behind_ms,
            error=error,
            routing=routing,
            keys=weighed.heaviest if error <= ERROR_MAX else (),
            split_at="" if at is None else str(at),
            split_share=heavier,
        )

    def _arrived_in_s(self, arrivals: list[float], covered_s: float) -> float:
        """The time in which the records that were read arrived.

        At the tip it is the time of the reading, or longer if a backlog was read in it. Behind the
        tip the arrivals themselves say it; a few records that arrived at once would make any rate,
        so it is the time between two reports at least.
        """
        span_s = max(arrivals) - min(arrivals) if arrivals else 0.0
        short_s = self._window_s / _REPORTS_A_WINDOW
        is_behind = self._behind_ms > short_s * 1000
        return max(span_s, min(short_s, covered_s) if is_behind else covered_s)

    def _routing(
        self, keys: _Weighed, windows: tuple[_Window, _Window]
    ) -> tuple[Routing, _Weighed]:
        """The hash keys by which the records came to this shard.

        The service routes a record by its explicit hash key, which a consumer never sees, else by
        the MD5 of its partition key. If the keys lie within the shard's range, they decide (a
        producer that aggregates by shard, as the KPL does, follows the keys of the user records
        after a split, too). Other aggregators put user records of any key together: then the keys
        of the aggregates decide, if those lie within the range.
        """
        hash_range = self._hash_range
        if hash_range is None:
            return "hidden", keys
        if keys.within(hash_range) >= _WITHIN_MIN:
            return "keys", keys
        aggregates = _Weighed.of([window.aggregates for window in windows])
        if aggregates.total and aggregates.within(hash_range) >= _WITHIN_MIN:
            return "aggregates", aggregates
        return "hidden", keys


class _Weighed:
    """The counted keys of several sketches, by hash key: the weight that each has at least.

    The bounds add up: over sketches with the totals V and W, a weight is too small by (V + W) / k
    at most.
    """

    def __init__(self, total: int, weights: Mapping[int | None, int]) -> None:
        self.total = total
        self._weights = weights

    @classmethod
    def of(cls, sketches: Iterable[SpaceSaving]) -> _Weighed:
        total = 0
        weights: dict[int | None, int] = {}
        for sketch in sketches:
            total += sketch.total
            for key, weight, error in sketch.counted():
                position = _position(key)
                weights[position] = weights.get(position, 0) + weight - error
        return cls(total, weights)

    @property
    def shares(self) -> dict[int, float]:
        """Of each hash key, the share of the whole that it has at least."""
        return {
            position: weight / self.total
            for position, weight in self._weights.items()
            if position is not None and weight
        }

    @property
    def heaviest(self) -> tuple[HotKey, ...]:
        named = [
            HotKey(str(position), min(share, 1.0))
            for position, share in self.shares.items()
            if share >= SHARE_NAMED_MIN
        ]
        return tuple(sorted(named, key=lambda key: -key.share)[:KEYS_NAMED_MAX])

    def within(self, hash_range: HashRange) -> float:
        """The share of the counted weight whose hash keys lie in the range; 1 without any."""
        counted = sum(self._weights.values())
        inside = sum(
            weight
            for position, weight in self._weights.items()
            if position is not None and position in hash_range
        )
        return inside / counted if counted else 1.0


def _position(key: Key) -> int | None:
    """The hash key of a key; None for an explicit hash key that is not a number in the range."""
    try:
        return effective_hash_key(key[0], key[1] or None)
    except LimitExceeded:
        return None


def split_point(shares: Mapping[int, float], hash_range: HashRange) -> tuple[int | None, float]:
    """Where a split leaves about half of the weight on each side, and the heavier side's share.

    `shares` are those of the heavy keys, by hash key. The rest of the weight is of keys that carry
    less than 1 / COUNTERS_MAX each; MD5 spreads them evenly. Its error is small: n keys of equal
    weight that fall on two sides by chance differ from halves by 1 / (2 sqrt(n)), 4.4 % for 128.

    None if the range is too small. A hash key of the second shard is greater than one plus the
    first hash key of the range, and less than its last (SplitShard refuses others).
    """
    start, end = hash_range.start, hash_range.end
    lowest, highest = start + 2, end - 1
    if lowest > highest:
        return None, 1.0
    inside = sorted((place, share) for place, share in shares.items() if place in hash_range)
    weights = _Line(inside, hash_range)
    # Half of the weight is below `middle` for the first time: a heavy key may lie just before it.
    middle = weights.middle()
    within = [max(lowest, min(at, highest)) for at in (middle, middle - 1)]
    at = min(within, key=weights.heavier)
    return at, weights.heavier(at)


class _Line:
    """The weight along a hash range: heavy keys at their places, and an even rest between them."""

    def __init__(self, keys: Sequence[tuple[int, float]], hash_range: HashRange) -> None:
        self._places = [place for place, _ in keys]
        self._sums = [0.0, *itertools.accumulate(share for _, share in keys)]
        self._rest = max(0.0, 1.0 - self._sums[-1])
        self._start = hash_range.start
        self._width = hash_range.end - hash_range.start + 1

    def below(self, at: int) -> float:
        """The share of the weight whose hash keys are less than `at`."""
        heavy = self._sums[bisect.bisect_left(self._places, at)]
        return heavy + self._rest * ((at - self._start) / self._width)

    def heavier(self, at: int) -> float:
        """The share of the heavier side of a split at `at`."""
        below = self.below(at)
        return min(1.0, max(below, 1.0 - below))

    def middle(self) -> int:
        """The first hash key, by halving the range, with half of the weight below it."""
        low, high = self._start, self._start + self._width
        while low < high:
            at = (low + high) // 2
            low, high = (at + 1, high) if self.below(at) < 0.5 else (low, at)
        return low
