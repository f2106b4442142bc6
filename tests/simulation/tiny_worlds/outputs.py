"""A tiny world with an output: every order of events of two owners of one lease and its one output.

The lives, the lease row and the outputs of a lease process are the real ones; the destination is a
table as K7 has it. The second owner takes the row at any instant, so the first is a zombie from
then on: what it sent may arrive late, twice or never, and it goes on until it learns of it. Looked
at after each step: no row is at the destination twice [K5], and none at or below the checkpoint is
missing [I13].
"""

import functools
from collections import deque
from enum import Enum
from types import BuiltinMethodType, MethodType, SimpleNamespace
from typing import ClassVar, NamedTuple

import msgspec

from kclrun.errors import InvariantViolation, SettingsError, SinkError, Superseded
from kclrun.lease import commands, events
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.outputs.commits import Keyed
from kclrun.outputs.lanes import Pace
from kclrun.outputs.sending import Outputs
from kclrun.protocol.reports import Report
from kclrun.protocol.writes import Applied, OutcomeUnknown, Take
from tests.simulation.tiny_worlds.rules import Broken
from tests.simulation.tiny_worlds.shells import chance
from tests.simulation.tiny_worlds.worlds import OWNERS
from tests.support.build import position

KEY = LeaseKey("s0")
RECORDS = 2
_FAILOVER_S = 20.0
PACE = Pace(0.0, 0, 2**20)
_UNKNOWN = OutcomeUnknown("timed out")
_CHANGING = (
    *("kclrun.calling", "kclrun.lease", "kclrun.worker", "kclrun.protocol", "kclrun.state"),
    *("kclrun.outputs", "tests.support.memory_versions"),
    *("tests.simulation.tiny_worlds.outputs", "tests.simulation.tiny_worlds.keyed"),
)


class Table:
    """The destination, and the transactions on their way to it."""

    def __init__(self) -> None:
        self.token = 0
        self.at = Cursor(TRIM_HORIZON)
        self.rows = []
        self.late = []

    def apply(self, token, began, upto, rows) -> None:
        if self.holds(token, began):
            self.at = upto
            self.rows += rows

    def holds(self, token, began) -> bool:
        """K7."""
        return (self.token, self.at) == (token, began)


class TableOutput:
    """An owner's side. `fate` is what happens to its next transaction."""

    stores_cursor = True

    def __init__(self, table, token) -> None:
        self.table = table
        self.token = token
        self.fate = None
        self.began = self.upto = None
        self.unsent = []

    def encode(self, row):
        return row, 1

    def begin(self, at):
        if self.table.token > self.token:
            raise SettingsError("a token above ours")
        self.table.token = self.token
        self.began = self.upto = max(at, self.table.at)
        return self.began

    def add(self, rows, upto) -> None:
        self.unsent = [*self.unsent, *rows]
        self.upto = upto

    @property
    def unsent_bytes(self):
        return len(self.unsent)

    def commit(self):
        sent, fate = (self.token, self.began, self.upto, tuple(self.unsent)), self.fate
        self.fate = None
        if fate in {"late", "twice"}:
            self.table.late.append(sent)
        if fate != "late":
            self.table.apply(*sent)
        if fate in {"late", "no answer"}:
            raise SinkError("no answer")
        if (self.table.token, self.table.at) != (self.token, self.upto):
            raise Superseded("another owner")
        self.began, self.unsent = self.upto, []
        return self.upto

    def close(self) -> None:
        pass


