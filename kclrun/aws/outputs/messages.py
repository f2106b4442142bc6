"""Batches of messages to SQS, SNS and Firehose. Each class implements `ports.MessageSender`.

The limits are those that the services document for SendMessageBatch, PublishBatch and
PutRecordBatch (API references of 2025). The owner of a queue or a topic may set a lower one for a
message, which then bounds a request as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws import operations
from kclrun.aws.control import Client, ControlPlane, RenewedClient, asking
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.errors import ErrorReply, safe_text
from kclrun.aws.outputs import write_probes
from kclrun.errors import InvalidRequest, ServiceError
from kclrun.model import statuses
from kclrun.model.output import Message, MessageLimits, OutputDestination
from kclrun.model.quotas import (
    DELIVERY_BYTES_MAX,
    DELIVERY_RECORD_BYTES_MAX,
    DELIVERY_RECORDS_MAX,
    MESSAGES_MAX,
    QUEUE_BYTES_DEFAULT,
    TOPIC_BYTES_DEFAULT,
)
from kclrun.model.wire import WireCredentials
from kclrun.ports import MessageSender

_SQS: Final = MessageLimits(
    message_bytes_max=QUEUE_BYTES_DEFAULT,
    batch_bytes_max=QUEUE_BYTES_DEFAULT,
    batch_messages_max=MESSAGES_MAX,
)
# SNS names the limit of a topic only if its owner has set one.
_SNS: Final = MessageLimits(
    message_bytes_max=TOPIC_BYTES_DEFAULT,
    batch_bytes_max=TOPIC_BYTES_DEFAULT,
    batch_messages_max=MESSAGES_MAX,
)
_FIREHOSE: Final = MessageLimits(
    message_bytes_max=DELIVERY_RECORD_BYTES_MAX,
    batch_bytes_max=DELIVERY_BYTES_MAX,
    batch_messages_max=DELIVERY_RECORDS_MAX,
)
_FIFO: Final = ".fifo"
_SIZE: Final = "MaximumMessageSize"
_KMS_KEY: Final = "KmsMasterKeyId"
_ARN: Final = "QueueArn"


def open_sender(
    place: OutputDestination, region: str, credentials: Callable[[], WireCredentials]
) -> MessageSender:
    """The sender to the queue, topic or delivery stream of `place`; sends nothing."""
    settings = EndpointSettings(region=region, endpoint_url=place.endpoint_url)
    if place.sqs is not None:
        return QueueSender(RenewedClient(settings, credentials, ControlPlane.sqs), place.sqs)
    if place.sns is not None:
        return TopicSender(RenewedClient(settings, credentials, ControlPlane.sns), place.sns)
    assert place.firehose is not None, "the settings name one of the three"
    client = RenewedClient(settings, credentials, ControlPlane.firehose)
    return DeliveryStreamSender(client, place.firehose)


class _Sender:
    """The common part of the three: a client for several threads, and errors with their place."""

    def __init__(self, client: Callable[[], Client], where: str, limits: MessageLimits) -> None:
        self.where = where
        self.limits = limits
        self._renewed = client
        self._lock = threading.Lock()

    def close(self) -> None:
        close = getattr(self._renewed, "close", None)
        if close is not None:
            close()

    def _client(self) -> Client:
        # One thread at a time may make the client; any thread may use it.
        with self._lock:
            return self._renewed()

    def _bound(self, bytes_max: int) -> None:
        """Set the limit of the destination for a message. SQS and SNS apply it to a batch too."""
        self.limits = msgspec.structs.replace(
            self.limits, message_bytes_max=bytes_max, batch_bytes_max=bytes_max
        )


class QueueSender(_Sender):
    """Messages of an SQS queue, given by its name or its URL."""

    def __init__(self, client: Callable[[], Client], queue: str) -> None:
        limits = msgspec.structs.replace(_SQS, is_fifo=queue.endswith(_FIFO))
        super().__init__(client, f"the queue {queue}", limits)
        self._queue = queue
        self._url: str | None = None
        self._attributes: dict[str, str] = {}

    def look(self) -> None:
        url = self.url()
        with asking(operations.GET_QUEUE_ATTRIBUTES):
            answer = self._client().get_queue_attributes(
                QueueUrl=url, AttributeNames=[_SIZE, _KMS_KEY, _ARN]
            )
            self._attributes = answer["Attributes"]
            self._bound(int(self._attributes[_SIZE]))

    def prove(self) -> str:
        known, operation = self._attributes, operations.SEND_MESSAGE_BATCH

        def send() -> str | None:
            with asking(operation):
                url = self.url()
                return write_probes.probe_queue(self._client(), url, known.get(_KMS_KEY))

        return write_probes.may_write(operation, known.get(_ARN, self.where), send)

    def send(self, messages: Sequence[Message]) -> Sequence[str | None]:
        url, entries = self.url(), _entries(messages, "MessageBody")
        with asking(operations.SEND_MESSAGE_BATCH):
            answer = self._client().send_message_batch(QueueUrl=url, Entries=entries)
            return _refusals(answer, len(messages))

    def url(self) -> str:
        """The queue's URL. Raises: a ServiceError leaf."""
        if self._url is None:
            url = self._queue
            if "://" not in url:
                with asking(operations.GET_QUEUE_URL):
                    url = self._client().get_queue_url(QueueName=url)["QueueUrl"]
            self._url = url
        return self._url


