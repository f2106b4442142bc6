"""What a lease process says of user code that raises: in the log, and for the manager's looks."""

import json
import os

import msgspec
import pytest

from kclrun.ipc import transitions as said
from kclrun.ipc.board import Segment
from kclrun.leases import events as heard
from kclrun.leases.commands import StartProcess
from kclrun.manager.ring_reader import Child, RingReader
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.logs import EventLog, LineSink
from kclrun.protocol.status import LeaseStatus, WorkerState

PLACE = ("orders.py:42 in price", "3 of 302, at 7")
FIRST = said.Raised("process_records", "KeyError: 1", *PLACE, "Traceback …", 1, 1.0)
AGAIN = said.Raised("process_records", "KeyError: 1", *PLACE, "", 2, 2.0)
LAST = said.Failed("process_records", "KeyError: 1", ExtendedSequenceNumber("7"), "", 3, *PLACE)
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

    def hear(self, *transitions):
        ring = self._segment.ring(0)
        for transition in transitions:
            ring.put(said.encode(transition))
        return self._ring_reader.hear(self.child)

    def hear_last(self):
        return self._ring_reader.hear_last(self.child)

    def lines(self):
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def close(self):
        self._sink.close()
        self._segment.close()
        os.close(self._fd)


@pytest.fixture
def told(tmp_path):
    made = Heard(tmp_path / "log")
    yield made
    made.close()


def test_the_first_failure_is_told_in_full_and_the_same_again_in_brief(told):
    assert told.hear(FIRST, AGAIN) == []

    first, again = told.lines()
    assert (first["event"], first["level"]) == ("processor_raised", "warning")
    assert (first["error"], first["raised_at"], first["record"]) == ("KeyError: 1", *PLACE)
    assert (first["traceback"], first["attempts"], first["pause_s"]) == ("Traceback …", 1, 1.0)
    assert {"raised_at", "record", "traceback"}.isdisjoint(again)
    assert (again["error"], again["attempts"], again["pause_s"]) == ("KeyError: 1", 2, 2.0)


def test_what_is_raised_is_the_lease_s_trouble_until_user_code_returns(told):
    told.hear(FIRST, AGAIN)
    assert told.child.trouble == f"process_records failed 2 times: {WORDS}"

    told.hear(said.Recovered("process_records", 3))

    assert told.child.trouble == ""
    assert told.lines()[-1]["event"] == "processor_recovered"


def test_the_reason_of_a_halt_names_place_and_record(told):
    assert told.hear(LAST) == [
        heard.ProcessorFailed("s0", f"process_records failed 3 times: {WORDS}")
    ]

    (line,) = told.lines()
    assert (line["event"], line["level"]) == ("processor_failed", "error")
    assert (line["raised_at"], line["record"], line["position"]) == (*PLACE, "7")
    assert "traceback" not in line, "it was told with the first failure"


def test_what_the_host_lacked_at_records_is_no_failure_of_the_processor(told):
    starved = msgspec.structs.replace(LAST, is_host_fault=True)

    (event,) = told.hear(starved)

    words = f"process_records failed 3 times: {WORDS}"
    assert event == heard.ProcessBroke("s0", words, at_records=True)
    assert told.lines()[0]["event"] == "processor_failed"


def test_a_long_error_is_cut_in_the_reason_which_every_renewal_pays_for(told):
    (event,) = told.hear(said.Failed("initialize", "x" * 2000, None, "", 1))

    assert event.reason == "initialize failed once: " + "x" * 300 + "…"
    assert len(told.lines()[0]["error"]) == 2000


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (said.Failed("initialize", "x" * 300, None, "", 1), "initialize failed once: " + "x" * 300),
        (said.Failed("", "E", None, "", 2), "failed: E"),
        (said.Failed("f", "E", None, "", 2, "a.py:1"), "f failed 2 times: E (a.py:1)"),
        (said.Failed("f", "E", None, "", 2, "", "1 of 2"), "f failed 2 times: E (record 1 of 2)"),
    ],
)
def test_the_words_of_a_failure_leave_out_what_is_not_known(told, failed, words):
    assert told.hear(failed) == [heard.ProcessorFailed("s0", words)]


AT = ExtendedSequenceNumber("7")


