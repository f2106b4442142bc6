"""The hosts that call user code, for the contracts of `process_records` and `process_record`. A new
host is a function of `HOSTS`."""

import functools
import json
import threading
import time
from unittest import mock

from kclrun.calling.in_memory import life
from kclrun.calling.records import CallTerms
from kclrun.cli.dead_letters.user_process import LetterRows, RedriveJob, redriven
from kclrun.errors import ProcessorError
from kclrun.lease import commands, events
from kclrun.model.letter import Letter, LetterSource
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.processor import RecordProcessor
from kclrun.protocol.reports import ProcessorFailed
from kclrun.spark.processors.hosting import ProcessorHost, ProcessorJob
from kclrun.testing import run_processor
from tests.patience import HUNG_S
from tests.support.contexts import made_context
from tests.unit.worker.main_stage import Stage, p, page

SHARD = "shardId-000000000000"


class Outcome:
    """What a batch led to. `story` has each call with its records, each record that was given up,
    and each checkpoint that user code made; `rows` are those that stay; `halted` is the reason."""

    def __init__(self):
        self.story, self.rows = [], []
        self.halted = None

    @property
    def calls(self):
        return [numbers for what, *numbers in self.story if what == "call"]

    @property
    def given_up(self):
        return [numbers[0] for what, *numbers in self.story if what == "given up"]


def processor_of(code, outcome):
    """A processor whose calls are `code(batch, checkpoint, emit)`."""

    class Coded(RecordProcessor):
        def initialize(self, context):
            self.emit = context.emit

        def process_records(self, batch, checkpointer):
            outcome.story.append(("call", *(int(record.sequence_number) for record in batch)))

            def checkpoint(record=None):
                checkpointer.checkpoint(record)
                outcome.story.append(("checkpoint", None))

            return code(batch, checkpoint, self.emit)

    return Coded


batch_processor_of = processor_of


def single_processor_of(code, outcome):
    """A processor of single records, whose calls are `code(number, emit)`."""

    class Coded(RecordProcessor):
        def process_record(self, record, context):
            number = int(record.sequence_number)
            outcome.story.append(("call", number))
            code(number, context.emit)

    return Coded


class Rows:
    def __init__(self):
        self.rows, self.began = [], 0

    def emit(self, row):
        self.rows.append(row)

    def begin_batch(self):
        self.began = len(self.rows)

    def end_batch(self, position):
        pass

    def take_back_batch(self, checkpoint=None):
        del self.rows[self.began :]

    def place(self, row):
        self.rows.append(row.encoded)

    def place_changes(self, changes):
        assert not changes, "there is no state"


class Fleet(Stage):
    """A lease process: its main thread and its queue."""

    def __init__(self, kind, policy, outcome):
        self.rows = Rows()
        self.kind = kind
        self.policy = policy
        self.outcome = outcome
        super().__init__(policy, time.monotonic, keep_letter=self.keep)

    def keep(self, record, failure, calls):
        self.outcome.story.append(("given up", int(record.sequence_number)))

    def prepare(self, row):
        processor = self.kind()
        processor.emit = self.rows.emit
        return processor, self.rows, None

    def cover(self, position):
        """A checkpoint of user code is durable."""
        self.checkpoints.note_durable(position)

    def post(self, event):
        super().post(event)
        if isinstance(event, events.CheckpointRequested):
            self.cover(event.position or self.deliverer.progress.delivered)
            answer = commands.AnswerCheckpoint(event.request, commands.CheckpointAnswer.DURABLE)
            threading.Thread(target=self.checkpoints.answer, args=(answer,)).start()


class SingleFleet(Fleet):
    """The same of single records, one at a time."""

    def prepare(self, row):
        processor = self.kind()
        context = made_context(shard=SHARD, position=row.checkpoint, token=row.counter)
        self.deliverer.take_records(
            CallTerms(processor, context, Concurrency(), self.policy, None), self.rows
        )
        return processor, None, None


