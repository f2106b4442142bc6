"""Whether a stream is there, asked before a query starts; and what travels to executors."""

import pytest
from pyspark import cloudpickle

from kclrun.errors import AccessDenied, NotFound, Throttled, Unavailable
from kclrun.model.record import Record
from kclrun.model.time import WallTime
from kclrun.ports import StreamSummary
from kclrun.spark.offsets import Hint, Offset, ShardRange, StreamIs
from kclrun.spark.options import SourceSettings, StreamAddress
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON
from kclrun.spark.requests import require_stream
from kclrun.spark.source import ShardsPartition, StreamReader

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/flights"
SUMMARY = StreamSummary("flights", ARN, "ACTIVE", 24, 1, WallTime(1_700_000_000.123))
REACHED = StreamAddress(stream="flights", region="eu-west-1")


class Service:
    """Answers in turn, in a time of its own."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.now = 0.0
        self.asked = 0

    def summary(self):
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, seconds):
        self.now += seconds

    def require(self):
        return require_stream(self, REACHED, clock=lambda: self.now, wait=self.wait)


def test_a_stream_that_answers_is_asked_once():
    service = Service(SUMMARY)

    assert service.require() == SUMMARY
    assert (service.asked, service.now) == (1, 0.0)


def test_a_moment_of_trouble_is_waited_out():
    service = Service(Throttled("slow down"), Unavailable("no answer"), SUMMARY)

    assert service.require() == SUMMARY


@pytest.mark.parametrize("trouble", [Throttled("slow down"), Unavailable("no answer", code="X")])
def test_lasting_trouble_is_reported_after_ten_seconds(trouble):
    service = Service(trouble)

    with pytest.raises(type(trouble), match="the stream flights cannot be reached at eu-west-1"):
        service.require()
    assert 10.0 <= service.now < 11.0
    assert service.asked == 21


@pytest.mark.parametrize(
    ("trouble", "reported"),
    [
        (NotFound("nothing here", code="ResourceNotFoundException"), "there is no stream flights"),
        (AccessDenied("kinesis:DescribeStreamSummary"), "may not be read: kinesis:Describe"),
    ],
)
def test_what_cannot_get_better_is_reported_at_once(trouble, reported):
    service = Service(trouble)

    with pytest.raises(type(trouble), match=reported) as caught:
        service.require()
    assert (service.asked, caught.value.code) == (1, trouble.code)


def offset(**changes):
    plain = {"streams": {"": StreamIs(ARN, 1_700_000_000_123)}, "shards": {"s": TRIM_HORIZON}}
    return Offset(**(plain | changes))


def test_what_a_task_is_given_travels_and_names_no_token_and_no_record():
    record = Record(b"payload-7", "key-7", "4959", WallTime(1.0))
    hint = Hint(iterator="AAAtoken", iterator_at=1.0, rows=(record,))
    task = ShardsPartition(
        (ShardRange("shardId-000000000000", TRIM_HORIZON, SHARD_END, None, hint),)
    )

    arrived = cloudpickle.loads(cloudpickle.dumps(task))

    assert arrived.ranges == task.ranges
    assert repr(task) == "ShardsPartition(shardId-000000000000 TRIM_HORIZON to SHARD_END)"


def test_a_reader_travels_with_its_settings_and_nothing_that_is_connected():
    reader = StreamReader(SourceSettings(address=REACHED))
    reader._planner = object()
    reader._stands_at = offset()

    arrived = cloudpickle.loads(cloudpickle.dumps(reader))

    assert arrived._settings == reader._settings
    assert (arrived._planner, arrived._stands_at) == (None, None)
    arrived.stop()
