"""Until when user code waited for a destination, as the manager sees it."""

import threading

import pytest

from kclrun.outputs.destination_waits import OUTPUTS_THREAD, DestinationView, DestinationWaits
from kclrun.worker.delivery_queue import CheckpointCalls
from tests.patience import HUNG_S


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def waits(clock):
    return DestinationWaits(clock)


def test_a_call_waits_while_it_rests_and_an_attempt_counts_from_its_start(clock, waits):
    assert waits.view() == DestinationView()
    with waits.rest():
        clock.now = 30.0
        assert waits.view() == DestinationView(10.0, 30.0)
    clock.now = 50.0
    assert waits.view() == DestinationView(10.0, 30.0)
    with waits.rest():
        assert waits.view() == DestinationView(10.0, 50.0)
    clock.now = 60.0
    waits.over()
    clock.now = 90.0
    assert waits.view() == DestinationView(0.0, 60.0)


def test_a_call_that_never_waited_does_not_end_a_wait(clock, waits):
    waits.over()
    waits.tries()
    assert waits.view() == DestinationView()


def test_user_code_does_not_wait_for_the_thread_of_the_outputs_but_in_a_checkpoint(clock, waits):
    waits.failed(OUTPUTS_THREAD)
    clock.now = 20.0
    assert waits.view() == DestinationView(10.0, 0.0)
    with waits.of_checkpoint():
        clock.now = 30.0
        assert waits.view() == DestinationView(10.0, 30.0)
        waits.tries(OUTPUTS_THREAD)
        clock.now = 40.0
        assert waits.view() == DestinationView(10.0, 30.0)
        waits.over(OUTPUTS_THREAD)
        clock.now = 50.0
        # The checkpoint is still to be written: what is waited for now is the lease thread.
        assert waits.view() == DestinationView(0.0, 40.0)
    assert waits.view() == DestinationView(0.0, 40.0)


def test_a_checkpoint_that_ends_while_the_output_is_away_has_waited_until_then(clock, waits):
    waits.failed(OUTPUTS_THREAD)
    with waits.of_checkpoint():
        clock.now = 70.0
    clock.now = 80.0
    assert waits.view() == DestinationView(10.0, 70.0)


def test_a_checkpoint_of_user_code_waits_for_the_outputs(waits):
    asked, over = threading.Event(), threading.Event()
    calls = CheckpointCalls(lambda _: asked.set(), lambda _: None, over.is_set, waits)
    waits.failed(OUTPUTS_THREAD)

    def checkpoint():
        with pytest.raises(Exception, match="the process ends"):
            calls.checkpointer.checkpoint()

    user_code = threading.Thread(target=checkpoint)
    user_code.start()
    try:
        assert asked.wait(HUNG_S)
        waited = waits._checkpoints
    finally:
        over.set()
        user_code.join(HUNG_S)
    assert waited == 1
    assert waits.view() == DestinationView(10.0, 10.0)
