"""The queue: slicing, limits, and permits that come and go while the main thread is anywhere."""

import select
import threading

import pytest

from kclrun.calling.delivery import ConfirmStop
from kclrun.lease.commands import (
    AllowDelivery,
    AnswerCheckpoint,
    CallLeaseLost,
    CallShutdownRequested,
    CheckpointAnswer,
)
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.worker.delivery_queue import (
    RECORD_OVERHEAD_BYTES,
    Batch,
    CheckpointCalls,
    DeliveryQueue,
    Exhausted,
    Inbox,
    Page,
    QueueClosed,
    QueueLimits,
    Turn,
)
from tests.patience import HUNG_S, until


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def page(*numbers, last=None):
    records = [Record(b"12345", "k", str(number)) for number in numbers]
    end = ExtendedSequenceNumber(str(last or numbers[-1]))
    return Page(records, end, 5 * len(records), 7)


def permit(fence=1000.0, below=10**6, most=10**6):
    return AllowDelivery(fence, below, most)


def numbers(batch):
    assert isinstance(batch, Batch)
    return [int(record.sequence_number) for record in batch.records]


class WatchedCondition(threading.Condition):
    """A condition that counts the threads that wait for it. The count changes under its lock."""

    def __init__(self):
        super().__init__()
        self.waiting = 0
        self.timeouts = []

    def wait(self, timeout=None):
        self.waiting += 1
        self.timeouts.append(timeout)
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


def is_waited_for(queue):
    """A thread is inside `wait`: it looked, found nothing to do, and has let go of the lock."""
    with queue._changed:
        return queue._changed.waiting > 0


class Taking(threading.Thread):
    """The main thread, as the queue sees it: one `next_task`."""

    def __init__(self, take):
        super().__init__(daemon=True)
        self.taken = []
        self._take = take
        self.start()

    def run(self):
        self.taken.append(self._take())

    def result(self):
        self.join(HUNG_S)
        return self.taken[0]

    def waits_for(self, queue):
        """True once the thread waits; False if it got something instead."""
        until(lambda: self.taken or is_waited_for(queue))
        return not self.taken


def watched(limits, clock):
    queue = DeliveryQueue(limits, clock)
    queue._changed = WatchedCondition()
    return queue


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(clock):
    # Room for 20 records of 5 bytes and of what each costs besides.
    return watched(QueueLimits(buffer_bytes=20 * (5 + RECORD_OVERHEAD_BYTES), batch_max=3), clock)


@pytest.mark.parametrize(
    ("cuts", "ends"),
    [
        ((2,), [([1, 2], 2), ([4, 5], 5), ([7, 8], 9)]),
        ((3,), [([1, 2], 2), ([4, 5], 5), ([7, 8], 9)]),
        ((5, 7), [([1, 2, 4], 4), ([5], 5), ([7], 7), ([8], 9)]),
        ((8,), [([1, 2, 4], 4), ([5], 5), ([7, 8], 8), ([], 9)]),
        ((9, 20), [([1, 2, 4], 4), ([5], 5), ([7, 8], 9)]),
        ((0,), [([1, 2, 4], 4), ([5], 5), ([7, 8], 9)]),
    ],
)
def test_a_batch_ends_where_an_output_has_its_rows_already(queue, cuts, ends):
    queue.cut_at(ExtendedSequenceNumber(str(cut)) for cut in cuts)
    queue.put(page(1, 2, 4, 5))
    queue.put(page(7, 8, last=9))
    queue.allow_delivery(permit())
    batches = []
    while not batches or batches[-1][1] < 9:
        batch = queue.next_task()
        batches.append((numbers(batch), int(batch.last.sequence_number)))
    assert batches == ends


def test_while_an_output_is_full_no_batch_starts_nor_does_the_shard_end(queue):
    queue.put(page(1))
    queue.allow_delivery(permit())
    queue.hold()
    queue.finish(())
    queue.call(CallShutdownRequested())
    assert queue.next_task() == CallShutdownRequested()
    queue.release()
    assert numbers(queue.next_task()) == [1]
    assert isinstance(queue.next_task(), Exhausted)


def test_the_totals_count_a_batch_once_user_code_has_returned_for_it(queue):
    queue.allow_delivery(permit())
    queue.put(page(1, 2, 3, 4, 5, last=9))

    first, second = queue.next_task(), queue.next_task()
    assert (queue.view().records_total, queue.view().batches_total) == (0, 0)
    queue.note_returned(first)
    queue.note_returned(second)

    queue.note_returned(Batch((), ExtendedSequenceNumber("9"), 0, 7))

    view = queue.view()
    assert (view.records_total, view.batches_total, view.bytes_total) == (5, 2, 25)


