"""Several outputs and the state are of one execution of a processor that is not deterministic,
wherever its process ends (K12, docs/explanation/commits.md): a model of every order of events, and
the parts as they are built with each of their writes as the last one."""

import itertools
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest

from kclrun.errors import SettingsError
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor, StoredCursors, sorted_cursors
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import Instant
from kclrun.outputs.commits import Keyed
from kclrun.outputs.lanes import Pace
from kclrun.outputs.outbox import BoxedOutput, Decided
from kclrun.outputs.sending import Outputs
from kclrun.state.boxes import Box, decode_box, encode_box, pack_row, unpack_row
from kclrun.state.keyed import LiveEntries, State
from kclrun.state.stores.state_versions import StateVersions
from tests.simulation.outbox_model import Rules, explore
from tests.support.build import position as at
from tests.support.memory_output import Crash, Destination, MemoryOutput
from tests.support.memory_versions import MemoryVersions, Versions
from tests.support.outputs_host import FakeHost

NAMES = ("first", "second", "third")


@pytest.mark.slow
def test_two_owners_in_every_order_leave_rows_and_state_of_one_execution():
    states, words, story = explore()

    assert not words, story
    assert states > 90_000


@pytest.mark.parametrize("rule", Rules._fields)
def test_the_model_finds_a_story_against_each_rule_that_is_taken_away(rule):
    _, words, story = explore(Rules(**{rule: False}))

    assert words, rule
    assert len(story) < 12


class World:
    """What outlives a process. `third` keeps no cursor: its rows may be there again."""

    def __init__(self):
        self.versions = Versions()
        self.outputs = {name: Destination(stores_cursor=name != "third") for name in NAMES}
        self.row = Lease(key=LeaseKey("shard"), checkpoint=TRIM_HORIZON)
        self.writes = 0
        self.last_write: int | None = None
        self.fate = ""

    def write(self):
        """Each write passes here: the process dies at the chosen one, before it or behind it."""
        self.writes += 1
        if self.writes == self.last_write:
            if self.fate == "before":
                raise Crash
            return True
        return False


class Store(MemoryVersions):
    def __init__(self, world):
        super().__init__(world.versions)
        self.world = world

    def create(self, shard, name, content):
        dies = self.world.write()
        super().create(shard, name, content)
        if dies:
            raise Crash


class Rows(MemoryOutput):
    def __init__(self, world, name, token):
        super().__init__(world.outputs[name], token, [])
        self.world = world

    def encode(self, row):
        return row["n"], 10

    def commit(self):
        dies = self.world.write()
        cursor = super().commit()
        if dies:
            raise Crash
        return cursor


class Owner:
    def __init__(self, world, token):
        self.world, self.token = world, token
        self.row = world.row = msgspec.structs.replace(world.row, counter=token)
        self.posted = []
        lanes = [(name, BoxedOutput(Rows(world, name, token)), Pace(0, 0, 1000)) for name in NAMES]
        row, first = self.row, lanes[0][1]
        there = first.begin(Cursor.of(row.checkpoint)).reached
        if there > row.checkpoint and first.decided:
            row = msgspec.structs.replace(row, checkpoint=there, state_version=first.decided)
        versions = StateVersions(Store(world), "shard", token, f"{token:08x}")
        entries = versions.restore(row, lambda _: {}, None)
        self.live = LiveEntries(entries, self.change, None, 999)
        keyed = Keyed(versions, self.live.undo, 0.0, is_boxed=True)
        self.outputs = Outputs(
            lanes,
            FakeHost(self.posted.append),
            now=lambda: Instant(1.0),
            state=keyed,
        )
        decided = None
        if row is not self.row:
            decided = Decided(first.decided, Cursor.of(there), versions.boxes(first.decided))
        cursors = {} if self.row.outputs is None else dict(self.row.outputs.cursors)
        self.at, _ = self.outputs.begin(
            self.row.checkpoint, cursors, may_adopt=True, decided=decided
        )
        if decided is not None:
            self.outputs.turn()
            begun = next(each for each in self.posted if isinstance(each, events.OutputsBegan))
            self.save(begun.position, begun.cursors, begun.state_version)

    def change(self, *change):
        self.outputs.rows.change_state(*change)

    def run(self, last):
        """Process the records up to `last`, each with a checkpoint, but for the third. The second
        emits nothing; from the fourth on they do not change the state either: the checkpoint at the
        fourth is behind the last rows, and that at the fifth has none."""
        first = 1 if self.at == TRIM_HORIZON else int(self.at.sequence_number) + 1
        state = State(self.live)
        for number in range(first, last + 1):
            mark = 100 * self.token + number
            self.outputs.rows.begin_batch()
            if number <= 3:
                state["key"]["seen"] = [*state["key"].get("seen", []), mark]
            # What is emitted is not a function of the record: one owner's rows of the third record
            # go to the others.
            names = NAMES if number == 1 else NAMES[self.token % 2 :] if number == 3 else ()
            for name in names:
                self.outputs.rows.emit_to(name)({"n": mark})
            self.outputs.rows.end_batch(at(number))
            self.outputs.settle(at(number))
            if number == 3:
                continue
            self.outputs.commit(CommitOutputs(at(number), must=True))
            self.outputs.turn()
            done = self.posted[-1]
            assert isinstance(done, events.OutputsCommitted), done
            assert done.upto == at(number)
            self.save(done.upto, done.cursors, done.state_version)

    def save(self, position, cursors, version):
        assert self.world.row.counter == self.token
        dies = self.world.write()
        stored = StoredCursors(position, sorted_cursors(cursors))
        self.world.row = msgspec.structs.replace(
            self.world.row, checkpoint=position, outputs=stored, state_version=version
        )
        if dies:
            raise Crash