@pytest.mark.parametrize(
    ("transition", "event", "line", "is_end"),
    [
        (said.Claimed(3, AT), heard.LeaseClaimed("s0", 3, AT), "lease_claimed", False),
        (said.Checkpointed(AT, 4), heard.PositionMoved("s0", AT), None, False),
        (said.ShardEnded(("a", "b")), heard.ShardEnded("s0", ("a", "b")), "shard_ended", True),
        (said.Released(AT, "x"), heard.LeaseReleased("s0", AT), "lease_released", True),
        (said.Unclaimed("late"), heard.StartUnclaimed("s0", "late"), None, True),
        (said.Lost("taken"), heard.LeaseLost("s0", "taken"), None, True),
        (said.Broke("no disk"), heard.ProcessBroke("s0", "no disk"), None, True),
        (LAST, None, "processor_failed", True),
        (said.GilHeld(12.5), None, "gil_held", False),
        (said.RecordsExpired(AT, "replay"), None, "records_expired", False),
        (said.Warned("lease_lost", "x"), None, "lease_lost", False),
        (said.Warned("unheard of", "x"), None, "lease_process_warned", False),
        (said.Started(1), None, None, False),
        (said.Drained(), None, None, False),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, msgspec.Struct) else "",
)
def test_each_transition_is_the_event_and_the_line_that_it_stands_for(
    told, transition, event, line, is_end
):
    events = told.hear(transition)

    assert [each for each in events if transition is not LAST] == ([event] if event else [])
    lines = told.lines() if told._path.exists() else []
    assert [each["event"] for each in lines] == ([line] if line else [])
    assert all(each["shard"] == "s0" for each in lines)
    assert told.child.has_reported_end == is_end


def test_a_warning_is_one_whatever_its_event_is_and_a_name_of_no_event_is_a_field(told):
    told.hear(said.Warned("lease_claimed", "detail 1"), said.Warned("unheard of", "detail 2"))

    known, unknown = told.lines()
    assert (known["level"], known["detail"]) == ("warning", "detail 1")
    assert (unknown["warning"], unknown["detail"]) == ("unheard of", "detail 2")


EXITED = {code: code << 8 for code in (0, 3, 4, 5, 70)}


@pytest.mark.parametrize(
    ("state", "exit_status", "kind"),
    [
        (WorkerState.LOST, EXITED[3], heard.StartUnclaimed),
        (WorkerState.LOST, EXITED[4], heard.LeaseLost),
        (WorkerState.HALTED, EXITED[5], heard.ProcessorFailed),
        (WorkerState.LOST, EXITED[5], None),
        (WorkerState.HALTED, EXITED[3], None),
        (WorkerState.PROCESSING, EXITED[4], None),
        (WorkerState.FINISHED, EXITED[0], None),
        (WorkerState.LOST, 9, None),
        (None, EXITED[4], None),
    ],
)
def test_a_last_report_that_was_lost_is_believed_where_slot_and_exit_code_agree(
    told, state, exit_status, kind
):
    if state is not None:
        told.child.slot.publish(LeaseStatus(pid=1, incarnation=1, state=state))
    told.child.status = exit_status

    events = told.hear_last()

    assert [type(each) for each in events] == ([kind] if kind else [])
    assert all("its report was lost" in each.reason for each in events)


def test_a_report_that_found_no_room_is_made_up_from_the_slot(told):
    ring = told._segment.ring(0)
    while ring.put(b"x" * 8000):
        pass
    ring = told.child.ring
    ring.drain()
    moved = LeaseStatus(pid=1, incarnation=1, state=WorkerState.PROCESSING, checkpointed=AT)

    assert told._ring_reader.hear(told.child) == []
    told._segment.ring(0).put(b"y" * 16000)
    while told._segment.ring(0).put(b"x" * 16000):
        pass
    ring.drain()
    told.child.slot.publish(moved)

    assert told._ring_reader.hear(told.child) == [heard.PositionMoved("s0", AT)]
    assert [each["event"] for each in told.lines()] == ["transitions_missed"] * 2


def test_what_an_exited_process_wrote_that_is_no_transition_ends_the_listening(told):
    told._segment.ring(0).put(b"nonsense")

    assert told.hear_last() == []
    assert [each["event"] for each in told.lines()] == ["process_condemned"]
