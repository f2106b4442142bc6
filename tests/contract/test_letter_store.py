"""The contract of `ports.LetterStore`, for each place that letters can be in: a folder, S3, SQS
(standard and FIFO) and a stream, on the embedded AWS."""

import itertools
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from kclrun.aws import dead_letters
from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.destinations import open_letters
from kclrun.errors import LetterTooLarge, ServiceError, SettingsError, SinkError
from kclrun.local.filling import make_stream
from kclrun.model.letter import LETTER_VERSION, LetterDestination
from kclrun.model.record import PutEntry
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.support.clients import client_of
from tests.support.letters import letter

KEYS = WireCredentials("key", "secret")
PLACES = ("folder", "s3", "s3 root", "sqs", "fifo", "stream")
OF_AWS = PLACES[1:]
NUMBERS = itertools.count()
# The most that a message of a queue or a record of a stream has here; a payload is base64 in it.
LARGE = bytes(900_000)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    """The queues here have one part: nothing is won by waiting for the others."""
    monkeypatch.setattr(dead_letters, "WAIT_S", 0)


def letters_at(place, kinesis):
    return open_letters(place, kinesis, lambda: KEYS)


class Place:
    """A new place of a kind; `store()` opens it once more, as another process would."""

    def __init__(self, kind, aws, tmp_path, *, exists=True, large=False):
        name = f"letters-{next(NUMBERS)}"
        self.kinesis = WireEndpoint(aws.kinesis_endpoint, "us-east-1", "us-east-1")
        urls = {"s3_url": aws.endpoint, "sqs_url": aws.endpoint}
        self.endpoint = EndpointSettings(region="us-east-1", endpoint_url=aws.endpoint)
        places = {}
        match kind:
            case "folder":
                places["path"] = str(tmp_path / name)
            case "s3" | "s3 root":
                places["s3"] = f"s3://{name}" + ("/a/b" if kind == "s3" else "")
            case "sqs" | "fifo":
                places["sqs"] = name + (".fifo" if kind == "fifo" else "")
            case "stream":
                places["stream"] = name
        if large:
            places["s3"] = f"s3://{name}/large"
        self.place = LetterDestination(**places, **urls)
        if exists:
            self.make()

    def client(self, make):
        return RenewedClient(self.endpoint, lambda: KEYS, make)()

    def make(self):
        if self.place.s3:
            bucket = self.place.s3.removeprefix("s3://").partition("/")[0]
            self.client(ControlPlane.s3).create_bucket(Bucket=bucket)
        if self.place.sqs:
            fifo = {"FifoQueue": "true"} if self.place.sqs.endswith(".fifo") else {}
            self.client(ControlPlane.sqs).create_queue(QueueName=self.place.sqs, Attributes=fifo)
        if self.place.stream:
            make_stream(self.kinesis, self.place.stream, 2)

    def put_raw(self, content):
        """What another program left there."""
        if self.place.path:
            folder = Path(self.place.path) / "orders" / "a"
            folder.mkdir(parents=True)
            (folder / "1-0.json").write_bytes(content)
        elif self.place.sqs:
            sqs = self.client(ControlPlane.sqs)
            url = sqs.get_queue_url(QueueName=self.place.sqs)["QueueUrl"]
            fifo = {"MessageGroupId": "g", "MessageDeduplicationId": "d"}
            more = fifo if self.place.sqs.endswith(".fifo") else {}
            sqs.send_message(QueueUrl=url, MessageBody=content.decode(), **more)
        elif self.place.stream:
            with closing(WireClient(self.kinesis, lambda: KEYS, service="kinesis")) as client:
                WirePutter(client, self.place.stream).put([PutEntry(content, "k")])
        else:
            bucket, _, prefix = self.place.s3.removeprefix("s3://").partition("/")
            key = f"{prefix}/orders/a/1-0.json".lstrip("/")
            self.client(ControlPlane.s3).put_object(Bucket=bucket, Key=key, Body=content)

    def store(self):
        return letters_at(self.place, self.kinesis)

    def kept(self):
        store = self.store()
        try:
            return [each.letter for each in store.kept()]
        finally:
            store.close()


@pytest.fixture(params=PLACES)
def place(request, aws, tmp_path):
    return Place(request.param, aws, tmp_path)


def test_what_is_kept_comes_back_whole_in_the_order_of_the_records(place):
    last = "shardId-000000000010"
    given = [
        letter(100, explicit_hash_key="7"),
        letter(99, 1, data=b"", partition_key="\u00e4\ufffe\u0001"),
        letter(99),
        letter(7, shard_id=last, error="\u2028\x1b"),
        letter(1, stream="another"),
    ]
    store = place.store()
    for each in given:
        store.keep(each)

    assert place.kept() == [given[4], given[2], given[1], given[0], given[3]]
    assert place.kept() == place.kept()


def test_a_record_that_is_given_up_again_is_there_once(place):
    place.store().keep(letter(11, calls=3))
    place.store().keep(letter(11, calls=3))

    assert place.kept() == [letter(11, calls=3)]


def test_what_is_removed_is_gone_for_everybody_and_the_rest_stays(place):
    store = place.store()
    for number in range(25):
        store.keep(letter(number))
    store.keep(letter(3))

    kept = list(store.kept())
    store.remove(kept[:21])
    store.remove(kept[:1])
    store.close()

    assert [each.sequence_number for each in place.kept()] == ["21", "22", "23", "24"]


def test_a_record_that_fails_again_after_its_letter_was_removed_is_a_letter_again(place):
    store = place.store()
    store.keep(letter(11, given_up_at=9.0))
    store.remove(list(store.kept()))
    store.keep(letter(11, given_up_at=10.0, calls=4))
    store.close()

    assert place.kept() == [letter(11, given_up_at=10.0, calls=4)]


