"""The desk: slicing, limits, and a gate that shuts and opens while the main thread is anywhere."""

import threading
import time

import pytest

from kclrun.consuming.commands import CallLeaseLost, CallShardEnded, CallShutdownRequested, OpenGate
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.worker.desk import (
    RECORD_OVERHEAD_BYTES,
    Batch,
    Desk,
    DeskClosed,
    DeskLimits,
    Exhausted,
    GateFound,
    Page,
)
from tests.patience import HUNG_S


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def page(*numbers, last=None):
    records = [Record(b"12345", "k", str(number)) for number in numbers]
    end = ExtendedSequenceNumber(str(last or numbers[-1]))
    return Page(records, end, 5 * len(records), 7)


def gate(fence=1000.0, below=10**6, most=10**6):
    return OpenGate(fence, below, most)


def numbers(batch):
    assert isinstance(batch, Batch)
    return [int(record.sequence_number) for record in batch.records]


def until(condition, most_s=HUNG_S):
    deadline = time.monotonic() + most_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class WatchedCondition(threading.Condition):
    """A condition that counts the threads that wait for it. The count changes under its lock."""

    def __init__(self):
        super().__init__()
        self.waiting = 0

    def wait(self, timeout=None):
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


def is_waited_for(desk):
    """A thread is inside `wait`: it looked, found nothing to do, and has let go of the lock."""
    with desk._changed:
        return desk._changed.waiting > 0


class Taking(threading.Thread):
    """The main thread, as the desk sees it: one `next_task`."""

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

    def waits_for(self, desk):
        """True once the thread waits; False if it got something instead."""
        until(lambda: self.taken or is_waited_for(desk))
        return not self.taken


def watched(limits, clock):
    desk = Desk(limits, clock)
    desk._changed = WatchedCondition()
    return desk


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def desk(clock):
    # Room for 20 records of 5 bytes and of what each costs besides.
    return watched(DeskLimits(buffer_bytes=20 * (5 + RECORD_OVERHEAD_BYTES), batch_max=3), clock)


def test_a_page_is_cut_into_batches_that_end_where_they_end(desk):
    desk.open_gate(gate())
    desk.put(page(1, 2, 3, 4, 5, last=9))

    first, second = desk.next_task(), desk.next_task()

    assert (numbers(first), first.last.sequence_number, first.payload_bytes) == ([1, 2, 3], "3", 15)
    assert (numbers(second), second.last.sequence_number) == ([4, 5], "9")
    assert desk.view().is_empty


def test_the_totals_count_a_batch_once_user_code_has_returned_for_it(desk):
    desk.open_gate(gate())
    desk.put(page(1, 2, 3, 4, 5, last=9))

    first, second = desk.next_task(), desk.next_task()
    assert (desk.view().records_total, desk.view().batches_total) == (0, 0)
    desk.note_returned(first)
    desk.note_returned(second)

    view = desk.view()
    assert (view.records_total, view.batches_total, view.bytes_total) == (5, 2, 25)


def test_a_batch_under_way_and_then_the_next_page_say_since_when_records_wait(desk):
    desk.open_gate(gate())
    records = [
        Record(b"", "k", str(number), approximate_arrival_timestamp=1_000.0 + number)
        for number in (1, 2, 3, 4)
    ]
    assert desk.view().unprocessed_since is None
    desk.put(Page(records[:2], ExtendedSequenceNumber("2"), 0, 0))
    desk.put(Page((), ExtendedSequenceNumber("3"), 0, 0))
    desk.put(Page(records[2:], ExtendedSequenceNumber("4"), 0, 0))

    batch = desk.next_task()
    assert desk.view().unprocessed_since == 1_001.0
    desk.note_returned(batch)
    assert desk.view().unprocessed_since == 1_003.0
    desk.note_returned(desk.next_task())
    desk.note_returned(desk.next_task())
    assert desk.view().unprocessed_since is None
    assert desk.view().first_delivered == ExtendedSequenceNumber("1")


def test_records_behind_a_page_without_any_wait_since_the_first_of_them_arrived(desk):
    records = [
        Record(b"", "k", str(number), approximate_arrival_timestamp=1_000.0 + number)
        for number in (2, 3)
    ]
    desk.put(Page((), ExtendedSequenceNumber("1"), 0, 0))
    desk.put(Page(records, ExtendedSequenceNumber("3"), 0, 0))

    assert desk.view().unprocessed_since == 1_002.0


def test_a_page_that_fits_is_handed_on_as_it_is(desk):
    desk.open_gate(gate())
    whole = page(1, 2)
    desk.put(whole)

    assert desk.next_task().records is whole.records


def test_the_gate_bounds_where_a_batch_starts_and_how_far_it_reaches(desk):
    desk.put(page(1, 2, 3, 4, 5))
    desk.open_gate(gate(below=2, most=2))
    assert numbers(desk.next_task()) == [1, 2]

    main = Taking(desk.next_task)
    assert main.waits_for(desk)
    desk.open_gate(gate(below=3, most=4))

    assert numbers(main.result()) == [3, 4]


