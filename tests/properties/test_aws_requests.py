"""Requests: records packed and cut into requests as the service takes them, and signed as botocore
signs them."""

import datetime
from unittest import mock

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from kclrun.aws.put_records import ShardPacker, batches
from kclrun.aws.wire import Signer
from kclrun.codec.kpl import effective_hash_key
from kclrun.codec.record_sizes import REQUEST_BYTES_MAX
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry
from kclrun.model.wire import WireCredentials
from tests.unit.aws.test_aws_put_records import HALF, SHARDS, opened


def shard_of(key: str) -> int:
    return int(effective_hash_key(key, None) >= HALF)


@given(st.lists(st.integers(0, 20), max_size=700), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_packing_loses_nothing_keeps_order_and_its_share(keys, share):
    rows = [PutEntry(str(number).encode(), f"key{key}") for number, key in enumerate(keys)]
    packer = ShardPacker(SHARDS, share)

    packed = [entry for row in rows for entry in packer.add(row)] + list(packer.flush())

    users = [user for entry in packed for user in opened(entry)]
    for shard in (0, 1):
        sent = [int(data) for key, data in users if shard_of(key) == shard]
        assert sent == [n for n, key in enumerate(keys) if shard_of(f"key{key}") == shard]
    for entry in packed:
        # What is packed together belongs to the shard that the aggregate is routed to.
        assert {shard_of(key) for key, _ in opened(entry)} == {shard_of(entry.partition_key)}
        assert len(opened(entry)) == entry.user_records
    aggregated = sum(
        entry.user_records for entry in packed if entry.data.startswith(b"\xf3\x89\x9a\xc2")
    )
    assert abs(aggregated - share * len(rows)) < 1


@given(st.lists(st.integers(0, 2**20), max_size=50), st.booleans())
def test_requests_keep_the_limits_and_the_order(sizes, one_a_key):
    rows = [PutEntry(bytes(size), f"k{number % 7}") for number, size in enumerate(sizes)]

    cut = list(batches(rows, one_a_key=one_a_key))

    assert [entry for batch in cut for entry in batch] == rows
    for batch in cut:
        assert 0 < len(batch) <= PUT_RECORDS_MAX
        assert sum(entry.size_bytes for entry in batch) <= REQUEST_BYTES_MAX
        keys = [entry.partition_key for entry in batch]
        assert not one_a_key or len(set(keys)) == len(keys)


visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)


paths = st.sampled_from(["", "/", "/prefix", "/a b/ü", "/x%20y/~z"])


@given(
    body=st.binary(max_size=200),
    key=visible.filter(lambda text: "," not in text),
    secret=visible,
    token=st.none() | visible,
    at=st.integers(min_value=0, max_value=4_000_000_000),
    path=paths,
    service=st.sampled_from(["kinesis", "dynamodb"]),
)
def test_a_signature_equals_botocores(*, body, key, secret, token, at, path, service):
    host = "kinesis.eu-west-1.amazonaws.com:8443"
    signer = Signer(host=host, path=path, service=service, region="eu-west-1")

    ours = signer.headers(
        body,
        target="Kinesis_20131202.GetRecords",
        content_type="application/x-amz-json-1.1",
        credentials=WireCredentials(key, secret, token),
        at=float(at),
    )

    headers = {
        "content-type": "application/x-amz-json-1.1",
        "x-amz-target": "Kinesis_20131202.GetRecords",
    }
    request = AWSRequest("POST", f"https://{host}{path}", headers=headers, data=body)
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    with mock.patch.object(botocore.auth, "get_current_datetime", return_value=moment):
        botocore.auth.SigV4Auth(Credentials(key, secret, token), service, "eu-west-1").add_auth(
            request
        )
    theirs = {name.lower(): value for name, value in request.headers.items()}
    assert ours["authorization"] == theirs["authorization"]
    assert ours["x-amz-date"] == theirs["x-amz-date"]
    assert ours.get("x-amz-security-token") == theirs.get("x-amz-security-token")
