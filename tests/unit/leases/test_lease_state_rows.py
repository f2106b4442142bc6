"""A row with keyed state stays until the state of each child is the child's own [K17]; a child that
a manager makes later begins with its parents' state, or halts [K16]."""

import pytest

from kclrun.leases import events as e
from kclrun.leases.policy import ENDED_ROWS_STAY_S
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.state import OF_PARENTS
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import JAVA, OTHER, ManagerLife, row

WHOLE = HashRange(0, HASH_KEY_MAX)
BEGUN = ExtendedSequenceNumber("7")


@pytest.mark.parametrize(
    ("checkpoint", "version", "is_deleted"),
    [
        (BEGUN, "0000000002-000001-0badcafe", True),
        (
            BEGUN,
            OF_PARENTS,
            False,
        ),  # a Java worker moved it: the child's state is still its parent's
        (TRIM_HORIZON, OF_PARENTS, False),
        (BEGUN, None, True),  # read without state
        (TRIM_HORIZON, None, False),
    ],
)
@pytest.mark.parametrize("parent_version", ["0000000009-000001-0badcafe", None])
def test_an_ended_row_stays_while_a_child_begins_with_its_state(
    checkpoint, version, is_deleted, parent_version
):
    parent = row("p", OTHER, checkpoint=SHARD_END, children={"child"}, state_version=parent_version)
    life = ManagerLife(parent, row("child", OTHER, checkpoint=checkpoint, state_version=version))
    deleted = False
    began = life.now
    while life.now - began < 3 * ENDED_ROWS_STAY_S:
        life.scan()
        deleted |= ch.DeleteEnded("p") in life.writes()

    has_begun = checkpoint == BEGUN
    assert deleted == (is_deleted if parent_version else has_begun)


@pytest.mark.parametrize("parent_version", ["0000000009-000001-0badcafe", None])
def test_v8_the_row_of_a_trimmed_shard_stays_until_its_child_has_its_state(parent_version):
    parent = row("p", JAVA, 5, checkpoint=BEGUN, state_version=parent_version)
    child = row("child", parents=frozenset({"p"}), state_version=OF_PARENTS)
    life = ManagerLife(parent, child)
    deleted = set()
    for _ in range(24):
        life.scan(after=5.0)
        life.say(e.ShardsListed((Shard("child", WHOLE, "20", None, "p"),), 1.0))
        deleted |= {change.key for change in life.writes(ch.DeleteTrimmed)}

    assert deleted == (set() if parent_version else {"p"})


@pytest.mark.parametrize("version", ["0000000009-000001-0badcafe", None])
def test_a_child_that_a_manager_creates_begins_with_its_parents_state(version):
    parent = row("p", OTHER, checkpoint=SHARD_END, state_version=version)
    life = ManagerLife(parent)
    shards = (Shard("p", WHOLE, "1", "9"), Shard("child", WHOLE, "20", None, "p"))
    made = []
    for _ in range(6):
        life.scan(after=5.0)
        life.say(e.ShardsListed(shards, 1.0))
        made += life.writes(ch.CreateChildren)
    (child,) = made[0].children

    marked = (OF_PARENTS, StoredCursors(TRIM_HORIZON, ()))
    assert (child.state_version, child.outputs) == (marked if version else (None, None))
