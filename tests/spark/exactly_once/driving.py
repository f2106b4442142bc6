"""Drivers as processes: started, killed whole in the middle, started again."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil

from tests.patience import HUNG_S
from tests.support.programs import started

_QUERY = Path(__file__).with_name("query.py")


class Driver:
    """One driver process with its JVM and its Python workers."""

    def __init__(self, order, log, *, python=sys.executable, env=None):
        self.process = started(
            [python, _QUERY, json.dumps(order)],
            log,
            cwd=log.parent,
            env=os.environ | (env or {}),
            start_new_session=True,
        )

    @property
    def is_running(self):
        return self.process.poll() is None

    def family(self):
        """The driver and all its descendants, the JVM first: it is what writes the checkpoint."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        java_first = sorted(below, key=lambda process: _name(process) != "java")
        return [*java_first, psutil.Process(self.process.pid)]

    def kill(self):
        """SIGKILL to all of them, and wait until the last is gone: no former driver writes on."""
        family = self.family()
        for process in family:
            _send(process, signal.SIGKILL)
        self.process.wait(HUNG_S)
        psutil.wait_procs(family, timeout=HUNG_S)

    def executors(self):
        """The JVMs of a local cluster's executors."""
        return [process for process in self.family() if has_executor_class(process)]

    def wait(self, timeout_s):
        """Its exit code, once it has ended by itself."""
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()


def has_executor_class(process):
    try:
        return any("CoarseGrainedExecutorBackend" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _name(process):
    try:
        return process.name()
    except psutil.Error:
        return ""


def _send(process, number):
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass
