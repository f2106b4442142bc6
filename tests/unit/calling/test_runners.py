"""The runners of `process_record`, each alone: threads and an event loop of their own."""

import asyncio
import io
import threading

import pytest

from kclrun.calling import runners as module
from kclrun.calling.runners import InlineRunner, LoopRunner, ThreadRunner, runner_of
from kclrun.errors import ProcessorLoadError
from kclrun.model.policies import Concurrency
from kclrun.model.record import Record
from kclrun.processor import RecordProcessor
from tests.patience import HUNG_S


class Threads:
    """Makes the threads of a runner."""

    def __init__(self):
        self.made = []

    def __call__(self, target, name):
        self.made.append(threading.Thread(target=target, name=name, daemon=True))
        return self.made[-1]

    def join(self):
        for thread in self.made:
            thread.join(HUNG_S)
        assert not any(thread.is_alive() for thread in self.made)


class Wakes:
    """Waits until a runner has woken its owner, and takes what ended."""

    def __init__(self):
        self.woken = threading.Semaphore(0)

    def __call__(self):
        self.woken.release()

    def take(self, runner, count):
        ended = []
        while len(ended) < count:
            assert self.woken.acquire(timeout=HUNG_S), ended
            ended += runner.take()
        return ended


def calls(*numbers):
    return [(number, Record(b"x", "k", str(number)), f"context {number}") for number in numbers]


@pytest.fixture
def threads():
    return Threads()


@pytest.fixture
def wakes():
    return Wakes()


@pytest.fixture
def loop(threads, wakes):
    """Makes a runner of coroutines, which is closed at the end of the test."""
    made = []

    def of(call, timeout_s=None):
        made.append(LoopRunner(call, wakes, threads, timeout_s))
        return made[-1]

    yield of
    for runner in made:
        runner.close()
    threads.join()


class Single(RecordProcessor):
    def process_record(self, record, context): ...


class Coroutines(RecordProcessor):
    async def process_record(self, record, context): ...


@pytest.mark.parametrize(
    ("kind", "records", "runner"),
    [
        (Single, 1, InlineRunner),
        (Single, 2, ThreadRunner),
        (Coroutines, 1, LoopRunner),
        (Coroutines, 2, LoopRunner),
    ],
)
def test_the_kind_of_the_method_and_the_concurrency_choose_the_runner(
    kind, records, runner, threads
):
    made = runner_of(kind(), Concurrency(records), lambda: None, threads)

    assert type(made) is runner
    assert made.is_inline is (runner is InlineRunner)
    assert threads.made == [], "none before the first call"
    made.close()


def test_as_many_threads_as_calls_at_once_are_made_and_they_make_the_calls_after_them(
    threads, wakes
):
    given = []
    runner = ThreadRunner(lambda record, context: given.append(context), wakes, threads)
    for numbers in [(1,), (2, 3), (4, 5), (6,)]:
        runner.start(calls(*numbers))
        ended = wakes.take(runner, len(numbers))
        assert sorted(ended) == [(number, None, False) for number in numbers]

    assert [thread.name for thread in threads.made] == ["record-0", "record-1"]
    assert sorted(given) == [f"context {number}" for number in range(1, 7)]
    runner.close()
    threads.join()


def iter_nothing():
    yield


def test_a_call_on_a_thread_that_raises_anything_ends_with_its_error(threads, wakes):
    def call(record, context):
        if record.sequence_number == "1":
            raise SystemExit(3)
        return iter_nothing()

    runner = ThreadRunner(call, wakes, threads)
    runner.start(calls(1, 2))

    ended = dict(each[:2] for each in wakes.take(runner, 2))

    assert isinstance(ended[1], SystemExit)
    assert isinstance(ended[2], ProcessorLoadError)
    runner.close()
    threads.join()


def test_coroutines_run_at_the_same_time_and_what_they_raise_is_theirs(loop, threads, wakes):
    both = asyncio.Event()
    begun = []

    async def call(record, context):
        begun.append(context)
        if len(begun) == 2:
            both.set()
        await both.wait()
        if record.sequence_number == "1":
            raise SystemExit(3)
        return iter_nothing() if record.sequence_number == "2" else None

    runner = loop(call)
    runner.start(calls(1, 2))
    ended = dict(each[:2] for each in wakes.take(runner, 2))
    runner.start(calls(3))

    assert isinstance(ended[1], SystemExit)
    assert isinstance(ended[2], ProcessorLoadError)
    assert wakes.take(runner, 1) == [(3, None, False)], "a SystemExit does not end the loop"
    assert [thread.name for thread in threads.made] == ["records"]


