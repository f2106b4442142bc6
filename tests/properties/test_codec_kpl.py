"""Laws of opening and making aggregates, alone and against aws_kinesis_agg."""

import base64
import hashlib
from typing import Any

import msgspec
from aws_kinesis_agg.aggregator import RecordAggregator
from aws_kinesis_agg.deaggregator import deaggregate_records
from hypothesis import example, given
from hypothesis import strategies as st

from kclrun.codec.aggregator import Aggregator, build_aggregate
from kclrun.codec.kpl import (
    MAGIC,
    aggregate_descriptor,
    count_fields,
    drop_until,
    effective_hash_key,
    open_aggregates,
)
from kclrun.errors import LimitExceeded, MalformedAggregate
from kclrun.model.record import Record
from kclrun.model.sequence import SENTINELS, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange

UserRecord = tuple[str, bytes, str | None]

KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=256)
HASH_KEYS = st.integers(0, HASH_KEY_MAX).map(str)
FEW_KEYS = st.sampled_from(["a", "b", "é", "\U0001f600" * 200]) | KEYS
USER_RECORDS = st.lists(
    st.tuples(FEW_KEYS, st.binary(max_size=300), st.none() | HASH_KEYS), min_size=1, max_size=200
)


def sealed(message: bytes) -> bytes:
    return MAGIC + message + hashlib.md5(message).digest()


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    written = b""
    while value > 0x7F:
        written += bytes([value & 0x7F | 0x80])
        value >>= 7
    return written + bytes([value])


INDEXES = st.integers(0, 3) | st.integers(0, 2**64 - 1)
ALMOST_RECORDS = st.lists(
    st.one_of(
        st.tuples(st.just(1), INDEXES),
        st.tuples(st.just(2), INDEXES),
        st.tuples(st.just(3), st.binary(max_size=5)),
        st.tuples(st.integers(1, 6), INDEXES | st.binary(max_size=5)),
    ).map(lambda pair: field(*pair)),
    max_size=5,
).map(b"".join)
ALMOST_MESSAGES = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.text(max_size=3).map(str.encode) | st.binary(max_size=3)),
        st.tuples(st.just(2), HASH_KEYS.map(str.encode) | st.binary(max_size=3)),
        st.tuples(st.just(3), ALMOST_RECORDS | st.binary(max_size=9)),
        st.tuples(st.integers(1, 6), INDEXES | st.binary(max_size=5)),
    ).map(lambda pair: field(*pair)),
    max_size=8,
).map(b"".join)
RANGES = st.none() | st.tuples(st.integers(0, HASH_KEY_MAX), st.integers(0, HASH_KEY_MAX)).map(
    lambda ends: HashRange(min(ends), max(ends))
)


@given(USER_RECORDS)
def test_what_was_packed_is_unpacked(user_records):
    aggregate = Record(build_aggregate(user_records), "outer", "5", 1.5, "KMS")

    assert open_aggregates([aggregate]) == [
        Record(data, key, "5", 1.5, "KMS", index, hash_key, True)
        for index, (key, data, hash_key) in enumerate(user_records)
    ]


@given(USER_RECORDS, st.integers(30, 3000))
def test_sizes_are_exact_and_aggregates_hold_everything_in_order(user_records, size_max):
    aggregator = Aggregator(size_max)
    unpacked: list[UserRecord] = []

    def finish() -> None:
        size = aggregator.size_bytes
        key, _, data = aggregator.finish()
        assert size == len(data) + len(key.encode()) <= size_max
        unpacked.extend(
            (record.partition_key, record.data, record.explicit_hash_key)
            for record in open_aggregates([Record(data, key, "1")])
        )

    for user_record in user_records:
        if aggregator.add(*user_record):
            continue
        if len(aggregator):
            finish()
        if not aggregator.add(*user_record):
            unpacked.append(user_record)
    if len(aggregator):
        finish()

    assert unpacked == user_records


def assert_whole_or_raw(data: bytes, hash_range: HashRange | None) -> None:
    record = Record(data, "outer", "5")
    opened = open_aggregates([record])
    if any(not user.aggregated for user in opened):
        (raw,) = opened
        assert msgspec.structs.replace(raw, malformed=False) == record
        assert raw.malformed == data.startswith(MAGIC)
    else:
        assert [user.sub_sequence_number for user in opened] == list(range(len(opened)))
        assert sum(len(user.data) for user in opened) <= len(data)
    kept = open_aggregates([record], kpl_range="drop", hash_range=hash_range)
    assert [user for user in opened if user in kept] == kept


@given(st.binary(), RANGES)
def test_any_bytes_are_delivered(data, hash_range):
    assert_whole_or_raw(data, hash_range)


@given(st.binary(), RANGES)
def test_any_bytes_after_the_magic_are_delivered(data, hash_range):
    assert_whole_or_raw(MAGIC + data, hash_range)


@given(st.binary() | ALMOST_MESSAGES, RANGES)
@example(b"\x0a\x01k\x1a\x00", None)
def test_any_message_with_its_md5_is_delivered(message, hash_range):
    assert_whole_or_raw(sealed(message), hash_range)


