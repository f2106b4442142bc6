"""A run of `engine: spark` over a query that stands for Spark's: when it ends, and what is told.

`tests/spark/test_spark_running_watch.py` has the same of real queries, which take seconds.
"""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JError

from kclrun.config.load import settings_of
from kclrun.errors import EngineFailed
from kclrun.lifecycle.stopping import StopPlan
from kclrun.model.time import Instant, WallTime
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after
from kclrun.spark.running import runtime
from kclrun.spark.running.runtime import (
    Ending,
    ExitReason,
    SparkRun,
    Watch,
    has_come_to_rest,
    let_end,
)

S0 = "shardId-000000000000"


def batch(number, *, is_idle=False, **more):
    duration = {"latestOffset": 1} if is_idle else {"addBatch": 1, "triggerExecution": 250}
    return {"batchId": number, "durationMs": duration, **more}


class SparkQuery:
    """A streaming query in time that only `wait` moves. `plan` has, for each wait, the progress
    that is reported then; a batch is under way while `busy_until` has not come."""

    def __init__(self, plan=(), *, busy_until=0.0, takes_state=True, failure=None):
        self.now = 0.0
        self.plan = list(plan)
        self.reported = []
        self.busy_until = busy_until
        self.is_let_end = self.is_stopped = False
        self._takes_state = takes_state
        self._failure = failure
        self._jsq = self

    @property
    def isActive(self):
        return bool(self.plan) and not self.is_stopped

    @property
    def status(self):
        return {"message": "Waiting", "isTriggerActive": self.now < self.busy_until}

    @property
    def lastProgress(self):
        return self.recentProgress[-1] if self.reported else None

    @property
    def recentProgress(self):
        return [SimpleNamespace(json=json.dumps(each)) for each in self.reported]

    def wait(self, pause_s):
        self.now += pause_s
        if self.plan and (step := self.plan.pop(0)) is not None:
            self.reported += step

    def stop(self):
        self.is_stopped = True

    def exception(self):
        return self._failure

    # What `let_end` reaches through the JVM.

    def streamingQuery(self):
        if not self._takes_state:
            raise Py4JError("no such method")
        return self

    def state(self):
        return self

    def get(self):
        return self

    def getClass(self):
        return self

    def getName(self):
        return "org.apache.spark.ACTIVE$"

    def getClassLoader(self):
        return self

    def loadClass(self, name):
        assert name == "org.apache.spark.TERMINATED$"
        return SimpleNamespace(getField=lambda field: SimpleNamespace(get=lambda _: (name, field)))

    def set(self, value):
        assert value == ("org.apache.spark.TERMINATED$", "MODULE$")
        self.is_let_end = True


class Seen:
    def __init__(self, query, grace_s=10.0):
        self.stop = StopPlan(grace_s)
        self.batches, self.looks = [], 0
        self._query = query
        self.watch = Watch(
            self.stop,
            take_progress=lambda each: self.batches.append(each["batchId"]),
            looked=self._looked,
            clock=lambda: query.now,
            wait=query.wait,
        )

    def _looked(self):
        self.looks += 1

    def until_ended(self, *, enough_at=1e9, pressed_at=1e9):
        def is_enough():
            if self._query.now >= pressed_at and not self.stop.is_wanted:
                self.stop.press(signal.SIGTERM, Instant(self._query.now))
            return self._query.now >= enough_at

        return self.watch.until_ended(self._query, is_enough)


def test_each_batch_is_passed_on_once_in_order_and_an_idle_one_each_time_it_is_seen():
    query = SparkQuery(
        [
            [batch(0)],
            None,
            [batch(1), batch(2), batch(3)],
            [batch(4, is_idle=True)],
            None,
            [batch(4)],
            [batch(5)],
        ]
    )
    seen = Seen(query)

    assert seen.until_ended() is Ending.BY_ITSELF
    assert seen.batches == [0, 1, 2, 3, 4, 4, 4, 5]
    assert seen.looks == 8, "before each wait, and after the end"
    assert query.now == pytest.approx(7 * 0.2)
    assert not query.is_stopped

    query.plan, query.reported = [[batch(0)], [batch(1)]], []
    assert seen.until_ended() is Ending.BY_ITSELF
    assert seen.batches[8:] == [0, 1], "the next query counts from its own first batch"


