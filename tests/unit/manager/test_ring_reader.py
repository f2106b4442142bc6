"""What a lease process says of user code that raises: in the log, and for the manager's looks."""

import json
import os

import msgspec
import pytest

from kclrun.ipc.board import Segment
from kclrun.ipc.messages import encode_report
from kclrun.leases.commands import StartProcess
from kclrun.leases.events import ProcessReported
from kclrun.manager.ring_reader import Child, RingReader
from kclrun.model.output import RowTrial
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.logs import EventLog, LineSink
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.traffic.hot_keys import ShardHeat

PLACE = ("orders.py:42 in price", "3 of 302, at 7")
FIRST = reports.ProcessorRaised("process_records", "KeyError: 1", *PLACE, "Traceback …", 1, 1.0)
AGAIN = reports.ProcessorRaised("process_records", "KeyError: 1", *PLACE, "", 2, 2.0)
LAST = reports.ProcessorFailed(
    "process_records", "KeyError: 1", 3, ExtendedSequenceNumber("7"), "", *PLACE
)
WORDS = "KeyError: 1 (orders.py:42 in price; record 3 of 302, at 7)"


class Heard:
    """A listener over a child whose ring the test writes."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._path = path
        self._sink = LineSink(self._fd)
        self._ring_reader = RingReader(EventLog(self._sink, app="a", owner="o"))
        self._segment = Segment.create(1)
        self.child = Child(
            start=StartProcess("s0", 1, 0.0),
            incarnation=1,
            place=0,
            slot=self._segment.slot(0),
            ring=self._segment.ring(0),
            channel=None,
        )

    def hear(self, *written):
        ring = self._segment.ring(0)
        for report in written:
            ring.put(encode_report(report))
        return self._ring_reader.read(self.child)

    @property
    def trials(self):
        return self._ring_reader.row_trials

    def hear_last(self):
        return self._ring_reader.read_last(self.child)

    def fill(self, payload):
        """Until the child's ring has no room for it."""
        while self._segment.ring(0).put(payload):
            pass

    def lines(self):
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def close(self):
        self._sink.close()
        self._segment.close()
        os.close(self._fd)


@pytest.fixture
def reported(tmp_path):
    made = Heard(tmp_path / "log")
    yield made
    made.close()


def test_the_first_failure_is_reported_in_full_and_the_same_again_in_brief(reported):
    assert reported.hear(FIRST, AGAIN) == []

    first, again = reported.lines()
    assert (first["event"], first["level"]) == ("processor_raised", "warning")
    assert (first["error"], first["raised_at"], first["record"]) == ("KeyError: 1", *PLACE)
    assert (first["traceback"], first["attempts"], first["pause_s"]) == ("Traceback …", 1, 1.0)
    assert {"raised_at", "record", "traceback"}.isdisjoint(again)
    assert (again["error"], again["attempts"], again["pause_s"]) == ("KeyError: 1", 2, 2.0)


def test_what_is_raised_is_the_lease_s_trouble_until_user_code_returns(reported):
    reported.hear(FIRST, AGAIN)
    assert reported.child.trouble == f"process_records failed 2 times: {WORDS}"

    reported.hear(reports.ProcessorRecovered("process_records", 3))

    assert reported.child.trouble == ""
    assert reported.lines()[-1]["event"] == "processor_recovered"


def test_later_is_a_line_when_it_begins_and_one_when_it_ends(reported):
    asked = [
        reports.ProcessorRaised("process_records", "RetryLater: away", "a.py:1", "", "", 0, 2.0, n)
        for n in (1, 2, 3)
    ]

    reported.hear(*asked)
    assert reported.child.trouble == "process_records waits: RetryLater: away (a.py:1)"
    reported.hear(reports.ProcessorWaited("process_records", 3, 6.5))

    assert reported.child.trouble == ""
    began, ended = reported.lines()
    assert (began["event"], began["level"]) == ("retry_later_began", "warning")
    assert (began["error"], began["pause_s"]) == ("RetryLater: away", 2.0)
    assert "traceback" not in began
    assert (ended["event"], ended["level"]) == ("retry_later_ended", "info")
    assert (ended["attempts"], ended["waited_s"]) == (3, 6.5)


def test_the_reason_of_a_halt_names_place_and_record(reported):
    assert reported.hear(LAST) == [ProcessReported("s0", LAST)]
    assert reports.reason_of(LAST) == f"process_records failed 3 times: {WORDS}"

    (line,) = reported.lines()
    assert (line["event"], line["level"]) == ("processor_failed", "error")
    assert (line["raised_at"], line["record"], line["position"]) == (*PLACE, "7")
    assert "traceback" not in line, "it was told with the first failure"


def test_what_the_host_lacked_at_records_is_no_failure_of_the_processor(reported):
    starved = msgspec.structs.replace(LAST, is_host_fault=True)

    (event,) = reported.hear(starved)

    assert event == ProcessReported("s0", starved)
    assert reported.lines()[0]["event"] == "processor_failed"


def test_a_long_error_is_cut_in_the_reason_which_every_renewal_pays_for(reported):
    (event,) = reported.hear(reports.ProcessorFailed("initialize", "x" * 2000, 1))

    assert reports.reason_of(event.report) == "initialize failed once: " + "x" * 300 + "…"
    assert len(reported.lines()[0]["error"]) == 2000


def failed(where, error, attempts, *texts):
    return reports.ProcessorFailed(where, error, attempts, None, "", *texts)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (failed("initialize", "x" * 300, 1), "initialize failed once: " + "x" * 300),
        (failed("", "E", 2), "the processor failed: E"),
        (failed("f", "E", 2, "a.py:1"), "f failed 2 times: E (a.py:1)"),
        (failed("f", "E", 2, "", "1 of 2"), "f failed 2 times: E (record 1 of 2)"),
    ],
)
def test_the_words_of_a_failure_leave_out_what_is_not_known(failure, words):
    assert reports.reason_of(failure) == words