def test_one_batch_a_checkpoint_may_still_be_a_whole_batch(desk):
    desk.put(page(1, 2, 3))
    desk.open_gate(gate(below=1, most=100))

    assert numbers(desk.next_task()) == [1, 2, 3]


def test_a_page_without_records_passes_a_reached_cap(desk):
    desk.open_gate(gate(below=0, most=0))
    desk.put(page(last=9))

    assert desk.next_task() == Batch((), ExtendedSequenceNumber("9"), 0, 7)


def test_the_end_comes_after_all_pages_and_once(desk):
    desk.open_gate(gate())
    desk.put(page(1))
    desk.finish(())

    assert numbers(desk.next_task()) == [1]
    assert desk.next_task() == Exhausted(())
    main = Taking(desk.next_task)
    desk.close()
    assert main.result() == DeskClosed()


def test_a_full_desk_makes_the_fetcher_wait_until_a_page_is_taken(desk):
    desk.open_gate(gate())
    for n in range(7):
        desk.put(page(*range(n * 3, n * 3 + 3)))
    fetcher = Taking(lambda: desk.put(page(90)))
    assert fetcher.waits_for(desk)

    desk.next_task()

    assert fetcher.result() is True


def test_empty_records_fill_a_desk_too(clock):
    desk = Desk(DeskLimits(buffer_bytes=1000, batch_max=3), clock)
    empty = [Record(b"", "k", str(number)) for number in range(5)]
    desk.put(Page(empty, ExtendedSequenceNumber("4"), 0, 7))
    fetcher = Taking(lambda: desk.put(page(90)))

    assert desk._is_full()
    desk.close()
    assert fetcher.result() is False


def test_a_closed_desk_takes_no_page_and_pauses_no_longer(desk):
    desk.close()

    assert desk.is_closed
    assert desk.put(page(1)) is False
    assert desk.pause(60.0) is False


def test_a_pause_lasts_as_long_as_it_says(desk):
    assert desk.pause(0.01) is True


def test_a_gate_shut_while_the_main_thread_waits_is_found_at_once(desk):
    main = Taking(desk.next_task)

    desk.shut_gate()

    assert main.result() == GateFound()


def test_a_gate_shut_while_the_main_thread_is_busy_is_found_when_it_returns(desk):
    desk.open_gate(gate())
    desk.put(page(1))
    desk.put(page(2))
    desk.next_task()

    desk.shut_gate()

    assert desk.next_task() == GateFound()
    main = Taking(desk.next_task)
    assert main.waits_for(desk)
    desk.close()
    main.result()


def test_a_call_that_has_not_begun_is_withdrawn_with_the_gate(desk):
    desk.call(CallShardEnded())
    desk.shut_gate()
    assert desk.next_task() == GateFound()

    desk.call(CallLeaseLost())

    assert desk.next_task() == CallLeaseLost()


def test_calls_need_no_gate(desk):
    desk.call(CallShutdownRequested())

    assert desk.next_task() == CallShutdownRequested()


def test_after_a_batch_was_given_up_none_starts_whatever_the_gate_says(desk):
    desk.open_gate(gate())
    desk.put(page(1))
    desk.halt()
    desk.open_gate(gate())
    main = Taking(desk.next_task)
    assert main.waits_for(desk)

    desk.shut_gate()

    assert main.result() == GateFound()


def test_past_the_fence_no_batch_starts_until_it_is_renewed_and_none_is_dropped(desk, clock):
    desk.open_gate(gate(fence=101.0))
    desk.put(page(1))
    clock.now = 101.0
    main = Taking(desk.next_task)
    assert main.waits_for(desk)

    desk.open_gate(gate(fence=200.0))

    assert numbers(main.result()) == [1]


def test_a_retry_past_the_fence_waits_for_the_renewal(desk, clock):
    desk.open_gate(gate(fence=101.0))
    desk.put(page(1))
    desk.next_task()
    clock.now = 101.0
    main = Taking(lambda: desk.may_try_again(0.0, is_batch=True))
    assert main.waits_for(desk)

    desk.open_gate(gate(fence=200.0))

    assert main.result() is True
    assert desk.view().busy_since == 101.0


@pytest.mark.parametrize("is_batch", [True, False])
@pytest.mark.parametrize("stop", [Desk.shut_gate, Desk.close])
def test_a_retry_is_called_off_when_the_gate_shuts(desk, stop, is_batch):
    desk.open_gate(gate())
    main = Taking(lambda: desk.may_try_again(60.0, is_batch=is_batch))

    stop(desk)

    assert main.result() is False


def test_a_call_may_be_repeated_without_a_gate(desk):
    assert desk.may_try_again(0.0, is_batch=False) is True


def test_the_time_in_user_code_is_counted(desk, clock):
    desk.open_gate(gate())
    desk.put(page(1))
    desk.next_task()
    assert desk.view().busy_since == 100.0
    clock.now = 103.0
    desk.shut_gate()
    desk.next_task()

    view = desk.view()

    assert (view.busy_since, view.processing_s_total, view.last_batch_instant) == (0.0, 3.0, 103.0)
