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
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.observe.logs import EventLog, LineSink
from kclrun.protocol import reports

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

    told.hear(reports.ProcessorRecovered("process_records", 3))

    assert told.child.trouble == ""
    assert told.lines()[-1]["event"] == "processor_recovered"


def test_the_reason_of_a_halt_names_place_and_record(told):
    assert told.hear(LAST) == [ProcessReported("s0", LAST)]
    assert reports.reason_of(LAST) == f"process_records failed 3 times: {WORDS}"

    (line,) = told.lines()
    assert (line["event"], line["level"]) == ("processor_failed", "error")
    assert (line["raised_at"], line["record"], line["position"]) == (*PLACE, "7")
    assert "traceback" not in line, "it was told with the first failure"


def test_what_the_host_lacked_at_records_is_no_failure_of_the_processor(told):
    starved = msgspec.structs.replace(LAST, is_host_fault=True)

    (event,) = told.hear(starved)

    assert event == ProcessReported("s0", starved)
    assert told.lines()[0]["event"] == "processor_failed"


def test_a_long_error_is_cut_in_the_reason_which_every_renewal_pays_for(told):
    (event,) = told.hear(reports.ProcessorFailed("initialize", "x" * 2000, 1))

    assert len(reports.reason_of(event.report)) < 400
    assert len(told.lines()[0]["error"]) == 2000
