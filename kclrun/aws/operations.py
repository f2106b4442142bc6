"""Every AWS operation kclrun calls, declared once, with the permission it needs.

`policies.py` makes the policies of `kclrun iam` from it, so that they allow these operations and no
others. A test checks that every operation named in this package is declared here.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

# For messages about the lease table.
HOW_TO_PROVISION: Final = "the policy that `kclrun iam --purpose provision` prints"

_KINESIS: Final = "Kinesis_20131202"
_DYNAMODB: Final = "DynamoDB_20120810"
_CHANGES: Final = "DynamoDBStreams_20120810"
_TARGETS: Final = {"kinesis": _KINESIS, "dynamodbstreams": _CHANGES}


class Grant(enum.Enum):
    """The purpose of an operation: one statement of a policy. The value is its name there."""

    READ = "ReadStream"
    READ_CHANGES = "ReadChangesOfTheTable"
    # With fan-out: on the consumer, and on the stream.
    FAN_OUT = "SubscribeToShards"
    CONSUMERS = "FindOrRegisterTheConsumer"
    MANAGE_CONSUMERS = "ManageConsumers"
    LEASES = "LeaseTable"
    OFFERS = "FindOfferedLeases"
    KCL3 = "SeeTheModeOfAnEarlyKcl3Fleet"
    CREATE = "CreateLeaseTable"
    INDEX = "AddTheOwnerIndex"
    WRITE = "PutIntoStream"
    METRICS = "PublishMetrics"
    LIFECYCLE = "AnswerLifecycleHooks"
    START = "BeginAtLeases"
    # Dead letters: the rights of a machine, and those of an operator.
    KEEP_OBJECTS = "KeepDeadLettersInTheBucket"
    SEE_BUCKET = "SeeTheBucketOfDeadLetters"
    SEND_LETTERS = "SendDeadLetters"
    MANAGE_OBJECTS = "ReadAndRemoveDeadLetters"
    MANAGE_MESSAGES = "ReceiveAndRemoveDeadLetters"
    SEE_LEASES = "SeeHowFarLeasesAre"
    # Outputs: to check that they exist, and to send rows to them.
    SEND_ROWS = "SendRowsToQueues"
    PUBLISH_ROWS = "PublishRowsToTopics"
    DELIVER_ROWS = "PutRowsIntoDeliveryStreams"
    WRITE_OBJECTS = "WriteRowsAsObjects"
    FIND_OBJECTS = "SeeWhichObjectsAreThere"
    WRITE_ITEMS = "WriteRowsAsItems"
    # Keyed state: its versions, and their deletion.
    KEEP_VERSIONS = "KeepVersionsOfTheState"
    LIST_VERSIONS = "ListVersionsOfTheState"
    KEEP_STATE_ITEMS = "KeepVersionsOfTheStateAsItems"
    KEEP_STORY = "KeepTheStoryOfShards"
    LIST_REPLAYS = "ListReplays"
    REMOVE_REPLAYS = "RemoveReplays"
    SCHEMAS = "ReadSchemas"
    # For the identity that assumes `role_arn`; the role's own policy does not contain it.
    ROLE = "AssumeRole"


class Operation(msgspec.Struct, frozen=True):
    """One operation: its service (also the signing name), its name, and how it may be called.

    `is_write` marks a request that may not be sent twice before its outcome is read. `actions` are
    the IAM actions that the service checks, if they are not `<service>:<name>`.
    """

    service: str
    name: str
    is_write: bool = False
    grants: tuple[Grant, ...] = (Grant.LEASES,)
    actions: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """The `X-Amz-Target` header."""
        return f"{_TARGETS.get(self.service, _DYNAMODB)}.{self.name}"

    @property
    def content_type(self) -> str:
        return f"application/x-amz-json-{'1.1' if self.service == 'kinesis' else '1.0'}"

    @property
    def iam_actions(self) -> tuple[str, ...]:
        return self.actions or (f"{self.service}:{self.name}",)


DESCRIBE_STREAM_SUMMARY: Final = Operation(
    "kinesis", "DescribeStreamSummary", grants=(Grant.READ, Grant.WRITE, Grant.MANAGE_CONSUMERS)
)
LIST_SHARDS: Final = Operation("kinesis", "ListShards", grants=(Grant.READ, Grant.WRITE))
GET_SHARD_ITERATOR: Final = Operation("kinesis", "GetShardIterator", grants=(Grant.READ,))
GET_RECORDS: Final = Operation("kinesis", "GetRecords", grants=(Grant.READ,))
# Only with `fetch.mode: fan-out`.
SUBSCRIBE_TO_SHARD: Final = Operation("kinesis", "SubscribeToShard", grants=(Grant.FAN_OUT,))
DESCRIBE_STREAM_CONSUMER: Final = Operation(
    "kinesis",
    "DescribeStreamConsumer",
    grants=(Grant.FAN_OUT, Grant.CONSUMERS, Grant.MANAGE_CONSUMERS),
)
# A second request for the same name is refused, so a repetition is harmless.
REGISTER_STREAM_CONSUMER: Final = Operation(
    "kinesis", "RegisterStreamConsumer", is_write=True, grants=(Grant.CONSUMERS,)
)
# For `kclrun consumers` alone: no machine may remove a consumer.
LIST_STREAM_CONSUMERS: Final = Operation(
    "kinesis", "ListStreamConsumers", grants=(Grant.MANAGE_CONSUMERS,)
)
DEREGISTER_STREAM_CONSUMER: Final = Operation(
    "kinesis", "DeregisterStreamConsumer", is_write=True, grants=(Grant.MANAGE_CONSUMERS,)
)
# Only `kclrun put` and the sinks write to a stream; a consumer's policy leaves it out.
PUT_RECORDS: Final = Operation("kinesis", "PutRecords", is_write=True, grants=(Grant.WRITE,))
# Only with the stream of a DynamoDB table.
DESCRIBE_STREAM: Final = Operation(
    "dynamodbstreams",
    "DescribeStream",
    grants=(Grant.READ_CHANGES,),
    actions=("dynamodb:DescribeStream",),
)
GET_CHANGE_ITERATOR: Final = Operation(
    "dynamodbstreams",
    "GetShardIterator",
    grants=(Grant.READ_CHANGES,),
    actions=("dynamodb:GetShardIterator",),
)
GET_CHANGES: Final = Operation(
    "dynamodbstreams",
    "GetRecords",
    grants=(Grant.READ_CHANGES,),
    actions=("dynamodb:GetRecords",),
)
# None of our policies grants these three. Streams are created on an emulator only. Streams are
# listed only if the caller happens to have the permission.
CREATE_STREAM: Final = Operation("kinesis", "CreateStream", is_write=True, grants=())
LIST_STREAMS: Final = Operation("kinesis", "ListStreams", grants=())
LIST_CHANGE_STREAMS: Final = Operation(
    "dynamodbstreams", "ListStreams", grants=(), actions=("dynamodb:ListStreams",)
)

# The index is added after a look at the table. Its operator may have another role than the fleet.
DESCRIBE_TABLE: Final = Operation(
    "dynamodb",
    "DescribeTable",
    grants=(Grant.LEASES, Grant.INDEX, Grant.WRITE_ITEMS, Grant.KEEP_STATE_ITEMS),
)
SCAN: Final = Operation("dynamodb", "Scan", grants=(Grant.LEASES, Grant.START, Grant.SEE_LEASES))
QUERY: Final = Operation("dynamodb", "Query", grants=(Grant.OFFERS, Grant.KEEP_STATE_ITEMS))
BATCH_GET_ITEM: Final = Operation("dynamodb", "BatchGetItem")
GET_ITEM: Final = Operation(
    "dynamodb", "GetItem", grants=(Grant.LEASES, Grant.KCL3, Grant.KEEP_STATE_ITEMS)
)
PUT_ITEM: Final = Operation(
    "dynamodb",
    "PutItem",
    is_write=True,
    grants=(Grant.LEASES, Grant.WRITE_ITEMS, Grant.KEEP_STATE_ITEMS),
)
UPDATE_ITEM: Final = Operation("dynamodb", "UpdateItem", is_write=True)
DELETE_ITEM: Final = Operation(
    "dynamodb", "DeleteItem", is_write=True, grants=(Grant.LEASES, Grant.KEEP_STATE_ITEMS)
)
# DynamoDB has no permission of this name: it checks the permissions of the parts.
TRANSACT_WRITE_ITEMS: Final = Operation(
    "dynamodb",
    "TransactWriteItems",
    is_write=True,
    actions=("dynamodb:ConditionCheckItem", "dynamodb:PutItem"),
)
# Tags given to CreateTable are checked as TagResource.
CREATE_TABLE: Final = Operation(
    "dynamodb",
    "CreateTable",
    is_write=True,
    grants=(Grant.CREATE,),
    actions=("dynamodb:CreateTable", "dynamodb:TagResource"),
)
# The policy of a running machine denies it expressly. This is for the operator who provisions.
UPDATE_TABLE: Final = Operation("dynamodb", "UpdateTable", is_write=True, grants=(Grant.INDEX,))
# The lease tables of replays, which an operator lists and removes.
LIST_TABLES: Final = Operation("dynamodb", "ListTables", grants=(Grant.LIST_REPLAYS,))
DELETE_TABLE: Final = Operation(
    "dynamodb", "DeleteTable", is_write=True, grants=(Grant.REMOVE_REPLAYS,)
)
# Only with `observe.cloudwatch`. It adds to the stored values, so repeated values count twice.
PUT_METRIC_DATA: Final = Operation(
    "cloudwatch", "PutMetricData", is_write=True, grants=(Grant.METRICS,)
)
# Only with the hooks of `instance`, on the machine's own group. The group is never described: the
# settings name its hooks, and the instance metadata has the rest without a permission.
RECORD_LIFECYCLE_ACTION_HEARTBEAT: Final = Operation(
    "autoscaling", "RecordLifecycleActionHeartbeat", is_write=True, grants=(Grant.LIFECYCLE,)
)
COMPLETE_LIFECYCLE_ACTION: Final = Operation(
    "autoscaling", "CompleteLifecycleAction", is_write=True, grants=(Grant.LIFECYCLE,)
)
# Only with `on_error.dead_letter.s3` and `.sqs`, and with outputs of these kinds.
PUT_OBJECT: Final = Operation(
    "s3",
    "PutObject",
    is_write=True,
    grants=(Grant.KEEP_OBJECTS, Grant.WRITE_OBJECTS, Grant.KEEP_VERSIONS, Grant.KEEP_STORY),
)
# Outputs do not list. But for a caller without this permission, S3 answers AccessDenied for an
# object that does not exist.
LIST_OBJECTS_V2: Final = Operation(
    "s3",
    "ListObjectsV2",
    grants=(Grant.SEE_BUCKET, Grant.FIND_OBJECTS, Grant.LIST_VERSIONS),
    actions=("s3:ListBucket",),
)
GET_OBJECT: Final = Operation(
    "s3", "GetObject", grants=(Grant.MANAGE_OBJECTS, Grant.WRITE_OBJECTS, Grant.KEEP_VERSIONS)
)
HEAD_OBJECT: Final = Operation(
    "s3",
    "HeadObject",
    grants=(Grant.WRITE_OBJECTS, Grant.KEEP_VERSIONS),
    actions=("s3:GetObject",),
)
CREATE_MULTIPART_UPLOAD: Final = Operation(
    "s3",
    "CreateMultipartUpload",
    is_write=True,
    grants=(Grant.WRITE_OBJECTS,),
    actions=("s3:PutObject",),
)
UPLOAD_PART: Final = Operation(
    "s3", "UploadPart", is_write=True, grants=(Grant.WRITE_OBJECTS,), actions=("s3:PutObject",)
)
COMPLETE_MULTIPART_UPLOAD: Final = Operation(
    "s3",
    "CompleteMultipartUpload",
    is_write=True,
    grants=(Grant.WRITE_OBJECTS,),
    actions=("s3:PutObject",),
)
DELETE_OBJECTS: Final = Operation(
    "s3",
    "DeleteObjects",
    is_write=True,
    grants=(Grant.MANAGE_OBJECTS, Grant.KEEP_VERSIONS),
    actions=("s3:DeleteObject",),
)
_LETTER_QUEUE: Final = (Grant.SEND_LETTERS, Grant.MANAGE_MESSAGES, Grant.SEND_ROWS)
GET_QUEUE_URL: Final = Operation("sqs", "GetQueueUrl", grants=_LETTER_QUEUE)
GET_QUEUE_ATTRIBUTES: Final = Operation("sqs", "GetQueueAttributes", grants=_LETTER_QUEUE)
SEND_MESSAGE: Final = Operation("sqs", "SendMessage", is_write=True, grants=(Grant.SEND_LETTERS,))
# A write, because it hides the messages that it returns.
RECEIVE_MESSAGE: Final = Operation(
    "sqs", "ReceiveMessage", is_write=True, grants=(Grant.MANAGE_MESSAGES,)
)
DELETE_MESSAGE_BATCH: Final = Operation(
    "sqs",
    "DeleteMessageBatch",
    is_write=True,
    grants=(Grant.MANAGE_MESSAGES,),
    actions=("sqs:DeleteMessage",),
)
CHANGE_MESSAGE_VISIBILITY_BATCH: Final = Operation(
    "sqs",
    "ChangeMessageVisibilityBatch",
    is_write=True,
    grants=(Grant.MANAGE_MESSAGES,),
    actions=("sqs:ChangeMessageVisibility",),
)
# Only with outputs of these kinds, and for the probe of a queue of dead letters. SQS and SNS check
# the permission of a single message.
SEND_MESSAGE_BATCH: Final = Operation(
    "sqs",
    "SendMessageBatch",
    is_write=True,
    grants=(Grant.SEND_ROWS, Grant.SEND_LETTERS),
    actions=("sqs:SendMessage",),
)
GET_TOPIC_ATTRIBUTES: Final = Operation("sns", "GetTopicAttributes", grants=(Grant.PUBLISH_ROWS,))
PUBLISH_BATCH: Final = Operation(
    "sns",
    "PublishBatch",
    is_write=True,
    grants=(Grant.PUBLISH_ROWS,),
    actions=("sns:Publish",),
)
DESCRIBE_DELIVERY_STREAM: Final = Operation(
    "firehose", "DescribeDeliveryStream", grants=(Grant.DELIVER_ROWS,)
)
PUT_RECORD_BATCH: Final = Operation(
    "firehose", "PutRecordBatch", is_write=True, grants=(Grant.DELIVER_ROWS,)
)
# Only with `decode: glue`.
GET_SCHEMA_VERSION: Final = Operation("glue", "GetSchemaVersion", grants=(Grant.SCHEMAS,))
ASSUME_ROLE: Final = Operation("sts", "AssumeRole", grants=(Grant.ROLE,))

OPERATIONS: Final = tuple(
    operation for operation in tuple(globals().values()) if isinstance(operation, Operation)
)