class Owner:
    """One lease process: its life, its outputs, its one request on its way to the lease table.
    `policy` is what its life knows beside the rest."""

    policy: ClassVar[dict[str, bool]] = {}

    def __init__(self, world, index, counter) -> None:
        self.world = world
        self.life = LeaseStateMachine(
            LeasePolicy(
                key=KEY,
                me=OWNERS[index],
                seen_counter=counter,
                expires_instant=1000.0,
                failover_s=_FAILOVER_S,
                checkpoint=CheckpointPolicy(mode="batch"),
                has_outputs=True,
                has_storing_outputs=True,
                **self.policy,
            ),
            chance,
        )
        self.outputs = self.output = self.permit = self.request = None
        self.delivered = 0
        self.is_over = False
        self.events = deque([events.Started()])
        self.commands = deque()

    def post(self, event) -> None:
        self.events.append(event)

    def hold(self) -> None:
        raise AssertionError("two rows fill no buffer")

    def release(self) -> None:
        raise AssertionError("nothing is held")

    def now(self):
        return float(self.world.ticks)

    def run(self) -> None:
        """Until a request is under way, or nothing is left to do."""
        while not self.is_over and self.request is None:
            if self.commands:
                self.perform(self.commands.popleft())
            elif self.events:
                self.commands.extend(self.life.handle(self.events.popleft(), self.now()))
            else:
                return

    def perform(self, command) -> None:
        match command:
            case commands.SendWrite() | commands.SendLateCheckpoint() | commands.ReadOwnRow():
                self.request = command
            case commands.CallInitialize(row):
                self.begin(row)
            case commands.CommitOutputs():
                self.outputs.commit(command)
            case commands.AllowDelivery():
                self.permit = command
            case commands.StopDelivery():
                self.permit = None
                self.post(events.DeliveryStopped())
            case commands.CallShutdownRequested() | commands.CallLeaseLost():
                self.post(events.CallReturned())
            case commands.Exit():
                self.is_over = True
            case Report() | commands.AnswerCheckpoint():
                pass

    def begin(self, row) -> None:
        """K11, K12."""
        self.output = TableOutput(self.world.table, row.counter)
        self.outputs = Outputs([("sql", self.output, PACE)], self, now=self.now)
        self.take_over(row)

    def take_over(self, row) -> None:
        cursors = dict(row.outputs.cursors) if row.outputs is not None else {}
        try:
            start, cuts = self.outputs.begin(row.checkpoint, cursors, may_adopt=True)
        except SettingsError:
            self.is_over = True
            return
        self.delivered = number_of(start)
        self.began(start, cuts)
        self.post(events.OutputsBegan(start, self.outputs.cursors()))
        self.post(events.CallReturned())

    def began(self, start, cuts) -> None:
        """Reading is about to begin."""

    def fates(self):
        """What a fault can make of the next transaction."""
        return ["late", "no answer", "twice"]

    def turn(self, fate) -> None:
        self.output.fate = fate
        if not self.outputs.turn():
            self.outputs.close()
        self.run()

    def deliver(self) -> None:
        """User code is given the next record, and emits a row."""
        self.delivered += 1
        at = position(self.delivered)
        self.outputs.rows.begin_batch()
        self.outputs.rows.emit_to("sql")(self.delivered)
        self.outputs.rows.end_batch(at)
        self.outputs.settle(at)
        self.post(events.BatchDelivered(at, 1, 0))
        self.post(events.BatchProcessed(at))
        self.run()

    def may_deliver(self) -> bool:
        permit, total = self.permit, self.life.ledger and self.life.ledger.delivered_total
        return permit is not None and self.delivered < RECORDS and total < permit.start_below

    def answer(self, event) -> None:
        self.request = None
        self.events.appendleft(event)
        self.run()


# An owner that does nothing any more.
_OVER = SimpleNamespace(is_over=True)


