"""The rows of a lease: which place they go to, and how the places are opened."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.ipc.board import boottime
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor, OutputDestination, RowsOf, StoredCursors
from kclrun.model.reading import Replay
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.outputs.destination_waits import DestinationWaits
from kclrun.protocol.reports import OUTPUT, ProcessorRaised, ProcessorRecovered, Report
from kclrun.worker import opening as module
from kclrun.worker.lease_outputs import LeaseOutputs
from kclrun.worker.sharing import daemon_thread
from tests.patience import HUNG_S
from tests.support.memory_output import Destination, MemoryOutput

SHARD = "shardId-000000000000"
ROLLED = OutputDestination(
    name="late", path="/rolls", roll_s=60.0, roll_bytes=10, buffer_bytes=1_000
)


def at(number: int) -> ExtendedSequenceNumber:
    return ExtendedSequenceNumber(str(number))


def no_credentials() -> Any:
    """Nothing is signed here."""


class Stage:
    """The rows of a lease over destinations in memory; `away` is how often one cannot be opened."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *places: OutputDestination,
        away: int = 0,
        compared: tuple[str, ...] = (),
    ) -> None:
        self.events: list[events.Event] = []
        self.committed = threading.Event()
        self.reports: list[Report] = []
        self.broken: list[BaseException] = []
        self.broke = threading.Event()
        self.cuts: list[ExtendedSequenceNumber] = []
        self.tries = 0
        self.held: list[bool] = []
        self.holds = threading.Event()
        self.of: list[RowsOf] = []
        self.closed: list[str] = []
        self.destination = Destination(stores_cursor=True)
        self.away = away
        monkeypatch.setattr(module, "open_output", self._open)
        spec: Any = SimpleNamespace(
            application="orders",
            stream_name="clicks",
            shard_id=SHARD,
            outputs=places,
            state=None,
            replay=Replay(row_names=compared),
            trial=None,
            kinesis=None,
            checkpoint=SimpleNamespace(mode="auto"),
        )
        self.waits = DestinationWaits(boottime)
        queue: Any = SimpleNamespace(
            hold=lambda: self._hold(True),
            release=lambda: self._hold(False),
            cut_at=self.cuts.extend,
            may_try_again=self._may_try_again,
            destinations=self.waits,
        )
        report, credentials = self.reports.append, no_credentials
        retries = module.DestinationRetries(queue, report)
        state = module.StateOpening(
            spec,
            retries,
            report=report,
            broke=self._break,
            credentials=credentials,
            read_row=lambda _: None,
        )
        opening = module.OutputOpening(
            spec, state, retries, queue, post=self._post, report=report, credentials=credentials
        )
        self.rows = LeaseOutputs(
            spec,
            queue,
            retries,
            opening,
            post=self._post,
            broke=self._break,
            make_thread=daemon_thread,
        )

    def _hold(self, held: bool) -> None:
        self.held.append(held)
        self.holds.set()

    def _post(self, event: events.Event) -> None:
        self.events.append(event)
        if isinstance(event, events.OutputsCommitted):
            self.committed.set()

    def _break(self, error: BaseException) -> None:
        self.broken.append(error)
        self.broke.set()

    def _open(self, place: OutputDestination, of: RowsOf, *_: object) -> MemoryOutput:
        self.of.append(of)
        output = MemoryOutput(self.destination, of.token, [])
        begin = output.begin

        def begin_or_not(cursor: Cursor) -> Cursor:
            if self.away:
                self.away -= 1
                raise SinkError(f"{place.name} is away")
            return begin(cursor)

        output.begin = begin_or_not  # type: ignore[method-assign]
        output.close = lambda: self.closed.append(place.name)  # type: ignore[method-assign]
        return output

    def _may_try_again(self, pause_s: float, *, is_batch: bool) -> bool:
        assert pause_s > 0
        assert not is_batch
        self.tries += 1
        view = self.waits.view()
        assert 0.0 < view.since <= view.waited_until, "the manager sees that it waits"
        return self.tries < 3


