"""Single records in the test kit: orders, rows, failures, crashes."""

import asyncio
import time

import pytest

from kclrun import RecordProcessor
from kclrun.errors import LimitExceeded, ProcessorLoadError, RetryLater, SettingsError, SinkError
from kclrun.testing import (
    Faults,
    assert_any_order_gives_the_same,
    make_record,
    replay,
    run_processor,
)
from tests.support.tables import over_rows

KEYS = "abacabad"
RECORDS = [make_record(str(n), key=key, ordinal=n) for n, key in enumerate(KEYS)]


class Threads(RecordProcessor):
    def initialize(self, context):
        self.order = []
        self.failed = {}

    def process_record(self, record, context):
        number = record.data.decode()
        self.order.append(number)
        context.emit({"n": number})
        self.fail(number)

    def fail(self, number):
        pass


class Tasks(Threads):
    async def process_record(self, record, context):
        number = record.data.decode()
        context.emit({"n": number})
        await asyncio.sleep(int(number) % 3)
        self.order.append(number)
        self.fail(number)


class Poison(Tasks):
    def fail(self, number):
        if number == "2":
            raise ValueError("poison")


class Shared(Tasks):
    """Its rows depend on the order of calls of several keys."""

    async def process_record(self, record, context):
        await asyncio.sleep(0.01)
        self.order.append(record)
        context.emit({"place": len(self.order), "n": record.data.decode()})


def numbers(run):
    return [row["n"] for row in run.rows]


def test_the_property_holds_and_is_broken_by_a_processor_whose_keys_share_a_count():
    assert_any_order_gives_the_same(Tasks, RECORDS)
    assert_any_order_gives_the_same(Threads, RECORDS, settings={"concurrency": {"order": "none"}})
    assert_any_order_gives_the_same(
        Poison, RECORDS, settings={"on_error": {"then": "skip", "retries": 2}}
    )
    with pytest.raises(AssertionError, match="with seed=0 the result is another"):
        assert_any_order_gives_the_same(Shared, RECORDS)


class Busy(Tasks):
    def fail(self, number):
        if number == "2" and not self.failed.setdefault(number, 0):
            self.failed[number] += 1
            raise RetryLater(600)


def test_a_record_that_asks_for_later_holds_its_key_alone():
    order = (
        run_processor(
            Busy, RECORDS, settings={"concurrency": {"records": 8}}, faults=Faults(seed=1)
        )
        .processors[0]
        .order
    )
    assert order.index("4") > len(order) - order[::-1].index("2") - 1
    assert order.index("7") < len(order) - order[::-1].index("2") - 1


def test_without_a_seed_async_def_runs_in_real_time():
    """As `kclrun dead-letters redrive` does: a service takes its time."""

    class Timed(RecordProcessor):
        async def process_record(self, record, context):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, int)
            began = time.monotonic()
            await asyncio.sleep(0.01)
            context.emit({"is_real": time.monotonic() - began >= 0.009})

    assert (
        run_processor(Timed, ["a", "b"], faults=Faults(seed=None)).rows == [{"is_real": True}] * 2
    )


@pytest.mark.parametrize("crash_after", range(1, len(KEYS) + 1))
@pytest.mark.parametrize("seed", range(4))
def test_after_a_crash_with_records_done_out_of_order_each_row_is_there_once(crash_after, seed):
    run = replay(
        Tasks,
        RECORDS,
        settings={"concurrency": {"records": 4}, "checkpoint": {"every": "batch"}},
        faults=Faults(crash_after=crash_after, seed=seed),
    )
    assert numbers(run) == list("01234567")
    assert run.delivered >= len(KEYS)


def test_a_call_that_takes_too_long_is_cancelled_and_has_failed():
    class Slow(Tasks):
        def fail(self, number):
            pass

        async def process_record(self, record, context):
            await asyncio.sleep(3600 if record.data == b"3" else 0)

    run = run_processor(
        Slow,
        RECORDS,
        settings={"concurrency": {"records": 4, "timeout": "30s"}, "on_error": {"then": "skip"}},
    )
    assert [record.data for record in run.given_up] == [b"3"]
    assert run.last_error == (
        "TimeoutError: process_record did not return within 30 s (concurrency.timeout)"
    )


def test_a_release_ends_between_two_records():
    class Leaving(Threads):
        def process_record(self, record, context):
            super().process_record(record, context)
            if record.data == b"2":
                context.release()

    run = run_processor(Leaving, RECORDS)
    assert run.released
    assert numbers(run) == ["0", "1", "2"]
    assert run.position == RECORDS_POSITIONS[2]


RECORDS_POSITIONS = []


@pytest.fixture(autouse=True)
def _positions():
    class Positions(RecordProcessor):
        def process_record(self, record, context):
            RECORDS_POSITIONS.append(record.position)

    RECORDS_POSITIONS.clear()
    run_processor(Positions, RECORDS)


def test_the_context_of_the_processor_takes_no_row_of_a_record_and_a_kept_one_none_later():
    kept = []

    class Wrong(RecordProcessor):
        def initialize(self, context):
            self.context = context

        def process_record(self, record, context):
            for each in kept or [self.context]:
                with pytest.raises(SinkError):
                    each.emit({})
            kept.append(context)

    assert run_processor(Wrong, ["a", "b"]).rows == []


