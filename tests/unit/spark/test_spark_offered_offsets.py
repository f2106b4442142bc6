"""The offset that ends a batch, and the hints that travel with it, from each shard's cursor."""

import msgspec
import pytest

from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.offsets import Offset, StreamIs
from kclrun.spark.planning.offers import hints_for, joined, offer
from kclrun.spark.planning.shard_cursor import Density, Finding, Paged, ShardCursor
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, at_timestamp, before
from tests.support.tables import over_rows

STREAMS = {"": StreamIs("arn", 1)}
HOUR_MS = 3_600_000
HALF = HASH_KEY_MAX // 2
A = Shard("a", HashRange(0, HASH_KEY_MAX), "0", "9")
B, C = (
    Shard("b", HashRange(0, HALF), "0", None, "a"),
    Shard("c", HashRange(HALF + 1, HASH_KEY_MAX), "0", None, "a"),
)
GRAPH = ShardGraph((A, B, C))


def at(shards, **more):
    return Offset(streams=STREAMS, shards=shards, **more)


def cursor(shard_id, position, bound=None, *, tip_ms=None, sizes=(), arrived_ms=None):
    """One whose search found `bound`, after it read records of those sizes."""
    made = ShardCursor(shard_id, position, 2**30)
    if sizes:
        rows = [Record(b"x" * size, "k", str(10 + n), n + 1.0) for n, size in enumerate(sizes)]
        made.kept.absorb(Paged("here", FetchedPage(rows, "next", 5), 0.0, 100.0), 0)
    if bound is not None:
        made.finding = Finding(bound, arrived_ms, tip_ms)
    elif tip_ms is not None:
        made.kept.tip_ms = tip_ms
    return made


def offered(start, *cursors, graph=GRAPH, gone=(), aligned_ms=0, is_first=False):
    by_id = {each.shard_id: each for each in cursors}
    return offer(start, by_id, graph, gone, aligned_ms=aligned_ms, is_first=is_first)


def test_where_no_bound_moved_the_start_itself_is_offered():
    start = at({"b": after("5"), "c": after("5")}, as_of_ms={"b": 10_000})
    same = cursor("b", after("5"), tip_ms=HOUR_MS + 9_999)

    assert offered(start, same, cursor("c", after("5"))) is start
    assert offered(start, same, cursor("c", after("5")), aligned_ms=9, is_first=True) is start


@over_rows(
    ("position", "bound", "is_first", "began"),
    [
        (after("5"), after("12"), False, None),
        (after("5"), after("12"), True, after("5")),
        (TRIM_HORIZON, after("12"), False, before("10")),
        (TRIM_HORIZON, None, False, TRIM_HORIZON),
        (at_timestamp(7), after("12"), False, before("10")),
    ],
)
def test_a_beginning_is_stored_where_the_start_does_not_name_it_exactly(
    position, bound, is_first, began
):
    start = at({"b": position, "c": after("1")}, aligned_ms=50)
    reads_on = cursor("c", after("1"), after("2"))
    end = offered(start, cursor("b", position, bound, sizes=[1, 1, 1]), reads_on, is_first=is_first)

    assert end.shards == {"b": bound or position, "c": after("2")}
    assert end.began.get("b") == began
    assert end.began.get("c") == (after("1") if is_first else None)
    assert (end.streams, end.aligned_ms) == (STREAMS, 50)
    assert offered(start, reads_on, aligned_ms=60).aligned_ms == 60


def test_a_child_enters_with_its_beginning_and_its_parent_leaves_once_all_keys_are_in():
    start = at({"a": SHARD_END})
    child = cursor("b", TRIM_HORIZON, after("12"), sizes=[1])
    one = offered(start, child)
    assert one.shards == {"a": SHARD_END, "b": after("12")}
    assert one.began == {"b": before("10")}

    both = offered(start, child, cursor("c", TRIM_HORIZON))
    assert both.shards == {"b": after("12"), "c": TRIM_HORIZON}
    assert both.began == {"b": before("10"), "c": TRIM_HORIZON}


def test_a_range_that_is_lost_begins_and_ends_at_the_end_of_the_shard():
    lost = cursor("b", after("5"))
    lost.lose()

    end = offered(at({"b": after("5")}), lost)

    assert (end.shards, end.began) == ({"b": SHARD_END}, {"b": SHARD_END})


# The time a shard was seen at its tip: as stored before; where its bound is now, and the time it
# was seen to be the tip; the time that is stored then. Where all stay, no offset is offered.
@over_rows(
    ("stored", "bound", "tip_ms", "stores"),
    [
        (None, after("6"), 19_999, 10_000),
        (None, after("6"), 20_000, 20_000),
        (None, after("6"), None, None),
        (10_000, after("6"), None, None),
        (10_000, after("6"), 40_000, 40_000),
        (10_000, SHARD_END, 40_000, None),
        (10_000, None, 40_000, 10_000),
        (10_000, None, None, 10_000),
        (None, None, 40_000, 40_000),
        (10_000, None, 10_000 + HOUR_MS - 1, 10_000),
        (10_000, None, 10_000 + HOUR_MS, 10_000 + HOUR_MS),
    ],
)
def test_the_time_of_a_tip_is_stored_with_its_bound_and_anew_after_an_hour(
    stored, bound, tip_ms, stores
):
    start = at({"b": after("5"), "c": after("5")}, as_of_ms={} if stored is None else {"b": stored})

    end = offered(
        start, cursor("b", after("5"), bound, tip_ms=tip_ms), cursor("c", after("5"), after("6"))
    )

    assert end.as_of_ms == ({} if stores is None else {"b": stores})


