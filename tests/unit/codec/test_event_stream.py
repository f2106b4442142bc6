"""AWS's event stream: any bytes give messages or one named error, and nothing is kept unbounded."""

import zlib
from binascii import crc32

import pytest
from botocore.eventstream import EventStreamBuffer

from kclrun.codec.event_stream import (
    HEADERS_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    EventMessage,
    MalformedEventStream,
    MessageDecoder,
    encode_message,
)
from tests.support.tables import over_rows

HEADERS = {":message-type": "event", ":event-type": "SubscribeToShardEvent"}
FRAME = encode_message(HEADERS, b'{"Records":[]}')
# "All headers" of the specification's test vectors has one of each type; this one has the same
# types in its order, with the text last.
EVERY_TYPE = (
    *(
        b"\x01t\x00",
        b"\x01f\x01",
        b"\x01b\x02\xff",
        b"\x01s\x03\x00\x01",
        b"\x01i\x04\x00\x00\x00\x01",
    ),
    *(b"\x01l\x05" + bytes(8), b"\x01y\x06\x00\x03abc", b"\x01d\x08" + bytes(8)),
    *(b"\x01u\x09" + bytes(16), b"\x04text\x07\x00\x02\xc3\xa9"),
)


def frame_of(head, payload=b"", *, size=None):
    size = 16 + len(head) + len(payload) if size is None else size
    prelude = size.to_bytes(4, "big") + len(head).to_bytes(4, "big")
    rest = prelude + crc32(prelude).to_bytes(4, "big") + head + payload
    return rest + crc32(rest).to_bytes(4, "big")


def test_botocore_reads_what_is_written_here():
    buffer = EventStreamBuffer()
    buffer.add_data(FRAME)

    (event,) = list(buffer)

    assert (event.headers, event.payload) == (HEADERS, b'{"Records":[]}')


@over_rows("size", [1, 7, 12, len(FRAME) - 1, len(FRAME), 3 * len(FRAME)])
def test_messages_come_out_whole_however_their_bytes_arrive(size):
    decoder, data = MessageDecoder(), FRAME * 3

    found = [
        message
        for at in range(0, len(data), size)
        for message in decoder.feed(data[at : at + size])
    ]

    assert found == [EventMessage(HEADERS, b'{"Records":[]}')] * 3
    decoder.close()


def test_headers_of_every_type_are_read_and_those_that_are_text_are_kept():
    (message,) = MessageDecoder().feed(frame_of(b"".join(EVERY_TYPE), b"x"))

    assert message == EventMessage({"text": "é"}, b"x")


def test_no_changed_byte_goes_unnoticed():
    for at in range(len(FRAME)):
        broken = bytearray(FRAME)
        broken[at] ^= 0x20

        with pytest.raises(MalformedEventStream):
            pytest.fail(f"byte {at}: {MessageDecoder().feed(bytes(broken))}")


LONG_HEADERS = (16).to_bytes(4, "big") + (1).to_bytes(4, "big")
MALFORMED = {
    "a frame without room for its checksums": (frame_of(b"", size=15), "15 bytes"),
    "headers longer than the frame": (
        LONG_HEADERS + crc32(LONG_HEADERS).to_bytes(4, "big") + bytes(4),
        "16 bytes",
    ),
    "a frame above the bound": (
        frame_of(b"", size=16 + HEADERS_BYTES_MAX + PAYLOAD_BYTES_MAX + 1),
        "is not possible",
    ),
    "headers above their bound": (frame_of(bytes(HEADERS_BYTES_MAX + 1)), "headers of 131073"),
    "an unknown type": (frame_of(b"\x01a\x0a"), "unknown type 10"),
    "a name that is cut": (frame_of(b"\x05abc"), "cut or are not text"),
    "a type that is missing": (frame_of(b"\x03abc"), "cut or are not text"),
    "a length that is cut": (frame_of(b"\x01a\x07\x00"), "cut or are not text"),
    "a value that is cut": (frame_of(b"\x01a\x07\x00\x05abc"), "cut or are not text"),
    "a number that is cut": (frame_of(b"\x01a\x05abc"), "cut or are not text"),
    "a value that is not UTF-8": (frame_of(b"\x01a\x07\x00\x01\xff"), "cut or are not text"),
    "a name that is not UTF-8": (frame_of(b"\x01\xff\x07\x00\x01a"), "cut or are not text"),
}


@over_rows("what", MALFORMED)
def test_a_malformed_frame_is_refused_by_name(what):
    data, text = MALFORMED[what]

    with pytest.raises(MalformedEventStream, match=text):
        MessageDecoder().feed(data)


def test_a_frame_above_the_bound_is_refused_before_its_bytes_arrive():
    prelude = (0xFFFF_FFFF).to_bytes(4, "big") + bytes(4)

    with pytest.raises(MalformedEventStream, match="4294967295 bytes"):
        MessageDecoder().feed(prelude + zlib.crc32(prelude).to_bytes(4, "big"))


def test_the_largest_headers_and_payload_are_read():
    head = b"\x01a\x06\xff\xff" + bytes(65_535) + b"\x01b\x06\xff\xf3" + bytes(65_523)
    head += b"\x01t\x00"
    assert len(head) == HEADERS_BYTES_MAX - 1

    (message,) = MessageDecoder().feed(frame_of(head, bytes(PAYLOAD_BYTES_MAX)))

    assert len(message.payload) == PAYLOAD_BYTES_MAX


@pytest.mark.parametrize("size", [1, 11, 12, len(FRAME) - 1])
def test_a_stream_that_ends_inside_a_message_is_refused(size):
    decoder = MessageDecoder()
    decoder.feed(FRAME + FRAME[:size])

    with pytest.raises(MalformedEventStream, match=f"{size} bytes after its start"):
        decoder.close()
