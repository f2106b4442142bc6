"""Texts are those of Spark 4.3, shortened."""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

from kclrun.cli import exit_codes
from kclrun.errors import (
    DataLoss,
    EngineFailed,
    FailedRecords,
    HaltShard,
    NotFound,
    OffsetRefused,
    ProcessorError,
    RetryLater,
    Throttled,
    UndecodableRecord,
)
from kclrun.spark.running import failures
from kclrun.spark.running.failures import captured_engine, failure_of
from tests.support.tables import over_rows

HEAD = "[STREAM_FAILED] Query [id = 8e85, runId = 02bf] terminated with exception: "
TAIL = """ SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 8e85, runId = 02bf]
Current Committed Offsets: {}

Logical Plan:
WriteToMicroBatchDataSource noop-table
"""
TRACE = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: \
Traceback (most recent call last):
  File "/app/pipelines.py", line 18, in read
    raise it
    ^^^^^^^^
"""


def python_error(said: str) -> str:
    return HEAD + TRACE + said + "\n" + TAIL


@over_rows(
    ("raised", "kind"),
    [
        (RetryLater(3.0, "the service is away"), ProcessorError),
        (FailedRecords([1, 2], "no price"), ProcessorError),
        (HaltShard("ask us first"), ProcessorError),
        (UndecodableRecord("not JSON"), UndecodableRecord),
        (Throttled("too fast", operation="GetRecords", code="X"), Throttled),
    ],
)
def test_an_error_that_is_made_of_other_arguments_comes_back_with_its_message(raised, kind):
    failure = failure_of(python_error(f"kclrun.errors.{type(raised).__name__}: {raised}"))

    assert type(failure) is kind
    assert str(failure) == str(raised)


def test_an_error_of_ours_comes_back_with_its_whole_message():
    failure = failure_of(
        python_error("kclrun.errors.DataLoss: records are gone\n  from a to b\nTo go on: do x")
    )

    assert type(failure) is DataLoss
    assert str(failure) == "records are gone\n  from a to b\nTo go on: do x"


@over_rows(
    ("said", "kind", "code"),
    [
        ("kclrun.errors.DataLoss: gone", DataLoss, 65),
        ("kclrun.errors.OffsetRefused: of another stream", OffsetRefused, 78),
        ("kclrun.errors.NotFound: no such stream", NotFound, 66),
        ("kclrun.errors.ProcessorError: at 17", ProcessorError, 65),
        ("ValueError: no number", ProcessorError, 65),
        ("KeyError", ProcessorError, 65),
        ("kclrun.errors.NoSuchError: what", ProcessorError, 65),
    ],
)
def test_each_failure_has_its_exit_code(said, kind, code):
    failure = failure_of(python_error(said))

    assert type(failure) is kind
    assert exit_codes.exit_code_of(failure) == code


def test_user_code_is_reported_with_its_place_and_what_it_raised():
    reported = str(failure_of(python_error("ValueError: no number")))

    assert "did not help: ValueError: no number\n" in reported
    assert "In /app/pipelines.py line 18\n" in reported
    assert "Streaming Query" not in reported


def test_a_cause_further_down_is_ours_too():
    text = (
        HEAD + "Job aborted due to stage failure\n\tat org.apache.spark.Scheduler(X.scala:1)\n"
        "Caused by: org.apache.spark.api.python.PythonException: " + TRACE[TRACE.index("Trace") :]
    )
    text += "kclrun.errors.DataLoss: gone\n\n\tat org.apache.spark.api.python.Reader(X.scala:9)\n"

    failure = failure_of(text)

    assert type(failure) is DataLoss
    assert str(failure) == "gone"


def test_a_value_that_does_not_fit_an_expression_is_user_code():
    failure = failure_of(
        HEAD + "[CAST_INVALID_INPUT] The value cannot be cast to INT. SQLSTATE: 22018\n"
        "== SQL (line 1) ==\n SQLSTATE: XXKST\n"
    )

    assert type(failure) is ProcessorError
    assert "[CAST_INVALID_INPUT] The value cannot be cast to INT" in str(failure)


def test_what_is_left_is_the_engines_and_worth_a_restart():
    failure = failure_of(HEAD + "Job 3 cancelled because SparkContext was shut down" + TAIL)

    assert type(failure) is EngineFailed
    assert str(failure).startswith(
        "Spark ended the query: Job 3 cancelled because SparkContext was shut down"
    )
    assert exit_codes.exit_code_of(failure) == 75


def test_a_message_has_two_thousand_characters_at_most():
    engine, ours = failure_of("x" * 3_000), failure_of(python_error("ValueError: " + "x" * 3_000))

    assert str(engine) == "Spark ended the query: " + "x" * 2_000
    assert f" ValueError: {'x' * (2_000 - len('ValueError: '))}\n" in str(ours)


class Log:
    """An EventLog that keeps its lines."""

    def __init__(self):
        self.lines = []

    def note(self, event, *, level, text):
        self.lines.append((event, level, text))


def test_the_standard_error_of_the_engine_is_logged_and_ours_is_there_again(monkeypatch):
    log, flushed = Log(), []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(flush=lambda: flushed.append(True)))
    descriptors = Path("/proc/self/fd")
    before, count = os.fstat(2).st_ino, len([*descriptors.iterdir()])
    with captured_engine(log):
        [reader] = [each for each in threading.enumerate() if each.name == "engine"]
        assert reader.daemon, "a JVM that lives on does not keep this process"
        os.write(2, b"no space\n\n\tat org.x(Y)\nla\xffst")
    reader.join()

    assert log.lines == [
        ("engine_said", "warning", "no space"),
        ("engine_said", "debug", "\tat org.x(Y)"),
        ("engine_said", "warning", "la\ufffdst"),
    ]
    assert flushed == [True, True]
    assert os.fstat(2).st_ino == before
    assert len([*descriptors.iterdir()]) == count


def test_a_line_without_an_end_is_logged_in_pieces(monkeypatch):
    log, (read_fd, write_fd) = Log(), os.pipe()
    monkeypatch.setattr(failures, "_LINE_BYTES_MAX", 10)
    monkeypatch.setattr(failures, "_READ_BYTES_MAX", 5)
    os.write(write_fd, b"x" * 25 + b"\n12\n")
    os.close(write_fd)

    failures._log_lines(read_fd, log)

    assert [text for _, _, text in log.lines] == ["x" * 15, "x" * 10, "12"]
