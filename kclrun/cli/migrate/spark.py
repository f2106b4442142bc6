"""`kclrun migrate spark`: writes a stopped query's positions to the lease table.

It shows the plan, and with `--yes` writes it. Missing rows are put. Rows with an older position are
taken, moved and released, as an owner does, under the conditions of the protocol [P2]. It writes
nothing while an owner renews a lease. A position never goes back. A second run changes nothing. A
row that cannot be read, or whose write fails, is named, and does not stop the others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import msgspec

from kclrun.cli.config_options import ends_with_plan
from kclrun.cli.leases.rows import RowOutcome, print_failures, write_rows
from kclrun.cli.leases.views import failover_of, unreadable_rows
from kclrun.cli.messages import echo
from kclrun.cli.services import Aws
from kclrun.cli.startup import open_world, patiently
from kclrun.config.schema import stream_name
from kclrun.config.state import STATE_FOLDER, state_place
from kclrun.destinations import open_versions
from kclrun.errors import NotFound, OffsetRefused, SettingsError, TableRefused, Unavailable
from kclrun.model.lease import OFFERED, Lease, LeaseKey, Owner, OwnerId
from kclrun.model.output import Cursor
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import ShardGraph
from kclrun.model.time import Instant
from kclrun.operating.summaries import shortened
from kclrun.ports import LeaseTable, ScanPage, StreamSummary, VersionStore
from kclrun.protocol import writes
from kclrun.spark import export
from kclrun.spark.keyed.names import ANY_RUN, Family, QueryPlace
from kclrun.spark.keyed.query_state import entries_at, written
from kclrun.spark.keyed.shard_state import chain_at
from kclrun.spark.offsets import Offset
from kclrun.spark.positions import SHARD_END as ENDED
from kclrun.spark.positions import TRIM_HORIZON as TRIM

if TYPE_CHECKING:
    from kclrun.config.schema import Settings
    from kclrun.model.reading import FetchedPage
    from kclrun.model.record import StartPoint

T = TypeVar("T")
Rows = Mapping[str, Lease]

# Shards read at the same time: as many as the client has connections.
_SHARDS_AT_ONCE: Final = 8


def import_leases(settings: Settings, place: str, *, is_confirmed: bool) -> int:
    """Show the writes of the import, or make them; returns the exit code.

    Raises: SettingsError for several streams or no checkpoint; OffsetRefused for a checkpoint of
    another stream; TableRefused while leases are renewed; a ServiceError leaf.
    """
    if settings.streams:
        raise SettingsError(
            "a query's positions are written to a table of one stream, those of several one after"
            " the other: migrate them with `stream:` in the configuration"
        )
    folder = export.local_folder(place)
    aws = Aws(settings)
    batch = export.read_committed(folder)
    summary = _patient(aws, aws.stream.summary)
    offset = _offset(batch, summary)
    scanned = _rows(aws)
    rows: Rows | None = None
    if scanned is not None:
        rows = {lease.key: lease for lease in scanned.leases}
    unreadable = [] if scanned is None else unreadable_rows(scanned)
    _refuse_live_owners(aws, rows)
    graph = ShardGraph(_patient(aws, aws.stream.list_shards))
    steps = _left_alone(_plan(aws, offset, rows, graph), unreadable)
    state = _state(aws, folder, offset, graph, export.lineage_of_stream(batch, summary.arn))
    _show(steps, batch, aws, is_new=rows is None)
    if state is not None:
        echo("The state at these positions is copied to state.store.")
    has_changes = not all(isinstance(step, export.Keep) for step in steps)
    if ends_with_plan(is_confirmed=is_confirmed, has_changes=has_changes):
        return print_failures(unreadable)
    if export.read_committed(folder) != batch:
        raise OffsetRefused(
            f"{place} has gone on meanwhile: stop the query first, then repeat this"
        )
    return _write(open_world(settings).table, settings, steps, state, unreadable)


def _offset(batch: export.CommittedBatch, summary: StreamSummary) -> Offset:
    offset = export.offset_of_stream(batch, summary.arn)
    if offset.streams[""].created_ms != round(summary.created_at * 1000):
        raise OffsetRefused(
            f"{summary.name} was deleted and re-created since the query's checkpoint was begun:"
            " its positions are of records that are gone"
        )
    return offset


def _rows(aws: Aws) -> ScanPage | None:
    """The table's rows, as one page; None if the table does not exist yet.

    Raises: TableRefused for a table of several streams.
    """
    leases: list[Lease] = []
    reasons: dict[str, str] = {}
    try:
        for page in _patient(aws, lambda: list(aws.table.scan())):
            leases += page.leases
            reasons |= {key: page.reasons.get(key, "") for key in page.broken}
    except NotFound:
        return None
    if any(":" in lease.key for lease in leases):
        raise TableRefused(
            f"table {aws.settings.table} is of several streams: positions of a query are written"
            " to tables of one"
        )
    return ScanPage(tuple(leases), tuple(reasons), reasons=reasons)


def _left_alone(
    steps: Sequence[export.Step], unreadable: Iterable[tuple[LeaseKey, TableRefused]]
) -> tuple[export.Step, ...]:
    """The steps, without a write of a row that cannot be read."""
    why = {str(key) for key, _ in unreadable}
    return tuple(
        export.Keep(step.shard_id, None, "its row cannot be read") if step.shard_id in why else step
        for step in steps
    )


def _refuse_live_owners(aws: Aws, rows: Rows | None) -> None:
    """Refuse the import while an owner renews [P9].

    Such an owner would go on from its own position and ignore the written one.
    """
    owned = [row for row in (rows or {}).values() if _has_owner(row)]
    if not owned:
        return
    failover_s = failover_of(aws, owned)
    echo(f"{len(owned)} leases have owners: watching for {failover_s:g} s …", err=True)
    time.sleep(failover_s)
    later = _rows(aws)
    counters = {row.key: row.counter for row in (later.leases if later else ()) if _has_owner(row)}
    alive = sorted({str(row.owner) for row in owned if counters.get(row.key) != row.counter})
    if alive:
        raise TableRefused(
            f"leases of table {aws.settings.table} are being renewed, by {alive[0]}"
            + (f" and {len(alive) - 1} more" if len(alive) > 1 else "")
            + "\nStop every manager and worker of the application first, then repeat this"
        )


def _has_owner(row: Lease) -> bool:
    return not row.is_ended and row.owner not in {None, OFFERED}


def _state(
    aws: Aws, folder: Path, offset: Offset, graph: ShardGraph, lineage: str | None
) -> _StateCopier | None:
    """The state to copy with the positions; None if neither side has one.

    Raises: SettingsError where only one of the two has state.
    """
    place, settings = state_place(aws.settings), aws.settings
    if place is None and lineage is not None:
        raise SettingsError(
            "the query has keyed state, and the configuration has no `state`: name a state.store"
            " for it to go to"
        )
    if place is not None and lineage is None and not place.may_begin_empty:
        raise SettingsError(
            "the configuration has `state`, and the query had none: its records left none. To go on"
            " with its positions and an empty state, set state.begin: empty"
        )
    if place is None or lineage is None:
        return None
    of_query = QueryPlace(place, settings.application, stream_name(settings.only_stream))
    beside = folder / STATE_FOLDER
    from_place = place
    if beside.is_dir():
        from_place = msgspec.structs.replace(place, path=str(beside), s3=None)
    access = (aws.kinesis, aws.credentials.current)
    return _StateCopier(
        open_versions(from_place, of_query.folder(lineage), *access),
        open_versions(place, of_query.folder_of_fleet, *access),
        offset,
        graph,
    )


class _StateCopier:
    """Copies the state of shards from a query's store into that of the fleet."""

    def __init__(
        self, source: VersionStore, fleet: VersionStore, offset: Offset, graph: ShardGraph
    ) -> None:
        self._source = source
        self._fleet = fleet
        self._offset = offset
        self._graph = graph

    def with_version(self, step: export.Create | export.Move) -> export.Create | export.Move:
        """The step with a version that is durable, if the query has state of the shard there.

        Raises: SinkError; SettingsError, naming the version that is missing.
        """
        shard_id, checkpoint = step.shard_id, step.position
        is_known = shard_id in self._offset.shards
        at = self._offset.shards.get(shard_id, ENDED if checkpoint == SHARD_END else TRIM)
        is_passed = not is_known and at == ENDED
        if is_passed and chain_at(self._source, shard_id, at, ANY_RUN) is None:
            return step  # its children have state of their own
        shard = self._graph.get(shard_id)
        family = Family(None) if shard is None else Family(shard.hash_range, shard.parents)
        kept = entries_at(self._source, shard_id, at, family)
        is_first = checkpoint.is_sentinel and checkpoint != SHARD_END
        if is_first and next(kept.changes(), None) is None:
            return step
        # By the token of our own write, so that a later owner may delete it.
        chain = written(kept, self._fleet, shard_id, step.token, Cursor.of(checkpoint))
        assert chain.newest is not None, "a snapshot was written"
        return export.with_state(step, chain.newest)


