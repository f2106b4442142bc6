"""Single records on the main thread of a lease process, with a real queue, loop and threads."""

import asyncio
import io
import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.calling.records import CallTerms
from kclrun.calling.runners import LoopRunner
from kclrun.codec.values import decoding
from kclrun.errors import HaltShard, RetryLater, SinkError
from kclrun.lease import commands, events
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.processor import Context, KeptRow, RecordProcessor
from kclrun.protocol.reports import (
    ProcessorFailed,
    ProcessorRaised,
    ProcessorRecovered,
    ProcessorWaited,
    RecordGivenUp,
)
from kclrun.state.keyed import LiveEntries, State
from kclrun.worker.sharing import daemon_thread
from tests.patience import HUNG_S
from tests.unit.worker import main_stage as stage
from tests.unit.worker.main_stage import Stage, p


def page(*numbers, key=str, last=None):
    return stage.page(*numbers, key=key, last=last, data=lambda number: b"%d" % number)


class Rows:
    """`places`: the rows by the position of their checkpoint; `full`: how often it takes none."""

    def __init__(self):
        self.places, self.open, self.full, self.changes = [], None, 0, []

    def begin_batch(self):
        self.open = []

    def place(self, row):
        if self.full:
            self.full -= 1
            raise SinkError("the disk is full")
        self.open.append(row.encoded)

    def place_changes(self, changes):
        self.changes += changes

    def end_batch(self, position):
        self.places.append((str(position), self.open))

    def take_back_batch(self, checkpoint=None):
        self.open = None

    @property
    def all(self):
        return [row for _, rows in self.places for row in rows]


class Held:
    """What a call does: it notes itself, waits while its number is held, then does `then`."""

    def __init__(self):
        self.began, self.gates, self.then = [], {}, {}
        self.changed = threading.Condition()

    def note(self, number):
        with self.changed:
            self.began.append(number)
            self.changed.notify_all()

    def until_began(self, *numbers):
        with self.changed:
            found = self.changed.wait_for(lambda: set(numbers) <= set(self.began), HUNG_S)
            assert found, self.began

    def end(self, number, record, context):
        context.emit({"n": number})
        context.counter("calls").add(record)
        context.state[record]["last"] = number
        if self.then.get(number):
            self.then[number].pop(0)(record)


class Tasks(RecordProcessor):
    def __init__(self, held):
        self.held = held

    async def process_record(self, record, context):
        number = int(record.data)
        self.held.note(number)
        gate = self.held.gates.get(number)
        while gate is not None and not gate.is_set():
            await asyncio.sleep(0.001)
        self.held.end(number, record, context)


class Threads(RecordProcessor):
    def __init__(self, held):
        self.held = held

    def process_record(self, record, context):
        number = int(record.data)
        self.held.note(number)
        if number in self.held.gates:
            assert self.held.gates[number].wait(HUNG_S)
        self.held.end(number, record, context)


class Swallows(Tasks):
    async def process_record(self, record, context):
        try:
            await super().process_record(record, context)
        except asyncio.CancelledError:
            self.held.end(int(record.data), record, context)


def fails(_):
    raise ValueError("as it is in the test")


def refused(*_):
    raise AssertionError("single records keep their changes themselves")


