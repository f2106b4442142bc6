"""The Kinesis model in virtual time: retention, ends, pages, iterators, phases."""

from __future__ import annotations

import pytest

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound, ServiceError, Unavailable
from kclrun.local import service as service_module
from kclrun.local.iterators import ShardQuery
from kclrun.local.sequence_numbers import Numbering, ParsedNumber, parse
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.stream import PutEntry, hash_key_of
from kclrun.model.record import IteratorType
from kclrun.model.shard import HASH_KEY_MAX

SECRET = b"a secret of the tests".ljust(32)
START = 1_700_000_000.0
DAY = 86_400.0
FIRST = "shardId-000000000000"
MIB = 1024 * 1024


def service(**settings):
    return Kinesis(KinesisSettings(**settings), SECRET)


def made(kinesis, shards=1, at=START):
    return kinesis.create_stream("s", shards, at)


def put(kinesis, stream, data=b"", at=START, key="k"):
    return kinesis.put(stream, PutEntry(data, key), at).sequence_number


def from_start(kinesis, stream, at, shard=FIRST):
    return kinesis.iterator(stream, shard, IteratorType.TRIM_HORIZON, at)


def read(kinesis, iterator, at, limit=10_000):
    return kinesis.fetch(iterator, limit, at)


def data_of(page):
    return [record.data for record in page.records]


def stream_shards(kinesis, stream, at):
    return kinesis.list_shards(stream, ShardQuery(), 100, at).shards


def listed(kinesis, stream, at):
    return [shard.shard_id[-1] for shard in stream_shards(kinesis, stream, at)]


def test_the_hash_key_of_a_partition_key_is_its_md5():
    # RFC 1321's test suite: MD5 ("abc") = 900150983cd24fb0d6963f7d28e17f72.
    assert hash_key_of("abc") == 0x900150983CD24FB0D6963F7D28E17F72


def test_records_older_than_the_retention_are_gone():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"old")
    put(kinesis, stream, b"new", at=START + 3600)

    now = START + DAY + 1
    page = read(kinesis, from_start(kinesis, stream, now), now)

    assert data_of(page) == [b"new"]


def test_an_iterator_into_what_was_trimmed_meanwhile_goes_on_at_the_horizon():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"old")
    put(kinesis, stream, b"new", at=START + 200)
    iterator = from_start(kinesis, stream, START + DAY - 1)

    assert data_of(read(kinesis, iterator, START + DAY + 100)) == [b"new"]


def test_a_longer_retention_keeps_records_and_a_shorter_one_drops_them():
    kinesis = service()
    stream = made(kinesis)
    kinesis.set_retention(stream, 48, START, longer=True)
    put(kinesis, stream, b"kept")
    later = START + 1.5 * DAY

    assert data_of(read(kinesis, from_start(kinesis, stream, later), later)) == [b"kept"]
    kinesis.set_retention(stream, 24, later, longer=False)
    assert data_of(read(kinesis, from_start(kinesis, stream, later), later)) == []


@pytest.mark.parametrize(("hours", "longer"), [(8761, True), (23, False), (12, True), (48, False)])
def test_a_retention_out_of_bounds_or_in_the_wrong_direction_is_refused(hours, longer):
    kinesis = service()
    stream = made(kinesis)

    with pytest.raises(InvalidRequest):
        kinesis.set_retention(stream, hours, START, longer=longer)


def test_a_closed_shard_is_listed_until_its_end_is_older_than_the_retention():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream)
    kinesis.split_shard(stream, FIRST, 2**127, START + 10)

    assert listed(kinesis, stream, START + DAY + 9) == ["0", "1", "2"]
    assert listed(kinesis, stream, START + DAY + 11) == ["1", "2"]
    with pytest.raises(NotFound):
        from_start(kinesis, stream, START + DAY + 11)


def test_trimming_gives_all_storage_back():
    kinesis = service()
    stream = made(kinesis, shards=2)
    for index in range(3000):
        put(kinesis, stream, b"x" * 10, key=f"k{index}")
    assert kinesis.storage.used_bytes > 30_000

    stream.trim(START + 2 * DAY)

    assert kinesis.storage.used_bytes == 0


