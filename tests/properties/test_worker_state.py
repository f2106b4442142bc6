"""Keyed state against a row and stores in memory: any order of batches, failures of user code,
refused, lost and late writes, crashes, zombies, new owners, a split and a merge. The state at each
checkpoint is the fold of the records up to it, per key; and rows emitted from it are there once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.codec.kpl import effective_hash_key
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.lease.outputs import OutputCommits
from kclrun.lease.policy import LeasePolicy
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.output import StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import OF_PARENTS
from kclrun.model.time import Instant
from kclrun.outputs.commits import Keyed
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from kclrun.state import chain
from kclrun.state.chain import Entries, read_chain
from kclrun.state.kept import KeptEntries, MemoryEntries
from kclrun.state.keyed import Counter, KeyValues, LiveEntries, State
from kclrun.state.stores.local_state import LocalEntries
from kclrun.state.stores.state_versions import StateVersions
from tests.examples import examples
from tests.support.build import position as at
from tests.support.memory_output import Crash, Destination, MemoryOutput
from tests.support.memory_versions import MemoryVersions, Versions
from tests.support.outputs_host import FakeHost

KEYS = [f"key-{number}" for number in range(6)]
MIDDLE = HASH_KEY_MAX // 2
# A root, its two halves, and what they merge into; each with its parents.
RANGES = {
    "root": HashRange(0, HASH_KEY_MAX),
    "low": HashRange(0, MIDDLE),
    "high": HashRange(MIDDLE + 1, HASH_KEY_MAX),
    "merged": HashRange(0, HASH_KEY_MAX),
}
PARENTS = {"root": [], "low": ["root"], "high": ["root"], "merged": ["low", "high"]}
RECORDS = {"root": 12, "low": 9, "high": 0, "merged": 7}
SQL = "sql"
assert {effective_hash_key(key, None) in RANGES["low"] for key in KEYS} == {True, False}


def keys_of(shard: str) -> list[str]:
    """The keys of the shard's records, in order: record n has the n-th of them."""
    ours = [key for key in KEYS if effective_hash_key(key, None) in RANGES[shard]]
    return [ours[(number * number) % len(ours)] for number in range(RECORDS[shard])]


def number_at(position: ExtendedSequenceNumber, shard: str) -> int:
    if position == SHARD_END:
        return RECORDS[shard]
    return 0 if position == TRIM_HORIZON else int(position.sequence_number)


def fold(shard: str, upto: int) -> dict[str, dict[str, int]]:
    """What the keys of a shard hold after so many of its records, and those of its parents."""
    known: dict[str, dict[str, int]] = {}
    for parent in PARENTS[shard]:
        for key, values in fold(parent, RECORDS[parent]).items():
            if effective_hash_key(key, None) in RANGES[shard]:
                known[key] = dict(values)
    for number, key in enumerate(keys_of(shard)[:upto], 1):
        step(known.setdefault(key, {}), number)
    return {key: values for key, values in known.items() if values}


def step(values: dict[str, int], number: int) -> None:
    values["n"] = values.get("n", 0) + 1
    if number % 3 == 0:
        values.pop("odd", None)
    else:
        values["odd"] = number


def decoded(entries: Entries | KeyValues) -> dict[str, dict[str, int]]:
    return {
        key: {name: msgspec.msgpack.decode(value) for name, value in values.items()}
        for key in entries
        if (values := entries.get(key))
    }


class World:
    """The rows, the versions and the destinations: they outlive every process."""

    def __init__(self, disk: Path | None) -> None:
        self.disk = disk  # of the one machine, for copies of the state
        self.stored = Versions()
        self.rows: dict[str, Lease] = {}
        self.destinations = {shard: Destination(stores_cursor=True) for shard in RANGES}
        self.late: list[tuple[Life, Lease]] = []
        self.lives, self.clock = 0, 0.0
        self._create("root", None)

    def now(self) -> Instant:
        """More than an hour later each time: versions are collected whenever they may be."""
        self.clock += 4000
        return Instant(self.clock)

    def _create(self, shard: str, state_version: str | None) -> None:
        outputs = None if state_version is None else StoredCursors(TRIM_HORIZON, ())
        self.rows[shard] = Lease(
            key=LeaseKey(shard),
            checkpoint=TRIM_HORIZON,
            parents=frozenset(PARENTS[shard]),
            hash_range=RANGES[shard],
            state_version=state_version,
            outputs=outputs,
        )

    def claim(self, shard: str) -> Lease:
        row = self.rows[shard]
        self.rows[shard] = msgspec.structs.replace(row, counter=row.counter + 2)
        return self.rows[shard]

    def read(self, keys: Sequence[LeaseKey]) -> Mapping[LeaseKey, Lease | None]:
        return {key: self.rows.get(key) for key in keys}

    def write(self, life: Life, row: Lease) -> bool:
        """The conditional write of a checkpoint: whether it applied."""
        now = self.rows[life.shard]
        if (now.counter, now.checkpoint) != (life.row.counter, life.row.checkpoint):
            return False
        self.rows[life.shard] = row
        self.judge(life, row)
        for child, parents in PARENTS.items():
            is_due = life.shard in parents and child not in self.rows
            if row.is_ended and is_due and all(self.ended(parent) for parent in parents):
                self._create(child, OF_PARENTS)
        return True

    def judge(self, life: Life, row: Lease) -> None:
        """The version and the rows are those of the records up to the checkpoint."""
        assert row.state_version is not None
        entries, _, _ = read_chain(
            row.state_version, life.shard, lambda name: self.stored.content.get((life.shard, name))
        )
        upto = number_at(row.checkpoint, life.shard)
        assert decoded(entries) == fold(life.shard, upto)
        rows = self.destinations[life.shard].rows
        assert rows[: len(expected_rows(life.shard, upto))] == expected_rows(life.shard, upto)

    def ended(self, shard: str) -> bool:
        return shard in self.rows and self.rows[shard].is_ended

    def land(self) -> None:
        self.stored.land()
        for life, row in self.late:
            self.write(life, row)
        self.late.clear()


