"""DynamoDB Streams of the model, through the wire codec of the product, in a time of its own."""

from kclrun.aws.changes.stream import ChangeReader, ChangeStreamAdmin
from kclrun.aws.errors import parse_error_reply, service_error
from kclrun.aws.wire import WireReply
from kclrun.local.changes.model import ChangeSettings
from kclrun.local.changes.tables import ChangeStreams
from kclrun.model.stream import region_of

ARN = "arn:aws:dynamodb:us-east-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"


class ModelChanges:
    """One stream. `calls` counts requests; `between` is called before each."""

    def __init__(self, **settings):
        self.now = 1_700_000_000.0
        self.between = lambda operation: None
        self._streams = ChangeStreams(ChangeSettings(**settings), lambda: self.now)
        self.stream = self._streams.add_stream(ARN)
        self.reader, self.admin = ChangeReader(self, ARN), ChangeStreamAdmin(self, ARN, self.pause)

    def put(self, key, n=0, **more):
        """A change of an item; the shard that has it."""
        keys = {"id": {"S": key}}
        image = keys | {"n": {"N": str(n)}} | more
        change = {"Keys": keys, "NewImage": image, "StreamViewType": "NEW_IMAGE"}
        event = {"eventName": "MODIFY", "eventSource": "aws:dynamodb", "dynamodb": change}
        return self.stream.add(event, self.now)

    def roll(self):
        self.stream.roll(self.now)

    def pause(self, pause_s):
        self.now += pause_s

    def call(self, operation, body):
        self.between(operation.name)
        status, answer = self._streams.answer(operation.name, body, region_of(ARN))
        if status != 200:
            raise service_error(operation, parse_error_reply(answer, None), status)
        return WireReply(status, answer, float(int(self.now)))

    def refused(self, operation, body):
        """The code with which a request is refused."""
        status, answer = self._streams.answer(operation, body, region_of(ARN))
        assert status == 400
        return parse_error_reply(answer, None).code

    def service_time(self):
        return float(int(self.now))
