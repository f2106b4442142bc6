"""A `Deliverer` on a thread of its own, with a real queue: the test is the lease thread."""

import threading

from kclrun.lease import commands, events
from kclrun.model.lease import Lease
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.worker.delivering import Deliverer
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Page, QueueLimits
from tests.patience import HUNG_S
from tests.support.delivery_host import delivery_host

ROW = Lease(key="s0", checkpoint=ExtendedSequenceNumber("10"), counter=7)


def p(number):
    return ExtendedSequenceNumber(str(number))


def page(*numbers, last=None, key=lambda _: "k", data=lambda _: b"x"):
    records = [Record(data(number), key(number), str(number)) for number in numbers]
    return Page(records, p(last or numbers[-1]), len(records), None)


class Stage:
    """`events` were posted to the lease thread, `reported` are reports. A subclass has `prepare`.
    `host` are other methods of the `DeliveryHost`."""

    def __init__(self, policy, clock, *, store=lambda _: None, **host):
        self.events, self.reported = [], []
        self.posted = threading.Condition()
        self.over = False
        self.queue = DeliveryQueue(QueueLimits(buffer_bytes=100_000, batch_max=100), clock)
        self.checkpoints = CheckpointCalls(self.post, store, lambda: self.over)
        self.deliverer = Deliverer(
            self.queue,
            delivery_host(
                post=self.post, report=self.report, prepare=self.prepare, broke=self.post, **host
            ),
            policy,
            self.checkpoints,
        )
        self.thread = threading.Thread(target=self.deliverer.serve, daemon=True)
        self.thread.start()

    def post(self, event):
        with self.posted:
            self.events.append(event)
            self.posted.notify_all()

    def report(self, report):
        with self.posted:
            self.reported.append(report)
            self.posted.notify_all()

    def begin(self, *pages, fence):
        self.queue.call(commands.CallInitialize(ROW))
        return self.deliver(*pages, fence=fence)

    def deliver(self, *pages, fence):
        for each in pages:
            self.queue.put(each)
        self.queue.allow_delivery(commands.AllowDelivery(fence, 10**6, 10**6))
        return self

    def wait_for(self, kind, count=1):
        with self.posted:
            assert self.posted.wait_for(lambda: len(self.of(kind)) >= count, HUNG_S), self.events
        return self.of(kind)[count - 1]

    def until_processed(self, number):
        """To the end of a batch; parts of it may count as processed before."""
        done = events.BatchProcessed(p(number))
        with self.posted:
            assert self.posted.wait_for(lambda: done in self.events, HUNG_S), self.events

    def of(self, kind):
        return [event for event in (*self.events, *self.reported) if isinstance(event, kind)]