AT = ExtendedSequenceNumber("7")


@pytest.mark.parametrize(
    ("report", "is_event", "line", "is_end"),
    [
        (reports.LeaseClaimed(3, AT), True, "lease_claimed", False),
        (reports.Checkpointed(AT, 4), True, None, False),
        (reports.ShardEnded(("a", "b")), True, "shard_ended", True),
        (reports.LeaseReleased(AT, "x"), True, "lease_released", True),
        (reports.StartUnclaimed("late"), True, None, True),
        (reports.LeaseLost("taken"), True, None, True),
        (reports.ProcessReplaced("moved"), True, None, True),
        (reports.ProcessBroke("no disk"), True, None, True),
        (LAST, True, "processor_failed", True),
        (FIRST, False, "processor_raised", False),
        (reports.ProcessorRecovered("f", 2), False, "processor_recovered", False),
        (
            reports.RecordGivenUp(AT, "x", "", "", 3, is_skipped=True),
            False,
            "record_skipped",
            False,
        ),
        (
            reports.RecordGivenUp(AT, "x", "f.py:1", "Traceback …", 3, is_skipped=False),
            *(False, "record_dead_lettered", False),
        ),
        (reports.GilHeld(12.5), False, "gil_held", False),
        (reports.RecordsExpired(AT, "replay"), False, "records_expired", False),
        (reports.ProcessWarned("x"), False, "lease_process_warned", False),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, msgspec.Struct) else "",
)
def test_each_report_is_the_event_and_the_line_that_it_stands_for(
    reported, report, is_event, line, is_end
):
    assert reported.hear(report) == ([ProcessReported("s0", report)] if is_event else [])

    assert [each["event"] for each in reported.lines()] == ([line] if line else [])
    assert all(each["shard"] == "s0" for each in reported.lines())
    assert all("withheld" not in each for each in reported.lines())
    assert reported.child.has_reported_end == is_end


EXITED = {code: code << 8 for code in (0, 3, 4, 5, 6, 70)}


@pytest.mark.parametrize(
    ("state", "exit_status", "kind"),
    [
        (WorkerState.LOST, EXITED[3], reports.StartUnclaimed),
        (WorkerState.LOST, EXITED[4], reports.LeaseLost),
        (WorkerState.LOST, EXITED[6], reports.ProcessReplaced),
        (WorkerState.HALTED, EXITED[5], reports.ProcessorFailed),
        (WorkerState.LOST, EXITED[5], None),
        (WorkerState.HALTED, EXITED[3], None),
        (WorkerState.PROCESSING, EXITED[4], None),
        (WorkerState.FINISHED, EXITED[0], None),
        (WorkerState.LOST, 9, None),
        (None, EXITED[4], None),
    ],
)
def test_a_last_report_that_was_lost_is_believed_where_slot_and_exit_code_agree(
    reported, state, exit_status, kind
):
    if state is not None:
        reported.child.slot.publish(LeaseStatus(pid=1, incarnation=1, state=state))
    reported.child.status = exit_status

    found = [each.report for each in reported.hear_last()]

    assert [type(each) for each in found] == ([kind] if kind else [])
    assert all("its report was lost" in msgspec.json.encode(each).decode() for each in found)


def test_a_report_that_found_no_room_is_made_up_from_the_slot(reported):
    reported.fill(b"x" * 8000)
    reported.child.ring.drain()
    assert reported.hear() == []
    reported.fill(b"x" * 16000)
    reported.child.ring.drain()
    reported.child.slot.publish(
        LeaseStatus(pid=1, incarnation=1, state=WorkerState.PROCESSING, checkpointed=AT, counter=5)
    )

    assert reported.hear() == [ProcessReported("s0", reports.Checkpointed(AT, 5))]
    assert [each["event"] for each in reported.lines()] == ["transitions_missed"] * 2


def test_what_an_exited_process_wrote_that_is_no_report_ends_the_listening(reported):
    reported.fill(b"nonsense")

    assert reported.hear_last() == []
    assert [each["event"] for each in reported.lines()] == ["process_condemned"]


def test_the_rows_of_a_lease_are_tried_at_its_next_start_until_a_checkpoint_passes_them(reported):
    at = ExtendedSequenceNumber
    refused = reports.RowsWereRefused(at("9"), 2, "column n", ("a",))
    reported.hear(refused, reports.Checkpointed(at("8"), 3))
    assert reported.trials == {"s0": RowTrial(at("9"), ("a",), 2)}
    reported.hear(reports.Checkpointed(at("9"), 4))
    assert reported.trials == {}


@pytest.mark.parametrize("where", sorted(reports.DESTINATIONS))
def test_a_destination_that_fails_is_awaited_and_not_the_trouble_of_user_code(reported, where):
    failed = (where, "outputs.table: the database does not answer", "", "", "", 3, 4.0)
    reported.hear(reports.ProcessorRaised(*failed))
    words = f"{where} failed 3 times: outputs.table: the database does not answer"
    assert (reported.child.awaited, reported.child.trouble) == (words, "")

    reported.hear(reports.ProcessorRecovered("process_records", 2))
    assert reported.child.awaited == words
    reported.hear(reports.ProcessorRecovered(where, 4))
    assert reported.child.awaited == ""


def test_the_traffic_of_a_shard_is_kept_for_the_looks_and_not_logged(reported):
    heats = [ShardHeat(60.0, rate, 1.0, rate, 0.0, 0) for rate in (1.0, 2.0)]

    assert reported.hear(*heats) == []

    assert reported.child.heat == heats[1]
    assert reported.lines() == []
