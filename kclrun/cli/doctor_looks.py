"""The two looks of `kclrun doctor`: every row as it stands, and every stream's shards."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.aws.rows import BrokenRow, Item, decode_row
from kclrun.aws.table_setup import refuse_kcl3
from kclrun.cli.streams import OpenStream, open_streams
from kclrun.config.start_position import parse_start
from kclrun.errors import NotFound
from kclrun.leases.doctor.diagnosis import diagnose
from kclrun.leases.doctor.findings import Finding
from kclrun.leases.doctor.looks import Circumstances, Look, StreamFacts, watch_s
from kclrun.leases.listing import Listing
from kclrun.model.lease import Lease, Owner
from kclrun.model.stream_key import StreamKey, qualified_shards
from kclrun.model.time import Instant, WallTime

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["Examination", "examine", "look_of", "refuse_native"]


class Examination(msgspec.Struct, frozen=True):
    """What was found; `items` are all rows as the second look found them, at `seen_at`."""

    findings: tuple[Finding, ...]
    items: tuple[Item, ...]
    seen_at: WallTime


def examine(aws: Aws) -> Examination:
    """Look, wait, look again, and diagnose.

    Raises: NotFound for a stream or a table that is not there; another ServiceError leaf.
    """
    streams = open_streams(aws)
    first, _ = _look(aws, streams)
    began = time.monotonic()
    wait_s = watch_s(first.leases, float(aws.settings.leases.failover))
    click.echo(f"Watching the counters for {wait_s:g} s …", err=True)
    time.sleep(wait_s)
    second, items = _look(aws, streams)
    now = WallTime(time.time())
    circumstances = Circumstances(
        me=Owner(aws.settings.leases.group, "doctor", os.urandom(8).hex()).id,
        failover_s=float(aws.settings.leases.failover),
        watched_s=time.monotonic() - began,
        now=now,
        streams={key: _facts(stream, now) for key, stream in streams.items()},
    )
    return Examination(diagnose(first, second, circumstances), items, now)


def look_of(items: tuple[Item, ...], listings: Mapping[StreamKey, Listing]) -> Look:
    """The items of a whole scan, told apart: leases, broken rows with the reason, other rows."""
    leases: list[Lease] = []
    broken: dict[str, str] = {}
    foreign = 0
    for item in items:
        try:
            lease = decode_row(item)
        except BrokenRow as row:
            broken[row.key] = str(row)
            continue
        if lease is None:
            foreign += 1
        else:
            leases.append(lease)
    return Look(tuple(leases), listings, broken, foreign)


def refuse_native(aws: Aws) -> None:
    """Nothing is written where KCL 3 assigns the leases. Raises: TableRefused."""
    settings = aws.settings
    refuse_kcl3(aws.control.dynamodb_reads(), settings.table, settings.application)


def _look(aws: Aws, streams: Mapping[StreamKey, OpenStream]) -> tuple[Look, tuple[Item, ...]]:
    table = aws.settings.table
    try:
        items = tuple(item for page in aws.table.items() for item in page)
    except NotFound as error:
        message = f"there is no lease table {table}; the first start makes it"
        raise NotFound(message, operation=error.operation, code=error.code) from None
    listings = {key: _listing(key, stream) for key, stream in streams.items()}
    return look_of(items, listings), items


def _listing(key: StreamKey, stream: OpenStream) -> Listing:
    shards = qualified_shards(key, stream.admin.list_shards())
    return Listing(shards, WallTime(time.time()), Instant(time.monotonic()))


def _facts(stream: OpenStream, now: WallTime) -> StreamFacts:
    text = stream.settings.start or "TRIM_HORIZON"
    return StreamFacts(
        start=parse_start(text, now).sentinel,
        start_text=text,
        retention_s=stream.summary.retention_hours * 3600.0,
    )
