"""The contract of a stream, where the stream is that of a DynamoDB table: what readers, the lease
manager and the end of a shard rely on, over the model and over the embedded AWS's HTTP.
"""

import json
import time
import uuid
from itertools import pairwise

import pytest

from kclrun.aws.changes.stream import admin_of, reader_of
from kclrun.aws.wire import WireClient
from kclrun.errors import (
    ExpiredIterator,
    InvalidRequest,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.local.changes.model import ChangeSettings
from kclrun.local.server import start_embedded
from kclrun.model.reading import HeadWatch, PageCursor
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import ShardFilter, next_page
from tests.patience import HUNG_S
from tests.support.change_streams import ModelChanges
from tests.support.clients import client_of

HOUR_S = 3600.0
OLDEST = StartPoint(IteratorType.TRIM_HORIZON)


class EmbeddedChanges:
    """A table of the embedded AWS, written by boto3, read by the product's wire client."""

    def __init__(self, endpoint):
        self._dynamodb = client_of("dynamodb", endpoint)
        self._table = f"orders-{uuid.uuid4().hex[:8]}"
        made = self._dynamodb.create_table(
            TableName=self._table,
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
            StreamSpecification={"StreamEnabled": True, "StreamViewType": "NEW_AND_OLD_IMAGES"},
        )
        arn = made["TableDescription"]["LatestStreamArn"]
        self._client = WireClient(
            WireEndpoint(endpoint, "us-east-1", "us-east-1"),
            lambda: WireCredentials("key", "secret"),
            service="dynamodb",
        )
        self.reader, self.admin = reader_of(self._client, arn), admin_of(self._client, arn)

    @property
    def now(self):
        return time.time()

    def put(self, key, n=0):
        self._dynamodb.put_item(TableName=self._table, Item={"id": {"S": key}, "n": {"N": str(n)}})

    def remove(self, key):
        self._dynamodb.delete_item(TableName=self._table, Key={"id": {"S": key}})

    def close(self):
        self._client.close()
        self._dynamodb.close()


@pytest.fixture(scope="module")
def rolling():
    """Shards of this AWS are open for a second."""
    settings = ChangeSettings(lives_s=1.0, partitions=2, partitions_max=3, listed_after_s=0.2)
    with start_embedded(changes=settings) as embedded:
        yield embedded.endpoint


@pytest.fixture
def embedded(rolling):
    changes = EmbeddedChanges(rolling)
    yield changes
    changes.close()


@pytest.fixture(params=["model", pytest.param("embedded", marks=pytest.mark.seconds)])
def changes(request):
    return ModelChanges() if request.param == "model" else request.getfixturevalue("embedded")


def read(changes, shard_id, start=OLDEST, pages_max=50, limit=10_000):
    """The records until the tip or the end; and the last page."""
    cursor, records = PageCursor(start), []
    for _ in range(pages_max):
        page = next_page(changes.reader, shard_id, cursor, limit)
        records += page.records
        if page.is_end or page.is_empty_tip:
            return records, page
    raise AssertionError("neither a tip nor an end")


def numbers(records):
    return [int(json.loads(r.data)["dynamodb"]["NewImage"]["n"]["N"]) for r in records]


def everything(changes):
    """The records of all shards, parents before children. A shard that closed while they were put
    has a child that may not be listed yet."""
    shards, without_child = (), True
    while without_child:
        shards = changes.admin.list_shards()
        parents = {shard.parent_shard_id for shard in shards}
        without_child = any(not s.is_open and s.shard_id not in parents for s in shards)
    return [r for shard in shards for r in read(changes, shard.shard_id)[0]]


# Over both services.


def test_a_record_is_the_change_event_as_the_service_wrote_it(changes):
    changes.put("a", 1)

    (record,) = everything(changes)

    event = json.loads(record.data)
    assert event["eventName"] in {"INSERT", "MODIFY"}
    assert event["dynamodb"]["NewImage"] == {"id": {"S": "a"}, "n": {"N": "1"}}
    assert record.sequence_number == event["dynamodb"]["SequenceNumber"]
    assert record.partition_key == '{"id":{"S":"a"}}'
    assert abs(record.approximate_arrival_timestamp - changes.now) < HUNG_S


def test_numbers_ascend_as_numbers_where_their_texts_differ_in_length(changes):
    for n in range(60):
        changes.put("a", n)

    records = everything(changes)

    assert numbers(records) == list(range(60))
    assert len({len(r.sequence_number) for r in records}) == 2
    assert sorted(records, key=lambda r: r.position) == records
    middle = records[31]
    of_shard, _ = read(changes, changes.admin.list_shards()[0].shard_id)
    shard = next(
        each.shard_id
        for each in changes.admin.list_shards()
        if middle in read(changes, each.shard_id)[0]
    )
    of_shard = read(changes, shard)[0]
    index = of_shard.index(middle)
    for kind, first in (("AT_SEQUENCE_NUMBER", index), ("AFTER_SEQUENCE_NUMBER", index + 1)):
        start = StartPoint(IteratorType(kind), middle.sequence_number)
        assert read(changes, shard, start)[0] == of_shard[first:]


def test_a_summary_says_what_a_stream_of_kinesis_says(changes):
    listed, summary = (), None
    while listed != changes.admin.list_shards():  # no shard rolled meanwhile
        listed, summary = changes.admin.list_shards(), changes.admin.summary()

    assert (summary.status, summary.retention_hours) == ("ACTIVE", 24)
    assert summary.name.startswith("orders")
    parents = {shard.parent_shard_id for shard in listed}
    assert summary.open_shards == sum(shard.shard_id not in parents for shard in listed)
    assert abs(summary.created_at - changes.now) < HUNG_S


def test_what_the_service_does_not_know_is_not_found(changes):
    shard = changes.admin.list_shards()[0].shard_id
    with pytest.raises(NotFound):
        changes.reader.iterator(
            "shardId-00000000000000000009-00000009", StartPoint(IteratorType.LATEST)
        )
    with pytest.raises(InvalidRequest):
        changes.reader.fetch("nonsense", 10)
    with pytest.raises(InvalidRequest):
        changes.admin.list_shards(ShardFilter("AT_TIMESTAMP", changes.now))
    iterator = changes.reader.iterator(shard, StartPoint(IteratorType.TRIM_HORIZON))
    assert changes.reader.fetch(iterator, 10).body_bytes > 0


@pytest.mark.seconds
def test_shards_roll_by_themselves_and_the_changes_of_an_item_stay_in_order(embedded):
    deadline, n = time.monotonic() + HUNG_S, 0
    while len(embedded.admin.list_shards()) < 8:
        assert time.monotonic() < deadline, "shards do not roll"
        embedded.put(f"k{n % 5}", n)
        n += 1
    embedded.put("k0", n)
    embedded.put("k0", n)  # no change, no record
    embedded.remove("k0")

    shards = embedded.admin.list_shards()
    records = everything(embedded)

    assert [shard.parents for shard in shards[:2]] == [(), ()]
    assert all(len(shard.parents) == 1 for shard in shards[2:])
    events = [json.loads(r.data) for r in records]
    assert len(records) == n + 2
    assert [e["eventName"] for e in events].count("REMOVE") == 1
    for key in range(5):
        of_key = [
            int(e["dynamodb"]["NewImage"]["n"]["N"])
            for e in events
            if e["dynamodb"]["Keys"]["id"]["S"] == f"k{key}" and e["eventName"] != "REMOVE"
        ]
        assert of_key == sorted(of_key)


# In the model's own time.


def test_a_closed_shard_ends_without_children_and_the_listing_names_them_late():
    changes = ModelChanges(partitions_max=2, listed_after_s=5.0)
    parent = changes.put("a", 1)
    changes.roll()

    records, page = read(changes, parent)
    assert (numbers(records), page.is_end, page.children) == ([1], True, ())
    seen = []
    for _ in range(3):
        listed = changes.admin.list_shards()
        assert not listed[0].is_open
        children = sum(parent in shard.parents for shard in listed)
        seen.append((children, changes.admin.summary().open_shards))
        changes.pause(5.0)
    assert seen == [(0, 1), (1, 1), (2, 2)]


def test_a_thousand_shards_are_listed_at_the_pace_of_the_service_though_pages_are_throttled():
    changes = ModelChanges(partitions=1_000, partitions_max=1_000)
    asked = []

    def throttle_thrice(operation):
        asked.append(changes.now)
        if len(asked) in {1, 5, 6}:
            raise Throttled("LimitExceededException", operation=operation)

    changes.between = throttle_thrice

    assert len(changes.admin.list_shards()) == 1_000
    assert len(asked) == 13, "a page that was refused is asked for again, and no other"
    assert min(later - sooner for sooner, later in pairwise(asked)) >= 0.099
    assert asked[-1] - asked[0] <= 2.5, "a lease process renews after it"

    def refuse(operation):
        asked.append(changes.now)
        raise Throttled("LimitExceededException", operation=operation)

    changes.between, asked = refuse, []
    with pytest.raises(Throttled):
        changes.admin.list_shards()
    assert len(asked) == 4


def test_a_listing_whose_pages_are_of_different_moments_shows_no_open_parent():
    changes = ModelChanges(partitions=150)
    asked = []

    def roll_between_pages(operation):
        asked.append(operation)
        if len(asked) == 2:
            changes.roll()

    changes.between = roll_between_pages
    shards = changes.admin.list_shards()

    assert len(asked) == 3
    parents = {parent for shard in shards for parent in shard.parents}
    assert len(parents) == 150
    assert not any(shard.is_open for shard in shards if shard.shard_id in parents)


@pytest.mark.parametrize("is_listed", [False, True])
def test_the_shards_at_latest_have_each_open_shard_or_its_nearest_listed_ancestor(is_listed):
    changes = ModelChanges(partitions=2, listed_after_s=0.0 if is_listed else 5.0)
    first = [shard.shard_id for shard in changes.admin.list_shards()]
    changes.roll()

    at_latest = changes.admin.list_shards(ShardFilter("AT_LATEST"))
    at_horizon = changes.admin.list_shards(ShardFilter("AT_TRIM_HORIZON"))

    assert [shard.shard_id for shard in at_horizon] == first
    if is_listed:
        assert [shard.parents for shard in at_latest] == [(each,) for each in first]
    else:
        assert [shard.shard_id for shard in at_latest] == first


def test_reading_from_a_time_leaves_out_what_is_older_and_nothing_else():
    changes = ModelChanges()
    made = {}
    for n in range(3000):
        changes.pause(0.001)
        made[n] = changes.now
        shard = changes.put("a", n)
    start = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=changes.now - 0.5)
    wanted = [n for n, at in made.items() if at >= int(start.timestamp)]

    cursor, pages, found = PageCursor(start), [], []
    while not pages or not pages[-1].is_empty_tip:
        pages.append(next_page(changes.reader, shard, cursor))
        found += pages[-1].records

    assert 500 <= len(wanted) < 1500
    assert numbers(found) == wanted
    assert not pages[0].records
    assert not pages[0].is_empty_tip, "there is more, though all of the page was left out"
    # An iterator that is lost before the first record begins anew, and after it goes on.
    cursor = PageCursor(start)
    next_page(changes.reader, shard, cursor)
    cursor.failed(ExpiredIterator("too old"))
    assert numbers(read(changes, shard, cursor.start)[0]) == numbers(found)


