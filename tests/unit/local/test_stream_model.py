"""The Kinesis model in virtual time: retention, ends, pages, iterators, phases."""

from itertools import product

import pytest

from kclrun.errors import (
    InvalidRequest,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.local import service as service_module
from kclrun.local import shard_log
from kclrun.local.hash_ranges import even_ranges
from kclrun.local.iterators import ShardQuery
from kclrun.local.limits import Storage
from kclrun.local.sequence_numbers import Numbering, ParsedNumber, parse
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.local.shard_log import ShardLog
from kclrun.local.stream import PutEntry
from kclrun.model.record import IteratorType
from kclrun.model.shard import HASH_KEY_MAX, HashRange, hash_key_of
from tests.support.tables import over_rows

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


@pytest.fixture
def kinesis():
    return service()


@pytest.fixture
def stream(kinesis):
    """A stream of one shard."""
    return made(kinesis)


def test_the_hash_key_of_a_partition_key_is_its_md5():
    # RFC 1321's test suite: MD5 ("abc") = 900150983cd24fb0d6963f7d28e17f72.
    assert hash_key_of("abc") == 0x900150983CD24FB0D6963F7D28E17F72


@pytest.mark.parametrize(("hours", "longer"), [(8761, True), (23, False), (12, True), (48, False)])
def test_a_retention_out_of_bounds_or_in_the_wrong_direction_is_refused(
    kinesis, stream, hours, longer
):
    with pytest.raises(InvalidRequest) as refusal:
        kinesis.set_retention(stream, hours, START, longer=longer)

    word = {12: "must be between 24 and 8760", 48: "can not be greater than existing retention per"}
    assert word.get(hours, "must be between") in str(refusal.value)


def test_a_retention_may_be_set_to_what_it_is_and_is_never_shortened_by_its_longer_call(
    kinesis, stream
):
    for hours, longer in ((24, True), (24, False), (8760, True), (48, False), (48, True)):
        kinesis.set_retention(stream, hours, START, longer=longer)

    with pytest.raises(InvalidRequest, match=r"\(47 hours\) .* less than .* \(48 hours\)"):
        kinesis.set_retention(stream, 47, START, longer=True)


WHOLE = HashRange(0, HASH_KEY_MAX)
SIZES = (1, 2, 3, 4, 5)


@pytest.mark.parametrize("batch", [1, 2, 1024])
@pytest.mark.parametrize("trimmed", range(len(SIZES) + 1))
def test_a_trimmed_shard_reads_as_a_list_without_its_beginning(monkeypatch, batch, trimmed):
    """However many trimmed records its lists still hold."""
    monkeypatch.setattr(shard_log, "_TRIM_BATCH", batch)
    storage, log, count = Storage(), ShardLog(0, WHOLE, (), START), len(SIZES)
    records = [log.append(b"x", "k", size, START + at, storage) for at, size in enumerate(SIZES)]
    for horizon in range(trimmed + 1):
        log.trim(START + horizon, storage)

    assert (log.start, log.end) == (trimmed, count)
    assert storage.used_bytes == sum(size + 300 for size in SIZES[trimmed:])
    dropped = {1: trimmed, 2: trimmed // 2 * 2}.get(batch, 0) if trimmed < count else count
    assert len(log._records) == count - dropped
    for position, most, size in product(range(count + 1), range(4), range(1, 12)):
        rest = [*range(max(position, trimmed), count)][:most]
        fits = [at for at in rest if sum(SIZES[rest[0] : at + 1]) <= size]
        assert log.page(position, most, size) == [records[at] for at in fits or rest[:1]]
    for first, last in product(range(trimmed, count + 1), repeat=2):
        assert log.size_between(first, last) == sum(SIZES[first:last])
    for at in range(trimmed, count):
        assert log.arrival_of(at) == START + at
    for at in range(count + 1):
        assert log.position_at(START + at) == log.position_at(START + at - 0.5) == max(at, trimmed)
        # What was read up to there; said by a clock that was set back, too.
        for now in (START - 100, START + 100):
            number = parse(log.number_at(at, now))
            assert log.position_of(number, after=True) == max(at, trimmed)
    for at, record in enumerate(records):
        number = parse(record.sequence_number)
        assert log.position_of(number, after=False) == max(at, trimmed)
        assert log.position_of(number, after=True) == max(at + 1, trimmed)
    never = parse(str(log.numbering.number(count + 1, int(START))))
    assert log.position_of(never, after=False) == count
    log.free(storage)
    assert storage.used_bytes == 0


def test_a_deleted_stream_gives_its_storage_back_and_its_iterators_find_nothing(kinesis, stream):
    put(kinesis, stream, b"x")
    iterator = from_start(kinesis, stream, START)

    kinesis.delete_stream(stream, START)
    assert stream.status(START) == "DELETING"
    made(kinesis, at=START + 1)

    assert kinesis.storage.used_bytes == 0
    with pytest.raises(NotFound):
        read(kinesis, iterator, START + 1)


@pytest.mark.parametrize("position", range(0, 60, 7))
def test_an_iterator_with_one_character_changed_is_refused(kinesis, position):
    iterator = from_start(kinesis, made(kinesis), START)
    changed = "A" if iterator[position] != "A" else "B"

    for other in (changed + iterator[position + 1 :], "!" + iterator[position:]):
        with pytest.raises(InvalidRequest):
            read(kinesis, iterator[:position] + other, START)


def test_a_page_filled_to_its_limit_does_not_end_the_shard_yet(kinesis, stream):
    put(kinesis, stream, b"last")
    kinesis.split_shard(stream, FIRST, 2**127, START + 1)

    page = read(kinesis, from_start(kinesis, stream, START + 1), START + 1, limit=1)
    after = read(kinesis, page.next_iterator, START + 1)

    assert (data_of(page), page.children) == ([b"last"], ())
    assert (data_of(after), after.next_iterator, len(after.children)) == ([], None, 2)


def test_a_page_is_bounded_by_ten_mebibytes(kinesis, stream):
    for _ in range(11):
        put(kinesis, stream, b"x" * (MIB - 1))

    page = read(kinesis, from_start(kinesis, stream, START), START)

    assert len(page.records) == 10
    assert len(read(kinesis, page.next_iterator, START).records) == 1


def test_a_page_is_bounded_by_ten_thousand_records(kinesis, stream):
    for _ in range(10_001):
        put(kinesis, stream)

    page = read(kinesis, from_start(kinesis, stream, START), START)

    assert len(page.records) == 10_000
    with pytest.raises(InvalidRequest):
        read(kinesis, page.next_iterator, START, limit=10_001)


def test_the_bound_of_a_record_counts_data_and_key_and_may_be_raised(kinesis, stream):
    put(kinesis, stream, b"x" * (MIB - 1))
    with pytest.raises(InvalidRequest):
        put(kinesis, stream, b"x" * MIB)

    stream.record_bytes_max = 10 * MIB
    put(kinesis, stream, b"x" * (10 * MIB - 1))


def test_put_records_takes_nothing_if_one_record_is_too_large(kinesis, stream):
    with pytest.raises(InvalidRequest) as refusal:
        kinesis.put_many(stream, [PutEntry(b"", "k"), PutEntry(b"x" * MIB, "secret-key")], START)

    assert "secret-key" not in str(refusal.value)
    assert data_of(read(kinesis, from_start(kinesis, stream, START), START)) == []


@pytest.mark.parametrize(
    "hash_key", ["-1", str(HASH_KEY_MAX + 1), "", "1.5", "0" * 40, "9" * 5000, "¹", "\u0661"]
)
def test_an_explicit_hash_key_that_is_none_is_refused(kinesis, hash_key):
    with pytest.raises(InvalidRequest):
        kinesis.put(made(kinesis), PutEntry(b"", "k", hash_key), START)


@pytest.mark.parametrize("key", ["", None, "k" * 257])
def test_a_partition_key_has_one_to_256_characters(kinesis, stream, key):
    put(kinesis, stream, key="é" * 256)

    with pytest.raises(InvalidRequest, match="PartitionKey of the record must have 1 to 256 char"):
        kinesis.put(stream, PutEntry(b"", key), START)


def test_the_store_is_filled_to_its_last_byte():
    kinesis = service(stored_bytes_max=1301)
    stream = made(kinesis)

    with pytest.raises(Throttled, match="0 of at most 1301 bytes"):
        put(kinesis, stream, b"x" * 1001)
    put(kinesis, stream, b"x" * 1000)
    with pytest.raises(Throttled, match="1301 of at most 1301 bytes"):
        put(kinesis, stream)


def test_a_full_store_forgets_what_is_expired_before_it_refuses():
    kinesis = service(stored_bytes_max=100_000)
    stream = made(kinesis)
    put(kinesis, stream, b"x" * 90_000)

    refused = kinesis.put_many(stream, [PutEntry(b"x" * 90_000, "k")], START + 1)
    accepted = kinesis.put_many(stream, [PutEntry(b"x" * 90_000, "k")], START + DAY + 1)

    put(kinesis, stream, b"x" * 9_500, at=START + 2 * DAY + 2)
    put(kinesis, stream, b"x" * 90_000, at=START + 3 * DAY + 3)
    assert refused[0].error_code == "ProvisionedThroughputExceededException"
    assert "100000 bytes" in refused[0].error_message
    assert accepted[0].error_code is None


def test_a_stream_settles_after_its_time_and_refuses_what_aws_refuses_before():
    kinesis = service(settle_s=5.0)
    stream = made(kinesis)
    assert stream.status(START + 4) == "CREATING"
    with pytest.raises(NotFound):
        put(kinesis, stream, at=START + 4)
    with pytest.raises(NotFound):
        kinesis.put_many(stream, [PutEntry(b"", "k")], START + 4)

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

    stream.merge(*children, START + 10)
    assert stream.status(START + 14) == "UPDATING"
    kinesis.update_shard_count(stream, 2, START + 15)
    assert stream.status(START + 19) == "UPDATING"
    token = kinesis.list_shards(stream, ShardQuery(), 1, START + 20).next_token

    kinesis.delete_stream(stream, START + 20)
    assert stream.status(START + 24) == "DELETING"
    assert (stream.shards(START + 24), kinesis.open_shard_count) == ([], 0)
    assert kinesis.list_more_shards(token, 1, START + 24).shards == []
    with pytest.raises(Unavailable, match="already exists"):
        made(kinesis, at=START + 24)
    with pytest.raises(NotFound, match="The stream of this NextToken does not exist any more"):
        kinesis.list_more_shards(token, 1, START + 25)
    with pytest.raises(NotFound):
        kinesis.stream("s", None, START + 25)
    assert kinesis.streams(START + 25) == []
    kinesis.delete_stream(made(kinesis, at=START + 30), START + 35)
    made(kinesis, at=START + 40)


ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/s"


@pytest.mark.parametrize(
    ("name", "arn", "refusal"),
    [
        ("s", None, None),
        (None, ARN, None),
        ("s", ARN, None),
        (None, None, InvalidRequest),
        ("t", ARN, InvalidRequest),
        ("t", None, NotFound),
        (None, f"{ARN}t", NotFound),
        (None, ARN.replace("us-east-1", "eu-west-1"), NotFound),
    ],
)
def test_a_stream_is_found_by_its_name_or_arn_or_by_both_if_they_agree(
    kinesis, stream, name, arn, refusal
):
    if refusal is None:
        assert kinesis.stream(name, arn, START) is stream
    else:
        with pytest.raises(refusal):
            kinesis.stream(name, arn, START)


def test_an_iterator_is_of_the_stream_that_a_request_names(kinesis):
    iterator = from_start(kinesis, made(kinesis), START)

    kinesis.fetch(iterator, 1, START, arn=ARN)
    with pytest.raises(InvalidRequest, match="StreamARN does not match"):
        kinesis.fetch(iterator, 1, START, arn=f"{ARN}t")


@pytest.mark.parametrize(
    ("current", "count", "is_refused"),
    [(4, 8, False), (4, 9, True), (4, 2, False), (5, 2, True), (5, 3, False), (3, 1, True)],
)
def test_shards_are_at_most_doubled_and_at_least_halved(kinesis, current, count, is_refused):
    stream = made(kinesis, shards=current)

    if is_refused:
        with pytest.raises(InvalidRequest):
            kinesis.update_shard_count(stream, count, START)
    else:
        kinesis.update_shard_count(stream, count, START)
        assert [shard.hash_range for shard in stream.open_shards()] == even_ranges(count)


@pytest.mark.parametrize(
    ("shard", "at", "is_refused"),
    [
        *((0, at, is_refused) for at, is_refused in ((0, True), (1, True), (2, False))),
        *(
            (0, 2**127 - minus, is_refused)
            for minus, is_refused in ((0, True), (1, True), (2, False))
        ),
        *(
            (1, 2**127 + plus, is_refused)
            for plus, is_refused in ((0, True), (1, True), (2, False))
        ),
    ],
)
def test_a_shard_is_cut_inside_of_its_range(kinesis, shard, at, is_refused):
    stream = made(kinesis, shards=2)
    shard_id = f"shardId-{shard:012d}"

    if is_refused:
        with pytest.raises(InvalidRequest, match="NewStartingHashKey"):
            kinesis.split_shard(stream, shard_id, at, START)
    else:
        kinesis.split_shard(stream, shard_id, at, START)
        assert at in {each.hash_range.start for each in stream.open_shards()}


def test_an_iterator_begins_at_a_record_or_behind_it_and_takes_no_number_of_another_shard(kinesis):
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
    for number, said in (("1", "did not come from this shard"), (None, "Must specify starting")):
        with pytest.raises(InvalidRequest, match=said):
            kinesis.iterator(
                stream, mine, IteratorType.AT_SEQUENCE_NUMBER, START, sequence_number=number
            )


def test_a_time_may_be_as_far_ahead_as_an_arrival_is_rounded(kinesis, stream):
    def at(timestamp):
        kinesis.iterator(stream, FIRST, IteratorType.AT_TIMESTAMP, START, timestamp=timestamp)

    at(START + 0.001)
    for timestamp in (START + 0.002, None):
        with pytest.raises(InvalidRequest, match="timestampInMillis"):
            at(timestamp)


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
    kinesis.update_shard_count(stream, 2, START)
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


A_NUMBER = Numbering(1_700_000_000, 0).number(9, 1_700_000_001)
NO_NUMBERS = [str((3 << 184) | 2), str(A_NUMBER + 1), f"0{A_NUMBER}"]
NO_NUMBERS += [str(A_NUMBER).translate({ord("4"): "\u0664"})]


@over_rows("text", ["", "1", "x", "9" * 58, "9" * 5000, str(2**188), *NO_NUMBERS])
def test_a_text_of_others_is_no_sequence_number(text):
    assert parse(text) is None


def test_the_token_of_a_listing_lives_for_five_minutes(kinesis):
    stream = made(kinesis, shards=3)
    page = kinesis.list_shards(stream, ShardQuery(), 2, START)

    more = kinesis.list_more_shards(page.next_token, 2, START + 300)
    assert ([shard.number for shard in more.shards], more.next_token) == ([2], None)
    assert kinesis.list_shards(stream, ShardQuery(), 3, START).next_token is None
    for token in ("x", page.next_token[:-4]):
        with pytest.raises(InvalidRequest, match="Invalid NextToken"):
            kinesis.list_more_shards(token, 2, START)
    with pytest.raises(ServiceError) as refusal:
        kinesis.list_more_shards(page.next_token, 2, START + 301)
    assert refusal.value.code == "ExpiredNextTokenException"


@pytest.mark.parametrize(
    "query",
    [
        ShardQuery("AT_TIMESTAMP"),
        ShardQuery("AT_LATEST", timestamp=START),
        ShardQuery("AFTER_SHARD_ID"),
        ShardQuery("FROM_TRIM_HORIZON", shard_id=FIRST),
    ],
)
def test_a_filter_whose_fields_do_not_go_together_is_refused(kinesis, query):
    with pytest.raises(InvalidRequest):
        kinesis.list_shards(made(kinesis), query, 10, START)


@pytest.mark.parametrize(
    ("kind", "after", "listed"),
    [
        ("AT_TIMESTAMP", 9, "0"),
        ("AT_TIMESTAMP", 10, "012"),
        ("AT_TIMESTAMP", 11, "12"),
        ("AT_TIMESTAMP", -1, "0"),  # as at the trim horizon
        ("FROM_TIMESTAMP", 10, "012"),
        ("FROM_TIMESTAMP", 11, "12"),
    ],
)
def test_a_shard_that_is_closed_at_a_time_is_listed_as_of_that_time(
    kinesis, stream, kind, after, listed
):
    kinesis.split_shard(stream, FIRST, 2**127, START + 10)

    page = kinesis.list_shards(stream, ShardQuery(kind, timestamp=START + after), 9, START + 20)

    assert "".join(str(shard.number) for shard in page.shards) == listed
