"""`kclrun.read` against the embedded stream: everything once, in order, and nothing left open."""

import collections
import gc
import itertools
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

import kclrun
from kclrun.aws.kinesis import PollingReader
from kclrun.errors import AccessDenied, DataLoss, InvalidRequest, NotFound, Throttled, Unavailable
from kclrun.local.server import start_embedded
from kclrun.model.record import Record
from kclrun.model.shard import ALL_HASH_KEYS, Shard
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import Site
from tests.support.descriptors import open_descriptors

pytestmark = pytest.mark.seconds
NUMBERS = itertools.count()
SOON = timedelta(seconds=HUNG_S)


@pytest.fixture(scope="module")
def embedded():
    with start_embedded() as started:
        yield started


@pytest.fixture(autouse=True)
def no_identity(monkeypatch):
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def site_of(embedded, tmp_path):
    return lambda shards: Site(tmp_path, embedded.endpoint, f"read-{next(NUMBERS)}", shards)


def read(site, **more):
    settings = site.aws.settings
    return kclrun.read(settings.stream, endpoint=settings.aws.endpoint, **more)


def rows(first, last):
    """(key, text) pairs with growing numbers: they tell the order within a key."""
    return [(f"key{number % 29}", str(number)) for number in range(first, last)]


def numbers(records):
    return sorted(int(record.data) for record in records)


def assert_in_order(records):
    """By key, over all shards; and by position, in each shard."""
    by_key, by_shard = collections.defaultdict(list), collections.defaultdict(list)
    for record in records:
        by_key[record.partition_key].append(int(record.data))
        by_shard[record.shard_id].append(record.position)
    assert all(each == sorted(each) for each in by_key.values())
    assert all(each == sorted(set(each)) for each in by_shard.values())


def reading_threads():
    return [each for each in threading.enumerate() if each.name.startswith("kclrun-read-")]


def wait_until_no_thread_reads():
    until(lambda: not reading_threads())


@pytest.mark.parametrize("aggregate", [False, True])
def test_thousands_of_records_of_three_shards_come_once_and_in_order(site_of, aggregate):
    site = site_of(3)
    site.put(rows(0, 6_000), aggregate=aggregate)
    before = datetime.now(UTC)

    records = list(read(site, decode="json"))

    assert numbers(records) == list(range(6_000))
    assert_in_order(records)
    first = records[0]
    assert {record.shard_id for record in records} == {s.shard_id for s in site.open_shards()}
    assert all(isinstance(record, Record) for record in records)
    assert all(record.aggregated == aggregate for record in records)
    assert any(record.sub_sequence_number for record in records) == aggregate
    assert first.value == int(first.data)
    assert abs(first.arrived_at - before) < SOON
    assert not reading_threads()


def test_over_a_split_and_a_merge_while_it_reads_children_come_after_their_parents(site_of):
    site = site_of(2)
    site.put(rows(0, 100))
    with read(site, until=None) as reading:
        records = list(itertools.islice(reading, 100))
        site.put(rows(100, 300), aggregate=True)
        lower, _ = site.open_shards()
        site.split(lower)
        site.put(rows(300, 500), aggregate=True)
        _, middle, upper = site.open_shards()
        site.merge(middle, upper)
        site.put(rows(500, 700))
        records += itertools.islice(reading, 600)

    assert numbers(records) == list(range(700))
    assert_in_order(records)
    # Another reading begins with all of them, and ends by itself.
    again = list(read(site))
    assert numbers(again) == list(range(700))
    assert_in_order(again)


def test_up_to_the_tip_children_of_closed_shards_are_read_too(site_of):
    site = site_of(1)
    site.put(rows(0, 50))
    site.split(site.open_shards()[0])
    site.put(rows(50, 100))
    assert numbers(read(site)) == list(range(100))


def test_it_ends_at_the_tip_of_its_beginning_while_records_go_on_arriving(site_of):
    site = site_of(2)
    site.put(rows(0, 100))
    is_over = threading.Event()

    def put():
        for number in itertools.count(100):
            if is_over.wait(0.02):
                return
            site.put(rows(number, number + 1))

    putting = threading.Thread(target=put)
    putting.start()
    try:
        records = list(read(site))
    finally:
        is_over.set()
        putting.join()
    assert set(range(100)) <= set(numbers(records))
    assert_in_order(records)


