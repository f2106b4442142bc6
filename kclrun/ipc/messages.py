"""The messages on the control channels, how to make each end, and reports as bytes of a ring.

A message contains all that its receiver needs; the receiver may rely only on the order of two
messages on a channel. A lease process answers through its ring: with `protocol/reports.py`.
"""

from __future__ import annotations

import socket
from typing import Final, TypeVar

import msgspec

from kclrun.errors import MalformedFrame
from kclrun.ipc.board import StartSpec
from kclrun.ipc.channel import Channel, decoded
from kclrun.model.wire import WireCredentials
from kclrun.protocol import reports
from kclrun.protocol.reports import AnyReport, Report
from kclrun.traffic.hot_keys import ShardHeat


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a lease process: claim this lease and consume it."""

    spec: StartSpec


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Serve one more lease in this process. Only for a shared process, whose first message it is,
    too. It comes with one descriptor: the process's end of the lease's own channel, on which
    `Begin` follows. When the channel of the process ends, no further lease comes."""


class Restart(msgspec.Struct, frozen=True, tag=True):
    """Finish the batch, checkpoint, keep the lease and end: the lease gets a process of its own."""


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
    """Another kclrun owner is in sight, so that a lease is offered; or none any more, so that it is
    released [P17]."""

    others: bool


class DumpStacks(msgspec.Struct, frozen=True, tag=True):
    """Write the stacks of all threads to stderr."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a lease process. Sent with three descriptors, in this order: the segment, the write end
    of the doorbell, the lease process's end of its channel. The answer carries `request_id`.
    """

    request_id: int


class Trust(msgspec.Struct, frozen=True, tag=True):
    """The CA bundle of lease processes (None: the host's own store). The launcher loads it before
    its next fork, so that they share its memory."""

    ca_bundle: str | None


class Quit(msgspec.Struct, frozen=True, tag=True):
    """No further forks will be requested; exit. Lease processes live on."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The launcher has loaded its modules and waits for requests."""

    pid: int


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process runs. Sent with its pidfd, which was opened before the launcher could reap the
    process: so it refers to this process, not to a later one with the same pid."""

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


class Left(msgspec.Struct, frozen=True, tag=True):
    """A lease of a shared process has ended: no thread of the process writes its row, its ring or
    its output any more. The only message from a lease to its manager: reports are on the ring. A
    lease with a process of its own does not send it, because the pidfd proves its end.

    `code` is as in `exit_codes`. `remains` names what user code left running, or is empty.
    """

    code: int
    remains: str = ""


ToAll = RenewCredentials | FailoverChanged | OthersInSight | DumpStacks
ToWorker = Begin | Admit | Restart | Drain | ToAll
ToLauncher = Fork | Trust | Quit
FromLauncher = Ready | Forked | ForkFailed | Exited

_TO_WORKER: Final = msgspec.msgpack.Decoder(ToWorker)
_TO_LAUNCHER: Final = msgspec.msgpack.Decoder(ToLauncher)
_FROM_LAUNCHER: Final = msgspec.msgpack.Decoder(FromLauncher)
_LEFT: Final = msgspec.msgpack.Decoder(Left)
_ENCODER: Final = msgspec.msgpack.Encoder()


def channel_to_worker(sock: socket.socket) -> Channel[ToWorker, Left]:
    """The manager's end of a lease's channel, or of that of a shared process."""
    return Channel(sock, _LEFT)


def channel_of_worker(fd: int) -> Channel[Left, ToWorker]:
    """The lease process's end, from the descriptor it inherited."""
    return Channel(socket.socket(fileno=fd), _TO_WORKER)


def channel_to_launcher(sock: socket.socket) -> Channel[ToLauncher, FromLauncher]:
    """The manager's end of the launcher's channel."""
    return Channel(sock, _FROM_LAUNCHER)


def channel_of_launcher(fd: int) -> Channel[FromLauncher, ToLauncher]:
    """The launcher's end, from the descriptor it inherited."""
    return Channel(socket.socket(fileno=fd), _TO_LAUNCHER)


