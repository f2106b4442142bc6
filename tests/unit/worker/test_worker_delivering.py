"""The main thread's work with a real queue, real checkpoint calls and real threads."""

import errno
import threading
import time

import pytest

from kclrun.codec.values import decoding
from kclrun.errors import (
    FailedRecords,
    HostFailed,
    LeaseLost,
    LetterTooLarge,
    OutputLocked,
    RetryLater,
    SettingsError,
    SinkError,
    StaleCheckpoint,
)
from kclrun.lease import commands, events
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import SHARD_END
from kclrun.processor import RecordProcessor
from kclrun.protocol.reports import (
    ProcessorFailed,
    ProcessorRaised,
    RecordGivenUp,
)
from kclrun.worker.delivery_queue import CheckpointCalls, Page
from tests.patience import HUNG_S, until
from tests.unit.worker.main_stage import ROW, Stage, p, page


class Rows:
    def __init__(self):
        self.calls = []

    def begin_batch(self):
        self.calls.append("begin")

    def end_batch(self, position):
        self.calls.append(("end", str(position)))

    def take_back_batch(self, checkpoint=None):
        self.calls.append(("take back", checkpoint and str(checkpoint)))


class Scripted(RecordProcessor):
    """Does what `script` says at each call; remembers what it was given."""

    def __init__(self, script=()):
        self.script = list(script)
        self.batches, self.calls = [], []

    def _step(self, checkpointer=None, batch=None):
        """What the method returns is what a callable step returns."""
        if self.script:
            step = self.script.pop(0)
            if isinstance(step, BaseException):
                raise step
            if callable(step):
                return step(checkpointer, batch)
        return None

    def process_records(self, batch, checkpointer):
        self.batches.append([int(record.sequence_number) for record in batch])
        return self._step(checkpointer, batch)

    def shard_ended(self, checkpointer):
        self.calls.append("shard_ended")
        return self._step(checkpointer)

    def shutdown_requested(self, checkpointer):
        self.calls.append("shutdown_requested")
        return self._step(checkpointer)

    def lease_lost(self):
        self.calls.append("lease_lost")
        return self._step()


class Main(Stage):
    """A deliverer of batches."""

    def __init__(self, *script, retries=3, initialize=(), then="halt", keep_letter=None, limit=100,
                 decode=None):  # fmt: skip
        self.processor = Scripted(script)
        self.decoding = None if decode is None else decoding(decode)
        self.rows = Rows()
        self.initialize = list(initialize)
        self.covered = []
        super().__init__(
            ErrorPolicy(retries, 0.0, then, None, limit),
            time.monotonic,
            store=self.covered.append,
            keep_letter=keep_letter,
        )

    def prepare(self, row):
        if self.initialize:
            raise self.initialize.pop(0)
        return self.processor, self.rows, self.decoding

    def post(self, event):
        super().post(event)
        if isinstance(event, events.CheckpointRequested) and not self.over:
            position = event.position or self.deliverer.progress.delivered
            self.checkpoints.note_durable(position)
            answer = commands.AnswerCheckpoint(event.request, commands.CheckpointAnswer.DURABLE)
            threading.Thread(target=self.checkpoints.answer, args=(answer,)).start()

    def begin(self, *pages):
        self.queue.call(commands.CallInitialize(ROW))
        self.wait_for(events.CallReturned)
        return self.deliver(*pages, fence=time.monotonic() + 60)


@pytest.fixture
def start():
    mains = []

    def started(*script, **options):
        mains.append(Main(*script, **options))
        return mains[-1]

    yield started
    for main in mains:
        main.over = True
        main.queue.close()
        main.thread.join(HUNG_S)
        assert not main.thread.is_alive()


def test_after_its_retries_the_batch_is_given_up_and_nothing_after_it_starts(start):
    main = start(*[ValueError("x")] * 9, retries=2).begin(page(11), page(12))

    failure = main.wait_for(ProcessorFailed)
    main.queue.allow_delivery(commands.AllowDelivery(time.monotonic() + 60, 10**6, 10**6))
    main.queue.stop_delivery()
    main.wait_for(events.DeliveryStopped)

    assert main.processor.batches == [[11]] * 3
    assert (failure.where, failure.error, failure.attempts) == (
        "process_records",
        "ValueError: x",
        3,
    )
    assert failure.position == p(11)
    assert main.of(events.BatchProcessed) == []