class OutputWorld:
    """One state, with the faults that may still happen and the seconds that may still pass. A step
    is made on a copy."""

    owner_kind = Owner

    def __init__(self, faults_left, ticks_left) -> None:
        row = Lease(key=KEY, checkpoint=TRIM_HORIZON, counter=1, owner=OWNERS[0])
        self.rows = {KEY: row}
        self.table = Table()
        self.late = []
        self.ticks = 0
        self.faults_left, self.ticks_left = faults_left, ticks_left
        self.owners = [self.owner_kind(self, 0, 1)]
        self.owners[0].run()

    @property
    def may_fail(self) -> bool:
        return self.faults_left > 0

    @property
    def is_whole(self) -> bool:
        """Whether the checkpoint is behind the last record."""
        return number_of(self.rows[KEY].checkpoint) == RECORDS

    def moves(self):
        """All that can happen next."""
        found = []
        for index, owner in enumerate(self.owners):
            if owner.is_over:
                continue
            fates = [None]
            if self.may_fail:
                fates += ["late", "no answer", "twice"]
                found.append(("kill", index, None))
            if owner.request is not None:
                due = getattr(owner.request, "not_before", None) or 0.0
                if due <= self.ticks:
                    is_read = isinstance(owner.request, commands.ReadOwnRow)
                    found += [("row", index, fate) for fate in (fates[:1] if is_read else fates)]
            elif owner.may_deliver():
                found.append(("deliver", index, None))
            if owner.outputs is not None and owner.outputs._has_work():
                found += [("turn", index, fate) for fate in (None, *owner.fates() * self.may_fail)]
        found += [("arrive", None, place) for place in range(len(self.late))]
        found += [("transaction", None, place) for place in range(len(self.table.late))]
        if self.ticks_left:
            found.append(("tick", None, None))
        if len(self.owners) < len(OWNERS) and self.rows[KEY].counter > 1:
            found.append(("take", None, None))
        return found

    def step(self, move) -> None:
        """Make it happen. Raises: Broken, InvariantViolation, AssertionError."""
        verb, index, what = move
        owner = None if index is None else self.owners[index]
        if (what is not None and verb in {"row", "turn"}) or verb == "kill":
            self.faults_left -= 1
        self.happen(verb, owner, what)
        self.owners = [_OVER if each.is_over else each for each in self.owners]
        self.judge()

    def happen(self, verb, owner, what) -> None:
        match verb:
            case "deliver":
                owner.deliver()
            case "row":
                self.serve(owner, what)
            case "turn":
                owner.turn(what)
            case "arrive":
                self.write(self.late.pop(what))
            case "transaction":
                self.table.apply(*self.table.late.pop(what))
            case "kill":
                owner.is_over = True
            case "take":
                row = self.rows[KEY]
                self.write(
                    Take(KEY, OWNERS[1], row.owner, row.counter, _FAILOVER_S, "TRIM_HORIZON")
                )
                self.owners.append(self.owner_kind(self, 1, self.rows[KEY].counter))
                self.owners[1].run()
            case "tick":
                self.ticks, self.ticks_left = self.ticks + 1, self.ticks_left - 1
                for each in self.owners:
                    if not each.is_over:
                        each.post(events.Ticked())
                        each.run()

    def serve(self, owner, fate) -> None:
        request = owner.request
        if isinstance(request, commands.ReadOwnRow):
            owner.answer(events.OwnRowRead(self.rows.get(KEY)))
            return
        if not owner.life.own.sends(request.change):
            owner.request = None
            owner.run()
            return
        if fate in {"late", "twice"}:
            self.late.append(request.change)
        outcome = _UNKNOWN if fate == "late" else self.write(request.change)
        if fate == "no answer":
            outcome = _UNKNOWN
        owner.answer(events.WriteResolved(request.change, outcome, owner.now()))

    def write(self, change):
        rows, shared = dict(self.rows), LeaseRows()
        shared.hold(rows)
        outcome = shared.write(change)
        if isinstance(outcome, Applied):
            self.rows = rows
        return outcome

    def judge(self) -> None:
        rows, done = self.table.rows, number_of(self.rows[KEY].checkpoint)
        if len(set(rows)) < len(rows):
            raise Broken("K5", KEY, f"the output has {rows}")
        if missing := set(range(1, done + 1)) - set(rows):
            raise Broken("I13", KEY, f"the checkpoint is {done}, and the output lacks {missing}")


