"""`kclrun state rebuild`: makes lost state again, by a replay up to the checkpoints of the rows.

`state/beginning.py` decides what is read. This module refuses what must not be rebuilt now, runs
the replay, writes each state as a version of the fleet's store, and names it on the row. A row is
written by an owner for a moment, so that a fleet that starts meanwhile is never overruled.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import ends_with_plan
from kclrun.cli.leases.reset import rows_to_change, watched_rows
from kclrun.cli.leases.rows import print_failures, write_rows
from kclrun.cli.messages import echo
from kclrun.cli.replay import command
from kclrun.cli.services import open_streams, refuse_expired
from kclrun.cli.stored_state import read_state, with_stores
from kclrun.config.changes import refuse_changes
from kclrun.config.schema import stream_name
from kclrun.config.units import StartPosition
from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, Owner
from kclrun.model.output import Cursor
from kclrun.model.sequence import AT_TIMESTAMP, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import ShardGraph
from kclrun.model.state import is_own_version, version_folder
from kclrun.model.stream import display_name, shard_id_of, stream_of
from kclrun.model.time import WallTime, utc_text
from kclrun.operating.replay import ReplayOptions, replay_table
from kclrun.operating.reset import refuse_owners
from kclrun.operating.summaries import shortened
from kclrun.protocol import writes
from kclrun.state.beginning import KeptSince, beginning_of, stops_of
from kclrun.state.chain import ChainReader
from kclrun.state.kept import MemoryEntries
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.stores.state_versions import StateVersions

if TYPE_CHECKING:
    from kclrun.cli.config_options import Configuration
    from kclrun.cli.services import Aws, OpenStream
    from kclrun.ports import VersionStore


class RebuildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line. `shards` empty: those that lack their state, or all."""

    shards: tuple[str, ...] = ()
    is_all: bool = False
    begin: StartPosition | None = None
    stream: str | None = None
    folder: Path | None = None


class _RebuildTarget(msgspec.Struct, frozen=True):
    """A row whose state is made again, the store for it, and why it cannot be used now."""

    row: Lease
    store: VersionStore
    why: str

    @property
    def shard_id(self) -> str:
        return shard_id_of(self.row.key)


class _Rebuild(msgspec.Struct, frozen=True):
    """The plan: the targets, and the replay that makes their state."""

    targets: Sequence[_RebuildTarget]
    asked: ReplayOptions
    configuration: Configuration
    folder: Path


def rebuild_state(
    configuration: Configuration, options: RebuildOptions, *, is_confirmed: bool
) -> int:
    """Show the plan, or do it; the exit code. Raises: SettingsError, TableRefused, ServiceError
    leaves before anything is written."""
    from kclrun.cli.services import Aws

    refuse_changes(
        configuration.settings, "state rebuild", "that of a DynamoDB table keeps 24 hours"
    )
    if configuration.settings.streams and options.stream is None:
        raise click.UsageError("Which of the streams? Name one with --stream.")
    aws = Aws(configuration.settings)
    rows = rows_to_change(aws)
    refuse_owners(rows)
    if is_confirmed:
        rows = watched_rows(aws, rows)
    plan = _plan(configuration, options, aws, rows)
    if plan is None:
        echo("Every shard has its state. Nothing to do.")
        return exit_codes.DRAINED
    for line in _lines(plan):
        echo(line)
    if ends_with_plan(is_confirmed=is_confirmed):
        return exit_codes.DRAINED
    return _replay_and_write(plan, aws)


def _plan(
    configuration: Configuration, options: RebuildOptions, aws: Aws, rows: Iterable[Lease]
) -> _Rebuild | None:
    narrowed = configuration
    if options.stream is not None:
        settings = configuration.settings.of_stream(options.stream)
        narrowed = msgspec.structs.replace(configuration, settings=settings)
    name = narrowed.settings.sources[0].name
    opened = open_streams(aws)
    key, stream = next(
        (k, opened_stream)
        for k, opened_stream in opened.items()
        if opened_stream.settings.name == name
    )
    mine = [row for row in rows if stream_of(row.key) == key]
    targets = _targets(options, with_stores(aws, mine))
    if not targets:
        return None
    by_shard = {shard_id_of(row.key): row for row in mine}
    shards = ShardGraph(stream.admin.list_shards())
    stops = stops_of([target.row for target in targets], by_shard, shards)
    start = _start(options.begin, stops, by_shard, shards, stream)
    asked = ReplayOptions(start=start, stops=stops)
    folder = (options.folder or Path(asked.name)).absolute()
    return _Rebuild(targets, asked, narrowed, folder)


def _targets(
    options: RebuildOptions, rows: Iterable[tuple[Lease, VersionStore]]
) -> list[_RebuildTarget]:
    """Raises: SettingsError for a shard without a lease, or one that has not begun."""
    found, targets = set(), []
    for row, store in rows:
        names = {row.key, shard_id_of(row.key), display_name(row.key)} & set(options.shards)
        found |= names
        if options.shards and not names:
            continue
        if (
            row.checkpoint.is_sentinel
            and not row.is_ended
            and not is_own_version(row.state_version)
        ):
            if names:
                raise SettingsError(
                    f"{display_name(row.key)} has not begun: it has no state of its own"
                )
            continue
        wrong = read_state(row, store)[0].wrong
        if wrong or options.is_all or names:
            targets.append(
                _RebuildTarget(row, store, wrong or "has its state, which is made again")
            )
    if missing := set(options.shards) - found:
        raise SettingsError(f"--shard: no lease of {', '.join(sorted(missing))}")
    return targets