class TopicSender(_Sender):
    """Messages of an SNS topic, given by its ARN."""

    def __init__(self, client: RenewedClient, topic_arn: str) -> None:
        limits = msgspec.structs.replace(_SNS, is_fifo=topic_arn.endswith(_FIFO))
        super().__init__(client, f"the topic {topic_arn}", limits)
        self._topic_arn = topic_arn
        self._kms_key: str | None = None

    def look(self) -> None:
        with asking(operations.GET_TOPIC_ATTRIBUTES):
            answer = self._client().get_topic_attributes(TopicArn=self._topic_arn)
            self._bound(int(answer["Attributes"].get(_SIZE, _SNS.message_bytes_max)))
            self._kms_key = answer["Attributes"].get(_KMS_KEY)

    def prove(self) -> str:
        operation = operations.PUBLISH_BATCH

        def send() -> str | None:
            with asking(operation):
                return write_probes.probe_topic(self._client(), self._topic_arn, self._kms_key)

        return write_probes.may_write(operation, self._topic_arn, send)

    def send(self, messages: Sequence[Message]) -> Sequence[str | None]:
        entries = _entries(messages, "Message")
        with asking(operations.PUBLISH_BATCH):
            answer = self._client().publish_batch(
                TopicArn=self._topic_arn, PublishBatchRequestEntries=entries
            )
            return _refusals(answer, len(messages))


class DeliveryStreamSender(_Sender):
    """Records of a Firehose delivery stream, given by its name."""

    def __init__(self, client: RenewedClient, name: str) -> None:
        super().__init__(client, f"the delivery stream {name}", _FIREHOSE)
        self._name = name
        self._arn = self.where
        self._remark = ""

    def look(self) -> None:
        """Look whether the delivery stream can take records.

        Raises: InvalidRequest too, if the stream reads another stream: it takes no other records;
        and for a status that a person has to end.
        """
        with asking(operations.DESCRIBE_DELIVERY_STREAM):
            answer = self._client().describe_delivery_stream(DeliveryStreamName=self._name)
            described = answer["DeliveryStreamDescription"]
            kind = described["DeliveryStreamType"]
            self._arn = described.get("DeliveryStreamARN", self._arn)
        if kind != "DirectPut":
            raise InvalidRequest(
                f"{self.where} is of type {kind}: only one of type DirectPut takes records",
                operation=operations.DESCRIBE_DELIVERY_STREAM.name,
                code=str(kind),
            )
        self._require_usable(described)

    def _require_usable(self, described: dict[str, Any]) -> None:
        encryption = described.get("DeliveryStreamEncryptionConfiguration", {})
        status = str(encryption.get("Status", ""))
        remark = statuses.DELIVERY_ENCRYPTION.remark(status)
        why = _failure_in(encryption)
        self._remark = f"; its encryption is {status}: {remark}{why}" if remark else ""
        status = str(described.get("DeliveryStreamStatus", "ACTIVE"))
        try:
            statuses.require(statuses.DELIVERY_STREAM, self.where, status)
        except ServiceError as error:
            raise error.reworded(f"{error}{_failure_in(described)}") from None

    def prove(self) -> str:
        operation = operations.PUT_RECORD_BATCH

        def send() -> str:
            with asking(operation):
                return write_probes.probe_delivery_stream(self._client(), self._name)

        return write_probes.may_write(operation, self._arn, send) + self._remark

    def send(self, messages: Sequence[Message]) -> Sequence[str | None]:
        records = [{"Data": message.body.encode()} for message in messages]
        with asking(operations.PUT_RECORD_BATCH):
            answer = self._client().put_record_batch(DeliveryStreamName=self._name, Records=records)
            results = [response.get("ErrorCode") for response in answer["RequestResponses"]]
            return _complete(results, len(messages))


def _failure_in(described: Mapping[str, Any]) -> str:
    """What Firehose says about a failure of its own, to follow a sentence; empty without one."""
    failure = described.get("FailureDescription")
    if not failure:
        return ""
    reply = ErrorReply(str(failure.get("Type", "")), str(failure.get("Details", "")))
    return f" ({reply.code}: {safe_text(reply)})"


def _entries(messages: Sequence[Message], body: str) -> list[dict[str, str]]:
    """The entries of a batch for SQS or SNS, each with its number. `body` is the member's name."""
    entries = []
    for number, each in enumerate(messages):
        entry = {"Id": str(number), body: each.body}
        if each.group is not None:
            ids = {"MessageGroupId": each.group, "MessageDeduplicationId": each.deduplication_id}
            entry |= ids
        entries.append(entry)
    return entries


def _refusals(answer: dict[str, Any], count: int) -> Sequence[str | None]:
    """The answer of SQS or SNS: it names each message by our number in one of two lists.

    Raises: KeyError, ValueError for an answer that does not name every message: it was cut off.
    """
    results: dict[int, str | None] = {
        int(entry["Id"]): None for entry in answer.get("Successful", ())
    }
    results |= {int(entry["Id"]): str(entry["Code"])[:100] for entry in answer.get("Failed", ())}
    return _complete([results[number] for number in range(count)], count)


def _complete(results: list[str | None], count: int) -> list[str | None]:
    if len(results) != count:
        raise ValueError("the answer has not one result for each message")
    return results
