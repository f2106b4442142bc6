import base64
from itertools import groupby
from typing import Any

import msgspec
import pytest

from kclrun.aws.put_records import (
    ATTEMPTS_MAX,
    BLOCK_MAX,
    ShardPacker,
    batches,
    send_all,
)
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates
from kclrun.codec.record_sizes import REQUEST_BYTES_MAX
from kclrun.errors import AccessDenied, InvalidRequest, Throttled, Unavailable
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry, Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.time import backoff_s

HALF = 2**127
SHARDS = (
    Shard("shardId-000000000000", HashRange(0, HALF - 1), "1"),
    Shard("shardId-000000000001", HashRange(HALF, HASH_KEY_MAX), "1"),
    Shard("shardId-000000000002", HashRange(0, HASH_KEY_MAX), "1", ending_sequence_number="2"),
)


def opened(entry: PutEntry) -> list[tuple[str, bytes]]:
    record = Record(entry.data, entry.partition_key, "1")
    return [(user.partition_key, user.data) for user in open_aggregates([record])]


def test_a_block_is_sent_when_it_is_full():
    packer = ShardPacker(SHARDS, 1.0)
    ready = [packer.add(PutEntry(b"x", "same key")) for _ in range(BLOCK_MAX)]

    assert [len(entries) for entries in ready] == [0] * (BLOCK_MAX - 1) + [1]
    assert packer.flush() == []


def test_only_records_of_one_open_shard_share_an_aggregate_the_lowest_hash_key_included():
    packer = ShardPacker(SHARDS, 1.0)
    hash_keys = (0, HALF - 1, HALF, HASH_KEY_MAX)
    for hash_key in hash_keys:
        assert packer.add(PutEntry(b"%d" % hash_key, "k", str(hash_key))) == ()

    found = [[int(data) for _, data in opened(entry)] for entry in packer.flush()]

    assert found == [[*hash_keys[:2]], [*hash_keys[2:]]]


def test_a_hash_key_below_every_listed_range_goes_to_the_first():
    packer = ShardPacker(SHARDS[1:2], 1.0)
    packer.add(PutEntry(b"x", "k", "0"))

    assert [opened(entry) for entry in packer.flush()] == [[("k", b"x")]]


def test_a_record_too_large_for_an_aggregate_goes_as_it_is():
    packer = ShardPacker(SHARDS, 1.0)
    large = PutEntry(b"x" * (2**20 - 8), "k")
    rows = [PutEntry(b"before", "k"), large, PutEntry(b"after", "k")]
    for row in rows:
        assert packer.add(row) == ()

    sent = packer.flush()

    assert sent[1] is large
    assert [data for entry in sent for _, data in opened(entry)] == [row.data for row in rows]


def test_in_order_a_request_ends_before_a_key_that_it_has_and_not_before_others():
    a, b, again = PutEntry(b"1", "a"), PutEntry(b"2", "b"), PutEntry(b"3", "a")

    assert list(batches([a, b, again], one_a_key=True)) == [(a, b), (again,)]


def test_a_full_request_is_sent_without_waiting_for_the_next_row():
    rows = [PutEntry(b"x", "k")] * (2 * PUT_RECORDS_MAX + 1)

    assert [len(list(group)) for _, group in groupby(map(len, batches(rows)))] == [2, 1]


def test_large_records_make_small_requests():
    rows = [PutEntry(bytes(2**20 - 1), "k")] * 12

    assert [len(batch) for batch in batches(rows)] == [5, 5, 2]