def test_an_empty_place_has_no_letters_and_says_what_it_is(place):
    assert place.kept() == []
    name = place.place.path or place.place.sqs or place.place.stream or place.place.s3
    assert name in place.store().check()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{}", "it is not a dead letter"),
        (b"no json", "it is not a dead letter"),
        (msgspec.json.encode(letter(version=LETTER_VERSION + 1)), "a newer version of kclrun"),
    ],
)
def test_what_is_not_a_letter_is_named_and_nothing_else_is_lost(place, content, words):
    place.store().keep(letter(2, shard_id="shardId-000000000000"))
    place.put_raw(content)

    name = place.place.path or place.place.sqs or place.place.stream or place.place.s3
    with pytest.raises(SettingsError, match=words) as raised:
        place.kept()
    assert name in str(raised.value)
    named = []
    with closing(place.store()) as store:
        assert [kept.letter.sequence_number for kept in store.kept(named.append)] == ["2"]
    assert named == [str(raised.value)]


@pytest.mark.parametrize("kind", OF_AWS)
def test_a_place_that_is_not_there_is_named_and_its_letters_are_not_lost(kind, aws, tmp_path):
    place = Place(kind, aws, tmp_path, exists=False)
    store = place.store()
    name = place.place.sqs or place.place.stream or place.place.s3.removeprefix("s3://")

    with pytest.raises(ServiceError) as missed:
        store.check()
    assert name.partition("/")[0] in str(missed.value)
    with pytest.raises(SinkError, match=r"cannot keep .*dead letter") as refused:
        store.keep(letter(11))
    assert name.partition("/")[0] in str(refused.value)

    place.make()
    store.keep(letter(11))
    assert place.kept() == [letter(11)]


@pytest.mark.parametrize("kind", ["sqs", "stream"])
def test_a_letter_above_the_limit_goes_to_the_bucket_beside_it_and_is_whole_again(
    kind, aws, tmp_path
):
    place = Place(kind, aws, tmp_path, large=True)
    store = place.store()
    for each in (letter(1), letter(2, data=LARGE), letter(3)):
        store.keep(each)

    kept = list(store.kept())
    assert [each.letter for each in kept] == [letter(1), letter(2, data=LARGE), letter(3)]
    store.remove(kept[:2])
    store.close()
    assert place.kept() == [letter(3)]
    bucket = place.place.s3.removeprefix("s3://").partition("/")[0]
    assert place.client(ControlPlane.s3).list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.parametrize("kind", ["sqs", "stream"])
def test_a_letter_above_the_limit_without_a_bucket_is_refused_in_words(kind, aws, tmp_path):
    place = Place(kind, aws, tmp_path)

    with pytest.raises(LetterTooLarge, match=r"Set on_error\.dead_letter\.s3"):
        place.store().keep(letter(1, data=LARGE))
    assert place.kept() == []


@pytest.mark.parametrize("raised_kib", [None, 2048])
def test_a_letter_of_just_the_limit_is_kept_and_one_byte_more_is_refused(aws, tmp_path, raised_kib):
    place = Place("stream", aws, tmp_path)
    if raised_kib is not None:
        kinesis = client_of("kinesis", aws.kinesis_endpoint)
        arn = kinesis.describe_stream_summary(StreamName=place.place.stream)[
            "StreamDescriptionSummary"
        ]["StreamARN"]
        kinesis.update_max_record_size(StreamARN=arn, MaxRecordSizeInKiB=raised_kib)
    limit = (raised_kib or 1024) * 1024
    # A payload is base64 in a letter, three bytes in four.
    room = limit - len(dead_letters._ascii(letter(1, data=b""))) - len(letter(1).partition_key)
    just = letter(1, data=bytes(room // 4 * 3), error="ValueError: x" + "y" * (room % 4))

    assert f"above {limit:,} bytes" in place.store().check()
    place.store().keep(just)
    with pytest.raises(LetterTooLarge, match=f"takes {limit - 1:,}"):
        place.store().keep(msgspec.structs.replace(just, error=just.error + "z"))
    assert place.kept() == [just]


@pytest.mark.parametrize("kind", ["sqs", "stream"])
def test_a_message_cannot_make_its_reader_open_another_object(kind, aws, tmp_path):
    place = Place(kind, aws, tmp_path, large=True)
    place.put_raw(msgspec.json.encode(letter(1, data=b"", data_at="s3://secrets/key")))

    with pytest.raises(SettingsError, match=r"s3://secrets/key: that is not in on_error"):
        place.kept()


@pytest.mark.parametrize("kind", ["sqs", "fifo"])
def test_letters_that_are_listed_are_hidden_from_others_until_the_store_is_closed(
    kind, aws, tmp_path
):
    place = Place(kind, aws, tmp_path)
    store = place.store()
    for number in range(12):
        store.keep(letter(number))
    assert len(list(store.kept())) == 12

    assert place.kept() == []
    store.close()
    assert len(place.kept()) == 12


def test_a_queue_may_be_named_by_its_url(aws, tmp_path):
    named = Place("sqs", aws, tmp_path)
    url = named.client(ControlPlane.sqs).get_queue_url(QueueName=named.place.sqs)["QueueUrl"]
    store = letters_at(msgspec.structs.replace(named.place, sqs=url), named.kinesis)
    store.keep(letter(5))

    assert named.kept() == [letter(5)]


def test_a_fifo_queue_tells_a_letter_from_the_one_of_the_same_record_before():
    """SQS drops a second message with the same id for five minutes, also after a removal."""
    ids = {dead_letters._digest(dead_letters._ascii(letter(11, given_up_at=at))) for at in (9, 10)}
    assert len(ids) == 2
    assert max(map(len, ids)) <= 128