def number_of(at) -> int:
    return 0 if at.is_sentinel else int(at.sequence_number)


class Explored(NamedTuple):
    """`whole` states have a checkpoint behind the last record. `story`: the moves of the shortest
    one that breaks a rule, and `words` that say which."""

    states: int
    whole: int
    story: tuple = ()
    words: str = ""


def explore(*, faults: int, ticks: int, kind: type[OutputWorld] = OutputWorld) -> Explored:
    """Every state, breadth first, until a rule breaks."""
    first = kind(faults, ticks)
    seen, waiting, whole = {frozen(first, {})}, deque([(first, ())]), 0
    while waiting:
        state, path = waiting.popleft()
        whole += state.is_whole
        for move in state.moves():
            after = twin(state, {})
            try:
                after.step(move)
            except (AssertionError, InvariantViolation) as broken:
                return Explored(len(seen), whole, (*path, move), str(broken))
            key = frozen(after, {})
            if key not in seen:
                seen.add(key)
                waiting.append((after, (*path, move)))
    return Explored(len(seen), whole)


# How a thing is copied, and how it becomes a value.
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_VALUE, _SHARED, _SEQUENCE, _MAPPING, _METHOD, _KEYED, _OURS = range(7)


@functools.cache
def _way(kind) -> int:
    """Objects of the cores, of the outputs and of this world change; all others are values."""
    if kind in (list, deque, set):
        return _SEQUENCE
    if issubclass(kind, dict):
        return _MAPPING
    if kind in (MethodType, BuiltinMethodType):
        return _METHOD
    if issubclass(kind, str | bytes | int | float | Enum | msgspec.Struct):
        return _KEYED if kind is Keyed else _VALUE
    return _OURS if kind.__module__.startswith(_CHANGING) else _SHARED


def twin(thing, made):
    """A copy of a state: what changes is copied once, what never does is shared."""
    kind = type(thing)
    way = _way(kind)
    if way <= _SHARED:
        return thing
    if id(thing) in made:
        return made[id(thing)]
    if way == _METHOD:
        of = getattr(thing, "__self__", None)
        if isinstance(of, type) or _way(type(of)) <= _SHARED:
            return thing
        if kind is MethodType:
            return MethodType(thing.__func__, twin(of, made))
        return getattr(twin(of, made), thing.__name__)
    if way == _KEYED:
        return Keyed(twin(thing.versions, made), twin(thing.undo, made), thing.retain_s)
    if way == _SEQUENCE:
        made[id(thing)] = copied = kind(twin(each, made) for each in thing)
    elif way == _MAPPING:
        made[id(thing)] = copied = kind({key: twin(value, made) for key, value in thing.items()})
    else:
        made[id(thing)] = copied = object.__new__(kind)
        copied.__dict__.update(
            {
                name: value if type(value) in _LEAVES else twin(value, made)
                for name, value in vars(thing).items()
            }
        )
    return copied


# What decides nothing: what is only said, and measures.
_UNSEEN = {"_metering", "_warned", "policy", "_chance", "world", "_next_round"}


def frozen(thing, seen):
    """A state as a value: the same for states that go on alike."""
    kind = type(thing)
    way = _way(kind)
    if kind is events.OutputsCommitted:  # it has a dict
        return (thing.upto, tuple(thing.cursors.items()), thing.answers)
    if way == _VALUE:
        return thing
    if way == _SEQUENCE or kind is tuple:
        return tuple([frozen(each, seen) for each in thing])
    if way == _MAPPING:
        return tuple([(key, frozen(value, seen)) for key, value in thing.items()])
    if way != _OURS:
        return None
    if id(thing) in seen:
        return seen[id(thing)]
    seen[id(thing)] = len(seen)
    return tuple(
        [
            value if type(value) in _LEAVES else frozen(value, seen)
            for name, value in sorted(vars(thing).items())
            if name not in _UNSEEN
        ]
    )