def wait_until_done(stage, position):
    """Until everything up to a position is done, or the lease is halted."""

    def is_done():
        return any(
            isinstance(event, ProcessorFailed)
            or (isinstance(event, events.BatchProcessed) and event.last >= position)
            for event in (*stage.events, *stage.reported)
        )

    with stage.posted:
        assert stage.posted.wait_for(is_done, HUNG_S), stage.events


def fleet(code, numbers, retries, processor_of=processor_of):
    outcome = Outcome()
    policy = ErrorPolicy(retries, 0.0, "dead-letter")
    kind = processor_of(code, outcome)
    stage = (Fleet if processor_of is batch_processor_of else SingleFleet)(kind, policy, outcome)
    return done_by(stage, page(*numbers, key=str), p(numbers[-1]))


def done_by(stage, given, position):
    """What the stage of a lease process leads to, once everything up to a position is done."""
    outcome = stage.outcome
    try:
        stage.begin(given, fence=time.monotonic() + 600)
        wait_until_done(stage, position)
        outcome.rows = stage.rows.rows
        outcome.halted = next((event.error for event in stage.of(ProcessorFailed)), None)
    finally:
        stage.over = True
        stage.queue.close()
        stage.thread.join(HUNG_S)
    return outcome


class Job(ProcessorJob, frozen=True, kw_only=True):
    """Its processor is not imported."""

    def user_code(self):
        return self.options["kind"]


def spark_task(code, numbers, retries, processor_of=processor_of):
    outcome = Outcome()
    job = Job(
        application="app",
        stream="orders",
        processor="coded:Coded",
        paths=(),
        options={"kind": processor_of(code, outcome)},
        batch_max=100,
        uncheckpointed_max=1000,
        on_error=ErrorPolicy(retries, 0.0, "dead-letter"),
        run="r1",
    )
    host = ProcessorHost(
        job,
        SHARD,
        TRIM_HORIZON,
        1,
        keep_letter=lambda letter: outcome.story.append(("given up", int(letter.sequence_number))),
        wait=lambda _: None,
    )
    try:
        host.process(page(*numbers, key=str).records)
    except ProcessorError as error:
        outcome.halted = str(error)
    for batch in host.rows.batches(all_of_them=True):
        outcome.rows += [json.loads(row) for row in batch.column("row").to_pylist()]
    return outcome


class GivenUp(list):
    """Tells the story of the records that a run of the kit gives up."""

    def __init__(self, outcome):
        self.outcome = outcome

    def append(self, record):
        super().append(record)
        self.outcome.story.append(("given up", int(record.sequence_number)))


def noting(outcome):
    made = functools.partial(life.Run, given_up=GivenUp(outcome))
    return mock.patch.object(life, "Run", made)


def kit(code, numbers, retries, processor_of=processor_of):
    outcome = Outcome()
    kind = processor_of(code, outcome)
    with noting(outcome):
        try:
            run = run_processor(
                kind,
                page(*numbers, key=str).records,
                settings={"on_error": {"retries": retries, "then": "dead-letter"}},
            )
        except Exception as error:
            outcome.halted = f"{type(error).__name__}: {error}"
        else:
            outcome.rows = run.rows
    return outcome


def redrive(code, numbers, retries, processor_of=processor_of):
    outcome = Outcome()
    letters = [
        Letter.of(
            Record(b"x", str(number), str(number)),
            LetterSource("app", "coded:Coded", "orders", SHARD),
            error="",
            raised_at="",
            traceback="",
            calls=1,
            given_up_at=0.0,
        )
        for number in numbers
    ]
    job = RedriveJob(
        processor="coded:Coded",
        import_paths=(),
        application="app",
        stream="orders",
        options={},
        retries=retries,
        batch_max=100,
        uncheckpointed_max=1000,
    )
    with noting(outcome):
        answer = redriven(job, processor_of(code, outcome), letters, LetterRows((), None))
    outcome.rows = list(answer.rows)
    if len(answer.done) + len(outcome.given_up) < len(letters):
        outcome.halted = answer.error
    return outcome


HOSTS = {"fleet": fleet, "spark": spark_task, "kit": kit, "redrive": redrive}