class Main(Stage):
    """A deliverer of single records."""

    def __init__(self, kind, held=(), *, records=8, retries=0, then="halt", timeout_s=None,
                 grace_s=60.0, clock=None, decode=None):  # fmt: skip
        self.held = Held()
        self.held.gates = {number: threading.Event() for number in held}
        self.processor = kind(self.held)
        self.rows, self.letters = Rows(), []
        self.entries = LiveEntries({}, refused, None, 10**6, threading.Lock())
        self.clock = clock or SimpleNamespace(now=0.0)
        self.concurrency = Concurrency(records, "key", timeout_s, grace_s)
        self.decoding = decode
        self.fence = 0.0
        self.policy = ErrorPolicy(retries, 0.0, then)
        super().__init__(
            self.policy,
            lambda: self.clock.now + 1.0,
            keep_letter=lambda record, failure, calls: self.letters.append(
                (int(record.data), calls)
            ),
        )

    def prepare(self, row):
        context = Context(
            application="a", stream="s", shard_id="0", lease_key="0", position=row.checkpoint,
            options={}, fencing_token=7, uncheckpointed_max=100, checkpoint_mode="auto",
            emit=lambda row, to: None, release=lambda: None,
            prepare=lambda row, to: KeptRow(to, row["n"], 1), entries=self.entries,
        )  # fmt: skip
        self.deliverer.take_records(
            CallTerms(self.processor, context, self.concurrency, self.policy, self.decoding),
            self.rows,
            fence=lambda: self.fence,
            make_thread=daemon_thread,
        )
        return self.processor, None, None

    def begin(self, *pages, fence=1_000.0):
        self.fence = fence
        return super().begin(*pages, fence=fence)

    def allow(self, fence=1_000.0):
        self.fence = fence
        self.queue.allow_delivery(commands.AllowDelivery(fence, 10**6, 10**6))

    @property
    def state(self):
        """As user code sees it outside of calls: the calls end behind the last position."""
        deadline = time.monotonic() + HUNG_S
        while self.entries.is_of_records:
            assert time.monotonic() < deadline, "the calls do not end"
            time.sleep(0.001)
        state = State(self.entries)
        return {key: dict(state[key]) for key in state}

    @property
    def processed(self):
        last = self.of(events.BatchProcessed)
        return int(last[-1].last.sequence_number) if last else None


@pytest.fixture
def start():
    mains = []

    def started(*arguments, **options):
        mains.append(Main(*arguments, **options))
        return mains[-1]

    yield started
    for main in mains:
        for gate in main.held.gates.values():
            gate.set()
        main.queue.close()
        main.thread.join(HUNG_S)
        assert not main.thread.is_alive()


KINDS = pytest.mark.parametrize("kind", [Tasks, Threads])


@KINDS
def test_a_record_sees_what_those_of_its_key_before_it_changed_committed_or_not(start, kind):
    main = start(kind, held=[11], retries=1)
    main.held.then[14] = [fails]
    main.begin(page(11, 12, 13, 14, key=lambda number: "b" if number == 11 else "a"))
    main.held.until_began(14)
    assert main.rows.changes == []
    main.held.gates[11].set()

    main.until_processed(14)

    assert main.state == {"a": {"calls": 3, "last": 14}, "b": {"calls": 1, "last": 11}}
    counts = [msgspec.msgpack.decode(each[2]) for each in main.rows.changes if each[1] == "calls"]
    assert counts == [1, 1, 2, 3]


def test_changes_of_rows_that_are_not_taken_before_a_stop_are_taken_back(start):
    main = start(Tasks)
    main.rows.full = 10**6
    main.begin(page(11, 12))
    main.wait_for(ProcessorRaised)
    main.queue.stop_delivery()

    main.wait_for(events.DeliveryStopped)

    assert main.state == {}
    assert main.entries.size_bytes == 0


class LateChange(Tasks):
    """Its first call runs out of time, and goes on in a task of its own."""

    late = None

    def __init__(self, held):
        super().__init__(held)
        self.refused = queue.SimpleQueue()

    async def process_record(self, record, context):
        context.counter("calls").add(record)
        if self.late is None:
            self.late = asyncio.create_task(self.change_later(record, context))
            await asyncio.sleep(HUNG_S)

    async def change_later(self, record, context):
        while context.is_open:
            await asyncio.sleep(0.001)
        try:
            context.counter("calls").add(record)
        except SinkError as error:
            self.refused.put(error)


def test_a_call_that_ran_out_of_time_leaves_no_change_and_makes_none_later(start):
    main = start(LateChange, timeout_s=0.02, retries=1).begin(page(11))

    main.until_processed(11)

    assert main.state == {"11": {"calls": 1}}
    assert "while it runs" in str(main.processor.refused.get(timeout=HUNG_S))
    assert main.state == {"11": {"calls": 1}}


