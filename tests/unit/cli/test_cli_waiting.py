"""What a start waits for is said once it takes long: in words, or as an event of a JSON log."""

import json
import os
import socket
import threading
import time

import pytest

from kclrun.cli import waiting
from kclrun.cli.program import run_program
from kclrun.cli.startup import patiently
from kclrun.cli.waiting import Waiting, next_line_s, said_in_the_log, waiting_for
from kclrun.config.load import settings_of
from kclrun.errors import NothingListens, Throttled, Unavailable
from tests.patience import until
from tests.support.tables import over_rows

SETTINGS = "application: orders\nstream: orders\nprocessor: a:B\nlog: {format: %s, level: error}\n"


@pytest.fixture
def said(monkeypatch):
    """Lines are due at once; those said so far."""
    lines = []
    monkeypatch.setattr(waiting._Now, "first_s", 0.0)
    monkeypatch.setattr(waiting._Now, "say", staticmethod(lines.append))
    return lines


@over_rows(
    ("waited_s", "due_s"),
    [(0.0, 1.0), (1.0, 5.0), (4.9, 5.0), (5.0, 15.0), (15.2, 30.0), (30.0, 60.0), (61.0, 90.0)],
)
def test_lines_come_after_a_second_and_then_ever_less_often(waited_s, due_s):
    assert next_line_s(waited_s, 1.0) == due_s


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (Waiting("the table", 5.2), "waiting for the table (for 5 s so far)"),
        (
            Waiting("the table", 5.2, "Scan: refused", 54.6),
            "waiting for the table: Scan: refused; trying for 55 s more (aws.start_timeout)",
        ),
    ],
)
def test_a_line_says_what_is_waited_for_and_why(line, text):
    assert str(line) == text


def test_what_is_quick_says_nothing(monkeypatch, capsys):
    monkeypatch.setattr(waiting._Now, "first_s", 1.0)
    threads = threading.active_count()

    with waiting_for("the table"):
        pass

    until(lambda: threading.active_count() == threads)
    assert capsys.readouterr().err == ""
    assert waiting._Now.waits == []


def test_of_waits_inside_of_each_other_the_innermost_is_said(said):
    with waiting_for("the check"):
        until(lambda: said)
        del said[:]
        with waiting_for("the table"):
            until(lambda: said)
            assert {line.what for line in said} == {"the table"}


def test_a_repeated_request_is_said_with_its_last_error_and_the_time_that_is_left(
    said, monkeypatch
):
    refusals = [Throttled("slow down"), Unavailable("ListShards: away\nmore")]

    def ask():
        if refusals:
            raise refusals.pop()
        until(lambda: any(line.error for line in said))
        return "answered"

    # The first line may have come before the first refusal: another one follows it.
    monkeypatch.setattr(waiting, "_AGAIN_S", (0.05, 0.1, 0.15))
    assert patiently(ask, time.monotonic() + 60.0, 60.0, what="Kinesis") == "answered"

    line = next(line for line in said if line.error)
    assert (line.what, line.error in {"ListShards: away", "slow down"}) == ("Kinesis", True)
    assert 0.0 < line.left_s <= 120.0


def test_a_refusal_of_this_host_ends_a_start_at_once():
    asked = []

    def ask():
        asked.append(1)
        raise NothingListens("nothing listens at 127.0.0.1:4567")

    with pytest.raises(NothingListens):
        patiently(ask, time.monotonic() + 60.0, 60.0, what="Kinesis")

    assert len(asked) == 1


def test_other_threads_say_nothing(said):
    def work():
        with waiting_for("the table"):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert not said


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_run_says_it_in_the_form_of_its_log(form, monkeypatch, capfd):
    monkeypatch.setattr(waiting._Now, "first_s", 0.05)
    monkeypatch.setattr(waiting, "_AGAIN_S", (0.1, 0.2))
    settings = settings_of((SETTINGS % form).replace("error", "info"), environment={}, now=1_000.0)
    shown = []
    with said_in_the_log(settings), waiting_for("the table") as wait:
        wait.failed(Unavailable("Scan: away"), 30.0)

        def has_said():
            shown.append(capfd.readouterr().err)
            return "Scan: away" in "".join(shown)

        until(has_said)
    line = "".join(shown).splitlines()[-1]
    if form == "text":
        assert line.startswith("waiting for the table: Scan: away; trying for")
        return
    event = json.loads(line)
    assert (event["event"], event["level"], event["app"]) == ("start_waiting", "warning", "orders")
    assert (event["what"], event["error"]) == ("the table", "Scan: away")
    assert 0.0 < event["left_s"] <= 30.0


# Each verb that asks AWS for something, with an emulator that is not there.
VERBS = (
    "run",
    "check",
    "leases",
    "leases add-index",
    "leases move 0 --to x",
    "leases resume 0",
    "lag",
    "tail",
    "put rows.txt",
    "put rows.txt --aggregate",
    "put rows.txt --create 2",
    "page --port 0",
    "top",
    "top --once",
    "doctor",
    "why 0",
    "consumers list",
    "pause --all",
    "resume --all",
    "reset --to LATEST --state drop",
    "replay --from TRIM_HORIZON --to 2026-03-01T07:00:00Z",
    "replay --list",
    "dead-letters list",
    "state show",
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_at_once_that_nothing_listens_on_this_host(
    verb, tmp_path, monkeypatch, capsys
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "mine.py").write_text(
        "from kclrun import RecordProcessor\n\nclass Mine(RecordProcessor):\n"
        "    def process_records(self, records, context): ...\n"
    )
    (tmp_path / "rows.txt").write_text("a\n")
    (tmp_path / "app.yaml").write_text(
        "application: orders\nstream: orders\nprocessor: mine:Mine\n"
        "state: {store: 's3://states/orders'}\n"
        "on_error: {then: dead-letter, dead_letter: {s3: 's3://letters/orders'}}\n"
        f"aws: {{region: eu-west-1, endpoint: 'http://127.0.0.1:{port}', start_timeout: 10m}}\n"
    )
    (tmp_path / "app.yaml").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path / "here"))
    pauses, sleep = [], time.sleep

    def noted(pause_s):
        # Shorter ones are those of the standard library, at the end of a process.
        pauses.extend([pause_s] * (pause_s > 0.05))
        sleep(pause_s)

    monkeypatch.setattr("time.sleep", noted)

    code = run_program([*verb.split(), "--config", "app.yaml"])

    reported = capsys.readouterr().err
    assert code == os.EX_UNAVAILABLE, reported
    assert f"nothing listens at 127.0.0.1:{port} (connection refused)" in reported
    assert f"kclrun local --port {port}" in reported
    assert pauses == []