class Letters:
    """Keeps the letters; the first `failures` times it cannot."""

    def __init__(self, failures=0):
        self.kept, self.failures = [], failures

    def __call__(self, record, failure, calls):
        if self.failures:
            self.failures -= 1
            raise SinkError("the folder is full")
        self.kept.append((int(record.sequence_number), failure.error, calls))


def poisoned(*numbers):
    """A step of the script: raises at the first of these records, with the record in a loop."""

    def step(_checkpointer, batch):
        for record in batch:
            if int(record.sequence_number) in numbers:
                raise ValueError(f"bad {record.sequence_number}")

    return [step] * 99


def test_a_record_that_cannot_be_decoded_is_buried_with_its_reason_and_without_repetition(start):
    def whole_numbers(data):
        return int(data) if data != b"13" else int("SECRET")

    def step(_checkpointer, batch):
        for record in list(batch):  # no loop over the batch itself: the error names the record
            assert record.value == int(record.sequence_number)

    letters = Letters()
    main = start(
        *[step] * 9, retries=5, then="dead-letter", keep_letter=letters, decode=whole_numbers
    )
    records = [Record(b"%d" % number, "k", str(number)) for number in (11, 12, 13, 14)]
    main.begin(Page(records, p(19), 8, None))

    main.until_processed(19)

    assert main.processor.batches == [[11, 12, 13, 14], [11, 12], [14]]
    words = "UndecodableRecord: the record at 13 cannot be decoded: it raised ValueError"
    assert letters.kept == [(13, words, 1)]
    apart, given_up, _ = main.reported
    assert (apart.error, apart.record, apart.pause_s) == (words, "3 of 4, at 13", 0.0)
    assert (given_up.position, given_up.error) == (p(13), words)
    assert given_up.raised_at.endswith(" in step")
    assert "SECRET" not in repr(main.reported)


def test_a_value_without_a_decoder_halts_the_shard_with_the_setting(start):
    main = start(lambda _, batch: batch[0].value, then="skip").begin(page(11))

    failed = main.wait_for(ProcessorFailed)
    assert failed.error.startswith("SettingsError: decode: is missing; record.value needs json,")


def test_a_record_that_is_skipped_leaves_a_report_and_no_letter(start):
    main = start(*poisoned(12), retries=0, then="skip").begin(page(11, 12))

    main.until_processed(12)

    (given_up,) = [each for each in main.reported if isinstance(each, RecordGivenUp)]
    assert (given_up.position, given_up.error, given_up.is_skipped) == (
        *(p(12), "ValueError: bad 12", True),
    )


def test_a_letter_that_can_never_be_kept_halts_the_shard_with_that_reason(start):
    def keep_letter(_record, _failure, _calls):
        raise LetterTooLarge("it does not fit into the queue")

    main = start(*poisoned(12), retries=0, then="dead-letter", keep_letter=keep_letter)
    main.begin(page(11, 12, 13), page(21))

    failure = main.wait_for(ProcessorFailed)
    assert failure.error == "it does not fit into the queue; the last error: ValueError: bad 12"
    main.queue.stop_delivery()
    main.wait_for(events.DeliveryStopped)
    assert main.processor.batches == [[11, 12, 13], [11], [12]]
    assert [each.last for each in main.of(events.BatchProcessed)] == [p(11)]


def test_nothing_goes_on_before_the_letter_is_kept(start):
    letters = Letters(failures=2)
    main = start(*poisoned(11), retries=0, then="dead-letter", keep_letter=letters)
    main.deliverer._queue.may_try_again = lambda pause_s, *, is_batch: (
        pauses.append(pause_s) or True
    )
    pauses = []
    main.begin(page(11, 12))

    main.until_processed(12)

    assert letters.kept == [(11, "ValueError: bad 11", 2)]
    assert [pause_s for pause_s in pauses if pause_s] == [1.0, 2.0]
    about = [each for each in main.reported if getattr(each, "where", "") == "dead letter"]
    assert [each.attempts for each in about] == [1, 2, 3]
    assert about[0].error == "the folder is full"


def test_a_stop_during_the_search_leaves_the_batch_unprocessed(start):
    def stops(_checkpointer, _batch):
        main.queue.stop_delivery()
        raise ValueError("x")

    letters = Letters()
    main = start(stops, retries=0, then="dead-letter", keep_letter=letters)
    main.begin(page(11, 12))

    main.wait_for(events.DeliveryStopped)

    assert main.processor.batches == [[11, 12]]
    assert (letters.kept, main.of(events.BatchProcessed)) == ([], [])


