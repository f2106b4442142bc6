"""Which partition keys carry a shard, and where a split halves it, measured while it is read. Pure.

The keys of a sample of the records are counted. What leaves this module (`ShardHeat`)
names a key by its hash key only: partition keys reach no log, metric or row.
`hot_shards.py` decides which shards are hot.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeVar

import msgspec

from kclrun.codec.kpl import MAGIC, effective_hash_key
from kclrun.errors import LimitExceeded
from kclrun.model.quotas import HASH_KEY_DIGITS_MAX, SHARD_WRITE_BYTES_MAX, SHARD_WRITE_RECORDS_MAX
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import Instant
from kclrun.protocol.reports import Report

# A window has fewer sampled keys (`SAMPLES_A_WINDOW`), unless pages of aggregates are opened in
# many parts. A key takes some 300 bytes with its text of 36 characters: the four counts of a lease
# take 300 kB at most.
KEYS_COUNTED_MAX: Final = 256

# A partition key, and the explicit hash key of a user record ("" for none).
Key = tuple[str, str]


class KeyCounts:
    """The weight of each sampled key of a window, and of all samples together.

    At most so many keys are counted, the first that come; of others only `total` knows. So a heavy
    key is counted as it is: of the samples before the 257th key it would have to be none.
    """

    def __init__(self) -> None:
        self.total = 0
        self.weights: dict[Key, int] = {}

    def add(self, key: Key, weight: int) -> None:
        """Add so much weight, 0 or more, to a key."""
        self.total += weight
        weights = self.weights
        if key in weights or len(weights) < KEYS_COUNTED_MAX:
            weights[key] = weights.get(key, 0) + weight


# Samples of a page, and of a window (four a second), however fast the shard is read: so the cost
# grows with time and not with records (`bin/bench hot-keys`). It is below 1 % of a lease process
# that reads a full shard five times a second: some 40 µs of 5 ms a second.
SAMPLES_A_PAGE: Final = 8
SAMPLES_A_WINDOW: Final = 240
# The golden ratio times 2**32: the multiples of it, modulo 2**32, are evenly distributed.
_GOLDEN: Final = 2_654_435_769
_PHASES: Final = 2**32

RecordT = TypeVar("RecordT")


class Sampling:
    """Takes every n-th record of a page, beginning a little further on in each page.

    The beginnings are the multiples of the golden ratio, so over the pages each place of a page is
    taken equally often, and a producer that sends its keys in turn does not meet the same key each
    time. No chance is involved: the same pages give the same samples.

    The error: with n samples of equal size, the measured share of a key with the true share p has
    a standard error of sqrt(p (1 - p) / n), at most 1 / (2 sqrt(n)). Twice that, 1 / sqrt(n), holds
    in 95 % of the cases. Samples of unequal weights w count as n = (sum of w)**2 / (sum of w**2).
    With 240 samples a window it is 6.5 % after one window, 4.6 % after two.
    """

    def __init__(self) -> None:
        self._phase = 0

    def of(self, records: Sequence[RecordT]) -> list[RecordT]:
        """The samples of a page, or of a part of it, that is not empty; in their order."""
        count = len(records)
        taken = min(count, SAMPLES_A_PAGE)
        self._phase = (self._phase + _GOLDEN) % _PHASES
        first = self._phase * count // _PHASES
        return [records[(number * count + first) // taken] for number in range(taken)]


class _TrafficWindow:
    """The records that were read in one window of time."""

    def __init__(self, began: Instant) -> None:
        self.began = began
        # Keys of records and of user records, weighted by bytes; and the keys of whole aggregates.
        self.keys = KeyCounts()
        self.aggregates = KeyCounts()
        self.squares = 0
        self.records = 0
        self.bytes = 0
        self.requests = 0
        self.throttled = 0
        # Of the records that arrived first and last, by the service's clock; 0 without one.
        self.first_at = self.last_at = 0.0

    def count(self, key: Key, weight: int) -> None:
        """Count a key of a record or of a user record."""
        self.keys.add(key, weight)
        self.squares += weight * weight


class HotKey(msgspec.Struct, frozen=True, array_like=True):
    """A key by its hash key (decimal), and the least share of the shard's bytes that it carries."""

    hash_key: str
    share: float


