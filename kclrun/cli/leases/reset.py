"""`kclrun reset`: moves the checkpoints of a stopped fleet, to read again or to skip.

`operating/reset.py` decides which rows are written, and in which order; this module refuses what
must not be reset now, shows the plan, and sends it. Each write is conditional on the row as seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never

import click
import msgspec

from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigCommand,
    config_options,
    ends_with_plan,
    shards_option,
    yes_option,
)
from kclrun.cli.lag import lag_of_lease
from kclrun.cli.leases import views
from kclrun.cli.leases.rows import lease_of, print_failures, write_rows
from kclrun.cli.messages import echo
from kclrun.cli.services import refuse_expired
from kclrun.cli.tables import most_on_terminal
from kclrun.cli.times import GivenTime, TimeType, time_option
from kclrun.config.changes import refuse_changes
from kclrun.config.outputs import output_places
from kclrun.config.schema import is_named, stream_name, why_not_named
from kclrun.config.units import StartPosition
from kclrun.errors import SettingsError, TableRefused
from kclrun.leases.shard_sync import Listing
from kclrun.model.lease import Halt, Lease, LeaseKey
from kclrun.model.output import setting_of
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON
from kclrun.model.stream import StreamKey, qualified_shards, stream_of
from kclrun.model.time import Instant, WallTime, backoff_s
from kclrun.operating.positions import (
    KEPT_BYTES_MAX,
    KeptPositions,
    parse_kept,
    plan_kept_shards,
    plan_positions,
)
from kclrun.operating.reset import (
    ResetPlan,
    ResetStart,
    ResetWrite,
    is_written,
    owned,
    plan_reset,
    plan_shards,
    position_at,
    refuse_life,
    refuse_owners,
)
from kclrun.operating.reset_words import (
    StreamReset,
    halt_reason,
    moved_in_words,
    output_in_words,
    position_after,
    removed_in_words,
)
from kclrun.ports import LeaseTable, ShardFilter
from kclrun.protocol.writes import (
    Applied,
    ConditionFailed,
    CreateLease,
    Outcome,
    OutcomeUnknown,
    Refused,
    ResetLease,
    Throttled,
    Unavailable,
    keys_of,
)

if TYPE_CHECKING:
    from kclrun.cli.services import Aws, OpenStream
    from kclrun.config.schema import Settings

# Shards read at the same time: as many as the client has connections.
_SHARDS_AT_ONCE: Final = 8
# What `--to` ends with if it names a file of positions.
_KEPT_SUFFIX: Final = ".json"
# Of each kind of row; a stream may have a thousand.
_ROWS_SHOWN_MAX: Final = 20
_KEEP: Final = (
    "--outputs keep is not possible: an output that stores its cursor would begin where it stands,"
    " and so undo the reset. With `again`, the default, rows appear again"
)


_INCOMPLETE: Final = (
    "The reset is not complete: the leases that it began are halted and name it. Stop all managers,"
    " and repeat it"
)


class _ResetOptions(msgspec.Struct, frozen=True):
    """The command line: `text` is that of `--to`, `kept` the positions of its file, which
    has no start. `streams` and `shards` empty: all."""

    start: StartPosition
    text: str
    streams: tuple[str, ...]
    shards: tuple[str, ...]
    drops_state: bool = False
    kept: KeptPositions | None = None


@click.command(cls=ConfigCommand)
@config_options
@time_option(
    "--to",
    kind=TimeType(TRIM_HORIZON, LATEST, is_other=lambda text: text.endswith(_KEPT_SUFFIX)),
    metavar="TRIM_HORIZON|LATEST|TIME|FILE.json",
    required=True,
    help_text="All that the stream has, nothing up to now, from a time on, or the positions that"
    " `kclrun leases --json` printed into a file.",
)
@shards_option
@click.option(
    "--stream",
    "streams",
    multiple=True,
    metavar="NAME|ARN",
    help="One of several streams of the application; may be repeated.",
)
@click.option(
    "--outputs",
    type=click.Choice(["again", "keep"]),
    default="again",
    show_default=True,
    help="again: rows of records that are read again appear again. keep: refused, with the reason.",
)
@click.option(
    "--state",
    type=click.Choice(["drop"]),
    help="drop: keyed state begins empty. With `state:` in the settings it must be said.",
)
@yes_option
def reset(
    config: ConfigChoice,
    *,
    to: GivenTime,
    shards: tuple[str, ...],
    streams: tuple[str, ...],
    outputs: str,
    state: str | None,
    yes: bool,
) -> int:
    """Move the checkpoints of a stopped fleet: read a stream again, or skip.

    It is refused while an owner renews a lease, which it watches for one failover. A reset that is
    cut short leaves halted leases that name it; the same command again completes it.

    \b
    kclrun reset --config app.yaml --to 2026-03-01T14:00:00Z          show what would happen
    kclrun reset --config app.yaml --to 2026-03-01T14:00:00Z --yes
    kclrun reset --config app.yaml --to LATEST --yes                  skip what waits
    kclrun leases --config app.yaml --json > kept.json                keep the positions of now
    kclrun reset --config app.yaml --to kept.json --yes               go back to them
    """
    if outputs == "keep":
        raise click.UsageError(_KEEP)
    if shards and streams:
        raise click.UsageError("--shard names its stream itself (orders:2): leave --stream out.")
    from kclrun.cli.services import fleet_aws

    asked = _asked(to, streams, shards, drops_state=state == "drop")
    return _reset(fleet_aws(config, "state"), asked, is_confirmed=yes)


def _asked(
    to: GivenTime, streams: tuple[str, ...], shards: tuple[str, ...], *, drops_state: bool
) -> _ResetOptions:
    """Raises: SettingsError for a file that does not hold positions."""
    name = to.text
    if to.start is not None:
        return _ResetOptions(to.start, name, streams, shards, drops_state)
    try:
        with Path(name).open("rb") as file:
            text = file.read(KEPT_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"--to: {name} cannot be read: {error.strerror}") from None
    if len(text) > KEPT_BYTES_MAX:
        raise SettingsError(f"--to: {name} is larger than the positions of any table")
    start = StartPosition(TRIM_HORIZON)
    return _ResetOptions(start, name, streams, shards, drops_state, parse_kept(text, name))


def _reset(aws: Aws, asked: _ResetOptions, *, is_confirmed: bool) -> int:
    from kclrun.cli.doctor import refuse_native
    from kclrun.cli.services import open_streams, refuse_other_kind

    _refuse_state(aws.settings, asked)
    if asked.start.at is not None:
        refuse_changes(
            aws.settings,
            "reset to a time",
            "that of a DynamoDB table cannot be read from one; --to TRIM_HORIZON or LATEST",
        )
    opened = open_streams(aws)
    keys = frozenset(lease_of(aws, shard).key for shard in asked.shards)
    chosen = _chosen(opened, asked.streams, keys)
    # A shard alone goes to its position whatever the rows of the others are.
    rows = views.scan_leases(aws) if asked.shards else rows_to_change(aws)
    refuse_other_kind(aws, {key: stream.summary.created_at for key, stream in opened.items()})
    refuse_owners(rows)
    if is_confirmed:
        refuse_native(aws)
        rows = watched_rows(aws, rows)
    resets = [_planned(aws, (key, opened[key]), rows, asked, keys) for key in chosen]
    for planned in resets:
        _show(planned, aws.settings, asked.text)
    _show_what_stays(aws.settings, rows)
    if not is_confirmed:
        echo("Stop the fleet first.")
    if ends_with_plan(is_confirmed=is_confirmed):
        return exit_codes.DRAINED
    # A stream whose reset is not complete does not stop those of the others.
    code = max((_write(aws, planned, asked.text) for planned in resets), default=exit_codes.DRAINED)
    if code != exit_codes.DRAINED:
        return code
    echo("The next fleet to start begins there.")
    return exit_codes.DRAINED


def _refuse_state(settings: Settings, asked: _ResetOptions) -> None:
    """Check the settings of the state. A version belongs to one position, so after a reset the
    state can only begin empty. A lease alone, or one at a kept position, would begin with the
    state of its parents, or halt [K13, K16]. Raises: SettingsError."""
    if settings.state is None:
        if asked.drops_state:
            raise SettingsError("--state drop: the settings have no `state:`, so there is none")
        return
    if not asked.drops_state:
        raise SettingsError(
            "the application has `state:`, which is of the checkpoints as they are: a reset cannot"
            " keep it\nWith --state drop each lease begins with an empty state; with --to"
            " TRIM_HORIZON it is built again from all that the stream still has\nState that is lost"
            " or wrong is made again at the checkpoints as they are with  kclrun state rebuild"
        )
    if asked.shards or asked.kept is not None:
        raise SettingsError(
            "--state drop: an empty state begins where a whole stream begins anew: with --to"
            " TRIM_HORIZON, LATEST or a time, and without --shard"
        )


def _chosen(
    opened: Mapping[StreamKey, OpenStream], named: Sequence[str], keys: Iterable[LeaseKey]
) -> tuple[StreamKey, ...]:
    """The streams to reset. Raises: SettingsError for a stream that is not of the application."""
    if keys:
        return tuple(sorted({stream_of(key) for key in keys}))
    known = {key: stream.settings.name for key, stream in opened.items()}
    for name in named:
        if not any(is_named(stream, name) for stream in known.values()):
            raise SettingsError(f"--stream: {why_not_named(list(known.values()), name)}")
    return tuple(
        key
        for key, stream in known.items()
        if not named or any(is_named(stream, name) for name in named)
    )


def rows_to_change(aws: Aws) -> tuple[Lease, ...]:
    """The rows of the table, all of which are to be changed together.

    Raises: TableRefused with each one that cannot be read; NotFound without a table.
    """
    scanned = views.scan_table(aws)
    if scanned.broken:
        named = "\n".join(
            f"row {key} cannot be read as a lease: {scanned.reasons.get(key, 'no reason')}"
            for key in sorted(scanned.broken)[: most_on_terminal(_ROWS_SHOWN_MAX)]
        )
        raise TableRefused(f"{named}\nRepair or delete them first, see  kclrun doctor")
    return scanned.leases


def watched_rows(aws: Aws, rows: tuple[Lease, ...]) -> tuple[Lease, ...]:
    """The rows one failover later, when no owner has renewed: each has passed its fence [P7, P9].
    Without an owner they are as they were. Raises: TableRefused."""
    if not owned(rows):
        return rows
    later = views.watch_table(aws, rows).leases
    refuse_life(rows, later)
    refuse_owners(later)
    return later


def _planned(
    aws: Aws,
    source: tuple[StreamKey, OpenStream],
    rows: Iterable[Lease],
    asked: _ResetOptions,
    keys: Iterable[LeaseKey],
) -> StreamReset:
    """Raises: TableRefused, SettingsError for a time that the stream does not keep; ServiceError
    leaves."""
    key, stream = source
    name = stream_name(stream.settings.name)
    mine = tuple(row for row in rows if stream_of(row.key) == key)
    if not mine:
        raise SettingsError(f"{name} has no lease yet: a fleet that starts begins at `start`")
    now, start = WallTime(time.time()), asked.start
    refuse_expired(stream.summary, start.at, now, "--to")
    listed = qualified_shards(key, stream.admin.list_shards())
    listing = Listing(listed, aws.source_client.service_time(), Instant(time.monotonic()))
    begin = ResetStart(
        start.sentinel if start.at is None else position_at(start.at),
        listing.listed_at,
        Halt(halt_reason(asked.text, now), now, now),
        stream.summary.created_at,
    )
    shards = frozenset(shard for shard in keys if stream_of(shard) == key)
    known = {row.key: row for row in mine}
    if asked.kept is not None:
        kept = {shard: at for shard, at in asked.kept.items() if stream_of(shard) == key}
        if not kept:
            raise SettingsError(f"{asked.text} has no position of {name}")
        plan = (
            plan_kept_shards(mine, listing, kept, shards, begin)
            if shards
            else plan_positions(mine, listing, kept, begin)
        )
        return StreamReset(key, name, plan, known, _notes(plan, known, stream))
    if shards:
        plan = plan_shards(mine, listing, shards, begin)
    else:
        there = stream.admin.list_shards(ShardFilter.at(start.sentinel, start.at))
        plan = plan_reset(mine, listing, qualified_shards(key, there), begin)
    return StreamReset(key, name, plan, known, {})


def _notes(
    plan: ResetPlan, known: Mapping[LeaseKey, Lease], stream: OpenStream
) -> dict[LeaseKey, str]:
    """By lease, the losses at its kept position: skipped records, and expired records, which a read
    of the shard shows."""

    def of(write: ResetLease | CreateLease) -> tuple[LeaseKey, str]:
        (key,) = keys_of(write)
        to = position_after(write)
        row = known.get(key)
        is_forward = (
            row is not None and (to == SHARD_END or not to.is_sentinel) and row.checkpoint < to
        )
        skips = "forward, what is between is skipped" if is_forward else ""
        moved = Lease(key=key, checkpoint=to)
        lost = "" if to.is_sentinel else lag_of_lease(moved, None, stream.reader).note
        return key, "; ".join(part for part in (skips, lost) if part)

    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
        return dict(pool.map(of, (*plan.begin, *plan.end)))


def _show(planned: StreamReset, settings: Settings, to: str) -> None:
    generation = planned.plan.generation
    echo(f"{planned.name}, table {settings.table}: to {to}, generation {generation}")
    _show_rows(moved_in_words(planned, to))
    _show_rows(removed_in_words(planned))
    for place in output_places(settings, planned.stream):
        echo(f"  {setting_of(place.name)}: {output_in_words(place, generation)}")
    if settings.state is not None:
        echo("  state: dropped, with its timers: each lease begins with an empty one")


def _show_rows(lines: Iterable[str]) -> None:
    rows = list(lines)
    shown = rows[: most_on_terminal(_ROWS_SHOWN_MAX)]
    for line in shown:
        echo(f"  {line}")
    if len(shown) < len(rows):
        echo(f"  … and {len(rows) - len(shown)} more")


def _show_what_stays(settings: Settings, rows: Iterable[Lease]) -> None:
    echo("What the processor itself did elsewhere, it does again for records read again.")
    if settings.on_error.then == "dead-letter":
        echo(
            "Dead letters stay. A record that is read again and given up again has a second letter;"
            " redrive or drop letters before, or both the letter and the record are processed."
        )
    if owned(rows):
        echo("Leases have owners: with --yes nothing is written while one of them renews.")


def _write(aws: Aws, planned: StreamReset, to: str) -> int:
    """Make the writes, stage by stage; the exit code. A stage that fails is the last one."""
    plan, patience_s = planned.plan, float(aws.settings.aws.start_timeout)
    try:
        for stage in plan.stages:
            outcomes = write_rows(stage, partial(_settled, aws.table, patience_s))
            failed = [
                (keys_of(write)[0], outcome)
                for write, outcome in outcomes
                if not isinstance(outcome, Applied)
            ]
            if failed:
                code = print_failures(failed)
                echo(_INCOMPLETE, err=True)
                return code
    except KeyboardInterrupt:
        echo(_INCOMPLETE, err=True)
        raise
    moved, removed = len(plan.begin) + len(plan.end), len(plan.remove)
    echo(f"{planned.name}: {moved} leases are at {to}, {removed} were removed")
    return exit_codes.DRAINED


def _settled(table: LeaseTable, patience_s: float, write: ResetWrite) -> Outcome:
    """Send until the outcome is known. A repetition expects the same row, so that the write applies
    once; the row that it then meets shows whether it had applied [P6]."""
    deadline, attempt = time.monotonic() + patience_s, 0
    while True:
        outcome = table.write(write)
        match outcome:
            case ConditionFailed(row=row):
                return Applied(row) if is_written(write, row) else outcome
            case Applied() | Refused():
                return outcome
            case Throttled() | Unavailable() | OutcomeUnknown():
                pass
            case _:
                assert_never(outcome)
        attempt += 1
        pause_s = backoff_s(attempt, 1.0)
        if time.monotonic() + pause_s >= deadline:
            return outcome
        time.sleep(pause_s)
