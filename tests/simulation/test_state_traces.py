"""The traces of the commit rules with keyed state, step by step, on the parts as they are built.
V- and R-numbers are those of the model; K-numbers are in docs/explanation/commits.md."""

import msgspec
import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.lease.outputs import OutputCommits
from kclrun.lease.policy import LeasePolicy
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import OF_PARENTS
from kclrun.model.time import Instant
from kclrun.outputs.commits import Keyed
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from kclrun.outputs.state_versions import StateVersions
from kclrun.state.keyed import LiveEntries, State
from tests.support.build import position as at
from tests.support.memory_output import Destination, MemoryOutput
from tests.support.memory_versions import MemoryVersions, Versions

SHARD = "shard"
EVERYTHING = HashRange(0, HASH_KEY_MAX)
POLICY = LeasePolicy(
    key=LeaseKey(SHARD),
    me=OwnerId("me"),
    seen_counter=1,
    expires_instant=Instant(9.0),
    failover_s=10.0,
    has_keyed_state=True,
    has_outputs=True,
    has_storing_outputs=True,
)


class World:
    def __init__(self):
        self.stored = Versions()
        self.row = Lease(key=LeaseKey(SHARD), checkpoint=TRIM_HORIZON, hash_range=EVERYTHING)
        self.rows = {}
        self.clock = 0.0

    def names(self):
        return {name for _, name in self.stored.content}

    def now(self):
        self.clock += 4000.0
        return Instant(self.clock)


class Owner:
    """One lease process: its state, and a destination of rows beside it if there is one."""

    def __init__(self, world, token, *, mark="", rows=None):
        self.world, self.token, self.mark = world, token, mark
        self.row = world.row = msgspec.structs.replace(world.row, counter=token)
        self.fates, self.row_fates, self.posted = [], [], []
        store = MemoryVersions(world.stored, self.fates)
        self.versions = StateVersions(store, SHARD, token, f"{token:08x}")
        entries = self.versions.restore(
            self.row, lambda keys: {key: world.rows.get(key) for key in keys}, EVERYTHING
        )
        self.live = LiveEntries(entries, self.change, EVERYTHING, 10**6)
        self.state = State(self.live)
        lanes = []
        if rows is not None:
            lanes = [("rows", MemoryOutput(rows, token, self.row_fates), Pace(0, 0, 1000))]
        self.outputs = Outputs(
            lanes,
            post=self.posted.append,
            hold=lambda _: None,
            now=world.now,
            state=Keyed(self.versions, self.live.undo, 0.0),
        )
        self.commits = OutputCommits(POLICY)
        self.commits.claim(self.row)
        start, _ = self.outputs.begin(self.row.checkpoint, {}, may_adopt=True)
        self.commits.begin(start, {})

    def change(self, *change):
        self.outputs.rows.change_state(*change)

    def process(self, number, *, emits=False):
        self.outputs.rows.begin_batch()
        self.state["key"]["n"] = f"{self.mark}{number}"
        if emits:
            self.outputs.rows.emit_to("rows")({"n": number})
        self.outputs.rows.end_batch(at(number))
        self.outputs.settle(at(number))

    def commit(self, number):
        """The version for this position is durable, and the outputs have their rows; no
        checkpoint. Returns whether it is."""
        asked = CommitOutputs(at(number), must=True)
        self.outputs.commit(asked)
        self.outputs.turn()
        for event in self.posted:
            if isinstance(event, events.OutputsCommitted):
                self.commits.commit(
                    event.upto, event.cursors, None, Instant(0.0), event.state_version
                )
        self.posted.clear()
        return self.commits.confirmed >= at(number)

    def checkpoint(self, number):
        """The write of the row, as it leaves."""
        position = self.commits.covered(at(number), self.row.checkpoint, self.row.checkpoint)
        cursors, version = self.commits.to_write(self.row, position)
        return msgspec.structs.replace(
            self.row,
            checkpoint=position,
            outputs=StoredCursors(position, cursors or ()),
            state_version=version or self.row.state_version,
        )

    def save(self, number):
        """A whole commit."""
        assert self.commit(number)
        self.land(self.checkpoint(number))
        self.outputs.confirm(self.row.state_version)

    def land(self, row):
        """The write of the row arrives."""
        assert (self.world.row.counter, self.world.row.checkpoint) == (
            self.token,
            self.row.checkpoint,
        )
        self.row = self.world.row = row

    def collect(self):
        """What its thread does when it is woken."""
        if self.outputs._has_work():
            self.outputs.turn()

    def value(self):
        return self.state["key"].get("n")


