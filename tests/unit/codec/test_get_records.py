"""GetRecords bodies: what they become, and how each wrong kind is named."""

import base64
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from kclrun.codec import get_records
from kclrun.codec.get_records import (
    BODY_BYTES_MAX,
    CHILDREN_MAX,
    GetRecordsBody,
    decode_get_records,
)
from kclrun.errors import LimitExceeded, MalformedBody
from kclrun.model.quotas import GET_RECORDS_MAX
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from tests.support.tables import over_rows

FIRST = 49590338271490256608559692538361571095921575989136588898


def wire_record(number: object = FIRST, **changes: object) -> dict[str, object]:
    return {
        "ApproximateArrivalTimestamp": 1700000000.123,
        "Data": base64.b64encode(b"payload").decode(),
        "PartitionKey": "key",
        "SequenceNumber": str(number),
        **changes,
    }


def wire_child(shard_id: str = "shardId-1", **changes: object) -> dict[str, object]:
    return {
        "ShardId": shard_id,
        "ParentShards": ["shardId-0"],
        "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str(HASH_KEY_MAX)},
        **changes,
    }


def body(*records: object, **changes: Any) -> bytes:
    fields = {"Records": list(records), "NextShardIterator": "AAAA", "MillisBehindLatest": 7}
    return json.dumps({**fields, **changes}).encode()


def test_a_page_becomes_records_with_every_field_of_the_service():
    decoded = decode_get_records(body(wire_record(EncryptionType="KMS"), wire_record(FIRST + 1)))

    assert decoded == GetRecordsBody(
        records=[
            Record(b"payload", "key", str(FIRST), 1700000000.123, "KMS"),
            Record(b"payload", "key", str(FIRST + 1), 1700000000.123, None),
        ],
        next_iterator="AAAA",
        millis_behind_latest=7,
        children=(),
    )


def test_millis_behind_latest_may_be_missing():
    assert decode_get_records(b'{"Records":[]}').millis_behind_latest is None


@pytest.mark.parametrize("end", [b'{"Records":[],"NextShardIterator":null}', b'{"Records":[]}'])
def test_a_null_or_missing_iterator_is_the_end_of_the_shard(end):
    assert decode_get_records(end).next_iterator is None


def test_the_end_of_a_shard_names_its_children_with_their_hash_ranges():
    end = body(
        wire_record(),
        NextShardIterator=None,
        ChildShards=[
            wire_child("left", HashKeyRange={"StartingHashKey": "0", "EndingHashKey": "41"}),
            wire_child("right", ParentShards=["a", "b"]),
        ],
    )

    decoded = decode_get_records(end)

    assert decoded.children == (
        ChildShard("left", ("shardId-0",), HashRange(0, 41)),
        ChildShard("right", ("a", "b"), HashRange(0, HASH_KEY_MAX)),
    )
    assert len(decoded.records) == 1


def test_fields_the_service_may_add_one_day_are_passed_over():
    assert decode_get_records(body(wire_record(Novelty={"deep": [1]}), Novelty=1)).records


@over_rows(
    ("name", "value"),
    [
        ("sub_sequence_number", 5),
        ("sub_sequence_number", 0),
        ("sub_sequence_number", None),
        ("explicit_hash_key", "1"),
        ("aggregated", True),
        ("aggregated", False),
        ("malformed", True),
        ("malformed", {"a": 1}),
    ],
)
def test_no_body_sets_what_only_we_may_set(name, value):
    with pytest.raises(MalformedBody):
        decode_get_records(body(wire_record(**{name: value})))


def test_no_escape_smuggles_such_a_field_in():
    hostile = body(wire_record(aggregated=True)).replace(b"aggregated", b"\\u0061ggregated")

    with pytest.raises(MalformedBody):
        decode_get_records(hostile)


def test_every_field_a_body_can_set_is_one_of_the_service():
    own = {"sub_sequence_number", "explicit_hash_key", "aggregated", "malformed", "_decoding"}
    settable = {
        field.encode_name for field in msgspec.structs.fields(Record) if field.name not in own
    }

    assert settable == {
        "Data",
        "PartitionKey",
        "SequenceNumber",
        "ApproximateArrivalTimestamp",
        "EncryptionType",
    }


