"""The calls of `process_record` over a host and a runner that the test drives, on one thread."""

import itertools
from types import SimpleNamespace

import pytest

from kclrun.calling import records as module
from kclrun.calling.concurrency import AHEAD_MAX
from kclrun.calling.records import CallTerms, RecordCalls, RecordHost, Stop
from kclrun.calling.runners import Ended, runner_of
from kclrun.errors import RetryLater, SinkError
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.processor import Context, KeptRow, RecordProcessor
from kclrun.producing.flow_control import ProducerSettings
from kclrun.state.keyed import LiveEntries, State


def position(number):
    return ExtendedSequenceNumber(str(number))


def batch(*numbers, last=None, key=str):
    records = [Record(b"%d" % number, key(number), str(number)) for number in numbers]
    return SimpleNamespace(records=records, last=position(last or numbers[-1]))


def refused(*_):
    raise AssertionError("single records keep their changes themselves")


class Processor(RecordProcessor):
    """Emits and notes the number of each record; `raising` says how often a record raises."""

    def __init__(self):
        self.given, self.raising, self.contexts = [], {}, []
        self.looks = lambda number: None

    def process_record(self, record, context):
        number = int(record.data)
        self.given.append(number)
        self.looks(number)
        self.contexts.append(context)
        context.emit({"n": number})
        context.state[record]["last"] = number
        if self.raising.get(number, 0):
            self.raising[number] -= 1
            raise ValueError(number)


class Manual:
    """A runner whose calls end when the host waits; `cancelled` counts the cancellations."""

    is_inline = False

    def __init__(self, processor):
        self.processor, self.started, self.ended, self.cancelled = processor, [], [], 0

    def start(self, calls):
        self.started += calls

    def end(self, *numbers):
        for number, record, context in tuple(self.started):
            if not numbers or number in numbers:
                self.started.remove((number, record, context))
                try:
                    self.processor.process_record(record, context)
                except ValueError as error:
                    self.ended.append(Ended(number, error))
                else:
                    self.ended.append(Ended(number, None))

    def take(self):
        ended, self.ended = self.ended, []
        return ended

    def cancel(self):
        self.cancelled += 1

    def close(self): ...

    def write_coroutines(self, file): ...


class Host(RecordHost):
    """Notes what it is asked; `waits` are the steps that it takes while the calls wait."""

    def __init__(self):
        self.at, self.stops, self.waiting = 100.0, None, []
        self.places, self.refuses, self.done, self.halts, self.busy_since = [], 0, [], [], []
        self.joins, self.asked, self.letters, self.pauses, self.may = [], 0, [], [], True
        self.raises, self.offers, self.stop_looks = [], 0, 0

    def now(self):
        return self.at

    def stop(self):
        self.stop_looks += 1
        return self.stops

    def may_start(self):
        return self.may

    def more(self):
        self.asked += 1
        return self.joins.pop(0) if self.joins else None

    def busy(self, since):
        self.busy_since.append(since)

    def raised(self, number, record, raised):
        self.raises.append(number)

    def let_go(self, number, record, failure, calls):
        self.letters.append((int(record.data), calls))
        return True

    def halt(self, number, record, failing, reason):
        self.halts.append(number)

    def settled(self, upto, rows, changes):
        self.offers += 1
        if self.refuses:
            return False
        self.places.append((int(upto.sequence_number), [row.encoded for row in rows], len(changes)))
        return True

    def done_with(self, part):
        self.done.append(int(part.last.sequence_number))

    def wait(self, pause_s):
        self.pauses.append(pause_s)
        assert self.waiting, "the calls wait for ever"
        self.waiting.pop(0)()


