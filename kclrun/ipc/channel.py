"""A control channel: whole messages over a socketpair, with descriptors; and the doorbell.

It does not know the meaning of the messages.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import msgspec

from kclrun.errors import LimitExceeded, MalformedFrame

Message = TypeVar("Message")


def decoded(decoder: msgspec.msgpack.Decoder[Message], data: bytes, sender: str) -> Message:
    """The message in `data`.

    Raises: MalformedFrame, naming the `sender`, if the bytes are not a message. The error shows
    none of the bytes: they may hold credentials, or data that user code wrote over our memory.
    """
    try:
        return decoder.decode(data)
    # A named boundary: beside its own errors the decoder raises those of str, dict, datetime and
    # our model for bad values (UnicodeDecodeError, TypeError, OverflowError, LimitExceeded …).
    except Exception as error:  # noqa: BLE001 - see above; only the decoder runs inside
        kind = type(error).__name__
        raise MalformedFrame(f"{len(data)} bytes of {sender} are not a message ({kind})") from None


# A pipe of Linux holds 64 KiB: one read empties it.
_PIPE_BYTES: Final = 64 * 1024


class Doorbell:
    """A pipe on which a byte wakes the manager: one of its rings has entries.

    Pressing never waits and never fails. One press may stand for many, so the manager then drains
    every ring. It is a pipe, not an eventfd: writers of any incarnation may be killed at any
    time, and single bytes in a pipe survive that (measured: 25 kills of 25).
    The manager has both ends (`create`); every other process has the write end (`for_writer`).
    """

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self.write_fd = write_fd

    @classmethod
    def create(cls) -> Doorbell:
        """A new pipe, close-on-exec. Pass on `write_fd`; poll `fileno()`."""
        return cls(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))

    @classmethod
    def for_writer(cls, write_fd: int) -> Doorbell:
        """The end for a lease process, from a passed descriptor that it takes over."""
        return cls(-1, write_fd)

    def fileno(self) -> int:
        """The read end, for a selector; -1 in a lease process."""
        return self._read_fd

    def press(self) -> None:
        """Wake the manager. A full pipe has woken it already; a closed pipe has no reader."""
        try:
            os.write(self.write_fd, b"!")
        except (BlockingIOError, BrokenPipeError):
            pass

    def answer(self) -> bool:
        """Take all presses so far; whether there were any. Call it before draining the rings."""
        try:
            return bool(os.read(self._read_fd, _PIPE_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        for fd in (self._read_fd, self.write_fd):
            if fd >= 0:
                os.close(fd)
        self._read_fd = self.write_fd = -1


# The largest message is a start command: a few kB and the options of the user.
FRAME_BYTES_MAX: Final = 64 * 1024
# Room for two frames (the kernel doubles this for its own bookkeeping). Besides, Linux queues at
# most `net.unix.max_dgram_qlen` + 1 messages: 11 by default.
_SEND_BUFFER_BYTES: Final = 2 * FRAME_BYTES_MAX
# A fork request has the most: segment, doorbell and the lease process's end of its channel.
DESCRIPTORS_MAX: Final = 4
# A manager waits at most 10 ms for a peer that does not read, then continues its turn.
_SEND_TRIES_MAX: Final = 3
_SEND_PAUSE_MS: Final = 5
# The kernel has no memory for it, or too many sent descriptors are not received yet.
_NO_ROOM: Final = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_FD_BYTES: Final = struct.calcsize("i")
_ENCODER: Final = msgspec.msgpack.Encoder()

Received = TypeVar("Received")
Sendable = TypeVar("Sendable", bound=msgspec.Struct)


class Sent(msgspec.Struct, frozen=True):
    """The message is in the peer's queue. It does not mean that the peer reads it."""


class NotSent(msgspec.Struct, frozen=True):
    """The peer's queue is full: the peer has not read for a while. Nothing was sent."""


class PeerGone(msgspec.Struct, frozen=True):
    """The peer closed its end or exited; no further message will come."""


class NoMessage(msgspec.Struct, frozen=True):
    """No message came in the given time."""


class Channel(Generic[Sendable, Received]):
    """One end of a channel. Takes over `sock`; decodes with `decoder`. One thread sends, one
    receives.

    A peer that exited, a full socket and silence are ordinary: they are returned as `PeerGone`,
    `NotSent` and `NoMessage`. Only bytes that are not a message raise; the receiver then ends
    the peer. SEQPACKET keeps messages whole: a peer killed in a send has sent the message or has
    not.
    """

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        sock.settimeout(0.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._sock = sock
        self._decoder = decoder

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected sockets, close-on-exec. Close the socket that is sent to the peer right
        after that: a process that keeps it open does not notice the exit of the peer."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: Sendable, fds: Sequence[int] = ()) -> Sent | NotSent | PeerGone:
        """Send one message, with copies of `fds`; the caller still owns `fds`. Waits 10 ms at most.

        Raises: LimitExceeded above FRAME_BYTES_MAX or DESCRIPTORS_MAX.
        """
        data = _ENCODER.encode(message)
        kind = type(message).__name__
        if len(data) > FRAME_BYTES_MAX:
            raise LimitExceeded(f"{kind} of {len(data)} bytes; at most {FRAME_BYTES_MAX}")
        if len(fds) > DESCRIPTORS_MAX:
            raise LimitExceeded(f"{kind} with {len(fds)} descriptors; at most {DESCRIPTORS_MAX}")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        for tries_left in reversed(range(_SEND_TRIES_MAX)):
            try:
                self._sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                return Sent()
            except BlockingIOError:
                if tries_left:
                    self._poll(select.POLLOUT, _SEND_PAUSE_MS)
            except ConnectionError:
                return PeerGone()
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                break
        return NotSent()

    def receive(self, timeout_s: float = 0.0) -> Received | NoMessage | PeerGone:
        """The next message; waits `timeout_s` at most. Descriptors sent with it are closed.

        Raises: MalformedFrame if it is not a message of ours.
        """
        got = self.receive_with_fds(timeout_s)
        if isinstance(got, NoMessage | PeerGone):
            return got
        message, fds = got
        _close_all(fds)
        return message

    def receive_with_fds(
        self, timeout_s: float = 0.0
    ) -> tuple[Received, tuple[int, ...]] | NoMessage | PeerGone:
        """The next message and the descriptors sent with it: close-on-exec; the caller closes them.

        Raises: MalformedFrame if it is not a message of ours; its descriptors are closed then.
        """
        if timeout_s > 0:
            self._poll(select.POLLIN, round(timeout_s * 1000))
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(
                FRAME_BYTES_MAX,
                socket.CMSG_SPACE(DESCRIPTORS_MAX * _FD_BYTES),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            return NoMessage()
        except ConnectionError:
            return PeerGone()
        fds = _descriptors(ancillary)
        if not data:
            # The end. An empty packet would look the same; our code never sends one.
            _close_all(fds)
            return PeerGone()
        try:
            return self._decoded(data, flags), fds
        except MalformedFrame:
            _close_all(fds)
            raise

    def close(self) -> None:
        self._sock.close()

    def _decoded(self, data: bytes, flags: int) -> Received:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise MalformedFrame(
                f"a message above {FRAME_BYTES_MAX} bytes or {DESCRIPTORS_MAX} descriptors,"
                " or this process has no descriptors left"
            )
        return decoded(self._decoder, data, "a channel")

    def _poll(self, event: int, timeout_ms: int) -> None:
        poller = select.poll()
        poller.register(self._sock, event)
        poller.poll(timeout_ms)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return tuple(fds)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
