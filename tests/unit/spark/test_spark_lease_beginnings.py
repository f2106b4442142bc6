"""Where a query begins that goes on from a lease table: rows and listings into positions [A7]."""

import pytest

from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark import positions
from kclrun.spark.lineage import children_ready
from kclrun.spark.planning.beginnings import lease_beginnings
from kclrun.spark.positions import after, at_timestamp, parse_position
from tests.support.tables import over_rows

QUARTER = (HASH_KEY_MAX + 1) // 4
NOW_MS = 1_700_000_000_000
END = positions.SHARD_END


def shard(name, first, last, parents=(), *, is_open=True):
    keys = HashRange(first * QUARTER, (last + 1) * QUARTER - 1)
    return Shard(name, keys, "0", None if is_open else "9", *parents)


# a splits into b and c; c merges with d into e.
A, D = shard("a", 0, 1, is_open=False), shard("d", 2, 3, is_open=False)
B, C = shard("b", 0, 0, ("a",)), shard("c", 1, 1, ("a",), is_open=False)
E = shard("e", 1, 3, ("c", "d"))
ALL = ShardGraph((A, B, C, D, E))
BY_ID = {each.shard_id: each for each in ALL}


def number(text, sub=0):
    return ExtendedSequenceNumber(text, sub)


def row(name, checkpoint, **more):
    known = BY_ID[name]
    return Lease(
        key=LeaseKey(name),
        checkpoint=checkpoint,
        parents=frozenset(known.parents),
        hash_range=known.hash_range,
        **more,
    )


def begun(*rows, graph=ALL):
    return lease_beginnings({each.key: each for each in rows}, graph, NOW_MS)


def test_unfinished_leases_begin_after_their_checkpoints():
    found = begun(row("b", number("7", 3)), row("e", number("8")))

    assert found.positions == {"b": after("7", 3), "e": after("8", 0)}
    assert found.unleased == ()
    # What the offset says is read back as it was.
    assert parse_position(str(after("7", 3))) == after("7", 3)


@over_rows(
    ("checkpoint", "more", "expected"),
    [
        (TRIM_HORIZON, {}, positions.TRIM_HORIZON),
        (LATEST, {"latest_pinned_at": 5.25}, at_timestamp(5_250)),
        (LATEST, {}, at_timestamp(NOW_MS)),
        (AT_TIMESTAMP, {"start": "2020-01-01T00:00:00Z"}, at_timestamp(1_577_836_800_000)),
        (ExtendedSequenceNumber("AT_TIMESTAMP", 77), {}, at_timestamp(77)),
    ],
)
def test_a_sentinel_is_the_place_the_fleet_would_read_from(checkpoint, more, expected):
    assert begun(row("b", checkpoint, **more), row("e", TRIM_HORIZON)).positions["b"] == expected


def test_an_instant_that_no_row_knows_is_asked_for():
    with pytest.raises(SettingsError, match="give that instant as startingTimestamp"):
        begun(row("b", AT_TIMESTAMP), row("e", TRIM_HORIZON))


def test_one_missing_child_keeps_its_ended_parent_beside_the_other_child():
    found = begun(row("a", SHARD_END), row("b", number("7")), row("d", number("5")))

    assert found.positions == {"a": END, "b": after("7", 0), "d": after("5", 0)}
    assert children_ready(found.positions, ALL) == ("c",)


def test_an_ended_shard_whose_keys_its_descendants_have_is_left_out():
    found = begun(
        row("a", SHARD_END), row("c", SHARD_END), row("d", SHARD_END), row("b", number("7")),
        row("e", number("8")),
    )  # fmt: skip

    assert found.positions == {"b": after("7", 0), "e": after("8", 0)}


def test_a_merge_waits_with_its_ended_parent_for_the_other_one():
    found = begun(
        row("b", number("7")), row("c", SHARD_END), row("d", number("5")), row("e", TRIM_HORIZON)
    )

    assert found.positions == {"b": after("7", 0), "c": END, "d": after("5", 0)}
    assert children_ready(found.positions, ALL) == ()
    assert children_ready({**found.positions, "d": END}, ALL) == ("e",)


def test_a_child_that_was_read_before_its_parent_ended_is_refused():
    with pytest.raises(SettingsError, match="b is at 7, and a, from which it descends"):
        begun(row("a", number("3")), row("b", number("7")), row("d", number("5")))


def test_ancestors_without_rows_were_done_or_never_ours():
    assert begun(row("b", number("7")), row("e", number("8"))).positions.keys() == {"b", "e"}


def test_an_unfinished_shard_that_has_expired_stays_for_its_loss_to_be_told():
    found = begun(row("a", number("3")), row("d", number("5")), graph=ShardGraph((B, C, D, E)))

    assert found.positions == {"a": after("3", 0), "d": after("5", 0)}


def test_an_ended_parent_that_has_expired_still_lets_its_children_enter():
    listed = ShardGraph((B, C, D))
    found = begun(row("a", SHARD_END), row("d", number("5")), graph=listed)

    assert found.positions == {"a": END, "d": after("5", 0)}
    assert children_ready(found.positions, listed) == ("b", "c")


def test_a_listing_that_does_not_show_all_keys_yet_is_made_again():
    assert begun(row("b", number("7")), graph=ShardGraph((A, B))) is None
