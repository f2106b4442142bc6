"""Row `records`: single records at the same time against one at a time, and what a call costs."""

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final

from bench.figures import Figure, Target, figure, paired_ratios
from bench.measuring import interleaved, timed
from kclrun.calling.records import CallTerms
from kclrun.ipc.board import boottime
from kclrun.lease import commands, events
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Decoding, Record, RecordBatch
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.processor import Checkpointer, Context, KeptRow, RecordContext, RecordProcessor
from kclrun.state.keyed import Undoable
from kclrun.worker.delivering import Deliverer
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Page, QueueLimits
from kclrun.worker.sharing import daemon_thread

_RECORDS: Final = 10_000
# One at a time, 10,000 records take half a minute: a tenth of them says as much.
_SERIAL_RECORDS: Final = 1_000
_WORK_MAX_S: Final = 0.005
# The queue takes 30,000 records ahead.
_NO_OP_BATCHES: Final = 3
_SEED: Final = 15


class _Awaits(RecordProcessor):
    """0 to 5 ms of waiting for a record, as of a service that answers."""

    async def process_record(self, record: Record, context: RecordContext) -> None:
        await asyncio.sleep(float(record.data))


class _Nothing(RecordProcessor):
    def process_record(self, record: Record, context: RecordContext) -> None:
        pass


class _NothingOfBatches(RecordProcessor):
    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        for _ in batch:
            pass


class _NoRows:
    def begin_batch(self) -> None: ...

    def end_batch(self, position: ExtendedSequenceNumber, /) -> None: ...

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None, /) -> None: ...

    def place(self, row: KeptRow, /) -> None: ...

    def place_changes(self, changes: Sequence[Undoable], /) -> None: ...


def _page(records: int, keys: int) -> Page:
    chance = random.Random(_SEED)
    made = [
        Record(b"%.6f" % (chance.random() * _WORK_MAX_S), f"key-{number % keys}", str(number + 1))
        for number in range(records)
    ]
    return Page(made, made[-1].position, records, None)


def _deliver(processor: RecordProcessor, pages: list[Page], concurrency: int) -> float:
    """Deliver the pages as the main thread of a lease process does. Returns the records."""
    last = pages[-1].last

    def posted(event: events.Event) -> None:
        if isinstance(event, events.BatchProcessed) and event.last == last:
            done.append(event)
        if len(done) == len([page for page in pages if page.last == last]):
            queue.close()

    done: list[events.Event] = []
    queue = DeliveryQueue(QueueLimits(1 << 30, _RECORDS), boottime)
    policy = ErrorPolicy(0, 1.0)

    def prepare(row: Lease) -> tuple[RecordProcessor, None, Decoding | None]:
        if not isinstance(processor, _NothingOfBatches):
            deliverer.take_records(
                CallTerms(processor, _context(), Concurrency(concurrency), policy, None),
                _NoRows(),
            )
        return processor, None, None

    host = SimpleNamespace(
        post=posted,
        report=lambda _: None,
        prepare=prepare,
        broke=lambda _: None,
        keep_letter=lambda *_: None,
        settled=lambda _: None,
        sent=lambda: None,
        fence=lambda: Instant(boottime() + 3600),
        make_thread=daemon_thread,
    )
    deliverer = Deliverer(
        queue, host, policy, CheckpointCalls(posted, lambda _: None, lambda: False)
    )
    queue.call(commands.CallInitialize(Lease(key=LeaseKey("bench"), checkpoint=TRIM_HORIZON)))
    queue.allow_delivery(commands.AllowDelivery(Instant(boottime() + 3600), 1 << 40, 1 << 40))
    for page in pages:
        queue.put(page)
    deliverer.serve()
    return float(sum(len(page.records) for page in pages))


def _context() -> Context:
    from tests.support.contexts import made_context

    return made_context(uncheckpointed_max=1 << 30)


def records(rounds: int) -> list[Figure]:
    """A lease process's queue and main thread, without AWS: 10,000 records that each wait for 0 to
    5 ms, at the same time against one at a time of the same method; and a method that does nothing,
    for records against batches. Waiting is asyncio's: its clock has milliseconds, so 2.5 ms are
    some 3.5 ms in both.
    """
    figures: list[Figure] = []
    for keys, at_a_time, least in ((20, 64, 10.0), (200, 256, 40.0)):
        serial, together = [], []
        for _ in range(rounds):
            one = timed(lambda keys=keys: _deliver(_Awaits(), [_page(_SERIAL_RECORDS, keys)], 1))
            many = timed(
                lambda keys=keys, at_a_time=at_a_time: _deliver(
                    _Awaits(), [_page(_RECORDS, keys)], at_a_time
                )
            )
            serial.append(one.work / one.wall_s)
            together.append(many.work / many.wall_s)
        what = f"{keys} keys, {at_a_time} at a time"
        figures += [
            figure("records", f"{what}: async def", "records/s", together),
            figure(
                *("records", f"{what} ÷ one at a time", "x"),
                paired_ratios(together, serial),
                target=Target(at_least=least),
            ),
        ]
    return [*figures, _overhead(rounds)]


def _overhead(rounds: int) -> Figure:
    pages = [_page(_RECORDS, 200)] * _NO_OP_BATCHES
    samples = interleaved(
        {
            "records": lambda: _deliver(_Nothing(), pages, 1),
            "batches": lambda: _deliver(_NothingOfBatches(), pages, 1),
        },
        max(rounds, 5),
    )
    per_record_us = {
        name: [1e6 * each.cpu_s / each.work for each in of] for name, of in samples.items()
    }
    more_us = [
        one - other
        for one, other in zip(per_record_us["records"], per_record_us["batches"], strict=True)
    ]
    return figure(
        *("records", "no-op process_record beyond process_records, a record", "µs"),
        more_us,
        target=Target(at_most=1.5),
    )
