"""The search for one shard's bound: which pages are read, which bound they show, what is kept."""

import msgspec
import pytest

from kclrun.errors import InvalidRequest
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record
from kclrun.spark.planning.bound_search import BatchTarget, find_bound
from kclrun.spark.planning.shard_cursor import Paged, PageRun, Refused, ShardCursor
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, at_timestamp, before
from tests.support.tables import over_rows

# The service's time of every request.
ASKED_MS = 99_000


def row(number, at):
    return Record(b"x" * 100, "k", str(number), at)  # 200 bytes with what is around it


class Shard:
    """Records that are numbered from 1 and stamped with these seconds; `calls` are the reads as
    `<place>:<limit>`. The token of an iterator is the number of the records before it."""

    def __init__(self, stamps, *, is_closed=False, gap_pages=0, times_max=1e9, reads_max=50):
        self.records = [row(number, at) for number, at in enumerate(stamps, 1)]
        self.calls = []
        self._is_closed = is_closed
        self._gap_pages = gap_pages
        self._times_max = times_max  # seconds; later ones are refused
        self.page_max = 10_000
        self._reads_max = reads_max  # later ones are refused

    def put(self, *stamps):
        self.records += [row(len(self.records) + n, at) for n, at in enumerate(stamps, 1)]

    def answer(self, read):
        opening = read.opening
        place, at = (read.token, int(read.token or 0)) if opening is None else self._open(opening)
        self.calls.append(f"{place}:{read.limit}")
        is_late = opening is not None and (opening.timestamp or 0) > self._times_max
        if is_late or len(self.calls) > self._reads_max:
            return Refused(InvalidRequest("a time in the future", operation="GetShardIterator"))
        if self._gap_pages:
            self._gap_pages -= 1
            return Paged(str(at), FetchedPage([], str(at), 1000), 0.0, 0.0)
        records = self.records[at : at + min(read.limit, self.page_max)]
        end = at + len(records)
        left = len(self.records) - end
        following = None if self._is_closed and not left else str(end)
        return Paged(str(at), FetchedPage(records, following, 1000 * left), 0.0, 0.0)

    def _open(self, opening):
        match opening.kind:
            case IteratorType.AT_SEQUENCE_NUMBER:
                return f"@{opening.sequence_number}", int(opening.sequence_number) - 1
            case IteratorType.AFTER_SEQUENCE_NUMBER:
                return opening.sequence_number + "+", int(opening.sequence_number)
            case IteratorType.AT_TIMESTAMP:
                early = (each.approximate_arrival_timestamp for each in self.records)
                late = (n for n, stamp in enumerate(early) if stamp >= opening.timestamp)
                return f"{opening.timestamp:g}s", next(late, len(self.records))
        return "oldest", 0


def walk(shard, cursor, target, asked_ms=ASKED_MS):
    """The reads of one search."""
    shard.calls.clear()
    search = find_bound(cursor, target)
    try:
        want = next(search)
        for _ in range(50):
            answer = shard.answer(want.page_run.read(want.limit, 0.0))
            if isinstance(answer, Paged):
                answer = msgspec.structs.replace(answer, sent_at=asked_ms / 1000)
            want = search.send((answer, asked_ms))
    except StopIteration:
        return " ".join(shard.calls)
    raise AssertionError(f"no end: {shard.calls}")


def tip(until_ms=90_000, **more):
    return BatchTarget(until_ms, 1_000, is_tip=True, **more)


def until(until_ms):
    return BatchTarget(until_ms, 1_000)


HEADS = BatchTarget(0, 1_000, only_heads=True)
DENSE = [number / 10 for number in range(900)]  # ten a second, for 90 s
# The second record is stamped ahead of its time: times before 70 s lead back to it.
AHEAD = [1, 70, 2, 3, 4, *(5 + number / 100 for number in range(300))]
BEHIND = [1, *AHEAD]

