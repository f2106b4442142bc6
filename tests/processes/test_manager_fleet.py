"""A whole manager in a process of its own: how it starts, stops, and survives its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.patience import HUNG_S, until
from tests.processes.log_events import events_in
from tests.support.programs import end_family, started

pytestmark = pytest.mark.slow

ENTRIES = Path(__file__).parent / "entries"


class Fleet:
    def __init__(self, tmp_path, behaviour="obedient", *, grace_s=10.0, until="for-ever"):
        self.state = tmp_path / "state"
        self.report_path = tmp_path / "report.json"
        self.log_path = tmp_path / "log"
        self.process = started(
            [
                *(sys.executable, ENTRIES / "fleet_program.py", behaviour, grace_s),
                *(self.report_path, until),
            ],
            self.log_path,
            env={
                **os.environ,
                "PYTHONPATH": str(ENTRIES),
                "KCLRUN_STATE_DIR": str(self.state),
                "COVERAGE_CANARY": "canary-of-the-environment",
            },
        )

    def lines(self):
        return events_in(self.log_path.read_text())

    def of(self, event):
        return [line for line in self.lines() if line["event"] == event]

    def until(self, condition, timeout_s=HUNG_S):
        until(condition, timeout_s, why=self.log_path.read_text)

    def until_claimed(self, count=2):
        self.until(lambda: len(self.of("lease_claimed")) >= count)

    def exit_code(self, timeout_s=HUNG_S):
        return self.process.wait(timeout_s)

    def lease_pids(self):
        return {
            child.pid
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if child.name() == "kclrun-lease"
        }

    def close(self):
        end_family(self.process)


@pytest.fixture
def fleet(tmp_path):
    fleets = []

    def make(*arguments, **more):
        fleets.append(Fleet(tmp_path, *arguments, **more))
        return fleets[-1]

    yield make
    for one in fleets:
        one.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains_every_lease_and_ends_with_0(fleet, number):
    fleet = fleet()
    fleet.until_claimed()

    fleet.process.send_signal(number)

    assert fleet.exit_code() == 0
    assert len(fleet.of("lease_released")) == 2
    assert not list((fleet.state / "orders").glob("*.lock")), "a lock file was left"
    report = json.loads(fleet.report_path.read_text())
    assert report["exit_reason"] == "drained"
    assert report["totals"]["shards"] == 2


def test_the_first_line_says_who_and_with_which_limits(fleet):
    fleet = fleet()
    fleet.until_claimed()

    first = fleet.lines()[0]

    assert first["event"] == "manager_started"
    assert first["owner"].startswith("kclrun::")
    assert first["failover_s"] == 10.0
    assert first["table"] == "orders"
    assert first["version"]


def test_no_secret_of_the_world_reaches_the_log(fleet):
    fleet = fleet()
    fleet.until_claimed()
    fleet.process.send_signal(signal.SIGTERM)
    fleet.exit_code()

    text = fleet.log_path.read_text()

    assert "CANARY" not in text
    assert "canary" not in text


def test_a_stuck_process_is_ended_after_the_grace(fleet):
    fleet = fleet("stuck", grace_s=0.5)
    fleet.until_claimed()

    fleet.process.send_signal(signal.SIGTERM)

    assert fleet.exit_code() == 75


def test_a_run_until_caught_up_ends_by_itself(fleet):
    fleet = fleet(until="until-caught-up")

    assert fleet.exit_code() == 0
    report = json.loads(fleet.report_path.read_text())
    assert report["exit_reason"] == "caught up"
    assert "leases 2" in fleet.log_path.read_text()


def test_the_report_adds_up_over_restarts(fleet):
    fleet = fleet("count")
    fleet.until_claimed()
    os.kill(min(fleet.lease_pids()), signal.SIGKILL)
    fleet.until_claimed(3)
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.exit_code() == 0

    report = json.loads(fleet.report_path.read_text())

    assert report["totals"]["records"] == 15
    assert report["totals"]["bytes"] == 150
    assert report["totals"]["restarts"] == 1


def test_a_closed_stderr_neither_stops_nor_kills_the_manager(tmp_path):
    state = tmp_path / "state"
    read_fd, write_fd = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, ENTRIES / "fleet_program.py", "obedient", "10"),
            *(tmp_path / "report.json", "until-caught-up"),
        ],
        env={**os.environ, "PYTHONPATH": str(ENTRIES), "KCLRUN_STATE_DIR": str(state)},
        stderr=write_fd,
        stdout=subprocess.DEVNULL,
    )
    os.close(write_fd)
    os.close(read_fd)

    assert process.wait(HUNG_S) == 0
