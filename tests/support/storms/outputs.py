"""Destinations of rows in virtual time, of each kind, and what must hold of their rows.

Every record that a lease process settled is one row. Requests arrive late, twice, or never; their
answers are lost; those of a process that is dead or has lost its lease still arrive. A promise that
breaks raises RuleBroken at once: storing outputs have a row once, and no output lacks one at or
below the checkpoint of its row.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kclrun.lease import commands, events
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.states import State
from kclrun.model.output import Cursor
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol.reports import ProcessorFailed
from kclrun.protocol.writes import ResumeLease
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.stories import RuleBroken
from kclrun.simulation.table import ItemWrite

PATIENCE_S: Final = 2.0
# Of the requests: those whose answer is lost; that arrive a second time. As many or more arrive up
# to a minute late, after their sender has given up.
LOST_REPLY, TWICE = 0.03, 0.03
LATE_MAX_S: Final = 60.0
ROLL_S: Final = 45.0
# Of the offers, those before which an output has too much to send.
MUCH_LEFT: Final = 0.2


class Destination:
    """The rows of one shard at one place, by the numbers of their records."""

    stores_cursor = True

    def __init__(self, key: str) -> None:
        self.key = key
        self.rows: Counter[int] = Counter()
        self.reached = 0  # no row is missing up to here

    def add(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            self.rows[number] += 1
            if self.stores_cursor and self.rows[number] > 1:
                raise RuleBroken("K5", self.key, f"{type(self).__name__} has row {number} twice")
        self._reach()

    def passed(self, number: int) -> None:
        """Up to this record another program had them, which writes no rows."""
        self.reached = max(self.reached, number)
        self._reach()

    def _reach(self) -> None:
        while self.rows[self.reached + 1]:
            self.reached += 1


class SqlTable(Destination):
    """K7: a transaction is conditional on the token and on the cursor that it began from."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.at = self.token = 0

    def install(self, token: int, _: int) -> int | None:
        if token < self.token:
            return None
        self.token = token
        return self.at

    def commit(self, token: int, began: int, upto: int, _: str) -> bool:
        if (self.token, self.at) != (token, began):
            return False
        self.at = upto
        self.add(began + 1, upto)
        return True

    def resolve(self, token: int, began: int, upto: int) -> bool | None:
        """What became of a transaction without an answer: it holds (True), not yet (None), or
        another owner wrote (False)."""
        if self.token != token or self.at not in {began, upto}:
            return False
        return True if self.at == upto else None


class S3Chain(Destination):
    """K8: objects named by where they begin, created and never replaced."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.objects: dict[int, tuple[int, str]] = {}

    def install(self, _: int, at: int) -> int:
        """The end of the chain that begins at the row's cursor."""
        while at in self.objects:
            at, _ = self.objects[at]
        return at

    def commit(self, _: int, began: int, upto: int, commit_id: str) -> bool:
        if began in self.objects:
            return self.objects[began][1] == commit_id
        self.create(began, upto, commit_id)
        return True

    def create(self, began: int, upto: int, commit_id: str) -> None:
        self.objects[began] = (upto, commit_id)
        self.add(began + 1, upto)

    def resolve(self, *_: Any) -> bool | None:
        return None  # sent again: the same object, the same condition


class Messages(Destination):
    """At least once: no cursor, no condition."""

    stores_cursor = False

    def install(self, _: int, at: int) -> int:
        return at

    def commit(self, _: int, began: int, upto: int, __: str) -> bool:
        self.add(began + 1, upto)
        return True

    def resolve(self, *_: Any) -> bool | None:
        return None


KINDS: Final = {"messages": Messages, "s3": S3Chain, "sql": SqlTable}


class Store:
    """All destinations of one world; watches its lease table."""

    def __init__(self, world: Any) -> None:
        self.of: dict[tuple[str, str], Destination] = {}
        # Up to which record Java workers, which write no rows, had those of a shard.
        self._passed: Counter[str] = Counter()
        self.commits = itertools.count()
        self.seen: Counter[str] = Counter()
        self.chance = world.scheduler.chance("outputs")
        self._stream = world.stream
        self._written = world.observer.row_written
        world.observer.row_written = self._row_written

    def destination(self, kind: str, key: str) -> Destination:
        if (kind, key) not in self.of:
            self.of[kind, key] = KINDS[kind](key)
            self.of[kind, key].passed(self._passed[key])
        return self.of[kind, key]

    def _row_written(self, sender: str, change: Any, before: Any, after: Any) -> None:
        self._written(sender, change, before, after)
        if isinstance(change, ResumeLease) and after is not None:
            self._follow_the_words(after)
        if after is None or before is None or after.checkpoint == before.checkpoint:
            return
        done = self._stream.records.number_of(after.key, after.checkpoint)
        if isinstance(change, ItemWrite):
            self.seen["moved"] += after.is_moved_past_outputs
            self._passed[after.key] = max(self._passed[after.key], done)
        for (kind, key), destination in self.of.items():
            destination.passed(self._passed[key])
            if key == after.key and destination.reached < done:
                words = f"{kind} lacks row {destination.reached + 1}, and the checkpoint is {done}"
                raise RuleBroken("I13", key, words)

    def _follow_the_words(self, row: Any) -> None:
        """A row that was deleted by hand and is made again has lower tokens: its lease halts, and
        an operator sets the token in the database to 0 before he resumes it."""
        for (_, key), destination in self.of.items():
            if key == row.key and isinstance(destination, SqlTable):
                destination.token = 0 if destination.token > row.counter else destination.token


