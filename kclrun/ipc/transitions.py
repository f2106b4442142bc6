"""The transitions of a lease, as its lease process reports them to the manager through its ring.

It does not know how the manager reacts to them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kclrun.ipc.channel import decoded
from kclrun.model.sequence import ExtendedSequenceNumber

# Together with the position (under 200 bytes) and the framing, the limits stay under the 16 KiB of
# `ring.ENTRY_BYTES_MAX`; a traceback of 8 KiB shows some 60 frames.
ERROR_BYTES_MAX: Final = 2 * 1024
TRACEBACK_BYTES_MAX: Final = 8 * 1024
_WORDS_BYTES_MAX: Final = 512
_ELLIPSIS: Final = "…"
# A split makes two children, a merge one; 16 leaves room for future changes of the service.
_CHILDREN_MAX: Final = 16


class _Transition(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One transition. Its texts are truncated to the limits of its class when it is made, in either
    process, so the largest one fits an entry. Of a traceback the end is kept."""

    def __post_init__(self) -> None:
        for name, limit in _TEXT_BYTES_MAX.get(type(self), {}).items():
            text = getattr(self, name)
            cut = _bounded(text, limit, keeps_end=name == "traceback_text")
            if cut is not text:
                msgspec.structs.force_setattr(self, name, cut)


class Started(_Transition, frozen=True):
    """The process runs and has its start command."""

    pid: int


class Claimed(_Transition, frozen=True):
    """The claim succeeded [P4]: the lease's counter and the position where reading begins."""

    counter: int
    position: ExtendedSequenceNumber


class Unclaimed(_Transition, frozen=True):
    """The claim did not succeed, or came too late; no record was read."""

    reason: str


class Checkpointed(_Transition, frozen=True):
    """The row has this position; a success reply confirmed it."""

    position: ExtendedSequenceNumber
    counter: int


class ShardEnded(_Transition, frozen=True):
    """The row is at SHARD_END and the children have rows [P12]."""

    children: Annotated[tuple[str, ...], msgspec.Meta(max_length=_CHILDREN_MAX)]


class Released(_Transition, frozen=True):
    """The lease was given away, at this position, confirmed by a success reply [P17]; `how`, in
    words."""

    position: ExtendedSequenceNumber
    how: str = ""


class Lost(_Transition, frozen=True):
    """Another owner has the lease, or the fence passed [P7]."""

    reason: str


class Raised(_Transition, frozen=True):
    """User code raised, for the `attempts`th time, in `where` (the method's name).

    The call is repeated in `pause_s`. `raised_at` is file, line and function; `record` the place of
    the record within its batch. Without a traceback it is a repetition of the failure before.
    """

    where: str
    error: str
    raised_at: str
    record: str
    traceback_text: str
    attempts: int
    pause_s: float


class Recovered(_Transition, frozen=True):
    """`where` raised before, and has returned at its `attempts`th call."""

    where: str
    attempts: int


class Failed(_Transition, frozen=True):
    """User code raised for the last time: it is not called again. Fields as those of `Raised`.

    `position` is that of the record; None if it is not known. `is_host_fault`: the host had no
    memory, descriptor or disk left for the call; the process ends, and the lease is not halted.
    """

    where: str
    error: str
    position: ExtendedSequenceNumber | None
    traceback_text: str
    attempts: int
    raised_at: str = ""
    record: str = ""
    is_host_fault: bool = False


class Broke(_Transition, frozen=True):
    """The process ends for a reason other than the processor: its host, or a bug of kclrun."""

    reason: str


class Drained(_Transition, frozen=True):
    """The drain is complete; the process is about to exit."""


class GilHeld(_Transition, frozen=True):
    """A C call of the user's code held the GIL for so long that no renewal was possible."""

    seconds: float


class RecordsExpired(_Transition, frozen=True):
    """Records after this position expired before they were read, and are lost: those of a shard
    that was trimmed, whose lease ends [P13], or those at the head of an open one. `detail` says,
    in words, what an operator can do.
    """

    position: ExtendedSequenceNumber
    detail: str


class Warned(_Transition, frozen=True):
    """A warning to log once, with the name of the event; the lease continues."""

    event: str
    detail: str


Transition = (
    Started
    | Claimed
    | Unclaimed
    | Checkpointed
    | ShardEnded
    | Released
    | Lost
    | Raised
    | Recovered
    | Failed
    | Broke
    | Drained
    | GilHeld
    | RecordsExpired
    | Warned
)

_OF_FAILURES: Final = {
    "where": _WORDS_BYTES_MAX,
    "error": ERROR_BYTES_MAX,
    "raised_at": _WORDS_BYTES_MAX,
    "record": _WORDS_BYTES_MAX,
    "traceback_text": TRACEBACK_BYTES_MAX,
}
_TEXT_BYTES_MAX: Final[dict[type[_Transition], dict[str, int]]] = {
    Unclaimed: {"reason": _WORDS_BYTES_MAX},
    Lost: {"reason": _WORDS_BYTES_MAX},
    Broke: {"reason": _WORDS_BYTES_MAX},
    Released: {"how": _WORDS_BYTES_MAX},
    Raised: _OF_FAILURES,
    Recovered: {"where": _WORDS_BYTES_MAX},
    Failed: _OF_FAILURES,
    RecordsExpired: {"detail": ERROR_BYTES_MAX},
    Warned: {"event": _WORDS_BYTES_MAX, "detail": ERROR_BYTES_MAX},
}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Transition]] = msgspec.msgpack.Decoder(Transition)


def encode(transition: Transition) -> bytes:
    """A transition as tagged MessagePack, for `EventRing.put`. At most `ring.ENTRY_BYTES_MAX`."""
    return _ENCODER.encode(transition)


def decode(payload: bytes) -> Transition:
    """The transition in `payload`.

    Raises: MalformedFrame for any other bytes; end the lease process that wrote them.
    """
    return decoded(_DECODER, payload, "an event ring")


def _bounded(text: str, limit_bytes: int, *, keeps_end: bool) -> str:
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
