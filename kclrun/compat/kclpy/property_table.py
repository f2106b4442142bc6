"""The properties of the MultiLangDaemon, each with its setting and the differences; a reader.

`app_yaml.py` writes by this table, and a page of the reference shows it. The names are those of the
daemon of the KCL 2.x and 3.x (`MultiLangDaemonConfiguration` and the configurations it fills).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from kclrun.errors import SettingsError

# A line that ends in an odd number of backslashes continues in the next.
_GOES_ON: Final = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
# A key ends at the first = : or space without a backslash before it.
_KEY: Final = re.compile(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NAMED: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_properties(text: str) -> dict[str, str]:
    """The properties in the order of the file; of a property set twice, the last value.

    As `java.util.Properties` reads them: `#` and `!` begin comments, `\\` at a line's end joins it
    with the next, `\\uXXXX` is a character. Raises: SettingsError for a `\\u` without four digits.
    """
    properties: dict[str, str] = {}
    for line in _logical_lines(text):
        match = _KEY.match(line)
        assert match is not None, "the pattern takes the empty text, too"
        name = _unescaped(match[1])
        properties.pop(name, None)
        properties[name] = _unescaped(line[match.end() :])
    return properties


def _logical_lines(text: str) -> Iterator[str]:
    begun = ""
    for line in re.split(r"\r\n|\r|\n", text):
        bare = line.lstrip(" \t\f")
        if not begun and (not bare or bare[0] in "#!"):
            continue
        begun += bare
        if _GOES_ON.search(begun):
            begun = begun[:-1]
            continue
        yield begun
        begun = ""
    if begun:
        yield begun


def _unescaped(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        if code == "u":
            raise SettingsError(f"{text[:40]!r}: \\u is followed by four hexadecimal digits")
        return chr(int(code[1:], 16)) if len(code) > 1 else _NAMED.get(code, code)

    # Java writes characters beyond 16 bits as two escapes.
    halves = _ESCAPE.sub(character, text).encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "replace")


class Property(msgspec.Struct, frozen=True):
    """One property. `setting` is empty for a property without a counterpart.

    `note` is the reason then; else it is the difference.
    """

    name: str
    setting: str
    note: str = ""


_KCL3: Final = "of the KCL 3 and its leader; kclrun's machines share the leases among themselves"
_KCL3_MODE: Final = (
    "a table in the KCL 3's own mode is refused until it is set to"
    " CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X and rolled back"
)
_METRICS: Final = "kclrun publishes once a minute"
_TABLE: Final = "the lease table exists; one that kclrun makes is billed on demand"
_FANOUT: Final = "kclrun repeats a failed call while it starts; aws.start_timeout bounds it"
_TUNING: Final = "tunes the inside of the KCL"

_WITH_SETTING: Final = (
    Property("applicationName", "application"),
    Property("streamArn", "stream", "comes before streamName, as in the KCL"),
    Property("streamName", "stream"),
    Property(
        "executableName", "processor", "kclpy:script.py; its arguments go to options.arguments"
    ),
    Property("tableName", "leases.table"),
    Property("initialPositionInStream", "start", "left out, it is LATEST, as in the KCL"),
    Property("initialPositionInStreamExtended", "start", "the instant in ISO 8601"),
    Property("regionName", "aws.region", "left out, it is us-east-1 or that of the ARN"),
    Property("kinesisEndpoint", "aws.endpoints.kinesis", "https, but for this machine"),
    Property("dynamoDBEndpoint", "aws.endpoints.dynamodb", "https, but for this machine"),
    Property(
        "AwsCredentialsProvider",
        "aws.role_arn",
        "of an STS provider, or aws.profile; all others are in the usual chain",
    ),
    Property(
        "failoverTimeMillis", "leases.failover", "1s to 15m; the same on both sides of a move"
    ),
    Property(
        "maxLeasesForWorker",
        "leases.max",
        "at most 1024, which is also what is written where it is left out",
    ),
    Property(
        "maxLeasesToStealAtOneTime",
        "leases.moves_per_cycle",
        "leases are asked for, and given away after a checkpoint; none is stolen from kclrun",
    ),
    Property(
        "cleanupLeasesUponShardCompletion",
        "leases.cleanup",
        "a row goes once its shard's children have begun",
    ),
    Property(
        "idleTimeBetweenReadsInMillis",
        "fetch.idle",
        "at the tip only, 200ms or more, and fetch.every as long; behind, kclrun reads five times"
        " a second",
    ),
    Property("maxRecords", "fetch.batch_max", "the most in one call, aggregates opened"),
    Property(
        "retrievalMode", "fetch.mode", "as the KCL decides: polling if a property of polling is set"
    ),
    Property("fanoutConfig.consumerArn", "fetch.consumer", "comes before consumerName"),
    Property(
        "fanoutConfig.consumerName",
        "fetch.consumer",
        "left out, it is the application's name, as in the KCL",
    ),
    Property(
        "taskBackoffTimeMillis",
        "on_error.backoff",
        "before the same records are given again, doubled each time; the KCL went on without them",
    ),
    Property(
        "timeoutInSeconds",
        "stall",
        "the one shard that stands still is restarted; the KCL ended the whole daemon",
    ),
    Property("shutdownGraceMillis", "shutdown.grace", "0 is left out: a drain needs some time"),
    Property(
        "metricsLevel",
        "observe.cloudwatch",
        "other metrics, by the minute; DETAILED by shard; left out, there are none",
    ),
)
_WITHOUT: Final = (
    ("dynamoDBRegionName", "the lease table is in aws.region; another one is refused"),
    ("workerId", "each start has an identity of its own"),
    ("shardSyncIntervalMillis", "shards are listed in every scan of the table, by a random few"),
    ("parentShardPollIntervalMillis", "a child starts when its last parent ends, without polling"),
    (
        "callProcessRecordsEvenForEmptyRecordList",
        "process_records is called with records, and only then",
    ),
    ("validateSequenceNumberBeforeCheckpointing", "a checkpoint above what was given is refused"),
    ("maxActiveThreads", "each shard has a process of its own"),
    ("processingLanguage", "it is Python"),
    ("logWarningForTaskAfterMillis", "stall: is the time after which a shard is looked into"),
    ("enablePriorityLeaseAssignment", "leases without an owner are always taken first"),
    ("shardPrioritization", "parents come before their children, always"),
    ("ignoreUnexpectedChildShards", "a listing that does not fit is asked for again"),
    ("skipShardSyncAtWorkerInitializationIfLeasesExist", "a start waits for no listing"),
    ("AwsCredentialsProviderDynamoDB", "one identity for all services: aws.role_arn"),
    ("AwsCredentialsProviderCloudWatch", "one identity for all services: aws.role_arn"),
    ("cloudWatchRegionName", "metrics go to aws.region"),
    ("metricsBufferTimeMillis", _METRICS),
    ("metricsMaxQueueSize", _METRICS),
    ("metricsEnabledDimensions", "observe.cloudwatch.dimensions adds some of your own"),
    ("maxLeaseRenewalThreads", "each lease is renewed by its own process"),
    ("listShardsBackoffTimeInMillis", _TUNING),
    ("maxListShardsRetryAttempts", _TUNING),
    ("schedulerInitializationBackoffTimeMillis", "aws.start_timeout is the patience of a start"),
    ("retryGetRecordsInSeconds", _TUNING),
    ("maxGetRecordsThreadPool", _TUNING),
    ("billingMode", _TABLE),
    ("initialLeaseTableReadCapacity", _TABLE),
    ("initialLeaseTableWriteCapacity", _TABLE),
    ("leaseTableDeletionProtectionEnabled", _TABLE),
    ("leaseTablePitrEnabled", _TABLE),
    ("leaseTableTags", "leases.tags, for a table that kclrun makes"),
    ("fanoutConfig.maxDescribeStreamConsumerRetries", _FANOUT),
    ("fanoutConfig.maxDescribeStreamSummaryRetries", _FANOUT),
    ("fanoutConfig.registerStreamConsumerRetries", _FANOUT),
    ("fanoutConfig.retryBackoffMillis", _FANOUT),
    ("clientVersionConfig", _KCL3_MODE),
    ("gracefulLeaseHandoffTimeoutMillis", "a lease is given away when its batch is done"),
    ("isGracefulLeaseHandoffEnabled", "leases are always given away after a checkpoint"),
    ("leaseAssignmentIntervalMillis", "each machine looks every half failover"),
    *(
        (name, _KCL3)
        for name in (
            *("coordinatorStateTableName", "coordinatorStateBillingMode"),
            *("coordinatorStateReadCapacity", "coordinatorStateWriteCapacity"),
            "coordinatorStatePointInTimeRecoveryEnabled",
            *("coordinatorStateDeletionProtectionEnabled", "coordinatorStateTags"),
            *("workerMetricsTableName", "workerMetricsBillingMode"),
            *("workerMetricsReadCapacity", "workerMetricsWriteCapacity"),
            "workerMetricsPointInTimeRecoveryEnabled",
            *("workerMetricsDeletionProtectionEnabled", "workerMetricsTags"),
            *("inMemoryWorkerMetricsCaptureFrequencyMillis", "workerMetricsReporterFreqInMillis"),
            *("noOfPersistedMetricsPerWorkerMetrics", "disableWorkerMetrics"),
            *("maxThroughputPerHostKBps", "dampeningPercentage", "reBalanceThresholdPercentage"),
            *("allowThroughputOvershoot", "varianceBalancingFrequency", "workerMetricsEMAAlpha"),
            "staleWorkerMetricsEntryCleanupDuration",
        )
    ),
)

PROPERTIES: Final = (*_WITH_SETTING, *(Property(name, "", note) for name, note in _WITHOUT))
# The daemon accepts `AWSCredentialsProvider` and `AwsCredentialsProvider`, and has changed the case
# of other names over the years.
BY_NAME: Final = {each.name.lower(): each for each in PROPERTIES}