def test_trimming_bit_by_bit_keeps_positions_and_order():
    kinesis = service()
    stream = made(kinesis)
    for index in range(3000):
        put(kinesis, stream, b"%d" % index, at=START + index)

    for trimmed in (1, 5, 1023, 1024, 1025, 2500, 2999):
        now = START + DAY + trimmed
        page = read(kinesis, from_start(kinesis, stream, now), now, limit=2)
        assert data_of(page) == [b"%d" % i for i in range(trimmed, min(trimmed + 2, 3000))]
        for at, first in ((trimmed - 1, trimmed), (trimmed + 1, trimmed + 1), (2999.5, 3000)):
            timed = kinesis.iterator(
                stream, FIRST, IteratorType.AT_TIMESTAMP, now, timestamp=START + at
            )
            expected = [b"%d" % i for i in range(first, min(first + 1, 3000))]
            assert data_of(read(kinesis, timed, now, limit=1)) == expected


def test_the_byte_bound_of_a_page_holds_after_trimming():
    kinesis = service()
    stream = made(kinesis)
    kinesis.put_many(stream, [PutEntry(b"x" * 5000, "k")] * 500, START)
    kinesis.put_many(stream, [PutEntry(b"x" * 5000, "k")] * 500, START)
    kinesis.put_many(stream, [PutEntry(b"x" * 5000, "k")] * 500, START)
    for _ in range(11):
        put(kinesis, stream, b"x" * (MIB - 1), at=START + 60)

    now = START + DAY + 30
    page = read(kinesis, from_start(kinesis, stream, now), now)

    assert len(page.records) == 10


def test_a_deleted_stream_gives_its_storage_back_and_its_iterators_find_nothing():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"x")
    iterator = from_start(kinesis, stream, START)

    kinesis.delete_stream(stream, START)
    made(kinesis, at=START + 1)

    assert kinesis.storage.used_bytes == 0
    with pytest.raises(NotFound):
        read(kinesis, iterator, START + 1)


def test_an_iterator_lives_for_five_minutes():
    kinesis = service()
    iterator = from_start(kinesis, made(kinesis), START)

    read(kinesis, iterator, START + 300)
    with pytest.raises(ExpiredIterator) as refusal:
        read(kinesis, iterator, START + 300.5)
    assert refusal.value.code == "ExpiredIteratorException"


@pytest.mark.parametrize("position", range(0, 60, 7))
def test_an_iterator_with_one_character_changed_is_refused(position):
    kinesis = service()
    iterator = from_start(kinesis, made(kinesis), START)
    changed = "A" if iterator[position] != "A" else "B"

    with pytest.raises(InvalidRequest):
        read(kinesis, iterator[:position] + changed + iterator[position + 1 :], START)


def test_an_iterator_of_another_service_is_refused():
    one, other = service(), Kinesis(KinesisSettings(), b"another secret".ljust(32))
    iterator = from_start(one, made(one), START)
    made(other)

    with pytest.raises(InvalidRequest):
        read(other, iterator, START)


def test_the_last_page_of_a_closed_shard_carries_records_and_the_end_together():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"last")
    kinesis.split_shard(stream, FIRST, 2**127, START + 1)

    page = read(kinesis, from_start(kinesis, stream, START + 1), START + 1)

    assert data_of(page) == [b"last"]
    assert page.next_iterator is None
    assert [child.parents for child in page.children] == [(FIRST,), (FIRST,)]


def test_a_page_filled_to_its_limit_does_not_end_the_shard_yet():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"last")
    kinesis.split_shard(stream, FIRST, 2**127, START + 1)

    page = read(kinesis, from_start(kinesis, stream, START + 1), START + 1, limit=1)
    after = read(kinesis, page.next_iterator, START + 1)

    assert (data_of(page), page.children) == ([b"last"], ())
    assert (data_of(after), after.next_iterator, len(after.children)) == ([], None, 2)


def test_a_page_is_bounded_by_ten_mebibytes():
    kinesis = service()
    stream = made(kinesis)
    for _ in range(11):
        put(kinesis, stream, b"x" * (MIB - 1))

    page = read(kinesis, from_start(kinesis, stream, START), START)

    assert len(page.records) == 10
    assert len(read(kinesis, page.next_iterator, START).records) == 1


def test_a_page_is_bounded_by_ten_thousand_records():
    kinesis = service()
    stream = made(kinesis)
    for _ in range(10_001):
        put(kinesis, stream)

    page = read(kinesis, from_start(kinesis, stream, START), START)

    assert len(page.records) == 10_000
    with pytest.raises(InvalidRequest):
        read(kinesis, page.next_iterator, START, limit=10_001)


def test_millis_behind_latest_is_the_age_of_the_oldest_unread_record():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, at=START)
    put(kinesis, stream, at=START + 10)

    page = read(kinesis, from_start(kinesis, stream, START + 15), START + 15, limit=1)

    assert page.millis_behind_latest == 5000
    assert read(kinesis, page.next_iterator, START + 15).millis_behind_latest == 0