# Which hash keys route the records: those of the measured keys ("keys"), or those of the whole
# aggregates ("aggregates"), or neither: explicit hash keys, which a consumer never sees ("hidden").
Routing = Literal["keys", "aggregates", "hidden", "unknown"]

# So many keys are named, from this share on.
KEYS_NAMED_MAX: Final = 5
SHARE_NAMED_MIN: Final = 0.05
# The share of the measured weight that has to lie within the shard's hash range, so that its hash
# keys can be those that route the records. Not all of it: a reshard leaves a few records astray.
_WITHIN_MIN: Final = 0.95
# An error above this (50 samples) says too little about a key.
ERROR_MAX: Final = 0.15
# More than any stream has. User code shares the memory of the ring and may have written any value.
_RATE_MAX: Final = 1e12


class ShardHeat(Report, frozen=True):
    """The traffic of one shard over the last one to two windows, for its manager.

    `covered_s` is the time that it covers. `in_bytes_per_s` and `in_records_per_s` are what
    producers put, as the service counts (a whole aggregate is one record; its partition key counts
    as bytes). `read_bytes_per_s` is what we read. `throttled` is the share of our requests that
    were throttled. `behind_ms` is the last MillisBehindLatest.

    The rest is about the keys, and unknown below LOAD_WEIGHED_MIN or with too few samples. `keys`
    are the heaviest keys, heaviest first, with shares within `error`: those that `routing` says,
    else those of the user records. `split_at` is the hash key that halves the weight, "" without a
    position, and `split_share` the share of the heavier side.
    """

    covered_s: float
    in_bytes_per_s: float
    in_records_per_s: float
    read_bytes_per_s: float
    throttled: float
    behind_ms: int
    error: float = 1.0
    routing: Routing = "unknown"
    keys: tuple[HotKey, ...] = ()
    split_at: str = ""
    split_share: float = 1.0

    @property
    def load(self) -> float:
        """What producers put, as a share of what the shard takes: by bytes or records."""
        return max(
            self.in_bytes_per_s / SHARD_WRITE_BYTES_MAX,
            self.in_records_per_s / SHARD_WRITE_RECORDS_MAX,
        )

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
    is_number = text.isascii() and text.isdigit() and len(text) <= HASH_KEY_DIGITS_MAX
    return is_number and int(text) <= HASH_KEY_MAX


# Each window is reported so many times.
_REPORTS_A_WINDOW: Final = 2
# The shortest time over which a rate is taken, and the lag that counts as behind.
_SPANS_A_WINDOW: Final = 6
# Below this load no shard is hot by what producers put (`hot_shards.py`): its keys are not weighed.
LOAD_WEIGHED_MIN: Final = 0.2


