"""Windows against a model that looks at all records at once; and what a timer may do."""

import asyncio
import random
from datetime import UTC, datetime

import pytest

from kclrun import RecordProcessor
from kclrun.errors import (
    LimitExceeded,
    ProcessorError,
    ProcessorLoadError,
    SettingsError,
    SinkError,
)
from kclrun.state import timers as state_timers
from kclrun.state.event_times import arrival_of
from kclrun.state.timers import Timer
from kclrun.testing import (
    EventTimeWarning,
    Faults,
    assert_any_order_gives_the_same,
    make_record,
    replay,
    run_processor,
)
from kclrun.windows import Hopping, Session, Tumbling, Windows
from tests.support.tables import over_rows

KINDS = [Tumbling(5.0), Hopping(6.0, 2.0), Session(3.0)]
LATENESS_S = 4.0
START = 10_000.0


def late_records(seed):
    """Sixty records of three keys, up to ten seconds out of order: some are late."""
    drawn = random.Random(seed)
    return [
        make_record(
            key=drawn.choice("abc"),
            ordinal=ordinal,
            arrived_at_s=START + ordinal + drawn.choice([0, 0, 0, -1.5, -3, -10]),
        )
        for ordinal in range(60)
    ]


class Listed(RecordProcessor):
    """Each window with the ordinals of its records."""

    kind = KINDS[0]

    def initialize(self, context):
        self.context = context
        self.windows = Windows(context, "w", self.kind, list[int], lambda one, two: one + two)

    def process_records(self, batch, checkpointer):
        for record in batch:
            ordinal = int(record.sequence_number[-3:])
            if not self.windows.add(record, [ordinal]):
                self.context.emit({"late": ordinal}, to="late")

    def on_timer(self, timer, checkpointer):
        for each in self.windows.closed(timer):
            row = {"key": each.key, "start": each.start, "end": each.end, "of": sorted(each.value)}
            self.context.emit(row)


class ListedSingly(Listed):
    """The same, of single records that run at the same time."""

    process_records = RecordProcessor.process_records

    async def process_record(self, record, context):
        ordinal = int(record.sequence_number[-3:])
        await asyncio.sleep(ordinal % 7)
        if not self.windows.add(record, [ordinal], context):
            context.emit({"late": ordinal}, to="late")


def spans_of(kind, times):
    """The windows that these records of a key are in, made of all of them at once."""
    if isinstance(kind, Session):
        spans = []
        for at in sorted(times):
            if spans and at <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], at + kind.gap_s))
            else:
                spans.append((at, at + kind.gap_s))
        return spans
    size, every = kind.size_s, getattr(kind, "every_s", kind.size_s)
    starts = {number * every for number in range(int(START / every) - 20, int(START / every) + 60)}
    return [(at, at + size) for at in sorted(starts) if any(at <= one < at + size for one in times)]


def model(kind, records):
    """The rows and the late records: after each record every window is made anew from all records
    that were in time, and those that the watermark has passed since are closed."""
    taken, closed, rows, late, watermark = {}, {}, [], [], None
    for record in records:
        key, at = record.partition_key, record.approximate_arrival_timestamp
        ordinal = int(record.sequence_number[-3:])
        known = [one for one in taken.get(key, []) if one not in closed.get(key, {})]
        open_spans = [
            span
            for span in spans_of(kind, [one for _, one in known] + [at])
            if span[0] <= at < span[1] and (watermark is None or span[1] > watermark)
        ]
        if open_spans:
            taken.setdefault(key, []).append((ordinal, at))
        else:
            late.append(ordinal)
        moved = (at - LATENESS_S) // 1.0
        if watermark is None or moved > watermark:
            passed = []
            for of, members in taken.items():
                left = [one for one in members if one not in closed.get(of, {})]
                for start, end in spans_of(kind, [one for _, one in left]):
                    is_new = watermark is None or end > watermark
                    if end <= moved and is_new:
                        inside = [one for one in left if start <= one[1] < end]
                        passed.append((end, of, start, inside))
            for end, of, start, inside in sorted(passed):
                rows.append(
                    {"key": of, "start": start, "end": end, "of": sorted(n for n, _ in inside)}
                )
                if isinstance(kind, Session):
                    closed.setdefault(of, set()).update(inside)
            watermark = moved
    return rows, late


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.seconds) for seed in range(2, 8))]
)
def test_windows_are_those_of_a_model_however_records_come_in_batches(kind, seed, monkeypatch):
    monkeypatch.setattr(Listed, "kind", kind)
    records = late_records(seed)
    rows, late = model(kind, records)
    assert late, "some records are late"
    assert len(rows) > 10

    for batch_max in (1, 7, 100):
        run = run_processor(
            Listed,
            records,
            settings={
                "watermark": {"lateness": f"{LATENESS_S}s"},
                "fetch": {"batch_max": batch_max},
            },
        )
        assert run.rows == rows
        assert [row["late"] for row in run.outputs["late"]] == late
    timing = {"watermark": {"lateness": f"{LATENESS_S}s"}, "fetch": {"batch_max": 20}}
    assert_any_order_gives_the_same(ListedSingly, records, seeds=range(3), settings=timing)
    run = run_processor(ListedSingly, records, settings=timing | {"concurrency": {"records": 8}})
    assert run.rows == rows
    assert [row["late"] for row in run.outputs["late"]] == late


