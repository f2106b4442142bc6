"""Reads the options of source and sink; wrong ones are refused. Pure.

Other connectors' names are understood: startingPosition, initialPosition, maxOffsetsPerTrigger;
`from` and `to` are the two timestamps.
"""

from __future__ import annotations

import enum
import re
from typing import Any, Final

import msgspec

from kclrun.model.names import hint
from kclrun.model.stream import why_no_endpoint
from kclrun.model.table import TABLE, TABLE_ARN
from kclrun.spark import option_table, other_connectors
from kclrun.spark.offsets import Offset, encode_offset
from kclrun.spark.options import (
    SINK_OPTIONS,
    SOURCE_OPTIONS,
    LeasesAt,
    SinkSettings,
    SourceSettings,
    Start,
    StartKind,
    StreamAddress,
)
from kclrun.spark.other_connectors import ALIASES
from kclrun.spark.start_texts import instant_ms, positions_of
from kclrun.spark.stream_set import parted

_STREAM_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}\Z")
_STREAM_ARN: Final = re.compile(
    r"arn:[a-z0-9-]+:kinesis:([a-z0-9-]+):\d{12}:stream/[A-Za-z0-9_.-]{1,128}\Z"
)
_TABLE_NAME: Final = re.compile(rf"({TABLE}|{TABLE_ARN})\Z")
# Every shard is listed, looked at and named in each offset; use further queries for more streams.
_STREAMS_MAX: Final = 64
_WORDS: Final = {
    "latest": StartKind.LATEST,
    "earliest": StartKind.EARLIEST,
    "trim_horizon": StartKind.EARLIEST,
}


class Use(enum.Enum):
    """The purpose of the options. EITHER checks only errors that are wrong for both others."""

    STREAM = "spark.readStream"
    BATCH = "spark.read"
    EITHER = "reading"


def read_source_options(options: option_table.Given, use: Use) -> SourceSettings:
    """The settings from the options; names in any case. A `Start` or `Duration` is taken as it is.

    Raises: SettingsError naming every option that is unknown, missing, wrong or not for this use.
    """
    names = [option.name for option in SOURCE_OPTIONS]
    given = option_table.OptionReader(
        "the kclrun source", options, names, ALIASES, other_connectors.OF_SOURCES
    )
    address = read_address(given, takes_several=True)
    start, end = _start(given, use), _end(given, use)
    for name, place in (("startingOffsets", start), ("endingOffsets", end)):
        _check_names(given, name, place, address)
    more = given.values(SourceSettings)
    _check_consumer(given, more["consumer_mode"], more["consumer"], address)
    given.settle()
    return SourceSettings(address=address, start=start, end=end, **more)


def source_texts(settings: SourceSettings) -> dict[str, str]:
    """The options for Spark, as texts: `read_source_options` reads them as these settings."""
    address, start = settings.address, settings.start
    named = "streamARN" if address.stream.startswith("arn:") else "streamName"
    texts = {
        named: address.stream,
        "region": address.region,
        "endpointUrl": address.endpoint_url,
        "roleArn": address.role_arn,
        "roleExternalId": address.role_external_id,
        "roleSessionName": address.role_session_name,
    }
    match start.kind:
        case StartKind.LATEST | StartKind.EARLIEST:
            texts["startingOffsets"] = start.kind.value
        case StartKind.TIMESTAMP:
            texts["startingTimestamp"] = str(start.timestamp_ms)
        case StartKind.POSITIONS:
            texts["startingOffsets"] = msgspec.json.encode(_by_shard(start)).decode()
        case StartKind.LEASES:
            assert start.leases is not None, "the kind needs it"
            texts["startingLeases"] = start.leases.table
            texts["startingLeasesEndpointUrl"] = start.leases.endpoint_url
    return {name: text for name, text in texts.items() if text is not None} | option_table.texts_of(
        settings
    )


def _by_shard(start: Start) -> dict[str, Any]:
    if start.streams:
        return encode_offset(Offset(streams=start.streams, shards=start.positions))
    return {shard: str(position) for shard, position in start.positions.items()}


