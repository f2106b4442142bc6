"""AWS's event stream (`application/vnd.amazon.eventstream`): messages to bytes and back.

A message is a frame: the lengths of all and of the headers, a CRC-32 of both, the headers, the
payload, a CRC-32 of everything. SubscribeToShard answers in it. Source: "Event stream encoding" in
the Smithy specification. Rule: any bytes give messages or `MalformedEventStream`.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

import msgspec

CONTENT_TYPE: Final = b"application/vnd.amazon.eventstream"
_PRELUDE: Final = struct.Struct(">II")
_CRC: Final = struct.Struct(">I")
_PRELUDE_BYTES: Final = _PRELUDE.size + _CRC.size
_FRAME_BYTES_MIN: Final = _PRELUDE_BYTES + _CRC.size
# The specification's own bounds: headers of 128 KiB and a payload of 24 MiB. A SubscribeToShard
# event of records of 10 MiB is 14 MiB as JSON.
HEADERS_BYTES_MAX: Final = 128 * 1024
PAYLOAD_BYTES_MAX: Final = 24 * 1024 * 1024
_FRAME_BYTES_MAX: Final = _FRAME_BYTES_MIN + HEADERS_BYTES_MAX + PAYLOAD_BYTES_MAX
# The types of a header's value. Kinesis sends only text. The sizes of the others: true, false,
# byte, short, int, long, time, UUID. Bytes and text have their length before them.
_TEXT: Final = 7
_FIXED_BYTES: Final = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
_COUNTED: Final = (6, _TEXT)


class MalformedEventStream(ValueError):
    """The bytes are cut, too large, or do not have the checksum that they should."""


class EventMessage(msgspec.Struct, frozen=True, gc=False):
    """One frame: its headers that are text, and its payload."""

    headers: dict[str, str]
    payload: bytes


def encode_message(headers: dict[str, str], payload: bytes) -> bytes:
    """One frame. The caller must keep to the bounds of headers and payload."""
    parts = []
    for name, value in headers.items():
        text = value.encode()
        parts.append(b"%c%s\x07%s%s" % (len(name), name.encode(), _length(text), text))
    head = b"".join(parts)
    size = _FRAME_BYTES_MIN + len(head) + len(payload)
    prelude = _PRELUDE.pack(size, len(head))
    frame = b"".join((prelude, _CRC.pack(crc32(prelude)), head, payload))
    return frame + _CRC.pack(crc32(frame))


def _length(text: bytes) -> bytes:
    return len(text).to_bytes(2, "big")


class MessageDecoder:
    """Takes the bytes of a stream in pieces and returns the messages that are complete.

    It holds at most one incomplete frame, whose size it checks as soon as it has the prelude.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = _PRELUDE_BYTES

    def feed(self, data: bytes) -> list[EventMessage]:
        """The messages that `data` completes. Raises: MalformedEventStream; no call after that."""
        self._buffer += data
        found = []
        while len(self._buffer) >= self._wanted:
            size, headers_size = self._checked_prelude()
            if len(self._buffer) < size:
                self._wanted = size
                break
            with memoryview(self._buffer) as buffer, buffer[:size] as frame:
                found.append(_message(frame, headers_size))
            del self._buffer[:size]
            self._wanted = _PRELUDE_BYTES
        return found

    def close(self) -> None:
        """The stream has ended. Raises: MalformedEventStream if a frame was cut."""
        if self._buffer:
            raise MalformedEventStream(
                f"the stream ended inside a message, {len(self._buffer)} bytes after its start"
            )

    def _checked_prelude(self) -> tuple[int, int]:
        size, headers_size = _PRELUDE.unpack_from(self._buffer)
        (checksum,) = _CRC.unpack_from(self._buffer, _PRELUDE.size)
        if crc32(self._buffer[: _PRELUDE.size]) != checksum:
            raise MalformedEventStream("the checksum of a message's lengths is wrong")
        if not _FRAME_BYTES_MIN + headers_size <= size <= _FRAME_BYTES_MAX:
            raise MalformedEventStream(f"a message of {size} bytes is not possible")
        if headers_size > HEADERS_BYTES_MAX:
            raise MalformedEventStream(f"headers of {headers_size} bytes are not possible")
        return size, headers_size


def _message(frame: memoryview, headers_size: int) -> EventMessage:
    """The message of a frame. An event has up to 14 MiB, so its payload is copied only once."""
    (checksum,) = _CRC.unpack_from(frame, len(frame) - _CRC.size)
    with frame[: -_CRC.size] as content:
        if crc32(content) != checksum:
            raise MalformedEventStream("the checksum of a message is wrong")
        end = _PRELUDE_BYTES + headers_size
        return EventMessage(_headers(bytes(content[_PRELUDE_BYTES:end])), bytes(content[end:]))


def _headers(data: bytes) -> dict[str, str]:
    """The headers that are text, by name; headers of another type are skipped."""
    found: dict[str, str] = {}
    at = 0
    try:
        while at < len(data):
            name = _slice(data, at + 1, data[at])
            kind = data[at + 1 + len(name)]
            at += 2 + len(name)
            size = _FIXED_BYTES.get(kind)
            if kind in _COUNTED:
                size = int.from_bytes(_slice(data, at, 2), "big")
                at += 2
            if size is None:
                raise MalformedEventStream(f"a header has the unknown type {kind}")
            value = _slice(data, at, size)
            at += size
            if kind == _TEXT:
                found[name.decode()] = value.decode()
    except (IndexError, UnicodeDecodeError):
        raise MalformedEventStream("the headers of a message are cut or are not text") from None
    return found


def _slice(data: bytes, start: int, size: int) -> bytes:
    """Raises: IndexError if fewer bytes are there."""
    if start + size > len(data):
        raise IndexError
    return data[start : start + size]