def test_a_batch_under_way_and_then_the_next_page_say_since_when_records_wait(queue):
    queue.allow_delivery(permit())
    records = [
        Record(b"", "k", str(number), approximate_arrival_timestamp=1_000.0 + number)
        for number in (1, 2, 3, 4)
    ]
    assert queue.view().unprocessed_since is None
    queue.put(Page(records[:2], ExtendedSequenceNumber("2"), 0, 0))
    queue.put(Page((), ExtendedSequenceNumber("3"), 0, 0))
    queue.put(Page(records[2:], ExtendedSequenceNumber("4"), 0, 0))

    batch = queue.next_task()
    assert queue.view().unprocessed_since == 1_001.0
    queue.note_returned(batch)
    assert queue.view().unprocessed_since == 1_003.0
    queue.note_returned(queue.next_task())
    queue.note_returned(queue.next_task())
    assert queue.view().unprocessed_since is None
    assert queue.view().first_delivered == ExtendedSequenceNumber("1")


def test_records_behind_a_page_without_any_wait_since_the_first_of_them_arrived(queue):
    records = [
        Record(b"", "k", str(number), approximate_arrival_timestamp=1_000.0 + number)
        for number in (2, 3)
    ]
    queue.put(Page((), ExtendedSequenceNumber("1"), 0, 0))
    queue.put(Page(records, ExtendedSequenceNumber("3"), 0, 0))

    assert queue.view().unprocessed_since == 1_002.0


def test_pages_without_records_take_the_room_of_one_and_pass_the_position_of_the_last(queue):
    """While an output is full nothing is delivered, and such pages never fill the queue."""
    queue.put(page(1))
    for number in range(2, 1_000):
        queue.put(page(last=number))
    queue.put(page(1_000))
    assert len(queue._pages) == 3

    queue.allow_delivery(permit())
    assert [queue.next_task().last.sequence_number for _ in range(3)] == ["1", "999", "1000"]


def test_the_permit_bounds_where_a_batch_starts_and_how_far_it_reaches(queue):
    queue.put(page(1, 2, 3, 4, 5))
    queue.allow_delivery(permit(below=2, most=2))
    assert numbers(queue.next_task()) == [1, 2]

    main = Taking(queue.next_task)
    assert main.waits_for(queue)
    queue.allow_delivery(permit(below=3, most=4))

    assert numbers(main.result()) == [3, 4]


def test_a_page_counts_with_its_payload_and_with_200_bytes_for_each_record():
    assert page(1, 2, 3).bytes_held == 15 + 3 * 200
    assert page(last=1).bytes_held == 0


@pytest.mark.parametrize(("buffer_bytes", "is_full"), [(411, False), (410, True)])
def test_a_queue_is_full_at_its_bytes_and_takes_one_page_of_any_size(clock, buffer_bytes, is_full):
    queue = DeliveryQueue(QueueLimits(buffer_bytes=buffer_bytes, batch_max=3), clock)
    assert not queue._is_full()
    queue.put(page(1, 2))  # 2 x 205 bytes

    assert queue._is_full() == is_full


@pytest.mark.parametrize(
    ("happens", "task"),
    [
        (lambda queue: queue.put(page(1)), Batch),
        (lambda queue: queue.finish((), is_expired=True), Exhausted),
        (lambda queue: queue.call(CallLeaseLost()), CallLeaseLost),
        (lambda queue: queue.stop_delivery(), ConfirmStop),
        (lambda queue: queue.close(), QueueClosed),
    ],
    ids=["a page", "the end", "a call", "a stop", "the close"],
)
def test_whatever_the_main_thread_waits_for_wakes_it(queue, happens, task):
    queue.allow_delivery(permit())
    main = Taking(queue.next_task)
    assert main.waits_for(queue)

    happens(queue)

    assert isinstance(main.result(), task)


def test_empty_records_fill_a_queue_too(clock):
    queue = DeliveryQueue(QueueLimits(buffer_bytes=1000, batch_max=3), clock)
    empty = [Record(b"", "k", str(number)) for number in range(5)]
    queue.put(Page(empty, ExtendedSequenceNumber("4"), 0, 7))
    fetcher = Taking(lambda: queue.put(page(90)))

    assert queue._is_full()
    queue.close()
    assert fetcher.result() is False


def test_a_closed_queue_takes_no_page_and_pauses_no_longer(queue):
    queue.close()

    assert queue.is_closed
    assert queue.put(page(1)) is False
    assert queue.pause(60.0) is False


def test_a_stop_asked_while_the_main_thread_waits_is_found_at_once(queue):
    main = Taking(queue.next_task)

    queue.stop_delivery()

    assert main.result() == ConfirmStop()


def test_a_stop_asked_while_the_main_thread_is_busy_is_found_when_it_returns(queue):
    queue.allow_delivery(permit())
    queue.put(page(1))
    queue.put(page(2))
    queue.next_task()

    queue.stop_delivery()

    assert queue.next_task() == ConfirmStop()
    main = Taking(queue.next_task)
    assert main.waits_for(queue)
    queue.close()
    main.result()


def test_past_the_fence_no_batch_starts_until_it_is_renewed_and_none_is_dropped(queue, clock):
    queue.allow_delivery(permit(fence=101.0))
    queue.put(page(1))
    clock.now = 101.0
    main = Taking(queue.next_task)
    assert main.waits_for(queue)

    queue.allow_delivery(permit(fence=200.0))

    assert numbers(main.result()) == [1]


