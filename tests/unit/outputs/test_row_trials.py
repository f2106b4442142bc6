"""Rows that a destination refuses at their commit: the process ends, and the next one tries the
rows of each call, so that `on_error` decides about the records at fault."""

from typing import Any

import pytest

from kclrun.errors import RowsRefused, SettingsError, SinkError, Superseded
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.output import Cursor, RowTrial
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.lanes import Pace
from kclrun.outputs.row_trials import RowTrials
from kclrun.outputs.sending import Outputs
from kclrun.protocol.reports import Report, RowsWereRefused
from tests.support.build import position as at
from tests.support.memory_output import Destination, MemoryOutput
from tests.support.outputs_host import FakeHost

AT_ONCE = Pace(0.0, 0, 1_000)
BOTH = ("a", "b")


class Picky(MemoryOutput):
    """Takes each number once, and none below zero; `raises` is the outcome of the next trial."""

    raises: Exception | None = None
    beside: MemoryOutput | None = None

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination, 1, [])
        self.tried: list[tuple[list[int], list[int]]] = []

    def _is_refused(self, rows: list[int]) -> bool:
        return min(rows, default=0) < 0 or len({*rows}) < len(rows)

    def commit(self) -> Cursor:
        if self._is_refused([*self.destination.rows, *self.unsent]):
            raise RowsRefused("the table refuses rows: column n")
        return super().commit()

    def is_tried_with(self, other: Any) -> bool:
        return other is self.beside

    def try_rows(self, rows: Any, before: Any) -> None:
        waiting = [n for output, given in before if output is self for n in given]
        self.tried.append((waiting, list(rows)))
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        there = [*self.destination.rows, *self.unsent, *waiting]
        if self._is_refused(there):
            raise RowsRefused("the table refuses rows: column n")
        if self._is_refused([*there, *rows]):
            raise TypeError("column n refuses the row")


class Life:
    """One process of the lease, over destinations that outlive it."""

    def __init__(
        self,
        *there: Destination,
        trial: RowTrial | None = None,
        begins: ExtendedSequenceNumber = TRIM_HORIZON,
    ) -> None:
        self.events: list[events.Event] = []
        self.reports: list[Report] = []
        self.now = Instant(1.0)
        self.memory = [Picky(each) for each in there]
        self.outputs = Outputs(
            [(chr(97 + i), each, AT_ONCE) for i, each in enumerate(self.memory)],
            FakeHost(self.events.append),
            now=lambda: self.now,
            trials=RowTrials(trial, self.events.append, self.reports.append, lambda: self.now),
        )
        self.outputs.begin(begins, {}, may_adopt=False)

    def call(self, upto: int, *numbers: int, to: str = "a") -> None:
        """A call that emits these rows; it raises if a trial does."""
        self.outputs.rows.begin_batch()
        for number in numbers:
            self.outputs.rows.emit_to(to)({"n": number})
        try:
            self.outputs.rows.try_rows(at(upto))
        except BaseException:
            self.outputs.rows.take_back_batch(None)
            raise
        self.outputs.rows.end_batch(at(upto))
        self.outputs.settle(at(upto))

    def refuse(self, upto: int = 2) -> None:
        self.call(upto, -1)
        assert not self.commits(upto)

    def commits(self, upto: int) -> bool:
        self.outputs.commit(CommitOutputs(at(upto), must=True))
        return self.outputs.turn()


def destination() -> Destination:
    return Destination(stores_cursor=True)


def test_a_commit_that_is_refused_for_its_values_ends_the_process_and_the_next_one_tries_rows():
    life = Life(destination())
    life.call(1, 1)
    life.refuse()
    assert life.reports == [
        RowsWereRefused(at(2), 1, "outputs.a: the table refuses rows: column n", ("a",))
    ]
    assert isinstance(life.events[-1], events.OutputsSuperseded)
    assert life.memory[0].tried == [], "rows are not tried before a commit was refused"


def test_a_call_whose_rows_are_refused_in_a_trial_raises_and_its_rows_are_taken_back():
    there = destination()
    life = Life(there, trial=RowTrial(at(2), BOTH))
    life.call(1, 1)
    with pytest.raises(TypeError, match=r"outputs\.a: column n refuses the row"):
        life.call(2, 5, -1)
    life.call(3, 3)
    assert life.commits(3)
    assert there.rows == [1, 3]
    assert life.reports == []


def test_a_row_that_is_one_of_a_kind_is_refused_after_the_rows_that_wait_and_not_before():
    there = destination()
    life = Life(there, trial=RowTrial(at(9), BOTH))
    life.call(1, 7)
    with pytest.raises(TypeError):
        life.call(2, 7)
    assert life.commits(1)
    with pytest.raises(TypeError):
        life.call(2, 7)
    assert (there.rows, life.memory[0].tried[-1]) == ([7], ([], [7]))


def test_rows_of_a_replay_that_the_destination_has_are_not_tried_again():
    there = destination()
    there.rows, there.cursor, there.token = [1, 2], Cursor(at(2)), 1
    life = Life(there, trial=RowTrial(at(9), BOTH))
    life.call(2, 1, 2)
    assert life.memory[0].tried == []
    life.call(3, 3)
    assert life.memory[0].tried == [([], [3])]
    assert life.commits(3)
    assert there.rows == [1, 2, 3]