def test_a_request_is_filled_to_its_last_byte_and_one_that_is_too_large_goes_alone():
    half, other = PutEntry(bytes(REQUEST_BYTES_MAX // 2 - 1), "k"), PutEntry(b"", "k")
    large = PutEntry(bytes(REQUEST_BYTES_MAX), "k")

    assert [len(batch) for batch in batches([half, half, half, half])] == [2, 2]
    assert [len(batch) for batch in batches([half, half, half, half, other])] == [2, 2, 1]
    assert list(batches([large, other])) == [(large,), (other,)]
    assert [len(batch) for batch in batches([other, other])] == [2], "the keys may be the same"


@pytest.mark.parametrize(
    ("share", "packed"), [(0.0, [0, 0, 0, 0]), (0.3, [1, 2, 1, 2]), (0.5, [2, 3, 2, 3])]
)
def test_the_share_of_packed_records_is_exact_over_the_blocks(share, packed):
    packer = ShardPacker(SHARDS, share)
    found = []
    for _ in packed:
        for number in range(5):
            packer.add(PutEntry(b"%d" % number, "k"))
        sent = packer.flush()
        assert [data for entry in sent for _, data in opened(entry)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]
        found.append(sum(entry.user_records for entry in sent if entry.data not in b"01234"))

    assert found == packed


def test_the_rounding_of_a_share_is_no_record_less():
    packer = ShardPacker(SHARDS, 0.1)  # ten times 0.1 is below 1 for a computer
    packed = 0
    for _ in range(10):
        packer.add(PutEntry(b"x", "k"))
        packed += sum(entry.data != b"x" for entry in packer.flush())

    assert packed == 1


THROTTLED, FAILED = "ProvisionedThroughputExceededException", "InternalFailure"
BATCH = tuple(PutEntry(b"%d" % number, "k") for number in range(4))


class Sending:
    """`send_all` to a server that answers each request as a test says."""

    def __init__(self, server: Any, client: WireClient) -> None:
        self.server, self._client = server, client
        self.waits: list[float] = []

    def answers(self, *codes: str | None) -> None:
        results = [{"ErrorCode": code} if code else {"SequenceNumber": "1"} for code in codes]
        self.server.reply(body=msgspec.json.encode({"Records": results}))

    def __call__(self, batch: tuple[PutEntry, ...] = BATCH) -> int:
        return send_all(self._client, "flights", batch, wait=self.waits.append, chance=lambda: 0.5)

    def sent(self) -> list[list[bytes]]:
        asked = [msgspec.json.decode(request.body)["Records"] for request in self.server.requests]
        return [[base64.b64decode(record["Data"]) for record in records] for records in asked]


@pytest.fixture
def sending(server, make_client):
    return Sending(server, make_client(server.url))


def waits(*attempts: int) -> list[float]:
    return [backoff_s(attempt, 0.5, base_s=0.1) for attempt in attempts]


def test_what_was_refused_for_the_moment_is_sent_again_in_its_order(sending):
    sending.answers(None, THROTTLED, None, FAILED)
    sending.answers("KMSThrottlingException", None)
    sending.answers(None)

    assert sending() == 2
    assert sending.sent() == [[b"0", b"1", b"2", b"3"], [b"1", b"3"], [b"1"]]
    assert sending.waits == waits(1, 1)


def test_a_request_that_failed_for_the_moment_or_whose_outcome_is_unknown_is_sent_again(sending):
    sending.server.refuse(400, THROTTLED)
    sending.server.refuse(503, "ServiceUnavailable")
    sending.server.hang_up()
    sending.server.reply(body=b'{"Records":[{"SequenceNumber":"\xff"}]}')
    sending.server.reply(body=b'{"more":' + b"[" * 100_000)
    sending.answers(None, None, None, None)

    assert sending() == 5
    assert sending.sent() == [[b"0", b"1", b"2", b"3"]] * 6
    assert sending.waits == waits(1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("codes", "leaf", "said"),
    [
        ((THROTTLED, FAILED), Throttled, f"the last: PutRecords: {FAILED}, {THROTTLED}"),
        ((FAILED, FAILED), Unavailable, f"the last: PutRecords: {FAILED}"),
        (("KMSDisabledException",) * 2, Unavailable, "the last: PutRecords: KMSDisabledException"),
    ],
)
def test_after_twelve_attempts_without_progress_it_ends_and_progress_counts_anew(
    sending, codes, leaf, said
):
    for _ in range(ATTEMPTS_MAX - 1):
        sending.answers(*[THROTTLED] * 3)
    sending.answers(None, *codes)
    for _ in range(ATTEMPTS_MAX):
        sending.answers(*codes)

    with pytest.raises(
        leaf, match=rf"2 records were not taken in {ATTEMPTS_MAX} attempts; {said}$"
    ):
        sending(BATCH[:3])

    counted = range(1, ATTEMPTS_MAX)
    assert sending.waits == waits(*counted, 1, *counted)


def test_a_permanent_refusal_ends_it_at_once(sending):
    sending.answers(THROTTLED, "X" * 101, None, None)
    with pytest.raises(InvalidRequest, match=f"a record was refused with {'X' * 100}$"):
        sending()
    sending.server.refuse(400, "AccessDeniedException")
    with pytest.raises(AccessDenied):
        sending()

    assert sending.waits == []