class KeyMeter:
    """Measures one shard. Call `took` for each page, then `opened` for its user records.

    Windows of `window_s` follow each other. A report covers the last whole window and the present
    one so far: so a key is forgotten after two windows at most. The first report comes behind the
    first whole window.
    """

    def __init__(self, hash_range: HashRange | None, window_s: float, now: Instant) -> None:
        self._hash_range = hash_range
        self._window_s = window_s
        self._sampling = Sampling()
        self._present = _TrafficWindow(now)
        self._former: _TrafficWindow | None = None
        self._reported = self._sampled_until = now
        self._behind_ms = 0
        # The records since the last sampled page, which the samples of the next one represent. How
        # many records one of the sampled page represents; 0 while the page is not sampled.
        self._skipped = 0
        self._scale = 0.0

    def took(self, records: Sequence[Record], behind_ms: int | None, now: Instant) -> None:
        """A page was read, with its records as the service counts them."""
        if now - self._present.began >= self._window_s:
            self._turn(now)
        window = self._present
        window.requests += 1
        self._behind_ms = max(0, behind_ms or 0)
        self._scale = 0.0
        count = len(records)
        if not count:
            return
        window.records += count
        self._skipped += count
        window.first_at = window.first_at or records[0].approximate_arrival_timestamp
        window.last_at = records[-1].approximate_arrival_timestamp
        if now < self._sampled_until:
            return
        self._scale, self._skipped = self._skipped / count, 0
        samples = self._sampling.of(records)
        self._sampled_until = Instant(now + len(samples) * self._window_s / SAMPLES_A_WINDOW)
        scale = self._scale * count / len(samples)
        for record in samples:
            data, key = record.data, record.partition_key
            weight = int((len(data) + len(key)) * scale)
            window.bytes += weight
            if data[:4] == MAGIC:
                window.aggregates.add((key, ""), weight)
            else:
                window.count((key, ""), weight)

    def opened(self, records: Sequence[Record]) -> None:
        """User records of the page. Those that are whole records were counted by `took`."""
        if not self._scale or not records:
            return
        samples = self._sampling.of(records)
        scale = self._scale * len(records) / len(samples)
        for record in samples:
            if record.aggregated:
                key = record.partition_key
                weight = int((len(record.data) + len(key)) * scale)
                self._present.count((key, record.explicit_hash_key or ""), weight)

    def throttled(self, now: Instant) -> None:
        """A request was throttled."""
        self._turn(now)
        self._present.requests += 1
        self._present.throttled += 1

    def report(self, now: Instant) -> ShardHeat | None:
        """The report, if one is due."""
        if now - self._reported < self._window_s / _REPORTS_A_WINDOW:
            return None
        self._turn(now)
        if self._former is None:
            return None
        self._reported = now
        return self._measured((self._former, self._present), now)

    def _turn(self, now: Instant) -> None:
        passed_s = now - self._present.began
        if passed_s < self._window_s:
            return
        # A process that stood still (a full queue, an outage) has not read the former window.
        is_next = passed_s < 2 * self._window_s
        self._former = self._present if is_next else None
        self._present = _TrafficWindow(now)

    def _measured(self, windows: tuple[_TrafficWindow, _TrafficWindow], now: Instant) -> ShardHeat:
        covered_s = max(now - windows[0].began, 1e-3)
        size = sum(window.bytes for window in windows)
        records = sum(window.records for window in windows)
        requests = sum(window.requests for window in windows)
        seconds = self._arrived_in_s(windows, covered_s)
        traffic = ShardHeat(
            covered_s=covered_s,
            in_bytes_per_s=size / seconds,
            in_records_per_s=records / seconds,
            read_bytes_per_s=size / covered_s,
            throttled=sum(window.throttled for window in windows) / max(requests, 1),
            behind_ms=self._behind_ms,
        )
        return self._weighed(traffic, windows) if traffic.load >= LOAD_WEIGHED_MIN else traffic

    def _weighed(
        self, traffic: ShardHeat, windows: tuple[_TrafficWindow, _TrafficWindow]
    ) -> ShardHeat:
        """The report with the keys, if there are enough samples of them."""
        keys = _KeyWeights.of([window.keys for window in windows])
        squares = sum(window.squares for window in windows)
        error = math.sqrt(squares) / keys.total if keys.total else 1.0
        if error > ERROR_MAX:
            return traffic
        routing, routed = self._routing(keys, windows)
        at, heavier = None, 1.0
        if routing != "hidden" and self._hash_range is not None:
            at, heavier = split_point(routed.shares, self._hash_range)
        return msgspec.structs.replace(
            traffic,
            error=error,
            routing=routing,
            keys=routed.heaviest,
            split_at="" if at is None else str(at),
            split_share=heavier,
        )

    def _arrived_in_s(
        self, windows: tuple[_TrafficWindow, _TrafficWindow], covered_s: float
    ) -> float:
        """The time in which the records that were read arrived.

        At the tip it is the time of the reading, or longer if a backlog was read. Behind the tip it
        is the span of the arrivals, but a sixth of a window at least: a few records that arrived at
        once would make any rate.
        """
        former, present = windows
        first_at = former.first_at or present.first_at
        span_s = max(0.0, max(former.last_at, present.last_at) - first_at) if first_at else 0.0
        short_s = self._window_s / _SPANS_A_WINDOW
        is_behind = self._behind_ms > short_s * 1000
        return max(span_s, min(short_s, covered_s) if is_behind else covered_s)

    def _routing(
        self, keys: _KeyWeights, windows: tuple[_TrafficWindow, _TrafficWindow]
    ) -> tuple[Routing, _KeyWeights]:
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
        aggregates = _KeyWeights.of([window.aggregates for window in windows])
        if aggregates.total and aggregates.within(hash_range) >= _WITHIN_MIN:
            return "aggregates", aggregates
        return "hidden", keys