def _plan(
    aws: Aws, offset: Offset, rows: Rows | None, graph: ShardGraph
) -> tuple[export.Step, ...]:
    reader = _PatientReader(aws)

    def done(shard_id: str) -> export.LeaseCheckpoint:
        if shard_id not in graph:
            # The shard cannot be read any more, and it gets no row. It matters only if it is ended.
            is_ended = str(offset.shards[shard_id]) == SHARD_END.sequence_number
            return export.LeaseCheckpoint(SHARD_END if is_ended else TRIM_HORIZON)
        return export.checkpoint_for(reader, shard_id, offset.shards[shard_id])

    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        found = dict(zip(offset.shards, pool.map(done, offset.shards), strict=True))
    return export.plan_rows(found, graph, rows or {})


class _PatientReader:
    """The stream's reader. Each call is repeated during throttling and outages, for at most
    `aws.start_timeout`."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        return _patient(self._aws, partial(self._aws.reader.iterator, shard_id, start))

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        return _patient(self._aws, partial(self._aws.reader.fetch, iterator, limit))


def _patient(aws: Aws, call: Callable[[], T]) -> T:
    patience_s = float(aws.settings.aws.start_timeout)
    deadline = Instant(time.monotonic() + patience_s)
    what = f"{aws.called_stream(aws.settings.only_stream)}, or {aws.called_table}"
    return patiently(call, deadline, patience_s, what=what)


def _show(
    steps: Sequence[export.Step], batch: export.CommittedBatch, aws: Aws, *, is_new: bool
) -> None:
    table = aws.settings.table
    echo(f"Batch {batch.batch_id} is the last one committed.")
    if batch.is_another_begun:
        echo(
            "The batch after it was begun and not committed: its records are read again, also those"
            " that are in the sink already."
        )
    echo(f"Table {table}" + (" will be made:" if is_new else ":"))
    for step in steps:
        echo(f"  {_step_words(step)}")
    echo("Do not start the query again from that checkpoint: it knows nothing of the leases.")


def _step_words(step: export.Step) -> str:
    match step:
        case export.Create(lease, note):
            return f"{lease.key}: new, at {shortened(str(lease.checkpoint))}{_because(note)}"
        case export.Move(row, to, _, note):
            former = shortened(str(row.checkpoint))
            halted = "; stays halted" if row.halt is not None else ""
            return f"{row.key}: {former} to {shortened(str(to))}{_because(note)}{halted}"
        case export.Keep(shard_id, row, why):
            at = "no row" if row is None else shortened(str(row.checkpoint))
            return f"{shard_id}: {at}, not touched ({why})"
        case _:
            assert_never(step)


def _because(note: str) -> str:
    return f" ({note})" if note else ""


def _write(
    table: LeaseTable,
    settings: Settings,
    steps: Sequence[export.Step],
    state: _StateCopier | None,
    failed: Sequence[tuple[LeaseKey, RowOutcome]],
) -> int:
    """Make the writes, and name each row that was not written, with `failed`; the exit code."""
    me = Owner(settings.leases.group, "import", os.urandom(8).hex()).id

    unwritten: set[str] = set()

    def write(step: export.Create | export.Move) -> RowOutcome:
        # A parent that ended before its children have rows would let them begin anew.
        if behind := sorted(_children_of(step) & unwritten):
            unwritten.add(step.shard_id)
            return Unavailable(f"not written, because its child {behind[0]} was not")
        unwritten.add(step.shard_id)
        outcome = _perform(table, settings, me, step if state is None else state.with_version(step))
        if isinstance(outcome, writes.Applied):
            unwritten.discard(step.shard_id)
        return outcome

    # Children before their parents, one after the other.
    due = [step for step in steps if not isinstance(step, export.Keep)]
    outcomes = write_rows(due, write, at_once=1)
    failures = [
        (LeaseKey(step.shard_id), outcome)
        for step, outcome in outcomes
        if not isinstance(outcome, writes.Applied)
    ]
    echo(f"{len(due) - len(failures)} rows written to {settings.table}.")
    code = print_failures([*failed, *failures])
    if failures:
        echo(
            "Stop all managers, and repeat this: what is written stays, the rest follows", err=True
        )
    return code


def _children_of(step: export.Create | export.Move) -> frozenset[str]:
    return frozenset(step.lease.children if isinstance(step, export.Create) else step.children)


def _perform(
    table: LeaseTable, settings: Settings, me: OwnerId, step: export.Create | export.Move
) -> writes.Outcome:
    if isinstance(step, export.Create):
        return table.write(writes.CreateLease(step.lease))
    row = step.row
    outcome = table.write(_take(row, settings, me))
    if step.children and isinstance(outcome, writes.Applied):
        key, counter = row.key, row.counter + 1
        outcome = table.write(writes.NameChildren(key, me, counter, step.children))
    if not isinstance(outcome, writes.Applied):
        return outcome
    counter = row.counter + 1 + bool(step.children)
    if step.to == SHARD_END:
        return table.write(
            writes.End(row.key, me, counter, row.checkpoint, step.cursors, step.state_version)
        )
    return table.write(
        writes.Release(
            row.key, me, counter, step.to, row.checkpoint, step.cursors, step.state_version
        )
    )


def _take(row: Lease, settings: Settings, me: OwnerId) -> writes.Take:
    """A take as of a manager. The fleet's settings in the row are not changed [P9]."""
    start = settings.start if isinstance(settings.start, str) else TRIM_HORIZON.sequence_number
    return writes.Take(
        row.key,
        me,
        row.owner,
        row.counter,
        row.failover_s or float(settings.leases.failover),
        row.start or start,
        stream_created_at=row.stream_created_at,
    )