class Rig:
    def __init__(self, *, records=1, retries=0, then="halt", grace_s=60.0, report_s=1_000.0,
                 backoff_s=0.0):  # fmt: skip
        self.processor, self.host = Processor(), Host()
        self.entries = LiveEntries({}, refused, None, 10**9)
        self.manual = Manual(self.processor)
        context = Context(
            application="a", stream="s", shard_id="0", lease_key="0", position=TRIM_HORIZON,
            options={}, fencing_token=7, uncheckpointed_max=100, checkpoint_mode="auto",
            emit=lambda row, to: None, release=lambda: None,
            prepare=lambda row, to: KeptRow(to, row["n"], 1), entries=self.entries,
        )  # fmt: skip
        policy = ErrorPolicy(retries, backoff_s, then)
        beside = Concurrency(records, "key", None, grace_s)
        self.calls = RecordCalls(
            CallTerms(self.processor, context, beside, policy, None),
            host=self.host,
            make_thread=refused,
            make_runner=runner_of if records == 1 else lambda *_: self.manual,
            wait=self.host.wait,
            report_s=report_s,
        )

    @property
    def state(self):
        state = State(self.entries)
        return {key: dict(state[key]) for key in state}

    def assert_closed(self):
        for context in self.processor.contexts:
            with pytest.raises(SinkError, match="while it runs"):
                context.emit({"n": 0})


# In order, on the thread of the caller.


@pytest.mark.parametrize("raises", [1, 2])
def test_the_context_of_a_call_that_raised_is_closed_and_its_changes_are_undone(raises):
    """The first failure ends the fast way, the second is of the window."""
    rig = Rig(retries=5)
    rig.processor.raising = {2: raises}
    assert rig.calls.run(batch(1, 2, 3))
    assert rig.processor.given == [1, *[2] * (raises + 1), 3]
    assert [row for _, rows, _ in rig.host.places for row in rows] == [1, 2, 3]
    assert rig.state == {"1": {"last": 1}, "2": {"last": 2}, "3": {"last": 3}}
    rig.assert_closed()


@pytest.mark.parametrize("records", [1, 8])
def test_a_stop_before_the_letter_is_kept_leaves_the_record_and_all_behind_it(records):
    rig = Rig(records=records, then="dead-letter")
    rig.host.let_go = lambda *_: False
    rig.processor.raising = {2: 9}
    rig.host.waiting = [rig.manual.end] * 2
    assert not rig.calls.run(batch(1, 2, 3, key=lambda number: "b" if number == 1 else "a"))
    assert rig.host.places == [(1, [1], 1)]
    assert rig.processor.given == [1, 2]
    assert rig.state == {"b": {"last": 1}}


def test_a_report_comes_once_the_rows_are_a_sixteenth_of_what_an_output_holds():
    assert ProducerSettings().buffer_bytes_max == 16 * module.REPORT_BYTES


def kept_bytes():
    rig = Rig()
    rig.calls.run(batch(1))
    return rig.processor.contexts[0].kept_bytes


@pytest.mark.parametrize("records", [1, 8])
def test_rows_that_take_much_memory_are_reported_before_their_time(monkeypatch, records):
    monkeypatch.setattr(module, "REPORT_BYTES", 3 * kept_bytes())
    rig = Rig(records=records)
    rig.host.waiting = [lambda: rig.manual.end(0, 1), lambda: rig.manual.end(2), rig.manual.end]
    assert rig.calls.run(batch(*range(1, 9)))
    assert [upto for upto, _, _ in rig.host.places] == ([3, 6, 8] if records == 1 else [3, 8])
    assert [row for _, rows, _ in rig.host.places for row in rows] == list(range(1, 9))


def test_a_change_is_looked_at_once_between_two_records():
    rig = Rig()
    rig.processor.looks = lambda number: rig.calls.wake() if number == 1 else None
    assert rig.calls.run(batch(*range(1, 9)))
    assert rig.host.stop_looks <= 3


