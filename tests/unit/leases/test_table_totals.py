"""Leases, the shards that should have one, and those nobody has: the counts behind the alarms."""

from kclrun.leases.shard_sync import Listing, TableTotals, table_totals
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard

ALL = HashRange(0, HASH_KEY_MAX)


def lease(key, *, ended=False, **fields):
    return Lease(key=key, checkpoint=SHARD_END if ended else TRIM_HORIZON, **fields)


def shard(shard_id, *parents):
    first, second = (*parents, None, None)[:2]
    return Shard(shard_id, ALL, "1", None, first, second)


def totals(leases, shards=None, *, broken=(), now=0.0, ours=()):
    observation = Observation(10.0)
    observation.update(leases, 0.0)
    view = TableView(leases, broken, observation, me="me", gone=frozenset(), now=now)
    listing = Listing(shards, 0.0, 0.0) if shards is not None else None
    return table_totals(view, listing, set(ours))


def test_before_the_first_listing_nobody_knows_how_many_shards_there_are():
    assert totals((lease("a", owner="x"),)) == TableTotals(1, None, 0)


def test_a_lease_for_each_shard_is_as_it_should_be():
    counted = totals((lease("a", owner="x"), lease("b", owner="y")), [shard("a"), shard("b")])

    assert counted == TableTotals(leases=2, shards=2, unclaimed=0)


def test_a_shard_without_a_lease_is_one_too_few():
    assert totals((lease("a"),), [shard("a"), shard("b")]).shards == 2


def test_a_shard_whose_row_was_cleaned_up_after_its_end_lacks_none():
    children = (lease("b", parents=frozenset("a")), lease("c", parents=frozenset("a")))

    assert totals(children, [shard("a"), shard("b", "a"), shard("c", "a")]).shards == 2


def test_generations_that_were_cleaned_up_lack_none_either():
    listed = [shard("a"), shard("b", "a"), shard("c", "a"), shard("d", "b", "c")]

    assert totals((lease("d", parents=frozenset("bc")),), listed).shards == 1


def test_an_old_listing_that_knows_no_children_yet_counts_no_parent_of_theirs():
    merged = lease("c", parents=frozenset("ab"))

    assert totals((merged,), [shard("a"), shard("b")]) == TableTotals(1, 0, 1)


def test_the_descendants_of_a_shard_that_is_still_read_lack_none_yet():
    listed = [shard("a"), shard("b", "a"), shard("c", "a"), shard("d", "b", "c")]

    assert totals((lease("a", owner="x"),), listed) == TableTotals(1, 1, 0)


def test_the_children_of_a_shard_that_has_ended_lack_one_each():
    listed = [shard("a"), shard("b", "a"), shard("c", "a")]

    assert totals((lease("a", ended=True),), listed) == TableTotals(1, 3, 0)


def test_the_child_of_a_merge_lacks_none_while_one_parent_is_still_read():
    rows = (lease("a", owner="x"), lease("b", ended=True))

    assert totals(rows, [shard("a"), shard("b"), shard("c", "a", "b")]).shards == 2


def test_a_child_without_a_row_lacks_one_though_its_parent_was_cleaned_up():
    listed = [shard("a"), shard("b", "a"), shard("c", "a")]

    assert totals((lease("b", parents=frozenset("a")),), listed).shards == 2


def test_a_row_that_cannot_be_read_is_a_shard_and_no_lease():
    assert totals((lease("a"),), [shard("a"), shard("b")], broken=("b",)) == TableTotals(1, 2, 1)


def test_unclaimed_are_those_without_an_owner_the_offered_and_the_expired():
    rows = (
        lease("a"),
        lease("b", owner=OFFERED),
        lease("c", owner="x"),
        lease("d", ended=True),
    )

    assert totals(rows).unclaimed == 2
    assert totals(rows, now=11.0).unclaimed == 3


def test_a_child_that_waits_for_its_parent_is_not_unclaimed():
    assert totals((lease("a", owner="x"), lease("b", parents=frozenset("a")))).unclaimed == 0


def test_what_is_in_our_hands_is_not_unclaimed():
    assert totals((lease("a"),), ours="a").unclaimed == 0