@pytest.mark.parametrize("takes_state", [True, False])
@pytest.mark.parametrize("by", ["enough_at", "pressed_at"])
def test_a_query_is_stopped_after_its_running_batch_and_two_looks_at_rest(by, takes_state):
    query = SparkQuery([[batch(0)], *[None] * 4, [batch(1)], *[None] * 99], busy_until=0.85)
    query._takes_state = takes_state
    seen = Seen(query)

    assert seen.until_ended(**{by: 0.4}) is Ending.AS_ASKED
    assert query.is_let_end is takes_state
    assert query.is_stopped
    # At rest from 0.85 s on: looks at 0.85 and 0.9 s, each with a pause after it.
    assert query.now == pytest.approx(0.95)
    assert seen.batches == [0, 1]


def test_a_look_between_two_steps_of_spark_is_not_taken_for_rest():
    query = SparkQuery([None] * 99)
    looks = iter([False, True, False, False])
    query.__class__ = type("Restless", (SparkQuery,), {})
    query.__class__.status = property(
        lambda _: {"message": "Waiting", "isTriggerActive": next(looks)}
    )

    assert Seen(query).until_ended(enough_at=0.0) is Ending.AS_ASKED
    assert next(looks, None) is None


@pytest.mark.parametrize(("grace_s", "ends_at"), [(0.0, 0.6), (0.3, 0.7)])
def test_the_end_of_the_grace_cuts_a_batch_short(grace_s, ends_at):
    query = SparkQuery([None] * 99, busy_until=99.0)

    assert Seen(query, grace_s).until_ended(pressed_at=0.4) is Ending.CUT_SHORT  # seen at 0.6 s
    assert query.now == pytest.approx(ends_at)
    assert query.is_stopped


def test_the_failure_of_a_query_is_raised_once_its_progress_was_taken():
    query = SparkQuery([[batch(0)]], failure=ValueError("Job aborted"))
    seen = Seen(query)

    with pytest.raises(EngineFailed, match="Job aborted"):
        seen.until_ended()
    assert seen.batches == [0]


@pytest.mark.parametrize(
    ("message", "is_active", "rests"),
    [
        ("Waiting for data", False, True),
        ("Processing", True, False),
        ("Stopped", True, True),
        ("Terminated with exception", True, True),
    ],
)
def test_a_query_rests_between_its_triggers_and_after_its_end(message, is_active, rests):
    status = {"message": message, "isTriggerActive": is_active}

    assert has_come_to_rest(SimpleNamespace(status=status)) is rests


def test_a_spark_whose_inside_is_another_is_not_told_to_end():
    assert let_end(SparkQuery())
    assert not let_end(SparkQuery(takes_state=False))


class Log:
    """An EventLog that keeps its events."""

    def __init__(self):
        self.events = []

    def note(self, name, **values):
        self.events.append((name, values))

    def names(self):
        return [name for name, _ in self.events]


class Started:
    """What `made_query` returns: `start` gives a query that has ended, after `at_start`."""

    def __init__(self, *reported, at_start=lambda: None, failure=None):
        self.triggers = []
        self._reported = reported
        self._at_start = at_start
        self._failure = failure

    def start(self, trigger):
        self.triggers.append(trigger)
        self._at_start()
        query = SparkQuery(failure=self._failure)
        query.reported = list(self._reported)
        return query


CAPABILITIES = SimpleNamespace(version="4.1.0")


