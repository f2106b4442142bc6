"""`ports.MessageSender` over the embedded SQS, SNS and Firehose: the limits that they enforce, and
each message's own answer. The contract of the outputs over them is in `test_outputs.py`."""

import msgspec
import pytest

from kclrun.aws.control import ControlPlane
from kclrun.aws.outputs import messages
from kclrun.errors import InvalidRequest, LimitExceeded, OutcomeUnknown, ServiceError
from kclrun.model.output import Message
from tests.contract.message_places import KEYS, OF, REGION, DeliveryStream, Queue, Topic
from tests.contract.test_outputs import START

KIB = 1024


def sender_of(place):
    named = msgspec.structs.replace(place.place(place.name), endpoint_url=place.aws.endpoint)
    return messages.open_sender(named, REGION, lambda: KEYS)


def message(size):
    return Message("x" * size, size)


@pytest.mark.parametrize(
    ("kind", "size"), [(Queue, 1024 * KIB), (Topic, 256 * KIB), (DeliveryStream, 1000 * KIB)]
)
def test_a_request_at_the_limits_is_taken(aws, tmp_path, kind, size):
    sender = sender_of(kind(aws, tmp_path))
    sender.look()
    limits = sender.limits
    assert limits.message_bytes_max == size
    assert sender.send([message(size)]) == [None]
    count = limits.batch_messages_max
    assert sender.send([message(limits.batch_bytes_max // count)] * count) == [None] * count
    sender.close()


@pytest.mark.parametrize("kind", [Queue, Topic])
def test_a_request_above_the_limits_is_refused_by_the_service(aws, tmp_path, kind):
    sender = sender_of(kind(aws, tmp_path))
    above = [message(sender.limits.message_bytes_max + 1)]
    try:
        refusals = sender.send(above)
    except ServiceError as error:
        refusals = [error.code]
    assert "TooLong" in refusals[0] or "Invalid" in refusals[0]


def test_a_queue_of_less_says_so_and_a_row_above_it_is_refused_before_it_is_added(aws, tmp_path):
    place = Queue(aws, tmp_path)
    place.client(ControlPlane.sqs).set_queue_attributes(
        QueueUrl=place.url, Attributes={"MaximumMessageSize": "2048"}
    )
    output = place.open(OF)
    output.begin(START)
    with pytest.raises(LimitExceeded, match=f"into the queue {place.name}, which takes 2,048"):
        output.encode({"text": "x" * 2048})


def test_a_queue_is_found_by_its_url_too(aws, tmp_path):
    place = Queue(aws, tmp_path)
    place.name = place.url
    sender = sender_of(place)
    sender.look()
    assert sender.send([message(1)]) == [None]


class Answers:
    """A client whose every call has this answer."""

    def __init__(self, answer):
        self.answer = answer

    def __getattr__(self, _name):
        return lambda **_: self.answer


def answered(kind, named, answer):
    return kind(lambda: Answers(answer), named)


URL = "https://sqs.eu-west-1.amazonaws.com/123456789012/q"
TAKEN = [{"Id": "2", "MessageId": "m"}, {"Id": "0", "MessageId": "m"}]
FAILED = [{"Id": "1", "Code": "InternalError", "SenderFault": False}]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (messages.QueueSender, {"Successful": TAKEN, "Failed": FAILED}),
        (messages.TopicSender, {"Successful": TAKEN, "Failed": FAILED}),
        (
            messages.DeliveryStreamSender,
            {"RequestResponses": [{"RecordId": "a"}, {"ErrorCode": "InternalError"}, {}]},
        ),
    ],
)
def test_each_message_has_its_own_answer_and_one_that_lacks_some_is_an_unknown_outcome(
    kind, answer
):
    assert answered(kind, URL, answer).send([message(1)] * 3) == [None, "InternalError", None]
    for count in (2, 4):
        if count == 4 or kind is messages.DeliveryStreamSender:
            with pytest.raises(OutcomeUnknown):
                answered(kind, URL, answer).send([message(1)] * count)


def test_a_delivery_stream_that_reads_a_stream_takes_no_rows():
    answer = {"DeliveryStreamDescription": {"DeliveryStreamType": "KinesisStreamAsSource"}}
    with pytest.raises(InvalidRequest, match="delivery stream f is of type KinesisStreamAsSource"):
        answered(messages.DeliveryStreamSender, "f", answer).look()
