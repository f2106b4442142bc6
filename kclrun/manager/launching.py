"""The manager's side of the launcher: starting it, asking for forks, hearing of deaths.

Holds: `Launcher`, and the values it reports. May not know: leases; a fork is a request by number.
Rule: a fork whose answer never came is a process nobody can prove dead. It is harmless because it
gets its start command only after its pidfd arrived here; without one it sees the end of its channel
and exits without a claim. Look next: `launcher.py` (the other side), `children.py` (who asks).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from kclrun.errors import MalformedFrame
from kclrun.ipc.channel import Channel, PeerGone, Quiet, Sent
from kclrun.ipc.messages import (
    Exited,
    Fork,
    Forked,
    ForkFailed,
    FromLauncher,
    Quit,
    Ready,
    ToLauncher,
    channel_to_launcher,
)
from kclrun.manager.process_rights import allowed_environment

__all__ = ["ForkRefused", "Launcher", "LauncherGone", "LauncherReport", "ProcessForked"]

# What a lease process imports on its way to the first record, beside its entry: shared by all of
# them once it is loaded here. The user's module is not: each lease process loads it afresh.
_PRELOADED: Final = (
    "encodings.idna",  # looking up a host name needs it, whatever the name is
    "msgspec",
    "urllib3",
    "kclrun.ipc.messages",
    "kclrun.ipc.segment",
    "kclrun.ipc.transitions",
    "kclrun.processor",
)
# A message per fork and per death of up to 1024 lease processes; the rest waits for the next turn.
_MESSAGES_MAX: Final = 256
_QUIT_PATIENCE_S: Final = 2.0


class ProcessForked(msgspec.Struct, frozen=True):
    """A fork succeeded; `pidfd` is the receiver's to close."""

    request_id: int
    pid: int
    pidfd: int


class ForkRefused(msgspec.Struct, frozen=True):
    """No process came of the request."""

    request_id: int
    reason: str


class LauncherGone(msgspec.Struct, frozen=True):
    """The launcher died; its lease processes live on, and their exit statuses come to us."""

    exit_status: int | None


LauncherReport = ProcessForked | ForkRefused | LauncherGone | Exited


class Launcher:
    """At most one launcher process at a time, started again by `start` after its death."""

    def __init__(
        self,
        entry: str,
        preload: Sequence[str] = (),
        *,
        output_fds: tuple[int | None, int | None] = (None, None),
    ) -> None:
        self._arguments = (entry, *_PRELOADED, *preload)
        self._output_fds = output_fds
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel[ToLauncher, FromLauncher] | None = None
        self._requested: set[int] = set()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def in_flight(self) -> int:
        """Forks asked for and not answered."""
        return len(self._requested)

    def fileno(self) -> int:
        """For a selector; -1 while there is no launcher."""
        return self._channel.fileno() if self._channel is not None else -1

    def start(self) -> None:
        """Exec a launcher. Requests may be sent at once; it answers when it has loaded (~0.3 s).

        Raises: OSError if no process can be made.
        """
        ours, theirs = Channel.pair()
        try:
            # In a session of its own: Ctrl-C is for the manager. -P: the working folder is no
            # place to import from.
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [
                    *(sys.executable, "-P", "-m", "kclrun.manager.launcher"),
                    *(str(theirs.fileno()), *self._arguments),
                ],
                pass_fds=(theirs.fileno(),),
                env=allowed_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=self._output_fds[0],
                stderr=self._output_fds[1],
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = channel_to_launcher(ours)

    def fork(self, request_id: int, fds: Sequence[int]) -> bool:
        """Ask for a lease process that gets copies of `fds`; whether the request is on its way."""
        if self._channel is None:
            return False
        is_sent = isinstance(self._channel.send(Fork(request_id), fds), Sent)
        if is_sent:
            self._requested.add(request_id)
        return is_sent

    def hear(self) -> list[LauncherReport]:
        """What it reported since the last call. After LauncherGone there is none: `start` again."""
        reports: list[LauncherReport] = []
        while self._channel is not None and len(reports) < _MESSAGES_MAX:
            try:
                got = self._channel.receive_with_fds()
            except MalformedFrame:
                # It runs nothing but our code, so this is a damaged process: end it.
                got = PeerGone()
            if isinstance(got, Quiet):
                break
            if isinstance(got, PeerGone):
                reports += self._gone()
                break
            reports += self._reported(*got)
        return reports

    def stop(self) -> None:
        """Let it exit; kill it if it does not. Lease processes are not touched."""
        if self._channel is not None:
            self._channel.send(Quit())
            self._channel.close()
            self._channel = None
        self._reap(kill_after_s=_QUIT_PATIENCE_S)

    def _reported(self, message: FromLauncher, fds: tuple[int, ...]) -> list[LauncherReport]:
        match message:
            case Forked(request_id, pid) if len(fds) == 1:
                self._requested.discard(request_id)
                return [ProcessForked(request_id, pid, fds[0])]
            case ForkFailed(request_id, error):
                self._requested.discard(request_id)
                return [ForkRefused(request_id, error)]
            case Exited():
                return [message]
            case Ready() | Forked():
                return []

    def _gone(self) -> list[LauncherReport]:
        assert self._channel is not None, "only a launcher that was there can be gone"
        self._channel.close()
        self._channel = None
        status = self._reap(kill_after_s=0.0)
        refused = [ForkRefused(request, "the launcher died") for request in sorted(self._requested)]
        self._requested.clear()
        return [LauncherGone(status), *refused]

    def _reap(self, *, kill_after_s: float) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(timeout=kill_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