# Options that Spark adds to a streaming sink's options by itself.
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})


def sink_settings(options: option_table.Given) -> SinkSettings:
    """The settings from the options; names in any case.

    Raises: SettingsError naming every option that is unknown, missing or wrong.
    """
    named = {key: value for key, value in options.items() if key.lower() not in _SPARKS_OWN}
    names = [option.name for option in SINK_OPTIONS]
    given = option_table.OptionReader(
        "the kclrun sink", named, names, absent=other_connectors.OF_SINKS
    )
    address = read_address(given)
    more = given.values(SinkSettings)
    given.settle()
    return SinkSettings(address=address, **more)


def read_address(given: option_table.OptionReader, *, takes_several: bool = False) -> StreamAddress:
    """The stream and how to reach it: the options that source and sink share.

    `takes_several`: several names form one source; a sink puts into one stream. Problems are noted
    in `given`; this function does not raise.
    """
    endpoint_url = given.text("endpointUrl")
    if endpoint_url is not None and (wrong := why_no_endpoint(endpoint_url)):
        given.refuse("endpointUrl", f"expected an https URL: {wrong}")
    role_arn = given.text("roleArn")
    if role_arn is not None and not role_arn.startswith("arn:"):
        given.refuse("roleArn", "expected arn:aws:iam::<account>:role/<name>")
    for name in ("roleExternalId", "roleSessionName"):
        if role_arn is None and given.text(name) is not None:
            given.refuse(name, "is for a role: name that in roleArn")
    return StreamAddress(
        stream=_stream(given, takes_several=takes_several),
        region=given.text("region"),
        endpoint_url=endpoint_url,
        role_arn=role_arn,
        role_external_id=given.text("roleExternalId"),
        role_session_name=given.text("roleSessionName"),
    )


def _stream(given: option_table.OptionReader, *, takes_several: bool) -> str:
    name, arn = given.text("streamName"), given.text("streamARN")
    if (name is None) == (arn is None):
        why = "is needed, or streamARN" if name is None else "and streamARN are two names for one"
        given.refuse("streamName", why)
    text = arn or name or ""
    if arn is None and name is not None and "," in name:
        if takes_several:
            return _streams(given, name)
        given.refuse("streamName", "one stream: rows are put into each with a write of its own")
    elif name is not None and arn is None and name.startswith("arn:"):
        given.refuse("streamName", "this is an ARN: give it as streamARN")
    elif name is not None and not _STREAM_NAME.match(name):
        given.refuse("streamName", "expected letters, digits, '_', '.' and '-', at most 128")
    if arn is not None:
        _check_arn(given, arn)
    return text


def _streams(given: option_table.OptionReader, text: str) -> str:
    """Several streams, sorted by name whatever the order in the option."""
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if not _STREAM_NAME.match(name)]:
        given.refuse(
            "streamName",
            f"expected names with commas between them, not {wrong[0][:40]!r}: letters, digits,"
            " '_', '.' and '-', at most 128; several streams have no ARNs here",
        )
    elif len(set(names)) < len(names):
        given.refuse("streamName", "names a stream twice")
    elif len(names) > _STREAMS_MAX:
        given.refuse("streamName", f"names {len(names)} streams: at most {_STREAMS_MAX}")
    return ",".join(sorted(names))


def _check_arn(given: option_table.OptionReader, arn: str) -> None:
    match = _STREAM_ARN.match(arn)
    if match is None:
        expected = "arn:aws:kinesis:<region>:<account>:stream/<name>"
        more = "; several streams are named in streamName" if "," in arn else ""
        given.refuse("streamARN", f"expected {expected}{more}")
    elif given.text("region") not in {None, match[1]}:
        given.refuse("region", f"the stream's ARN says {match[1]}: leave region out")


