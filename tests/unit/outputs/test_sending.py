"""Outputs of a lease: what waits, what leaves, and what the core is told."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kclrun.errors import LimitExceeded, SettingsError, SinkError, Superseded
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import Cursor, naming_output
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs import row_ledger, waiting_rows
from kclrun.outputs.lanes import Pace
from kclrun.outputs.row_ledger import MERGED_FROM, Cut, RowCount
from kclrun.outputs.sending import Outputs
from tests.patience import HUNG_S
from tests.support.build import position as at
from tests.support.memory_output import Destination, MemoryOutput
from tests.support.outputs_host import FakeHost

AT_ONCE = Pace(0.0, 0, 1_000)
ROLLED = Pace(60.0, 200, 1_000)


class Lease:
    """One life with outputs in memory, named a, b, ….  A row counts as ten bytes."""

    def __init__(self, *paces: Pace, stores_cursor: bool = True, is_manual: bool = False) -> None:
        self.events: list[events.Event] = []
        self.held: list[bool] = []
        self.now = Instant(1.0)
        self.destinations = [Destination(stores_cursor=stores_cursor) for _ in paces]
        self.fates: list[list[str]] = [[] for _ in paces]
        self.memory = [
            MemoryOutput(there, 1, fates)
            for there, fates in zip(self.destinations, self.fates, strict=True)
        ]
        self.outputs = Outputs(
            [(chr(97 + i), each, pace) for i, (each, pace) in enumerate(zip(self.memory, paces))],  # noqa: B905
            FakeHost(self.events.append, self.held),
            now=lambda: self.now,
            is_manual=is_manual,
        )
        self.outputs.begin(TRIM_HORIZON, {}, may_adopt=True)

    def call(self, upto: int, *numbers: int, to: str = "a", settles: bool = True) -> None:
        """A call of user code that emits these rows and returns."""
        self.outputs.rows.begin_batch()
        for number in numbers:
            self.outputs.rows.emit_to(to)({"n": number})
        self.outputs.rows.end_batch(at(upto))
        if settles:
            self.outputs.settle(at(upto))

    def ask(self, upto: int, *, must: bool = True, is_leaving: bool = False) -> None:
        self.outputs.commit(CommitOutputs(at(upto), must, is_leaving))
        self.outputs.turn()

    @property
    def reported(self) -> list[ExtendedSequenceNumber]:
        return [each.upto for each in self.events if isinstance(each, events.OutputsCommitted)]

    @property
    def rows(self) -> list[list[int]]:
        return [there.rows for there in self.destinations]


def test_an_output_that_rolls_holds_the_checkpoint_back_until_its_roll_is_due():
    lease = Lease(AT_ONCE, ROLLED)
    lease.call(1, 1, to="a")
    lease.now = Instant(2.0)
    lease.call(2, 2, to="b")
    lease.ask(2, must=False)
    assert (lease.rows, lease.reported) == ([[1], []], [TRIM_HORIZON])
    assert lease.outputs.waiting_since == 1.0
    lease.now = Instant(63.0)
    lease.outputs.turn()
    assert (lease.rows, lease.reported[-1]) == ([[1], [2]], at(2))
    assert lease.outputs.waiting_since == 0.0


def test_a_lower_checkpoint_voids_a_cut_of_the_same_call():
    lease = Lease(AT_ONCE)
    lease.outputs.rows.begin_batch()
    lease.outputs.rows.emit_to("a")({"n": 1})
    lease.outputs.rows.cover(at(9))  # refused: it was not delivered
    lease.outputs.rows.emit_to("a")({"n": 2})
    lease.outputs.rows.cover(at(4))
    lease.ask(4)
    assert (lease.rows, lease.reported) == ([[1, 2]], [at(4)])


@pytest.mark.parametrize("is_after_emit", [False, True])
def test_a_checkpoint_within_an_earlier_call_has_the_rows_of_its_records(is_after_emit):
    """With manual checkpoints user code may ask for the position of a record of an earlier call."""
    lease = Lease(AT_ONCE, is_manual=True)
    lease.call(10, 1, 2)
    lease.outputs.rows.begin_batch()
    if is_after_emit:
        lease.outputs.rows.emit_to("a")({"n": 3})
    lease.outputs.rows.cover(at(5))
    lease.ask(5)
    assert (lease.rows, lease.reported) == ([[1, 2, *[3] * is_after_emit]], [at(5)])
    assert lease.outputs.cursors() == {"a": Cursor(at(5))}


def test_rows_above_the_cursor_of_a_destination_wait_while_a_lower_checkpoint_is_committed():
    lease = Lease(AT_ONCE, AT_ONCE, is_manual=True)
    lease.outputs._lanes[0].known = at(7)  # it has the rows up to here
    for upto in (7, 10):
        lease.call(upto, upto, to="a")
        lease.call(upto, upto, to="b")
    lease.outputs.rows.begin_batch()
    lease.outputs.rows.cover(at(5))
    lease.ask(5)
    assert (lease.rows, lease.reported) == ([[], [7, 10]], [at(5)])
    lease.outputs.rows.end_batch(at(20))
    lease.ask(20)
    assert (lease.rows, lease.reported[-1]) == ([[10], [7, 10]], at(20))


def test_an_hour_of_small_batches_waits_for_a_destination_as_a_few_cuts():
    lease = Lease(Pace(0.0, 0, 1_000_000))
    lease.fates[0] += [*["refused"] * 10, ""]
    lease.call(1, 1)
    lease.ask(1)  # refused: it is repeated before another row is added
    waiting, most = 18_000, 0
    for number in range(2, waiting + 1):
        lease.call(number, number)
        if number % 3_000 == 0:
            lease.outputs.turn()  # refused again
        most = max(most, len(lease.outputs.rows))
    assert most <= MERGED_FROM
    assert lease.rows == [[]]

    lease.fates[0].clear()
    lease.ask(waiting)
    assert lease.rows == [list(range(1, waiting + 1))]
    assert lease.reported[-1] == at(waiting)


@pytest.mark.parametrize("is_manual", [False, True])
def test_cuts_are_looked_at_a_few_times_each_however_many_wait(monkeypatch, is_manual):
    """The thread that renews the lease needs the lock under which they are looked at."""
    looks = 0

    class Looked(Cut[RowCount], frozen=True):
        @property
        def position(self):  # type: ignore[override]
            nonlocal looks
            looks += 1
            return super().position

    monkeypatch.setattr(row_ledger, "Cut", Looked)
    lease = Lease(Pace(0.0, 0, 1_000_000), is_manual=is_manual)
    waiting = 2_000
    for number in range(1, waiting + 1):
        lease.call(number, number)
    lease.ask(waiting)
    assert lease.rows == [list(range(1, waiting + 1))]
    assert looks <= 12 * waiting


def test_rows_that_are_settled_during_a_turn_do_not_hide_those_that_it_sends(monkeypatch):
    monkeypatch.setattr(row_ledger, "MERGED_FROM", 2)
    lease = Lease(AT_ONCE)
    lease.fates[0] += ["refused", ""]
    lease.call(1, 1)
    lease.ask(1)
    lease.call(2, 2)
    commit = lease.memory[0].commit

    def commit_slowly() -> Cursor:
        for number in range(3, 9):
            lease.call(number, number)
        lease.memory[0].commit = commit  # type: ignore[method-assign]
        return commit()

    lease.memory[0].commit = commit_slowly  # type: ignore[method-assign]
    lease.ask(2)
    assert (lease.rows, lease.reported[-1]) == ([[1, 2]], at(2))
    lease.ask(8)
    assert (lease.rows, lease.reported[-1]) == ([[*range(1, 9)]], at(8))


@pytest.mark.parametrize("seed", range(30))
def test_each_commit_has_the_same_rows_whether_cuts_are_merged_or_not(monkeypatch, seed):
    def run(merged_from: int) -> list[object]:
        monkeypatch.setattr(row_ledger, "MERGED_FROM", merged_from)
        chance = random.Random(seed)
        lease = Lease(AT_ONCE, Pace(5.0, 60, 1_000))
        for lane, known in zip(lease.outputs._lanes, (7, 12), strict=True):
            lane.known = at(known)  # the destination has the rows up to here
        seen: list[object] = []
        for memory, name in zip(lease.memory, "ab", strict=True):
            memory.add = _noting(memory.add, name, seen)  # type: ignore[method-assign]
        for number in range(1, 60):
            lease.now = Instant(lease.now + chance.random())
            lease.call(number, *range(number * 10, number * 10 + chance.randrange(3)), to="a")
            lease.call(number, number, to="b", settles=chance.random() < 0.8)
            for fates in lease.fates:
                fates[:] = ["refused"] * (chance.random() < 0.6)
            if chance.random() < 0.3:
                lease.ask(number, must=chance.random() < 0.5)
            else:
                lease.outputs.turn()
        seen += [lease.reported, lease.rows]
        return seen

    assert run(1) == run(1_000_000)


def _noting(
    add: Callable[[Sequence[Any], Cursor], None], name: str, seen: list[object]
) -> Callable[[Sequence[Any], Cursor], None]:
    def note(rows: Sequence[Any], upto: Cursor) -> None:
        add(rows, upto)
        seen.append((name, list(rows), upto))

    return note


def test_a_full_output_holds_delivery_until_half_of_its_buffer_is_free():
    lease = Lease(Pace(60.0, 10_000, 100))
    lease.fates[0] += ["refused", "", "refused"]
    lease.call(1, *range(10))
    assert lease.held == [True]
    lease.outputs.turn()  # the destination takes nothing: delivery stays held
    lease.outputs.turn()
    assert lease.held == [True]
    assert [each.message for each in lease.events if isinstance(each, events.OutputsNotCommitted)]
    lease.outputs.turn()
    assert (lease.held, lease.rows) == ([True, False], [list(range(10))])


def test_with_manual_checkpoints_rows_leave_only_with_one():
    lease = Lease(Pace(0.0, 0, 50), is_manual=True)
    lease.call(1, 1)
    lease.call(2, 2)
    lease.ask(2, must=False)
    assert (lease.memory[0].unsent, lease.rows, lease.reported) == ([], [[]], [TRIM_HORIZON])
    assert lease.outputs.waiting_since == 0.0
    lease.ask(1)
    assert (lease.rows, lease.reported[-1]) == ([[1]], at(1))
    lease.call(3, 3, 4, 5, 6)
    assert "output.buffer" in lease.events[-1].message
    assert lease.held == []


def test_a_row_outside_a_call_or_beyond_the_bound_of_a_call_is_refused(monkeypatch):
    lease = Lease(AT_ONCE)
    with pytest.raises(
        SinkError, match="process_records, on_timer and shard_ended, while they run"
    ):
        lease.outputs.rows.emit_to("a")({"n": 1})
    monkeypatch.setattr(waiting_rows, "CALL_BYTES_MAX", 20)
    lease.outputs.rows.begin_batch()
    for number in (1, 2):
        lease.outputs.rows.emit_to("a")({"n": number})
    with pytest.raises(LimitExceeded, match="more than 20 bytes to the output a"):
        lease.outputs.rows.emit_to("a")({"n": 3})


@pytest.mark.parametrize(
    ("raises", "posted"),
    [
        (Superseded("another owner"), events.OutputsSuperseded("outputs.a: another owner")),
        (SettingsError("no column n"), events.OutputsRefused("outputs.a: no column n")),
    ],
)
def test_what_no_repetition_repairs_ends_the_thread(monkeypatch, raises, posted):
    lease = Lease(AT_ONCE)

    def commit() -> Cursor:
        raise raises

    monkeypatch.setattr(lease.memory[0], "commit", commit)
    lease.call(1, 1)
    lease.outputs.commit(CommitOutputs(at(1), must=True))
    assert lease.outputs.turn() is False
    assert lease.events == [posted]


def test_the_thread_serves_requests_and_due_rolls_and_ends_at_close():
    lease = Lease(AT_ONCE, Pace(0.02, 10_000, 10_000))
    heard = threading.Event()
    clock = iter(range(1, 10**6))
    lease.outputs = Outputs(
        [("a", lease.memory[0], AT_ONCE), ("b", lease.memory[1], Pace(0.02, 10_000, 10_000))],
        FakeHost(
            lambda event: heard.set() if getattr(event, "upto", None) == at(2) else None, lease.held
        ),
        now=lambda: Instant(next(clock) / 1_000),
    )
    lease.outputs.begin(TRIM_HORIZON, {}, may_adopt=True)
    thread = threading.Thread(target=lease.outputs.serve, daemon=True)
    thread.start()
    lease.call(1, 1)
    lease.call(2, 2, to="b")
    lease.outputs.commit(CommitOutputs(at(2), must=False))  # the roll of b follows by its age
    assert heard.wait(HUNG_S)
    assert lease.rows == [[1], [2]]
    lease.outputs.close()
    thread.join(HUNG_S)
    assert not thread.is_alive()


def test_a_failure_of_an_output_names_it_and_one_of_the_state_names_itself(monkeypatch):
    lease = Lease(AT_ONCE)

    def commit() -> Cursor:
        raise SinkError("cannot send")

    monkeypatch.setattr(lease.memory[0], "commit", commit)
    lease.call(1, 1)
    lease.outputs.commit(CommitOutputs(at(1), must=True))

    assert lease.outputs.turn()
    assert lease.events[-1].message == "outputs.a: cannot send"
    with pytest.raises(SinkError, match=r"\Athe store is away\Z"), naming_output(""):
        raise SinkError("the store is away")
