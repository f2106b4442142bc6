"""Single records in a task of Spark: rows in order, letters, and what the task fails with."""

import json
import sys
import textwrap

import pytest

from kclrun.errors import ProcessorError, ProcessorLoadError
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.spark.executor.reading import ReadPage
from kclrun.spark.offsets import ShardRange
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON
from kclrun.spark.processors.hosting import ProcessorJob
from kclrun.spark.processors.range_progress import ProcessorCache
from kclrun.spark.processors.tasks import ProcessorTask

RANGE = ShardRange("shardId-000000000000", TRIM_HORIZON, SHARD_END)
PROCESSORS = """
import asyncio
import threading

from kclrun import RecordProcessor


class Threads(RecordProcessor):
    def initialize(self, context):
        self.order, self.plan = [], context.options

    def process_record(self, record, context):
        self.run(int(record.sequence_number), context)

    def run(self, number, context):
        context.emit({"n": number})
        self.plan["began"].append(number)
        if number in self.plan["poisons"]:
            raise ValueError("poison")

    def shard_ended(self, checkpointer):
        self.plan["began"].append("shard_ended")
        checkpointer.checkpoint()


class Tasks(Threads):
    async def process_record(self, record, context):
        number = int(record.sequence_number)
        await asyncio.sleep(0.002 * (5 - number % 5))
        self.run(number, context)


class Batches(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a task over records 1 to 10; returns its rows, its account and what began."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "singles", raising=False)
    (tmp_path / "singles.py").write_text(textwrap.dedent(PROCESSORS))

    def ran(kind, *, records=8, poisons=(), then="halt", began=None):
        began = [] if began is None else began
        job = ProcessorJob(
            application="app",
            stream="orders",
            processor=f"singles:{kind}",
            paths=(str(tmp_path),),
            options={"began": began, "poisons": poisons},
            batch_max=5,
            uncheckpointed_max=1000,
            on_error=ErrorPolicy(1, 0.001, then),
            concurrency=None if records is None else Concurrency(records),
            run="r1",
        )
        task = ProcessorTask(
            *(job, 1),
            kept=ProcessorCache(),
            letters=lambda: LetterFolder(tmp_path / "letters"),
            registry=bytes,
        )
        read = [Record(b"x", f"key-{number}", str(number)) for number in range(1, 11)]
        pages = (page for page in [ReadPage(RANGE, read, is_last=True)])
        lines = [line for batch in task.run(pages) for line in batch.to_pylist()]
        rows = [json.loads(line["row"])["n"] for line in lines if line["kind"] == "row"]
        (account,) = [json.loads(line["row"]) for line in lines if line["kind"] == "ack"]
        return rows, account, began

    yield ran
    sys.modules.pop("singles", None)


@pytest.mark.parametrize(
    ("kind", "records"), [("Threads", None), ("Threads", 8), ("Tasks", None), ("Tasks", 8)]
)
def test_rows_are_in_the_order_of_the_records_and_the_shard_ends_last(run, kind, records):
    rows, account, began = run(kind, records=records)

    assert rows == list(range(1, 11))
    assert sorted(began[:-1]) == rows
    assert began[-1] == "shard_ended"
    assert account["rows"] == 10
    if kind == "Tasks" and records == 8:
        assert began[:5] != sorted(began[:5])


@pytest.mark.parametrize("kind", ["Threads", "Tasks"])
def test_one_among_others_becomes_a_letter_and_its_rows_are_gone(run, kind, tmp_path):
    rows, account, _ = run(kind, poisons=(3,), then="dead-letter")

    assert rows == [1, 2, *range(4, 11)]
    (kept,) = LetterFolder(tmp_path / "letters").kept()
    assert (kept.letter.sequence_number, kept.letter.calls) == ("3", 2)
    assert account["deadLetters"] == 1


@pytest.mark.parametrize("kind", ["Threads", "Tasks"])
def test_a_record_that_fails_for_good_fails_the_task_and_is_named(run, kind):
    with pytest.raises(ProcessorError) as caught:
        run(kind, poisons=(3,))
    assert "process_record of singles:" in str(caught.value)
    assert "raised ValueError: poison (2 times)" in str(caught.value)
    assert "at 3" in str(caught.value)


def test_a_setting_that_does_not_fit_is_refused_in_words(run):
    with pytest.raises((ProcessorLoadError, ProcessorError), match="concurrency: is for"):
        run("Batches")
