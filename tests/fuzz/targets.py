"""What is fuzzed: each reader of bytes that others write, what it may raise, where it starts."""

import functools
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kclrun.aws.errors import parse_error_reply
from kclrun.aws.glue.decoder import GlueDecoder
from kclrun.aws.http.exchange import exchange
from kclrun.aws.http.heads import BrokenAnswer, encode_request, parse_head
from kclrun.aws.rows import BrokenRow, decode_row, encode_row
from kclrun.codec.event_stream import MalformedEventStream, MessageDecoder, encode_message
from kclrun.codec.get_records import decode_get_records, decode_subscription_event
from kclrun.codec.kpl import MAGIC, open_aggregates
from kclrun.codec.values import decoding
from kclrun.config.load import settings_of
from kclrun.errors import (
    LimitExceeded,
    MalformedBody,
    MalformedFrame,
    OffsetRefused,
    SegmentRefused,
    SettingsError,
    UndecodableRecord,
)
from kclrun.ipc import messages
from kclrun.ipc.board import SLOT_BYTES, StatusSlot
from kclrun.ipc.channel import decoded
from kclrun.ipc.messages import decode_report, encode_report
from kclrun.ipc.ring import EventRing
from kclrun.local import sequence_numbers
from kclrun.model.lease import Handoff, Lease, LeaseKey, Owner, OwnerId, PendingCheckpoint
from kclrun.model.record import Record, RecordBatch
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.stream import display_name, shard_id_of, stream_of
from kclrun.model.time import Instant, WallTime
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.spark.offsets import decode_offset


@dataclass(frozen=True)
class Target:
    """`read` takes any bytes; `errors` are those it may raise. `costs_little`: time and memory are
    bounded by the input's size alone."""

    name: str
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    corpus: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    costs_little: bool = True


def read_event_stream(data):
    decoder = MessageDecoder()
    decoder.feed(data)
    decoder.close()


def sealed(message):
    """A message as an aggregate: magic before, sound MD5 after."""
    return MAGIC + message + hashlib.md5(message).digest()


def read_aggregate(data):
    """All records are there or the raw one, flagged [I9]."""
    record = Record(data, "outer", "5")
    opened = open_aggregates([record])
    if any(not user.aggregated for user in opened):
        (raw,) = opened
        assert raw.data == data
        assert raw.malformed == data.startswith(MAGIC)
    assert sum(len(user.data) for user in opened) <= len(data)


def read_message(data):
    read_aggregate(sealed(data))


