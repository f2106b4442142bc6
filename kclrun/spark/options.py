"""Options of the source, as texts, into `SourceSettings`.

    streamName or streamARN                        required; the ARN says the region
    region, endpointUrl                            from the ARN, else the AWS chain
    roleArn, roleExternalId, roleSessionName       a role to assume
    startingOffsets                                latest, earliest or JSON: position by shard
    startingTimestamp                              an ISO-8601 instant, or milliseconds
    startingLeases                                 an application of the fleet (its lease table)
    startingLeasesEndpointUrl                      DynamoDB, where it is not AWS's own
    endingOffsets, endingTimestamp                 the same for the end of a batch read
    failOnDataLoss                                 true
    maxRecordsPerTrigger, maxBytesPerTrigger       none, 64MiB for each shard read at once
    targetBatchDuration, pollInterval              30s, 1s
    maxReadsPerSecondPerShard                      2.5
    shardsPerTask, maxPartitions                   8, none
    inlineMaxBytes                                 512KiB
    alignShards, deaggregate                       true
    shardListInterval                              10s
    retryAttempts, retryBackoffMax                 without end, 3s
    consumerMode                                   polling

Other connectors' names are understood: startingPosition, initialPosition, maxOffsetsPerTrigger;
`from` and `to` are the two timestamps. Pure.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec

from kclrun.config.suggesting import hint
from kclrun.errors import OffsetRefused
from kclrun.model.address import why_no_endpoint
from kclrun.spark.option_reader import OptionReader
from kclrun.spark.positions import TRIM_HORIZON, Position, parse_position
from kclrun.spark.settings import LeasesAt, Reached, SourceSettings, Start, StartKind

__all__ = ["ALIASES", "NAMES", "REACHED_NAMES", "Use", "read_reached", "read_source_options"]

# What source and sink share: the stream and how to reach it.
REACHED_NAMES: Final = (
    "streamName",
    "streamARN",
    "region",
    "endpointUrl",
    "roleArn",
    "roleExternalId",
    "roleSessionName",
)
NAMES: Final = (
    *REACHED_NAMES,
    "startingOffsets",
    "startingTimestamp",
    "startingLeases",
    "startingLeasesEndpointUrl",
    "endingOffsets",
    "endingTimestamp",
    "failOnDataLoss",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "targetBatchDuration",
    "pollInterval",
    "maxReadsPerSecondPerShard",
    "shardsPerTask",
    "maxPartitions",
    "inlineMaxBytes",
    "alignShards",
    "deaggregate",
    "shardListInterval",
    "retryAttempts",
    "retryBackoffMax",
    "consumerMode",
)
ALIASES: Final = {
    "startingPosition": "startingOffsets",
    "initialPosition": "startingOffsets",
    "maxOffsetsPerTrigger": "maxRecordsPerTrigger",
    "from": "startingTimestamp",
    "to": "endingTimestamp",
}

_STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_STREAM_ARN: Final = re.compile(
    r"arn:[a-z0-9-]+:kinesis:([a-z0-9-]+):\d{12}:stream/[A-Za-z0-9_.-]{1,128}\Z"
)
_TABLE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{3,255}\Z")
_SHARD_ID: Final = re.compile(r"shardId-[0-9]{12}\Z")
_WORDS: Final = {
    "latest": StartKind.LATEST,
    "earliest": StartKind.EARLIEST,
    "trim_horizon": StartKind.EARLIEST,
}
# One batch is planned in memory, a position a shard: far more than a day of the largest stream.
_RECORDS_MAX: Final = 10**12
_BYTES_MAX: Final = 2**50
# The rows a batch carries with its plan are at most this for all shards together (measured: a
# trigger takes 83 ms longer at 8 MB than at 2 MB).
_INLINE_MAX: Final = 4 * 2**20
# More in one task, and its shards wait for each other: eight are opened at once.
_SHARDS_A_TASK_MAX: Final = 1_000
_PARTITIONS_MAX: Final = 100_000
_ATTEMPTS_MAX: Final = 1_000_000
# The service serves five GetRecords a second and shard, for all applications together.
_READS_MAX: Final = 5.0
_READS_MIN: Final = 0.1
# 9999-12-31T23:59:59Z: what datetime can show.
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_000


class Use(enum.Enum):
    """What the options are for. EITHER checks only what is wrong for both others."""

    STREAM = "spark.readStream"
    BATCH = "spark.read"
    EITHER = "reading"


def read_source_options(options: Mapping[str, str], use: Use) -> SourceSettings:
    """The settings that the options say; keys in any case.

    Raises: SettingsError naming every option that is unknown, missing, wrong or not for this use.
    """
    given = OptionReader("the kclrun source", options, NAMES, ALIASES)
    _refuse_what_is_not_there_yet(given)
    settings = SourceSettings(
        reached=read_reached(given),
        start=_start(given, use),
        end=_end(given, use),
        fails_on_data_loss=given.switch("failOnDataLoss", default=True),
        records_per_trigger_max=given.whole("maxRecordsPerTrigger", None, 1, _RECORDS_MAX),
        bytes_per_trigger_max=given.size_bytes("maxBytesPerTrigger", None, 1, _BYTES_MAX),
        target_batch_s=given.duration_s("targetBatchDuration", 30.0, "100ms", "1h"),
        # Iterators that are kept live five minutes; the service allows five reads a second.
        poll_interval_s=given.duration_s("pollInterval", 1.0, "200ms", "1m"),
        reads_per_second_max=given.number("maxReadsPerSecondPerShard", 2.5, _READS_MIN, _READS_MAX),
        shards_per_task=given.whole("shardsPerTask", 8, 1, _SHARDS_A_TASK_MAX),
        partitions_max=given.whole("maxPartitions", None, 1, _PARTITIONS_MAX),
        inline_bytes_max=given.size_bytes("inlineMaxBytes", 512 * 1024, 0, _INLINE_MAX),
        aligns_shards=given.switch("alignShards", default=True),
        opens_aggregates=given.switch("deaggregate", default=True),
        shard_list_interval_s=given.duration_s("shardListInterval", 10.0, "1s", "10m"),
        retry_attempts=given.whole("retryAttempts", None, 1, _ATTEMPTS_MAX),
        retry_backoff_max_s=given.duration_s("retryBackoffMax", 3.0, "100ms", "5m"),
    )
    given.settle()
    return settings


def read_reached(given: OptionReader) -> Reached:
    """The stream and how to reach it: the options that source and sink share.

    Problems are noted in `given`; nothing is raised.
    """
    endpoint_url = given.text("endpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("endpointUrl", f"expected an https URL: {wrong}")
    role_arn = given.text("roleArn")
    for name in ("roleExternalId", "roleSessionName"):
        if role_arn is None and given.text(name) is not None:
            given.refuse(name, "is for a role: name that in roleArn")
    return Reached(
        stream=_stream(given),
        region=given.text("region"),
        endpoint_url=endpoint_url,
        role_arn=role_arn,
        role_external_id=given.text("roleExternalId"),
        role_session_name=given.text("roleSessionName"),
    )


def _stream(given: OptionReader) -> str:
    name, arn = given.text("streamName"), given.text("streamARN")
    if (name is None) == (arn is None):
        why = "is needed, or streamARN" if name is None else "and streamARN are two names for one"
        given.refuse("streamName", why)
    text = arn or name or ""
    if arn is None and name is not None and "," in name:
        given.refuse("streamName", "one stream a source: read each on its own and union them")
    elif name is not None and arn is None and name.startswith("arn:"):
        given.refuse("streamName", "this is an ARN: give it as streamARN")
    elif name is not None and not _STREAM_NAME.match(name):
        given.refuse("streamName", "expected letters, digits, '_', '.' and '-', at most 128")
    if arn is not None:
        _check_arn(given, arn)
    return text


def _check_arn(given: OptionReader, arn: str) -> None:
    match = _STREAM_ARN.match(arn)
    if match is None:
        expected = "arn:aws:kinesis:<region>:<account>:stream/<name>"
        more = "; one stream a source" if "," in arn else ""
        given.refuse("streamARN", f"expected {expected}{more}")
    elif given.text("region") not in {None, match[1]}:
        given.refuse("region", f"the stream's ARN says {match[1]}: leave region out")


def _refuse_what_is_not_there_yet(given: OptionReader) -> None:
    mode = given.text("consumerMode")
    if mode is not None and mode.lower() != "polling":
        given.refuse(
            "consumerMode", "only polling so far; enhanced fan-out comes with a later version"
        )


def _start(given: OptionReader, use: Use) -> Start:
    usual = Start(StartKind.EARLIEST if use is Use.BATCH else StartKind.LATEST)
    start = _leases(given, _place(given, "starting", usual))
    if use is Use.BATCH and start.kind is StartKind.LATEST:
        given.refuse("startingOffsets", "a batch read that starts at latest reads nothing")
    return start


def _leases(given: OptionReader, otherwise: Start) -> Start:
    table, endpoint_url = given.text("startingLeases"), given.text("startingLeasesEndpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("startingLeasesEndpointUrl", f"expected an https URL: {wrong}")
    if table is None:
        if endpoint_url is not None:
            given.refuse("startingLeasesEndpointUrl", "is for a lease table: name startingLeases")
        return otherwise
    for name in ("startingOffsets", "startingTimestamp"):
        if given.text(name) is not None:
            given.refuse("startingLeases", f"and {name} say the same thing: give one of them")
    if not _TABLE_NAME.match(table):
        given.refuse(
            "startingLeases",
            "expected an application, or its lease table where that has another name: 3 to 255"
            " letters, digits, '_', '.' and '-'",
        )
    return Start(StartKind.LEASES, leases=LeasesAt(table, endpoint_url))


def _end(given: OptionReader, use: Use) -> Start:
    end = _place(given, "ending", Start(StartKind.LATEST))
    if use is Use.STREAM:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.text(name) is not None:
                given.refuse(name, "a stream has no end; this is for spark.read")
    if end.kind is StartKind.EARLIEST:
        given.refuse("endingOffsets", "a batch read that ends at earliest reads nothing")
    return end


def _place(given: OptionReader, which: str, usual: Start) -> Start:
    offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
    if given.text(offsets) is not None and given.text(timestamp) is not None:
        given.refuse(offsets, f"and {timestamp} say the same thing: give one of them")
    placed = given.read(offsets, lambda text: _offsets(text, timestamp), usual)
    return given.read(timestamp, _timestamp, placed)


def _offsets(text: str, timestamp: str) -> Start:
    if text.lstrip().startswith("{"):
        return Start(StartKind.POSITIONS, positions=_positions(text))
    kind = _WORDS.get(text.strip().lower())
    if kind is None:
        if text.lower().startswith("at_timestamp"):
            raise ValueError(f"a time is given in {timestamp}")
        raise ValueError(
            "expected latest, earliest or JSON with positions by shard"
            f"{hint(text.strip(), ('latest', 'earliest'))}"
        )
    return Start(kind)


def _positions(text: str) -> dict[str, Position]:
    try:
        plain = msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ValueError(
            f'expected JSON such as {{"shardId-000000000000": "TRIM_HORIZON"}} ({error})'
        ) from None
    if not plain:
        raise ValueError('expected at least one shard, or "*" for every shard')
    for shard_id in plain:
        if shard_id != "*" and not _SHARD_ID.match(shard_id):
            raise ValueError(f'expected shard ids and "*", not {shard_id[:40]!r}')
    return {shard_id: _position(shard_id, place) for shard_id, place in plain.items()}


def _position(shard_id: str, text: str) -> Position:
    if text.lower() in {"earliest", "trim_horizon"}:
        return TRIM_HORIZON
    try:
        return parse_position(text)
    except OffsetRefused as error:
        raise ValueError(f"{shard_id}: {error}") from None


def _timestamp(text: str) -> Start:
    stripped = text.strip()
    at_ms = int(stripped) if stripped.isdecimal() else _instant_ms(stripped)
    if not 0 <= at_ms <= _TIMESTAMP_MS_MAX:
        raise ValueError("expected a time between the years 1970 and 9999")
    return Start(StartKind.TIMESTAMP, timestamp_ms=at_ms)


def _instant_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            "expected an instant such as 2026-03-01T06:00:00Z, or milliseconds since the epoch"
        ) from None
    if moment.tzinfo is None:
        raise ValueError("the time zone is missing; add Z for UTC, or +01:00")
    return round(moment.timestamp() * 1000)