def lease(checkpoint: int, cursor: int) -> Lease:
    cursors = (("late", Cursor(at(cursor))),)
    return Lease(
        key=LeaseKey(SHARD),
        checkpoint=at(checkpoint),
        counter=7,
        generation=2,
        outputs=StoredCursors(at(checkpoint), cursors),
    )


def test_without_outputs_nothing_is_opened_and_a_row_is_refused_in_words(monkeypatch):
    stage = Stage(monkeypatch)
    row = lease(5, 5)
    assert stage.rows.open(row) is row
    assert stage.rows.sent() is None
    with pytest.raises(SettingsError, match=r"set output\.path"):
        stage.rows.emit({"n": 1}, "output")
    with pytest.raises(SettingsError, match=r"there is no outputs\.late"):
        stage.rows.emit({"n": 1}, "late")


def test_reading_begins_where_the_only_output_is_and_not_where_a_file_beside_it_needs_it(
    monkeypatch, tmp_path
):
    alone = Stage(monkeypatch, ROLLED)
    alone.destination.cursor = Cursor(at(9))
    assert alone.rows.open(lease(5, 4)).checkpoint == at(9)
    assert alone.rows.open(lease(5, 4)).checkpoint == at(9)  # `initialize` is repeated
    assert alone.events == [events.OutputsBegan(at(9), {"late": Cursor(at(9))})]
    assert [(each.token, each.generation, each.shard_id) for each in alone.of] == [(7, 2, SHARD)]

    beside = Stage(monkeypatch, OutputDestination(name="output", path=str(tmp_path)), ROLLED)
    beside.destination.cursor = Cursor(at(9))
    assert beside.rows.open(lease(5, 4)).checkpoint == at(5)
    assert beside.cuts == [at(9)]
    for each in (alone, beside):
        each.rows.close()


@pytest.mark.parametrize(("away", "opens"), [(2, True), (3, False)])
def test_a_destination_that_is_away_is_tried_again_until_delivery_is_stopped(
    monkeypatch, away, opens
):
    stage = Stage(monkeypatch, ROLLED, away=away)
    if opens:
        stage.rows.open(lease(5, 5))
    else:
        with pytest.raises(SinkError, match="late is away"):
            stage.rows.open(lease(5, 5))
    assert stage.closed == ([] if opens else ["late"]), "other leases may share the process"
    assert stage.waits.view().since == 0.0
    assert (ProcessorRecovered(OUTPUT, away + 1) in stage.reports) == opens
    reported = [each for each in stage.reports if isinstance(each, ProcessorRaised)]
    assert [(each.where, each.attempts) for each in reported] == [
        (OUTPUT, number) for number in range(1, away + 1)
    ]
    stage.rows.close()


def test_rows_go_to_the_file_and_to_the_output_that_they_name(monkeypatch, tmp_path):
    stage = Stage(monkeypatch, OutputDestination(name="output", path=str(tmp_path)), ROLLED)
    stage.rows.open(Lease(key=LeaseKey(SHARD), checkpoint=TRIM_HORIZON, counter=1))
    stage.rows.begin_batch()
    stage.rows.emit({"n": 1}, "output")
    stage.rows.emit({"n": 2}, "late")
    stage.rows.cover(at(3))
    stage.rows.emit({"n": 3}, "output")
    stage.rows.emit({"n": 4}, "late")
    stage.rows.commit(CommitOutputs(at(3), must=True))
    assert stage.committed.wait(HUNG_S)
    stage.rows.make_durable(at(3))
    stage.rows.take_back_batch(at(3))
    assert stage.rows.sent() == at(3)
    stage.rows.begin_batch()
    stage.rows.end_batch(at(4))
    stage.rows.settle(at(4))
    assert stage.rows.waiting_since() == 0.0
    stage.rows.close()
    assert stage.destination.rows == [2]
    assert (tmp_path / f"{SHARD}.jsonl").read_text() == '{"n":1}\n'


