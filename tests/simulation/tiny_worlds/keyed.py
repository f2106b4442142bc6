"""A tiny world with keyed state, timers and an output: every order of events of two owners.

As tiny_worlds/outputs.py, with the state as the first output, and with the timers of the lease. The
versions, the entries, the timers and the garbage collection are the real ones; a request to the
store may arrive late or lose its answer, as one to the output may. Looked at after each step: the
row names a version that is there [K13], whose state is the fold of the records and timers up to the
checkpoint [K5, K19]; each timer is pending or has fired, once [K18]; rows as in the other world.
"""

from typing import ClassVar

import msgspec

from kclrun.calling.timer_run import TimerRun
from kclrun.errors import SettingsError
from kclrun.lease import commands, events
from kclrun.model.record import Record
from kclrun.model.shard import ALL_HASH_KEYS
from kclrun.model.time import Instant
from kclrun.outputs.commits import Keyed
from kclrun.outputs.sending import Outputs
from kclrun.protocol import reports
from kclrun.state.chain import read_chain
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import LiveEntries, State
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.timers import Timer, is_reserved, timer_of
from kclrun.worker.progress import Progress
from kclrun.worker.timer_delivering import TimerClocks, TimerDelivery
from tests.simulation.tiny_worlds.outputs import (
    KEY,
    PACE,
    RECORDS,
    OutputWorld,
    Owner,
    TableOutput,
    number_of,
    position,
)
from tests.simulation.tiny_worlds.rules import Broken
from tests.support.delivery_host import delivery_host
from tests.support.memory_versions import MemoryVersions, Versions

# A record moves the watermark to its time. The first one sets a timer that the second one's time
# reaches, and one of the wall clock, whose time comes with the first tick of the world.
_SECONDS_APART = 10.0
_EVENT, _WALL = "event", "wall"
_AT = {_EVENT: 1.5 * _SECONDS_APART, _WALL: 1.0}
# Behind every pause between two rounds.
_LATE = Instant(1e12)


class Calls:
    """Checkpoints of user code and of rounds, as `CheckpointCalls`: the owner's calls wait for the
    answer, which is the last thing that a round does."""

    def __init__(self, owner) -> None:
        self.owner = owner
        self.given = self.before = self.durable = None
        self.checkpointer = self

    def checkpoint(self) -> None:
        owner = self.owner
        owner.outputs.rows.cover(self.given)
        owner.asked += 1
        owner.is_asking = True
        owner.post(events.CheckpointRequested(owner.asked, self.given))


class Fold:
    """The state of a key is what it has seen, in order: its records, and the timers that fired."""

    def __init__(self, owner) -> None:
        self.owner = owner

    def process(self, record) -> None:
        self._see(int(record.data))
        if record.data == b"1":
            for clock, at in _AT.items():
                self.owner.live.set_timer("key", at, clock, clock)

    def on_timer(self, timer: Timer, _) -> None:
        self._see(timer.name)

    def _see(self, what) -> None:
        values = State(self.owner.live)["key"]
        values["seen"] = [*values.get("seen", []), what]
        self.owner.outputs.rows.emit_to("sql")(what)


class Once:
    """Calls of user code that does not raise."""

    def run(self, _, call) -> bool:
        call()
        return True