@pytest.mark.parametrize("crash_after", [1, 13, 37, 59])
@pytest.mark.parametrize("kind", [Listed, ListedSingly])
def test_a_crash_changes_no_window(kind, crash_after):
    records = late_records(3)
    whole = run_processor(Listed, records, settings={"watermark": {"lateness": f"{LATENESS_S}s"}})
    for every, batch_max in (("batch", 1), ("batch", 5), ("10s", 3)):
        run = replay(
            kind,
            records,
            settings={
                "checkpoint": {"every": every},
                "fetch": {"batch_max": batch_max},
                "watermark": {"lateness": f"{LATENESS_S}s"},
                **({"concurrency": {"records": 4}} if kind is ListedSingly else {}),
            },
            faults=Faults(crash_after=crash_after),
        )
        assert (run.rows, run.timers) == (whole.rows, whole.timers)


class Told(RecordProcessor):
    """Does what `plan` says with each record and timer, and emits the timers."""

    def initialize(self, context):
        self.context = context
        self.failures = context.options.get("failures", 0)

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.context.options["plan"](self.context, record)

    def on_timer(self, timer, checkpointer):
        self.context.emit({"timer": timer.name, "at": timer.at - START})
        if self.failures:
            self.failures -= 1
            raise RuntimeError
        self.context.options.get("again", lambda *_: None)(self.context, timer)


def reported(plan, seconds=(0, 1, 2, 3, 9), *, wall_until=None, retries=0, **options):
    records = [make_record(ordinal=at, arrived_at_s=START + at) for at in seconds]
    return run_processor(
        Told,
        records,
        settings={
            "options": {"plan": plan, **options},
            "watermark": {"lateness": "0s"},
            "on_error": {"retries": retries},
        },
        wall_until=None if wall_until is None else START + wall_until,
    )


def names(run):
    return [(row["timer"], row["at"]) for row in run.rows]


def at_first(change):
    def plan(context, record):
        if record.approximate_arrival_timestamp == START:
            change(context, record)

    return plan


def test_timers_fire_in_the_order_of_their_time_and_a_key_has_one_of_each_name():
    def plan(context, record):
        context.set_timer(record, START + 8, "b")
        context.set_timer(record, datetime.fromtimestamp(START + 2, UTC), "a")
        context.set_timer(record, START + 1, "b")
        context.set_timer(record, START + 7, "never")
        context.set_timer(record, START + 100, "open")
        context.delete_timer(record, "never")

    run = reported(at_first(plan))
    assert names(run) == [("b", 1.0), ("a", 2.0)]
    assert run.timers == [Timer(START + 100, "key", "open")]


def test_a_timer_of_the_clock_fires_without_records_and_may_set_the_next_one():
    def again(context, timer):
        context.set_timer(timer.key, timer.at + 10, timer.name, clock="wall")

    def plan(context, record):
        context.set_timer(record, START + 5, "tick", clock="wall")

    run = reported(at_first(plan), wall_until=30, again=again)
    assert names(run) == [("tick", 5.0), ("tick", 15.0), ("tick", 25.0)]


