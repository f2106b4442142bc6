"""Streams, queues, topics and delivery streams, for the contract of `ports.Output`."""

import json

import msgspec

from kclrun.aws.control import ControlPlane, RenewedClient
from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.outputs import messages
from kclrun.aws.put_records import WirePutter
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates
from kclrun.errors import AccessDenied, OutcomeUnknown, Throttled
from kclrun.local.filling import make_stream
from kclrun.model.output import OutputDestination, RowsOf
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.outputs.kinesis_output import KinesisOutput
from kclrun.outputs.message_output import MessageOutput
from tests.contract.output_places import FaultyClient, Place

OF = RowsOf(
    application="orders",
    stream="clicks",
    stream_created_at=WallTime(1_700_000_000.0),
    shard_id="shardId-000000000007",
    generation=0,
    token=1,
)
KEYS = WireCredentials("key", "secret")
REGION = "us-east-1"
WRITES = {"send_message_batch", "publish_batch", "put_record_batch"}
FAULTS = frozenset({"refused", "throttled", "lost request", "lost reply", "late"})


class SentByCommit:
    """The output, whose rows leave only with `commit`: so that faults meet them."""

    stores_cursor = False

    def __init__(self, output):
        self._output = output
        self._kept = []
        for name in ("encode", "begin", "check", "close"):
            setattr(self, name, getattr(output, name))

    def add(self, rows, upto):
        self._kept.append((rows, upto))

    @property
    def unsent_bytes(self):
        return self._output.unsent_bytes

    def commit(self):
        kept, self._kept = self._kept, []
        for rows, upto in kept:
            self._output.add(rows, upto)
        return self._output.commit()


class _Messages(Place):
    needs_aws = True
    faults = FAULTS

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.endpoint = EndpointSettings(region=REGION, endpoint_url=self.aws.endpoint)
        self._client = None
        self._read = []
        self.make()

    def client(self, make):
        return RenewedClient(self.endpoint, lambda: KEYS, make)()

    def place(self, name):
        raise NotImplementedError

    def faulty(self, sender):
        """The sender, with the faults of this place."""
        renewed = sender._renewed
        if self._client is None:
            self._client = FaultyClient(renewed(), WRITES)
        sender._renewed = _Renewed(self._client)
        return sender

    def _output(self, name, of):
        place = msgspec.structs.replace(self.place(name), endpoint_url=self.aws.endpoint)
        sender = self.faulty(messages.open_sender(place, REGION, lambda: KEYS))
        return MessageOutput(place, of, sender)

    def open(self, of):
        return SentByCommit(self._output(self.name, of))

    def open_missing(self):
        return self._output(f"{self.name}-none", OF)

    def fail(self, fault, times=1):
        if self._client is None:
            self.open(OF)
        self._client.fail(fault, times)

    def land(self):
        if self._client is not None:
            self._client.land()

    def drained(self, url):
        """All messages that the queue ever had, in the order in which it gave them."""
        sqs = self.client(ControlPlane.sqs)
        while found := sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages"):
            for each in found:
                self._read.append(json.loads(each["Body"]))
                sqs.delete_message(QueueUrl=url, ReceiptHandle=each["ReceiptHandle"])
        return self._read


class _Renewed:
    def __init__(self, client):
        self._client = client

    def __call__(self):
        return self._client

    def close(self):
        pass


class Queue(_Messages):
    suffix = ""

    def make(self):
        fifo = {"FifoQueue": "true"} if self.suffix else {}
        self.name += self.suffix
        sqs = self.client(ControlPlane.sqs)
        self.url = sqs.create_queue(QueueName=self.name, Attributes=fifo)["QueueUrl"]

    def place(self, name):
        key = ("shard",) if self.suffix else ()
        return OutputDestination(name="output", sqs=name, key=key)

    def rows(self):
        found = self.drained(self.url)
        return found if self.suffix else sorted(found, key=lambda row: row["n"])


class FifoQueue(Queue):
    suffix = ".fifo"