@pytest.fixture
def run_of(monkeypatch):
    """Makes a run of these settings, and its log: `run_of(Started(), more="until: caught-up")`."""

    def made(started, more="", *, done=(), on_sample=None, **how):
        text = f"application: orders\nstream: s\nengine: spark\nprocessor: m:P\n{more}\n"
        text += "" if "spark:" in more.replace("engine: spark", "") else "spark: {checkpoint: /c}"
        settings = settings_of(text, environment={}, now=WallTime(1_780_000_000.0))
        monkeypatch.setattr(runtime, "made_query", lambda *_: started)
        answers = iter(done)
        spark = SimpleNamespace(
            sparkContext=SimpleNamespace(applicationId="app-1", master="local[2]")
        )
        log = Log()
        run = SparkRun(
            settings,
            spark,
            log,
            import_paths=(),
            source_is_done=lambda: next(answers),
            on_sample=on_sample,
            **how,
        )
        return run, log

    return made


# Settings, the answers of `source_is_done`, the triggers that are started.
@pytest.mark.parametrize(
    ("more", "done", "triggers"),
    [
        ("", [], ["asap"]),
        ("until: caught-up", [True, True], ["available-now"]),
        ("until: caught-up", [False, False, True], ["asap", "available-now", "available-now"]),
        (
            "until: caught-up\nspark: {checkpoint: /c, trigger: available-now}",
            [False, True],
            ["available-now", "available-now"],
        ),
    ],
)
def test_a_run_until_caught_up_reads_all_that_was_there_once_its_source_was_full(
    run_of, more, done, triggers
):
    started = Started()
    run, log = run_of(started, more, done=done)

    assert run.run(CAPABILITIES) is ExitReason.CAUGHT_UP
    assert started.triggers == triggers
    assert ("caught_up" in log.names()) == ("until" in more)
    assert log.events[-1] == (
        "query_stopped",
        {"reason": "caught up", "records": 0, "batches": 0},
    )


@pytest.mark.parametrize("more", ["", "until: caught-up"])
def test_a_signal_drains_a_run_and_the_handlers_of_before_are_there_again(run_of, more):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)]
    samples = []
    started = Started(at_start=lambda: os.kill(os.getpid(), signal.SIGTERM))
    run, log = run_of(started, more, done=[False] * 9, on_sample=samples.append)
    run._shown = Instant(run._shown - 1.0)

    assert run.run(CAPABILITIES) is ExitReason.DRAINED
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)] == (
        before
    )
    assert len(started.triggers) == 1
    assert [values for name, values in log.events if name == "draining"] == [{"state": "draining"}]
    assert [(each.is_draining, each.application, each.stream) for each in samples] == [
        (True, "orders", "s")
    ]


def test_a_run_on_a_terminal_drains_when_that_is_closed(run_of):
    before = signal.getsignal(signal.SIGHUP)
    started = Started(at_start=lambda: [os.kill(os.getpid(), signal.SIGHUP) for _ in range(2)])
    run, log = run_of(started, done=[False] * 9, stop_signals=(signal.SIGTERM, signal.SIGHUP))

    assert run.run(CAPABILITIES) is ExitReason.DRAINED
    assert "stop_hurried" not in log.names()
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_second_signal_is_reported_as_a_hurried_stop(run_of):
    run, log = run_of(Started())
    run._looked()
    assert log.events == []
    run._signalled(signal.SIGTERM, None)
    run._looked()
    run._looked()
    run._signalled(signal.SIGINT, None)
    run._looked()

    assert log.events == [
        ("draining", {"state": "draining"}),
        ("stop_hurried", {"state": "hurried"}),
    ]


def test_a_sample_is_shown_once_a_second(run_of, monkeypatch):
    now = 100.0
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now))
    samples = []
    run, _ = run_of(Started(), on_sample=samples.append)
    for now in (100.0, 100.9, 101.0, 101.9, 102.0):  # noqa: B007 - the clock
        run._looked()

    assert [each.uptime_s for each in samples] == [1.0, 2.0]
    assert (samples[0].owner, samples[0].is_draining) == ("spark:app-1", False)


