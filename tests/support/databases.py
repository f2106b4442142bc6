"""A PostgreSQL and a MariaDB of their own for tests, from bin/debian. They listen on Unix sockets
only.

Where one cannot be had, its tests are skipped, and say so; with KCLRUN_NEED_DATABASES=1 they fail.
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
from tests.support.programs import run_to_end

_PROGRAMS = Path(__file__).parents[2] / "bin" / "debian"
_NEED = "KCLRUN_NEED_DATABASES"


class Server:
    """One server; `crash` ends it as a failing machine would, `start` brings it back."""

    package: str
    crash_signal: signal.Signals
    runs_as_root = False

    def __init__(self, binaries: Path, folder: Path, user: str | None) -> None:
        self._binaries, self._folder, self._user = binaries, folder, user
        self._install()
        self.start()

    def database_url(self, name):
        """Of a database of this server."""
        raise NotImplementedError

    def start(self):
        self._server = subprocess.Popen(
            self._command(),
            preexec_fn=_end_with_the_tests,  # noqa: PLW1509 - one call, and no allocation
            **self._common(),
        )
        while subprocess.run(self._ready(), **self._common()).returncode:
            assert self._server.poll() is None, f"{self.package} did not start"
            time.sleep(0.02)

    def crash(self):
        """No transaction that is under way commits; committed ones are there after `start`."""
        self._server.send_signal(self.crash_signal)
        self._server.wait(HUNG_S)

    stop = crash

    def _run(self, program, *arguments):
        subprocess.run([self._binaries / program, *arguments], check=True, **self._common())

    def _common(self):
        # Where Debian's packages were only unpacked, their libraries are beside them.
        root = next(each for each in self._binaries.parents if each.name == "usr").parent
        beside = ":".join(map(str, root.glob("usr/lib/*-linux-gnu")))
        ours = {} if root == Path("/") else {"LD_LIBRARY_PATH": beside}
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        environment = os.environ | ours | {"LC_ALL": "C"}
        return {"user": self._user, "cwd": self._folder, "env": environment, **nowhere}


class Postgres(Server):
    package = "postgresql"
    crash_signal = signal.SIGQUIT

    @property
    def url(self):
        return self.database_url("postgres")

    def database_url(self, name):
        return f"postgresql+psycopg://kclrun@/{name}?host={self._folder}"

    def _install(self):
        how = ["-U", "kclrun", "-A", "trust", "-E", "UTF8", "--no-sync"]
        self._run("initdb", "-D", self._folder / "data", *how)

    def _command(self):
        options = ["-c", "fsync=off", "-c", "listen_addresses="]
        options += ["-c", f"unix_socket_directories={self._folder}"]
        return [self._binaries / "postgres", "-D", self._folder / "data", *options]

    def _ready(self):
        return [self._binaries / "pg_isready", "-q", "-h", self._folder]


class MariaDb(Server):
    """It also shows how MySQL's dialect does."""

    package = "mariadb"
    crash_signal = signal.SIGKILL
    runs_as_root = True

    @property
    def url(self):
        return self.database_url("")

    def database_url(self, name):
        return f"mysql+pymysql://root@/{name}?unix_socket={self._folder}/s"

    def _install(self):
        data = self._folder / "data"
        how = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        here = [f"--basedir={self._binaries.parent}", f"--datadir={data}"]
        self._run("mariadb-install-db", "--no-defaults", *self._as_user(), *here, *how)

    def _command(self):
        # The log of a commit is written, and not synced: a server that is killed loses nothing.
        options = ["--innodb-flush-log-at-trx-commit=2", "--skip-networking"]
        options += [f"--datadir={self._folder / 'data'}", f"--socket={self._folder / 's'}"]
        options += [f"--basedir={self._binaries.parent}", "--innodb-buffer-pool-size=16M"]
        program = self._binaries.parent / "sbin" / "mariadbd"
        return [program, "--no-defaults", *self._as_user(), *options]

    def _as_user(self):
        return ["--user=root"] if os.geteuid() == 0 else []

    def _ready(self):
        socket = f"--socket={self._folder / 's'}"
        return [self._binaries / "mariadb-admin", "--no-defaults", socket, "-u", "root", "ping"]


def _end_with_the_tests():
    """Also if they are killed: SIGQUIT ends PostgreSQL and MariaDB."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGQUIT)


def _do_without(package, why):
    end = pytest.fail if os.environ.get(_NEED) == "1" else pytest.skip
    end(f"no {package}: {why}. SQL OUTPUTS ARE NOT TESTED OVER THIS DATABASE")


def running_postgres():
    """A new server, with a database for each test that asks for one."""
    return _running(Postgres)


def running_mariadb():
    """A new server, with a database for each test that asks for one."""
    return _running(MariaDb)


@contextlib.contextmanager
def _running(kind):
    found = run_to_end([_PROGRAMS, kind.package])
    if found.returncode != 0:
        words = f"bin/debian cannot fetch it: {found.stderr.strip()[-200:]}"
        _do_without(kind.package, words)
    user = "nobody" if os.geteuid() == 0 and not kind.runs_as_root else None
    folder = Path(tempfile.mkdtemp(prefix="db-"))  # the path of a socket has 107 bytes at most
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
    server = None
    try:
        try:
            server = kind(Path(found.stdout.strip()), folder, user)
        except (OSError, subprocess.CalledProcessError, AssertionError) as error:
            _do_without(kind.package, f"it does not start as {user or 'this user'}: {error}")
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)
