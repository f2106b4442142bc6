"""What the options of other Kinesis connectors for Spark, and of Kafka's source, are here. Pure.

The connectors: awslabs' spark-sql-kinesis-connector (`aws-kinesis`), qubole's kinesis-sql
(`kinesis`), that of AWS Glue, and Databricks' (`kinesis`, `read_kinesis`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Before the names of awslabs' and qubole's options.
_PREFIXES: Final = ("kinesis.", "executor.", "client.", "sink.", "getrecords.")

ALIASES: Final = {
    "startingPosition": "startingOffsets",
    "initialPosition": "startingOffsets",
    "maxOffsetsPerTrigger": "maxRecordsPerTrigger",
    "from": "startingTimestamp",
    "to": "endingTimestamp",
}

_CHAIN: Final = (
    "each process takes credentials from its own chain, an instance profile included: leave it out,"
    " or name a role in roleArn"
)
_CHECKPOINT: Final = "positions are in Spark's own checkpoint, and nowhere else: leave it out"
_PACE: Final = "maxReadsPerSecondPerShard is the pace of reads"
_BATCH: Final = (
    "a limit of one shard: here maxRecordsPerTrigger and maxBytesPerTrigger bound a batch, for all"
    " shards together"
)
_CALL: Final = (
    "a read takes what the service gives, up to 10,000 records: leave it out;"
    " maxRecordsPerTrigger bounds a batch"
)
_DURATION: Final = "targetBatchDuration bounds the time of a batch"
_PREFETCH: Final = "nothing is fetched ahead of a batch: leave it out; maxBytesPerTrigger bounds it"
_PAUSES: Final = "pauses grow by themselves, up to retryBackoffMax: leave it out"
_KEPT: Final = (
    "a consumer is registered at its first use and stays: leave it out; `kclrun consumers` lists"
    " and removes them"
)
_STS: Final = "AWS_ENDPOINT_URL_STS in the environment of driver and executors says where STS is"
_PRODUCER: Final = "the sink sends as fast as shards take records, and drops none: leave it out"

_SOURCE: Final = {
    # awslabs
    "consumerType": "consumerMode=polling is GetRecords, consumerMode=fan-out is SubscribeToShard",
    "maxFetchRecordsPerShard": _BATCH,
    "maxFetchTimePerShardSec": _DURATION,
    "describeShardInterval": "its name here is shardListInterval",
    "minBatchesToRetain": "spark.sql.streaming.minBatchesToRetain of the session holds: leave it"
    " out",
    "checkNewRecordThreads": "the driver looks at 64 shards at once: leave it out",
    "metadataCommitterType": _CHECKPOINT,
    "metadataPath": _CHECKPOINT,
    "metadataNumRetries": _CHECKPOINT,
    "metadataRetryIntervalsMs": _CHECKPOINT,
    "metadataMaxRetryIntervalMs": _CHECKPOINT,
    "dynamodb.tableName": _CHECKPOINT,
    "clientNumRetries": "its name here is retryAttempts",
    "clientRetryIntervalsMs": _PAUSES,
    "clientMaxRetryIntervalMs": "its name here is retryBackoffMax",
    "kinesisRegion": "its name here is region",
    "subscribeToShard.timeoutSec": "a subscription is renewed by itself: leave it out",
    "subscribeToShard.maxRetries": "a subscription that ends is polled until the next: leave it"
    " out",
    "numberOfRecordsPerFetch": _CALL,
    "fetchIntervalMs": _PACE,
    # qubole and Glue
    "maxFetchTimeInMs": _DURATION,
    "maxRecordPerRead": _CALL,
    "addIdleTimeBetweenReads": _PACE,
    "idleTimeBetweenReadsInMs": _PACE,
    "numRetries": "its name here is retryAttempts",
    "retryIntervalMs": _PAUSES,
    "maxRetryIntervalMs": "its name here is retryBackoffMax",
    "avoidEmptyBatches": "a trigger without new records makes no batch: leave it out",
    "classification": "`data` is the payload as it is: decode it with from_json, from_csv and the"
    " like",
    "delimiter": "`data` is the payload as it is: decode it with from_csv",
    "addRecordTimestamp": "the column approximateArrivalTimestamp has it: leave it out",
    "emitConsumerLagMetrics": "the progress of each batch has the lag: leave it out",
    "fanoutConsumerARN": "its name here is consumerName, with consumerMode=fan-out",
    # Databricks
    "maxRecordsPerFetch": _CALL,
    "maxFetchRate": "a shard gives all its readers 2 MB a second; maxBytesPerTrigger bounds a"
    " batch",
    "maxFetchDuration": _DURATION,
    "minFetchPeriod": _PACE,
    "fetchBufferSize": _PREFETCH,
    "coalesceThresholdBlockSize": _PREFETCH,
    "coalesceBinSize": _PREFETCH,
    "shardFetchInterval": "its name here is shardListInterval",
    "maxShardsPerDescribe": "ListShards gives up to 1,000 shards a call: leave it out",
    "consumerNamePrefix": "consumerName is used as it is: put the prefix into it",
    "consumerRefreshInterval": _KEPT,
    "registerConsumerTimeoutInterval": _KEPT,
    "requireConsumerDeregistration": _KEPT,
    "deregisterConsumerTimeoutInterval": _KEPT,
    "registeredConsumerId": "consumerName takes a consumer's name or ARN",
    "registeredConsumerIdType": "consumerName takes a consumer's name or ARN: leave it out",
    # Kafka
    "minOffsetsPerTrigger": "a batch has no least size here: give the query a longer trigger",
    "maxTriggerDelay": "a batch has no least size here, so none is waited for: give the query a"
    " longer trigger",
    "minPartitions": "a shard is read by one task: shardsPerTask=1 gives each one of its own",
    "subscribe": "name the stream in streamName, or several with commas",
    "subscribePattern": "name the streams in streamName, with commas",
}
_BOTH: Final = {
    "endpoint": "its name here is endpointUrl",
    "stsRoleArn": "its name here is roleArn",
    "awsSTSRoleARN": "its name here is roleArn",
    "stsSessionName": "its name here is roleSessionName",
    "awsSTSSessionName": "its name here is roleSessionName",
    "stsEndpointUrl": _STS,
    "stsEndpoint": _STS,
    "awsSTSEndpoint": _STS,
    "awsUseInstanceProfile": _CHAIN,
}
_SINK: Final = {
    "recordMaxBufferedTime": _PRODUCER,
    "recordMaxBufferedTimeMs": _PRODUCER,
    "maxConnections": _PRODUCER,
    "flushWaitTimeMillis": _PRODUCER,
    "flushWaitTimeMs": _PRODUCER,
    "recordTtl": _PRODUCER,
    "aggregationEnabled": "its name here is aggregate",
}
OF_SOURCES: Final[Mapping[str, str]] = _SOURCE | _BOTH
OF_SINKS: Final[Mapping[str, str]] = _SINK | _BOTH


def without_prefix(name: str) -> str:
    """A lower-cased name without the prefixes that connectors put before it."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