def instant_of_no_record():
    """An instant that is milliseconds after the last record and before the next: arrival times are
    in milliseconds."""
    ended = time.time()
    until(lambda: time.time() > ended + 0.002)
    instant = time.time()
    until(lambda: time.time() > instant + 0.002)
    return datetime.fromtimestamp(instant, UTC)


def test_between_two_instants_only_the_records_of_that_time_come(site_of):
    site = site_of(2)
    site.put(rows(0, 50))
    start = instant_of_no_record()
    site.put(rows(50, 80))
    end = instant_of_no_record()
    site.put(rows(80, 100))

    assert numbers(read(site, start=start, until=end)) == list(range(50, 80))
    assert numbers(read(site, until=end.isoformat())) == list(range(80))
    assert numbers(read(site, start=start)) == list(range(50, 100))
    assert numbers(read(site, start="1h")) == list(range(100))


def test_from_latest_everything_put_after_the_call_comes_and_nothing_else(site_of):
    site = site_of(3)
    site.put(rows(0, 50))
    with read(site, start="LATEST", until=None) as reading:
        site.put(rows(50, 100))
        assert numbers(itertools.islice(reading, 50)) == list(range(50, 100))


def test_from_positions_reading_goes_on_inside_an_aggregate_and_over_a_split(site_of):
    site = site_of(2)
    site.put(rows(0, 400), aggregate=True)
    seen = list(itertools.islice(read(site), 150))
    positions = {record.shard_id: record.position for record in seen}
    site.split(site.open_shards()[0])
    site.put(rows(400, 500))

    kept = {shard: str(position) for shard, position in positions.items()}
    for start in (positions, kept):
        rest = list(read(site, start=start))
        assert numbers(seen + rest) == list(range(500))
        assert_in_order(seen + rest)


def test_of_named_shards_only_their_own_records_come(site_of):
    site = site_of(2)
    site.put(rows(0, 100))
    by_shard = collections.defaultdict(list)
    for record in read(site):
        by_shard[record.shard_id].append(record.data)
    site.split(site.open_shards()[0])
    assert [record.data for record in read(site, shards="0")] == by_shard["shardId-000000000000"]
    with pytest.raises(NotFound, match="no shard shardId-000000000099"):
        read(site, shards=["99"])


# What it does not hide


def test_a_missing_stream_is_named_at_the_call_with_what_to_do(site_of, embedded):
    name = site_of(1).aws.settings.stream
    with pytest.raises(NotFound) as missing:
        kclrun.read(f"{name}s", endpoint=embedded.endpoint)
    assert f"Did you mean {name}?" in str(missing.value)
    assert "kclrun put --format text --create" in str(missing.value)


def test_a_stream_that_is_deleted_while_it_is_read_is_an_error_and_stays_one(site_of):
    site = site_of(1)
    site.put(rows(0, 10))
    reading = read(site, until=None)
    assert numbers(itertools.islice(reading, 10)) == list(range(10))
    site.call("DeleteStream", StreamName=site.aws.settings.stream)
    for _ in range(2):
        with pytest.raises((NotFound, InvalidRequest)):
            list(reading)
    assert not reading_threads()


def test_missing_credentials_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(AccessDenied, match="no AWS credentials were found"):
        kclrun.read("orders", region="us-east-1")


def test_an_address_of_this_host_where_nothing_listens_is_named_at_once(unused_url):
    with pytest.raises(Unavailable, match=r"nothing listens at 127\.0\.0\.1:"):
        kclrun.read("orders", endpoint=unused_url, start_timeout="1h")


@pytest.fixture
def unused_url():
    with start_embedded() as gone:
        pass
    return gone.endpoint