class Both(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass

    def process_record(self, record, context):
        pass


class Batches(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass


class AsyncBatches(RecordProcessor):
    async def process_records(self, batch, checkpointer):
        pass


class Returns(RecordProcessor):
    def process_record(self, record, context):
        return asyncio.sleep(0)


@over_rows(
    ("processor", "settings", "words"),
    [
        (Both, {}, "Both defines process_records and process_record"),
        (RecordProcessor, {}, "does not define process_records\nWrite process_records"),
        (Batches, {"concurrency": {"records": 2}}, "concurrency: is for process_record"),
        (Threads, {"checkpoint": {"every": "manual"}}, "manual is for process_records"),
        (
            Threads,
            {"concurrency": {"timeout": "1s", "records": 2}},
            "concurrency.timeout: is for `async def",
        ),
        (AsyncBatches, {}, "process_records is `async def`"),
        (Returns, {}, "process_record returned a coroutine, and nothing of it has run"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(processor, settings, words):
    with pytest.raises(ProcessorLoadError) as caught:
        run_processor(processor, ["a"], settings=settings)
    assert words in str(caught.value)


class Seen(RecordProcessor):
    """The state of a key is the records that it has seen, also those whose call raised later."""

    def initialize(self, context):
        self.context = context
        self.failed = set()

    async def process_record(self, record, context):
        number = record.data.decode()
        count = context.counter("calls").add(record)
        await asyncio.sleep(int(number) % 3)
        numbers = context.table("numbers", list[str])
        numbers[record] = [*numbers.get(record, []), number]
        context.emit({"n": number, "count": count})
        if number == "6" or (number in "23" and number not in self.failed):
            self.failed.add(number)
            raise ValueError("as it is in the test")

    def shard_ended(self, checkpointer):
        state = self.context.state
        for key in state:
            state[key]["ended"] = True
        checkpointer.checkpoint()


def of_key(*numbers, **more):
    return {"calls": len(numbers), "numbers": list(numbers), **more}


# KEYS is "abacabad", and record 6 is given up.
AT_THE_END = {
    "a": of_key("0", "2", "4", ended=True),
    "b": of_key("1", "5", ended=True),
    "c": of_key("3", ended=True),
    "d": of_key("7", ended=True),
}


def test_any_order_gives_the_same_state_and_a_call_that_raises_leaves_none():
    settings = {"on_error": {"retries": 1, "then": "skip"}}
    for concurrency in (None, {"records": 3}, {"records": 64}):
        run = run_processor(Seen, RECORDS, settings=settings | {"concurrency": concurrency})
        assert run.state == AT_THE_END
        assert [record.data for record in run.given_up] == [b"6"]

    assert_any_order_gives_the_same(Seen, RECORDS, settings=settings)


@pytest.mark.parametrize("crash_after", range(1, 8))
@pytest.mark.parametrize("concurrency", [None, {"records": 3}])
def test_after_a_crash_the_state_is_that_of_the_checkpoint_and_nothing_counts_twice(
    crash_after, concurrency
):
    settings = {
        "on_error": {"retries": 1, "then": "skip"},
        "checkpoint": {"every": "batch"},
        "fetch": {"batch_max": 3},
        "concurrency": concurrency,
    }

    run = replay(Seen, RECORDS, settings=settings, faults=Faults(crash_after=crash_after))

    assert run.state == AT_THE_END


def test_a_lease_that_is_given_away_keeps_the_state_of_settled_records():
    run = run_processor(
        Seen, RECORDS[:2], settings={"concurrency": {"records": 3}}, end_of_shard=False
    )

    assert run.state == {"a": of_key("0"), "b": of_key("1")}


class Reaches(RecordProcessor):
    """Its one call does what an option says."""

    def initialize(self, context):
        self.context = context

    def process_record(self, record, context):
        self.context.options["reach"](self.context, context, record)


@pytest.mark.parametrize(
    ("reach", "error", "words"),
    [
        (lambda _, own, __: own.state["other"].get("n"), LimitExceeded, "another key"),
        (lambda _, own, __: own.counter("n").add("other"), LimitExceeded, "another key"),
        (lambda _, own, __: list(own.state), LimitExceeded, "only shard_ended"),
        (lambda _, own, __: len(own.state), LimitExceeded, "only shard_ended"),
        (lambda shard, _, each: shard.state[each].get("n"), SinkError, "the call's own context"),
        (lambda shard, _, each: shard.counter("n").add(each), SinkError, "the call's own context"),
        (lambda shard, _, __: list(shard.state), SinkError, "the call's own context"),
    ],
)
@pytest.mark.parametrize("concurrency", [None, {"records": 3}])
def test_a_record_reaches_the_state_of_its_own_key_alone(reach, error, words, concurrency):
    options = {"reach": reach}
    with pytest.raises(error, match=words):
        run_processor(
            Reaches,
            RECORDS[:1],
            settings={"options": options, "concurrency": concurrency},
        )


def test_a_change_beyond_the_limit_of_a_record_is_not_made():
    seen = []

    def large(_, context, record):
        entry = context.state[record]
        try:
            entry["large"] = b"x" * (17 * 2**20)
        finally:
            seen.append(entry.get("large"))

    with pytest.raises(LimitExceeded, match="one record changed more than 16777216 bytes"):
        run_processor(Reaches, RECORDS[:1], settings={"options": {"reach": large}})
    assert seen == [None]


def test_one_record_changes_no_more_than_waits_in_memory():
    def much(_, context, record):
        for number in range(100):
            context.state[record][str(number)] = b"x" * 2**18

    with pytest.raises(LimitExceeded, match="one record changed more than 16777216 bytes"):
        run_processor(Reaches, RECORDS[:1], settings={"options": {"reach": much}})


def test_without_an_order_of_keys_there_is_no_state():
    with pytest.raises(SettingsError, match="order: key"):
        run_processor(Seen, RECORDS, settings={"concurrency": {"records": 3, "order": "none"}})
