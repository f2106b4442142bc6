"""`kclrun lag`: the lag of each shard's checkpoint, and the time until records are lost.

Reads the lease table once and each shard once or twice; changes nothing. With `--max-behind` the
exit code is the answer, for a monitor that can only run a command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import click
import msgspec

from kclrun import errors
from kclrun.cli import exit_codes
from kclrun.cli.config_options import ConfigChoice, ConfigCommand, config_options
from kclrun.cli.leases.views import IF_NARROW, ON_TERMINAL, scan_leases
from kclrun.cli.messages import echo
from kclrun.cli.one_by_one import OneByOne
from kclrun.cli.reports import print_report
from kclrun.cli.tables import print_table
from kclrun.cli.times import DURATION
from kclrun.codec.kpl import drop_until, open_aggregates
from kclrun.config.units import Duration, StartPosition, parse_start
from kclrun.lease.policy import first_start
from kclrun.model.lease import Lease
from kclrun.model.reading import FetchedPage, PageCursor
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.retries import PASSING, Retries, repeated
from kclrun.model.sequence import LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard, ShardGraph
from kclrun.model.stream import StreamKey, display_name, qualified_shards, shard_id_of, stream_of
from kclrun.model.text import some_of
from kclrun.model.time import WallTime
from kclrun.operating.summaries import (
    Lag,
    LagSummary,
    duration_text,
    lag_summary,
    lease_summary,
    on_one_line,
    soonest,
    unended_parents,
    worst,
)
from kclrun.ports import ShardReader, next_page

if TYPE_CHECKING:
    from kclrun.cli.services import OpenStream


class Unleased(msgspec.Struct, frozen=True):
    """An unread shard without a lease: its start point (None: its tip), and the reason."""

    shard_id: str
    start: StartPoint | None
    note: str


def unleased(
    shards: Iterable[Shard], leases: Mapping[str, Lease], first: StartPosition
) -> tuple[Unleased, ...]:
    """The listed shards without a lease that were not read.

    A shard with a descendant that has a lease was read: its own row was cleaned up [P13]. In a
    table with rows, a new lease begins at the beginning of its shard. In an empty table it begins
    at `start:` (`first`).
    """
    graph = ShardGraph(shards)
    has_begun = bool(leases)
    is_read: dict[str, bool] = {}

    def was_read(shard_id: str) -> bool:
        # Shard ids increase from parents to children, so the recursion is as deep as the number of
        # the shard's reshards.
        if shard_id not in is_read:
            is_read[shard_id] = any(
                child in leases or was_read(child) for child in graph.children_of(shard_id)
            )
        return is_read[shard_id]

    return tuple(
        Unleased(
            shard.shard_id,
            StartPoint(IteratorType.TRIM_HORIZON) if has_begun else _first_start(first),
            _why(graph, shard.shard_id, leases) if has_begun else "not begun: there is no lease",
        )
        for shard in graph
        if shard.shard_id not in leases and not was_read(shard.shard_id)
    )


def _why(graph: ShardGraph, shard_id: str, leases: Mapping[str, Lease]) -> str:
    parents = [parent for parent in graph.parents_of(shard_id) if parent in leases]
    if any(not leases[parent].is_ended for parent in parents):
        return f"no lease yet: it is made when {' and '.join(map(display_name, parents))} ended"
    return "no lease: a running manager makes one within a few cycles"


def _first_start(first: StartPosition) -> StartPoint | None:
    if first.sentinel == LATEST:
        return None
    if first.sentinel == TRIM_HORIZON:
        return StartPoint(IteratorType.TRIM_HORIZON)
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=first.at)


T = TypeVar("T")

# The record of the checkpoint, which may be an aggregate with later user records, and the next one.
_RECORDS_A_CALL: Final = 2
# Before the tip a page may be empty. A few empty pages are skipped, slowly: the application needs
# its part of the five reads a second.
_PAGES_MAX: Final = 5
_PAGE_PAUSE_S: Final = 0.25
# The application's reader and ours sometimes exceed the limit together. Three attempts with
# doubling pauses take half a second, five attempts three seconds.
_RETRIES: Final = Retries(attempts_max=5, base_s=0.2, at_once=(errors.NothingListens,))
# The Date of an answer has whole seconds, and the answer takes time. Within this difference two
# clocks count as equal.
_CLOCKS_AGREE_S: Final = 1.5


def lag_of_lease(lease: Lease, start_at: WallTime | None, reader: ShardReader) -> Lag:
    """The lag of a lease's checkpoint; `start_at` is `start:` if it is an instant."""
    if lease.checkpoint == LATEST and lease.latest_pinned_at is None:
        return Lag(None, note="not begun: it will begin at the tip of that moment")
    try:
        start = first_start(lease, start_at, WallTime(time.time()))
    except errors.SettingsError as error:
        return Lag(None, note=str(error))
    return measure(reader, shard_id_of(lease.key), start, lease.checkpoint)