def test_trials_go_on_for_ten_minutes_after_a_refusal_and_for_the_rows_that_were_refused():
    life = Life(destination(), trial=RowTrial(at(5), BOTH))
    life.now = Instant(700.0)
    life.call(5, 1)
    life.call(6, 2)
    assert [rows for _, rows in life.memory[0].tried] == [[1]]


@pytest.mark.parametrize(
    ("error", "posted"),
    [
        (Superseded("another owner"), events.OutputsSuperseded),
        (SettingsError("no table"), events.OutputsRefused),
        (RowsRefused("another writer was faster"), events.OutputsSuperseded),
        (SinkError("away"), None),
    ],
)
def test_what_is_not_the_fault_of_the_rows_of_a_call_is_no_error_of_the_call(error, posted):
    life = Life(destination(), trial=RowTrial(at(5), BOTH))
    life.memory[0].raises = error
    with pytest.raises(SinkError):
        life.call(1, 1)
    assert [type(each) for each in life.events] == ([] if posted is None else [posted])


def test_a_lease_halts_when_commits_are_refused_again_and_again_after_their_trials():
    life = Life(destination(), trial=RowTrial(at(9), BOTH, 3))
    life.memory[0].try_rows = lambda *_: None  # type: ignore[method-assign]
    life.refuse()
    assert life.events[-1] == events.OutputsRefused("outputs.a: the table refuses rows: column n")
    assert life.reports == []


def test_a_commit_that_passes_ends_the_count():
    life = Life(destination(), trial=RowTrial(at(1), BOTH, 3))
    life.memory[0].try_rows = lambda *_: None  # type: ignore[method-assign]
    life.call(1, 1)
    assert life.commits(1)
    life.refuse()
    assert life.reports == [
        RowsWereRefused(at(2), 1, "outputs.a: the table refuses rows: column n", ("a",))
    ]


def test_the_row_of_a_single_record_is_tried_when_it_is_emitted():
    life = Life(destination(), trial=RowTrial(at(9), BOTH))
    life.call(1, 1)
    with pytest.raises(TypeError):
        life.outputs.rows.prepare({"n": 1}, "a")
    assert life.outputs.rows.prepare({"n": 2}, "a").encoded == 2


def test_only_rows_of_the_output_that_refused_some_are_tried():
    first = Life(destination(), destination(), destination())
    first.call(1, 1, to="b")
    first.refuse()
    (refused,) = first.reports
    assert isinstance(refused, RowsWereRefused)
    assert refused.outputs == ("a",)

    life = Life(destination(), destination(), destination(), trial=RowTrial(at(9), refused.outputs))
    for name in "abc":
        life.call(1, 1, to=name)
        life.outputs.rows.prepare({"n": 2}, name)
    assert [len(each.tried) for each in life.memory] == [2, 0, 0]


def test_an_output_in_the_same_database_is_tried_with_the_one_that_refused_rows():
    life = Life(destination(), destination(), destination())
    life.memory[0].beside = life.memory[2]
    life.refuse()
    assert [each.outputs for each in life.reports if isinstance(each, RowsWereRefused)] == [
        ("a", "c")
    ]


def test_an_output_that_refuses_rows_beside_one_that_is_tried_joins_it_and_is_no_new_round():
    trial = RowTrial(at(1), ("a",), 3)
    life = Life(destination(), destination(), trial=trial)
    life.call(2, -1, to="b")
    assert not life.commits(2)
    words = "outputs.b: the table refuses rows: column n"
    assert life.reports == [RowsWereRefused(at(2), 3, words, BOTH)]


@pytest.mark.parametrize(("later_s", "outputs"), [(500.0, BOTH), (700.0, ("b",))])
def test_an_output_whose_trials_are_over_is_not_tried_because_another_one_refuses_rows(
    later_s, outputs
):
    life = Life(destination(), destination(), trial=RowTrial(at(1), ("a",)))
    life.call(1, 1)
    assert life.commits(1)
    life.now = Instant(later_s)
    life.call(2, -1, to="b")
    assert not life.commits(2)
    words = "outputs.b: the table refuses rows: column n"
    assert life.reports == [RowsWereRefused(at(2), 1, words, outputs)]


def test_at_the_tip_of_a_run_that_ends_there_rows_that_may_be_refused_are_committed_unasked():
    there = destination()
    life = Life(there)
    assert not life.outputs.commits_at_tip()
    life.call(1, 1)
    life.outputs.turn()
    assert there.rows == []
    assert life.outputs.commits_at_tip()
    assert life.outputs.turn()
    assert there.rows == [1]
    assert not life.outputs.commits_at_tip()


def test_a_run_does_not_wait_at_its_tip_for_rows_that_cannot_be_refused_or_while_one_is_away():
    life = Life(destination())
    life.call(1, 1)
    life.memory[0].commit = _away  # type: ignore[method-assign]
    assert life.outputs.commits_at_tip()
    assert life.outputs.turn()
    assert not life.outputs.commits_at_tip(), "it ends without them, as it does for any output"

    plain = Outputs(
        [("a", MemoryOutput(destination(), 1, []), AT_ONCE)],
        FakeHost(lambda _: None),
        now=lambda: Instant(1.0),
    )
    plain.begin(TRIM_HORIZON, {}, may_adopt=False)
    plain.rows.begin_batch()
    plain.rows.emit_to("a")({"n": 1})
    plain.rows.end_batch(at(1))
    plain.settle(at(1))
    assert not plain.commits_at_tip()


def _away() -> Cursor:
    raise SinkError("the database is away")