def test_the_host_is_given_each_wait_of_a_row_of_waits_and_their_end_once():
    rig = Rig()
    asked, waited = [], []
    rig.host.raised = lambda number, record, raised: asked.append((number, raised.waits))
    rig.host.waited = waited.append
    tries = iter([RetryLater(1.0), RetryLater(1.0), None, RetryLater(1.0), None])

    def look(_):
        if (error := next(tries)) is not None:
            rig.host.at += 1.0
            raise error

    rig.processor.looks = look
    rig.host.wait = lambda pause_s: setattr(rig.host, "at", rig.host.at + (pause_s or 0.0))
    rig.calls._wait = rig.host.wait
    assert rig.calls.run(batch(1, 2))
    assert asked == [(0, 1), (0, 2), (1, 1)]
    assert [row.tries for row in waited] == [2, 1]


def test_a_record_that_halts_the_lease_comes_with_its_last_error_and_all_its_calls():
    rig = Rig(retries=1)
    rig.processor.raising = {1: 9}
    halts = []
    rig.host.halt = lambda number, record, failing, reason: halts.append((record, failing))
    rig.host.waiting = [lambda: None]
    assert not rig.calls.run(batch(1))
    ((record, failing),) = halts
    assert (record.data, str(failing.error), failing.calls) == (b"1", "1", 2)
    assert failing.failure.error == "ValueError: 1"


def test_an_error_that_is_not_of_user_code_ends_the_run():
    rig = Rig(retries=5)
    rig.processor.raising = {1: 1}
    rig.host.ends_run = lambda error: isinstance(error, ValueError)
    with pytest.raises(ValueError, match="1"):
        rig.calls.run(batch(1))
    assert rig.host.raises == []


def test_rows_that_are_not_taken_end_the_run_and_take_the_changes_back():
    rig = Rig(report_s=0.0)
    rig.host.refuses = True
    assert not rig.calls.run(batch(1, 2, 3))
    assert rig.processor.given == [1], "nothing starts after a stop"
    assert rig.host.offers == 1, "what was refused is not offered again"
    assert rig.state == {}
    rig.assert_closed()
    rig.host.refuses = False
    assert rig.calls.run(batch(1, 2, 3)), "the next run begins anew"
    assert rig.state == {"1": {"last": 1}, "2": {"last": 2}, "3": {"last": 3}}


def test_a_halt_whose_rows_before_it_are_refused_is_left_to_the_next_run():
    rig = Rig()
    rig.processor.raising = {2: 9}
    rig.host.refuses = True
    assert not rig.calls.run(batch(1, 2, 3))
    assert rig.host.halts == []


def test_past_the_fence_the_fast_way_ends_behind_a_report():
    rig = Rig(report_s=0.0)
    rig.host.may = False
    given = []

    def renewed():
        given.extend(rig.processor.given)
        rig.host.may = True

    rig.host.waiting = [renewed]
    assert rig.calls.run(batch(1, 2, 3))
    assert given == [1], "past the fence nothing starts"
    assert rig.processor.given == [1, 2, 3]
    assert rig.host.places[0] == (1, [1], 1)


# Beside each other, by a runner that the test drives.


def test_a_call_that_raises_beside_others_closes_its_context_and_undoes_its_changes():
    rig = Rig(records=4, retries=5)
    rig.processor.raising = {2: 1}
    rig.host.waiting = [rig.manual.end, rig.manual.end]
    assert rig.calls.run(batch(1, 2, 3))
    assert rig.processor.given == [1, 2, 3, 2]
    assert rig.state == {"1": {"last": 1}, "2": {"last": 2}, "3": {"last": 3}}
    assert [row for _, rows, _ in rig.host.places for row in rows] == [1, 2, 3]
    rig.assert_closed()


def test_batches_join_and_each_ends_with_a_report():
    rig = Rig(records=8)
    rig.host.joins = [batch(3, 4, last=5), batch(6)]
    rig.host.waiting = [rig.manual.end] * 2
    assert rig.calls.run(batch(1, 2))
    assert rig.host.done == [2, 5, 6]
    assert [upto for upto, _, _ in rig.host.places] == [2, 5, 6]
    assert rig.host.asked >= 3


