"""Shard sync, healing and cleanup over all shard graphs of a few shards [I3, I11, P12, P13].

First every way the rows may stand, reachable or not: what each plan may and may not do, and that
planning again comes to an end. Then what can really come about, step by step, from an empty table:
with plans made from old scans, ends cut short, and clients that never create children.

`KCLRUN_SHARD_GRAPHS=6` runs all graphs of six shards (some minutes); five are what the suite runs,
four its quick stage.
"""

import math
import os

import pytest

from kclrun.leases.auditing import Auditor
from kclrun.leases.commands import WriteRow
from kclrun.leases.events import ShardsListed
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import Observation, TableView
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, SHARD_END, TRIM_HORIZON
from kclrun.protocol.writes import CreateChildren, CreateLease, DeleteEnded, EndedParent
from tests.examples import is_quick
from tests.properties.shard_graphs import Odometer, all_graphs
from tests.properties.shard_lives import BEGUN, ME, ancestors, apply, is_startable, lives, settled

SHARDS_MAX = int(os.environ.get("KCLRUN_SHARD_GRAPHS") or (4 if is_quick() else 5))
LIVED_SHARDS_MAX = max(4, min(SHARDS_MAX - 1, 5))
STARTS = (TRIM_HORIZON, LATEST, AT_TIMESTAMP)
GRAPHS = tuple(all_graphs(SHARDS_MAX))
# How a row may stand; `None` is no row. An open shard has not ended.
OPEN_ROWS = (None, TRIM_HORIZON, BEGUN)
CLOSED_ROWS = (*OPEN_ROWS, SHARD_END)
PLANNED = {}


def lease(shard, checkpoint):
    owner = None if checkpoint == TRIM_HORIZON else ME
    return Lease(
        key=LeaseKey(shard.shard_id),
        checkpoint=checkpoint,
        owner=owner,
        parents=frozenset(shard.parents),
        hash_range=shard.hash_range,
    )


def view_of(rows):
    observation = Observation(10.0)
    observation.update(rows.values(), 0.0)
    return TableView(tuple(rows.values()), (), observation, me=ME, gone=frozenset(), now=0.0)


def planned(rows, shards, start, *, at_start=None):
    """All that a manager would write after one scan and one listing.

    Planned once for the same rows, in which many lives meet."""
    key = (frozenset(rows.values()), shards, start, at_start)
    if key not in PLANNED:
        PLANNED[key] = newly_planned(rows, shards, start, at_start)
    return PLANNED[key]


def newly_planned(rows, shards, start, at_start):
    policy = ManagerPolicy(me=ME, start=start, start_text=str(start))
    auditor = Auditor(policy, held=())
    view = view_of(rows)
    commands = auditor.after_listing(ShardsListed(shards, 100.0, at_start), view, 0.0)
    commands += auditor.after_scan(view)
    return tuple(command.change for command in commands if isinstance(command, WriteRow))


def created(change):
    return (change.lease,) if isinstance(change, CreateLease) else change.children


def labellings(shards):
    odometer = Odometer()
    while True:
        rows = {}
        for shard in shards:
            choices = OPEN_ROWS if shard.is_open else CLOSED_ROWS
            checkpoint = choices[odometer.choose(len(choices))]
            if checkpoint is not None:
                rows[shard.shard_id] = lease(shard, checkpoint)
        if rows:
            yield rows
        if not odometer.turn():
            return


def check_plan(shards, rows, changes):
    """What every plan must keep, wherever the rows stand. Order is judged where it was not broken
    before: a shard that was begun while one above it is not ended is nobody's to repair."""
    was_in_order = is_in_order(shards, rows)
    for change in changes:
        if isinstance(change, DeleteEnded):
            check_deletion(shards, rows, change)
            continue
        for row in created(change):
            assert row.key not in rows, f"{row.key} has a row"
            assert not was_in_order or is_next(shards, rows, row), f"{row.key} would overtake"
        if isinstance(change, CreateChildren):
            ends = [each for each in change.parents if isinstance(each, EndedParent)]
            assert ends, "healed, and no parent has ended"
            assert all(rows[each.key].is_ended for each in ends)
            parents = {each.key for each in change.parents}
            assert all(set(row.parents) == parents for row in change.children)