def test_a_retry_past_the_fence_waits_for_the_renewal(queue, clock):
    queue.allow_delivery(permit(fence=101.0))
    queue.put(page(1))
    queue.next_task()
    clock.now = 101.0
    main = Taking(lambda: queue.may_try_again(0.0, is_batch=True))
    assert main.waits_for(queue)

    queue.allow_delivery(permit(fence=200.0))

    assert main.result() is True
    assert queue.view().busy_since == 101.0


@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("stop", [DeliveryQueue.stop_delivery, DeliveryQueue.close])
def test_a_retry_is_called_off_when_delivery_is_stopped(queue, stop, is_batch):
    queue.allow_delivery(permit())
    main = Taking(lambda: queue.may_try_again(60.0, is_batch=is_batch))

    stop(queue)

    assert main.result() is False


def calls(is_over=lambda: False):
    made = CheckpointCalls(lambda request: None, lambda position: None, is_over)
    made._answered = WatchedCondition()
    return made


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_is_answered_at_once_and_looks_twice_a_second_whether_the_process_ends(number):
    made = calls()
    asking = [Taking(made.checkpointer.checkpoint) for _ in range(number)]
    until(lambda: made._answered.waiting == number)
    # Only the answer wakes them now.
    assert set(made._answered.timeouts) == {0.5}
    with made._answered:
        waits = threading.Condition.wait
        made._answered.wait = lambda timeout=None: waits(made._answered, HUNG_S)

    for request in range(1, number + 1):
        made.answer(AnswerCheckpoint(request, CheckpointAnswer.DURABLE))

    assert [each.result() for each in asking] == [None] * number
    assert (made._answers, made._waiting) == ({}, set())


def test_an_answer_that_no_thread_waits_for_is_not_kept():
    made = calls()

    made.answer(AnswerCheckpoint(1, CheckpointAnswer.DURABLE))

    assert made._answers == {}


def test_an_inbox_gives_what_was_posted_once_in_order_and_never_waits():
    inbox = Inbox()

    def is_readable():
        return select.select([inbox], [], [], 0.0)[0] == [inbox]

    assert not is_readable()
    assert inbox.take() == []
    for event in ("a", "b", "c"):
        inbox.post(event)

    assert is_readable()
    assert inbox.take() == ["a", "b", "c"]
    assert not is_readable()
    assert inbox.take() == []
    inbox.close()


# Queues of a shared process: one turn.


@pytest.fixture
def neighbours(clock):
    """Two queues with a batch each; the first one's user code runs."""
    turn = Turn()
    limits = QueueLimits(buffer_bytes=10**6, batch_max=1)
    queues = [DeliveryQueue(limits, clock, turn) for _ in range(2)]
    for queue in queues:
        queue.allow_delivery(permit(fence=150.0))
        queue.put(page(1, 2))
    assert numbers(queues[0].next_task()) == [1]
    return queues


def stands_in_line(queue):
    """The queue's thread waits for the turn behind another one."""

    def is_second():
        with queue._changed:
            return queue._changed in queue._turn._line

    until(is_second)


def test_user_code_of_one_lease_at_a_time_in_the_order_of_asking(neighbours, clock):
    first, second = neighbours
    other = Taking(second.next_task)
    stands_in_line(second)
    assert second.view().busy_since == 0.0, "waiting for the turn is no work"
    clock.now += 5.0

    again = Taking(first.next_task)  # it has more, and asks later

    assert numbers(other.result()) == [1]
    stands_in_line(first)
    assert not again.taken
    assert first.view().processing_s_total == 5.0
    assert second.view().busy_since == clock.now
    last = Taking(second.next_task)
    assert numbers(again.result()) == [2]
    first.close()
    assert isinstance(first.next_task(), QueueClosed)
    assert numbers(last.result()) == [2], "a lease that ends gives the turn up"


def test_a_turn_that_comes_after_the_fence_starts_nothing_and_is_passed_on(neighbours, clock):
    first, second = neighbours
    other = Taking(second.next_task)
    stands_in_line(second)
    clock.now = 200.0
    first.allow_delivery(permit(fence=1000.0))

    assert numbers(first.next_task()) == [2]

    assert not other.taken
    second.close()
    assert isinstance(other.result(), QueueClosed)


def test_a_pause_before_a_repetition_gives_the_turn_away(neighbours, clock):
    first, second = neighbours
    other = Taking(second.next_task)
    stands_in_line(second)

    again = Taking(lambda: first.may_try_again(0.0, is_batch=True))

    assert numbers(other.result()) == [1]
    stands_in_line(first)
    assert not again.taken
    Taking(second.next_task)
    assert again.result() is True
    assert first.view().busy_since == clock.now


@pytest.mark.parametrize("why", ["a stop", "its fence has passed"])
def test_a_repetition_that_is_called_off_or_fenced_holds_nobody_up(neighbours, clock, why):
    first, second = neighbours
    if why == "a stop":
        first.stop_delivery()
    else:
        clock.now = 150.0
        second.allow_delivery(permit(fence=1000.0))
    again = Taking(lambda: first.may_try_again(0.0, is_batch=True))

    assert numbers(Taking(second.next_task).result()) == [1]

    first.close()
    assert again.result() is False