def test_no_batch_joins_beyond_the_records_that_may_wait():
    rig = Rig(records=2)
    count = AHEAD_MAX // 2 + 1
    numbers = itertools.count(1)
    rig.host.more = lambda: batch(*itertools.islice(numbers, count), key=lambda _: "one")
    rig.host.waiting = [lambda: setattr(rig.host, "stops", Stop(is_lost=True)), rig.manual.end]
    rig.calls.run(rig.host.more())
    assert next(numbers) <= AHEAD_MAX + 2 * count


def test_a_stop_starts_nothing_above_and_cancels_once_after_a_part_of_the_grace():
    rig = Rig(records=8, grace_s=20.0)
    host = rig.host
    host.waiting = [
        lambda: setattr(host, "stops", Stop()),
        lambda: setattr(host, "at", 100.0 + rig.calls._concurrency.cancel_after_s - 0.1),
        lambda: setattr(host, "at", 100.0 + rig.calls._concurrency.cancel_after_s),
        lambda: None,
        rig.manual.end,
    ]
    cancelled = []
    host.wait = _noting(host.wait, lambda: cancelled.append(rig.manual.cancelled))
    rig.calls._wait = host.wait
    asked_before = 2
    assert rig.calls.run(batch(1, 2))
    assert cancelled == [0, 0, 0, 1, 1]
    assert host.pauses[3:] == [None, None], "nothing else is due, so nothing wakes for it"
    assert host.asked <= asked_before, "a stop lets no batch join"
    assert host.pauses[1] == pytest.approx(rig.calls._concurrency.cancel_after_s)


def test_a_lost_lease_cancels_at_once():
    rig = Rig(records=8, grace_s=20.0)
    rig.host.stops = Stop(is_lost=True)
    assert not rig.calls.run(batch(1, 2))
    assert (rig.manual.cancelled, rig.manual.started) == (1, [])


def test_what_is_done_behind_a_record_that_is_left_is_undone_and_closed():
    rig = Rig(records=8)
    host = rig.host
    host.waiting = [
        lambda: rig.manual.end(1),
        lambda: setattr(host, "stops", Stop(is_lost=True)),
        lambda: rig.manual.ended.append(Ended(0, ValueError("cancelled"), is_cancelled=True)),
    ]
    assert not rig.calls.run(batch(1, 2))
    assert (host.places, rig.state) == ([], {})
    assert (host.raises, host.halts) == ([], []), "a call that was cancelled did not fail"
    rig.assert_closed()


def test_what_is_done_of_one_key_is_undone_the_last_change_first():
    rig = Rig(records=8)
    host = rig.host
    host.waiting = [
        lambda: rig.manual.end(1),
        lambda: rig.manual.end(2),
        lambda: setattr(host, "stops", Stop(is_lost=True)),
        lambda: rig.manual.ended.append(Ended(0, ValueError("cancelled"), is_cancelled=True)),
    ]
    assert not rig.calls.run(batch(1, 2, 3, key=lambda number: "a" if number == 1 else "b"))
    assert rig.processor.given == [2, 3]
    assert rig.state == {}


def test_a_lost_lease_does_not_repeat_a_call_below_one_that_runs():
    rig = Rig(records=8, retries=5)
    host = rig.host
    rig.processor.raising = {1: 1}

    def lose():
        host.at += 100.0  # its repetition is due
        host.may, host.stops = True, Stop(is_lost=True)

    def raise_first():
        host.may = False
        rig.manual.end(0)

    host.waiting = [raise_first, lose, rig.manual.end]
    assert not rig.calls.run(batch(1, 2))
    assert rig.processor.given == [1, 2]


def test_a_pause_ends_with_what_is_due_first():
    rig = Rig(records=8, report_s=1_000.0, grace_s=20.0)
    rig.host.waiting = [
        lambda: rig.manual.end(0),
        lambda: setattr(rig.host, "stops", Stop()),
        rig.manual.end,
    ]
    assert rig.calls.run(batch(1, 2))
    assert rig.host.pauses[-1] == pytest.approx(10.0)


def _noting(call, note):
    def noted(*arguments):
        note()
        return call(*arguments)

    return noted
