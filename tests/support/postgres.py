"""A PostgreSQL of its own for tests, from bin/postgres. It listens on a Unix socket only.

Where it cannot be had, its tests are skipped, and say so; with KCLRUN_NEED_POSTGRES=1 they fail.
"""

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.patience import HUNG_S

_PROGRAMS = Path(__file__).parents[2] / "bin" / "postgres"
_NEED = "KCLRUN_NEED_POSTGRES"


class Postgres:
    """One server; `crash` ends it as a failing machine would, `start` brings it back."""

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self._binaries, self._folder, self._user = binaries, folder, user
        self._run(
            "initdb",
            "-D",
            folder / "data",
            "-U",
            "kclrun",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        )
        self.start()

    @property
    def url(self):
        return f"postgresql+psycopg://kclrun@/postgres?host={self._folder}"

    def start(self):
        options = ["-c", "fsync=off", "-c", "listen_addresses="]
        options += ["-c", f"unix_socket_directories={self._folder}"]
        self._server = subprocess.Popen(
            [self._binaries / "postgres", "-D", self._folder / "data", *options],
            preexec_fn=_end_with_the_tests,  # noqa: PLW1509 - one call, and no allocation
            **self._common(),
        )
        while subprocess.run(
            [self._binaries / "pg_isready", "-q", "-h", self._folder], **self._common()
        ).returncode:
            assert self._server.poll() is None, "PostgreSQL did not start"
            time.sleep(0.02)

    def crash(self):
        """No transaction that is under way commits; committed ones are there after `start`."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(HUNG_S)

    stop = crash

    def _run(self, program, *arguments):
        subprocess.run([self._binaries / program, *arguments], check=True, **self._common())

    def _common(self):
        # Where Debian's packages were only unpacked, their libraries are beside them.
        beside = ":".join(map(str, self._binaries.parents[2].glob("*-linux-gnu")))
        ours = {} if beside.startswith("/usr/lib") else {"LD_LIBRARY_PATH": beside}
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        environment = os.environ | ours | {"LC_ALL": "C"}
        return {"user": self._user, "cwd": self._folder, "env": environment, **nowhere}


def _end_with_the_tests():
    """Also if they are killed: SIGQUIT ends PostgreSQL at once."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGQUIT)


def _do_without(why):
    end = pytest.fail if os.environ.get(_NEED) == "1" else pytest.skip
    end(f"no PostgreSQL: {why}. SQL OUTPUTS ARE NOT TESTED OVER A REAL DATABASE")


@contextlib.contextmanager
def running_postgres():
    """A new server, with a database for each test that asks for one."""
    found = subprocess.run([_PROGRAMS], capture_output=True, text=True)
    if found.returncode != 0:
        _do_without(f"bin/postgres cannot fetch it: {found.stderr.strip()[-200:]}")
    # The server refuses to run as root.
    user = "nobody" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # the path of a socket has 107 bytes at most
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    server = None
    try:
        try:
            server = Postgres(Path(found.stdout.strip()), folder, user)
        except (OSError, subprocess.CalledProcessError, AssertionError) as error:
            _do_without(f"it does not start as {user or 'this user'}: {error}")
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
