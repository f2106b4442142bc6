"""The streams of an application as the verbs reach them: found, described, told apart by keys.

Look next: `model/stream_key.py`, which makes the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.config.stream_schema import StreamSettings
from kclrun.errors import NotFound, TableRefused, Unavailable
from kclrun.model.lease import Lease
from kclrun.model.stream_key import ONLY_STREAM, StreamKey, called, stream_key, stream_of
from kclrun.ports import ShardReader, StreamAdmin, StreamSummary

if TYPE_CHECKING:
    from kclrun.cli.world import Aws

__all__ = ["OpenStream", "open_streams", "readable", "refuse_other_kind", "why_other_kind"]

_READABLE: Final = frozenset({"ACTIVE", "UPDATING"})

Patiently = Callable[[Callable[[], StreamSummary]], StreamSummary]


class OpenStream(msgspec.Struct, frozen=True):
    """One stream that was found, and how it is read; `settings` are what holds for it."""

    settings: StreamSettings
    summary: StreamSummary
    admin: StreamAdmin
    reader: ShardReader


def open_streams(
    aws: Aws, patiently: Patiently = lambda call: call()
) -> Mapping[StreamKey, OpenStream]:
    """Describe every stream; with one, its key is ONLY_STREAM.

    Raises: NotFound, naming every stream that is not there; another ServiceError leaf at once.
    """
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


def _summary(admin: StreamAdmin) -> StreamSummary:
    return readable(admin.summary())


def readable(summary: StreamSummary) -> StreamSummary:
    """The summary of a stream that can be read now.

    Raises: NotFound for one that is being deleted; Unavailable for one that is being made.
    """
    if summary.status == "DELETING":
        raise NotFound(f"stream {summary.name} is being deleted", code="DELETING")
    if summary.status not in _READABLE:
        raise Unavailable(f"stream {summary.name} is {summary.status}", code=summary.status)
    return summary


def refuse_other_kind(aws: Aws) -> None:
    """Scan the whole table. Raises: TableRefused for leases of the other kind of application."""
    for page in aws.table.scan():
        why = why_other_kind(
            page.leases, aws.settings.table, is_of_several=bool(aws.settings.streams)
        )
        if why is not None:
            raise TableRefused(why)


def why_other_kind(leases: Iterable[Lease], table: str, *, is_of_several: bool) -> str | None:
    """Why this table cannot be used, if it was begun with one stream and now there are several, or
    the other way round. The keys differ, so every lease would be orphaned and every shard begun
    anew at the start position: that is nobody's wish (the KCL does it, and its FAQ warns)."""
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
