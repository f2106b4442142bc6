"""The offset that ends a batch, and the hints that travel with it, from each shard's cursor."""

import pytest

from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.offsets import Offset, StreamIs
from kclrun.spark.planning.offers import joined, offer
from kclrun.spark.planning.shard_cursor import Finding, Paged, ShardCursor
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, before

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


def test_a_range_that_is_lost_begins_and_ends_at_the_end_of_the_shard():
    lost = cursor("b", after("5"))
    lost.lose()

    end = offered(at({"b": after("5")}), lost)

    assert (end.shards, end.began) == ({"b": SHARD_END}, {"b": SHARD_END})


# The time a shard was seen at its tip: as stored before; where its bound is now, and the time it
# was seen to be the tip; the time that is stored then. Where all stay, no offset is offered.


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
