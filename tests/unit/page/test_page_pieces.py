"""The history of the lag and the tree of shards."""

import pytest

from kclrun.page.lag_history import SAMPLES_MAX, LagHistory, lag_level, measured_every_s
from kclrun.page.shards_view import lineage_tree
from tests.support.tables import over_rows
from tests.unit.page.fleet import key, lease, shard


def test_the_levels_of_a_lag():
    seconds = (None, 0.0, 10.0, 10.1, 60.0, 61.0, 600.0, 601.0, 3_600.0, 3_601.0)

    assert [lag_level(each) for each in seconds] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


@over_rows(
    ("scanned_every_s", "shards", "measured_s"),
    [
        # At least two scans lie between: a shard's applications share five reads a second.
        (5.0, 0, 15.0),
        (10.0, 1, 30.0),
        (10.0, 200, 30.0),
        (3_600.0, 10_000, 10_800.0),
        # Of many shards so seldom that they take the same share of a core, however many there are.
        (10.0, 201, 30.15),
        (10.0, 1_000, 150.0),
        (15.0, 1_000, 150.0),
        (10.0, 10_000, 1_500.0),
    ],
)
def test_the_lag_of_many_shards_is_measured_so_seldom_that_it_takes_the_same_share_of_a_core(
    scanned_every_s, shards, measured_s
):
    assert measured_every_s(scanned_every_s, shards) == pytest.approx(measured_s)


def test_the_history_keeps_the_latest_samples_and_forgets_shards_that_are_gone():
    history = LagHistory()
    for number in range(SAMPLES_MAX + 50):
        history.add({"old": 1.0, "late": 4_000.0} if number > 100 else {"old": 1.0})
        assert len(history.look()["old"]) == min(number + 1, SAMPLES_MAX)

    late = history.look()["late"]
    assert len(late) == SAMPLES_MAX
    assert late == bytes(SAMPLES_MAX - 69) + bytes([5]) * 69

    history.add({"late": None})
    assert history.look().keys() == {"late"}
    assert history.look()["late"][-2:] == bytes([5, 0])


def test_a_split_and_a_merge_are_a_tree_in_which_each_shard_is_once():
    listed = {key(n): shard(n, *of) for n, of in {0: (), 1: (0,), 2: (0,), 3: (1, 2)}.items()}

    lineage = lineage_tree({key(9): lease(9)}, listed, 100)

    assert [(each.key, each.depth) for each in lineage.descents] == [
        (key(0), 0),
        (key(1), 1),
        (key(3), 2),
        (key(2), 1),
    ]
    assert lineage.descents[2].parents == (key(1), key(2))
    assert (lineage.alone, lineage.left_out) == (1, 0)


def test_rows_alone_tell_the_tree_and_name_strangers_in_vain():
    rows = {
        key(0): lease(0, children=frozenset({key(1), "trimmed"})),
        key(1): lease(1),
        key(2): lease(2, parents=frozenset({"unknown"})),
    }

    lineage = lineage_tree(rows, {}, 100)

    assert [each.key for each in lineage.descents] == [key(0), key(1)]
    assert lineage.alone == 1


def test_a_circle_and_a_tree_beyond_the_limit_are_counted_and_left_out():
    circle = {
        key(0): lease(0, parents=frozenset({key(1), key(0)})),
        key(1): lease(1, parents=frozenset({key(0)})),
    }
    assert lineage_tree(circle, {}, 100).left_out == 2

    deep = {key(n): shard(n, *([n - 1] if n else [])) for n in range(5_000)}
    lineage = lineage_tree({}, deep, 1_000)
    assert (len(lineage.descents), lineage.left_out) == (1_000, 4_000)
    assert lineage.descents[-1].depth == 999