# Together with the position (under 200 bytes) and the framing, the limits stay under the 16 KiB of
# `ring.ENTRY_BYTES_MAX`; a traceback of 8 KiB shows some 60 frames.
ERROR_BYTES_MAX: Final = 2 * 1024
TRACEBACK_BYTES_MAX: Final = 8 * 1024
_TEXT_BYTES_MAX: Final = 512
_ELLIPSIS: Final = "…"
# A split makes two children, a merge one; 16 leaves room for future changes of the service.
_CHILDREN_MAX: Final = 16

_OF_FAILURES: Final = {
    "where": _TEXT_BYTES_MAX,
    "error": ERROR_BYTES_MAX,
    "raised_at": _TEXT_BYTES_MAX,
    "record": _TEXT_BYTES_MAX,
    "traceback_text": TRACEBACK_BYTES_MAX,
}
_BYTES_MAX_OF: Final[dict[type[Report], dict[str, int]]] = {
    reports.StartUnclaimed: {"reason": _TEXT_BYTES_MAX},
    reports.LeaseLost: {"reason": _TEXT_BYTES_MAX},
    reports.ProcessReplaced: {"reason": _TEXT_BYTES_MAX},
    reports.ProcessBroke: {"reason": _TEXT_BYTES_MAX},
    reports.LeaseReleased: {"how": _TEXT_BYTES_MAX},
    reports.ProcessorRaised: _OF_FAILURES,
    reports.ProcessorRecovered: {"where": _TEXT_BYTES_MAX},
    reports.ProcessorWaited: {"where": _TEXT_BYTES_MAX},
    reports.ProcessorFailed: _OF_FAILURES,
    reports.RecordGivenUp: {
        name: _OF_FAILURES[name] for name in ("error", "raised_at", "traceback_text")
    },
    reports.RecordsExpired: {"detail": ERROR_BYTES_MAX},
    reports.RowsWereRefused: {"error": ERROR_BYTES_MAX},
    reports.ProcessWarned: {"detail": ERROR_BYTES_MAX},
}
ReportT = TypeVar("ReportT", bound=Report)

# What a ring holds: the reports about a lease, and the traffic of its shard.
RingReport = AnyReport | ShardHeat
_REPORT: Final[msgspec.msgpack.Decoder[RingReport]] = msgspec.msgpack.Decoder(RingReport)


def encode_report(report: Report) -> bytes:
    """A report as tagged MessagePack, for `EventRing.put`. Its texts are truncated, so it has at
    most `ring.ENTRY_BYTES_MAX`. Of a traceback the end is kept."""
    return _ENCODER.encode(_bounded(report))


def decode_report(payload: bytes) -> RingReport:
    """The report in `payload`, with its texts truncated: user code may have written any bytes.

    Raises: MalformedFrame for any other bytes; end the lease process that wrote them.
    """
    report = decoded(_REPORT, payload, "an event ring")
    if isinstance(report, reports.ShardEnded) and len(report.children) > _CHILDREN_MAX:
        raise MalformedFrame(f"an event ring names {len(report.children)} children of a shard")
    if isinstance(report, ShardHeat) and not report.is_sound:
        raise MalformedFrame("an event ring holds a traffic that no shard has")
    return _bounded(report)


def _bounded(report: ReportT) -> ReportT:
    cut = {}
    for name, limit in _BYTES_MAX_OF.get(type(report), {}).items():
        text = getattr(report, name)
        shorter = _truncated(text, limit, keeps_end=name == "traceback_text")
        if shorter is not text:
            cut[name] = shorter
    return msgspec.structs.replace(report, **cut) if cut else report


def _truncated(text: str, limit_bytes: int, *, keeps_end: bool) -> str:
    """`text` in at most `limit_bytes` of UTF-8, with an ellipsis where it was cut.

    Lone surrogates (undecodable file names in an exception) are escaped: UTF-8 has none.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit_bytes:
        return text if len(data) == len(text) else data.decode()
    kept = limit_bytes - len(_ELLIPSIS.encode())
    if keeps_end:
        return _ELLIPSIS + data[-kept:].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + _ELLIPSIS