@pytest.mark.parametrize("buffer_bytes", [1, 1_000_000])
def test_rows_beyond_the_buffer_of_their_output_hold_the_lease_until_they_are_sent(
    monkeypatch, buffer_bytes
):
    place = OutputDestination(name="late", kinesis="k", buffer_bytes=buffer_bytes)
    stage = Stage(monkeypatch, place)
    stage.rows.open(Lease(key=LeaseKey(SHARD), checkpoint=TRIM_HORIZON, counter=1))
    stage.rows.begin_batch()
    stage.rows.emit({"n": 1}, "late")
    stage.rows.end_batch(at(1))
    stage.rows.settle(at(1))
    if buffer_bytes == 1:
        assert stage.holds.wait(HUNG_S)
    stage.rows.commit(CommitOutputs(at(1), must=True))
    assert stage.committed.wait(HUNG_S)
    stage.rows.close()
    assert stage.held[:1] == ([True] if buffer_bytes == 1 else [])


def test_where_the_host_has_no_thread_left_the_outputs_are_closed_and_the_lease_ends_in_order(
    monkeypatch,
):
    stage = Stage(monkeypatch, ROLLED)

    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    stage.rows._make_thread = lambda target, name: NoThread(target=target, name=name)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        stage.rows.open(Lease(key=LeaseKey(SHARD), checkpoint=TRIM_HORIZON, counter=1))
    assert stage.closed == ["late"]
    stage.rows.close()


def test_an_output_that_breaks_ends_the_process(monkeypatch):
    stage = Stage(monkeypatch, ROLLED)
    bug = KeyError("a bug")

    def add(*_: object) -> None:
        raise bug

    monkeypatch.setattr(MemoryOutput, "add", add)
    stage.rows.open(Lease(key=LeaseKey(SHARD), checkpoint=TRIM_HORIZON, counter=1))
    stage.rows.begin_batch()
    stage.rows.emit({"n": 1}, "late")
    stage.rows.end_batch(at(1))
    stage.rows.settle(at(1))
    assert stage.broke.wait(HUNG_S)
    assert stage.broken == [bug]


def test_after_a_reset_the_rows_begin_a_file_of_their_own(monkeypatch, tmp_path):
    """The file before keeps its rows, wherever the checkpoint is now: LATEST would cut them off."""
    grown = OutputDestination(name="output", path=str(tmp_path))
    for generation, checkpoint in ((0, TRIM_HORIZON), (1, LATEST), (2, TRIM_HORIZON)):
        stage = Stage(monkeypatch, grown)
        row = Lease(key=LeaseKey(SHARD), checkpoint=checkpoint, generation=generation)
        stage.rows.open(row)
        stage.rows.begin_batch()
        stage.rows.emit({"n": generation}, "output")
        stage.rows.end_batch(at(10))
        stage.rows.make_durable(at(10))
        stage.rows.close()

    names = (f"{SHARD}.jsonl", f"{SHARD}.1.jsonl", f"{SHARD}.2.jsonl")
    assert [(tmp_path / name).read_text() for name in names] == [
        f'{{"n":{generation}}}\n' for generation in range(3)
    ]


def test_rows_of_a_comparison_are_in_one_file_with_their_record_whichever_method_emits(
    monkeypatch, tmp_path
):
    grown = OutputDestination(name="output", path=str(tmp_path), buffer_bytes=1_000)
    stage = Stage(monkeypatch, grown, compared=("output", "late"))
    rows = stage.rows
    rows.open(lease(5, 5))

    rows.begin_batch()  # process_records, with one record
    rows.emit({"n": 1}, "output")
    rows.emit({"n": 2}, "late")
    rows.end_batch(at(6))
    kept = [rows.prepare({"n": 3}, "late"), rows.prepare({"n": 4}, "output")]
    rows.begin_batch()  # process_record: the rows of a record that is done
    for row in kept:
        rows.place(row)
    rows.end_batch(at(7))
    with pytest.raises(SettingsError, match=r"there is no outputs\.other"):
        rows.emit({"n": 5}, "other")
    rows.make_durable(at(7))
    rows.close()

    (file,) = tmp_path.glob("*.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"at": "6", "ordinal": 0, "to": "output", "row": {"n": 1}},
        {"at": "6", "ordinal": 1, "to": "late", "row": {"n": 2}},
        {"at": "7", "ordinal": 0, "to": "late", "row": {"n": 3}},
        {"at": "7", "ordinal": 1, "to": "output", "row": {"n": 4}},
    ]
