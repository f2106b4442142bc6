"""One contract for every store of state versions: a folder, S3, items of a table, and the memory of
other tests."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.outputs import item_tables, s3, state_items
from kclrun.aws.outputs.s3 import Bucket
from kclrun.aws.outputs.state_items import open_state_items
from kclrun.aws.outputs.state_objects import StateObjects
from kclrun.aws.wire import WireReply
from kclrun.errors import OutcomeUnknown, ServiceError, SettingsError, SinkError
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireEndpoint
from kclrun.spark.options import StreamAddress
from kclrun.spark.requests import Connected
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.versions import version_name
from tests.contract.output_places import KEYS, FaultyClient
from tests.support.memory_versions import MemoryVersions, Versions

SHARD = "shardId-000000000007"
FOLDER = "orders/clicks"
NAMES = [version_name(9, number, "0badcafe") for number in range(6)]
BUCKETS = itertools.count()


class Objects:
    """A bucket, with a client in front that loses, delays and refuses requests."""

    def __init__(self, aws):
        endpoint = EndpointSettings(region="us-east-1", endpoint_url=aws.endpoint)
        s3 = RenewedClient(endpoint, lambda: KEYS, ControlPlane.s3)()
        self.name = f"state-{next(BUCKETS)}"
        s3.create_bucket(Bucket=self.name)
        self.faulty = FaultyClient(s3, {"put_object"})
        self.store = self.in_bucket(self.name)

    def in_bucket(self, name):
        return StateObjects(Bucket(lambda: self.faulty, f"s3://{name}/some/prefix"), FOLDER)


class Items:
    """A table; the answers to its requests may be lost, come late or be refusals."""

    def __init__(self, aws, **changed):
        endpoint = EndpointSettings(region="us-east-1", endpoint_url=aws.endpoint)
        self.dynamodb = RenewedClient(endpoint, lambda: KEYS, ControlPlane.dynamodb_writes)()
        self.name = f"state-{next(BUCKETS)}"
        self.dynamodb.create_table(TableName=self.name, **(state_items.TABLE | changed))
        self.kinesis = WireEndpoint(aws.kinesis_endpoint, "us-east-1", "us-east-1")
        self.endpoint, self.faults, self.late, self.asked = aws.endpoint, {}, [], 0
        self.store = self.in_table(self.name)

    def in_table(self, name):
        place = StateDestination(dynamodb=name, endpoint_url=self.endpoint)
        store = open_state_items(place, self.kinesis, lambda: KEYS, FOLDER)
        store._sleep = lambda _: None
        self.ask, store._client.ask = store._client.ask, self.meet
        return store

    def meet(self, operation, body):
        """The fault of this request, counted from the last `fail`."""
        self.asked += 1
        fault = self.faults.get(self.asked)
        if fault in {"late", "lost reply"}:
            (self.late.append if fault == "late" else self.ask_now)((operation, body))
        if fault is not None:
            raise OutcomeUnknown("no answer", operation=operation.name)
        return self.ask(operation, body)

    def ask_now(self, request):
        self.ask(*request)

    def fail(self, faults):
        self.faults, self.asked = faults, 0

    def land(self):
        self.faults = {}
        for request in self.late:
            self.ask(*request)

    def items(self):
        return self.dynamodb.scan(TableName=self.name)["Items"]


@pytest.fixture
def items(aws):
    made = Items(aws)
    yield made
    made.store.close()


@pytest.fixture(params=["folder", "s3", "dynamodb", "memory"])
def store(request, tmp_path):
    if request.param == "s3":
        return Objects(request.getfixturevalue("aws")).store
    if request.param == "dynamodb":
        return request.getfixturevalue("items").store
    return StateFiles(tmp_path, FOLDER) if request.param == "folder" else MemoryVersions(Versions())


def names(store, shard=SHARD):
    return sorted(name for name, _ in store.list(shard))


def test_a_version_is_there_as_it_was_written_and_another_shard_has_none(store):
    store.create(SHARD, NAMES[0], b"\0" * 1000)
    store.create(SHARD, NAMES[1], b"")
    assert store.read(SHARD, NAMES[0]) == b"\0" * 1000
    assert store.read(SHARD, NAMES[1]) == b""
    assert store.read("shardId-8", NAMES[0]) is None
    assert names(store) == NAMES[:2]
    assert names(store, "shardId-8") == []
    assert all(age_s > -60 for _, age_s in store.list(SHARD))


def test_a_repetition_after_a_reply_that_was_lost_is_no_error(store):
    store.create(SHARD, NAMES[0], b"once")
    store.create(SHARD, NAMES[0], b"once")
    assert store.read(SHARD, NAMES[0]) == b"once"
    assert names(store) == NAMES[:1]


# On Spark, where no table is a store.
@pytest.mark.parametrize("store", ["folder", "s3", "memory"], indirect=True)
def test_of_several_that_claim_a_name_the_first_has_it(store):
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda n: store.claim(SHARD, "end.000001", b"%d" % n), range(8)))
    assert len(set(said)) == 1
    assert store.read(SHARD, "end.000001") == said[0]
    assert store.claim(SHARD, "end.000002", b"x") == b"x"
    assert names(store) == ["end.000001", "end.000002"]  # nothing else is left of the attempts


def test_a_task_of_spark_reaches_the_bucket_beside_its_stream(aws, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS.secret_key)
    bucket = Objects(aws).name
    connection = Connected(
        StreamAddress(stream="orders", region="us-east-1", endpoint_url=aws.endpoint)
    )
    place = StateDestination(s3=f"s3://{bucket}/state")
    store = connection.versions(place, "spark/app/orders/0123")
    assert connection.versions(place, "spark/app/orders/0123") is store
    assert store.claim(SHARD, "after-7.000001", b"first") == b"first"
    assert store.claim(SHARD, "after-7.000001", b"second") == b"first"
    assert names(store) == ["after-7.000001"]
    assert list(store.shards()) == [SHARD]
    assert bucket in store.check()


def test_what_is_deleted_is_gone_and_deleting_it_again_is_no_error(store):
    for name in NAMES[:3]:
        store.create(SHARD, name, b"x")
    store.delete(SHARD, NAMES[:2])
    store.delete(SHARD, NAMES[:2])
    store.delete(SHARD, [])
    assert names(store) == NAMES[2:3]
    assert store.read(SHARD, NAMES[0]) is None


def test_the_shards_that_have_versions_are_listed(store):
    for shard in ("shardId-2", "shardId-1"):
        store.create(shard, NAMES[0], b"")
    store.check()
    assert list(store.shards()) == ["shardId-1", "shardId-2"]
    store.delete("shardId-1", NAMES[:1])
    assert list(store.shards()) == ["shardId-2"]


def test_a_check_says_the_place_and_leaves_no_version(store):
    assert store.check()
    assert names(store) == []
    store.close()


def test_more_versions_than_a_page_or_a_call_takes_are_listed_and_deleted(aws, monkeypatch):
    monkeypatch.setattr(s3, "_REMOVED_MAX", 2)
    objects = Objects(aws)
    client = objects.faulty
    listed = client.list_objects_v2
    client.list_objects_v2 = lambda **asked: listed(**asked, MaxKeys=2)
    for name in NAMES:
        objects.store.create(SHARD, name, b"")
    assert names(objects.store) == NAMES
    objects.store.delete(SHARD, NAMES[1:])
    assert names(objects.store) == NAMES[:1]


@pytest.mark.parametrize("fault", ["throttled", "lost request", "lost reply", "late"])
def test_a_version_whose_answer_is_lost_is_there_after_the_repetition(aws, fault):
    objects = Objects(aws)
    objects.faulty.fail(fault)
    with pytest.raises(SinkError):
        objects.store.create(SHARD, NAMES[0], b"x")
    objects.store.create(SHARD, NAMES[0], b"x")
    objects.faulty.land()
    assert objects.store.read(SHARD, NAMES[0]) == b"x"
    assert names(objects.store) == NAMES[:1]


def test_a_bucket_that_is_missing_is_an_error_and_no_missing_version(aws):
    store = Objects(aws).in_bucket("never-made")
    for use in (
        lambda: store.read(SHARD, NAMES[0]),
        lambda: store.create(SHARD, NAMES[0], b""),
        lambda: list(store.list(SHARD)),
    ):
        with pytest.raises(SinkError, match=r"never-made|bucket"):
            use()
    with pytest.raises((ServiceError, SettingsError)):
        store.check()


def test_versions_that_s3_does_not_delete_are_an_error_with_the_permission_that_is_missing(aws):
    objects = Objects(aws)
    objects.store.create(SHARD, NAMES[0], b"x")
    # S3 answers 200, and names the objects that are still there.
    refused = {"Key": "its key", "Code": "AccessDenied", "Message": "Access Denied"}
    objects.faulty.delete_objects = lambda **_: {"Errors": [refused]}

    with pytest.raises(
        SinkError, match=r"AccessDenied: 1 objects, the first: its key\nAllow s3:DeleteObject on"
    ):
        objects.store.delete(SHARD, NAMES[:1])


@pytest.mark.parametrize(
    "body", [b"", b'{"Item', b'{"Items": 7}', b'{"Item":"\xff"}', b'{"more":' + b"[" * 100_000]
)
def test_an_answer_of_a_table_that_cannot_be_read_is_requested_again_and_then_an_error(items, body):
    asked = []
    items.store._client.ask = lambda *request: asked.append(request) or WireReply(200, body)
    for use in (
        lambda: items.store.read(SHARD, NAMES[0]),
        lambda: list(items.store.list(SHARD)),
    ):
        with pytest.raises(SinkError, match="the answer is not what the service promises"):
            use()
    assert len(asked) == 2 * item_tables.TRIES


def test_an_answer_that_is_not_a_page_is_not_a_place_without_versions(items):
    items.store._client.ask = lambda *_: WireReply(200, b"{}")
    for use in (items.store.shards, lambda: items.store.list(SHARD)):
        with pytest.raises(SinkError, match="the answer is not a page"):
            list(use())


def test_a_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    (tmp_path / "orders").write_text("a file")
    store = StateFiles(tmp_path, FOLDER)
    with pytest.raises(SinkError, match="orders"):
        store.create(SHARD, NAMES[0], b"")
    with pytest.raises(SinkError, match="orders"):
        store.check()


def test_what_killed_processes_left_unfinished_a_day_ago_goes_with_an_old_version(tmp_path):
    store = StateFiles(tmp_path, FOLDER)
    store.create(SHARD, NAMES[0], b"")
    (written,) = tmp_path.glob(f"**/{NAMES[0]}.state")
    old, new = (written.with_name(f".{name}.state.0011.partial") for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half a stat")
    os.utime(old, (time.time() - 86_401, time.time() - 86_401))
    store.delete(SHARD, NAMES[:1])
    assert list(written.parent.iterdir()) == [new]


def test_what_killed_processes_left_unfinished_goes_with_the_first_version_of_the_next_one(
    tmp_path,
):
    """A state that never changes again has no old version to go with."""
    StateFiles(tmp_path, FOLDER).create(SHARD, NAMES[0], b"")
    (written,) = tmp_path.glob(f"**/{NAMES[0]}.state")
    old = written.with_name(".old.state.0011.partial")
    old.write_bytes(b"half a stat")
    os.utime(old, (time.time() - 86_401, time.time() - 86_401))
    StateFiles(tmp_path, FOLDER).create(SHARD, NAMES[1], b"")
    assert not old.exists()


LARGE = b"".join(number.to_bytes(4) for number in range(250_000))  # three items


def test_a_version_larger_than_an_item_is_in_several_and_leaves_none_behind(items):
    for content in (LARGE, b"x" * state_items.INLINE_BYTES_MAX, b"x" * state_items.PART_BYTES):
        items.store.create(SHARD, NAMES[0], content)
        assert items.store.read(SHARD, NAMES[0]) == content
        assert names(items.store) == NAMES[:1]
        items.store.delete(SHARD, NAMES[:1])
        assert items.items() == []


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["one item", "several"])
@pytest.mark.parametrize("fault", ["lost request", "lost reply", "late"])
def test_a_version_whose_writer_died_at_any_request_is_whole_or_absent_and_listed(
    aws, content, fault
):
    items, at = Items(aws), 0
    while True:
        at += 1
        name = version_name(9, at, "0badcafe")
        items.fail(dict.fromkeys(range(at, at + item_tables.TRIES), fault))
        try:
            items.store.create(SHARD, name, content)
        except SinkError:
            items.faults = {}
            assert items.store.read(SHARD, name) in {None, content}
            if any(item["version"]["S"] == name for item in items.items()):
                assert name in names(items.store)
            items.store.create(SHARD, name, content)
            items.land()
            assert items.store.read(SHARD, name) == content
            items.store.delete(SHARD, [name])
            assert not items.items()
            items.late.clear()
        else:
            break
    assert at > (2 if content == b"small" else 6)
    items.store.close()


def test_a_table_that_is_missing_or_has_another_key_is_an_error_in_words(aws, items):
    missing = items.in_table("never-made")
    for use in (
        lambda: missing.read(SHARD, NAMES[0]),
        lambda: missing.create(SHARD, NAMES[0], b""),
        lambda: list(missing.list(SHARD)),
    ):
        with pytest.raises(SinkError, match="never-made"):
            use()
    with pytest.raises(SettingsError, match="never-made does not exist; create it with the key"):
        missing.check()
    missing.close()
    other = Items(
        aws,
        KeySchema=[{"AttributeName": "place", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "place", "AttributeType": "S"}],
    )
    with pytest.raises(SettingsError, match=r"needs the key `place` \(partition\) and"):
        other.store.check()
    other.store.close()