# By claim: the shard, the position, the target; the reads, the bound, the arrival of the record
# that it is before, and the service's time at which nothing followed it.
SEARCHES = {
    "the tip of an empty shard is where it begins": (
        ([], {}, TRIM_HORIZON, tip()),
        ("oldest:64", TRIM_HORIZON, None, ASKED_MS),
    ),
    "the tip is after the last record": (
        ([1, 2, 3], {}, TRIM_HORIZON, tip()),
        ("oldest:64", after("3"), None, ASKED_MS),
    ),
    "a shard that has ended has an end": (
        ([1, 2, 3], {"is_closed": True}, TRIM_HORIZON, tip()),
        ("oldest:64", SHARD_END, None, None),
    ),
    "an empty shard that has ended too": (
        ([], {"is_closed": True}, TRIM_HORIZON, tip()),
        ("oldest:64", SHARD_END, None, None),
    ),
    "a gap is read through": (
        ([1, 2, 3], {"gap_pages": 2}, TRIM_HORIZON, tip()),
        ("oldest:64 0:64 0:64", after("3"), None, ASKED_MS),
    ),
    "a time leads to the tip": (
        ([1, 2, 3], {}, at_timestamp(2_000), tip()),
        ("2s:64", after("3"), None, ASKED_MS),
    ),
    "a time that no record has is a tip": (
        ([1, 2, 3], {}, at_timestamp(9_000), tip()),
        ("9s:64", at_timestamp(9_000), None, ASKED_MS),
    ),
    "a head is no bound": (
        ([1, 2, 3], {}, TRIM_HORIZON, HEADS),
        ("oldest:64", TRIM_HORIZON, None, None),
    ),
    "nothing is the head of an empty shard": (
        ([], {}, TRIM_HORIZON, HEADS),
        ("oldest:64", TRIM_HORIZON, None, ASKED_MS),
    ),
    "a head after a record is read with that record": (
        ([1, 2, 3], {}, after("1"), HEADS),
        ("@1:65", after("1"), None, None),
    ),
    "a shard without a head that has ended has an end": (
        ([1, 2, 3], {"is_closed": True}, after("3"), HEADS),
        ("@3:65", SHARD_END, None, None),
    ),
    "before the first late record": (
        ([1, 2, 3], {}, TRIM_HORIZON, until(2_001)),
        ("oldest:64", before("3"), 3_000, None),
    ),
    "a record of that very time is late": (
        ([1, 2, 3], {}, TRIM_HORIZON, until(3_000)),
        ("oldest:64", before("3"), 3_000, None),
    ),
    "where the first is late, nothing is read": (
        ([1, 2, 3], {}, TRIM_HORIZON, until(1_000)),
        ("oldest:64", TRIM_HORIZON, None, None),
    ),
    "from a record on, the time is looked up": (
        ([1, 2, 3], {}, after("1"), until(2_500)),
        ("2.5s:64", before("3"), 3_000, None),
    ),
    "where none is late, the tip": (
        ([1, 2, 3], {}, TRIM_HORIZON, until(5_000)),
        ("oldest:64", after("3"), None, ASKED_MS),
    ),
    "where none is late after a record, a page from there": (
        ([1, 2, 3], {}, after("1"), until(5_000)),
        ("5s:64 @1:513", after("3"), None, ASKED_MS),
    ),
    "where none is late and the shard has ended, its end": (
        ([1, 2, 3], {"is_closed": True}, after("1"), until(5_000)),
        ("5s:64", SHARD_END, None, None),
    ),
    "a busy shard's bound is found by its time": (
        (DENSE, {}, TRIM_HORIZON, tip(80_000)),
        ("oldest:64 80s:100", before("801"), 80_000, None),
    ),
    "a busy shard's bound is found by its time from a record on": (
        (DENSE, {}, after("5"), tip(80_000)),
        ("@5:65 80s:100", before("801"), 80_000, None),
    ),
    "a window ends by its time": (
        (DENSE, {}, TRIM_HORIZON, until(80_000)),
        ("oldest:64 80s:100", before("801"), 80_000, None),
    ),
    "a window ends by its time from a record on": (
        (DENSE, {}, after("5"), until(80_000)),
        ("80s:64", before("801"), 80_000, None),
    ),
    "beyond the tip a time half-way saves pages": (
        (DENSE, {}, after("5"), until(500_000)),
        ("500s:64 @5:513 275.8s:100 517:2621", after("900"), None, ASKED_MS),
    ),
    "a refused time is read towards": (
        (DENSE, {"times_max": 0}, after("5"), until(80_000)),
        ("80s:64 @5:513 65.8s:100 517:2621", before("801"), 80_000, None),
    ),
    "a refused time is read towards to the tip": (
        (DENSE, {"times_max": 0}, after("5"), tip(80_000)),
        ("@5:65 80s:100 69:2621", after("900"), None, ASKED_MS),
    ),
    "where the first of all is late, it is no bound": (
        ([1, 9], {"times_max": 0}, after("1"), until(5_000)),
        ("5s:64 @1:513", after("1"), None, None),
    ),
    "a time that leads back to an early record gives way to one page": (
        (AHEAD, {}, after("1"), tip(60_000)),
        ("@1:65 60s:100", before("65"), 5_590, None),
    ),
    "and to all pages where all are wanted": (
        (AHEAD, {}, after("1"), tip(60_000, takes_all=True)),
        ("@1:65 60s:100 65:1310", after("305"), None, ASKED_MS),
    ),
    "in pages that may be inlined, with an eighth to spare": (
        ([*AHEAD, *[9] * 5_000], {}, after("1"), BatchTarget(60_000, 2**19, True, takes_all=True)),
        ("@1:513 60s:100 513:2293 2806:2293 5099:2293", after("5305"), None, ASKED_MS),
    ),
    "a refused page ends the search": (
        ([1, 2, 3], {"reads_max": 1}, after("1"), until(5_000)),
        ("5s:64 @1:513", after("1"), None, None),
    ),
    "a refused second page too": (
        (DENSE, {"reads_max": 3}, after("5"), until(500_000)),
        ("500s:64 @5:513 275.8s:100 517:2621", before("517"), 51_600, None),
    ),
    "and one after a step": (
        (AHEAD, {"reads_max": 2}, after("1"), tip(60_000, takes_all=True)),
        ("@1:65 60s:100 65:1310", after("1"), None, None),
    ),
    "a time half-way leads on where a later one is refused": (
        (DENSE, {"times_max": 90}, after("5"), until(95_000)),
        ("95s:64 @5:513 73.3s:100 833:2621", after("900"), None, ASKED_MS),
    ),
    "away from the tip the early record ends the batch": (
        (BEHIND, {}, after("1"), until(60_000)),
        ("60s:64", before("3"), 70_000, None),
    ),
}


