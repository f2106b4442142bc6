"""The limits of AWS, each of them once, with the page that fixes it.

A name with `_DEFAULT` is a limit that the service tells: its answer counts, and the value here only
until it is known. Every other limit is the same for all accounts. Limits of our own are not here.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# Kinesis Data Streams, API reference and "Quotas and limits" of the developer guide.

# PutRecords: "up to 500 records", "up to a limit of 10 MiB for the entire request, including
# partition keys".
PUT_RECORDS_MAX: Final = 500
PUT_BYTES_MAX: Final = 10 * MIB
# DescribeStreamSummary tells MaxRecordSizeInKiB: "1 MiB in size by default", "up to 10 MiB".
RECORD_BYTES_DEFAULT: Final = MIB
RECORD_BYTES_LARGEST: Final = 10 * MIB
# PartitionKey: 1 to 256 Unicode characters. ExplicitHashKey: below 2**128, which has 39 digits.
PARTITION_KEY_CHARACTERS_MAX: Final = 256
HASH_KEY_DIGITS_MAX: Final = 39
# StreamName, ConsumerName and ShardId: 1 to 128 characters. A shard iterator: 1 to 512.
NAME_CHARACTERS_MAX: Final = 128
SHARD_ID_CHARACTERS_MAX: Final = 128
ITERATOR_CHARACTERS_MAX: Final = 512
# GetRecords: "up to 10 MB of data ... or up to 10,000 records". GetShardIterator: an iterator
# expires after five minutes.
GET_RECORDS_MAX: Final = 10_000
GET_BYTES_MAX: Final = 10 * MIB
ITERATOR_LIVES_S: Final = 300.0
# Of each shard, a second: 1,000 records and 1 MiB in; 5 GetRecords and 2 MiB out.
SHARD_WRITE_RECORDS_MAX: Final = 1_000
SHARD_WRITE_BYTES_MAX: Final = MIB
SHARD_READ_CALLS_MAX: Final = 5
SHARD_READ_PAUSE_S: Final = 1 / SHARD_READ_CALLS_MAX
SHARD_READ_BYTES_MAX: Final = 2 * MIB
# DescribeStreamSummary tells RetentionPeriodHours: a day to a year.
RETENTION_HOURS_MIN: Final = 24
RETENTION_HOURS_MAX: Final = 8760
# RegisterStreamConsumer: 20 "with On-demand Standard and Provisioned streams", 50 "with On-demand
# Advantage", which no answer about a stream tells: only the refusal of the next one does.
# "Registering a 6th consumer while there are 5 in a CREATING status results in a
# LimitExceededException".
CONSUMERS_DEFAULT: Final = 20
CONSUMERS_ADVANTAGE: Final = 50
CONSUMERS_CREATING_MAX: Final = 5
# SubscribeToShard: "for up to 5 minutes"; again "within 5 seconds of a successful call, you'll get
# a ResourceInUseException".
SUBSCRIPTION_S: Final = 300.0
RESUBSCRIBE_AFTER_S: Final = 5.0

# DynamoDB, "Service, account, and table quotas" of the developer guide.

# The name of a table: 3 to 255 characters.
TABLE_NAME_CHARACTERS_MAX: Final = 255
# "The maximum item size in DynamoDB is 400 KB", names included.
ITEM_BYTES_MAX: Final = 400 * KIB
# "Minimum 1 byte and maximum 2048 bytes" for a partition key, 1024 bytes for a sort key.
PARTITION_KEY_BYTES_MAX: Final = 2048
SORT_KEY_BYTES_MAX: Final = 1024
# "Up to 38 digits of precision". "Nested attributes up to 32 levels deep".
NUMBER_DIGITS_MAX: Final = 38
NESTED_LEVELS_MAX: Final = 32
# BatchGetItem: "as many as 100 items".
BATCH_GET_ITEMS_MAX: Final = 100

# DynamoDB Streams, API reference of GetRecords and GetShardIterator.

# "A maximum of 1 MB of data or 1000 stream records". Records are kept for 24 hours; no setting
# changes that. An iterator "expires 15 minutes after it is returned".
CHANGES_MAX: Final = 1_000
CHANGES_BYTES_MAX: Final = MIB
CHANGES_RETENTION_HOURS: Final = 24
CHANGE_ITERATOR_LIVES_S: Final = 900.0
# DescribeStream: Limit is at most 100 shards.
CHANGE_SHARDS_MAX: Final = 100

# SQS and SNS: ten messages a batch. GetQueueAttributes and GetTopicAttributes tell
# MaximumMessageSize: 1 MiB for a queue; 256 KiB for a topic whose owner has not raised it.
MESSAGES_MAX: Final = 10
QUEUE_BYTES_DEFAULT: Final = MIB
TOPIC_BYTES_DEFAULT: Final = 256 * KIB
# MessageGroupId: 128 characters.
GROUP_CHARACTERS_MAX: Final = 128

# Firehose, PutRecordBatch: "up to 500 records", "each record as large as 1,000 KB, up to a limit of
# 4 MB for the entire request".
DELIVERY_RECORDS_MAX: Final = 500
DELIVERY_RECORD_BYTES_MAX: Final = 1_000 * KIB
DELIVERY_BYTES_MAX: Final = 4 * MIB

# S3, "Multipart upload limits": a part of 5 MiB at least, except for the last. DeleteObjects: "up
# to 1,000 keys".
PART_BYTES_MIN: Final = 5 * MIB
DELETED_OBJECTS_MAX: Final = 1_000

# CloudWatch, PutMetricData: 1,000 metrics and 1 MB a request.
METRICS_MAX: Final = 1_000
METRICS_REQUEST_BYTES_MAX: Final = 1_000_000