@KINDS
def test_a_page_that_comes_meanwhile_joins_and_rows_end_with_their_batch(start, kind):
    main = start(kind, held=[11]).begin(page(11, 12))
    main.held.until_began(11)
    main.queue.put(page(21, last=29))
    main.held.until_began(21)
    main.held.gates[11].set()
    main.until_processed(29)

    assert [place for place, _ in main.rows.places][-2:] == ["12", "29"]
    assert main.rows.all == [11, 12, 21]


@KINDS
def test_a_stop_waits_for_what_runs_fills_the_gap_and_starts_nothing_above(start, kind):
    # 12 is of 11's key, and waits for it; 13 is done; 14 and 15 have no room.
    main = start(kind, held=[11, 13], records=2)
    main.begin(page(11, 12, 13, 14, 15, key=lambda number: "a" if number < 13 else str(number)))
    main.held.until_began(11, 13)
    main.queue.stop_delivery()
    for gate in main.held.gates.values():
        gate.set()

    main.wait_for(events.DeliveryStopped)

    assert sorted(main.held.began) == [11, 12, 13]
    assert (main.processed, main.rows.all) == (13, [11, 12, 13])
    assert main.checkpoints.given == p(13)


@pytest.mark.parametrize(("kind", "processed"), [(Tasks, 11), (Swallows, 13)])
def test_after_half_of_the_grace_coroutines_are_cancelled_and_one_that_swallows_it_is_done(
    start, kind, processed
):
    main = start(kind, held=[12], grace_s=0.02).begin(page(11, 12, 13))
    main.held.until_began(11, 12, 13)
    main.queue.stop_delivery()

    main.wait_for(events.DeliveryStopped)

    assert main.processed == processed
    assert not main.of(ProcessorRaised)
    # What 13 changed is left to the next owner with its record.
    assert main.state.keys() == {str(number) for number in range(11, processed + 1)}


def test_a_lost_lease_cancels_at_once_and_starts_nothing(start):
    main = start(Tasks, held=[11], records=1).begin(page(11, 12))
    main.held.until_began(11)
    main.fence = None
    main.queue.stop_delivery()

    main.wait_for(events.DeliveryStopped)

    assert (main.held.began, main.processed) == ([11], None)


@KINDS
def test_past_the_fence_no_record_starts_until_the_lease_is_renewed(start, kind):
    main = start(kind, held=[11], records=2).begin(page(11, 12, key=lambda _: "a"), fence=50.0)
    main.held.until_began(11)
    main.clock.now = 60.0
    main.held.gates[11].set()
    main.until_processed(11)
    assert main.held.began == [11]

    main.allow()

    main.until_processed(12)


@pytest.mark.seconds
def test_a_stop_fills_a_gap_only_before_the_fence_and_goes_on_once_it_moves(start):
    main = start(Tasks, held=[11, 13], records=2)
    main.begin(page(11, 12, 13, key=lambda number: "a" if number < 13 else "b"), fence=50.0)
    main.held.until_began(11, 13)
    main.queue.stop_delivery()
    main.clock.now = 60.0
    for gate in main.held.gates.values():
        gate.set()
    main.until_processed(11)
    assert main.held.began == [11, 13]

    main.fence = 100.0  # a renewal, which gives no permit any more

    main.until_processed(13)
    assert main.held.began == [11, 13, 12]


@KINDS
def test_a_record_is_repeated_alone_and_its_former_rows_are_gone(start, kind):
    def fails(_):
        raise ValueError("no")

    main = start(kind, retries=1)
    main.held.then[12] = [fails]
    main.begin(page(11, 12, 13))

    main.until_processed(13)

    assert sorted(main.held.began) == [11, 12, 12, 13]
    assert main.rows.all == [11, 12, 13]
    (raised,), (recovered,) = main.of(ProcessorRaised), main.of(ProcessorRecovered)
    assert (raised.where, raised.error) == ("process_record", "ValueError: no")
    assert (recovered.where, recovered.attempts) == ("process_record", 2)


