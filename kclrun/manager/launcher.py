"""The launcher: a process that imports the modules of a lease process once and forks on request.

The manager runs it as `python -m kclrun.manager.launcher <fd> <module:function> <module>…`. It has
one thread, so its forks are safe. Its memory is frozen, so its children share it. It knows no
lease. Its exit ends no lease process. It exits at once when the manager exits (end of the channel).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import re
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, assert_never

from kclrun.aws import trust
from kclrun.errors import InvariantViolation
from kclrun.ipc import messages
from kclrun.ipc.channel import Channel, NoMessage, NotSent, PeerGone
from kclrun.ipc.exit_codes import BUG, HOST
from kclrun.manager.lease_session import (
    EXIT_HOOKS_WAIT_S,
    end_session,
    missing_hooks,
    run_exit_hooks,
)

# From <linux/prctl.h>; the numbers are part of the kernel's stable interface. Each function below
# changes the calling process only [S9], and works between the fork and the first line of user code.
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_PR_SET_NO_NEW_PRIVS: Final = 38
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

# Variables that Python, TLS, proxies and locales need: `environment.only` limits the others.
_NEEDED: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|NO_COLOR|COLUMNS"
    r"|PYTHON[A-Z0-9_]*|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|AWS_CA_BUNDLE|(?i:https?_proxy|no_proxy|all_proxy)"
)
# sd_notify(3), sd_listen_fds(3): the service manager sets these for the manager's process. If a
# library of the processor saw them, it would answer in the manager's name.
_OF_THE_SERVICE: Final = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"}
)


def lease_environment(
    environment: Mapping[str, str], only: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables that lease processes get: all, or only those that the operator named in `only`.

    The variables of `_NEEDED` are always included, those of the service manager never.
    A name in `only` may end in `*`. Raises: nothing.
    """
    names = {name for name in only or () if not name.endswith("*")}
    prefixes = tuple(name.removesuffix("*") for name in only or () if name.endswith("*"))
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_THE_SERVICE
        and (only is None or name in names or name.startswith(prefixes) or _NEEDED.fullmatch(name))
    }


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits, so that we can reap it.

    Raises: OSError (no supported kernel refuses it).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def orphans_left_alone() -> Iterator[None]:
    """Undo `adopt_orphans` afterwards, for a program that goes on after its run."""
    former = (ctypes.c_int * 1)()
    _prctl(_PR_GET_CHILD_SUBREAPER, former)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, former[0])


def name_process(name: str) -> None:
    """Set the name in `ps` and `top`; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def drop_rights() -> None:
    """No core dumps (they would hold payloads and keys), no setuid gains, private new files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)


def begin_own_session() -> None:
    """Begin a new session and ignore outside signals: the manager decides when to stop.

    The children do not keep the launcher's handlers.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def close_descriptors_except(kept: Iterable[int]) -> None:
    """Close all but stdin, stdout, stderr and `kept`. A sibling's channel kept open here would hide
    the manager's exit from that sibling."""
    keep = {0, 1, 2, *kept}
    for name in os.listdir("/proc/self/fd"):  # names, not paths
        fd = int(name)
        if fd not in keep:
            # The listing contains its own descriptor, which is closed by now.
            try:
                os.close(fd)
            except OSError:
                continue


def _prctl(
    option: int, argument: int | ctypes.Array[ctypes.c_char] | ctypes.Array[ctypes.c_int]
) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


Entry = Callable[[int, int, int], int]
_DESCRIPTORS_OF_A_FORK: Final = 3
_STDERR: Final = 2
# The message of a child that has set itself up. Any other message is an error number and words.
_IS_LEASE_PROCESS: Final = "ready"
# A manager that did not read for 10 ms stays busy for a while: four more tries in 100 ms.
_RETRY_MS: Final = 20