def expected_rows(shard: str, upto: int) -> list[int]:
    """Every record emits how many its key has seen."""
    return [
        100 * number + fold(shard, number)[key]["n"]
        for number, key in enumerate(keys_of(shard)[:upto], 1)
    ]


class WithRow:
    """What a lease process has: its row, outputs, and commits."""

    outputs: Outputs

    def __init__(self, world: Any, shard: str) -> None:
        world.lives += 1
        self.world, self.shard = world, shard
        self.fates: tuple[list[str], list[str]] = ([], [])  # of the state, and of the rows
        self.row: Lease = world.claim(shard)
        self.is_over = self.is_waiting = False

    def _begin(self) -> tuple[ExtendedSequenceNumber, list[ExtendedSequenceNumber]]:
        self.commits = OutputCommits(policy())
        self.commits.claim(self.row)
        cursors = dict(self.row.outputs.cursors) if self.row.outputs is not None else {}
        start, cuts = self.outputs.begin(self.row.checkpoint, cursors, may_adopt=True)
        assert start == self.row.checkpoint, "what the state does not have is processed again"
        self.commits.begin(start, self.outputs.cursors())
        return start, list(cuts)

    def _broke(self, error: BaseException) -> None:
        raise AssertionError from error

    def _change(self, *change):
        self.outputs.rows.change_state(*change)

    def turn(self) -> None:
        if not self.is_over and self.outputs._has_work():
            try:
                self.is_over = not self.outputs.turn()
            except Crash:
                self.is_over = True

    def _ask(self, wanted: ExtendedSequenceNumber) -> None:
        for asked in self.commits.ask(CommitOutputs(wanted, must=True), Instant(10.0**9)):
            self.outputs.commit(asked)
        self.turn()

    def _write(self, wanted: ExtendedSequenceNumber, fate: str) -> bool:
        """Write a checkpoint with what the outputs say; whether it applied now."""
        saved, is_end = self.row.checkpoint, wanted == SHARD_END
        position = self.commits.covered(wanted, saved, saved)
        if position == saved or (is_end and position != SHARD_END):
            return False
        cursors, version = self.commits.to_write(self.row, position)
        row = msgspec.structs.replace(
            self.row,
            checkpoint=position,
            outputs=StoredCursors(position, cursors) if cursors is not None else self.row.outputs,
            state_version=version if version is not None else self.row.state_version,
        )
        if fate == "late":
            self.world.late.append((self, row))
            self.is_waiting = True
            return False
        if not self.world.write(self, row):
            self.is_over = True
            return False
        self.row = row
        self.is_over |= is_end
        self.outputs.confirm(row.state_version)
        return True