@pytest.fixture
def world():
    return World()


def test_v5_a_delete_of_a_dead_owners_version_takes_no_other_owners(world):
    p0 = Owner(world, 2)
    p0.process(2)
    assert p0.commit(2)  # version 2 of p0; its checkpoint is never sent
    (dead,) = world.names()

    p1 = Owner(world, 4)
    p1.process(1)
    p1.save(1)
    p1.process(2)
    p1.fates.append("late")
    p1.collect()  # DELETE of p0's version is sent, and is under way
    assert p1.commit(2), "a version of its own: nothing there has its name"
    p1.land(p1.checkpoint(2))
    world.stored.land()  # → the DELETE lands

    assert dead not in world.names()
    assert Owner(world, 6).value() == "2"


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_v6_nothing_is_deleted_while_a_checkpoint_may_be_under_way(world, is_confirmed):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.save(1)
    first = p0.row.state_version
    p0.process(2)
    assert p0.commit(2)
    under_way = p0.checkpoint(2)

    p0.collect()  # the row names version 1, and perhaps in a moment version 2
    assert world.names() == {first, under_way.state_version}
    if is_confirmed:
        p0.land(under_way)
        p0.outputs.confirm(under_way.state_version)
        p0.collect()
        assert Owner(world, 4).value() == "2"
    else:
        assert Owner(world, 4).value() == "1"


def test_v6_a_new_owner_deletes_nothing_before_its_first_checkpoint(world):
    p0 = Owner(world, 2)
    p0.process(1)
    assert p0.commit(1)
    p1 = Owner(world, 4)
    p1.process(1)
    assert p1.commit(1)
    p1.collect()
    assert len(world.names()) == 2
    p1.land(p1.checkpoint(1))
    p1.outputs.confirm(p1.row.state_version)
    p1.collect()
    assert world.names() == {p1.row.state_version}


def test_v6_a_zombie_deletes_no_version_of_a_later_owner(world):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.save(1)
    p1 = Owner(world, 4)
    p1.process(2)
    p1.save(2)

    p0.collect()  # it does not know yet that the lease is lost

    assert Owner(world, 6).value() == "2"


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ({}, "the row of parent is gone"),
        ({"parent": ("", SHARD_END)}, "names no version"),
        ({"parent": ("0000000002-000001-0badcafe", SHARD_END)}, r"is missing from state\.store"),
        ({"parent": ("0000000002-000001-0badcafe", at(7))}, "has not ended"),
    ],
)
def test_v8_a_child_without_its_parents_state_halts_in_words_and_never_begins_empty(
    world, parents, words
):
    world.row = msgspec.structs.replace(
        world.row,
        parents=frozenset({"parent"}),
        state_version=OF_PARENTS,
        outputs=StoredCursors(TRIM_HORIZON, ()),
    )
    world.rows = {
        LeaseKey(name): Lease(
            key=LeaseKey(name),
            checkpoint=checkpoint,
            state_version=version or None,
            outputs=StoredCursors(checkpoint, ()),
        )
        for name, (version, checkpoint) in parents.items()
    }
    with pytest.raises(SettingsError, match=words):
        Owner(world, 2)


def test_v9_a_zombies_version_is_never_the_state_of_another_execution(world):
    p0 = Owner(world, 2, mark="zombie ")
    p0.process(2)
    p0.fates.append("late")
    assert not p0.commit(2)  # under way
    p1 = Owner(world, 4, mark="owner ")
    p1.process(2)
    world.stored.land()  # → p0's version lands
    p1.save(2)

    assert len(world.names()) == 2
    assert Owner(world, 6).value() == "owner 2"


def test_r9_what_a_host_did_not_checkpoint_is_not_the_state_of_the_same_position(world):
    p0 = Owner(world, 2, mark="lost ")
    p0.process(3)
    assert p0.commit(3)
    p1 = Owner(world, 4, mark="kept ")
    p1.process(3)
    p1.save(3)
    assert p0.versions.version != world.row.state_version
    assert Owner(world, 6).value() == "kept 3"