def test_when_one_tip_is_an_hour_old_all_are_stored_anew_in_an_offset_of_its_own():
    start = at(
        {"b": after("5"), "c": after("5")}, as_of_ms={"b": 10_000, "c": HOUR_MS}, aligned_ms=3
    )
    now_ms = 10_000 + HOUR_MS

    end = offered(start, *(cursor(each, after("5"), tip_ms=now_ms + 5) for each in ("b", "c")))

    assert end == at(start.shards, as_of_ms={"b": now_ms, "c": now_ms}, aligned_ms=3)
    unseen = cursor("c", after("5"))
    kept = offered(start, cursor("b", after("5"), tip_ms=now_ms), unseen)
    assert kept.as_of_ms == {"b": now_ms, "c": HOUR_MS}


def test_rows_travel_with_as_many_shards_as_fit_the_smallest_first():
    """4 MiB in all; a row is 100 bytes more than its data."""
    whole, half = 2**20 - 100, 2**19 - 100
    by_id = {
        "a": [whole, whole],
        "b": [whole],
        "c": [half, half],
        "d": [whole + 1],
        "e": [],
    }
    cursors = [
        cursor(each, TRIM_HORIZON, after("19"), sizes=sizes) for each, sizes in by_id.items()
    ]
    for each in cursors:
        each.kept.last = each.kept.last and msgspec.structs.replace(
            each.kept.last, sequence_number="19"
        )
    end = at({each.shard_id: each.bound for each in cursors})

    def inlined(shard_bytes_max, chosen=cursors):
        hints = hints_for(chosen, end, shard_bytes_max, 200.0, 1_000.0)
        assert {*hints} == {each.shard_id for each in chosen}
        return "".join(sorted(each for each, hint in hints.items() if hint.rows))

    assert inlined(2**30) == "bcd"
    assert inlined(2**30, [each for each in cursors if each.shard_id != "d"]) == "abc"
    assert inlined(2**20) == "bc"
    assert inlined(2**20 - 1) == ""
    assert inlined(0) == ""


def test_a_hint_is_for_a_range_with_rows_that_ends_at_the_bound():
    still = cursor("a", after("9"), sizes=[1])
    moved = cursor("b", TRIM_HORIZON, before("12"), sizes=[1, 1, 1], arrived_ms=3_000)
    moved.density = Density(10.0, 10.0, 1.0)
    hints = hints_for([still, moved], at({"a": after("9"), "b": before("12")}), 1, 200.0, 1_000.0)

    assert {*hints} == {"b"}
    assert (hints["b"].iterator, hints["b"].iterator_at) == ("here", 1_100.0)
    assert hints["b"].rows is None, "they are more than a byte"
    assert hints_for([moved], at({"b": before("11")}), 2**20, 200.0, 1_000.0) == {}
    assert hints_for([moved], at({}), 2**20, 200.0, 1_000.0) == {}


def test_two_batches_as_one_keep_the_first_beginning_and_name_the_parents_of_its_children():
    start = at({"a": after("1")})
    end = at({"a": SHARD_END}, began={"a": before("2")}, aligned_ms=5, as_of_ms={"a": 1})
    later = at(
        {"b": after("7"), "c": TRIM_HORIZON},
        began={"b": before("6"), "c": TRIM_HORIZON},
        aligned_ms=9,
        as_of_ms={"b": 8},
    )

    assert joined(start, end, later, GRAPH) == at(
        {"a": SHARD_END, "b": after("7"), "c": TRIM_HORIZON},
        began={"a": before("2"), "b": before("6"), "c": TRIM_HORIZON},
        aligned_ms=9,
        as_of_ms={"b": 8},
        parents={"b": ("a",), "c": ("a",)},
    )


def test_a_shard_that_had_ended_before_is_not_read_and_so_not_named_as_a_parent():
    start = at({"a": SHARD_END})
    later = at({"b": after("7")}, began={"b": before("6")})

    assert joined(start, start, later, GRAPH) == later
    known = joined(start, at({"b": after("3")}), later, GRAPH)
    assert (known.shards, known.parents) == ({"b": after("7")}, {})
    unlisted = joined(start, start, later, ShardGraph(()))
    assert unlisted.parents == {}


@pytest.mark.parametrize(
    ("began_at", "first_end", "first_began", "later_began", "began"),
    [
        # The first batch read records: its beginning counts.
        (TRIM_HORIZON, after("5"), before("3"), None, before("3")),
        (after("1"), after("5"), None, after("5"), None),
        # It read none: the later one has the beginning of the rows.
        (TRIM_HORIZON, TRIM_HORIZON, TRIM_HORIZON, before("6"), before("6")),
        (after("1"), after("1"), None, after("1"), after("1")),
    ],
)
def test_the_beginning_of_two_batches_is_that_of_the_first_with_rows(
    began_at, first_end, first_began, later_began, began
):
    def named(where):
        return {} if where is None else {"b": where}

    whole = joined(
        at({"b": began_at}),
        at({"b": first_end}, began=named(first_began), parents={"b": ("a",)}),
        at({"b": after("7")}, began=named(later_began)),
        GRAPH,
    )

    assert whole.began == named(began)
    assert whole.parents == {"b": ("a",)}