def measure(
    reader: ShardReader, shard: str, start: StartPoint, position: ExtendedSequenceNumber
) -> Lag:
    """The lag of the records above `position`, read from `start`.

    Raises: AccessDenied; any other failure is a Lag with its reason.
    """
    try:
        return _lag_from(reader, shard, start, position)
    except errors.NotFound:
        return Lag(None, is_trimmed=True, note="the stream has no such shard any more")
    except (*PASSING, errors.InvalidRequest, errors.RecordError) as error:
        return Lag(None, note=f"not known: {error}".partition("\n")[0])


def _lag_from(
    reader: ShardReader, shard: str, start: StartPoint, position: ExtendedSequenceNumber
) -> Lag:
    cursor = PageCursor(start)
    is_trimmed: bool | None = None  # until the first record arrives
    page: FetchedPage | None = None
    for number in range(_PAGES_MAX):
        if number:
            time.sleep(_PAGE_PAUSE_S)
        page = _patiently(partial(next_page, reader, shard, cursor, _RECORDS_A_CALL))
        if page.records and is_trimmed is None:
            is_trimmed = _lacks(page.records[0], start, position)
        unread = drop_until(open_aggregates(page.records), position)
        if unread:
            return _behind(unread[0], page, is_trimmed=bool(is_trimmed))
        if page.is_empty_tip or page.next_iterator is None:
            break
    assert page is not None, "at least one page is read"
    behind_ms = 0 if page.next_iterator is None else page.millis_behind_latest
    if behind_ms is None:
        return Lag(None, note="not known: the service does not say how far the page is behind")
    note = "no record found so near; the lag is that of the service" if behind_ms else ""
    return Lag(behind_ms / 1000, is_trimmed=bool(is_trimmed), note=note)


def _lacks(first: Record, start: StartPoint, position: ExtendedSequenceNumber) -> bool:
    """Whether the record of the checkpoint is missing at its position: retention has trimmed it."""
    is_there = start.kind is IteratorType.AT_SEQUENCE_NUMBER
    return is_there and first.sequence_number != position.sequence_number


def _behind(oldest: Record, page: FetchedPage, *, is_trimmed: bool) -> Lag:
    oldest_at = WallTime(oldest.approximate_arrival_timestamp)
    behind_s = max(0.0, _service_now(page.served_at) - oldest_at)
    note = "the checkpoint's record is past retention: records may be lost" if is_trimmed else ""
    return Lag(behind_s, oldest_at, is_trimmed=is_trimmed, note=note)


def _service_now(served_at: WallTime | None) -> float:
    """Now by the service's clock, or by the host's if they agree, because the host's is finer."""
    now = time.time()
    return now if served_at is None or abs(now - served_at) <= _CLOCKS_AGREE_S else served_at


def _patiently(call: Callable[[], T]) -> T:
    """The value of `call`, repeated a few times while it is throttled or AWS is unavailable."""
    # There are no other callers to spread apart: half of the jitter is sufficient.
    return repeated(call, _RETRIES, wait=time.sleep, chance=lambda: 0.5)


