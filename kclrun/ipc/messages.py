"""What is said on the control channels, one frozen struct a message.

Holds: manager to lease process (`ToWorker`), manager to launcher (`ToLauncher`), launcher to
manager (`FromLauncher`), and how to make each end. A lease process answers through its ring.
Rule: a message says all it needs; the order of two messages on a channel is the only thing it may
rely on. Look next: `spec.py`, `channel.py`.
"""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.ipc.channel import FRAME_BYTES_MAX, Channel
from kclrun.ipc.spec import StartSpec
from kclrun.model.wire import WireCredentials

__all__ = [
    "Begin",
    "Drain",
    "DumpStacks",
    "Exited",
    "FailoverChanged",
    "Fork",
    "ForkFailed",
    "Forked",
    "FromLauncher",
    "NoAnswer",
    "OthersInSight",
    "Quit",
    "Ready",
    "RenewCredentials",
    "ToLauncher",
    "ToWorker",
    "channel_of_launcher",
    "channel_of_worker",
    "channel_to_launcher",
    "channel_to_worker",
    "check_begin",
]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a lease process: claim this lease and consume it."""

    spec: StartSpec


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish the batch, checkpoint, give the lease away, exit; within `deadline_s` seconds."""

    reason: str
    deadline_s: float


class RenewCredentials(msgspec.Struct, frozen=True, tag=True):
    """Use these from the next request on."""

    credentials: WireCredentials


class FailoverChanged(msgspec.Struct, frozen=True, tag=True):
    """The smallest failover in the fleet changed: the fence follows it [P7]."""

    failover_s: float


class OthersInSight(msgspec.Struct, frozen=True, tag=True):
    """Another kclrun owner is in sight, or none any more: offer or release accordingly [P17]."""

    others: bool


class DumpStacks(msgspec.Struct, frozen=True, tag=True):
    """Write the stacks of all threads to stderr."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a lease process. Comes with three descriptors, in this order: the segment, the write
    end of the doorbell, the lease process's end of its channel. The answer carries `request_id`.
    """

    request_id: int


class Quit(msgspec.Struct, frozen=True, tag=True):
    """No more forks will be asked for; exit. Lease processes live on."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The launcher has loaded what it needs and waits for requests."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs. Comes with its pidfd, opened before the launcher could have reaped it, so
    it is of this process and no later one of the same pid."""

    request_id: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """No process was made (out of memory, of processes, of descriptors)."""

    request_id: int
    error: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A lease process was reaped; `status` as `os.waitpid` gives it."""

    pid: int
    status: int


class NoAnswer(msgspec.Struct, frozen=True, tag=True):
    """Never sent: a lease process says nothing on its channel, its ring says all."""


ToWorker = Begin | Drain | RenewCredentials | FailoverChanged | OthersInSight | DumpStacks
ToLauncher = Fork | Quit
FromLauncher = Ready | Forked | ForkFailed | Exited

_TO_WORKER: Final = msgspec.msgpack.Decoder(ToWorker)
_TO_LAUNCHER: Final = msgspec.msgpack.Decoder(ToLauncher)
_FROM_LAUNCHER: Final = msgspec.msgpack.Decoder(FromLauncher)
_NO_ANSWER: Final = msgspec.msgpack.Decoder(NoAnswer)
_ENCODER: Final = msgspec.msgpack.Encoder()


def channel_to_worker(sock: socket.socket) -> Channel[ToWorker, NoAnswer]:
    """The manager's end of a lease process's channel."""
    return Channel(sock, _NO_ANSWER)


def channel_of_worker(fd: int) -> Channel[NoAnswer, ToWorker]:
    """The lease process's end, from the descriptor it inherited."""
    return Channel(socket.socket(fileno=fd), _TO_WORKER)


def channel_to_launcher(sock: socket.socket) -> Channel[ToLauncher, FromLauncher]:
    """The manager's end of the launcher's channel."""
    return Channel(sock, _FROM_LAUNCHER)


def channel_of_launcher(fd: int) -> Channel[FromLauncher, ToLauncher]:
    """The launcher's end, from the descriptor it inherited."""
    return Channel(socket.socket(fileno=fd), _TO_LAUNCHER)


def check_begin(begin: Begin) -> None:
    """See that a start command can be sent: at the start of a manager and before each take.

    Raises: SettingsError if `options` hold what does not travel, or are too large.
    """
    try:
        size = len(_ENCODER.encode(begin))
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError, RecursionError) as error:
        kind = type(error).__name__
        raise SettingsError(
            f"options: a value is none that YAML has, or too large ({kind})"
        ) from None
    if size > FRAME_BYTES_MAX:
        options = len(_ENCODER.encode(begin.spec.options))
        raise SettingsError(
            f"options: the start command takes {size} bytes, {options} of them for the options;"
            f" at most {FRAME_BYTES_MAX}. Put large values in a file and give its path"
        )
