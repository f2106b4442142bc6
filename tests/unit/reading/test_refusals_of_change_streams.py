"""DynamoDB Streams refuses a place with each of two operations: both are handled alike."""

import json
from types import SimpleNamespace

import pytest

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound
from kclrun.lease.policy import Pacing
from kclrun.model.reading import TRIMMED_CODE, PageCursor
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import ALL_HASH_KEYS
from kclrun.ports import next_page
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.worker.delivery_queue import DeliveryQueue, Exhausted, QueueLimits
from kclrun.worker.fetching import FetchPlan, FetchThread, ShardSource
from kclrun.worker.sharing import daemon_thread
from tests.support.change_streams import ModelChanges
from tests.unit.worker.one_shard import fetch_host

OLDEST = StartPoint(IteratorType.TRIM_HORIZON)
OPERATIONS = ("GetShardIterator", "GetRecords")
FAILOVER_S, HOUR_S = 10.0, 3600.0


class Refusing(ModelChanges):
    """`refuse` is raised by one operation, at every place but the oldest record if `but_oldest`."""

    def __init__(self, operation, error, *, but_oldest):
        super().__init__(lives_s=30 * HOUR_S)
        self.operation, self.error, self.but_oldest = operation, error, but_oldest
        self.is_refusing = False
        self.kind = "TRIM_HORIZON"
        self.asked = 0

    def call(self, operation, body):
        if operation.name == "GetShardIterator":
            self.kind = json.loads(body)["ShardIteratorType"]
        is_there = not self.but_oldest or self.kind != "TRIM_HORIZON"
        if operation.name == self.operation and self.is_refusing and is_there:
            self.asked += 1
            raise self.error
        return super().call(operation, body)


def numbers(page):
    return [json.loads(record.data)["dynamodb"]["NewImage"]["n"]["N"] for record in page.records]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("is_reopened", [False, True])
def test_a_place_that_was_trimmed_is_left_for_the_oldest_record(operation, is_reopened):
    trimmed = InvalidRequest("past the oldest record", code=TRIMMED_CODE)
    changes = Refusing(operation, trimmed, but_oldest=True)
    shard = changes.put("a", 1)
    cursor = PageCursor(OLDEST)
    assert numbers(next_page(changes.reader, shard, cursor)) == ["1"]
    changes.pause(24 * HOUR_S - 60)
    for number in (2, 3):
        changes.put("a", number)
    if is_reopened or operation == "GetShardIterator":
        cursor.failed(ExpiredIterator("expired"))
    else:
        changes.kind = "AFTER_SEQUENCE_NUMBER"
        cursor.opened(changes.reader.iterator(shard, cursor.start))
    changes.is_refusing = True
    changes.pause(120)

    found, refusals = [], 0
    for _ in range(4):
        try:
            found += numbers(next_page(changes.reader, shard, cursor))
        except InvalidRequest:
            refusals += 1

    assert found == ["2", "3"], "each record once, and none before the place"
    assert refusals <= 1
    assert changes.asked <= 1


def test_a_place_that_gets_an_iterator_and_no_records_is_not_asked_for_again():
    """The service refuses it in GetRecords alone. Nothing was trimmed: no record comes twice."""
    trimmed = InvalidRequest("past the oldest record", code=TRIMMED_CODE)
    changes = Refusing("GetRecords", trimmed, but_oldest=True)
    shard = changes.put("a", 1)
    changes.put("a", 2)
    cursor = PageCursor(OLDEST)
    assert numbers(next_page(changes.reader, shard, cursor, 1)) == ["1"]
    cursor.failed(ExpiredIterator("expired"))
    changes.is_refusing = True

    with pytest.raises(InvalidRequest, match="past the oldest record"):
        next_page(changes.reader, shard, cursor)
    assert numbers(next_page(changes.reader, shard, cursor, 1)) == []
    assert numbers(next_page(changes.reader, shard, cursor, 1)) == ["2"]
    assert changes.asked == 1


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_closed_shard_that_is_listed_and_not_found_ends_and_its_child_is_read(operation):
    changes = Refusing(operation, NotFound("no shard"), but_oldest=False)
    shard = changes.put("a", 1)
    changes.roll()
    changes.pause(60.0)
    changes.is_refusing = True
    listed = {each.shard_id: each for each in changes.admin.list_shards()}
    assert not listed[shard].is_open
    queue = DeliveryQueue(QueueLimits(2**20, 10_000), lambda: changes.now)

    def pause(pause_s):
        changes.pause(max(0.0, pause_s))
        return changes.asked < 50

    queue.pause = pause
    expiry = ExpiryWatch(shard, ALL_HASH_KEYS, (), apart_s=FAILOVER_S, may_be_listed=True)
    thread = FetchThread(
        FetchPlan(
            shard_id=shard,
            start=OLDEST,
            checkpoint=TRIM_HORIZON,
            expiry=expiry,
            pacing=Pacing(1.0),
        ),
        ShardSource(changes.reader, changes.admin),
        queue,
        fetch_host(broke=lambda error: pytest.fail(str(error))),
        threads=SimpleNamespace(make_thread=daemon_thread, rest_s=lambda _, pause_s: pause_s),
        now=lambda: changes.now,
    )
    began = changes.now

    thread._read()

    assert queue._exhausted == Exhausted((), is_expired=True)
    assert FAILOVER_S <= changes.now - began <= 3 * FAILOVER_S
