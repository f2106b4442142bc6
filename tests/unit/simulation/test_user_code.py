"""User code as it is drawn, and the queue that calls it.

That the queue keeps to fences, caps and stops is what the oracles watch in every storm."""

import itertools
import random

import pytest

from kclrun.lease import commands, events
from kclrun.model.lease import Lease
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.processor import RecordProcessor
from kclrun.protocol.reports import ProcessorFailed
from kclrun.simulation import delivery_queue
from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.delivery_queue import SimulatedDeliveryQueue
from kclrun.simulation.fetching import QueueTimes, SimulatedFetching
from kclrun.simulation.user_code import BatchUserCode, UserCode
from kclrun.simulation.world import FleetSettings
from kclrun.testing import run_processor
from tests.unit.simulation.watched_world import Watched


def drawn(seed=1, **kind):
    return BatchUserCode(UserCode(**kind), random.Random(seed).random)


def no_chance():
    raise AssertionError("honest user code draws nothing")


def test_honest_user_code_takes_its_time_and_draws_nothing():
    code = BatchUserCode(UserCode(batch_s=0.5), no_chance)

    attempt = code.begin()

    assert (attempt.duration_s, attempt.checkpointed_share, attempt.raises) == (0.5, None, False)


def test_a_batch_that_raises_does_so_a_few_times_or_for_ever():
    runs = []
    for seed in range(300):
        code = drawn(seed, raising=1.0)
        attempts = itertools.chain([code.begin()], (code.again() for _ in range(50)))
        runs.append(len(list(itertools.takewhile(lambda attempt: attempt.raises, attempts))))

    assert set(runs) == {1, 2, 3, 4, 5, 51}
    assert 5 <= runs.count(51) <= 40  # one in sixteen


def test_a_share_of_the_batches_stalls():
    code = drawn(stalling=0.1, stall_s=60.0)

    stalled = sum(code.begin().duration_s == 60.0 for _ in range(1000))

    assert 70 <= stalled <= 130


def test_user_code_that_checkpoints_by_hand_names_all_or_some_of_its_batch():
    code = drawn(checkpoints_by_hand=True)

    shares = [code.begin().checkpointed_share for _ in range(100)]

    assert None not in shares
    assert 1.0 in shares
    assert any(share < 1.0 for share in shares)


# The queue with user code at it.


class AtQueue:
    """A queue whose core is the test: `said` are its events. Records arrive ten a second."""

    def __init__(self, seed=1, fetch_fault=lambda: None, *, fan_out=False, **kind):
        self.world = Watched(poison_every=kind.get("poison_every", 0))
        self.scheduler = Scheduler(seed)
        self.scheduler.run_until(60.0)
        self.said = []
        self.reader = self.world.begin(self.world.keys[0], "a:h:1", for_s=10_000)
        times = QueueTimes(self._now, self._now, self._after)
        self.queue = SimulatedDeliveryQueue(
            self.reader,
            self.world.stream,
            self.world.observer,
            times,
            fetching=SimulatedFetching(
                self.reader,
                self.world.stream,
                self.world.observer,
                times,
                FleetSettings(fan_out=fan_out),
                chance=lambda: 0.5,
                fetch_fault=fetch_fault,
                list_shards=lambda reply: reply(None),
            ),
            post=self.said.append,
            user_code=drawn(seed, **kind),
            uncheckpointed_max=100_000,
        )
        self.queue.call(
            commands.CallInitialize(Lease(key=self.reader.key, checkpoint=TRIM_HORIZON))
        )

    def _now(self):
        return self.scheduler.now

    def _after(self, delay_s, action):
        self.scheduler.after(delay_s, action)

    def open(self, *, fence_s=10_000.0, start_below=1_000_000, delivered_max=1_000_000):
        self.queue.allow_delivery(commands.AllowDelivery(fence_s, start_below, delivered_max))

    def run(self, duration_s):
        end = self.scheduler.now + duration_s
        while self.scheduler.now < end:
            self.scheduler.run_until(min(end, self.scheduler.now + 0.01))
            self.world.now = self.scheduler.now

    def of(self, kind):
        return [event for event in self.said if isinstance(event, kind)]


def test_a_batch_that_raises_is_given_again_after_the_pauses_of_the_error_policy():
    at = AtQueue(raising=1.0, seed=next(s for s in range(99) if raises(s) == 2))
    at.open()

    at.run(2.9)  # pauses of 1 s and 2 s
    assert len(at.of(events.BatchDelivered)) == 1
    assert at.of(events.BatchProcessed) == []
    at.run(0.5)

    assert len(at.of(events.BatchProcessed)) == 1
    assert "user_code_raised_and_held" in at.world.seen


def test_records_that_fail_for_ever_are_given_up_and_all_others_processed():
    """After the pauses of five retries, every fiftieth of some 600 records."""
    at = AtQueue(poison_every=50, then="skip")
    at.open()

    at.run(45.0)

    done = [each.last for each in at.of(events.BatchProcessed)]
    assert done == sorted(done)
    assert at.world.stream.records.number_of(at.reader.key, done[-1]) == 600
    assert at.of(ProcessorFailed) == []
    assert "record_given_up" in at.world.seen