def test_a_timer_set_behind_the_watermark_fires_with_its_next_step():
    def plan(context, record):
        if record.approximate_arrival_timestamp == START + 2:
            context.set_timer(record, START - 50, "past")

    assert names(reported(plan)) == [("past", -50.0)]
    assert names(reported(plan, seconds=(0, 1, 2))) == [("past", -50.0)]


def test_a_timer_that_raises_is_called_again_with_its_rows_taken_back():
    def plan(context, record):
        context.set_timer(record, START + 1, "one")

    assert names(reported(at_first(plan), retries=2, failures=2)) == [("one", 1.0)]
    with pytest.raises(RuntimeError):
        reported(at_first(plan), retries=1, failures=2)


@pytest.mark.parametrize(
    ("at", "words"),
    [(START + 1, "later times"), (START - 9, "later times"), (float("nan"), "number of seconds")],
)
def test_a_timer_that_would_never_end_or_has_no_time_is_refused(at, words):
    def plan(context, record):
        context.set_timer(record, START + 1, "one")

    with pytest.raises(LimitExceeded, match=words):
        reported(at_first(plan), again=lambda context, timer: context.set_timer(timer.key, at))


def test_a_shard_has_a_limit_of_pending_timers(monkeypatch):
    monkeypatch.setattr(state_timers, "TIMERS_MAX", 2)

    def plan(context, record):
        for name in ("a", "b", "b", "c"):
            context.set_timer(record, START + 99, name)

    with pytest.raises(ProcessorError, match="2 pending timers"):
        reported(at_first(plan))


def test_timers_need_on_timer_and_checkpoints_of_the_runtime():
    class Without(RecordProcessor):
        def initialize(self, context):
            self.context = context

        def process_records(self, batch, checkpointer):
            self.context.set_timer(batch[0], START)

    with pytest.raises(SettingsError, match="defines on_timer"):
        run_processor(Without, ["a"])
    with pytest.raises(ProcessorLoadError, match="checkpoints of the runtime"):
        run_processor(Listed, ["a"], settings={"checkpoint": {"every": "manual"}})


def test_a_record_sets_timers_of_its_own_key_by_the_context_of_its_call():
    seen = []

    class Own(Told):
        process_records = RecordProcessor.process_records

        def process_record(self, record, context):
            if seen:
                with pytest.raises(SinkError, match="while it runs"):
                    seen.pop().set_timer(record, START)
                return
            seen.append(context)
            with pytest.raises(LimitExceeded, match="another key"):
                context.set_timer("other", START)
            with pytest.raises(LimitExceeded, match="another key"):
                context.delete_timer("other")
            for change in (self.context.set_timer, self.context.delete_timer):
                with pytest.raises(SinkError, match="its second argument"):
                    change(*(record, START)[: 2 if change == self.context.set_timer else 1])
            context.set_timer(record, START + 1, "gone")
            context.delete_timer(record, "gone")
            context.set_timer(record, START + 1, "kept")

    records = [make_record(key="k", ordinal=at, arrived_at_s=START + at) for at in (0, 5)]
    run = run_processor(
        Own,
        records,
        settings={
            "options": {"plan": None},
            "watermark": {"lateness": "0s"},
            "concurrency": {"records": 2},
        },
    )
    assert names(run) == [("kept", 1.0)]
    assert not seen


def test_a_wrong_clock_of_a_producer_or_a_broken_record_does_not_move_the_watermark():
    class Own(Told):
        def event_time(self, record):
            return {0: START, 1: START + 9e9, 2: None, 3: START + 2}.get(
                int(arrival_of(record) - START), arrival_of(record)
            )

    seen = []
    records = [make_record(ordinal=at, arrived_at_s=START + at) for at in (0, 1, 2, 3, 4)]
    plan = {"plan": lambda context, _: seen.append(context.watermark)}
    with pytest.warns(EventTimeWarning, match="1 record is after"):
        run_processor(Own, records, settings={"options": plan, "watermark": {"lateness": "0s"}})
    assert seen == [None, START, START + 1, START + 1, START + 2]