def test_a_closed_shard_whose_records_are_all_older_than_the_start_is_read_to_its_end():
    changes = ModelChanges()
    shard = changes.put("a", 1)
    changes.roll()
    changes.pause(60.0)

    start = StartPoint(IteratorType.AT_TIMESTAMP, timestamp=changes.now - 30.0)
    records, page = read(changes, shard, start)

    assert (records, page.is_end) == ([], True)


def test_lag_is_the_age_of_the_last_record_and_no_lag_means_that_the_service_had_no_more():
    changes = ModelChanges()
    shard = changes.put("a")
    changes.pause(90.0)

    cursor = PageCursor(OLDEST)
    lags = [next_page(changes.reader, shard, cursor).millis_behind_latest for _ in range(2)]

    assert lags == [90_000, 0]


def test_an_iterator_lives_for_a_quarter_of_an_hour():
    changes = ModelChanges()
    shard = changes.put("a")
    iterator = changes.reader.iterator(shard, StartPoint(IteratorType.TRIM_HORIZON))
    changes.pause(901.0)

    with pytest.raises(ExpiredIterator):
        changes.reader.fetch(iterator, 10)


def test_a_position_that_was_trimmed_goes_on_at_the_oldest_record_and_the_loss_is_reported():
    changes = ModelChanges(lives_s=30 * HOUR_S)
    shard = changes.put("a", 1)
    (first,), _ = read(changes, shard)
    changes.pause(2 * HOUR_S)
    changes.put("a", 2)
    changes.pause(23 * HOUR_S)
    start = StartPoint(IteratorType.AT_SEQUENCE_NUMBER, first.sequence_number)

    cursor, head = PageCursor(start), HeadWatch(start)
    page = next_page(changes.reader, shard, cursor)

    assert numbers(page.records) == [2]
    assert head.took(page)
    head.know(changes.admin.summary().retention_hours * HOUR_S)
    assert "records may have expired" in head.loss()