class Life(WithRow):
    """One lease process, from its claim on. A former one goes on as a zombie."""

    def __init__(self, world: World, shard: str) -> None:
        super().__init__(world, shard)
        store = MemoryVersions(world.stored, self.fates[0])
        nonce = f"{world.lives:08x}"
        self.kept: KeptEntries = MemoryEntries()
        if world.disk is not None:  # with memory for a single key
            self.kept = LocalEntries(world.disk / shard, 1000, self._broke)
        self.versions = StateVersions(store, shard, self.row.counter, nonce, self.kept)
        entries = self.versions.restore(self.row, world.read, RANGES[shard])
        self.done = self.reported = number_at(self.row.checkpoint, shard)
        assert decoded(entries) == fold(shard, self.done)
        self.live = LiveEntries(entries, self._change, RANGES[shard], 10**6)
        self.state = State(self.live)
        self.outputs = Outputs(
            [(SQL, self._sql(world.destinations[shard]), Pace(0, 0, 200))],
            FakeHost(self._post),
            now=world.now,
            state=Keyed(self.versions, self.live.undo, 0.0),
        )
        _, cuts = self._begin()
        self.cuts = [number_at(cut, shard) for cut in cuts]

    def _sql(self, destination: Destination) -> MemoryOutput:
        return MemoryOutput(destination, self.world.lives, self.fates[1])

    def _post(self, event: events.Event) -> None:
        if isinstance(event, events.OutputsCommitted):
            self.commits.commit(
                event.upto, event.cursors, event.answers, Instant(1.0), event.state_version
            )
        self.is_over |= isinstance(event, events.OutputsSuperseded | events.OutputsRefused)

    def batch(self, size: int, *, raises: bool) -> None:
        end = min(
            [RECORDS[self.shard], self.done + size, *(cut for cut in self.cuts if cut > self.done)]
        )
        if end == self.done:
            return
        counts = Counter(self.state, "n")
        self.outputs.rows.begin_batch()
        for number in range(self.done + 1, end + 1):
            key = keys_of(self.shard)[number - 1]
            values = self.state[key]
            self.outputs.rows.emit_to(SQL)({"n": 100 * number + counts.add(key)})
            if number % 3 == 0:
                values.delete("odd")
            else:
                values["odd"] = number
        if raises:
            before = self.done
            self.outputs.rows.take_back_batch()
            assert {key: dict(self.state[key]) for key in self.state} == fold(self.shard, before)
            return
        self.outputs.rows.end_batch(at(end))
        self.outputs.settle(at(end))
        self.reported, self.done = self.done, end  # the core learns of it later

    def save(self, fate: str) -> None:
        """A checkpoint: asked of the outputs, and written with what they say. The outputs may be
        ahead of what the core was told."""
        if self.is_over or self.is_waiting:
            return
        wanted = SHARD_END if self.reported == RECORDS[self.shard] else at(self.reported)
        self._ask(wanted)
        self.reported = self.done
        if not self.is_over:
            self._write(wanted, fate)


def policy() -> LeasePolicy:
    return LeasePolicy(
        key=LeaseKey("shard"),
        me=OwnerId("me"),
        seen_counter=1,
        expires_instant=Instant(9.0),
        failover_s=10.0,
        has_keyed_state=True,
        has_outputs=True,
        has_storing_outputs=True,
    )


FATES = ("", "", "", "refused", "lost", "late")
OF_ROWS = {"refused": "refused", "lost": "lost reply", "late": "dies after"}
STEPS = st.tuples(
    st.sampled_from(["batch", "batch", "raise", "turn", "save", "save", "claim", "zombie", "land"]),
    st.integers(0, 5),
    st.sampled_from(FATES),
)


@pytest.mark.parametrize(
    "is_on_disk",
    [False, pytest.param(True, marks=[pytest.mark.seconds, pytest.mark.long])],
    ids=["memory", "disk"],
)
@given(steps=st.lists(STEPS, max_size=70))
@examples(400)
def test_the_state_at_every_checkpoint_is_the_fold_of_the_records_up_to_it(is_on_disk, steps):
    with ExitStack() as stack:
        disk = None
        if is_on_disk:
            disk = Path(stack.enter_context(TemporaryDirectory()))
            # A snapshot of two keys has two parts.
            stack.enter_context(patch.object(chain, "PART_BYTES", 10))
        live_through(World(disk), steps, stack)


def live_through(world: World, steps: list[tuple[str, int, str]], stack: ExitStack) -> None:
    lives: dict[str, Life] = {}
    zombies: list[Life] = []
    for kind, number, fate in [*steps, *finish()]:
        world_shards = [shard for shard, row in world.rows.items() if not row.is_ended]
        if not world_shards:
            break
        shard = world_shards[number % len(world_shards)]
        life = lives.get(shard)
        if life is None or life.is_over or life.is_waiting or kind == "claim":
            if life is not None and number % 2:
                zombies.append(life)
            elif life is not None:
                life.kept.close()  # its process has ended
            life = lives[shard] = Life(world, shard)
            stack.callback(life.kept.close)
        for of in life.fates:
            of.clear()
        if fate and kind in {"turn", "save"}:
            if number % 2:
                life.fates[1].extend([OF_ROWS[fate], ""])  # the add goes well
            else:
                life.fates[0].append(fate)
        match kind:
            case "batch" | "raise":
                life.batch(number + 1, raises=kind == "raise")
            case "turn":
                life.turn()
            case "save":
                life.save(fate if number == 0 else "")
            case "zombie" if zombies:
                zombie = zombies[number % len(zombies)]
                zombie.batch(2, raises=False)
                zombie.save("")
                zombie.turn()
            case "land":
                world.land()
    assert all(world.ended(shard) for shard in RANGES)
    for shard, destination in world.destinations.items():
        assert destination.rows == expected_rows(shard, RECORDS[shard])


def finish() -> list[tuple[str, int, str]]:
    """Enough steps to read every shard to its end."""
    one = [("batch", 5, ""), ("batch", 4, ""), ("save", 4, ""), ("turn", 4, ""), ("save", 5, "")]
    return [*one, ("land", 0, "")] * 40