def test_a_run_that_is_cut_short_has_an_exit_code_that_says_try_again(run_of):
    run, _ = run_of(Started())

    assert run._reason(Ending.CUT_SHORT) is ExitReason.CUT_SHORT
    assert run._reason(Ending.AS_ASKED) is ExitReason.DRAINED
    assert run._reason(Ending.BY_ITSELF) is ExitReason.CAUGHT_UP
    run._signalled(signal.SIGTERM, None)
    assert run._reason(Ending.BY_ITSELF) is ExitReason.DRAINED
    assert [each.exit_code for each in ExitReason] == [0, 0, 75]


def test_a_failed_query_is_reported_and_raised(run_of):
    run, log = run_of(Started(failure=ValueError("Job aborted")))

    with pytest.raises(EngineFailed, match="Job aborted"):
        run.run(CAPABILITIES)
    assert log.events[-1][0] == "query_failed"
    assert log.events[-1][1]["error"] == "EngineFailed"


def test_a_run_introduces_itself_and_tells_its_batches_and_the_ends_of_shards(run_of, tmp_path):
    def offset(position):
        streams = {"": StreamIs("arn:aws:kinesis:eu-west-1:123456789012:stream/s", 1)}
        began = {S0: TRIM_HORIZON} if position != SHARD_END else {}
        return encode_offset(Offset(streams=streams, shards={S0: position}, began=began))

    def read_to(number, start, end, lag_ms):
        observed = {"records": 2, "bytes": 20, "by_shard": [{"item": S0, "count": 2, "bytes": 20}]}
        shown = json.dumps({"shards": {S0: {"lagMs": lag_ms}}})
        source = {"startOffset": start, "endOffset": end, "latestOffset": shown}
        return batch(number, sources=[source], observedMetrics={"kclrun": observed})

    first, last = offset(after("5")), offset(SHARD_END)
    run, log = run_of(
        Started(read_to(0, None, first, 7_000), read_to(1, first, last, 0)),
        "fetch: {idle: 1s}\nshutdown: {grace: 20s}",
    )
    run.run(CAPABILITIES)
    run.write_report(tmp_path / "report.json", "caught up")

    assert log.names()[0] == "query_started"
    introduced = log.events[0][1]
    assert introduced["version"] == "4.1.0"
    assert (introduced["stream"], introduced["processor"]) == ("s", "m:P")
    assert (introduced["checkpoint"], introduced["master"]) == ("/c", "local[2]")
    assert introduced["grace_s"] == 20.0
    committed = [values for name, values in log.events if name == "batch_committed"]
    assert committed == [
        {"count": n, "records": 2, "bytes": 20, "seconds": 0.25, "shards": 1} for n in (0, 1)
    ]
    assert ("shard_ended", {"shard": S0}) in log.events
    assert log.events[-1][1] == {"reason": "caught up", "records": 4, "batches": 2}
    report = json.loads((tmp_path / "report.json").read_text())
    named = (report["application"], report["stream"], report["owner"])
    assert named == ("orders", "s", "spark:app-1")
    assert (report["exit_reason"], report["totals"]["records"]) == ("caught up", 4)
    assert 0 <= report["seconds"] < 600


def test_rows_that_spark_drops_as_late_are_in_the_log_at_the_first_and_at_each_further_digit(
    run_of,
):
    run, log = run_of(Started())
    for number, late in enumerate([0, 3, 4, 0, 5, 80, 9]):
        operators = [{"numRowsDroppedByWatermark": late}, {"numRowsTotal": 1}]
        run._progressed(
            {"batchId": number, "durationMs": {"addBatch": 1}, "stateOperators": operators}
        )

    counts = [values["count"] for name, values in log.events if name == "rows_late"]
    assert counts == [3, 12, 101]
