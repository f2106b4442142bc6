"""What a lease process tells its manager through its ring: the transitions of its lease.

Holds: one frozen struct a transition, `encode` and `decode` (MessagePack, tagged).
May not know: what the manager does about them.
Rule: every text is cut to its limit when a transition is made, on either side, so the largest one
fits an entry; and bytes that are no transition raise one error that condemns their writer only.
Look next: `ring.py`; `board.py` for what is a state and not a transition.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kclrun.ipc.frames import decoded
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = [
    "ERROR_BYTES_MAX",
    "TRACEBACK_BYTES_MAX",
    "Checkpointed",
    "Claimed",
    "Drained",
    "Failed",
    "GilHeld",
    "Lost",
    "Released",
    "ShardEnded",
    "Started",
    "Transition",
    "Unclaimed",
    "Warned",
    "decode",
    "encode",
]

# With the position (under 200 bytes) and the framing, the sum of them stays under the 16 KiB of
# `ring.ENTRY_BYTES_MAX`; a traceback of 8 KiB shows some 60 frames.
ERROR_BYTES_MAX: Final = 2 * 1024
TRACEBACK_BYTES_MAX: Final = 8 * 1024
_WORDS_BYTES_MAX: Final = 512
_ELLIPSIS: Final = "…"
# A split makes two children, a merge one; 16 leaves room for what the service may invent.
_CHILDREN_MAX: Final = 16


class _Transition(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Cuts its texts as its class says. `_keeps_end` names those whose end matters most."""

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
    """The claim succeeded [P4]: the lease's counter and where reading begins."""

    counter: int
    position: ExtendedSequenceNumber


class Unclaimed(_Transition, frozen=True):
    """The claim did not succeed, or came too late; no record was read."""

    reason: str


class Checkpointed(_Transition, frozen=True):
    """The row carries this position, by a success reply."""

    position: ExtendedSequenceNumber
    counter: int


class ShardEnded(_Transition, frozen=True):
    """The row is at SHARD_END and the children have rows [P12]."""

    children: Annotated[tuple[str, ...], msgspec.Meta(max_length=_CHILDREN_MAX)]


class Released(_Transition, frozen=True):
    """The lease was given away, at this position, by a success reply [P17]: `how`, in words."""

    position: ExtendedSequenceNumber
    how: str = ""


class Lost(_Transition, frozen=True):
    """Another owner has the lease, or the fence passed [P7]."""

    reason: str


class Failed(_Transition, frozen=True):
    """User code raised, for the `attempts`th time, at `where` (the method's name)."""

    where: str
    error: str
    position: ExtendedSequenceNumber | None
    traceback_text: str
    attempts: int


class Drained(_Transition, frozen=True):
    """All is done that a drain asks for; the process is about to exit."""


class GilHeld(_Transition, frozen=True):
    """A C call of the user's code held the GIL for so long that no renewal was possible."""

    seconds: float


class Warned(_Transition, frozen=True):
    """Something to log once, with the name of the event; the lease goes on."""

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
    | Failed
    | Drained
    | GilHeld
    | Warned
)

_TEXT_BYTES_MAX: Final[dict[type[_Transition], dict[str, int]]] = {
    Unclaimed: {"reason": _WORDS_BYTES_MAX},
    Lost: {"reason": _WORDS_BYTES_MAX},
    Released: {"how": _WORDS_BYTES_MAX},
    Failed: {
        "where": _WORDS_BYTES_MAX,
        "error": ERROR_BYTES_MAX,
        "traceback_text": TRACEBACK_BYTES_MAX,
    },
    Warned: {"event": _WORDS_BYTES_MAX, "detail": ERROR_BYTES_MAX},
}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Transition]] = msgspec.msgpack.Decoder(Transition)


def encode(transition: Transition) -> bytes:
    """The bytes of a transition, for `EventRing.put`. At most `ring.ENTRY_BYTES_MAX`."""
    return _ENCODER.encode(transition)


def decode(payload: bytes) -> Transition:
    """The transition in `payload`.

    Raises: MalformedFrame for anything else; end the lease process that wrote it.
    """
    return decoded(_DECODER, payload, "an event ring")


def _bounded(text: str, limit_bytes: int, *, keeps_end: bool) -> str:
    """`text` in at most `limit_bytes` of UTF-8, with an ellipsis where it was cut.

    Lone surrogates (undecodable file names in an exception) are written out: UTF-8 has none.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= limit_bytes:
        return text if len(data) == len(text) else data.decode()
    kept = limit_bytes - len(_ELLIPSIS.encode())
    if keeps_end:
        return _ELLIPSIS + data[-kept:].decode(errors="ignore")
    return data[:kept].decode(errors="ignore") + _ELLIPSIS