@pytest.mark.parametrize("retries", [0, 5])
def test_a_simulated_batch_is_given_in_the_calls_of_the_test_kit(monkeypatch, retries):
    """One batch of 64 records, three of them at fault."""
    monkeypatch.setattr(delivery_queue, "_ON_ERROR", (retries, 1.0))
    at = AtQueue(poison_every=21, then="dead-letter")
    observer, given, given_up = at.world.observer, [], []
    begin, give_up = observer.batch_begun, observer.gave_up
    observer.batch_begun = lambda *batch: given.append(batch[1:]) or begin(*batch)
    observer.gave_up = lambda *record: given_up.append(record[1]) or give_up(*record)
    at.open(delivered_max=64, start_below=64)
    at.run(60.0)
    first, last = given[0]

    calls = []

    class Poisoned(RecordProcessor):
        def process_records(self, batch, checkpointer):
            numbers = [int(record.sequence_number) for record in batch]
            calls.append((numbers[0], numbers[-1]))
            if any(number % 21 == 0 for number in numbers):
                raise ValueError("bad")

    records = [Record(b"", "k", str(number)) for number in range(first, last + 1)]
    run = run_processor(
        Poisoned, records, settings={"on_error": {"retries": retries, "then": "dead-letter"}}
    )

    assert given == calls
    assert len(calls) > retries + 10
    assert [int(record.sequence_number) for record in run.given_up] == given_up == [21, 42, 63]


def test_a_poisoned_batch_is_given_up_after_six_calls_and_nothing_follows_it():
    at = AtQueue(raising=1.0, seed=next(s for s in range(99) if raises(s) == float("inf")))
    at.open()

    at.run(100)

    [failed] = at.of(ProcessorFailed)
    assert (failed.where, failed.attempts) == ("process_records", 6)
    assert len(at.of(events.BatchDelivered)) == 1


def test_a_batch_that_waits_for_its_next_call_is_given_up_when_delivery_is_stopped():
    at = AtQueue(raising=1.0)
    at.open()
    at.run(0.5)

    at.queue.stop_delivery()
    at.run(100)

    assert len(at.of(events.DeliveryStopped)) == 1
    assert at.of(events.BatchProcessed) == []


def test_what_a_checkpoint_of_a_call_that_raised_covers_is_not_given_again():
    seed = next(s for s in range(99) if names_the_middle(s))
    at = AtQueue(seed, raising=1.0, checkpoints_by_hand=True)
    given, begin = [], at.world.observer.batch_begun
    at.world.observer.batch_begun = lambda *batch: given.append(batch[1:]) or begin(*batch)
    at.open()
    at.run(0.5)
    [asked] = at.of(events.CheckpointRequested)
    covered = at.world.stream.records.number_of(at.reader.key, asked.position)

    at.world.checkpoint(at.reader, covered)
    at.queue.note_durable(asked.position)
    at.queue.answer(commands.AnswerCheckpoint(asked.request, commands.CheckpointAnswer.DURABLE))
    at.run(1.5)

    assert 0 < covered < 600
    assert given[:2] == [(1, 600), (covered + 1, 600)]


@pytest.mark.parametrize(
    ("fault", "situation"),
    [("expired_iterator", "iterator_expired"), ("throttled", "reads_throttled")],
)
def test_a_fetch_that_fails_is_made_again_at_the_position_reached(fault, situation):
    faults = [None, fault, fault]
    at = AtQueue(fetch_fault=lambda: faults.pop(0) if faults else None)
    at.open()

    at.run(5)

    firsts = at.of(events.BatchProcessed)
    assert len(firsts) >= 3
    assert at.world.observer.tally.duplicates == 0
    assert situation in at.world.seen


def test_a_subscription_gives_records_when_they_arrive_and_not_at_the_next_poll():
    at = AtQueue(fan_out=True)
    at.open()
    at.run(10)
    polling = AtQueue()
    polling.open()
    polling.run(10)

    # Ten records a second: an event for each, and a page of ten for each poll.
    assert len(at.of(events.BatchDelivered)) > 80
    assert len(polling.of(events.BatchDelivered)) < 15
    assert at.world.observer.tally.duplicates == 0


def test_a_subscription_that_breaks_goes_on_by_polling_and_subscribes_again():
    faults = iter([None, None, None, "unreachable"])  # polls; subscribes; an event; it breaks
    at = AtQueue(fetch_fault=lambda: next(faults, None), fan_out=True)
    at.open()
    at.run(1.0)
    assert "subscription_broke" in at.world.seen

    at.run(14.0)

    assert len(at.of(events.BatchDelivered)) > 60
    assert at.world.observer.tally.duplicates == 0


def test_a_subscription_of_another_owner_takes_over_and_is_refused_before():
    at = AtQueue(fan_out=True)
    stream, key, reported = at.world.stream, at.reader.key, []
    assert stream.subscribe(key, at.scheduler.now - 4.0, lambda: reported.append("taken over"))
    at.open()
    at.run(0.5)
    assert "subscription_refused" in at.world.seen
    at.run(4.0)
    assert reported == ["taken over"]
    at.run(6.0)
    before = len(at.of(events.BatchDelivered))

    assert stream.subscribe(key, at.scheduler.now, lambda: None)
    at.run(0.5)

    assert "subscription_taken_over" in at.world.seen
    at.run(15.0)  # it polls, is refused, and takes over again
    assert len(at.of(events.BatchDelivered)) > before + 40
    assert at.world.observer.tally.duplicates == 0


def raises(seed):
    """How often a batch of this seed raises, by the same draws as the queue's."""
    code = drawn(seed, raising=1.0)
    attempts = itertools.chain([code.begin()], (code.again() for _ in range(9)))
    count = sum(1 for _ in itertools.takewhile(lambda attempt: attempt.raises, attempts))
    return float("inf") if count > 6 else count


def names_the_middle(seed):
    share = drawn(seed, raising=1.0, checkpoints_by_hand=True).begin().checkpointed_share
    return 0.1 < share < 0.9
