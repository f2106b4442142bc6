"""The driver of `process_records`, over a host that notes what it is asked."""

import pytest

from kclrun.calling.batches import BatchCalls, BatchHost
from kclrun.errors import FailedRecords, RetryLater
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from tests.support.build import position

ARRIVED = 1_000.0


def records(*numbers):
    return [Record(b"x", "k", str(number), ARRIVED) for number in numbers]


class Host(BatchHost):
    """Raises the errors of `script`, a call each; None is a call that returns."""

    def __init__(self, *script):
        self.script = list(script)
        self.at, self.durable_to = 100.0, None
        self.calls, self.story, self.pauses = [], [], []
        self.rests, self.goes_on, self.keeps = True, True, True
        self.during = lambda: None

    def now(self):
        return self.at

    def call(self, given):
        self.calls.append([int(record.sequence_number) for record in given])
        self.during()
        error = self.script.pop(0) if self.script else None
        if callable(error):
            error = error(given)
        if error is not None:
            raise error

    def ends_run(self, error):
        return isinstance(error, KeyboardInterrupt)

    def durable(self):
        return self.durable_to

    def limit(self, last):
        self.story.append(("limit", last and int(last.sequence_number)))

    def raised(self, raised):
        self.story.append(("raised", raised.pause_s, raised.waits, raised.begins_search))

    def waited(self, waited):
        self.story.append(("waited", waited.tries))

    def rest(self, pause_s):
        self.pauses.append(pause_s)
        self.at += pause_s
        return self.rests

    def may_go_on(self):
        return self.goes_on

    def keep(self, record, failure, calls):
        self.story.append(("keep", int(record.sequence_number), failure.error, calls))

    def let_go(self, record, failure, calls):
        return self.keeps and super().let_go(record, failure, calls)

    def halt(self, reason, calls):
        self.story.append(("halt", reason, calls))

    def settled(self, at):
        self.story.append(("settled", int(at.sequence_number)))

    def recovered(self, calls):
        self.story.append(("recovered", calls))

    def of(self, what):
        return [words for kind, *words in self.story if kind == what]


class Rows:
    def __init__(self):
        self.story = []

    def begin_batch(self):
        self.story.append("begin")

    def end_batch(self, at):
        self.story.append(int(at.sequence_number))

    def take_back_batch(self, checkpoint):
        self.story.append("take back")


def run(host, *numbers, last=None, retries=0, then="dead-letter", max_age_s=None, rows=None):
    numbers = numbers or (1, 2, 3, 4)
    calls = BatchCalls(host, ErrorPolicy(retries, 1.0, then, max_age_s))
    return calls.run(records(*numbers), position(last or numbers[-1]), rows)


def test_waits_in_a_row_are_numbered_over_once_it_returns_and_no_failure():
    host = Host(RetryLater(7.0), RetryLater(8.0))
    assert run(host)
    assert host.of("raised") == [[7.0, 1, False], [8.0, 2, False]]
    assert host.pauses == [7.0, 8.0]
    assert host.of("waited") == [[2]]
    assert host.of("recovered") == []


def test_the_waits_of_one_batch_are_not_those_of_the_next():
    host = Host(RetryLater(7.0))
    host.rests = False
    calls = BatchCalls(host, ErrorPolicy(0, 1.0, "halt"))
    assert not calls.run(records(1), position(1), None)
    host.rests, host.script = True, [RetryLater(7.0)]
    assert calls.run(records(2), position(2), None)
    assert host.of("raised") == [[7.0, 1, False], [7.0, 1, False]]
    assert host.of("waited") == [[1]]


def test_the_search_begins_once_and_its_calls_are_limited_to_their_part():
    bad = lambda given: ValueError("x") if "3" in {r.sequence_number for r in given} else None  # noqa: E731
    host = Host(bad, bad, bad, bad, bad)
    assert run(host, last=9)
    assert host.calls == [[1, 2, 3, 4], [1, 2], [3], [4]]
    assert host.of("raised") == [[None, 0, True], [None, 0, False]]
    assert [last for (last,) in host.of("limit") if last] == [2, 3, 9]
    assert host.of("settled") == [[2], [3]]
    assert host.of("keep") == [[3, "ValueError: x", 2]]


def test_rows_of_a_part_belong_to_its_last_record_and_never_below_those_that_stay():
    failed = lambda given: FailedRecords(given[1:2])  # noqa: E731
    host, rows = Host(failed), Rows()
    assert run(host, last=9, retries=1, rows=rows)
    assert host.calls == [[1, 2, 3, 4], [2]]
    assert rows.story == ["begin", 9, "begin", 9]


def test_a_stop_between_two_calls_of_the_search_ends_the_run():
    host = Host(ValueError("x"))
    host.goes_on = False
    assert not run(host)
    assert host.calls == [[1, 2, 3, 4]]
    assert host.of("halt") == []


def test_the_failures_of_one_batch_are_not_those_of_the_next():
    host = Host(ValueError("first"), None)
    calls = BatchCalls(host, ErrorPolicy(1, 1.0, "dead-letter"))
    assert calls.run(records(1, 2), position(2), None)
    host.script = [ValueError("second"), None]
    assert calls.run(records(3, 4), position(4), None)
    assert host.of("recovered") == [[2], [2]]
    host.script, host.at = [], 500.0
    assert calls.run(records(5, 6), position(6), None)
    assert host.of("recovered") == [[2], [2]]
    calls.keep_held()
    assert host.of("keep") == [], "no record of this batch is given up"


def test_what_is_not_an_error_of_user_code_ends_the_run_as_it_is():
    host, rows = Host(KeyboardInterrupt()), Rows()
    with pytest.raises(KeyboardInterrupt):
        run(host, retries=5, rows=rows)
    assert host.story == [("limit", None)]
    assert rows.story == ["begin", "take back"]


def test_a_checkpoint_asked_for_in_the_search_keeps_the_letters_once():
    first = lambda given: ValueError("x") if "1" in {r.sequence_number for r in given} else None  # noqa: E731
    host = Host(first, first, first)
    calls = BatchCalls(host, ErrorPolicy(0, 1.0, "dead-letter"))

    def asks():
        if host.calls[-1] == [2]:
            calls.keep_held()
            calls.keep_held()

    host.during = asks
    assert calls.run(records(1, 2), position(2), None)
    assert host.of("keep") == [[1, "ValueError: x", 2]]


def test_records_that_a_checkpoint_covers_are_in_no_call_and_count_as_returned():
    host = Host(ValueError("x"), None)
    host.during = lambda: setattr(host, "durable_to", position(2))
    assert run(host, 1, 2, retries=1)
    assert host.calls == [[1, 2]]
    assert host.of("recovered") == [[2]]