@given(st.binary() | ALMOST_MESSAGES, st.integers(0, 20))
def test_any_message_is_counted_or_refused_by_name(message, most):
    try:
        assert count_fields(message, most) <= most
    except (LimitExceeded, MalformedAggregate):
        pass


@given(ALMOST_MESSAGES)
def test_opening_agrees_with_a_reader_that_checks_required_fields(message):
    expected = opened_naively(message)

    opened = open_aggregates([Record(sealed(message), "outer", "5")])

    if expected is None:
        assert [record.malformed for record in opened] == [True]
    else:
        assert [
            (record.partition_key, record.data, record.explicit_hash_key) for record in opened
        ] == expected


def plain_message_class() -> Any:
    """The schema as others have it: indexes are `uint64` without defaults, so that protobuf itself
    tells what is present."""
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    file = aggregate_descriptor()
    for wire_field in file.message_type[1].field:
        wire_field.ClearField("default_value")
        if wire_field.name.endswith("_index"):
            wire_field.type = FieldDescriptorProto.TYPE_UINT64
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return GetMessageClass(pool.FindMessageTypeByName("kclrun.kpl.AggregatedRecord"))


PLAIN = plain_message_class()


def opened_naively(message: bytes) -> list[UserRecord] | None:
    """What the aggregate holds by protobuf's own checks; None if it is malformed."""
    if not message:
        return None
    try:
        aggregate = PLAIN.FromString(message)
        if not aggregate.IsInitialized():
            return None
        hash_keys = [key.decode() for key in aggregate.explicit_hash_key_table]
        keys = [key.decode() for key in aggregate.partition_key_table]
        return [
            (
                keys[user.partition_key_index],
                user.data,
                # 2**64 - 1 written out reads as absent: see kpl.proto.
                hash_keys[user.explicit_hash_key_index]
                if user.HasField("explicit_hash_key_index")
                and user.explicit_hash_key_index != 2**64 - 1
                else None,
            )
            for user in aggregate.records
        ]
    except Exception:
        return None


@given(USER_RECORDS, RANGES.filter(lambda hash_range: hash_range is not None))
def test_dropping_keeps_exactly_what_hashes_into_the_range(user_records, hash_range):
    aggregate = Record(build_aggregate(user_records), "outer", "5")

    kept = open_aggregates([aggregate], kpl_range="drop", hash_range=hash_range)

    assert [record.sub_sequence_number for record in kept] == [
        index
        for index, (key, _, hash_key) in enumerate(user_records)
        if effective_hash_key(key, hash_key) in hash_range
    ]


POSITIONS = st.tuples(st.integers(0, 12) | st.integers(0, 10**128), st.integers(0, 3))
CHECKPOINTS = st.sampled_from(SENTINELS) | POSITIONS.map(
    lambda pair: ExtendedSequenceNumber(str(pair[0]), pair[1])
)


@given(st.lists(POSITIONS).map(sorted), CHECKPOINTS)
def test_dropping_to_a_checkpoint_is_a_filter(positions, checkpoint):
    records = [Record(b"", "k", str(n), sub_sequence_number=sub) for n, sub in positions]

    left = drop_until(records, checkpoint)

    assert left == [record for record in records if record.position > checkpoint]
    assert drop_until(left, checkpoint) == left


# The other implementation cannot tell a record without an explicit hash key from one with the
# first of the table, once there is a table: all of an aggregate have one, or none.
ALL_OR_NONE = st.lists(st.tuples(FEW_KEYS, st.binary(max_size=300), st.none()), min_size=1) | (
    st.lists(st.tuples(FEW_KEYS, st.binary(max_size=300), HASH_KEYS), min_size=1)
)


@given(ALL_OR_NONE)
def test_aws_kinesis_agg_opens_what_we_make(user_records):
    event = {
        "kinesis": {
            "kinesisSchemaVersion": "1.0",
            "sequenceNumber": "5",
            "approximateArrivalTimestamp": 1.5,
            "partitionKey": "outer",
            "data": base64.b64encode(build_aggregate(user_records)),
        }
    }

    theirs = [record["kinesis"] for record in deaggregate_records([event])]

    assert all(record["aggregated"] for record in theirs)
    assert [
        (r["partitionKey"], base64.b64decode(r["data"]), r["explicitHashKey"]) for r in theirs
    ] == user_records


@given(USER_RECORDS)
def test_we_open_what_aws_kinesis_agg_makes(user_records):
    theirs = RecordAggregator()
    for key, data, hash_key in user_records:
        assert theirs.add_user_record(key, data, hash_key) is None
    key, hash_key, data = theirs.clear_and_get().get_contents()

    opened = open_aggregates([Record(data, key, "5")])

    assert [(r.partition_key, r.data, r.explicit_hash_key) for r in opened] == user_records
    aggregator = Aggregator()
    for user_record in user_records:
        assert aggregator.add(*user_record)
    assert aggregator.finish() == (key, hash_key, data)