class Topic(_Messages):
    suffix = ""

    def make(self):
        fifo = {"FifoTopic": "true"} if self.suffix else {}
        self.name += self.suffix
        sns, sqs = self.client(ControlPlane.sns), self.client(ControlPlane.sqs)
        self.arn = sns.create_topic(Name=self.name, Attributes=fifo)["TopicArn"]
        fifo = {"FifoQueue": "true"} if self.suffix else {}
        self.url = sqs.create_queue(QueueName=self.name, Attributes=fifo)["QueueUrl"]
        known = sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        sns.subscribe(
            TopicArn=self.arn,
            Protocol="sqs",
            Endpoint=known["Attributes"]["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )

    def place(self, name):
        arn = self.arn.replace(self.name, name)
        return OutputDestination(name="output", sns=arn, key=("shard",) if self.suffix else ())

    def rows(self):
        found = self.drained(self.url)
        return found if self.suffix else sorted(found, key=lambda row: row["n"])


class FifoTopic(Topic):
    suffix = ".fifo"


class DeliveryStream(_Messages):
    def make(self):
        self.client(ControlPlane.s3).create_bucket(Bucket=self.name)
        self.client(ControlPlane.firehose).create_delivery_stream(
            DeliveryStreamName=self.name,
            S3DestinationConfiguration={
                "RoleARN": "arn:aws:iam::123456789012:role/firehose",
                "BucketARN": f"arn:aws:s3:::{self.name}",
            },
        )

    def place(self, name):
        return OutputDestination(name="output", firehose=name)

    def rows(self):
        s3 = self.client(ControlPlane.s3)
        listed = s3.list_objects_v2(Bucket=self.name).get("Contents", ())
        lines = [
            line
            for each in listed
            for line in s3.get_object(Bucket=self.name, Key=each["Key"])["Body"].read().splitlines()
        ]
        return sorted(map(json.loads, lines), key=lambda row: row["n"])


class Stream(Place):
    needs_aws = True
    faults = FAULTS
    aggregates = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        endpoint = WireEndpoint(self.aws.kinesis_endpoint, REGION, REGION)
        make_stream(endpoint, self.name, 2)
        self._client = WireClient(endpoint, lambda: KEYS, service="kinesis")
        self._putter = _FaultyPutter(WirePutter(self._client, self.name))

    def open(self, of):
        return SentByCommit(self._output(self.name, of, self._putter))

    def open_missing(self):
        return self._output(f"{self.name}-none", OF, self._putter)

    def _output(self, name, of, putter):
        place = OutputDestination(
            name="output", kinesis=name, key=("shard",), aggregates=self.aggregates
        )
        return KinesisOutput(place, of, putter, WireStreamAdmin(self._client, name))

    def rows(self):
        reader = PollingReader(self._client, self.name)
        found = []
        for shard in WireStreamAdmin(self._client, self.name).list_shards():
            iterator, records = (
                reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON)),
                [],
            )
            while iterator is not None:
                page = reader.fetch(iterator, 10_000)
                records += page.records
                iterator = None if page.millis_behind_latest == 0 else page.next_iterator
            found += [json.loads(record.data) for record in open_aggregates(records)]
        return found

    def fail(self, fault, times=1):
        self._putter.faults += [fault] * times

    def land(self):
        late, self._putter.late = self._putter.late, []
        for entries in late:
            self._putter.putter.put(entries)


class Aggregates(Stream):
    aggregates = True


class _FaultyPutter:
    def __init__(self, putter):
        self.putter = putter
        self.faults = []
        self.late = []
        self.prove = putter.prove

    def put(self, entries):
        match self.faults.pop(0) if self.faults else None:
            case None:
                return self.putter.put(entries)
            case "refused":
                raise AccessDenied("PutRecords: refused", operation="PutRecords")
            case "throttled":
                raise Throttled("PutRecords: throttled", operation="PutRecords")
            case "lost reply":
                self.putter.put(entries)
            case "late":
                self.late.append(entries)
        raise OutcomeUnknown("PutRecords: no answer", operation="PutRecords")


PLACES = {
    "kinesis": Stream,
    "kinesis, aggregates": Aggregates,
    "sqs": Queue,
    "sqs fifo": FifoQueue,
    "sns": Topic,
    "sns fifo": FifoTopic,
    "firehose": DeliveryStream,
}