def main(arguments: Sequence[str]) -> int:
    """Serve the channel on descriptor `arguments[0]` until it ends; always 0."""
    channel = messages.channel_of_launcher(int(arguments[0]))
    os.set_inheritable(channel.fileno(), False)
    entry = _load(arguments[1], arguments[2:])
    name_process("kclrun-launcher")
    # A core dump of the launcher holds no payload. Each lease process drops its rights itself.
    wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _only_wake)
    # Ctrl-C is for the manager; a TERM to the whole group must not stop forks during a drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for name in missing_hooks():
        version = ".".join(map(str, sys.version_info[:2]))
        _say(
            f"Python {version} has no {name}: exit hooks of user code do not run in lease processes"
        )
    if threading.active_count() != 1:
        raise InvariantViolation("a preloaded module started a thread: forks would be unsafe")
    gc.collect()
    gc.freeze()
    outbox = Outbox(channel)
    outbox.post(messages.Ready(os.getpid()))
    _serve(channel, outbox, wakeup_read, entry)
    return 0


class Outbox:
    """Answers on their way to a manager that may be busy: none is lost while the manager lives.

    Bounded by the number of answers: a few forks in flight, and one exit for each lease process.
    """

    def __init__(self, channel: Channel[messages.FromLauncher, messages.ToLauncher]) -> None:
        self._channel = channel
        self._waiting: collections.deque[tuple[messages.FromLauncher, tuple[int, ...]]] = (
            collections.deque()
        )

    def post(self, message: messages.FromLauncher, fds: tuple[int, ...] = ()) -> None:
        """Send in order, now or later; closes `fds` once they were sent."""
        self._waiting.append((message, fds))
        self.flush()

    def flush(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            if isinstance(self._channel.send(message, fds), NotSent):
                return
            self._waiting.popleft()
            _close(fds)

    @property
    def retry_ms(self) -> int | None:
        """How long to wait before the next flush; None if nothing waits to be sent."""
        return _RETRY_MS if self._waiting else None


def _load(entry: str, modules: Sequence[str]) -> Entry:
    for name in modules:
        importlib.import_module(name)
    module, _, function = entry.partition(":")
    found: Entry = getattr(importlib.import_module(module), function)
    return found


def _only_wake(_number: int, _frame: object) -> None:
    """The wakeup descriptor does the rest: a handler that does nothing cannot be interrupted."""


def _serve(
    channel: Channel[messages.FromLauncher, messages.ToLauncher],
    outbox: Outbox,
    wakeup_fd: int,
    entry: Entry,
) -> None:
    # Why not multiprocessing's fork server: when that server is killed, `Process.sentinel` fires
    # within 1 ms and `is_alive()` is False with exit code 255 while the child still runs
    # (measured). So its sentinel proves nothing, and a lease restarted on that evidence would have
    # two writers [P5].
    # The order here: a pidfd is opened before the process could be reaped, so its pid is never
    # reused in between. Before it is reaped, all processes that user code left in its session are
    # ended.
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    poller.register(wakeup_fd, select.POLLIN)
    while True:
        poller.poll(outbox.retry_ms)
        outbox.flush()
        with contextlib.suppress(BlockingIOError):
            os.read(wakeup_fd, 4096)
        _reap(outbox)
        got = channel.receive_with_fds()
        if isinstance(got, PeerGone):
            return
        if isinstance(got, NoMessage):
            continue
        message, fds = got
        match message:
            case messages.Quit():
                return
            case messages.Trust(ca_bundle):
                _trust(ca_bundle)
            case messages.Fork():
                _fork(outbox, message, fds, entry)
            case _:
                assert_never(message)


def _trust(ca_bundle: str | None) -> None:
    """Make the TLS context of the lease processes. What is loaded here is shared by them all."""
    trust.prepare(ca_bundle)
    gc.collect()
    gc.freeze()


def _fork(outbox: Outbox, request: messages.Fork, fds: tuple[int, ...], entry: Entry) -> None:
    if len(fds) != _DESCRIPTORS_OF_A_FORK:
        raise InvariantViolation(f"a fork request with {len(fds)} descriptors")
    try:
        pid, word_fd = _forked(fds, entry)
    except OSError as error:
        outbox.post(
            messages.ForkFailed(request.request_id, f"fork: {error.strerror}", error.errno or 0)
        )
        return
    finally:
        _close(fds)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        # Without a pidfd its exit could not be proven. It has begun nothing, so end it.
        os.kill(pid, signal.SIGKILL)
        os.close(word_fd)
        reason = f"pidfd_open: {error.strerror}"
        outbox.post(messages.ForkFailed(request.request_id, reason, error.errno or 0))
        return
    word = _word_of(word_fd)
    if word != _IS_LEASE_PROCESS:
        os.close(pidfd)  # the child has begun nothing and exits by itself
        number, _, reason = word.partition(" ")
        reason = reason or "it ended before it had set itself up"
        outbox.post(
            messages.ForkFailed(request.request_id, f"as a lease process: {reason}", int(number))
        )
        return
    outbox.post(messages.Forked(request.request_id, pid), (pidfd,))


def _forked(fds: tuple[int, ...], entry: Entry) -> tuple[int, int]:
    """Fork a child that runs `entry`: its pid, and a descriptor.

    On that descriptor the child reports whether this host lets it be a lease process (a session of
    its own, no rights, no signals). A fork counts as successful only after that report.
    Raises: OSError if the fork fails.
    """
    word_fd, child_fd = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        _close((word_fd, child_fd))
        raise
    if pid == 0:
        _become_lease_process(fds, child_fd, entry)
    os.close(child_fd)
    return pid, word_fd


def _word_of(word_fd: int) -> str:
    """Read the child's report: it takes a millisecond. A launcher that waits much longer is silent
    for the manager, which replaces it."""
    word = os.read(word_fd, select.PIPE_BUF).decode()
    os.close(word_fd)
    return word or "0"


def _become_lease_process(fds: tuple[int, ...], word_fd: int, entry: Entry) -> None:
    """Never returns: in every case this process ends here and not in the launcher's loop."""
    code = BUG
    try:
        refusal = _set_up((*fds, word_fd))
        with contextlib.suppress(BrokenPipeError):  # the launcher exited: its channel ends, too
            os.write(word_fd, (refusal or _IS_LEASE_PROCESS).encode())
        os.close(word_fd)
        if refusal is not None:
            os._exit(HOST)
        # ABRT, the signal before KILL of a forced stop, dumps the stacks of all threads.
        faulthandler.enable(_STDERR, all_threads=True)
        code = entry(*fds)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else BUG
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then end it
        _print_traceback()
    finally:
        _leave(code)


def _set_up(kept: tuple[int, ...]) -> str | None:
    """The first steps of a lease process. Returns an error number and words for the first step
    that this host refuses; None if all succeed."""
    steps: tuple[tuple[str, Callable[[], object]], ...] = (
        ("a session of its own", begin_own_session),
        ("closing descriptors", lambda: close_descriptors_except(kept)),
        ("giving up rights", drop_rights),
        ("its name", lambda: name_process("kclrun-lease")),
    )
    signal.set_wakeup_fd(-1)
    for what, step in steps:
        try:
            step()
        except OSError as error:
            return f"{error.errno or 0} {what}: {error.strerror}"
    return None


def _leave(code: int) -> None:
    """End this lease process, and first the processes that user code started in it, within a
    bound."""

    def leave_now() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        # Done here too, because manager and launcher may both have exited.
        end_session(os.getpid(), lambda: True)
        os._exit(code)

    run_exit_hooks(EXIT_HOOKS_WAIT_S, leave_now)
    leave_now()


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"kclrun: {text}\n")
        sys.stderr.flush()


def _print_traceback() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        traceback.print_exc()


def _reap(outbox: Outbox) -> None:
    """For each exited child: end the processes in its session, reap it, and report it. Its pid may
    be used again from here on."""
    while True:
        try:
            exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if exited is None:
            return
        end_session(exited.si_pid, lambda: True)  # not reaped yet: only we reap it
        pid, status = os.waitpid(exited.si_pid, 0)
        outbox.post(messages.Exited(pid, status))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
