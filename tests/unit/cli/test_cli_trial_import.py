"""The trial import of user code: it ends with its answer, and leaves no process behind."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from kclrun.cli.trial_import import Loaded, try_import
from kclrun.cli.user_code import own_module
from tests.patience import HUNG_S, until

COMMAND = own_module("kclrun.cli.trial_import")
SLEEP = f"{sys.executable!r}, '-c', 'import time; time.sleep(3600)'"
PROCESSOR = """
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def process_record(self, record, context):
        context.emit({}, to="late")
"""
NOTE = "open('pid', 'w').write(str(%s))\n"
STARTS = {
    "a program": f"import subprocess\nchild = subprocess.Popen([{SLEEP}])\n" + NOTE % "child.pid",
    "a program in its own session": (
        f"import subprocess\nchild = subprocess.Popen([{SLEEP}], start_new_session=True)\n"
        + NOTE % "child.pid"
    ),
    "a program that writes": (
        f"import subprocess\nchild = subprocess.Popen([{sys.executable!r}, '-c',"
        " 'import sys\\nwhile True: print(0, file=sys.stderr)'])\n" + NOTE % "child.pid"
    ),
    "a fork": (
        "import os, time\npid = os.fork()\nif not pid:\n    time.sleep(3600)\n" + NOTE % "pid"
    ),
    "a daemon": (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if os.fork():\n        os._exit(0)\n"
        "    open('new', 'w').write(str(os.getpid()))\n"
        "    os.rename('new', 'pid')\n"
        "    time.sleep(3600)\n"
        "os.wait()\n"
        "while not os.path.exists('pid'):\n    time.sleep(0.01)\n"
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(folder, code, within_s=HUNG_S):
    (folder / "mine.py").write_text(code)
    named = {"processor": "mine:Mine"}
    return try_import(COMMAND, named, [folder], os.environ, within_s=within_s)


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.seconds
def test_a_process_that_the_import_starts_does_not_hold_it_up_and_ends_with_it(folder, starts):
    trial = tried(folder, starts + PROCESSOR)

    assert trial.loaded == Loaded(
        kinds={"processor": "process_record"},
        emits=trial.loaded.emits,
    )
    assert [call.to for call in trial.loaded.emits] == ["late"]
    pid = int(Path("pid").read_text())
    until(lambda: is_gone(pid))


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.seconds
def test_a_process_that_a_failing_import_starts_ends_with_it(folder, starts):
    trial = tried(folder, f"{starts}\nraise RuntimeError('a planted fault')\n")

    assert "a planted fault" in trial.loaded.error
    pid = int(Path("pid").read_text())
    until(lambda: is_gone(pid))


@pytest.mark.seconds
def test_a_process_that_an_import_without_an_end_starts_ends_with_it(folder):
    code = STARTS["a program in its own session"] + "import time\ntime.sleep(3600)\n"
    trial = tried(folder, code, within_s=2.0)

    assert (trial.loaded, trial.exit_code) == (None, None)
    if Path("pid").exists():  # on a busy machine the import may not have begun
        pid = int(Path("pid").read_text())
        until(lambda: is_gone(pid))


@pytest.mark.seconds
def test_an_import_that_ends_its_process_says_how(folder):
    ends = "import os, sys\nprint('the last words', file=sys.stderr)\nsys.stderr.flush()\n"
    trial = tried(folder, STARTS["a program"] + ends + "os._exit(9)\n")

    assert (trial.loaded, trial.exit_code, trial.said) == (None, 9, "the last words\n")
    pid = int(Path("pid").read_text())
    until(lambda: is_gone(pid))


@pytest.mark.seconds
def test_a_thread_that_the_import_leaves_running_does_not_hold_it_up(folder):
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\n"

    assert tried(folder, thread + PROCESSOR).loaded.error is None