class Dealt:
    """A connection that says `said`, and is closed."""

    def __init__(self, said):
        self._said = said

    def sendall(self, data):
        pass

    def recv(self, most):
        piece, self._said = self._said[:most], self._said[most:]
        return piece

    def recv_into(self, buffer):
        piece = self.recv(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def read_answer(data):
    answer, _ = exchange(Dealt(data), encode_request("/", {}, b""), b"", 64)
    assert len(answer.body) <= 64


def read_head(data):
    head = parse_head(data)
    return head.length, head.is_chunked, head.keeps_alive


def read_row(data):
    """The wire client hands over items whose attributes are objects; nothing more is known."""
    try:
        item = msgspec.json.decode(data, type=dict[str, dict[str, object]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    lease = decode_row(item)
    if lease is not None:
        # What was read can be written, and is then read as the same; but for milliseconds of years
        # so far away that a float does not hold them.
        again = decode_row(encode_row(lease))
        assert again is not None
        times = {"latest_pinned_at": None, "handoff": None, "halt": None}
        assert msgspec.structs.replace(again, **times) == msgspec.structs.replace(lease, **times)


class Registry:
    """Has one schema, under every id."""

    def get_schema_version(self, **_):
        schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string"}]}
        return {"DataFormat": "AVRO", "SchemaDefinition": json.dumps(schema)}


GLUE = decoding(GlueDecoder(Registry))
AVRO = bytes([3, 0]) + bytes(16) + b"\x06abc"
COMPRESSED = bytes([3, 5]) + bytes(16) + zlib.compress(b"\x06abc")


def read_value(data):
    return RecordBatch([Record(data, "k", "1")], _decoding=GLUE)[0].value


def read_schema(data):
    schema = RowSchema.parse(data.decode(errors="replace"))
    assert RowSchema.parse(str(schema)).columns == schema.columns


def read_settings(data):
    """A file is text; what is no UTF-8 is refused before."""
    settings_of(
        data.decode(errors="replace"), environment={"SET": "value"}, now=WallTime(1_767_225_600.0)
    )


def read_ring(data):
    """User code may have written anything over the ring of its lease process."""
    buffer = memoryview(bytearray(EventRing.size_bytes(512)))
    writer = EventRing(buffer, 0, 512)
    for _ in range(3):
        writer.put(b"an event that was written before")
    size = min(len(data), len(buffer))
    buffer[:size] = data[:size]
    reader = EventRing(buffer, 0, 512)
    # More often than the reader waits before it gives up what is damaged.
    for _ in range(10):
        for payload in reader.drain():
            assert len(payload) <= 512
    assert reader.gap() >= 0
    EventRing(buffer, 0, 512).put(b"of the next incarnation")


def read_slot(data):
    buffer = memoryview(bytearray(SLOT_BYTES))
    size = min(len(data), len(buffer))
    buffer[:size] = data[:size]
    slot = StatusSlot(buffer, 0)
    return slot.read(), slot.last_send_instant()


def a_slot():
    buffer = memoryview(bytearray(SLOT_BYTES))
    slot = StatusSlot(buffer, 0)
    slot.note_send(Instant(5.0))
    slot.publish(STATUS)
    return bytes(buffer)


def a_ring():
    buffer = memoryview(bytearray(EventRing.size_bytes(512)))
    ring = EventRing(buffer, 0, 512)
    ring.put(b"one")
    ring.put(b"two")
    ring.drain(1)
    return bytes(buffer)


def read_frame(data):
    """Each side of each channel decodes its own kinds."""
    refused = 0
    for kinds in (messages.ToWorker, messages.ToLauncher, messages.FromLauncher):
        try:
            decoded(decoder_of(kinds), data, "the fuzzer")
        except MalformedFrame:
            refused += 1
    return refused


@functools.cache
def decoder_of(kinds):
    return msgspec.msgpack.Decoder(kinds)


def read_offset(data):
    """Spark hands over what stands in the checkpoint as JSON."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    decode_offset(value)


def read_names(data):
    """Texts of a lease table: positions, owner ids, lease keys."""
    text = data.decode(errors="replace")
    Owner.parse(text)
    stream_of(text), shard_id_of(text), display_name(text)
    sequence_numbers.parse(text)
    position = ExtendedSequenceNumber(text)
    assert position <= ExtendedSequenceNumber(text)


STATUS = LeaseStatus(
    pid=77, state=tuple(WorkerState)[2], incarnation=3, published_instant=Instant(12.5)
)
LEASE = Lease(
    key=LeaseKey("shardId-000000000003"),
    checkpoint=ExtendedSequenceNumber(
        "49680437962327414396472747889547851093842270779483357234", 7
    ),
    counter=54,
    owner=OwnerId("kclrun:a:host:nonce"),
    owner_switches=2,
    parents=frozenset({"shardId-000000000001"}),
    children=frozenset({"shardId-000000000005", "shardId-000000000006"}),
    hash_range=HashRange(0, 2**127),
    pending=PendingCheckpoint(ExtendedSequenceNumber("51"), b"state"),
    failover_s=10.0,
    start="LATEST",
    latest_pinned_at=WallTime(1_767_225_600.0),
    handoff=Handoff(OwnerId("kclrun:b:host:nonce"), WallTime(1_767_225_600.0)),
)
BODY = (
    b'{"Records":[{"SequenceNumber":"49590338271490256608559692538361571095921575989136588898",'
    b'"ApproximateArrivalTimestamp":1.5E9,"Data":"aGVsbG8=","PartitionKey":"k",'
    b'"EncryptionType":"KMS"}],"NextShardIterator":"AAAA","MillisBehindLatest":0,"ChildShards":'
    b'[{"ShardId":"shardId-1","ParentShards":["shardId-0"],"HashKeyRange":{"StartingHashKey":"0",'
    b'"EndingHashKey":"5"}}]}'
)
EVENT = BODY.replace(b'"NextShardIterator":"AAAA"', b'"ContinuationSequenceNumber":"4959"')
EVENT_FRAME = encode_message(
    {":event-type": "SubscribeToShardEvent", ":message-type": "event"}, EVENT
)
# Two keys, an explicit hash key, two records, a tag.
MESSAGE = (
    b"\x0a\x01k\x0a\x02kk\x12\x0212\x1a\x07\x08\x00\x10\x00\x1a\x01a\x1a\x0b\x08\x01\x1a\x01b"
    b'"\x04\x0a\x02tt'
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nx-amzn-RequestId: 7\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 x\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.0 500\r\nConnection: close\r\n\r\nsorry",
)
SETTINGS = b"""\
application: orders
stream: ${SET}
processor: processors.delay_by_carrier:DelayByCarrier
start: {at: 2025-12-31T00:00:00Z}
leases: {failover: 10s, max: 8}
checkpoint: {every: 5s, uncheckpointed_max: 1_000}
fetch: &fetch {idle: 250ms, batch_max: 500}
options: {airports: [JFK, LGA], factor: 1.5}
aws:
  region: eu-central-1
output: {path: rows}
"""
OFFSET = (
    b'{"asOf":{"shardId-1":17},"created":3,"from":{"shardId-1":"@5"},"shards":{"shardId-1":"77/3",'
    b'"shardId-2":"TS:5","shardId-3":"TRIM_HORIZON"},"stream":"orders","t":5,"v":1}'
)
ERROR = b'{"__type":"com.amazonaws#ThrottlingException","message":"no","Item":{"a":{"S":""}}}'
FRAMES = tuple(
    msgspec.msgpack.encode(message)
    for message in (
        messages.Drain("SIGTERM", 5.0),
        messages.FailoverChanged(5.0),
        messages.OthersInSight(True),
        messages.Fork(3),
        messages.Forked(3, 77),
        messages.ForkFailed(3, "no memory"),
        messages.Exited(77, 9),
        messages.Quit(),
    )
)
TRANSITIONS = tuple(
    encode_report(each)
    for each in (
        reports.GilHeld(77.0),
        reports.Checkpointed(LEASE.checkpoint, 54),
        reports.ProcessWarned("it is late"),
        reports.ProcessorFailed("process_records", "ValueError: 5", 2, LEASE.checkpoint, "frames"),
        reports.ShardEnded(("shardId-000000000005",)),
        reports.StartUnclaimed("late"),
    )
)

TARGETS = {
    target.name: target
    for target in (
        Target(
            "get-records",
            decode_get_records,
            (MalformedBody, LimitExceeded),
            (BODY, b'{"Records":[]}'),
            (b'"Data":', b'"Records":', b"null", b"[]", b"{}", b'"\\ud800"'),
        ),
        Target(
            "subscription-event",
            decode_subscription_event,
            (MalformedBody, LimitExceeded),
            (EVENT, b'{"Records":[]}'),
            (b'"ContinuationSequenceNumber":', b'"ChildShards":', b"null", b"[]", b'""'),
        ),
        Target(
            "event-stream",
            read_event_stream,
            (MalformedEventStream,),
            (EVENT_FRAME, EVENT_FRAME * 3, EVENT_FRAME[:-1]),
            (b"\x00\x00\x00\x10", b"\xff\xff\xff\xff", EVENT_FRAME[:12]),
        ),
        Target("aggregate", read_aggregate, (), (sealed(MESSAGE), MAGIC, b"plain"), (MAGIC,)),
        Target(
            "kpl-message", read_message, (), (MESSAGE,), (b"\x0a", b"\x12", b"\x1a", b"\xff" * 9)
        ),
        Target(
            "http-answer",
            read_answer,
            (BrokenAnswer,),
            ANSWER,
            (
                b"\r\n",
                b"Content-Length: ",
                b"Transfer-Encoding: chunked",
                b"0\r\n\r\n",
                b"HTTP/1.1 ",
            ),
        ),
        Target(
            "http-head", read_head, (BrokenAnswer,), ANSWER, (b"\r\n", b": ", b"Content-Length: ")
        ),
        Target("error-reply", parse_error_reply, (), (ERROR,), (b'"__type":', b"#", b"null")),
        Target(
            "lease-row",
            read_row,
            (BrokenRow,),
            (
                msgspec.json.encode(encode_row(LEASE)),
                b'{"leaseKey":{"S":"k"},"entityType":{"S":"X"}}',
            ),
            (b'{"N":"', b'{"S":"', b'{"SS":["', b"TRIM_HORIZON", b"SHARD_END", b'{"B":"', b"null"),
        ),
        # A few bytes of zlib may be 64 MiB of data.
        Target(
            "value",
            read_value,
            (UndecodableRecord,),
            (AVRO, COMPRESSED),
            (AVRO[:18], COMPRESSED[:18], b"\x78\x9c"),
            costs_little=False,
        ),
        Target(
            "row-schema",
            read_schema,
            (ValueError,),
            (b"a int NOT NULL, `b c` array<map<string,struct<x: decimal(3,2)>>> COMMENT 'x'",),
            (b"struct<", b"array<", b"map<", b" NOT NULL", b"decimal(", b"`", b"'", b"COMMENT"),
        ),
        Target(
            "settings",
            read_settings,
            (SettingsError,),
            (SETTINGS,),
            (
                b"${",
                b"}",
                b": ",
                b"\n",
                b"*fetch",
                b"&a ",
                b"!!python/object:",
                b"<<: ",
                b"- ",
                b"10s",
            ),
        ),
        Target(
            "ring",
            read_ring,
            (SegmentRefused, LimitExceeded),
            (a_ring(),),
            (b"\xff" * 8, b"\0" * 8),
        ),
        Target("status-slot", read_slot, (), (a_slot(),), (b"\xff" * 8, b"\0" * 8)),
        Target(
            "frame",
            read_frame,
            (),
            FRAMES,
            (b"\x81", b"\xa4type", b"\xc1", b"\xdf\xff\xff\xff\xff"),
        ),
        Target("transition", decode_report, (MalformedFrame,), TRANSITIONS, (b"\xc1", b"\xdd")),
        Target(
            "spark-offset",
            read_offset,
            (OffsetRefused,),
            (OFFSET,),
            (b'"v":', b"TS:", b"@", b"/", b"null"),
        ),
        Target(
            "names",
            read_names,
            (LimitExceeded,),
            (
                b"kclrun:a:host:nonce",
                b"1:orders:10:shardId-000000000001",
                b"LATEST",
                LEASE.checkpoint.sequence_number.encode(),
            ),
            (b":", b"kclrun:", b"TRIM_HORIZON", b"-"),
        ),
    )
}
