"""Many rows written by a verb: one that fails is named, and does not stop the others."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kclrun.cli.leases import rows
from kclrun.cli.leases.rows import print_failures, write_rows
from kclrun.errors import AccessDenied, NotFound, SinkError
from kclrun.model.lease import LeaseKey
from kclrun.protocol import writes
from tests.architecture.sources import our_modules
from tests.patience import HUNG_S

KEYS = [LeaseKey(f"shardId-{number:012d}") for number in range(4)]
BAD = KEYS[1]
# A row's failure, what is said of it, and the exit code.
FAILURES = [
    (writes.ConditionFailed(), "its row has changed meanwhile: is a manager running?", 75),
    (writes.OutcomeUnknown("cut"), "no answer; look again before repeating (cut)", 69),
    (writes.Throttled("slow"), "nothing happened, try again (slow)", 69),
    (writes.Unavailable("away"), "nothing happened, try again (away)", 69),
    (writes.Refused("x", "denied"), "refused: denied", 77),
    (SinkError("the store is full"), "the store is full", 70),
    (AccessDenied("not allowed"), "not allowed", 77),
    (NotFound("no table"), "no table", 66),
]


@pytest.mark.parametrize(("failure", "reason", "code"), FAILURES)
def test_a_bad_row_is_named_and_the_others_are_written(failure, reason, code, capsys):
    written = []

    def write(key):
        written.append(key)
        if key != BAD:
            return writes.Applied()
        if isinstance(failure, Exception):
            raise failure
        return failure

    outcomes = write_rows(KEYS, write)

    assert sorted(written) == KEYS
    assert [key for key, _ in outcomes] == KEYS
    failed = [(key, each) for key, each in outcomes if not isinstance(each, writes.Applied)]
    assert print_failures(failed) == code
    assert capsys.readouterr().err == f"{BAD}: {reason}\n"


def test_the_worst_of_several_failures_is_the_exit_code_and_each_is_named(capsys):
    failed = [(key, failure) for key, (failure, _, _) in zip(KEYS, FAILURES[1:], strict=False)]

    assert print_failures(failed) == 77
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == KEYS


def test_without_a_failure_nothing_is_said(capsys):
    assert print_failures([]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_thousand_failures_are_not_a_thousand_lines_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(rows, "most_on_terminal", lambda most: most)

    assert print_failures([(BAD, writes.Throttled("slow"))] * 1_000) == 69
    assert capsys.readouterr().err.splitlines()[-1] == "… and 980 more rows"


def test_rows_are_written_several_at_once_and_no_more():
    meeting, running, most = threading.Barrier(8), threading.Semaphore(8), []

    def write(_):
        most.append(running.acquire(blocking=False))
        meeting.wait(HUNG_S)  # of eight, side by side
        running.release()
        meeting.wait(HUNG_S)
        return writes.Applied()

    assert len(write_rows(range(16), write)) == 16
    assert all(most)


def test_an_error_that_is_a_bug_is_not_an_outcome():
    def write(_):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        write_rows(KEYS, write)


def test_no_verb_writes_rows_by_threads_of_its_own():
    """`ThreadPoolExecutor` in `cli/` is for reads, besides the one writer of rows."""
    pools = {
        source.name
        for source in our_modules()
        if source.name.startswith("kclrun/cli/") and ThreadPoolExecutor.__name__ in source.text
    }
    assert pools == {
        "kclrun/cli/lag.py",
        "kclrun/cli/leases/reset.py",
        "kclrun/cli/leases/rows.py",
        "kclrun/cli/migrate/spark.py",
    }
