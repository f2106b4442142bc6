"""`python -m kclrun` with a configuration of the test's own, run to its end."""

import os
import subprocess
import sys
import textwrap

import yaml

from tests.patience import HUNG_S
from tests.processes.ledger_rig.aws import REGION
from tests.support.programs import run_to_end

PROCESSOR = """
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass
"""


class Ended:
    """How a program ended, and what it told a person."""

    def __init__(self, done):
        self.code = done.returncode
        self.out = done.stdout
        # On a busy machine a start says what it waits for, before it says what is wrong.
        lines = done.stderr.splitlines(keepends=True)
        self.reported = "".join(line for line in lines if '"start_waiting"' not in line)

    def has_reported(self, *parts):
        """Whether it spoke to a person: first line short of jargon, all parts named, no trace."""
        first = self.reported.splitlines()[0] if self.reported else ""
        assert first.startswith("Cannot start: "), self.reported
        assert "Traceback" not in self.reported, self.reported
        assert "This is a bug" not in self.reported, self.reported
        for part in parts:
            assert part in self.reported, self.reported
        return True


class Project:
    """A folder with a processor and `app.yaml`; `run` starts the program on it."""

    def __init__(self, folder):
        self.folder = folder
        self.config = folder / "app.yaml"
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "KCLRUN_STATE_DIR": str(folder / "state"),
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.code(PROCESSOR)

    def code(self, text, name="mine.py"):
        (self.folder / name).write_text(textwrap.dedent(text))
        return self

    def text(self, text):
        """The configuration as it is."""
        self.config.write_text(text)
        self.config.chmod(0o600)
        return self

    def settings(self, *, endpoint="http://127.0.0.1:9", **more):
        """A sound configuration, and `more` over it."""
        aws = {"region": REGION, "start_timeout": "5s"}
        aws |= {"endpoints": endpoint} if isinstance(endpoint, dict) else {"endpoint": endpoint}
        sound = {
            "application": "orders",
            "stream": "orders",
            "processor": "mine:Mine",
            "aws": aws | more.pop("aws", {}),
        }
        return self.text(yaml.safe_dump(sound | more))

    def run(self, *arguments, config=None, timeout_s=HUNG_S):
        done = run_to_end(
            self._command(*arguments, config=config),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            timeout_s=timeout_s,
        )
        return Ended(done)

    def start(self, *arguments):
        """For a program that goes on: the caller ends and waits for it."""
        return subprocess.Popen(
            self._command(*arguments),
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _command(self, *arguments, config=None):
        config = self.config if config is None else config
        return [sys.executable, "-P", "-m", "kclrun", "--config", config, *arguments]