def test_user_code_names_the_records_that_failed_and_the_rows_of_the_others_stay(start):
    def names_the_second(_checkpointer, batch):
        raise FailedRecords([record for record in batch if record.sequence_number == "12"], "no")

    letters = Letters()
    main = start(*[names_the_second] * 3, retries=2, then="dead-letter", keep_letter=letters)
    main.begin(page(11, 12, 13))

    main.until_processed(13)

    assert main.processor.batches == [[11, 12, 13], [12], [12]]
    assert letters.kept == [(12, "FailedRecords: no", 3)]
    assert main.rows.calls == ["begin", ("end", "13")] * 3


@pytest.mark.parametrize("named", [[], [Record(b"x", "k", "99")]])
def test_failed_records_that_are_not_of_the_batch_are_an_error_of_the_whole_batch(start, named):
    main = start(FailedRecords(named), retries=0).begin(page(11, 12))

    failure = main.wait_for(ProcessorFailed)

    words = "FailedRecords does not name records of the batch of its call"
    assert failure.error == f"ProcessorError: {words}"
    assert "test_worker_delivering.py" in failure.raised_at
    assert ("take back", None) in main.rows.calls


def test_a_checkpoint_inside_the_batch_is_not_given_again_to_the_search(start):
    def checkpoints_and_raises(checkpointer, batch):
        checkpointer.checkpoint(batch[1])
        raise ValueError("x")

    letters = Letters()
    main = start(
        checkpoints_and_raises, *poisoned(14), retries=0, then="dead-letter", keep_letter=letters
    )
    main.begin(page(11, 12, 13, 14))

    main.until_processed(14)

    assert main.processor.batches == [[11, 12, 13, 14], [13], [14]]
    assert [number for number, _, _ in letters.kept] == [14]


def test_user_code_has_its_batch_again_later(start):
    main = start(RetryLater(0.0), RetryLater(0.0), retries=0).begin(page(11))

    main.wait_for(events.BatchProcessed)

    assert main.processor.batches == [[11]] * 3
    first, second, end = main.reported
    assert [(each.waits, each.attempts, each.traceback_text) for each in (first, second)] == [
        (1, 0, ""),
        (2, 0, ""),
    ]
    assert (end.where, end.tries) == ("process_records", 2)
    assert end.waited_s >= 0.0


def test_a_failure_after_later_ends_the_wait_and_is_the_first_attempt(start):
    main = start(RetryLater(0.0), ValueError("bad"), RetryLater(0.0), retries=2).begin(page(11))

    main.wait_for(events.BatchProcessed)

    asked, waited, raised, again, waited_again, recovered = main.reported
    assert (asked.waits, waited.tries, again.waits, waited_again.tries) == (1, 1, 1, 1)
    assert (raised.waits, raised.attempts, raised.error) == (0, 1, "ValueError: bad")
    assert "ValueError" in raised.traceback_text
    assert (recovered.where, recovered.attempts) == ("process_records", 2)


def test_more_than_the_limit_halts_with_words_before_the_last_error(start):
    letters = Letters()
    main = start(*poisoned(12, 13), retries=0, then="dead-letter", keep_letter=letters, limit=1)
    main.begin(page(11, 12, 13))

    failure = main.wait_for(ProcessorFailed)

    assert failure.error.startswith("1 records were given up within 10 minutes")
    assert failure.error.endswith("; the last error: ValueError: bad 13")
    assert [number for number, _, _ in letters.kept] == [12]
    assert [each.last for each in main.of(events.BatchProcessed)] == [p(11), p(12)]


def test_a_checkpoint_in_a_part_of_a_batch_covers_that_part_and_letters_come_first(start):
    """`checkpoint()` means all records given so far; the first is given up and has no letter."""
    order = []

    class Asking(Letters):
        def __call__(self, record, failure, calls):
            order.append(f"letter {record.sequence_number}")
            super().__call__(record, failure, calls)

    def checkpoints(checkpointer, batch):
        if batch[0].sequence_number == "11":
            raise ValueError("bad")
        checkpointer.checkpoint()
        order.append(f"checkpointed {main.checkpoints.durable}")

    letters = Asking()
    main = start(*[checkpoints] * 9, retries=0, then="dead-letter", keep_letter=letters)
    main.begin(page(11, 12, 13, last=19))

    main.until_processed(19)

    assert main.processor.batches == [[11, 12, 13], [11], [12, 13]]
    assert order == ["letter 11", "checkpointed 19"]
    asked = [each.position for each in main.of(events.CheckpointRequested)]
    assert asked == [p(19)]


