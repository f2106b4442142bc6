"""The messages on the control channels, one frozen struct each, and how to make each end.

A message contains all that its receiver needs; the receiver may rely only on the order of two
messages on a channel. A lease process answers through its ring.
"""

from __future__ import annotations

import socket
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.ipc.board import StartSpec
from kclrun.ipc.channel import FRAME_BYTES_MAX, Channel
from kclrun.model.wire import WireCredentials


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a lease process: claim this lease and consume it."""

    spec: StartSpec


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish the batch, checkpoint, give the lease away, exit; within `deadline_s` seconds."""

    reason: str
    deadline_s: float


class RenewCredentials(msgspec.Struct, frozen=True, tag=True):
    """Use these credentials from the next request on."""

    credentials: WireCredentials


class FailoverChanged(msgspec.Struct, frozen=True, tag=True):
    """The smallest failover in the fleet changed: the fence follows it [P7]."""

    failover_s: float


class OthersInSight(msgspec.Struct, frozen=True, tag=True):
    """Another kclrun owner is in sight, or not any more: offer or release accordingly [P17]."""

    others: bool


class DumpStacks(msgspec.Struct, frozen=True, tag=True):
    """Write the stacks of all threads to stderr."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a lease process. Sent with three descriptors, in this order: the segment, the write end
    of the doorbell, the lease process's end of its channel. The answer carries `request_id`.
    """

    request_id: int


class Quit(msgspec.Struct, frozen=True, tag=True):
    """No further forks will be requested; exit. Lease processes live on."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The launcher has loaded its modules and waits for requests."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs. Sent with its pidfd, which was opened before the launcher could have reaped
    the process: so it refers to this process and to no later one of the same pid."""

    request_id: int
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag=True):
    """No lease process was made: out of memory, of processes or of descriptors, or this host
    refused one of the first steps. No code of the entry was run."""

    request_id: int
    error: str
    errno: int = 0


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A lease process was reaped; `status` as `os.waitpid` gives it."""

    pid: int
    status: int


class NoAnswer(msgspec.Struct, frozen=True, tag=True):
    """Never sent: a lease process reports on its ring, never on its channel."""


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
    """Check that a start command can be sent: at the start of a manager and before each take.

    Raises: SettingsError if `options` hold values that cannot be encoded, or are too large.
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