def test_readers_that_are_throttled_by_each_other_miss_nothing(tmp_path):
    """The service answers five reads a second and shard."""
    with start_embedded(limits=True) as limited:
        site = Site(tmp_path, limited.endpoint, "limited", 1)
        site.put(rows(0, 100))
        seen = [[] for _ in range(4)]
        threads = [
            threading.Thread(target=lambda into=into: into.extend(read(site))) for into in seen
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [numbers(each) for each in seen] == [list(range(100))] * 4


def test_a_shard_that_is_throttled_beyond_the_patience_is_an_error(site_of, monkeypatch):
    def refuse(*_):
        raise Throttled("GetRecords: ProvisionedThroughputExceededException: slow down")

    monkeypatch.setattr(PollingReader, "fetch", refuse)
    with pytest.raises(Throttled, match="shardId-000000000000 could not be read for 1 s"):
        list(read(site_of(1), start_timeout="1s"))


def test_a_closed_shard_that_is_trimmed_before_it_was_read_is_data_loss(site_of, monkeypatch):
    site = site_of(1)
    site.put(rows(0, 10))
    reading = read(site, until=None)
    assert len(list(itertools.islice(reading, 10))) == 10
    admin = type(site.aws.stream)
    child = Shard("shardId-000000000001", ALL_HASH_KEYS, "9", None, "shardId-000000000000")
    monkeypatch.setattr(admin, "list_shards", lambda *_: (child,))
    monkeypatch.setattr(PollingReader, "fetch", _not_found)
    monkeypatch.setattr(PollingReader, "iterator", _not_found)
    with pytest.raises(DataLoss, match="shardId-000000000000 was trimmed before it was read"):
        list(reading)


def _not_found(*_):
    raise NotFound("GetRecords: ResourceNotFoundException", operation="GetRecords")


def test_an_expired_iterator_is_replaced_without_a_record_lost_or_twice(site_of, monkeypatch):
    site = site_of(1)
    site.put(rows(0, 10))
    fetch = PollingReader.fetch
    expired = iter([kclrun.errors.ExpiredIterator("old")])

    def expiring(self, iterator, limit):
        for error in expired:
            raise error
        return fetch(self, iterator, limit)

    monkeypatch.setattr(PollingReader, "fetch", expiring)
    assert numbers(read(site)) == list(range(10))


# What it leaves behind


@pytest.mark.parametrize("how", ["closed", "left", "dropped", "finished", "failed"])
def test_a_reading_leaves_no_thread_and_no_connection(site_of, how, monkeypatch):
    site = site_of(3)
    site.put(rows(0, 2_000))
    before = open_descriptors()
    reading = read(site, until="caught-up" if how == "finished" else None)
    next(reading)
    if how == "closed":
        reading.close()
        reading.close()
        with pytest.raises(ValueError, match="the reading is closed"):
            next(reading)
    elif how == "left":
        with reading:
            next(reading)
    elif how == "dropped":
        del reading
        wait_until_no_thread_reads()
        gc.collect()
    elif how == "finished":
        assert len(list(reading)) == 1_999
        assert list(reading) == []
    else:
        monkeypatch.setattr(PollingReader, "fetch", _denied)
        with pytest.raises(AccessDenied):
            list(reading)
    assert not reading_threads()
    assert open_descriptors() <= before


def _denied(*_):
    raise AccessDenied("GetRecords: not authorized")


def test_an_unread_reading_holds_few_pages(site_of, monkeypatch):
    """Eight threads and a queue of two: however long the stream is, and however slow its user."""
    site = site_of(3)
    site.put(rows(0, 3_000))
    fetched = []
    fetch = PollingReader.fetch

    def small(self, iterator, limit):
        page = fetch(self, iterator, min(limit, 10))
        fetched.append(len(page.records))
        return page

    monkeypatch.setattr(PollingReader, "fetch", small)
    with read(site, until=None) as reading:
        next(reading)
        quiet = 0
        while quiet < 20:  # the threads wait for room now
            count = len(fetched)
            time.sleep(0.05)
            quiet = quiet + 1 if len(fetched) == count else 0
        assert sum(map(bool, fetched)) <= 6


def test_idle_shards_are_asked_once_a_second(site_of, monkeypatch):
    site = site_of(2)
    asked = []
    fetch = PollingReader.fetch

    def counted(self, iterator, limit):
        asked.append(time.monotonic())
        return fetch(self, iterator, limit)

    monkeypatch.setattr(PollingReader, "fetch", counted)
    began = time.monotonic()
    with read(site, start="LATEST", until=datetime.now(UTC) + timedelta(seconds=1)) as reading:
        assert list(reading) == []
    assert len(asked) <= 2 * (time.monotonic() - began + 2)
