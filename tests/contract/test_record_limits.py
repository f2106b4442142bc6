"""A stream whose owner has raised the size of its records takes larger ones from everything that
writes to it; a stream of which that is not so refuses them in words that are true."""

import contextlib
import itertools
from types import SimpleNamespace

import pytest

from kclrun import Producer
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.cli.program import run_program
from kclrun.codec.record_sizes import RecordLimit
from kclrun.destinations import open_letters
from kclrun.errors import AccessDenied, LetterTooLarge, LimitExceeded, Throttled
from kclrun.local.filling import make_stream
from kclrun.model.letter import LetterDestination
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.model.quotas import RECORD_BYTES_LARGEST
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.outputs.kinesis_output import KinesisOutput
from tests.support.clients import client_of
from tests.support.letters import letter

NUMBERS = itertools.count()
SIZES = (2 * 2**20, 10 * 2**20)


class Target:
    """A stream of one shard whose records may have `bytes_max` bytes."""

    def __init__(self, aws, bytes_max):
        self.endpoint = WireEndpoint(aws.kinesis_endpoint, "us-east-1", "us-east-1")
        self.credentials = lambda: WireCredentials("k", "s")
        self.name = f"sized-{next(NUMBERS)}"
        make_stream(self.endpoint, self.name, 1)
        self.client = WireClient(self.endpoint, self.credentials, service="kinesis")
        self.admin = WireStreamAdmin(self.client, self.name)
        kinesis = client_of("kinesis", aws.kinesis_endpoint)
        kinesis.update_max_record_size(
            StreamARN=self.admin.summary().arn, MaxRecordSizeInKiB=bytes_max // 1024
        )

    def sizes(self):
        """The sizes of the payloads in the stream."""
        reader = PollingReader(self.client, self.name)
        (shard,) = self.admin.list_shards()
        iterator = reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
        found = []
        while True:
            page = reader.fetch(iterator, 10_000)
            found += [len(record.data) for record in page.records]
            if page.millis_behind_latest == 0:
                return found
            iterator = page.next_iterator


def by_output(target, data, tmp_path):
    of = RowsOf(
        application="shop",
        stream="orders",
        stream_created_at=WallTime(0.0),
        shard_id="shardId-000000000000",
        generation=0,
        token=0,
    )
    place = OutputDestination(name="output", kinesis=target.name, key="k")
    output = KinesisOutput(place, of, WirePutter(target.client, target.name), target.admin)
    with contextlib.closing(output):
        output.begin(Cursor(TRIM_HORIZON))
        # {"k":"k","data":"…"}
        encoded, _ = output.encode({"k": "k", "data": "x" * (len(data) - 19)})
        output.add([encoded], Cursor(TRIM_HORIZON))
        output.commit()


def by_producer(target, data, tmp_path):
    with Producer(target.name, region="us-east-1", endpoint_url=target.endpoint.url) as producer:
        producer.put(data, "k")


def by_put(target, data, tmp_path):
    rows = tmp_path / "rows.txt"
    rows.write_bytes(b'{"k":"k","d":"' + b"x" * (len(data) - 16) + b'"}\n')
    line = ["put", "--stream", target.name, "--endpoint", target.endpoint.url, "--key", "k"]
    code = run_program([*line, "--region", "us-east-1", "--format", "jsonl", str(rows)])
    if code:
        raise LimitExceeded(f"exit code {code}")


def by_spark(target, data, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyspark")
    from kclrun.spark.options import SinkSettings, StreamAddress
    from kclrun.spark.sink import writers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "connected", lambda _: SimpleNamespace(client=target.client))
        batch = pa.RecordBatch.from_pydict({"data": pa.array([data]), "partitionKey": ["k"]})
        settings = SinkSettings(address=StreamAddress(stream=target.name))
        writers.put_partition(settings, target.admin.list_shards(), iter([batch]))


WRITERS = {"output": by_output, "Producer": by_producer, "put": by_put, "Spark": by_spark}


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")


@pytest.mark.parametrize("bytes_max", SIZES)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_record_as_large_as_the_stream_allows_is_written_and_one_byte_more_is_refused(
    aws, tmp_path, writer, bytes_max
):
    target = Target(aws, bytes_max)
    just = bytes_max - 1  # the key has a byte

    WRITERS[writer](target, bytes(just), tmp_path)
    assert target.sizes() == [just]
    with pytest.raises(Exception, match=f"{bytes_max}|exit code 78"):
        WRITERS[writer](target, bytes(just + 1), tmp_path)
    assert target.sizes() == [just]


def test_letters_of_large_records_are_kept_in_a_stream_that_takes_them(aws):
    target = Target(aws, 4 * 2**20)
    place = LetterDestination(stream=target.name)
    with contextlib.closing(open_letters(place, target.endpoint, target.credentials)) as store:
        store.keep(letter(1, data=bytes(2**21)))
        assert [len(kept.letter.data) for kept in store.kept()] == [2**21]
        with pytest.raises(LetterTooLarge, match="4,194,30"):
            store.keep(letter(2, data=bytes(2**22)))


class Asked:
    """The service's answers about the limit, in order; the last is repeated."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.count = 0
        self.now = 1_000.0

    def __call__(self):
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def limit(self):
        return RecordLimit(self, clock=lambda: self.now, wait=lambda _: None)


def entry(size):
    return PutEntry(bytes(size - 1), "k")


def test_the_service_is_asked_only_about_a_record_that_not_every_stream_takes():
    asked = Asked(4 * 2**20)
    limit = asked.limit()

    assert [limit.checked_size_bytes(entry(size)) for size in (2, 2**20)] == [2, 2**20]
    assert asked.count == 0
    assert limit.checked_size_bytes(entry(2**22)) == 2**22
    assert limit.checked_size_bytes(entry(2**21)) == 2**21
    assert asked.count == 1


def test_a_limit_that_is_raised_later_is_found_and_not_asked_for_at_each_record():
    asked = Asked(2**20, 2**21)
    limit = asked.limit()

    for _ in range(3):
        with pytest.raises(LimitExceeded, match=r"at most 1048576 are taken\Z"):
            limit.checked_size_bytes(entry(2**21))
    assert asked.count == 1
    asked.now += 31.0
    assert limit.checked_size_bytes(entry(2**21)) == 2**21


def test_what_every_stream_refuses_is_refused_unasked():
    asked = Asked(RECORD_BYTES_LARGEST)

    with pytest.raises(LimitExceeded, match="at most 10485760 are taken"):
        asked.limit().checked_size_bytes(entry(RECORD_BYTES_LARGEST + 1))
    assert asked.count == 0


def test_a_limit_that_may_not_be_asked_for_is_not_claimed():
    denied = AccessDenied("kinesis:DescribeStreamSummary is not allowed", operation="x", code="x")

    with pytest.raises(LimitExceeded) as refused:
        Asked(denied).limit().checked_size_bytes(entry(2**21))
    assert "at most 1048576 are taken, unless the stream allows more; that is not known:" in str(
        refused.value
    )
    assert "kinesis:DescribeStreamSummary" in str(refused.value)


def test_a_service_that_throttles_is_asked_again():
    asked = Asked(*[Throttled("slow down", operation="x", code="x")] * 3, 2**21)

    assert asked.limit().checked_size_bytes(entry(2**21)) == 2**21
    assert asked.count == 4


def test_an_emulator_that_does_not_say_its_limit_has_that_of_every_stream():
    with pytest.raises(LimitExceeded, match=r"at most 1048576 are taken\Z"):
        Asked(None).limit().checked_size_bytes(entry(2**21))
