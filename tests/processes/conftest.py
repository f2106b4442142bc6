"""A rig for process tests: real launcher, real lease processes, no AWS; and no survivors."""

import os
import select
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kclrun.leases.commands import StartProcess
from kclrun.manager.children import LeaseProcesses, ProcessLimits
from kclrun.manager.forks import Launcher
from kclrun.manager.launcher import adopt_orphans
from kclrun.manager.loop import Loop
from kclrun.manager.orphans import reap_adopted
from kclrun.model.lease import LeaseKey
from kclrun.observe.logs import EventLog, LineSink
from tests.foreground import heeding_signals
from tests.patience import HUNG_S
from tests.processes.page_browser import Browser, browser
from tests.support.start_specs import specified

ENTRIES = Path(__file__).parent / "entries"
PLACES = 64


class Rig:
    """A manager's loop with lease processes of the test's own entry; events in `events`."""

    def __init__(self, tmp_path, entry="lease_entry:run"):
        adopt_orphans()
        self.loop = Loop()
        self.events = []
        self.departed = []
        self.options_of = {}
        self.log_path = tmp_path / "log"
        self._log_fd = os.open(self.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self.sink = LineSink(self._log_fd)
        self.log = EventLog(self.sink, app="test", owner="kclrun::h:n", level="debug")
        self.launcher = Launcher(entry, output_fds=(self._log_fd, self._log_fd))
        self.processes = LeaseProcesses(
            self.launcher,
            SimpleNamespace(deliver=self._deliver, departed=self.departed.append),
            ProcessLimits(PLACES, exit_patience_s=5.0, failover_s=10.0),
            specify=self._specify,
            loop=self.loop,
            log=self.log,
        )
        self.instants = {}

    def _deliver(self, event):
        self.instants.setdefault(type(event).__name__, self.loop.now())
        self.events.append(event)

    def _specify(self, start, place, incarnation):
        options = dict(self.options_of[start.key])
        return specified(start, place, incarnation, options=options)

    def start(self, key="shard-1", *, expires_s=10.0, **options):
        self.options_of[key] = options
        self.processes.start(StartProcess(LeaseKey(key), 7, self.loop.now() + expires_s))

    def until(self, condition, timeout_s=HUNG_S):
        """Turn the loop until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not in time; so far {self.events}"
            self.loop.turn(self.loop.now() + 0.05)

    def until_seen(self, kind, count=1):
        self.until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[-1]

    def of(self, kind):
        """The events of this kind, or that bring a report of this kind."""
        return [each for each in self.events if isinstance(getattr(each, "report", each), kind)]

    def kinds(self):
        """Of the events, and of the reports that they bring."""
        return [type(getattr(event, "report", event)) for event in self.events]

    def child(self, key="shard-1"):
        return next(child for child in self.processes.living() if child.key == key)

    def close(self):
        pidfds = [os.dup(child.pidfd) for child in self.processes.living()]
        self.processes.close()
        for pidfd in pidfds:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            select.select([pidfd], [], [], 10)
            os.close(pidfd)
        reap_adopted(frozenset())
        self.loop.close()
        self.sink.close()
        os.close(self._log_fd)


@pytest.fixture
def rig(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ENTRIES))
    rig = Rig(tmp_path)
    with heeding_signals():
        rig.processes.open()
    yield rig
    rig.close()


@pytest.fixture
def opened(tmp_path):
    """Opens a tab in a browser of its own; all are closed at the end."""
    made = []

    def open_browser(**options):
        made.append(Browser(browser(tmp_path / f"p{len(made)}"), **options))
        return made[-1]

    yield open_browser
    for each in made:
        each.close()