def test_a_record_unread_in_its_own_millisecond_is_still_behind():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream)
    put(kinesis, stream)

    page = read(kinesis, from_start(kinesis, stream, START), START, limit=1)

    assert page.millis_behind_latest == 1


def test_a_clock_that_is_set_back_reorders_nothing():
    kinesis = service()
    stream = made(kinesis)
    first = put(kinesis, stream, b"1", at=START + 100)
    second = put(kinesis, stream, b"2", at=START + 50)

    now = START + 200
    iterator = kinesis.iterator(
        stream, FIRST, IteratorType.AT_TIMESTAMP, now, timestamp=START + 100
    )

    assert int(first) < int(second)
    assert data_of(read(kinesis, iterator, now)) == [b"1", b"2"]


def test_children_made_in_the_second_of_their_parent_still_number_above_it():
    kinesis = service()
    stream = made(kinesis)
    old = put(kinesis, stream)
    for _ in range(6):  # 127 shards: more than the four bits of a number that tell shards apart.
        kinesis.update_shard_count(stream, 2 * len(stream.open_shards()), START)
    shards = {shard.shard_id: shard.describe() for shard in stream.shards(START)}

    assert int(old) < int(put(kinesis, stream))
    for shard in shards.values():
        for parent in shard.parents:
            ended = int(shards[parent].ending_sequence_number)
            assert ended < int(shard.starting_sequence_number)


def test_the_bound_of_a_record_counts_data_and_key_and_may_be_raised():
    kinesis = service()
    stream = made(kinesis)
    put(kinesis, stream, b"x" * (MIB - 1))
    with pytest.raises(InvalidRequest):
        put(kinesis, stream, b"x" * MIB)

    stream.record_bytes_max = 10 * MIB
    put(kinesis, stream, b"x" * (10 * MIB - 1))


def test_put_records_takes_nothing_if_one_record_is_too_large():
    kinesis = service()
    stream = made(kinesis)

    with pytest.raises(InvalidRequest) as refusal:
        kinesis.put_many(stream, [PutEntry(b"", "k"), PutEntry(b"x" * MIB, "secret-key")], START)

    assert "secret-key" not in str(refusal.value)
    assert data_of(read(kinesis, from_start(kinesis, stream, START), START)) == []


@pytest.mark.parametrize("hash_key", ["-1", str(HASH_KEY_MAX + 1), "", "1.5", "9" * 60, "¹"])
def test_an_explicit_hash_key_that_is_none_is_refused(hash_key):
    kinesis = service()

    with pytest.raises(InvalidRequest):
        kinesis.put(made(kinesis), PutEntry(b"", "k", hash_key), START)


def test_a_full_store_forgets_what_is_expired_before_it_refuses():
    kinesis = service(stored_bytes_max=100_000)
    stream = made(kinesis)
    put(kinesis, stream, b"x" * 90_000)

    refused = kinesis.put_many(stream, [PutEntry(b"x" * 90_000, "k")], START + 1)
    accepted = kinesis.put_many(stream, [PutEntry(b"x" * 90_000, "k")], START + DAY + 1)

    assert refused[0].error_code == "ProvisionedThroughputExceededException"
    assert "100000 bytes" in refused[0].error_message
    assert accepted[0].error_code is None


def test_a_stream_settles_after_its_time_and_refuses_what_aws_refuses_before():
    kinesis = service(settle_s=5.0)
    stream = made(kinesis)
    assert stream.status(START + 4) == "CREATING"
    with pytest.raises(NotFound):
        put(kinesis, stream, at=START + 4)

    assert stream.status(START + 5) == "ACTIVE"
    kinesis.split_shard(stream, FIRST, 2**127, START + 5)
    assert stream.status(START + 9) == "UPDATING"
    put(kinesis, stream, at=START + 9)
    _, *children = (shard.shard_id for shard in stream_shards(kinesis, stream, START + 9))
    for change in (
        lambda: kinesis.update_shard_count(stream, 4, START + 9),
        lambda: kinesis.split_shard(stream, children[0], 2**126, START + 9),
        lambda: stream.merge(*children, START + 9),
    ):
        with pytest.raises(Unavailable) as refusal:
            change()
        assert refusal.value.code == "ResourceInUseException"

    kinesis.delete_stream(stream, START + 10)
    assert stream.status(START + 14) == "DELETING"
    assert kinesis.streams(START + 15) == []