def further_behind(lines: Sequence[LagSummary], max_s: float) -> tuple[LagSummary, ...]:
    """The shards whose lag is larger than `max_s` or unknown: an unknown lag must not pass the
    check."""
    return tuple(line for line in lines if line.behind_s is None or line.behind_s > max_s)


class LagReport(msgspec.Struct, frozen=True):
    """The lag of all shards: the totals, then every shard."""

    application: str
    stream: str
    retention_s: float
    behind_s_max: float | None
    loss_in_s_min: float | None
    unknown: int
    shards: tuple[LagSummary, ...]


def lag_report(
    lines: Sequence[LagSummary], *, application: str, stream: str, retention_s: float
) -> LagReport:
    """The lag of these shards with its totals."""
    furthest, first_lost = worst(lines), soonest(lines)
    return LagReport(
        application=application,
        stream=stream,
        retention_s=retention_s,
        behind_s_max=None if furthest is None else furthest.behind_s,
        loss_in_s_min=None if first_lost is None else first_lost.loss_in_s,
        unknown=sum(line.behind_s is None for line in lines),
        shards=tuple(lines),
    )


def print_lag(report: LagReport) -> None:
    """Print the table, and a summary as the last line."""
    lines = report.shards
    titles = ["shard", "state", "owner", "checkpoint", "behind", "loss in", "note"]
    rows = [
        [
            display_name(line.shard),
            line.state,
            line.owner or "-",
            line.checkpoint or "-",
            duration_text(line.behind_s),
            "-" if line.loss_in_s is None else duration_text(line.loss_in_s),
            on_one_line(line.note),
        ]
        for line in lines
    ]
    if not any(line.note for line in lines):
        titles, rows = titles[:-1], [row[:-1] for row in rows]
    print_table(titles, rows, on_terminal=ON_TERMINAL, if_narrow=IF_NARROW)
    echo("")
    echo(_summary(lines, report.retention_s))


def _summary(lines: Sequence[LagSummary], retention_s: float) -> str:
    if not lines:
        return "Nothing is left to read: every shard has ended."
    parts = [f"{len(lines)} shards" if len(lines) != 1 else "1 shard"]
    unowned = sum(line.state in {"unowned", "offered", "no lease"} for line in lines)
    unknown = sum(line.behind_s is None for line in lines)
    if unowned:
        parts.append(f"{unowned} without an owner")
    if unknown:
        parts.append(f"{unknown} not known")
    furthest, first_lost = worst(lines), soonest(lines)
    is_behind = furthest is not None and bool(furthest.behind_s)
    if furthest is not None:
        where = f" ({display_name(furthest.shard)})" if is_behind else ""
        parts.append(f"at most {duration_text(furthest.behind_s)} behind{where}")
    if first_lost is None and (unknown or is_behind):
        parts.append(
            f"when records are lost is not known (retention is {duration_text(retention_s)})"
        )
    elif first_lost is None:
        parts.append(f"nothing unread (retention is {duration_text(retention_s)})")
    elif first_lost.is_trimmed:
        parts.append(f"records may be lost already ({display_name(first_lost.shard)})")
    else:
        parts.append(
            f"first loss in {duration_text(first_lost.loss_in_s)}"
            f" ({display_name(first_lost.shard)}), retention is {duration_text(retention_s)}"
        )
    return "; ".join(parts)


# A shard takes two requests of some 10 ms: eight threads measure 1,000 shards in three seconds.
_THREADS: Final = 8