def test_a_coroutine_that_takes_longer_than_its_time_is_named_so_and_its_own_timeout_is_its_own(
    loop, wakes
):
    async def call(record, context):
        if record.sequence_number == "1":
            await asyncio.sleep(HUNG_S)
        raise TimeoutError("the database")

    runner = loop(call, 0.001)
    runner.start(calls(1))
    ((_, late, _),) = wakes.take(runner, 1)
    runner.start(calls(2))
    ((_, own, _),) = wakes.take(runner, 1)

    assert str(late) == "process_record did not return within 0.001 s (concurrency.timeout)"
    assert str(own) == "the database"


def test_only_coroutines_that_end_by_the_cancellation_asked_for_are_cancelled(loop, wakes):
    begun = threading.Semaphore(0)

    async def call(record, context):
        if record.sequence_number == "3":
            raise asyncio.CancelledError
        begun.release()
        try:
            await asyncio.sleep(HUNG_S)
        except asyncio.CancelledError:
            if record.sequence_number == "1":
                raise
            raise ValueError("while it cleaned up") from None

    runner = loop(call)
    runner.start(calls(1, 2))
    for _ in range(2):
        assert begun.acquire(timeout=HUNG_S)
    runner.cancel()
    ended = sorted(wakes.take(runner, 2))
    assert [(number, type(error), cancelled) for number, error, cancelled in ended] == [
        (1, asyncio.CancelledError, True),
        (2, ValueError, False),
    ]

    runner.start(calls(3))
    ((_, error, cancelled),) = wakes.take(runner, 1)
    assert (type(error), cancelled) == (asyncio.CancelledError, False), "user code's own"


def test_a_number_that_was_cancelled_may_be_used_again(loop, wakes):
    begun = threading.Semaphore(0)
    sleeps = [HUNG_S]

    async def call(record, context):
        begun.release()
        if sleeps:
            await asyncio.sleep(sleeps.pop())
        raise asyncio.CancelledError

    runner = loop(call)
    runner.start(calls(1))
    assert begun.acquire(timeout=HUNG_S)
    runner.cancel()
    assert wakes.take(runner, 1)[0].is_cancelled
    runner.start(calls(1))
    assert not wakes.take(runner, 1)[0].is_cancelled


def test_close_cancels_what_is_left_on_the_loop_and_closes_its_generators(loop, threads, wakes):
    ended = []

    async def generator():
        try:
            yield 1
            yield 2
        finally:
            ended.append("generator")

    async def own():
        try:
            await asyncio.sleep(HUNG_S)
        finally:
            ended.append("task of user code")

    kept = []

    async def call(record, context):
        kept.append(asyncio.create_task(own()))
        kept.append(generator())
        await anext(kept[-1])

    runner = loop(call)
    runner.start(calls(1))
    wakes.take(runner, 1)
    runner.close()
    threads.join()

    assert sorted(ended) == ["generator", "task of user code"]
    runner.close()
    runner.cancel()


def test_a_task_that_refuses_to_end_does_not_keep_close(loop, threads, wakes, monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_WAIT_S", 0.05)

    async def own():
        while True:
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                continue

    kept = []

    async def call(record, context):
        kept.append(asyncio.create_task(own()))
        await asyncio.sleep(0)

    runner = loop(call)
    runner.start(calls(1))
    wakes.take(runner, 1)
    runner.close()
    threads.join()

    assert not kept[0].done(), "it was left, and its thread is over"
    kept[0]._log_destroy_pending = False


class Deep:
    """Waits in a generator of its own, as many libraries do; below `depth` coroutines."""

    def __init__(self, reached):
        self.reached = reached

    def __await__(self):
        yield from self.steps()

    def steps(self):
        self.reached.set()
        yield from asyncio.get_running_loop().create_future()  # the line that waits

    async def below(self, depth):
        if depth:
            await self.below(depth - 1)
        else:
            await self


def stack_of_a_call(loop, wakes, depth):
    """The stack of one coroutine, which waits, as written by another."""
    file = io.StringIO()

    async def call(record, context):
        if record.sequence_number == "1":
            await Deep(reached).below(depth)
        await reached.wait()
        runner.write_coroutines(file)

    reached = asyncio.Event()
    runner = loop(call)
    runner.start(calls(1, 2))
    assert wakes.take(runner, 1) == [(2, None, False)]
    first, second = file.getvalue().split("Coroutine of process_record for the record at ")[1:]
    assert second.startswith("2:\n")
    return first


def test_the_stack_of_a_coroutine_goes_through_generators_to_the_line_that_waits(loop, wakes):
    text = stack_of_a_call(loop, wakes, 3)

    assert text.startswith("1:\n")
    assert text.count("await self.below(depth - 1)") == 3
    assert text.index("in call") < text.index("in __await__") < text.index("the line that waits")


def test_of_a_very_deep_stack_the_outer_part_is_written(loop, wakes):
    text = stack_of_a_call(loop, wakes, 100)

    assert "in call" in text
    assert "the line that waits" not in text
    assert text.count("  File ") + text.count("[Previous line repeated") < 60
