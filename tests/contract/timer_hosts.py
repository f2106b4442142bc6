"""The hosts that call `on_timer`, for the contract of timers. A new host is a function of
`HOSTS`. The redrive of letters has no state, and so no timers."""

import json

from kclrun.calling.in_memory.states import Ledger, MemoryState, Timing
from kclrun.errors import ProcessorError
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import ALL_HASH_KEYS, Shard, ShardGraph
from kclrun.model.state import StateDestination, Watermarks
from kclrun.processor import RecordProcessor
from kclrun.spark import positions
from kclrun.spark.keyed.names import QueryPlace
from kclrun.spark.keyed.query_state import QueryState
from kclrun.spark.keyed.shard_state import ShardState
from kclrun.spark.offsets import Offset, StreamIs
from kclrun.spark.processors.hosting import ProcessorHost
from kclrun.state.event_times import EventTimes
from kclrun.testing import run_processor
from kclrun.worker.timer_delivering import TimerClocks
from tests.contract.user_code_hosts import SHARD, Fleet, Job, Outcome, done_by
from tests.support.contexts import made_context
from tests.support.memory_versions import MemoryVersions, Versions
from tests.unit.worker.main_stage import Page, p

WATERMARKS = Watermarks(lateness_s=0.0, every_s=1.0)
# A timer of each key is set for a time behind all records but the last, which lets them fire.
KEYS = ("a", "b", "c")
FIRES_AT = 50.0
RECORDS = tuple(
    Record(b"x", key, str(number), approximate_arrival_timestamp=float(arrived_at))
    for number, (key, arrived_at) in enumerate(
        [*((key, at) for at, key in enumerate(KEYS, 1)), ("z", 100)], start=11
    )
)


def processor_of(code, outcome):
    """A processor whose `on_timer` is `code(key, checkpoint, emit)`."""

    class Coded(RecordProcessor):
        def initialize(self, context):
            self.context = context

        def process_records(self, batch, checkpointer):
            for record in batch:
                if record.partition_key in KEYS:
                    at = FIRES_AT + record.approximate_arrival_timestamp
                    self.context.set_timer(record, at)

        def on_timer(self, timer, checkpointer):
            outcome.story.append(("call", timer.key))

            def checkpoint():
                checkpointer.checkpoint()
                outcome.story.append(("checkpoint", None))

            code(timer.key, checkpoint, self.context.emit)

    return Coded


class TimedFleet(Fleet):
    """A lease process with state: the ledger of the test kit in place of outputs and a table."""

    def prepare(self, row):
        state = MemoryState(Timing(0.0, 1.0, None))
        self.ledger = Ledger(row.checkpoint, state)
        run = state.run_timers(row.checkpoint, EventTimes())
        processor = self.kind()
        processor.initialize(
            made_context(
                shard=SHARD,
                position=row.checkpoint,
                token=row.counter,
                rows=self.ledger,
                state=state.live,
            )
        )
        self.deliverer.take_timers(run, processor, self.ledger, TimerClocks(None))
        return processor, self.ledger, None

    @property
    def rows(self):
        return self.ledger

    @rows.setter
    def rows(self, _):
        """The ledger is made in `prepare`."""

    def cover(self, position):
        super().cover(position)
        self.ledger.delivered = position
        self.ledger.checkpoint(position)


def fleet(code, retries):
    outcome = Outcome()
    stage = TimedFleet(processor_of(code, outcome), ErrorPolicy(retries, 0.0), outcome)
    return done_by(stage, Page([*RECORDS], p(14), len(RECORDS), None), p(14).at_tick(len(KEYS)))


def spark_task(code, retries):
    outcome = Outcome()
    lineage, graph = "a" * 32, ShardGraph([Shard(SHARD, ALL_HASH_KEYS, "0", None)])
    begin = positions.TRIM_HORIZON
    store = MemoryVersions(Versions())
    query = QueryState(
        lambda _: store, lambda: graph, None, token=1 << 32, retain_s=3600.0, may_begin_empty=False
    )
    at = Offset(streams={"": StreamIs("arn", 0)}, shards={SHARD: begin})
    query.begin(lineage, at, at)
    state = ShardState(store, query.batch(lineage, [SHARD]), SHARD, begin, token=1, max_bytes=2**20)
    job = Job(
        application="app",
        stream="orders",
        processor="coded:Coded",
        paths=(),
        options={"kind": processor_of(code, outcome)},
        batch_max=100,
        uncheckpointed_max=1000,
        on_error=ErrorPolicy(retries, 0.0),
        run="r1",
        state=QueryPlace(StateDestination(path="unused", watermarks=WATERMARKS), "app", "orders"),
    )
    host = ProcessorHost(
        job, SHARD, TRIM_HORIZON, 1, keep_letter=lambda _: None, state=state, wait=lambda _: None
    )
    try:
        host.process(RECORDS)
    except ProcessorError as error:
        outcome.halted = str(error)
    for batch in host.rows.batches(all_of_them=True):
        outcome.rows += [json.loads(row) for row in batch.column("row").to_pylist()]
    return outcome


def kit(code, retries):
    outcome = Outcome()
    kind = processor_of(code, outcome)
    try:
        run = run_processor(
            kind,
            RECORDS,
            settings={"on_error": {"retries": retries}, "watermark": {"lateness": "0s"}},
            end_of_shard=False,
        )
    except Exception as error:
        outcome.halted = f"{type(error).__name__}: {error}"
    else:
        outcome.rows = run.rows
    return outcome


HOSTS = {"fleet": fleet, "spark": spark_task, "kit": kit}