@over_rows(("asked", "found"), SEARCHES.values())
def test_the_bound_of_a_batch(asked, found):
    stamps, kind, position, target = asked
    shard, cursor = Shard(stamps, **kind), ShardCursor("s", position, 1_000_000)

    reads = walk(shard, cursor, target)

    arrived_ms = None if cursor.finding is None else cursor.finding.arrived_ms
    assert (reads, cursor.bound, arrived_ms, cursor.tip_at_bound_ms) == found
    assert cursor.is_short_of_tip == (cursor.finding is not None and found[3] is None)
    assert cursor.is_misled(70_000) == (stamps[:5] == AHEAD[:5])
    assert not cursor.is_misled(70_001)
    is_busy = target.is_tip and arrived_ms == 80_000
    assert cursor.is_busy == is_busy


READ_ON = "69s:100 65:2621 47.91s:100 2686:2621 5307:2621"
# Batches of one shard in a row, each from the bound of the one before: the reads, the bound; its
# beginning, its rows if they are kept, the iterator at its beginning, the number of records that is
# expected otherwise, and the bytes that are read again then.
ROWS = {
    "at the tip each page is read once": (
        (Shard([1, 2, 3]), TRIM_HORIZON, {}),
        [
            (tip(), "oldest:64", "3", "@1", 3, "0", None, 600),
            [4, 5],
            (tip(), "3:327", "5", "3", 2, "3", None, 400),
            (tip(), "5:327", "5", "5", 0, "5", None, 0),
            [6],
            (tip(), "5:327", "6", "5", 1, "5", None, 200),
        ],
    ),
    "windows are sampled, and read on at the tip": (
        (Shard(DENSE), TRIM_HORIZON, {}),
        [
            (until(10_000), "oldest:64 10s:100", "@101", "@1", None, "0", 101, 32_800),
            (until(20_000), "20s:100", "@201", "@101", None, "100", 101, 40_000),
            (until(20_000), "", "@201", "@201", 0, "200", None, 20_000),
            (tip(60_000), "300:327 60s:100", "@627", "@201", 426, "200", None, 85_400),
            (tip(), "627:327", "900", "@627", 274, None, None, 54_800),
            (tip(), "900:327", "900", "900", 0, "900", None, 0),
        ],
    ),
    "rows that are too many are not kept": (
        (Shard(DENSE), TRIM_HORIZON, {"rows_bytes_max": 1_000}),
        [
            (until(10_000), "oldest:64 10s:100", "@101", "@1", None, "0", 101, 32_800),
            (tip(60_000), "200:327 60s:100", "@601", "@101", None, "100", 505, 105_400),
            (tip(), "90s:100 700:2621", "900", "@601", None, "600", None, 60_000),
        ],
    ),
    "samples are larger where a batch has a limit of records": (
        (Shard(DENSE), after("1"), {"is_counted": True}),
        [
            (until(10_000), "10s:256", "@101", "1", None, None, None, 51_200),
            (until(20_000), "", "@201", "@101", 100, "100", None, 51_200),
            (tip(60_000), "356:327 60s:1000", "@683", "@201", 482, None, None, 96_600),
        ],
    ),
    "an early record misleads only where the tip is looked for": (
        (Shard(AHEAD), after("1"), {}),
        [
            (tip(60_000), "@1:65 60s:100", "@65", "1", 63, None, None, 12_800),
            (until(50_000), "50s:100 65:2621", "305", "@65", 241, None, None, 48_200),
        ],
    ),
    "what a look at the heads has read is not read again": (
        (Shard(DENSE[:30]), TRIM_HORIZON, {}),
        [
            (HEADS, "oldest:64", "TRIM_HORIZON", "TRIM_HORIZON", 0, "0", None, 6_000),
            (until(1_000), "", "@11", "@1", 10, "0", None, 6_000),
            (until(2_000), "", "@21", "@11", 10, None, None, 4_000),
            (until(9_000), "9s:100 30:2621", "30", "@21", 10, None, None, 2_000),
        ],
    ),
    "an empty shard is looked at again": (
        (Shard([]), TRIM_HORIZON, {}),
        [
            (tip(), "oldest:64", "TRIM_HORIZON", "TRIM_HORIZON", 0, "0", None, 0),
            (HEADS, "0:64", "TRIM_HORIZON", "TRIM_HORIZON", 0, "0", None, 0),
            [1],
            (HEADS, "0:64", "TRIM_HORIZON", "TRIM_HORIZON", 0, "0", None, 200),
        ],
    ),
    "a time that leads to the beginning has read its rows": (
        (Shard(DENSE), before("3"), {}),
        [
            (until(150), "0.15s:64", "@3", "@3", 0, "2", None, 12_800),
            (until(1_000), "", "@11", "@3", 8, "2", None, 12_800),
        ],
    ),
    "rows that were dropped may be late": (
        (Shard([1, 2, 3]), TRIM_HORIZON, {"rows_bytes_max": 300}),
        [(until(3_000), "oldest:64 3s:100 3:2621", "3", "@1", None, "0", None, 600)],
    ),
    "a time half-way may lead back to an early record": (
        (
            Shard([1, 1.5, 70, *(number / 100 for number in range(5_500))]),
            after("1"),
            {"rows_bytes_max": 1_000},
        ),
        [
            (HEADS, "@1:65", "1", "1", None, None, None, 12_800),
            (until(69_000), READ_ON, "5503", "1", None, None, None, 1_100_400),
        ],
    ),
    "the end of a shard is reached from what lies before it": (
        (Shard(DENSE[:30], is_closed=True), before("3"), {}),
        [
            (until(1_000), "1s:64", "@11", "@3", None, None, None, 4_000),
            (until(9_000), "9s:100", "SHARD_END", "@11", 20, "10", None, 4_000),
        ],
    ),
}


