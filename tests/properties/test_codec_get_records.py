"""Laws of the GetRecords decoder: any bytes give a value or a named error."""

import base64
import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kclrun.codec.get_records import decode_get_records
from kclrun.errors import LimitExceeded, MalformedBody
from kclrun.model.record import Record

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
OWN = ("sub_sequence_number", "explicit_hash_key", "aggregated", "malformed")
WIRE = ("Data", "PartitionKey", "SequenceNumber", "ApproximateArrivalTimestamp", "EncryptionType")
ALMOST_RECORDS = st.dictionaries(st.sampled_from(WIRE + OWN), JSON) | st.fixed_dictionaries(
    {
        "Data": st.binary().map(lambda data: base64.b64encode(data).decode()) | JSON,
        "PartitionKey": st.text() | JSON,
        "SequenceNumber": st.integers().map(str) | st.text() | JSON,
    },
    optional=dict.fromkeys(OWN, JSON),
)
ALMOST_BODIES = st.fixed_dictionaries(
    {"Records": st.lists(ALMOST_RECORDS, max_size=4) | JSON},
    optional={
        "NextShardIterator": JSON,
        "MillisBehindLatest": JSON,
        "ChildShards": st.lists(
            st.fixed_dictionaries(
                {
                    "ShardId": st.text() | JSON,
                    "ParentShards": st.lists(st.text()) | JSON,
                    "HashKeyRange": st.fixed_dictionaries(
                        {
                            "StartingHashKey": st.integers().map(str) | JSON,
                            "EndingHashKey": st.integers().map(str) | JSON,
                        }
                    ),
                }
            )
        )
        | JSON,
    },
).map(lambda fields: json.dumps(fields).encode())


def assert_a_value_or_a_named_error(body: bytes) -> None:
    try:
        decoded = decode_get_records(body)
    except (MalformedBody, LimitExceeded):
        return
    positions = [record.position for record in decoded.records[:1] + decoded.records[-1:]]
    assert positions == sorted(positions)
    assert all(
        (r.sub_sequence_number, r.explicit_hash_key, r.aggregated, r.malformed)
        == (0, None, False, False)
        for r in decoded.records
    )


@given(st.binary())
def test_any_bytes_give_a_value_or_a_named_error(body):
    assert_a_value_or_a_named_error(body)


@given(ALMOST_BODIES)
def test_almost_a_body_gives_a_value_or_a_named_error(body):
    assert_a_value_or_a_named_error(body)


@given(ALMOST_BODIES, st.data())
def test_a_body_with_a_byte_changed_or_cut_gives_a_value_or_a_named_error(body, data):
    place = data.draw(st.integers(0, len(body) - 1))
    byte = data.draw(st.binary(max_size=1))
    rest = body[place + 1 :] if data.draw(st.booleans()) else b""

    assert_a_value_or_a_named_error(body[:place] + byte + rest)


@given(
    st.lists(
        st.tuples(
            st.binary(),
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=256),
            st.floats(0, 2**40),
            st.none() | st.sampled_from(["NONE", "KMS"]),
        )
    ),
    st.integers(0, 10**120),
)
def test_what_the_service_encodes_comes_back(rows, start):
    records = [
        Record(data, key, str(start + index), arrival, encryption)
        for index, (data, key, arrival, encryption) in enumerate(rows)
    ]
    own = set(OWN)
    wire = [
        {name: value for name, value in msgspec.to_builtins(record).items() if name not in own}
        for record in records
    ]

    body = json.dumps({"Records": wire, "NextShardIterator": "A"}).encode()

    assert decode_get_records(body).records == records
