"""Reports as bytes of a ring: `protocol/reports.py` encoded, decoded, and bounded in their texts.

It does not know how the manager reacts to them.
"""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from kclrun.errors import MalformedFrame
from kclrun.ipc.channel import decoded
from kclrun.protocol import reports
from kclrun.protocol.reports import AnyReport, Report

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
    reports.ProcessBroke: {"reason": _TEXT_BYTES_MAX},
    reports.LeaseReleased: {"how": _TEXT_BYTES_MAX},
    reports.ProcessorRaised: _OF_FAILURES,
    reports.ProcessorRecovered: {"where": _TEXT_BYTES_MAX},
    reports.ProcessorFailed: _OF_FAILURES,
    reports.RecordsExpired: {"detail": ERROR_BYTES_MAX},
    reports.ProcessWarned: {"detail": ERROR_BYTES_MAX},
}
ReportT = TypeVar("ReportT", bound=Report)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[AnyReport]] = msgspec.msgpack.Decoder(AnyReport)


def encode(report: Report) -> bytes:
    """A report as tagged MessagePack, for `EventRing.put`. Its texts are truncated, so it has at
    most `ring.ENTRY_BYTES_MAX`. Of a traceback the end is kept."""
    return _ENCODER.encode(_bounded(report))


def decode(payload: bytes) -> AnyReport:
    """The report in `payload`, with its texts truncated: user code may have written any bytes.

    Raises: MalformedFrame for any other bytes; end the lease process that wrote them.
    """
    report = decoded(_DECODER, payload, "an event ring")
    if isinstance(report, reports.ShardEnded) and len(report.children) > _CHILDREN_MAX:
        raise MalformedFrame(f"an event ring names {len(report.children)} children of a shard")
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
