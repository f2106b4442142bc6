"""What type checkers say of a user's program."""

import importlib.util
import os
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.support.programs import run_to_end

PROGRAM = """
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_type

import kclrun
from kclrun.testing import Claim, Faults, Run, run_processor
from kclrun.windows import Tumbling, Window, Windows


@dataclass
class Order:
    key: str
    total: int


@dataclass
class Options:
    limit: int = 10


class Orders(kclrun.RecordProcessor[Order]):
    options_as = Options

    def initialize(self, context: kclrun.Context[Options]) -> None:
        assert_type(context.options, Options)
        self.context = context
        self.totals = context.table("totals", of=int)
        self.windows = Windows(context, "minute", Tumbling(60), int, lambda one, two: one + two)

    def process_records(
        self, batch: kclrun.RecordBatch[Order], checkpointer: kclrun.Checkpointer
    ) -> None:
        assert_type(batch[0], kclrun.Record[Order])
        for record in batch:
            assert_type(record.value, Order)
            assert_type(record.value.total, int)
            assert_type(self.totals.get(record), int | None)
            assert_type(self.totals.get(record, 0), int)
            assert_type(self.totals.get(record, "none"), int | str)
            self.totals[record] = self.totals.get(record, 0) + record.value.total
            state = self.context.state[record]
            assert_type(state.get("last", type=Order), Order | None)
            assert_type(state.get("count", 0, type=int), int)
            assert_type(self.windows.add(record, record.value.total, self.context), bool)

    def on_timer(self, timer: kclrun.Timer, checkpointer: kclrun.Checkpointer) -> None:
        for window in self.windows.closed(timer):
            assert_type(window, Window[int])


class Singles(kclrun.RecordProcessor[Order]):
    options_as = Options

    async def process_record(
        self, record: kclrun.Record[Order], context: kclrun.RecordContext[Options]
    ) -> None:
        assert_type(context.options.limit, int)
        assert_type(context.state[record].get("sum", 0, type=int), int)


class Rows(kclrun.Output):
    options_as = Options
    rows_max = 100

    def open(self, context: kclrun.OutputContext[Options]) -> None:
        assert_type(context.options, Options)
        self.limit = context.options.limit

    def begin(self) -> str | None:
        return None

    def commit(self, rows: Sequence[Mapping[str, Any]], after: str | None, upto: str) -> None:
        print(rows[0]["total"], after, upto)


def test_orders() -> None:
    settings = {"fetch": {"batch_max": 2}}
    run = run_processor(Singles, ["a"], settings=settings, faults=Faults(crash_after=1))
    assert_type(run, Run)
    run_processor(Singles, ["a"], claim=Claim(after=run), batch_max=3)


class Old(kclrun.RecordProcessor):
    def initialize(self, context: kclrun.Context) -> None:
        self.limit: int = context.options["limit"]

    def process_records(self, batch: kclrun.RecordBatch, checkpointer: kclrun.Checkpointer) -> None:
        for record in batch:
            anything: Any = record.value
            print(anything["total"])
"""
# Each line that has the comment is an error, and no other line is.
TYPOS = """
import kclrun
from kclrun.testing import run_processor
from dataclasses import dataclass


@dataclass
class Order:
    total: int


@dataclass
class Options:
    limit: int = 10


class Orders(kclrun.RecordProcessor[Order]):
    def initialize(self, context: kclrun.Context[Options]) -> None:
        print(context.options.limmit)  # wrong
        self.totals = context.table("totals", of=int)

    def process_records(
        self, batch: kclrun.RecordBatch[Order], checkpointer: kclrun.Checkpointer
    ) -> None:
        for record in batch:
            print(record.value.totl)  # wrong
            self.totals[record] = record.partition_key  # wrong
            print(self.totals.get(record) + 1)  # wrong


class Rows(kclrun.Output):
    def open(self, context: kclrun.OutputContext[Options]) -> None:
        print(context.options.limmit)  # wrong

    def send(self, rows: int) -> None:  # wrong
        print(rows)


def test_orders() -> None:
    run_processor(Orders, ["a"], batchmax=2)  # wrong


Numbers = kclrun.Record[int]


class Singles(kclrun.RecordProcessor[Order]):
    def process_record(self, record: Numbers, context: kclrun.RecordContext) -> None:  # wrong
        print(record.value + 1)
"""

# What `context` and `kclrun.spark` give back has a type that the program can write down.
SPARK = """
from typing import assert_type

import kclrun
import kclrun.spark
from pyspark.sql import DataFrame, SparkSession


def named(context: kclrun.Context, record: kclrun.Record) -> int:
    state: kclrun.State = context.state
    values: kclrun.KeyState = state[record]
    totals: kclrun.Table[int] = context.table("totals", of=int)
    seen: kclrun.Counter = context.counter("seen")
    pending: kclrun.PendingCheckpoint | None = context.pending_checkpoint
    print(values, pending, context.checkpoint_every)
    print(context.emitt)  # wrong
    return totals.get(record, 0) + seen[record]


def publish(lag: kclrun.spark.SourceLag) -> None:
    assert_type(lag.lag_ms_max, int | None)
    print(lag.lag)  # wrong


def rows(spark: SparkSession) -> DataFrame:
    spark.streams.addListener(kclrun.spark.LagListener(publish))
    source = {"streamName": "orders"}
    emitted = kclrun.spark.process(spark, "o:O", source, settings={"decode": "json"})
    assert_type(emitted, DataFrame)
    kclrun.spark.process(spark, "o:O", source, retries=3)
    kclrun.spark.process(spark, "o:O", source, retires=3)  # wrong
    kclrun.spark.process(spark, "o:O", source, then="drop")  # wrong
    return emitted
"""


def checked_by_mypy(program):
    return [
        sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", str(program),
    ]  # fmt: skip


def checked_by_pyright(program):
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("a user's program under pyright: basedpyright is not installed")
    of = ["--pythonversion", "3.11", "--pythonpath", sys.executable]
    return [sys.executable, "-m", "basedpyright", *of, str(program)]


def errors_in(output):
    """The numbers of the lines of program.py that a type checker calls wrong."""
    return {
        int(line.split("program.py:")[1].split(":")[0])
        for line in output.splitlines()
        if "program.py:" in line and "error:" in line
    }


def lines_that_are_wrong(text):
    return {number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# wrong")}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [checked_by_mypy, checked_by_pyright])
@pytest.mark.parametrize("text", [PROGRAM, TYPOS, SPARK], ids=["right", "typos", "Spark"])
def test_a_users_program_is_checked_strictly(tmp_path, checker, text):
    if text == SPARK:
        pytest.importorskip("pyspark")
    program = tmp_path / "program.py"
    program.write_text(text)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    done = run_to_end(
        checker(program),
        cwd=tmp_path,
        env={
            **os.environ,
            "MYPYPATH": str(ROOT),
            "PYTHONPATH": str(ROOT),
            "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"),
        },
    )
    assert errors_in(done.stdout) == lines_that_are_wrong(text), done.stdout + done.stderr