@over_rows(
    "wrong",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"__type":"ExpiredIteratorException"}',
        b'{"Records":null}',
        b'{"Records":[]',
        b'{"Records":[]} x',
        b'{"Records":[],"x":' + b"[" * 100_000,
        b'{"Records":[{"Data":"","PartitionKey":"\xff","SequenceNumber":"1"}]}',
        b'{"Records":[{"Data":"","PartitionKey":"\\ud800","SequenceNumber":"1"}]}',
        body(wire_record(Data="!!!!")),
        body(wire_record(Data="QUJ")),
        body(wire_record(PartitionKey=None)),
        body({"Data": "", "PartitionKey": "k"}),
        body(NextShardIterator=""),
        body(NextShardIterator="A" * 5000),
        body(MillisBehindLatest=-1),
        body(MillisBehindLatest=2**63),
        body(ChildShards=[{"ShardId": "a"}]),
        body(ChildShards=[wire_child("")]),
        body(ChildShards=[wire_child("s" * 129)]),
        body(ChildShards=[wire_child(ParentShards=["p"] * (CHILDREN_MAX + 1))]),
        body(ChildShards=[wire_child(HashKeyRange={"StartingHashKey": "0"})]),
        body(ChildShards=[wire_child(HashKeyRange={"StartingHashKey": "2", "EndingHashKey": "1"})]),
        body(ChildShards=[wire_child(HashKeyRange={"StartingHashKey": "0", "EndingHashKey": "x"})]),
        body(
            ChildShards=[
                wire_child(HashKeyRange={"StartingHashKey": "0", "EndingHashKey": str(2**128)})
            ]
        ),
    ],
)
def test_what_is_no_body_is_named_malformed(wrong):
    with pytest.raises(MalformedBody):
        decode_get_records(wrong)


def test_text_that_is_not_utf_8_is_named_so():
    with pytest.raises(MalformedBody, match="not UTF-8"):
        decode_get_records(body(wire_record()).replace(b'"key"', b'"\xff"'))


@pytest.mark.parametrize("number", ["", "-1", "01", "1.0", "x", "TRIM_HORIZON", "9" * 130, "٣"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_the_edges_of_a_page_are_numbers(number, place):
    page = [wire_record(number), wire_record()]
    if place == "last":
        page.reverse()

    with pytest.raises(MalformedBody):
        decode_get_records(body(*page))


def test_a_sentinel_cannot_hide_between_two_numbers():
    with pytest.raises(MalformedBody):
        decode_get_records(body(wire_record(1), wire_record("SHARD_END"), wire_record(2)))


@pytest.mark.parametrize("numbers", [(2, 1), (1, 3, 2), (10, 9), (9, 8, 10)])
def test_a_page_that_does_not_ascend_is_refused(numbers):
    with pytest.raises(MalformedBody):
        decode_get_records(body(*map(wire_record, numbers)))


def test_numbers_of_different_lengths_ascend_as_numbers_do():
    page = decode_get_records(body(*map(wire_record, (0, 8, 9, 10, 11, 10**128))))

    assert page.records[-1].sequence_number == str(10**128)


def test_a_page_holds_at_most_ten_thousand_records():
    full = [wire_record(FIRST + i) for i in range(GET_RECORDS_MAX)]

    assert len(decode_get_records(body(*full)).records) == GET_RECORDS_MAX
    with pytest.raises(LimitExceeded, match="10001 records"):
        decode_get_records(body(*full, wire_record(FIRST + GET_RECORDS_MAX)))


def test_a_page_names_at_most_a_few_children():
    with pytest.raises(LimitExceeded, match="9 children"):
        decode_get_records(body(ChildShards=[wire_child()] * (CHILDREN_MAX + 1)))


def test_ten_mebibytes_of_data_in_full_pages_stay_below_the_limit():
    # The worst a sound page can be: full keys beyond the BMP, escaped, and 10 MiB of data.
    key = "\U0001f600" * 256
    widest = json.dumps(wire_record("9" * 129, PartitionKey=key, EncryptionType="KMS", Data=""))
    base64_bytes = 4 * -(-10 * 1024 * 1024 // 3) + GET_RECORDS_MAX * 4

    assert base64_bytes + GET_RECORDS_MAX * (len(widest) + 2) < BODY_BYTES_MAX
    assert BODY_BYTES_MAX == 49_847_680, "47.5 MiB"


def test_a_body_above_the_limit_is_refused_before_it_is_parsed(monkeypatch):
    sound = body(wire_record())
    monkeypatch.setattr(get_records, "BODY_BYTES_MAX", len(sound) - 1)

    with pytest.raises(LimitExceeded, match="bytes"):
        decode_get_records(sound)


def test_a_page_of_ten_mebibytes_costs_little_more_than_its_data():
    data = base64.b64encode(bytes(1024)).decode()
    page = body(*[wire_record(FIRST + i, Data=data) for i in range(GET_RECORDS_MAX)])

    tracemalloc.start()
    try:
        decoded = decode_get_records(page)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(decoded.records) == GET_RECORDS_MAX
    assert peak < 20 * 1024 * 1024


@over_rows(
    "hostile",
    [
        body(wire_record(PartitionKey="SECRET", Data="SECRET!!")),
        body(wire_record(PartitionKey="SECRET", SequenceNumber="SECRET")),
        body(NextShardIterator="SECRET" * 1000),
        b'{"Records":[{"PartitionKey":"SECRET\xff"}]}',
        body(ChildShards=[wire_child(HashKeyRange={"StartingHashKey": "SECRET"})]),
    ],
)
def test_no_error_shows_what_the_body_held(hostile):
    with pytest.raises(MalformedBody) as caught:
        decode_get_records(hostile)

    assert "SECRET" not in repr(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_its_representation_holds_no_iterator_and_no_payload():
    shown = repr(decode_get_records(body(wire_record(), NextShardIterator="SECRET")))

    assert shown == "GetRecordsBody(1 records, 0 children)"