def seen(world):
    versions = StateVersions(MemoryVersions(world.versions), "shard", 99, "0" * 8)
    values = versions.restore(world.row, lambda _: {}, None).get("key")
    return msgspec.msgpack.decode(values["seen"])


@pytest.mark.parametrize("fate", ["before", "behind"])
def test_whichever_write_is_the_last_one_rows_and_state_are_of_one_execution(fate):
    """The first owner's process ends at each of its writes, the second one's at each of the writes
    of its own beginning; the third one comes to the end."""
    whole = 0
    for first, second in itertools.product(range(1, 40), range(1, 9)):
        world = World()
        deaths = 0
        for token, last_write in ((1, first), (2, second), (3, None)):
            world.writes, world.last_write, world.fate = 0, last_write, fate
            try:
                Owner(world, token).run(5)
            except Crash:
                deaths += 1
        whole += deaths == 0
        marks = seen(world)
        assert [mark % 100 for mark in marks] == [1, 2, 3], (first, second)
        for name, output in world.outputs.items():
            expected = [
                mark
                for mark in marks
                if mark % 100 == 1 or (mark % 100 == 3 and name in NAMES[mark // 100 % 2 :])
            ]
            rows = output.rows if output.stores_cursor else sorted(set(output.rows))
            assert rows == expected, (name, first, second)
    assert whole > 0, "the first owner has less than 40 writes"


def test_a_commit_that_fails_is_repeated_with_the_same_version_and_the_same_rows():
    world = World()
    owner = Owner(world, 1)
    for lane in owner.outputs._lanes[1:]:
        lane.output._output._fates = ["lost reply", "refused"]
    with pytest.raises(AssertionError):
        owner.run(1)
    stored = len(world.versions.content)
    for _ in range(8):
        owner.outputs.turn()

    assert owner.posted[-1].upto == at(1)
    assert len(world.versions.content) == stored == 2  # the rows and the version
    assert [world.outputs[name].rows for name in NAMES[:2]] == [[101], [101]]


def test_rows_that_are_missing_or_damaged_are_an_error_in_words():
    content = encode_box({"first": Box("12", (b"x",))})
    assert decode_box("name", content) == {"first": Box("12", (b"x",))}
    for broken, words in ((None, "missing"), (content[:-1], "damaged"), (b"", "not one")):
        with pytest.raises(SettingsError, match=words):
            decode_box("name", broken)


class Ratio(float):
    """As numpy.float64."""


class Stamp(datetime):
    """As pandas.Timestamp."""


def test_a_row_comes_back_with_the_types_that_an_output_was_given():
    row = {
        "text": "é",
        "large": 2**70,
        "float": 0.1,
        "nothing": None,
        "bytes": b"\x00",
        "exact": Decimal("1.50"),
        "day": date(2026, 2, 3),
        "instant": datetime(2026, 2, 3, 4, 5, 6, 7, UTC),
        "local": datetime(2026, 2, 3, 4, 5),
        "hour": time(4, 5),
        "for": timedelta(days=-1, microseconds=3),
        "id": UUID(int=7),
        "list": [1, {"deep": [Decimal(2)]}],
        "map": {1: date(2026, 1, 1)},
        "yes": True,
    }

    assert unpack_row(pack_row(row)) == row
    made = {"ratio": Ratio(0.5), "at": Stamp(2026, 1, 2, tzinfo=UTC)}
    assert unpack_row(pack_row(made)) == made
    assert unpack_row(pack_row({"set": frozenset({1}), "pair": (1, 2)})) == {
        "set": [1],
        "pair": [1, 2],
    }