class _Lane(msgspec.Struct):
    """One output of one process: its rows are there up to record `at`."""

    kind: str
    destination: Any
    at: int = 0
    dirty_since: float = math.inf


class ProcessWithOutputs(LeaseProcess):
    """A lease process whose rows go to `kinds`, in this order [K5], by a thread of its own."""

    kinds: tuple[str, ...] = ("sql", "s3")
    store_kind = Store
    # A roll, and the requests of one that has to be sent three times.
    rows_wait_s = ROLL_S + 3 * PATIENCE_S
    store: Store

    faults_until_s = math.inf
    late = 0.03

    @classmethod
    def of(
        cls, *kinds: str, faults_until_s: float = math.inf, late: float = 0.03
    ) -> type[ProcessWithOutputs]:
        """For one fleet, whose destinations fail up to an instant."""
        fields = {"kinds": kinds, "stores": {}, "faults_until_s": faults_until_s, "late": late}
        return type("Process", (cls,), fields)

    stores: dict[int, Store]

    def policy(self, host: Any, start: Any) -> LeasePolicy:
        if id(host.world) not in self.stores:
            self.stores[id(host.world)] = self.store_kind(host.world)
        self.store = self.stores[id(host.world)]
        self._lanes = [_Lane(k, self.store.destination(k, start.key)) for k in self.kinds]
        self._asked: commands.CommitOutputs | None = None
        self._is_busy = self._has_begun_outputs = self._is_superseded = False
        self._settled = self._start_number = 0
        is_storing = any(lane.destination.stores_cursor for lane in self._lanes)
        policy = super().policy(host, start)
        return msgspec.structs.replace(policy, has_outputs=True, has_storing_outputs=is_storing)

    # The core's side.

    def _perform(self, command: commands.Command) -> None:
        match command:
            case commands.CallInitialize(row):
                self._row, self._token = row, row.counter
                self._begin_lane(0)
            case commands.CommitOutputs():
                self._asked = command
                self._serve()
            case _:
                super()._perform(command)

    def post(self, event: events.Event) -> None:
        if isinstance(event, events.BatchProcessed):
            self._settled = max(self._settled, self._number(event.last))
            for lane in self._lanes:
                if lane.dirty_since == math.inf:
                    lane.dirty_since = self._scheduler.now
                    self.os.after(ROLL_S, self._serve)
        super().post(event)

    def _exit(self, cause: commands.ExitCause) -> None:
        if self.life.has_undone:  # an output had too much to send, or did not answer
            self._observer.ended_uncleanly(self)
        super()._exit(cause)

    # The start [K11, K12].

    def _begin_lane(self, index: int) -> None:
        if index == len(self._lanes):
            self._begun()
            return
        lane, row = self._lanes[index], self._row
        stored = row.outputs.of(lane.kind) if row.outputs is not None else None
        at = self._number(row.checkpoint if stored is None else stored.position)

        def installed(answer: int | None) -> None:
            if answer is None:
                self.store.seen["token above ours"] += 1
                self.post(ProcessorFailed("initialize", "a token above ours", attempts=1))
                return
            lane.at = answer
            self._begin_lane(index + 1)

        self._request(
            lambda: lane.destination.install(self._token, at),
            installed,
            lambda: self.os.after(1.0, functools.partial(self._begin_lane, index)),
        )

    def _begun(self) -> None:
        row, checkpoint = self._row, self._number(self._row.checkpoint)
        reached = [
            max(checkpoint, lane.at) if lane.destination.stores_cursor else checkpoint
            for lane in self._lanes
        ]
        start = checkpoint if self.life.policy.is_manual else min(reached)
        self._settled = self._start_number = start
        self._start = row.checkpoint
        if start != checkpoint:
            self._start = self._stream.records.position(self.key, start)
        if start > checkpoint:
            self.store.seen["adopted"] += 1
            self._observer.outputs_adopted(self, start)
        self._has_begun_outputs = True
        self.post(events.OutputsBegan(self._start, self._cursors()))
        if self.life.state is State.INITIALIZING:  # else delivery was stopped meanwhile
            self.queue.call(
                commands.CallInitialize(msgspec.structs.replace(row, checkpoint=self._start))
            )

    # The thread of the outputs.

    def _serve(self) -> None:
        """Commit what is due, one output after the other, and tell the core."""
        if self._is_busy or not self._has_begun_outputs or self._is_superseded or self.is_over:
            return
        asked = self._asked
        limit = self._settled
        if asked is not None and asked.must:
            limit = max(limit, self._number(asked.upto))
        self._is_busy = True
        self._serve_lane(0, asked, limit)

    def _serve_lane(self, index: int, asked: commands.CommitOutputs | None, limit: int) -> None:
        if index == len(self._lanes):
            self._tell(asked)
            return
        lane, now = self._lanes[index], self._scheduler.now
        must = asked is not None and asked.must
        is_due = must or now >= lane.dirty_since + ROLL_S or (asked and lane.kind != "s3")
        is_offer = must and asked.is_leaving and self._scheduler.now <= self.faults_until_s
        if is_offer and lane.kind == "s3" and self._draws(MUCH_LEFT):
            self.store.seen["much left"] += 1
            self._observer.ended_uncleanly(self)
            is_due = False
        if not is_due or limit <= lane.at:
            self._serve_lane(index + 1, asked, limit)
            return
        self._commit(lane, limit, f"{self.who}-{next(self.store.commits)}", index, asked)

    def _commit(self, lane: _Lane, upto: int, commit_id: str, index: int, asked: Any) -> None:
        began, destination = lane.at, lane.destination
        send = functools.partial(destination.commit, self._token, began, upto, commit_id)

        def committed(is_there: bool | None) -> None:
            if is_there is None:
                self._request(send, committed, unknown)
            elif is_there:
                lane.at, lane.dirty_since = upto, math.inf
                self._serve_lane(index + 1, asked, upto)
            else:
                self._is_superseded = True
                self.store.seen["superseded"] += 1
                self.post(events.OutputsSuperseded(f"another owner wrote to {lane.kind}"))

        def unknown() -> None:
            self.store.seen["unknown"] += 1
            if asked is not None and asked.is_leaving:
                self._observer.ended_uncleanly(self)
            self.post(events.OutputsNotCommitted(self._position(upto), "timed out"))
            look = functools.partial(destination.resolve, self._token, began, upto)
            self._request(look, committed, unknown)

        self._request(send, committed, unknown)

    def _tell(self, asked: commands.CommitOutputs | None) -> None:
        self._is_busy = False
        if asked is self._asked:
            self._asked = None
        upto = self._position(min(lane.at for lane in self._lanes), asked)
        self.post(events.OutputsCommitted(upto, self._cursors(asked), asked))
        if self._asked is not None:
            self._serve()

    # Helpers.

    def _request(
        self, action: Callable[[], Any], reply: Callable[[Any], None], unknown: Callable[[], None]
    ) -> None:
        """Sent now; what arrives late arrives also if the process is dead by then."""
        fate, leg_s = self.store.chance.random(), self.store.chance.uniform(0.002, 0.02)
        if self._scheduler.now > self.faults_until_s:
            fate = 1.0
        if self.machine.is_cut:
            self.os.after(PATIENCE_S, unknown)
        elif fate < self.late:
            self._scheduler.after(self.store.chance.uniform(PATIENCE_S, LATE_MAX_S), action)
            self.os.after(PATIENCE_S, unknown)
        elif fate < self.late + LOST_REPLY:
            self._scheduler.after(leg_s, action)
            self.os.after(PATIENCE_S, unknown)
        else:
            if fate < self.late + LOST_REPLY + TWICE:
                self._scheduler.after(self.store.chance.uniform(0.0, LATE_MAX_S), action)

            def arrive() -> None:
                answer = action()
                self.os.after(leg_s, lambda: reply(answer))

            self._scheduler.after(leg_s, arrive)

    def _draws(self, share: float) -> bool:
        return self.store.chance.random() < share

    def _number(self, position: ExtendedSequenceNumber) -> int:
        return self._stream.records.number_of(self.key, position)

    def _position(
        self, number: int, asked: commands.CommitOutputs | None = None
    ) -> ExtendedSequenceNumber:
        if asked is not None and asked.upto == SHARD_END and number >= self._number(SHARD_END):
            return SHARD_END
        if number <= self._start_number:
            return self._start
        return self._stream.records.position(self.key, number)

    def _cursors(self, asked: commands.CommitOutputs | None = None) -> dict[str, Cursor]:
        return {
            lane.kind: Cursor(self._position(lane.at, asked))
            for lane in self._lanes
            if lane.destination.stores_cursor
        }


def rows_of(process_kind: type[ProcessWithOutputs]) -> Store:
    """The destinations of the one world that was played."""
    (store,) = process_kind.stores.values()
    return store
