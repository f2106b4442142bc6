"""Leases, the shards that should have one, and those nobody has: the counts behind the alarms."""

from kclrun.leases.shard_sync import Listing, TableTotals, table_totals
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from tests.support.build import shard

ALL = HashRange(0, HASH_KEY_MAX)


def lease(key, *, ended=False, **fields):
    return Lease(key=key, checkpoint=SHARD_END if ended else TRIM_HORIZON, **fields)


def totals(leases, shards=None, *, broken=(), now=0.0, ours=()):
    observation = Observation(10.0)
    observation.update(leases, 0.0)
    view = TableView(leases, broken, observation, me="me", gone=frozenset(), now=now)
    listing = Listing(shards, 0.0, 0.0) if shards is not None else None
    return table_totals(view, listing, set(ours))


def test_generations_that_were_cleaned_up_lack_none_either():
    listed = [shard("a"), shard("b", "a"), shard("c", "a"), shard("d", "b", "c")]

    assert totals((lease("d", parents=frozenset("bc")),), listed).shards == 1


def test_the_descendants_of_a_shard_that_is_still_read_lack_none_yet():
    listed = [shard("a"), shard("b", "a"), shard("c", "a"), shard("d", "b", "c")]

    assert totals((lease("a", owner="x"),), listed) == TableTotals(1, 1, 0)


def test_the_child_of_a_merge_lacks_none_while_one_parent_is_still_read():
    rows = (lease("a", owner="x"), lease("b", ended=True))

    assert totals(rows, [shard("a"), shard("b"), shard("c", "a", "b")]).shards == 2