def test_records_that_are_trimmed_under_an_iterator_cost_no_more_than_a_new_one():
    changes = ModelChanges(lives_s=30 * HOUR_S)
    shard = changes.put("a", 1)
    changes.put("a", 2)
    cursor = PageCursor(OLDEST)
    next_page(changes.reader, shard, cursor, 1)
    changes.pause(24 * HOUR_S - 60)
    changes.put("a", 3)
    cursor.opened(changes.reader.iterator(shard, cursor.start))
    changes.pause(120)

    with pytest.raises(ServiceError, match="TrimmedDataAccess"):
        next_page(changes.reader, shard, cursor)

    assert numbers(next_page(changes.reader, shard, cursor).records) == [3]


def test_a_shard_is_gone_a_day_after_it_closed():
    changes = ModelChanges()
    parent = changes.put("a")
    changes.roll()
    changes.pause(24 * HOUR_S)

    assert parent not in {shard.shard_id for shard in changes.admin.list_shards()}
    with pytest.raises(NotFound):
        changes.reader.iterator(parent, StartPoint(IteratorType.TRIM_HORIZON))


def test_a_page_has_at_most_a_thousand_records_and_a_megabyte():
    changes = ModelChanges()
    for n in range(1200):
        shard = changes.put("a", n)
    for n in range(4):
        changes.put("a", n, image={"S": "x" * 400_000})

    cursor, sizes = PageCursor(OLDEST), []
    while page := next_page(changes.reader, shard, cursor).records:
        sizes.append(len(page))

    assert sizes[0] == 1000
    assert max(sizes[1:]) <= 202
    assert sum(sizes) == 1204