@over_rows(("began", "batches"), ROWS.values())
def test_the_batches_of_a_shard_in_a_row(began, batches):
    shard, position, kind = began
    cursor = ShardCursor("s", position, **{"rows_bytes_max": 1_000_000, **kind})
    for batch in batches:
        if isinstance(batch, list):
            shard.put(*batch)
            continue
        target, *found = batch
        seen = [walk(shard, cursor, target), str(cursor.bound), str(cursor.began())]
        hint = cursor.hint(now=10.0, wall_ahead_s=5.0)
        assert hint.iterator_at == (5.0 if hint.iterator else 0.0)
        rows = None if hint.rows is None else len(hint.rows)
        assert [*seen, rows, hint.iterator, hint.records_expected, cursor.wasted_bytes] == found
        cursor.move(cursor.bound)


# Pages of at most so many records; the bound after each, the arrival of the record it is before.
@pytest.mark.parametrize(
    ("calls", "pages"),
    [
        (
            "95s:64 @5:513 73.3s:100",
            [(999, "5", None), (999, "@517", 51_600), (999, "@833", 83_200)],
        ),
        (
            "95s:64 @5:513 73.3s:100 734:2621",
            [(999, "5", None), (999, "@517", 51_600), (1, "@734", 73_300), (9, "@743", 74_200)],
        ),
        (
            "95s:64 @5:513 5:512 6:512",
            [(1, "5", None), (1, "5", None), (1, "5", None), (1, "@7", 600)],
        ),
    ],
)
def test_the_pages_read_towards_a_bound_are_a_bound_if_the_batch_must_end(calls, pages):
    shard, cursor = Shard(DENSE, times_max=90), ShardCursor("s", after("5"), 1_000_000)
    search = find_bound(cursor, until(95_000))
    want = next(search)
    for page_max, *found in pages:
        shard.page_max = page_max
        want = search.send((shard.answer(want.page_run.read(want.limit, 0.0)), ASKED_MS))
        assert [str(cursor.bound), cursor.finding and cursor.finding.arrived_ms] == found

    assert " ".join(shard.calls) == calls


def test_latest_of_a_shard_that_has_ended_since_is_looked_up_by_its_time():
    shard = Shard([1, 2, 3], is_closed=True)
    cursor = ShardCursor("s", at_timestamp(2_000), 1_000_000)
    cursor.kept = PageRun(cursor.position, 1_000_000, "3", 0.0)

    assert walk(shard, cursor, HEADS) == "3:64 2s:64"
    assert (cursor.head_ms, cursor.bound) == (2_000, at_timestamp(2_000))
    assert walk(shard, cursor, tip()) == "3+:327"
    assert cursor.bound == SHARD_END
