"""`python -m kclrun` as a user starts it, in a process of its own; and the end of all it started.

Every process is found by the state folder in its environment, which is this test's own, and ended
by its pid, whatever became of its manager.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from tests.foreground import heeding_signals
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.aws import REGION
from tests.processes.ledger_rig.deliveries import LedgerFile, judge
from tests.processes.log_events import events_in
from tests.support.programs import run_to_end

_LAST_BYTES = 1 << 20
# A traceback of ours has forty lines.
_LAST_LINES = 60

PROCESSOR_FOLDER = Path(__file__).parent / "processor"


def wait_for_ends(pidfds, timeout_s):
    """How long each process lived on, in seconds; None for one that lives still. Closes them."""
    began = time.monotonic()
    poller = select.poll()
    for pidfd in pidfds:
        poller.register(pidfd, select.POLLIN)
    ends = dict.fromkeys(pidfds)
    while None in ends.values() and time.monotonic() < began + timeout_s:
        for pidfd, _ in poller.poll(100):
            ends[pidfd] = time.monotonic() - began
            poller.unregister(pidfd)
    for pidfd in pidfds:
        os.close(pidfd)
    return list(ends.values())


class Application:
    """One configuration on one machine: started, stopped, killed and started again.

    `wrapper` is the program, with its arguments, that starts the manager, if another does.
    """

    wrapper = ()

    def __init__(self, folder, where, stream, /, *, machine="a", **settings):
        self.folder = folder / machine
        self.folder.mkdir(parents=True)
        self.aws = where
        self.table = f"app-{stream}"
        self.state = self.folder / "state"
        self.ledger = LedgerFile(folder / "ledger")
        self.log_path = self.folder / "log"
        self.config = self.folder / "app.yaml"
        self.cure = folder / "cure"
        self.process = None
        self.starts = 0
        self.more_environment = {}
        self._machine = machine
        self._log = self.log_path.open("ab")
        self.config.write_text(yaml.safe_dump(self._settings(where, stream, settings)))

    def _settings(self, aws, stream, more):
        options = {"ledger": str(self.ledger.path), "cure": str(self.cure)}
        merged = {
            "application": self.table,
            "stream": stream,
            "processor": "ledger_processor:Ledger",
            "path": str(PROCESSOR_FOLDER),
            "aws": {
                "region": REGION,
                "endpoints": {
                    "kinesis": aws.embedded.kinesis_endpoint,
                    "dynamodb": aws.embedded.dynamodb_endpoint,
                },
            },
            "fetch": {"idle": "200ms", "batch_max": 500},
            "checkpoint": {"every": "500ms", "uncheckpointed_max": 2000},
            "log": {"level": "debug", "format": "json"},
            "stall": "60s",
        }
        return _merged(merged | {"options": options}, more)

    @property
    def environment(self):
        return {
            "PATH": os.environ["PATH"],
            # So that another copy of kclrun can be proven, or found wanting.
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(self.folder),
            "KCLRUN_STATE_DIR": str(self.state),
            "KCLRUN_RIG_MANAGER": self._machine,
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
            **self.more_environment,
        }

    # Running.

    def start(self, *arguments):
        """Exec a manager, in a process group of its own as a shell would give it."""
        self.starts += 1
        with heeding_signals():
            self.process = subprocess.Popen(
                [
                    *(*self.wrapper, sys.executable, "-P", "-m", "kclrun"),
                    *("--config", self.config, *arguments),
                ],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                process_group=0,
            )
        return self

    def cli(self, *arguments):
        """Another command of kclrun on the same configuration, to its end."""
        return run_to_end(
            [sys.executable, "-P", "-m", "kclrun", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
        )

    def stop(self, number=signal.SIGTERM, timeout_s=HUNG_S):
        """Signal it, once it listens to signals, and wait for its end; the exit code."""
        until(self._listens, why=self.last_words)
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def _listens(self):
        """The first line is written once signals are listened to; a manager that has ended by
        itself has nothing to wait for. By its pid: one killed earlier may have written nothing."""
        has_begun = any(each["pid"] == self.process.pid for each in self.of("manager_started"))
        return has_begun or self.process.poll() is not None

    def lose_power(self):
        """All of it ends at one stroke: nobody gets to release anything."""
        everyone = list(self._everyone())
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in everyone:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self.process.wait()

    @contextlib.contextmanager
    def frozen(self):
        """All of it stands still, as a suspended machine."""
        everyone = list(self._everyone())
        for process in everyone:
            process.suspend()
        try:
            yield
        finally:
            for process in everyone:
                process.resume()

    def close(self):
        """End whatever is left of it."""
        for process in self._everyone():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _everyone(self):
        mark = str(self.state)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("KCLRUN_STATE_DIR") == mark:
                    yield process

    # Looking.

    def lease_pids(self, *, with_orphans=False):
        """The manager's own; with those that a killed one left behind, on their way out."""
        own = self._named("kclrun-lease")
        if not with_orphans:
            return own
        return sorted(
            {*own, *(each.pid for each in self._everyone() if each.name() == "kclrun-lease")}
        )

    def launcher_pids(self):
        return self._named("kclrun-launcher")

    def _named(self, name):
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    # A fork is named after its launcher for its first millisecond.
                    if child.name() == name and child.status() != psutil.STATUS_ZOMBIE:
                        found.append(child.pid)
        return sorted(found)

    def lines(self):
        return events_in(self.log_path.read_text(errors="replace"))

    def of(self, event):
        """Its lines, in order. Only those that name it are parsed: a log may be long."""
        text = self.log_path.read_text(errors="replace")
        named = "\n".join(line for line in text.splitlines() if f'"event":"{event}"' in line)
        return [line for line in events_in(named) if line.get("event") == event]

    def warned(self):
        """What lease processes warned of, but for having stood still: that is a busy machine."""
        lines = self.of("lease_process_warned")
        return [line for line in lines if not line["detail"].startswith("the process stood still")]

    def last_words(self):
        return "The log ends:\n" + "\n".join(
            self.log_path.read_text(errors="replace").splitlines()[-25:]
        )

    def last_words_of(self, pid):
        """Of one process: its last events, and what else stands there, such as a traceback."""
        with self.log_path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        own = re.compile(rf'[^{{]|.*"pid":{pid}[,}}]')
        # What each start writes again is shown once, where it stands last.
        last = dict.fromkeys(line for line in reversed(lines) if own.match(line))
        return "\n".join(reversed([*last][:_LAST_LINES]))

    # Waiting.

    def until(self, condition, timeout_s=30.0):
        def held():
            self.ledger.read()
            return condition()

        return until(held, timeout_s, why=self.last_words)

    def until_delivered(self, count, timeout_s=30.0):
        """Until so many different records were delivered, by whoever shares the ledger."""
        self.until(lambda: len(self.ledger.delivered) >= count, timeout_s)

    def until_all_delivered(self, producer, timeout_s=60.0):
        self.until(
            lambda: producer.is_done and len(self.ledger.delivered) >= producer.total_put,
            timeout_s,
        )

    def finish(self, source, **excuses):
        """Stop the source if it runs, wait for all it put, and drain. The verdict, which has no
        fault: without `killed` among the excuses of `judge`, nothing may have come twice."""
        source.stop()
        self.until_all_delivered(source)
        assert self.stop() == 0
        return self.judged(source, **excuses)

    def judged(self, source, **excuses):
        """The verdict on all that the source put."""
        verdict = judge(source.put, self.ledger.read(), **excuses)
        print(verdict)
        assert verdict.faults == []
        return verdict


def _merged(settings, more):
    """`more` over `settings`, mapping by mapping."""
    return settings | {
        key: _merged(settings[key], value) if isinstance(settings.get(key), dict) else value
        for key, value in more.items()
    }