def test_a_checkpoint_that_a_letter_is_missing_for_is_none(start):
    def checkpoints(checkpointer, batch):
        if batch[0].sequence_number == "11":
            raise ValueError("bad")
        checkpointer.checkpoint()

    letters = Letters(failures=1)
    main = start(*[checkpoints] * 9, retries=0, then="dead-letter", keep_letter=letters)
    main.begin(page(11, 12))

    main.until_processed(12)

    # The call raised what the folder did, so its record was given alone, and up.
    assert [number for number, _, _ in letters.kept] == [11, 12]
    assert main.of(events.CheckpointRequested) == []


def test_a_failure_that_is_given_up_at_once_brings_its_traceback(start):
    main = start(ValueError("x"), retries=0).begin(page(11))

    assert "ValueError: x" in main.wait_for(ProcessorFailed).traceback_text


def test_a_batch_that_is_covered_wholly_is_not_given_again_at_all(start):
    def checkpoint_then_raise(checkpointer, batch):
        checkpointer.checkpoint()
        raise ValueError("after the checkpoint")

    main = start(checkpoint_then_raise).begin(page(11, 12))

    main.wait_for(events.BatchProcessed)

    assert main.processor.batches == [[11, 12]]


def test_a_page_without_records_calls_no_user_code(start):
    main = start().begin(page(last=19))

    assert main.wait_for(events.BatchProcessed) == events.BatchProcessed(p(19))
    assert main.processor.batches == []
    assert main.rows.calls == []


def test_an_error_that_cannot_even_be_printed_is_reported_by_its_name(start):
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError

    main = start(Unspeakable(), retries=0).begin(page(11))

    assert main.wait_for(ProcessorFailed).error == "Unspeakable"


def test_initialize_is_tried_again_with_a_fresh_processor(start):
    main = start(initialize=[ValueError("not yet")])

    main.begin()

    assert isinstance(main.reported[0], ProcessorRaised)
    assert main.of(ProcessorFailed) == []


def test_a_setting_that_is_wrong_is_not_tried_again(start):
    main = start(initialize=[SettingsError("repair it")] * 9)
    main.queue.call(commands.CallInitialize(ROW))

    assert main.wait_for(ProcessorFailed).attempts == 1


async def work():
    pass


def test_a_method_that_returns_a_coroutine_halts_at_once_and_its_batch_does_not_count(start):
    """Nothing of it has run: a checkpoint that passed it would drop the batch silently."""
    main = start(lambda *_: work()).begin(page(11), page(12))

    failure = main.wait_for(ProcessorFailed)

    assert (failure.where, failure.attempts) == ("process_records", 1)
    assert "process_records returned a coroutine, and nothing of it has run" in failure.error
    assert main.rows.calls == ["begin", ("take back", None)]
    assert main.of(events.BatchProcessed) == []
    assert main.processor.batches == [[11]]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (commands.CallShardEnded(), "shard_ended"),
        (commands.CallShutdownRequested(), "shutdown_requested"),
        (commands.CallLeaseLost(), "lease_lost"),
    ],
)
def test_the_other_methods_that_return_work_to_be_done_fail_too(start, call, name):
    main = start(lambda *_: work()).begin()

    main.queue.call(call)

    assert main.wait_for(ProcessorFailed).where == name


@pytest.mark.parametrize("error", [ValueError("x"), FailedRecords([])])
def test_shard_ended_is_repeated_and_its_rows_belong_to_the_end(start, error):
    main = start(error).begin()
    main.queue.call(commands.CallShardEnded())

    main.wait_for(events.CallReturned, 2)

    assert main.processor.calls == ["shard_ended"] * 2
    assert main.rows.calls == ["begin", ("take back", None), "begin", ("end", str(SHARD_END))]