def test_r10_a_state_that_did_not_change_writes_no_version_and_keeps_its_pointer(world):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.save(1)
    before = p0.row.state_version
    p0.outputs.rows.begin_batch()
    p0.state["key"]["n"] = "1"  # as it was
    p0.outputs.rows.end_batch(at(2))
    p0.outputs.settle(at(2))
    p0.save(2)

    assert (p0.row.checkpoint, p0.row.state_version) == (at(2), before)
    assert world.names() == {before}


def test_k5_no_output_has_rows_whose_state_is_not_durable(world):
    rows = Destination(stores_cursor=True)
    p0 = Owner(world, 2, rows=rows)
    p0.process(1, emits=True)
    p0.fates.append("refused")
    assert not p0.commit(1)
    assert rows.rows == []
    assert p0.commit(1)
    assert rows.rows == [1]


def test_k5_a_commit_that_failed_half_way_is_finished_at_its_own_position(world):
    rows = Destination(stores_cursor=True)
    p0 = Owner(world, 2, rows=rows)
    p0.process(1, emits=True)
    p0.row_fates.extend(["refused", ""])
    assert not p0.commit(1)
    assert p0.checkpoint(1).checkpoint == TRIM_HORIZON, "no checkpoint with half of a commit"
    p0.process(2, emits=True)
    p0.save(2)
    assert rows.rows == [1, 2]
    assert Owner(world, 4, rows=rows).value() == "2"


def test_k5_a_checkpoint_is_never_between_two_versions(world):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.process(2)
    assert p0.commit(2)
    assert p0.checkpoint(1).checkpoint == TRIM_HORIZON
    assert p0.checkpoint(3).checkpoint == at(2)


def test_k6_a_version_is_sent_again_under_its_name_with_its_contents(world):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.fates.append("lost")
    assert not p0.commit(1)
    p0.process(2)
    p0.save(2)
    assert len(world.names()) == 2
    assert Owner(world, 4).value() == "2"


def test_k16_a_child_without_changes_has_a_version_that_rests_on_no_parent(world):
    p0 = Owner(world, 2)
    assert p0.versions.version is None
    assert p0.versions.must_write
    p0.save(1)
    assert p0.row.state_version == p0.versions.version
    assert not p0.versions.must_write


def test_the_store_that_is_away_is_no_empty_state(world):
    p0 = Owner(world, 2)
    p0.process(1)
    p0.save(1)
    world.stored.content = {}
    with pytest.raises(SettingsError, match=r"is missing from state\.store"):
        Owner(world, 4)
    store = MemoryVersions(world.stored)

    def away(shard, name):
        raise SinkError("away")

    store.read = away
    with pytest.raises(SinkError, match="away"):
        StateVersions(store, SHARD, 6, "0badcafe").restore(world.row, lambda _: {}, EVERYTHING)


@pytest.mark.parametrize(
    ("first", "second", "are_deleted"),
    [("gone", "gone", True), ("gone", "back", False), ("there", "gone", False)],
)
def test_k17_versions_of_an_ended_shard_go_at_the_second_look_that_finds_no_row(
    world, first, second, are_deleted
):
    """A row goes once every child's chain is its own. One that a person removed comes back."""
    parents = [("parent", f"000000000{number}-000001-0badcafe") for number in (1, 2)]
    world.stored.content = dict.fromkeys(parents, b"")
    owner = Owner(world, 1)
    for number, row in enumerate((first, second), 1):
        world.rows = {} if row == "gone" else {"parent": world.row}
        owner.process(number)
        owner.save(number)
        owner.collect()
    kept = {shard for shard, _ in world.stored.content}
    assert kept == ({SHARD} if are_deleted else {SHARD, "parent"})


def test_k17_a_pass_looks_at_some_shards_and_the_next_one_goes_on(world):
    ended = [f"ended-{number:02}" for number in range(50)]
    world.stored.content = {(shard, "0000000001-000001-0badcafe"): b"" for shard in ended}
    owner = Owner(world, 1)
    left = []
    for number in range(1, 8):
        owner.process(number)
        owner.save(number)
        owner.collect()
        left.append(sum(1 for shard, _ in world.stored.content if shard != SHARD))
    assert left == [50, 50, 40, 20, 0, 0, 0]
