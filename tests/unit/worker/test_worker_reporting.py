"""What a lease process says of itself: the status slot, the ring, and one warning an outage."""

import os

import msgspec
import pytest

from kclrun.ipc.board import Segment, boottime
from kclrun.ipc.channel import Doorbell
from kclrun.ipc.messages import decode_report
from kclrun.lease import events
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.ports import Outage
from kclrun.protocol import reports
from kclrun.protocol.status import WorkerState
from kclrun.worker.delivery_queue import DeliveryQueue, QueueLimits
from kclrun.worker.fetching import FetchView
from kclrun.worker.manager_line import Reporter
from tests.unit.lease.lease_driver import START, Driver, p

AT_TIP = FetchView(fetched=p(10), at_tip=True, millis_behind_latest=0)


class Slot:
    """A reporter with its real segment; `fetch` is what the fetch thread shows."""

    def __init__(self):
        self.segment, self.doorbell = Segment.create(1), Doorbell.create()
        self.ring = self.segment.ring(0)
        self.fetch = AT_TIP
        self.queue = DeliveryQueue(QueueLimits(1000, 10), boottime).view()
        self.reporter = Reporter(
            self.segment.slot(0), self.segment.ring(0), self.doorbell, 4, lambda: self.fetch
        )

    def shown(self, driver):
        self.reporter.publish(driver.life, self.queue, 0.0)
        return self.segment.slot(0).read()

    def reported(self, report):
        self.reporter.report(report)
        (entry,) = self.ring.drain()
        return decode_report(entry)

    def close(self):
        self.doorbell.close()
        self.segment.close()


@pytest.fixture
def slot():
    slot = Slot()
    yield slot
    slot.close()


def test_before_the_claim_there_is_neither_a_fence_nor_a_checkpoint(slot):
    shown = slot.shown(Driver())

    assert (shown.pid, shown.incarnation) == (os.getpid(), 4)
    assert (shown.fence_instant, shown.checkpointed) == (0.0, None)
    assert shown.state == WorkerState.CLAIMING
    assert 0.0 < shown.published_instant <= boottime()


def test_a_claimed_lease_shows_its_counter_its_checkpoint_and_its_fence(slot):
    shown = slot.shown(Driver().begin())

    assert (shown.counter, shown.checkpointed) == (6, p(10))
    assert START < shown.fence_instant <= START + 9.0
    assert shown.state == WorkerState.PROCESSING


def test_at_the_tip_is_who_has_fetched_processed_and_delivered_all(slot):
    driver = Driver().begin()
    assert slot.shown(driver).at_tip

    driver.happen(events.BatchDelivered(p(20), 1, 100))
    assert not slot.shown(driver).at_tip, "a batch is with user code"
    driver.happen(events.BatchProcessed(p(20)))
    assert slot.shown(driver).at_tip


def test_a_shard_of_which_nothing_was_fetched_yet_may_be_at_its_tip(slot):
    slot.fetch = FetchView(at_tip=True)

    assert slot.shown(Driver(position=TRIM_HORIZON).begin()).at_tip


def test_the_slot_shows_the_figures_of_queue_and_fetch_thread(slot):
    slot.fetch = FetchView(last_fetch_instant=7.0, asking_since_instant=8.0)
    slot.queue = msgspec.structs.replace(
        slot.queue,
        records_total=1,
        bytes_total=2,
        batches_total=3,
        processing_s_total=4.0,
        first_delivered=p(11),
        last_batch_instant=5.0,
        busy_since=6.0,
        unprocessed_since=9.0,
    )

    shown = slot.shown(Driver().begin())

    assert (shown.records_total, shown.bytes_total, shown.batches_total) == (1, 2, 3)
    assert (shown.processing_s_total, shown.last_batch_instant) == (4.0, 5.0)
    assert (shown.processing_since_instant, shown.last_fetch_instant) == (6.0, 7.0)
    assert (shown.fetching_since_instant, shown.unprocessed_since) == (8.0, 9.0)
    assert shown.first_delivered == p(11)


def test_records_that_no_checkpoint_covers_are_shown_as_undone(slot):
    driver = Driver().begin()
    assert not slot.shown(driver).has_undone

    driver.batch(20)

    assert slot.shown(driver).has_undone


@pytest.mark.parametrize(
    ("tell", "transition"),
    [
        (lambda to: to.warn("slow"), reports.ProcessWarned("slow")),
        (lambda to: to.records_lost(p(20), "gone"), reports.RecordsExpired(p(20), "gone")),
    ],
)
def test_what_other_threads_tell_reaches_the_ring_and_rings_too(slot, tell, transition):
    tell(slot.reporter)

    (entry,) = slot.ring.drain()
    assert decode_report(entry) == transition
    assert slot.doorbell.answer()


# An outage


class Outages:
    def __init__(self):
        self.now = 100.0
        self.warnings = []
        self.outage = Outage("reading", lambda: self.now, self.warnings.append)

    def fail(self, after_s, asked_s_ago=0.0):
        self.now += after_s
        self.outage.note("503", self.now - asked_s_ago)

    def succeed(self, after_s):
        self.now += after_s
        self.outage.end()


def test_an_outage_is_one_warning_once_it_lasts_and_one_with_its_length():
    outages = Outages()

    outages.fail(0.0)
    outages.fail(1.0)
    assert outages.warnings == ["reading fails and is tried again: 503"]
    outages.fail(5.0)
    outages.succeed(6.0)

    assert outages.warnings[1:] == ["reading works again after 12.0 s"]


def test_the_next_outage_is_counted_anew():
    outages = Outages()
    outages.fail(0.0, asked_s_ago=8.0)
    outages.succeed(0.0)

    outages.fail(50.0)
    outages.fail(2.0)
    outages.succeed(0.0)

    assert [text for text in outages.warnings if "works again" in text] == [
        "reading works again after 8.0 s",
        "reading works again after 2.0 s",
    ]
