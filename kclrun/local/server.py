"""Starts and ends the embedded AWS: two processes of our own, on loopback, by exec.

It knows pids, ports and pipes, but not the answers of the processes. Readiness is a condition, not
a sleep. A process is ended by its pid and waited for. If this process ends in any way, the standard
input of both ends, and then they exit too.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import importlib.util
import ipaddress
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Self

import msgspec

from kclrun.errors import SettingsError, Unavailable
from kclrun.lifecycle.stopping import STOP_SIGNALS
from kclrun.local.changes.model import ChangeSettings
from kclrun.local.limits import STORED_BYTES_MAX
from kclrun.local.signatures import Credentials
from kclrun.model.stream import LOOPBACK_REGION, is_loopback_host
from kclrun.model.wire import WireCredentials, WireEndpoint

# The services that kclrun uses.
SERVICES: Final = "Kinesis, DynamoDB with its streams, CloudWatch, S3, SQS, SNS and Firehose"
# A child writes this line once it accepts connections.
READY: Final = b"ready\n"


class ProcessSettings(msgspec.Struct, frozen=True):
    """The settings of a child process. `elsewhere_port`: the Kinesis endpoint forwards all other
    requests to this port. `changes`: the shards of the streams of tables. `names`: the names of
    this machine that requests may use besides those of loopback. `serves_moto_api`: see `Guard`."""

    credentials: Credentials | None = None
    limits: bool = False
    settle_s: float = 0.0
    stored_bytes_max: int = STORED_BYTES_MAX
    elsewhere_port: int | None = None
    changes: ChangeSettings = ChangeSettings()
    names: tuple[str, ...] = ()
    serves_moto_api: bool = False


_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 512
# The import of moto takes about a second. On a machine busy with tests it has taken ten.
START_MAX_S: Final = 60.0
# The children abort requests after one second and have nothing to save.
_END_MAX_S: Final = 5.0
_NEEDED: Final = ("cbor2", "h2", "httptools", "moto", "uvicorn")
_UNAVAILABLE: Final = 69
_OPEN: Final = (
    "Every machine that reaches this address may use it. With --credentials KEY:SECRET it takes"
    " only requests that are signed with these.\n"
)
_NOT_HERE: Final = "give an address or a name of this machine"
_KINESIS: Final = "kclrun.local.kinesis_process"
MOTO: Final = "kclrun.local.moto_process"


class ServiceProcess:
    """One process: started with a listening socket, ready when it writes `READY`."""

    def __init__(self, module: str, listener: socket.socket, settings: bytes) -> None:
        self.module = module
        self.address, self.port = listener.getsockname()[:2]
        self.url = _url(self.address, self.port)
        self.process = subprocess.Popen(
            # -P: a file of the current folder (a user's secrets.py) must not shadow a module.
            [sys.executable, "-P", "-m", module, str(listener.fileno())],
            env=os.environ | {"PYTHONPATH": _python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            # Ctrl-C in a terminal must reach only the parent, which ends its children itself.
            start_new_session=True,
        )
        listener.close()
        assert self.process.stdin is not None
        # If the child has exited already, wait_ready reports it with its exit code.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(settings + b"\n")
            self.process.stdin.flush()

    def wait_ready(self, deadline: float) -> None:
        """Raises: Unavailable if it exits, or is not ready until `deadline` (monotonic)."""
        assert self.process.stdout is not None
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        if not poller.poll(left_ms):
            raise Unavailable(f"{self.module} was not ready within {START_MAX_S:.0f} s")
        if self.process.stdout.readline() != READY:
            raise Unavailable(
                f"{self.module} ended while starting (exit code {self.process.wait()}); its"
                " standard error says why"
            )

    def ask_to_end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.terminate()

    def end(self) -> None:
        """Wait until it has exited; kill it if it does not exit after `ask_to_end`."""
        assert self.process.stdout is not None
        try:
            self.process.wait(_END_MAX_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Embedded:
    """The running embedded AWS. A context manager; `close` ends it. Pids: `pids`."""

    def __init__(self, kinesis: ServiceProcess, moto: ServiceProcess) -> None:
        self._children = (kinesis, moto)
        self.is_on_loopback = is_loopback_host(kinesis.address)
        # This process answers Kinesis itself and forwards everything else.
        self.endpoint = kinesis.url
        self.kinesis_endpoint = self.endpoint
        self.dynamodb_endpoint = moto.url

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(child.process.pid for child in self._children)

    def ended(self) -> str | None:
        """The name of a process that has ended by itself, or None while both run."""
        for child in self._children:
            if child.process.poll() is not None:
                return child.module
        return None

    def close(self) -> None:
        """End both processes and wait for them. May be called twice."""
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_embedded(
    *,
    port: int = 0,
    hosts: Sequence[str] = (),
    limits: bool = False,
    credentials: tuple[str, str] | None = None,
    settle_s: float = 0.0,
    stored_bytes_max: int = STORED_BYTES_MAX,
    changes: ChangeSettings | None = None,
    serves_moto_api: bool = False,
) -> Embedded:
    """Start the embedded AWS and return once both processes answer.

    It listens on loopback, or at the first of `hosts`; requests may use each of these names. Web
    pages of other sites get nothing (see `Guard`). `port` 0 takes a free one. `limits`: the
    service's rates a shard. `credentials`: the access key and secret every request must be signed
    with; None lets every request in. `settle_s`: how long a stream is CREATING, UPDATING or
    DELETING. `stored_bytes_max` bounds what Kinesis holds. `changes`: how the shards of the streams
    of DynamoDB tables behave.

    Raises: SettingsError (the extra is not installed; the port is taken), Unavailable.
    """
    require_extra()
    deadline = time.monotonic() + START_MAX_S
    face, behind = listen(port, *hosts[:1]), listen(0)
    settings = ProcessSettings(
        credentials=None if credentials is None else Credentials(*credentials),
        limits=limits,
        settle_s=settle_s,
        stored_bytes_max=stored_bytes_max,
        elsewhere_port=behind.getsockname()[1],
        changes=changes or ChangeSettings(),
        names=tuple(hosts),
        serves_moto_api=serves_moto_api,
    )
    encoded = msgspec.json.encode(settings)
    children = (ServiceProcess(_KINESIS, face, encoded), ServiceProcess(MOTO, behind, encoded))
    embedded = Embedded(*children)
    try:
        for child in children:
            child.wait_ready(deadline)
    except BaseException:
        embedded.close()
        raise
    return embedded


def signal_event(stop_signals: Iterable[signal.Signals]) -> threading.Event:
    """An event that these signals set from now on; for a verb that runs until then."""
    came = threading.Event()
    for number in stop_signals:
        # In a thread: a handler that interrupts `came.wait()` may find the lock of the event held.
        signal.signal(number, lambda *_: _thread.start_new_thread(came.set, ()))
    return came


class NewStreams(msgspec.Struct, frozen=True):
    """The streams that `kclrun local` creates: how many shards each has."""

    shards: Mapping[str, int]
    region: str = LOOPBACK_REGION

    def __str__(self) -> str:
        named = (f"{name} (shards: {shards})" for name, shards in self.shards.items())
        return f"Streams in {self.region}: {', '.join(named)}"


def run_local(
    port: int,
    *,
    limits: bool,
    credentials: tuple[str, str] | None,
    hosts: Sequence[str] = (),
    serves_moto_api: bool = False,
    streams: NewStreams | None = None,
    furnished: Callable[[Embedded, threading.Event], AbstractContextManager[None]] | None = None,
    stop_signals: Iterable[signal.Signals] = STOP_SIGNALS,
) -> int:
    """`kclrun local`: serve in the foreground until one of `stop_signals`; the exit code.

    Creates `streams`, then enters `furnished`, which is
    given an event that is set by the signal. Prints one line when ready, and one that names the
    streams. The exit code is 0 after a signal and 69 if one of the processes ends by itself.
    """
    asked = signal_event(stop_signals)
    started = start_embedded(
        port=port,
        hosts=hosts,
        limits=limits,
        credentials=credentials,
        serves_moto_api=serves_moto_api,
    )
    with started as embedded:
        if streams is not None and streams.shards:
            _make_streams(embedded, streams, credentials)
        with contextlib.nullcontext() if furnished is None else furnished(embedded, asked):
            sys.stdout.write(f"{SERVICES} at {embedded.endpoint} (Ctrl-C ends them)\n")
            if streams is not None and streams.shards:
                sys.stdout.write(f"{streams}\n")
            sys.stdout.flush()
            if credentials is None and not embedded.is_on_loopback:
                sys.stderr.write(_OPEN)
            while (name := embedded.ended()) is None:
                if asked.wait(0.5):
                    return os.EX_OK
        sys.stderr.write(f"{name} has ended; its messages are above.\n")
        return _UNAVAILABLE


def _make_streams(
    embedded: Embedded, streams: NewStreams, credentials: tuple[str, str] | None
) -> None:
    # Imported only if streams are created.
    from kclrun.local.filling import LOCAL_CREDENTIALS, make_stream

    endpoint = WireEndpoint(embedded.kinesis_endpoint, streams.region, streams.region)
    keys = LOCAL_CREDENTIALS if credentials is None else WireCredentials(*credentials)
    for name, shards in streams.shards.items():
        make_stream(endpoint, name, shards, keys)


def require_extra(what: str = "aws.endpoint: embedded") -> None:
    """Raises: SettingsError if the packages of the extra `local` are missing."""
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise SettingsError(f"{what} needs the extra: pip install 'kclrun[local]'")


def _python_path() -> str:
    """The folder of this installation of kclrun, then the PYTHONPATH of the environment."""
    here = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))


def listen(port: int, host: str = _LOOPBACK) -> socket.socket:
    """A listening socket at an address or a name of this machine. Raises: SettingsError."""
    listener: socket.socket | None = None
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except UnicodeError as error:  # no name at all
        raise SettingsError(f"cannot listen on {host}:{port} ({error}): {_NOT_HERE}") from error
    except OSError as error:
        if listener is not None:
            listener.close()
        is_elsewhere = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        advice = "choose another port, or end the program that has it"
        raise SettingsError(
            f"cannot listen on {host}:{port} ({error.strerror}):"
            f" {_NOT_HERE if is_elsewhere else advice}"
        ) from error
    return listener


def _url(host: str, port: int) -> str:
    """The endpoint of a listening address, for clients of this machine."""
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else _LOOPBACK
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
