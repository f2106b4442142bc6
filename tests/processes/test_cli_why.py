"""`kclrun why` after real incidents: a process that died, user code that gave up, a lost machine."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kclrun.cli.leases.views import scan_leases
from kclrun.local.server import start_embedded
from tests.processes.cli_rig import Site, called
from tests.processes.ledger_rig.application import until

pytestmark = pytest.mark.seconds

PROCESSOR = """
import os, signal
from pathlib import Path
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer):
        for record in batch:
            text = record.data.decode()
            if text == "die" and not Path("FOLDER/died").exists():
                Path("FOLDER/died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if text == "raise":
                raise ValueError("the card number is 4929")
"""


class Machine:
    """A manager with a state folder of its own, as on a machine of its own; a session, so that all
    of it can be lost at once."""

    def __init__(self, site, folder):
        self.folder = folder
        folder.mkdir()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kclrun", "--config", str(site.config)],
                env=os.environ | {"KCLRUN_STATE_DIR": str(folder)},
                stderr=log,
                start_new_session=True,
            )

    def events(self, name):
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in found if line["event"] == name]

    def lose(self):
        """Nothing of it runs on: neither the manager, nor its launcher, nor a lease process."""
        for pid in _descendants(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def _descendants(pid):
    parents = {}
    for each in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{each}/stat") as file:
                parents.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(
                    int(each)
                )
        except OSError:
            continue
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def test_the_story_names_the_death_the_exception_the_halt_and_the_loss_of_the_machine(
    tmp_path, monkeypatch
):
    with start_embedded() as embedded:
        site = Site(tmp_path, embedded.endpoint, "told", 1)
        (tmp_path / "mine.py").write_text(PROCESSOR.replace("FOLDER", str(tmp_path)))
        text = site.config.read_text().replace("kclrun.samples.hello:Hello", "mine:Mine")
        site.config.write_text(
            f"{text}path: {tmp_path}\nfetch: {{idle: 200ms}}\ncheckpoint: {{every: 200ms}}\n"
            "on_error: {retries: 2, backoff: 50ms}\n"
        )
        first = Machine(site, tmp_path / "machine-1")
        second = None
        try:
            until(lambda: first.events("lease_claimed"), why=first.log.read_text)
            site.put([("k", "die")])
            until(lambda: len(first.events("lease_claimed")) == 2, why=first.log.read_text)
            site.put([("k", "raise")])
            until(lambda: first.events("lease_halted"), why=first.log.read_text)
            second = Machine(site, tmp_path / "machine-2")
            until(lambda: second.events("manager_started"), why=second.log.read_text)
            first.lose()
            until(lambda: second.events("lease_still_halted"), why=second.log.read_text)

            monkeypatch.setenv("KCLRUN_STATE_DIR", str(second.folder))
            copied = str(first.folder / "told" / "story")
            said = ("why", "0", "--config", site.config)
            until(lambda: "still halted" in called(*said)[1])
            code, alone, _ = called(*said)
            _, whole, told = called(*said, "--story", copied)
        finally:
            first.lose()
            if second is not None:
                second.lose()
        print(alone, whole, told)
        assert 0
