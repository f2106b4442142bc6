"""A control channel: whole messages over a socketpair, and descriptors with them.

Holds: `Channel`, and what a send or a receipt can come to. May not know: what the messages say.
Rule: every end of it is a value. A dead peer, a full socket and a silence are ordinary and come
back as `PeerGone`, `NotSent`, `Quiet`; only bytes that are no message raise, and condemn the peer.
SEQPACKET keeps messages whole: a peer killed in a send has sent it or has not.
Look next: `messages.py`.
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
from kclrun.ipc.frames import decoded

__all__ = [
    "DESCRIPTORS_MAX",
    "FRAME_BYTES_MAX",
    "Channel",
    "NotSent",
    "PeerGone",
    "Quiet",
    "Sent",
]

# The largest message is a start command, a few kB and the user's options; a frame beyond 64 KiB
# would be a stream in disguise.
FRAME_BYTES_MAX: Final = 64 * 1024
# Room for two frames (the kernel doubles this for its own bookkeeping). Beside it, Linux queues at
# most `net.unix.max_dgram_qlen` + 1 messages: 11 by default.
_SEND_BUFFER_BYTES: Final = 2 * FRAME_BYTES_MAX
# A fork request carries the most: segment, doorbell and the lease process's end of its channel.
DESCRIPTORS_MAX: Final = 4
# A manager waits 10 ms at the most for a peer that does not read, then goes on with its turn.
_SEND_TRIES_MAX: Final = 3
_SEND_PAUSE_MS: Final = 5
# The kernel has no memory for it, or too many descriptors are on their way unread.
_NO_ROOM: Final = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
_FD_BYTES: Final = struct.calcsize("i")
_ENCODER: Final = msgspec.msgpack.Encoder()

Received = TypeVar("Received")
Sendable = TypeVar("Sendable", bound=msgspec.Struct)


class Sent(msgspec.Struct, frozen=True):
    """The message is in the peer's queue. Whether the peer reads it is another matter."""


class NotSent(msgspec.Struct, frozen=True):
    """The peer's queue is full: it has not read for a while. Nothing was sent."""


class PeerGone(msgspec.Struct, frozen=True):
    """The peer closed its end or died; nothing more will come."""


class Quiet(msgspec.Struct, frozen=True):
    """Nothing came in the time given."""


class Channel(Generic[Sendable, Received]):
    """One end. Takes over `sock`; decodes with `decoder`. Send and receive from one thread each."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[Received]) -> None:
        sock.settimeout(0.0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._sock = sock
        self._decoder = decoder

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Two connected sockets, close-on-exec. Close the one given away right after it was:
        whoever holds it on keeps its death from being seen."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """For a selector; -1 once closed."""
        return self._sock.fileno()

    def send(self, message: Sendable, fds: Sequence[int] = ()) -> Sent | NotSent | PeerGone:
        """Send one message, with copies of `fds`, which stay the caller's. Waits 10 ms at most.

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

    def receive(self, timeout_s: float = 0.0) -> Received | Quiet | PeerGone:
        """The next message, waited for `timeout_s` at most. Descriptors sent with it are closed.

        Raises: MalformedFrame if it is none of ours.
        """
        got = self.receive_with_fds(timeout_s)
        if isinstance(got, Quiet | PeerGone):
            return got
        message, fds = got
        _close_all(fds)
        return message

    def receive_with_fds(
        self, timeout_s: float = 0.0
    ) -> tuple[Received, tuple[int, ...]] | Quiet | PeerGone:
        """The next message and the descriptors sent with it: close-on-exec, the caller's to close.

        Raises: MalformedFrame if it is none of ours; its descriptors are closed then.
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
            return Quiet()
        except ConnectionError:
            return PeerGone()
        fds = _descriptors(ancillary)
        if not data:
            # An empty packet looks the same as the end; nobody of ours sends one.
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