def is_in_order(shards, rows):
    """Nothing was begun below what is not ended."""
    begun = [row for row in rows.values() if row.checkpoint >= BEGUN]
    return all(are_over_above(shards, rows, row) for row in begun)


def is_next(shards, rows, row):
    """I3: what is created can be started only where nothing above it is still to be read."""
    return not is_startable(rows, row) or are_over_above(shards, rows, row)


def are_over_above(shards, rows, row):
    return all(rows[key].is_ended for key in ancestors(shards, row.key) if key in rows)


def check_deletion(shards, rows, change):
    """I11: ended, nothing above it is left, and everything below it has begun."""
    assert rows[change.key].is_ended
    below = [shard.shard_id for shard in shards if change.key in shard.parents]
    assert below
    for child in below:
        assert rows[child].checkpoint not in (TRIM_HORIZON, AT_TIMESTAMP)
    assert not any(parent in rows for parent in rows[change.key].parents)


def ways(shards):
    """In how many ways the rows of these shards may stand, at least one of them there."""
    choices = (len(OPEN_ROWS if shard.is_open else CLOSED_ROWS) for shard in shards)
    return math.prod(choices) - 1


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_every_plan_over_every_graph_and_all_rows_keeps_order_and_ends(start):
    cases = 0
    for graph in GRAPHS:
        shards = graph.listed()
        for first_rows in labellings(shards):
            cases += 1
            rows, deleted = first_rows, set()
            for _ in range(2 * len(shards)):
                changes = planned(rows, shards, start)
                if not changes:
                    break
                check_plan(shards, rows, changes)
                for change in changes:
                    before = rows
                    rows, has_applied = apply(rows, change)
                    assert has_applied, f"{change} does not apply to what it was planned from"
                    deleted |= before.keys() - rows.keys()
                assert not deleted & rows.keys(), f"{deleted} came back: {first_rows}"
            else:
                raise AssertionError(f"no end of planning: {shards}, {first_rows}")
    assert cases == sum(ways(graph.listed()) for graph in GRAPHS)


def test_all_graphs_are_there_once():
    """Of up to three shards: one, two, or three first ones; a split; a merge."""
    assert [len(tuple(all_graphs(most))) for most in (1, 2, 3, 4)] == [1, 2, 5, 11]


def check_life(shards, life):
    """I3 and I11 in all that came about, rows that were deleted again included."""
    for key in life.gone:
        assert key not in life.rows, f"{key} was read, ended, deleted, and has a row again"
    begun = [row.key for row in life.rows.values() if row.checkpoint >= BEGUN]
    for key in (*begun, *life.gone):
        for above in ancestors(shards, key) & life.rows.keys():
            assert life.rows[above].is_ended, f"{key} was begun and {above} is not ended"


def check_all_lives(start, shards_max, plans_max):
    count = 0
    for graph in all_graphs(shards_max):
        shards = graph.listed()
        for life, before in lives(graph, start, planned, plans_max):
            count += 1
            try:
                check_life(shards, life)
                check_rest(graph, settled(graph, life, start, planned))
            except AssertionError as error:
                story = f"{error}\n{shards}\nbefore: {before}\nafter: {life}"
                raise AssertionError(story) from None
    return count


def check_rest(graph, rows):
    """Nothing of the stream is left unread: all that is open was begun, all else has ended."""
    for shard in graph.listed():
        row = rows.get(shard.shard_id)
        if shard.is_open:
            assert row is not None, f"{shard.shard_id} has no row for good"
            assert row.checkpoint == BEGUN, f"{row.key} is never begun"
        else:
            assert row is None or row.is_ended, f"{row.key} never ends"


@pytest.mark.seconds
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_whatever_comes_about_is_read_in_order_and_once(start):
    """One plan is written while everything else goes on."""
    assert check_all_lives(start, LIVED_SHARDS_MAX, plans_max=1) > 3_000


@pytest.mark.slow
@pytest.mark.parametrize("start", [TRIM_HORIZON, AT_TIMESTAMP], ids=str)
def test_what_comes_about_by_two_plans_at_once_is_read_in_order_and_once(start):
    """Not with LATEST: of two first syncs that see the stream before and after a reshard, one that
    is a reshard late creates a parent beside its children, which were begun."""
    assert check_all_lives(start, shards_max=4, plans_max=2) > 12_000
