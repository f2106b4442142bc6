"""Finds and describes the streams of an application for the verbs, and advises on a missing one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.aws.kinesis import stream_names
from kclrun.config.convert import nearest
from kclrun.config.schema import StreamSettings, stream_name
from kclrun.errors import NotFound, ServiceError, SettingsError, TableRefused, Unavailable
from kclrun.leases.auditing import why_another_stream
from kclrun.model.lease import Lease
from kclrun.model.stream import ONLY_STREAM, StreamKey, called, is_loopback, stream_key, stream_of
from kclrun.model.time import WallTime
from kclrun.ports import ShardReader, StreamAdmin, StreamSummary

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

_READABLE: Final = frozenset({"ACTIVE", "UPDATING"})

# Operations on the stream. A NotFound of another operation, on the lease table, gets no advice.
_OF_STREAMS: Final = frozenset({"DescribeStreamSummary", "ListShards", "PutRecords"})

Patiently = Callable[[Callable[[], StreamSummary]], StreamSummary]


class OpenStream(msgspec.Struct, frozen=True):
    """One stream that was found, with its clients and the settings that apply to it."""

    settings: StreamSettings
    summary: StreamSummary
    admin: StreamAdmin
    reader: ShardReader


def open_streams(
    aws: Aws, patiently: Patiently = lambda call: call()
) -> Mapping[StreamKey, OpenStream]:
    """Describe every stream; a single stream has the key ONLY_STREAM.

    Raises: NotFound, with the names of all missing streams and advice; another ServiceError leaf at
    once.
    """
    with advising_on_streams(aws):
        return _opened(aws, patiently)


def _opened(aws: Aws, patiently: Patiently) -> Mapping[StreamKey, OpenStream]:
    found: dict[StreamKey, OpenStream] = {}
    missing: list[NotFound] = []
    for source in aws.settings.sources:
        admin = aws.admin_of(source.name)
        try:
            summary = patiently(partial(_summary, admin))
        except NotFound as error:
            missing.append(error)
            continue
        several = bool(aws.settings.streams)
        key = stream_key(summary.arn, summary.created_at) if several else ONLY_STREAM
        found[key] = OpenStream(source, summary, admin, aws.reader_of(source.name))
    if len(missing) == 1:
        raise missing[0]
    if missing:
        first = missing[0]
        raise NotFound(
            "\n".join([f"{len(missing)} streams are not there", *map(str, missing)]),
            operation=first.operation,
            code=first.code,
        )
    return found


@contextmanager
def advising_on_streams(aws: Aws) -> Iterator[None]:
    """Add advice to the error for a missing stream of the application.

    Raises: NotFound in place of the service's NotFound, with a similar stream name, or with the
    command that creates the stream on an emulator; any other error unchanged.
    """
    try:
        yield
    except NotFound as error:
        if error.operation not in _OF_STREAMS:
            raise
        lines = [str(error), *_advice(aws)]
        raise NotFound("\n".join(lines), code=error.code) from None


def _advice(aws: Aws) -> Iterator[str]:
    """Lines of advice for one or several missing streams."""
    try:
        names = stream_names(aws.kinesis_client)
    except ServiceError:  # usual, because none of our policies grants it
        names = ()
    wanted = [stream_name(source.name) for source in aws.settings.sources]
    missing = [name for name in wanted if name not in names]
    for name in missing:
        near = nearest(name, names)
        if near is not None:
            yield f"Did you mean {near}?"
    if not is_loopback(aws.kinesis.url):
        yield "Check the name, aws.region, and the account of the credentials"
        return
    url = aws.kinesis.url.rstrip("/")
    for name in missing:
        yield "It is made on this emulator with:"
        yield f"  kclrun put --create 2 --stream {name} --endpoint {url} FILE"
        yield f"or when kclrun's own emulator starts:  kclrun local --stream {name}:2"


def _summary(admin: StreamAdmin) -> StreamSummary:
    return readable(admin.summary())


def readable(summary: StreamSummary) -> StreamSummary:
    """The summary of a stream that can be read now.

    Raises: NotFound for one that is being deleted; Unavailable for one that is being created.
    """
    if summary.status == "DELETING":
        raise NotFound(f"stream {summary.name} is being deleted", code="DELETING")
    if summary.status not in _READABLE:
        raise Unavailable(f"stream {summary.name} is {summary.status}", code=summary.status)
    return summary


def refuse_expired(summary: StreamSummary, at: WallTime | None, now: WallTime, option: str) -> None:
    """Raises: SettingsError for a time that the stream does not keep, or of before its creation."""
    kept_from = max(summary.created_at, now - summary.retention_hours * 3600.0)
    if at is not None and at < kept_from:
        raise SettingsError(
            f"{option}: {summary.name} keeps records for {summary.retention_hours} h, and was"
            f" created at {utc(summary.created_at)}\nTo read all that it has: {option} TRIM_HORIZON"
        )


def utc(at: float) -> str:
    """An instant for people, to the millisecond."""
    whole, fraction = divmod(round(at * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{fraction:03d}Z"


def refuse_other_kind(aws: Aws, created: Mapping[StreamKey, WallTime]) -> None:
    """Scan the whole table. Raises: TableRefused for leases of the other kind of application, or of
    a stream that was deleted and created again since [P13].

    The kind does not change after the table's creation, and a row's creation time does not change
    after its first take. So the scan need not be consistent, which costs half, at each start.
    """
    for page in aws.table.scan(consistent=False):
        why = why_other_kind(
            page.leases, aws.settings.table, is_of_several=bool(aws.settings.streams)
        )
        if why is not None:
            raise TableRefused(why)
        for key, created_at in created.items():
            leases = [lease for lease in page.leases if stream_of(lease.key) == key]
            why = why_another_stream(leases, created_at, table=aws.settings.table)
            if why is not None:
                raise TableRefused(why)


def why_other_kind(leases: Iterable[Lease], table: str, *, is_of_several: bool) -> str | None:
    """Why this table cannot be used, if it was begun with one stream and now there are several, or
    the reverse. The keys differ, so every lease would be orphaned and every shard would begin again
    at the start position. This is never wanted (the KCL does it, and its FAQ warns of it)."""
    wrong = next(
        (lease.key for lease in leases if (stream_of(lease.key) == ONLY_STREAM) == is_of_several),
        None,
    )
    if wrong is None:
        return None
    if is_of_several:
        begun, here, advice = "stream:", "streams:", "keep `stream:` for this application"
    else:
        begun, here, advice = "streams:", "stream:", "keep `streams:`, with one entry if need be"
    return (
        f"lease table {table} was begun with `{begun}` (its lease {called(wrong)} says so); with"
        f" `{here}` leases have other keys, and every shard would begin anew at the start\n"
        f"Either {advice},\n"
        "or begin anew on purpose: name another table (leases.table)"
    )