def test_an_iterator_begins_at_a_record_or_behind_it_and_takes_no_number_of_another_shard():
    kinesis = service()
    stream = made(kinesis, shards=2)
    numbers = [put(kinesis, stream, data) for data in (b"a", b"b", b"c")]
    # MD5 ("k") begins with 8: the upper half of the keys.
    theirs, mine = (shard.shard_id for shard in stream_shards(kinesis, stream, START))

    def from_number(kind, shard_id=mine):
        iterator = kinesis.iterator(stream, shard_id, kind, START, sequence_number=numbers[1])
        return data_of(read(kinesis, iterator, START))

    assert from_number(IteratorType.AT_SEQUENCE_NUMBER) == [b"b", b"c"]
    assert from_number(IteratorType.AFTER_SEQUENCE_NUMBER) == [b"c"]
    with pytest.raises(InvalidRequest, match="did not come from this shard"):
        from_number(IteratorType.AT_SEQUENCE_NUMBER, theirs)


def test_an_account_has_a_shard_limit_over_all_its_streams(monkeypatch):
    monkeypatch.setattr(service_module, "SHARDS_MAX", 4)
    kinesis = service()
    stream = made(kinesis, shards=2)
    kinesis.create_stream("other", 1, START)
    lower, upper = (shard.shard_id for shard in stream_shards(kinesis, stream, START))

    def refused(change):
        with pytest.raises(ServiceError) as refusal:
            change()
        return refusal.value.code == "LimitExceededException"

    assert refused(lambda: kinesis.create_stream("third", 2, START))
    assert refused(lambda: kinesis.update_shard_count(stream, 4, START))
    kinesis.split_shard(stream, lower, 2**126, START)
    assert refused(lambda: kinesis.split_shard(stream, upper, 3 * 2**126, START))


@pytest.mark.parametrize(("shard", "nibble"), [(0, 0), (5, 5), (37, 5)])
def test_a_sequence_number_has_the_bits_of_aws(shard, nibble):
    # version, generation, shard, counter, zeros, second, shard, version: most significant first.
    parts = [(2, 4), (1_700_000_000, 36), (nibble, 4), (9, 64), (0, 8), (1_700_000_001, 36)]
    bits = "".join(f"{value:0{width}b}" for value, width in [*parts, (shard, 32), (2, 4)])

    number = Numbering(1_700_000_000, shard).number(9, 1_700_000_001)

    assert number == int(bits, 2)
    assert len(str(number)) == 56
    assert parse(str(number)) == ParsedNumber(number, 1_700_000_000, 9, shard)


@pytest.mark.parametrize("text", ["", "1", "x", "٣", "9" * 58, str(2**188), str((3 << 184) | 2)])
def test_a_text_of_others_is_no_sequence_number(text):
    assert parse(text) is None


def test_the_token_of_a_listing_lives_for_five_minutes():
    kinesis = service()
    stream = made(kinesis, shards=3)
    page = kinesis.list_shards(stream, ShardQuery(), 2, START)

    more = kinesis.list_more_shards(page.next_token, 2, START + 300)
    assert [shard.number for shard in more.shards] == [2]
    with pytest.raises(ServiceError) as refusal:
        kinesis.list_more_shards(page.next_token, 2, START + 301)
    assert refusal.value.code == "ExpiredNextTokenException"


@pytest.mark.parametrize(
    "query",
    [
        ShardQuery("SOMETHING"),
        ShardQuery("AT_TIMESTAMP"),
        ShardQuery("AT_LATEST", timestamp=START),
        ShardQuery("AFTER_SHARD_ID"),
        ShardQuery("FROM_TRIM_HORIZON", shard_id=FIRST),
    ],
)
def test_a_filter_whose_fields_do_not_go_together_is_refused(query):
    kinesis = service()

    with pytest.raises(InvalidRequest):
        kinesis.list_shards(made(kinesis), query, 10, START)


def test_the_open_shards_at_the_trim_horizon_always_tile_the_hash_space():
    kinesis = service()
    stream = made(kinesis)
    kinesis.split_shard(stream, FIRST, 2**127, START)  # In the very moment of creation.
    kinesis.split_shard(stream, "shardId-000000000001", 2**126, START + 60)

    for now in (START + 100, START + DAY + 30, START + DAY + 90):
        page = kinesis.list_shards(stream, ShardQuery("AT_TRIM_HORIZON"), 100, now)
        widths = [shard.hash_range.end - shard.hash_range.start + 1 for shard in page.shards]
        assert sum(widths) == HASH_KEY_MAX + 1