@click.command(cls=ConfigCommand)
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: totals and every shard.")
@click.option(
    "--max-behind",
    type=DURATION,
    metavar="DURATION",
    help="Exit code 1 if a shard is further behind than that (as 5m), or not known.",
)
def lag(config: ConfigChoice, *, as_json: bool, max_behind: Duration | None) -> int:
    """Show how far each shard's checkpoint is behind, and the time until records are lost.

    Behind is the age of the oldest record above the checkpoint, so up to `checkpoint.every` of it
    is normal. Shards without a lease and leases that have not begun are measured, too.

    \b
    kclrun lag --config app.yaml
    kclrun lag --config app.yaml --max-behind 5m || page
    """
    from kclrun.cli.services import fleet_aws, open_streams

    aws, others = fleet_aws(config), OneByOne("lag")
    streams = open_streams(aws, on_missing=others.missing)
    leases = {lease.key: lease for lease in scan_leases(aws)}
    remark_unread(leases.values(), streams)
    lines: tuple[LagSummary, ...] = ()
    for key, stream in streams.items():
        with others.going_on():
            lines += lag_summaries(key, stream, leases.values())
    if not lines and others.code:
        return others.code
    report = lag_report(
        lines,
        application=aws.settings.application,
        stream=aws.settings.stream_names,
        retention_s=min(_retention_s(stream) for stream in streams.values()),
    )
    print_report(report, print_lag, as_json=as_json)
    judged = exit_codes.DRAINED if max_behind is None else _judged(lines, max_behind)
    return others.code or judged


def remark_unread(leases: Iterable[Lease], streams: Collection[StreamKey]) -> None:
    """Name on standard error the leases that are not measured, since their stream is not read."""
    left_out = sorted(
        display_name(lease.key)
        for lease in leases
        if not lease.is_ended and stream_of(lease.key) not in streams
    )
    if left_out:
        named = some_of(left_out)
        echo(f"Not measured, their stream is not of the application: {named}", err=True)


def _judged(lines: tuple[LagSummary, ...], max_behind: Duration) -> int:
    late = further_behind(lines, max_behind)
    if not late:
        return exit_codes.DRAINED
    named = some_of([f"{display_name(line.shard)} {duration_text(line.behind_s)}" for line in late])
    echo(f"Further behind than {max_behind.text}, or not known: {named}", err=True)
    return exit_codes.UNMET


def _retention_s(stream: OpenStream) -> float:
    return stream.summary.retention_hours * 3_600.0


def lag_summaries(
    key: StreamKey, stream: OpenStream, every: Collection[Lease]
) -> tuple[LagSummary, ...]:
    """Measure every shard of a stream with records left to read, in the order of their ids.

    Raises: a ServiceError leaf of the listing; AccessDenied of a read.
    """
    leases: dict[str, Lease] = {lease.key: lease for lease in every if stream_of(lease.key) == key}
    first = parse_start(stream.settings.start or "TRIM_HORIZON", WallTime(time.time()))
    shards = qualified_shards(key, stream.admin.list_shards())

    def of_lease(lease: Lease) -> LagSummary:
        return _of_lease(stream, lease, leases, first.at)

    def of_unleased(shard: Unleased) -> LagSummary:
        return _of_unleased(stream, shard)

    unended = [lease for lease in leases.values() if not lease.is_ended]
    with ThreadPoolExecutor(_THREADS) as pool:
        lines = [
            *pool.map(of_lease, unended),
            *pool.map(of_unleased, unleased(shards, leases, first)),
        ]
    return tuple(sorted(lines, key=lambda line: line.shard))


def _of_lease(
    stream: OpenStream,
    lease: Lease,
    leases: Mapping[str, Lease],
    start_at: WallTime | None,
) -> LagSummary:
    line = lease_summary(lease, WallTime(time.time()))
    parents = [display_name(parent) for parent in unended_parents(lease, leases)]
    waits = f"waits for {' and '.join(parents)}" if parents else ""
    return lag_summary(
        shard=line.shard,
        state=line.state,
        owner="" if line.state == "offered" else line.owner,
        checkpoint=line.checkpoint,
        lag=lag_of_lease(lease, start_at, stream.reader),
        retention_s=_retention_s(stream),
        note="; ".join(part for part in (waits, line.halt_reason, line.note) if part),
    )


def _of_unleased(stream: OpenStream, shard: Unleased) -> LagSummary:
    at_tip = Lag(0.0, note="it would begin at the tip")
    return lag_summary(
        shard=shard.shard_id,
        state="no lease",
        owner="",
        checkpoint="",
        lag=at_tip
        if shard.start is None
        else measure(stream.reader, shard_id_of(shard.shard_id), shard.start, TRIM_HORIZON),
        retention_s=_retention_s(stream),
        note=shard.note,
    )