@over_rows(
    "make",
    [
        *(lambda: Tumbling(0), lambda: Session(-1), lambda: Hopping(2, 3), lambda: Hopping(101, 1)),
        *(lambda: Tumbling(0.0005), lambda: Hopping(1, 0.0015), lambda: Tumbling(float("inf"))),
        lambda: Tumbling(float("nan")),
    ],
)
def test_a_window_without_a_length_is_refused(make):
    with pytest.raises(SettingsError):
        make()


@pytest.mark.parametrize("crash_after", [None, 1])
def test_an_idle_shard_closes_its_windows_and_a_record_that_is_late_by_this_is_reported(
    crash_after,
):
    class Measured(Listed):
        kind = Tumbling(5.0)

        def initialize(self, context):
            super().initialize(context)
            self.windows = Windows(
                *(context, "w", self.kind, list[int], lambda one, two: one + two),
                time_of=self.event_time,
            )

        def event_time(self, record):
            return float(record.data or record.approximate_arrival_timestamp)

    # Window START..START + 5 closes by the clock: 4 s of lateness and 2.5 s behind its end.
    second = make_record(str(START + 1), key="a", ordinal=1, arrived_at_s=START + 30)
    records = [make_record(key="a", ordinal=0, arrived_at_s=START), second]

    def ran(idle, wall_until):
        settings = {
            "watermark": {"lateness": f"{LATENESS_S}s", "idle": idle},
            "checkpoint": {"every": "batch"},
            "fetch": {"batch_max": 1},
        }
        given = {"settings": settings, "wall_until": wall_until}
        if crash_after is None:
            return run_processor(Measured, records, **given)
        return replay(Measured, records, faults=Faults(crash_after=crash_after), **given)

    one = {"key": "a", "start": START, "end": START + 5}
    assert ran("10s", START + 60).rows == [one | {"of": [0]}]
    assert ran("10s", START + 60).outputs["late"] == [{"late": 1}]
    together = ran("31s", START + 61)
    assert together.rows == [one | {"of": [0, 1]}]
    assert not together.outputs.get("late")
    assert ran("31s", START + 60).rows == ran(None, START + 10**6).rows == []


@pytest.mark.parametrize("since", [0, 1_700_000_000, -3_600])
@pytest.mark.parametrize(
    "kind", [Tumbling(0.1), Tumbling(0.007), Tumbling(5.0), Hopping(0.6, 0.2), Hopping(1.1, 0.1)]
)
def test_each_instant_of_a_millisecond_is_in_its_windows_and_in_no_other(kind, since):
    every_ms = round(1000 * getattr(kind, "every_s", kind.size_s))
    size_ms = round(1000 * kind.size_s)
    for number in range(1_200):
        at_ms = since * 1000 + number
        windows = kind.of(at_ms / 1000)

        assert [round(1000 * start) % every_ms for start, _ in windows] == [0] * len(windows)
        assert {round(1000 * (end - start)) for start, end in windows} == {size_ms}
        assert all(start <= at_ms / 1000 < end for start, end in windows)
        begun = at_ms // every_ms - (at_ms - size_ms) // every_ms
        assert len(windows) == begun


class Batches(RecordProcessor):
    def initialize(self, context):
        self.context = context
        self.windows = Windows(context, "w", Tumbling(5.0), int, lambda one, two: one + two)

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.add(record, self.context)

    def on_timer(self, timer, checkpointer):
        for window in self.windows.closed(timer):
            self.context.emit({"key": window.key, "n": window.value})

    def add(self, record, context):
        assert self.windows.add(record, 1, context)
        assert self.windows.open(record, context)


class Singles(Batches):
    process_records = RecordProcessor.process_records

    def process_record(self, record, context):
        self.add(record, context)


@pytest.mark.parametrize("kind", [Batches, Singles])
def test_add_and_open_take_the_context_at_hand_in_every_method(kind):
    records = [make_record(key=key, ordinal=at, arrived_at_s=START) for at, key in enumerate("aab")]
    run = run_processor(kind, records, wall_until=START)

    assert {key: values["w"][0][2] for key, values in run.state.items()} == {"a": 2, "b": 1}