class StatefulOwner(Owner):
    """One lease process with state and timers."""

    policy: ClassVar = {"has_keyed_state": True}

    def __init__(self, world, index, counter) -> None:
        self.live = self.store = self.timers = self.timer_run = None
        self.asked, self.is_asking, self.stops = 0, False, False
        super().__init__(world, index, counter)

    def begin(self, row) -> None:
        """K11 to K13."""
        self.store = MemoryVersions(self.world.stored)
        versions = StateVersions(self.store, KEY, row.counter, f"{row.counter:08x}")
        try:
            entries = versions.restore(row, dict.fromkeys, ALL_HASH_KEYS)
        except SettingsError as error:
            if self is self.world.owners[-1]:
                raise Broken("K13", KEY, str(error)) from None
            self.is_over = True
            return
        self.live = LiveEntries(entries, self.change, ALL_HASH_KEYS, 10**6)
        self.live.reserved.is_served = True
        self.output = TableOutput(self.world.table, row.counter)
        self.outputs = Outputs(
            [("sql", self.output, PACE)],
            self,
            now=self.now,
            state=Keyed(versions, self.live.undo, 0.0),
        )
        self.take_over(row)

    def began(self, start, cuts) -> None:
        self.timer_run = TimerRun(
            self.live, start, lateness_s=0.0, every_s=1.0, times=EventTimes(), stored=cuts
        )
        calls = Calls(self)
        self.progress = progress = Progress(
            delivery_host(post=self.post, settled=self.outputs.settle), calls
        )
        progress.done = start
        self.timers = TimerDelivery(
            *(self.timer_run, Fold(self), self.outputs.rows, calls, progress),
            queue=self,
            methods=Once(),
            clocks=TimerClocks(0.0, wall=self.now),
        )

    def change(self, *change) -> None:
        self.outputs.rows.change_state(*change)

    def may_try_again(self, _pause_s, *, is_batch) -> bool:
        """As `DeliveryQueue`: nothing stops it."""
        assert is_batch
        return True

    def deliver(self) -> None:
        """User code is given the next record; event timers that it makes due fire."""
        self.delivered += 1
        at = position(self.delivered)
        record = Record(b"%d" % self.delivered, "key", at.sequence_number, _time_at(self.delivered))
        assert self.timer_run.part_end([record], 0) == 1
        self.timers.calls.note(self.timers.calls.done)
        self.post(events.BatchDelivered(at, 1, 0))
        self.outputs.rows.begin_batch()
        self.timers._processor.process(record)
        self.outputs.rows.end_batch(at)
        self.progress.process(at)
        self.timers.calls.arrive(at)
        self.run()

    def fire(self) -> None:
        self.timers.fire(self.upcoming)
        self.run()

    @property
    def upcoming(self):
        return position(self.delivered + 1) if super().may_deliver() else None

    def may_fire(self) -> bool:
        """Before any record, as in the delivery queue."""
        if self.permit is None or self.timers is None or self.is_asking:
            return False
        return self.timers.wait_s(_LATE, self.upcoming) == 0.0

    def may_deliver(self) -> bool:
        return not self.is_asking and super().may_deliver() and not self.may_fire()

    def perform(self, command) -> None:
        match command:
            case commands.AnswerCheckpoint():
                self.is_asking = False
                if self.stops:
                    self.post(events.DeliveryStopped())
            case reports.Checkpointed():
                self.outputs.confirm(self.life.own.confirmed.state_version)
            case commands.StopDelivery() if self.is_asking:
                self.permit, self.stops = None, True
            case _:
                super().perform(command)

    def fates(self):
        return [*super().fates(), "version late", "version lost"]

    def turn(self, fate) -> None:
        word = (fate or "").removeprefix("version ")
        if word != (fate or ""):
            self.store.fates, fate = [word], None
        super().turn(fate)
        self.store.fates = []


def _time_at(number) -> float:
    return number * _SECONDS_APART


class StateWorld(OutputWorld):
    """One state of the world. Its owners keep versions in `stored`."""

    owner_kind = StatefulOwner

    def __init__(self, faults_left, ticks_left) -> None:
        self.stored = Versions()
        super().__init__(faults_left, ticks_left)

    def moves(self):
        fires = [
            ("fire", index, None)
            for index, owner in enumerate(self.owners)
            if not owner.is_over and owner.request is None and owner.may_fire()
        ]
        lands = [("version", None, place) for place in range(len(self.stored.late))]
        return [*super().moves(), *fires, *lands]

    def happen(self, verb, owner, what) -> None:
        if verb == "fire":
            owner.fire()
        elif verb == "version":
            stored = self.stored
            one = stored.late.pop(what)
            stored.late, others = [one], stored.late
            stored.land()
            stored.late = others
        else:
            super().happen(verb, owner, what)

    def judge(self) -> None:
        row = self.rows[KEY]
        seen = self.seen(row)
        super().judge()
        at, rows = row.checkpoint, self.table.rows
        if lacking := [each for each in seen if each not in rows]:
            raise Broken("I13", KEY, f"the checkpoint is {at}, and the output lacks {lacking}")
        if self.table.at.reached == at and rows != seen:
            raise Broken("K5", KEY, f"at {at} the output has {rows}, and the state {seen}")

    def seen(self, row):
        """What the state at the checkpoint has seen, after a look at all of it."""
        at = row.checkpoint
        if row.state_version is None:
            if not at.is_sentinel:
                raise Broken("K13", KEY, f"the checkpoint is {at}, and names no version")
            return []
        try:
            entries, _, _ = read_chain(
                row.state_version, KEY, lambda name: self.stored.content.get((KEY, name))
            )
        except SettingsError as error:
            raise Broken("K13", KEY, f"the checkpoint is {at}: {error}") from None
        values = entries.get("key", {})
        seen = msgspec.msgpack.decode(values.get("seen", b"\x90"))
        found = (
            timer_of("key", name, value) for name, value in values.items() if is_reserved(name)
        )
        timers = [timer.name for timer in found if timer is not None]
        self.judge_seen(at, seen, timers)
        return seen

    def judge_seen(self, at, seen, timers) -> None:
        numbers, done = [each for each in seen if isinstance(each, int)], number_of(at)
        fired = [each for each in seen if each not in numbers]
        if numbers != [*range(1, done + 1)] or (seen and seen[0] != 1):
            raise Broken("K19", KEY, f"the state at {at} has seen {seen}")
        since = len(seen) - 1 - seen.index(done) if done else 0
        # The event timer fires behind the second record, and nowhere else.
        is_early = _EVENT in seen and (done < RECORDS or seen.index(_EVENT) < seen.index(RECORDS))
        if since != at.tick or is_early:
            raise Broken("K1", KEY, f"the state at {at} has seen {seen}")
        if sorted([*fired, *timers]) != (sorted(_AT) if done else []):
            raise Broken("K18", KEY, f"at {at} {fired} have fired, and {timers} are pending")

    @property
    def is_whole(self) -> bool:
        return _EVENT in self.table.rows and super().is_whole