@KINDS
def test_records_that_ask_for_later_are_one_wait_and_no_attempt(start, kind):
    def later(_):
        raise RetryLater(0.0, "away")

    main = start(kind, retries=0)
    main.held.then[11] = [later, later]
    main.held.then[12] = [later]
    main.begin(page(11, 12, 13))

    main.until_processed(13)

    asked = main.of(ProcessorRaised)
    assert [each.attempts for each in asked] == [0, 0, 0]
    waited = main.of(ProcessorWaited)
    # The second record may wait for the first time when the first one does no more.
    assert sum(each.tries for each in waited) == len(asked) == 3
    assert len(waited) == sum(each.waits == 1 for each in asked)
    assert not main.of(ProcessorRecovered)


@KINDS
def test_one_among_others_becomes_a_letter_once_all_before_it_are_done(start, kind):
    def fails(_):
        raise ValueError("no")

    main = start(kind, held=[11], then="dead-letter", retries=1)
    main.held.then[12] = [fails] * 2
    main.begin(page(11, 12, 13))
    main.held.until_began(11, 13)
    assert main.letters == []
    main.held.gates[11].set()

    main.until_processed(13)

    assert main.letters == [(12, 2)]
    assert main.rows.all == [11, 13]
    assert [str(each.position) for each in main.of(RecordGivenUp)] == [str(p(12))]


@pytest.mark.parametrize(("kind", "records"), [(Tasks, 8), (Threads, 8), (Threads, 1)])
def test_a_halt_covers_what_is_before_it_and_names_its_record(start, kind, records):
    def halts(_):
        raise HaltShard("stop here")

    main = start(kind, records=records)
    main.held.then[12] = [halts]
    main.begin(page(11, 12, 13))

    failed = main.wait_for(ProcessorFailed)

    assert (failed.where, failed.error, failed.position) == ("process_record", "stop here", p(12))
    assert (main.processed, main.rows.all) == (11, [11])


@pytest.mark.seconds
def test_a_place_that_takes_no_row_is_tried_again_and_reported(start):
    main = start(Tasks)
    main.rows.full = 1
    main.begin(page(11, 12))

    main.until_processed(12)

    assert main.rows.all == [11, 12]
    assert main.of(ProcessorRaised)[0].error == "the disk is full"


def test_in_order_a_stop_ends_between_two_records(start):
    main = start(Threads, held=[12], records=1).begin(page(11, 12, 13))
    main.held.until_began(12)
    main.queue.stop_delivery()
    main.held.gates[12].set()

    main.wait_for(events.DeliveryStopped)

    assert (main.held.began, main.processed) == ([11, 12], 12)


def test_a_value_is_decoded_anew_at_each_call(start):
    seen = []

    def fails(record):
        seen.append(record.value)
        raise ValueError("no")

    main = start(Tasks, retries=1, decode=decoding(lambda data: [int(data)]))
    main.held.then[11] = [fails, lambda record: seen.append(record.value)]
    main.begin(page(11))

    main.until_processed(11)

    assert seen == [[11], [11]]
    assert seen[0] is not seen[1]


def test_the_stacks_name_the_record_of_a_coroutine_and_the_line_it_waits_in(start):
    main = start(Tasks, held=[11]).begin(page(11))
    main.held.until_began(11)
    file, deadline = io.StringIO(), time.monotonic() + HUNG_S
    while "process_record\n" not in file.getvalue() and time.monotonic() < deadline:
        main.deliverer.write_coroutines(file)

    assert "Coroutine of process_record for the record at 11" in file.getvalue()
    assert "await asyncio.sleep(0.001)" in file.getvalue()


def test_calls_that_got_no_thread_of_their_host_are_closed_in_order():
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    runner = LoopRunner(print, print, lambda target, name: NoThread(target=target, name=name))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        runner.start([])
    runner.close()