# The heavy keys of which a split is computed; each takes a hash.
_KEYS_PLACED_MAX: Final = 64


class _KeyWeights:
    """The heaviest keys of several windows, by hash key, with the share of the weight of each."""

    def __init__(self, total: int, weights: Mapping[Key, int]) -> None:
        self.total = total
        self.shares: dict[int, float] = {}
        self._outside = 0.0
        for key in heapq.nlargest(_KEYS_PLACED_MAX, weights, key=weights.__getitem__):
            share = weights[key] / total if total else 0.0
            try:
                place = effective_hash_key(key[0], key[1] or None)
            except LimitExceeded:
                self._outside += share
            else:
                self.shares[place] = self.shares.get(place, 0.0) + share

    @classmethod
    def of(cls, windows: Sequence[KeyCounts]) -> _KeyWeights:
        weights: dict[Key, int] = {}
        for counts in windows:
            for key, weight in counts.weights.items():
                weights[key] = weights.get(key, 0) + weight
        return cls(sum(counts.total for counts in windows), weights)

    @property
    def heaviest(self) -> tuple[HotKey, ...]:
        named = [
            HotKey(str(place), min(share, 1.0))
            for place, share in self.shares.items()
            if share >= SHARE_NAMED_MIN
        ]
        return tuple(sorted(named, key=lambda key: -key.share)[:KEYS_NAMED_MAX])

    def within(self, hash_range: HashRange) -> float:
        """The share of the placed weight whose hash keys lie in the range; 1 without any."""
        placed = sum(self.shares.values()) + self._outside
        inside = sum(share for place, share in self.shares.items() if place in hash_range)
        return inside / placed if placed else 1.0


def split_point(shares: Mapping[int, float], hash_range: HashRange) -> tuple[int | None, float]:
    """Where a split leaves about half of the weight on each side, and the heavier side's share.

    `shares` are those of the heavy keys, by hash key. The rest of the weight is of keys that carry
    less than 1 / _KEYS_PLACED_MAX each; MD5 spreads them evenly. The error is small: n keys of
    equal weight that fall on two sides by chance differ from halves by 1 / (2 sqrt(n)), 6 % for 64.

    None if the range is too small. A hash key of the second shard is greater than one plus the
    first hash key of the range, and less than its last (SplitShard refuses others).
    """
    start, end = hash_range.start, hash_range.end
    lowest, highest = start + 2, end - 1
    if lowest > highest:
        return None, 1.0
    inside = sorted((place, share) for place, share in shares.items() if place in hash_range)
    weights = _WeightOverRange(inside, hash_range)
    # Half of the weight is below `middle` for the first time: a heavy key may lie just before it.
    middle = weights.middle()
    at = min((max(lowest, min(at, highest)) for at in (middle, middle - 1)), key=weights.heavier)
    return at, weights.heavier(at)


class _WeightOverRange:
    """The weight along a hash range: heavy keys at their places, the rest evenly between them."""

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
        """The first hash key with half of the weight below it."""
        # The heavy keys below the middle: those with less than half below their own place and them.
        low, high = 0, len(self._places)
        while low < high:
            number = (low + high) // 2
            is_below = self.below(self._places[number] + 1) < 0.5
            low, high = (number + 1, high) if is_below else (low, number)
        after = self._places[low - 1] + 1 if low else self._start
        before = self._places[low] + 1 if low < len(self._places) else self._start + self._width
        missing = 0.5 - self._sums[low]
        even = self._start + math.ceil(missing / self._rest * self._width) if self._rest else before
        return max(after, min(even, before))