def _check_consumer(
    given: option_table.OptionReader, mode: str, consumer: str | None, address: StreamAddress
) -> None:
    if mode == "polling" and given.text("consumerName") is not None:
        given.refuse("consumerName", "is for consumerMode=fan-out")
    elif mode == "fan-out" and given.text("consumerName") is None:
        given.refuse("consumerName", "is needed with consumerMode=fan-out: one for each query")
    elif consumer is not None and consumer.startswith("arn:") and address.several:
        given.refuse("consumerName", "several streams: give a name, each has a consumer of it")


def _start(given: option_table.OptionReader, use: Use) -> Start:
    usual = Start(StartKind.EARLIEST if use is Use.BATCH else StartKind.LATEST)
    start = _leases(given, _place(given, "starting", usual))
    if use is Use.BATCH and start.kind is StartKind.LATEST:
        given.refuse("startingOffsets", "a batch read that starts at latest reads nothing")
    return start


def _leases(given: option_table.OptionReader, otherwise: Start) -> Start:
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
            " letters, digits, '_', '.' and '-', or the table's ARN",
        )
    return Start(StartKind.LEASES, leases=LeasesAt(table, endpoint_url))


def _end(given: option_table.OptionReader, use: Use) -> Start:
    end = _place(given, "ending", Start(StartKind.LATEST))
    if use is Use.STREAM:
        for name in ("endingOffsets", "endingTimestamp"):
            if given.text(name) is not None:
                given.refuse(name, "a stream has no end; this is for spark.read")
    if end.kind is StartKind.EARLIEST:
        given.refuse("endingOffsets", "a batch read that ends at earliest reads nothing")
    return end


def _place(given: option_table.OptionReader, which: str, usual: Start) -> Start:
    offsets, timestamp = f"{which}Offsets", f"{which}Timestamp"
    if given.text(offsets) is not None and given.text(timestamp) is not None:
        given.refuse(offsets, f"and {timestamp} say the same thing: give one of them")
    placed = given.read(offsets, lambda value: _offsets(value, timestamp), usual)
    return given.read(timestamp, _timestamp, placed)


def _offsets(given: object, timestamp: str) -> Start:
    if isinstance(given, Start):
        return given
    text = option_table.text_of(given)
    if text.lstrip().startswith("{"):
        offset = positions_of(text)
        return Start(StartKind.POSITIONS, positions=offset.shards, streams=offset.streams)
    kind = _WORDS.get(text.strip().lower())
    if kind is None:
        if text.lower().startswith("at_timestamp"):
            raise ValueError(f"a time is given in {timestamp}")
        raise ValueError(
            "expected latest, earliest or JSON with positions by shard"
            f"{hint(text.strip(), ('latest', 'earliest'))}"
        )
    return Start(kind)


def _check_names(
    given: option_table.OptionReader, name: str, place: Start, address: StreamAddress
) -> None:
    """Notes shards whose names do not fit the source, for one stream or several."""
    if place.streams:
        _check_streams(given, name, place, address)
        return
    streams = set(address.several) or {""}
    unknown = [
        position
        for position in place.positions
        if position != "*" and parted(position)[0] not in streams
    ]
    if unknown and address.several:
        example = f"{address.several[0]}:{parted(unknown[0])[1]}"
        given.refuse(
            name, f"of several streams, a shard is named with its own: {example!r}, for example"
        )
    elif unknown:
        given.refuse(name, f'expected shard ids and "*", not {unknown[0][:40]!r}')


def _check_streams(
    given: option_table.OptionReader, name: str, place: Start, address: StreamAddress
) -> None:
    """Notes an offset of a query of other streams; that they were made again is known later."""
    arns = {which.arn for which in place.streams.values()}
    names = {arn.rpartition("/")[2] for arn in arns}
    is_arn = address.stream.startswith("arn:")
    if (arns != {address.stream}) if is_arn else (names != set(address.stream.split(","))):
        given.refuse(name, f"this is the offset of a query of {', '.join(sorted(arns))}")


def _timestamp(given: object) -> Start:
    return Start(StartKind.TIMESTAMP, timestamp_ms=instant_ms(option_table.text_of(given)))