@pytest.mark.parametrize(
    ("operation", "members"),
    [
        ("DescribeStream", b'"Limit": 0'),
        ("DescribeStream", b'"ExclusiveStartShardId": "\xff"'),
        ("DescribeStream", b'"more": ' + b"[" * 100_000),
        (
            "GetShardIterator",
            b'"ShardId": "%s", "ShardIteratorType": "AT_SEQUENCE_NUMBER", "SequenceNumber": "'
            + b"1" * 5_000
            + b'"',
        ),
    ],
)
def test_a_malformed_request_is_refused(operation, members):
    changes = ModelChanges()
    shard = changes.put("a")
    arn, members = changes.stream.arn.encode(), members.replace(b"%s", shard.encode())
    body = b'{"StreamArn": "%s", %s}' % (arn, members)

    assert changes.refused(operation, body) in {"SerializationException", "ValidationException"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",  # it would be the end of the shard
        b'{"Records":[{}]}',
        b'{"Records":[{"dynamodb":{"Keys":{},"SequenceNumber":"x"}}]}',
        b'{"Records":['
        + b",".join(b'{"dynamodb":{"Keys":{},"SequenceNumber":"%d"}}' % n for n in (10, 9))
        + b"]}",
    ],
)
def test_a_garbled_answer_is_unavailable_and_quotes_nothing(body):
    changes = ModelChanges()
    shard = changes.put("secret")
    iterator = changes.reader.iterator(shard, StartPoint(IteratorType.TRIM_HORIZON))
    answer = changes.call

    def garbled(operation, request):
        reply = answer(operation, request)
        return type(reply)(reply.status, body, reply.date_at)

    changes.call = garbled
    with pytest.raises(Unavailable) as raised:
        changes.reader.fetch(iterator, 10)
    assert "Keys" not in str(raised.value)