def _start(
    begin: StartPosition | None,
    stops: Mapping[str, ExtendedSequenceNumber],
    rows: Mapping[str, Lease],
    shards: ShardGraph,
    stream: OpenStream,
) -> StartPosition:
    now, summary = WallTime(time.time()), stream.summary
    if begin is not None:
        refuse_expired(summary, begin.at, now, "--from")
        return begin
    kept = KeptSince(WallTime(now - summary.retention_hours * 3600.0), summary.created_at)
    began = beginning_of(stops, rows, shards, kept)
    return StartPosition(TRIM_HORIZON if began is None else AT_TIMESTAMP, began)


def _lines(plan: _Rebuild) -> Iterator[str]:
    at = plan.asked.start.at
    began = "the oldest record" if at is None else utc_text(at, "milliseconds")
    settings = plan.configuration.settings
    store = "" if settings.state is None else settings.state.store
    for target in plan.targets:
        row = target.row
        yield f"{display_name(row.key)}, up to {shortened(str(row.checkpoint))}: {target.why}"
    yield f"{len(plan.asked.stops or ())} shards are read again, from {began} on:"
    yield f"  leases: of their own, in table {replay_table(settings, plan.asked)}"
    yield "  rows: dropped; the outputs have them already"
    yield f"  state: made in {plan.folder}, then written to {store}"
    yield "  What the processor itself does elsewhere, it does again."


def _replay_and_write(plan: _Rebuild, fleet: Aws) -> int:
    from kclrun.cli.services import Aws

    files = command.files_of(plan.configuration, plan.asked, plan.folder)
    of_replay = Aws(files.settings)
    leases = command.leases_of(files, of_replay) or ()
    if not _all_made(plan, leases):
        command.run_on(files, of_replay, leases)
        leases = command.leases_of(files, of_replay) or ()
    if not _all_made(plan, leases):
        echo("The replay is not complete. The same command goes on with it.", err=True)
        return exit_codes.CUT_SHORT
    made = {shard_id_of(lease.key): lease for lease in leases}
    name = files.settings.sources[0].name
    folder = version_folder(files.settings.application, stream_name(name))
    store = StateFiles(plan.folder / "state", folder)
    # One at a time: the state of a shard is in memory while it is written.
    outcomes = write_rows(
        plan.targets,
        lambda target: _write(fleet, target, made[target.shard_id], store),
        at_once=1,
    )
    failed = [
        (target.row.key, outcome)
        for target, outcome in outcomes
        if not isinstance(outcome, writes.Applied)
    ]
    if failed:
        code = print_failures(failed)
        echo("The same command goes on with these.", err=True)
        return code
    command.delete_leases(files.settings, files.settings.table)
    shutil.rmtree(plan.folder)
    halted = [
        display_name(target.row.key) for target in plan.targets if target.row.halt is not None
    ]
    if halted:
        echo(f"Let them go on:  kclrun leases resume {' '.join(halted)} --yes")
    return exit_codes.DRAINED


def _all_made(plan: _Rebuild, leases: Iterable[Lease]) -> bool:
    """Whether the replay has made the state of each target, at its position."""
    made = {shard_id_of(lease.key): lease for lease in leases}
    stops = plan.asked.stops or {}
    return all(
        (lease := made.get(target.shard_id)) is not None
        and is_own_version(lease.state_version)
        and lease.checkpoint.of_record >= stops[target.shard_id]
        for target in plan.targets
    )


def _write(aws: Aws, target: _RebuildTarget, made: Lease, store: StateFiles) -> writes.Outcome:
    """Write the state as a version of its shard, and name it on the row. Raises: SinkError."""
    row = target.row
    assert made.state_version is not None, "the replay is complete"
    entries = MemoryEntries()
    reader = ChainReader(
        made.state_version, target.shard_id, lambda name: store.read(target.shard_id, name)
    )
    entries.load(reader)
    nonce = secrets.token_hex(4)
    versions = StateVersions(target.store, target.shard_id, row.counter, nonce, entries)
    versions.begin(Cursor.of(row.checkpoint))
    versions.commit()
    assert versions.version is not None, "a first version is written even if it is empty"
    outcome = _name_version(aws, row, versions.version)
    if isinstance(outcome, writes.Applied):
        echo(f"{display_name(row.key)}: has its state at {shortened(str(row.checkpoint))}")
    return outcome


def _name_version(aws: Aws, row: Lease, version: str) -> writes.Outcome:
    """Take the lease as it was seen, and release it where it was, with the version. The row's
    outputs stay, unless the checkpoint was moved since they were written: then they begin at it."""
    settings = aws.settings
    me = Owner(settings.leases.group, "rebuild", secrets.token_hex(8)).id
    outcome = aws.table.write(
        writes.Take(
            row.key,
            me,
            row.owner,
            row.counter,
            row.failover_s or float(settings.leases.failover),
            row.start or settings.start_text,
            stream_created_at=row.stream_created_at,
        )
    )
    if not isinstance(outcome, writes.Applied):
        return outcome
    at = row.checkpoint
    cursors = () if row.outputs is None or row.is_moved_past_outputs else None
    return aws.table.write(writes.Release(row.key, me, row.counter + 1, at, at, cursors, version))