def test_a_checkpoint_that_shard_ended_asks_for_covers_no_rows_of_it(start):
    """Its process may end before SHARD_END is on the row: then it is called, and emits, again."""
    save = lambda checkpointer, _: checkpointer.checkpoint()  # noqa: E731
    main = start(save, save).begin(page(11, 12))
    main.wait_for(events.BatchProcessed)
    main.queue.call(commands.CallShardEnded())

    main.wait_for(events.CallReturned, 2)

    assert len(main.of(events.CheckpointRequested)) == 2
    assert main.covered == [None], "of process_records alone"
    assert main.rows.calls[-1] == ("end", str(SHARD_END))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (commands.CallShutdownRequested(), "shutdown_requested"),
        (commands.CallLeaseLost(), "lease_lost"),
    ],
)
def test_the_last_calls_are_made_once(start, call, name):
    main = start(ValueError("x")).begin()
    main.queue.call(call)

    assert main.wait_for(ProcessorFailed).where == name
    main.queue.call(call)
    main.wait_for(events.CallReturned, 2)

    assert main.processor.calls == [name] * 2


def test_a_retry_is_called_off_when_delivery_is_stopped(start):
    shut = threading.Event()

    def shut_then_raise(checkpointer, batch):
        main.queue.stop_delivery()
        shut.set()
        raise ValueError("x")

    main = start(shut_then_raise).begin(page(11))

    main.wait_for(events.DeliveryStopped)

    assert main.processor.batches == [[11]]
    assert main.of(events.BatchProcessed) == []


def test_the_end_of_the_pages_is_reported(start):
    main = start().begin()
    main.queue.finish(())

    assert main.wait_for(events.ShardExhausted) == events.ShardExhausted(())


# Checkpoint calls


class Asked:
    def __init__(self):
        self.requests, self.over = [], False
        self.covered = []
        self.queue = CheckpointCalls(self.requests.append, self.covered.append, lambda: self.over)

    def ask(self, count=1, position=None):
        """`count` threads ask at once; their outcomes by the order they were asked."""
        outcomes = {}

        def checkpoint(number):
            try:
                self.queue.checkpointer.checkpoint(position)
                outcomes[number] = "durable"
            except (LeaseLost, StaleCheckpoint) as error:
                outcomes[number] = error

        threads = [threading.Thread(target=checkpoint, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        until(lambda: len(self.requests) >= count, every_s=0.001)
        return threads, outcomes


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (commands.CheckpointAnswer.LOST, LeaseLost),
        (commands.CheckpointAnswer.STALE, StaleCheckpoint),
    ],
)
def test_an_answer_other_than_durable_raises_in_user_code(answer, kind):
    asked = Asked()
    (thread,), outcomes = asked.ask(position="12")
    asked.queue.answer(commands.AnswerCheckpoint(1, answer, "the detail"))
    thread.join(HUNG_S)

    assert isinstance(outcomes[0], kind)
    assert "the detail" in str(outcomes[0])
    assert asked.requests == [events.CheckpointRequested(1, p(12))]
    assert asked.covered == [p(12)]


def test_threads_that_ask_at_once_each_get_their_answer():
    asked = Asked()
    threads, outcomes = asked.ask(8)
    for request in reversed(asked.requests):
        asked.queue.answer(
            commands.AnswerCheckpoint(request.request, commands.CheckpointAnswer.DURABLE)
        )
    for thread in threads:
        thread.join(HUNG_S)

    assert outcomes == dict.fromkeys(range(8), "durable")
    assert len({each.request for each in asked.requests}) == 8


@pytest.mark.seconds
def test_nobody_waits_for_a_lease_thread_that_is_gone():
    asked = Asked()
    (thread,), outcomes = asked.ask()
    asked.over = True
    thread.join(HUNG_S)
    asked.queue.answer(commands.AnswerCheckpoint(1, commands.CheckpointAnswer.DURABLE))

    assert isinstance(outcomes[0], LeaseLost)


@pytest.mark.parametrize(
    "error",
    [
        OutputLocked("s0.jsonl is locked by another process"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
)
def test_what_the_host_lacks_at_the_start_ends_the_process_and_never_halts_the_lease(start, error):
    """At once: to wait for it is the manager's, who may know of another host."""
    main = start(retries=5, initialize=[error])

    main.queue.call(commands.CallInitialize(ROW))

    assert "initialize failed: " in str(main.wait_for(HostFailed))
    assert main.reported == []
    assert main.of(ProcessorFailed) == []


def test_the_cause_of_an_error_counts_as_the_error_does(start):
    main = start(retries=0, initialize=[caused_by_a_full_disk()])

    main.queue.call(commands.CallInitialize(ROW))

    assert "cannot write" in str(main.wait_for(HostFailed))


def caused_by_a_full_disk():
    error = SinkError("cannot write s0.jsonl")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error
