"""`kclrun doctor`: reports faults of the lease table with evidence, and repairs them with `--yes`.

It reads the table twice, a failover apart, before it reports anything. Without `--yes` it only
reads. With `--yes` all rows are backed up first, each repair is a conditional write, and then the
table is read again. A row whose owner is alive is never written.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from kclrun.aws.rows import BrokenRow, Item, decode_row, kcl3_mode_of
from kclrun.aws.table_setup import refuse_kcl3
from kclrun.cli import exit_codes
from kclrun.cli.config_options import (
    ConfigChoice,
    ConfigCommand,
    config_options,
    ends_with_plan,
    yes_option,
)
from kclrun.cli.messages import echo, naming_table
from kclrun.cli.one_by_one import OneByOne
from kclrun.cli.reports import print_json, print_report
from kclrun.cli.services import Aws, OpenStream, fleet_aws, open_streams
from kclrun.cli.tables import most_on_terminal
from kclrun.cli.waiting import waiting_for
from kclrun.config.kcl import kcl_application
from kclrun.config.units import parse_start
from kclrun.errors import AccessDenied, InvalidRequest, NotFound, SettingsError
from kclrun.files.durable import sync, sync_folder, write_at
from kclrun.leases.shard_sync import Listing
from kclrun.model.lease import KCL3_MODE_KEY, Lease, Owner
from kclrun.model.stream import (
    StreamKey,
    display_name,
    qualified_shards,
    stream_name_of,
    stream_of,
)
from kclrun.model.table import table_name_of
from kclrun.model.time import Instant, WallTime
from kclrun.operating.doctor.diagnosis import diagnose, is_healthy
from kclrun.operating.doctor.findings import (
    Circumstances,
    Finding,
    Kind,
    Look,
    StreamFacts,
    watch_s,
)
from kclrun.operating.doctor.repairs import change_in_words, to_repair
from kclrun.ports import LeaseTable
from kclrun.protocol import writes


class Examination(msgspec.Struct, frozen=True):
    """The findings; `items` are all rows as read by the second scan, at `seen_at`. The rows of the
    streams `left_out` were not examined: they are not there any more."""

    findings: tuple[Finding, ...]
    items: tuple[Item, ...]
    seen_at: WallTime
    left_out: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        return is_healthy(self.findings) and not self.left_out


def examine(aws: Aws, others: OneByOne) -> Examination:
    """Scan, wait, scan again, and diagnose. `others` gets one of several streams that is gone.

    Raises: NotFound for a missing stream or table; another ServiceError leaf.
    """
    left_out: list[str] = []

    def leave_out(name: str, error: NotFound) -> None:
        left_out.append(name)
        others.missing(name, error)

    streams = open_streams(aws, on_missing=leave_out)
    first, _ = _look(aws, streams, left_out)
    began = time.monotonic()
    wait_s = watch_s(first.leases, float(aws.settings.leases.failover))
    echo(f"Watching the counters for {wait_s:g} s …", err=True)
    time.sleep(wait_s)
    second, items = _look(aws, streams, left_out)
    circumstances = circumstances_of(aws, streams, time.monotonic() - began)
    findings = diagnose(first, second, circumstances)
    return Examination(findings, items, circumstances.now, tuple(left_out))


def circumstances_of(
    aws: Aws, streams: Mapping[StreamKey, OpenStream], watched_s: float
) -> Circumstances:
    """The facts beside two looks, of which the second was made now."""
    now = WallTime(time.time())
    return Circumstances(
        me=Owner(aws.settings.leases.group, "doctor", os.urandom(8).hex()).id,
        failover_s=float(aws.settings.leases.failover),
        watched_s=math.floor(watched_s * 10) / 10,  # as it is shown
        now=now,
        streams={key: _facts(stream, now) for key, stream in streams.items()},
    )


def look_of(items: tuple[Item, ...], listings: Mapping[StreamKey, Listing]) -> Look:
    """The items of a whole scan, sorted: leases, broken rows with the reason, other rows."""
    leases: list[Lease] = []
    broken: dict[str, str] = {}
    foreign = 0
    kcl3_mode = None
    for item in items:
        if item.get("leaseKey", {}).get("S") == KCL3_MODE_KEY:
            foreign += 1
            kcl3_mode = kcl3_mode_of(item)
            continue
        try:
            lease = decode_row(item)
        except BrokenRow as row:
            broken[row.key] = str(row)
            continue
        if lease is None:
            foreign += 1
        else:
            leases.append(lease)
    return Look(tuple(leases), listings, broken, foreign, kcl3_mode)


def refuse_native(aws: Aws) -> None:
    """Refuse to write if KCL 3 assigns the leases. Raises: TableRefused."""
    settings = aws.settings
    refuse_kcl3(aws.control.dynamodb_reads(), settings.table, kcl_application(settings))


def _look(
    aws: Aws, streams: Mapping[StreamKey, OpenStream], left_out: Collection[str]
) -> tuple[Look, tuple[Item, ...]]:
    with naming_table(aws.settings.table), waiting_for(aws.called_table):
        items = tuple(item for page in aws.table.items() for item in page)
    look = look_of(items, {})
    if left_out:
        look = msgspec.structs.replace(
            look,
            leases=tuple(lease for lease in look.leases if _stream(lease.key) not in left_out),
            broken={key: why for key, why in look.broken.items() if _stream(key) not in left_out},
        )
    return with_surroundings(look, aws, streams), items


def _stream(key: str) -> str:
    return stream_name_of(stream_of(key))


def with_surroundings(look: Look, aws: Aws, streams: Mapping[StreamKey, OpenStream]) -> Look:
    """The look at a table, with the values that are read after it: the listings of the streams,
    and the mode of a KCL 3 fleet. Raises: a ServiceError leaf."""
    listings = {key: _listing(key, stream) for key, stream in streams.items()}
    mode = look.kcl3_mode if look.kcl3_mode is not None else _mode_elsewhere(aws)
    return msgspec.structs.replace(look, listings=listings, kcl3_mode=mode)


def _mode_elsewhere(aws: Aws) -> str | None:
    """The mode of a KCL 3 fleet of an early version, if we may read it."""
    try:
        return aws.coordinator.mode()
    except (AccessDenied, InvalidRequest):
        return None


def _listing(key: StreamKey, stream: OpenStream) -> Listing:
    shards = qualified_shards(key, stream.admin.list_shards())
    return Listing(shards, WallTime(time.time()), Instant(time.monotonic()))


def _facts(stream: OpenStream, now: WallTime) -> StreamFacts:
    text = stream.settings.start or "TRIM_HORIZON"
    return StreamFacts(
        start=parse_start(text, now).sentinel,
        start_text=text,
        retention_s=stream.summary.retention_hours * 3600.0,
        created_at=stream.summary.created_at,
    )


_KEYS_SHOWN_MAX: Final = 5


def print_findings(examined: Examination) -> None:
    """Print a paragraph for each finding, or that there are no findings."""
    for finding in examined.findings:
        _print(finding)
    if is_healthy(examined.findings) and examined.left_out:
        echo(f"No findings but for the rows of {', '.join(examined.left_out)}: not examined.")
        return
    if is_healthy(examined.findings):
        echo(f"The lease table is healthy: {len(examined.items)} rows.")
        return
    repairable = [finding.kind for finding in examined.findings if finding.repair]
    consented = sum(kind.needs_consent for kind in repairable)
    found = "1 finding" if len(examined.findings) == 1 else f"{len(examined.findings)} findings"
    also = f", and {consented} more with your --accept KIND" if consented else ""
    echo(f"{found}, of which --yes can repair {len(repairable) - consented}{also}.")


def _print(finding: Finding) -> None:
    about = f" {_keys(finding.keys)}" if finding.keys else ""
    lines = [
        f"{finding.gravity.name}  {finding.kind.value}{about}",
        f"  seen:     {finding.evidence}",
        f"  records:  {finding.kind.means}",
        *(f"  repair:   {change_in_words(change)}" for change in finding.repair),
    ]
    if finding.repair and finding.kind.needs_consent:
        lines.append(f"  only:     with --yes --accept {finding.kind.value}")
    if finding.advice and (not finding.repair or finding.kind.needs_consent):
        lines.append(f"  you:      {finding.advice}")
    # The reason of a halt may have several lines: they stay below their title.
    echo("\n".join(line.replace("\n", f"\n{'':12}") for line in lines))


def print_repaired(repaired: Sequence[Repaired]) -> None:
    """Print a line for each finding with a repair."""
    for repair in repaired:
        total = len(repair.finding.repair)
        how = (
            "repaired"
            if repair.applied == total
            else f"{repair.problem} ({repair.applied} of {total})"
        )
        echo(f"{repair.finding.kind.value} {_keys(repair.finding.keys)}: {how}")


def print_in_json(
    examined: Examination,
    *,
    repaired: Sequence[Repaired] = (),
    backup: Path | None = None,
    after: Examination | None = None,
) -> None:
    """Print one object. `left` has the findings after the repairs, null without repairs."""
    last = after or examined
    plain = {
        "healthy": last.is_healthy,
        "findings": [_plain(finding) for finding in examined.findings],
        "backup": None if backup is None else str(backup),
        "mended": [
            {
                "kind": repair.finding.kind.value,
                "keys": repair.finding.keys,
                "is_mended": repair.applied == len(repair.finding.repair),
                "problem": repair.problem,
            }
            for repair in repaired
        ],
        "left": None if after is None else [_plain(finding) for finding in after.findings],
    }
    print_json(plain)


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "gravity": finding.gravity.name.lower(),
        "keys": finding.keys,
        "evidence": finding.evidence,
        "records": finding.kind.means,
        "mend": [change_in_words(change) for change in finding.repair],
        "needs_consent": bool(finding.repair) and finding.kind.needs_consent,
        "advice": finding.advice,
    }


def _keys(keys: Sequence[str]) -> str:
    shown = [display_name(key) for key in keys[: most_on_terminal(_KEYS_SHOWN_MAX)]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


# The backup of all rows of a lease table in one file, made before any repair. Each line is a row in
# DynamoDB's JSON, so that `aws dynamodb put-item --item` restores it.
def backup_name(table: str, at: WallTime) -> str:
    """The table's name and the time in seconds: `orders-20260301T060000Z.jsonl`."""
    return f"{table_name_of(table)}-{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%M%SZ}.jsonl"


def write_backup(place: Path, items: Sequence[Item]) -> None:
    """Write the backup, durably, readable only for its owner, and never over an existing file. One
    that is not whole is removed.

    Raises: SettingsError, naming the file and the reason.
    """
    content = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(place, flags, 0o600)
        try:
            write_at(descriptor, content, 0)
            sync(descriptor)
        except OSError:
            place.unlink()
            raise
        finally:
            os.close(descriptor)
        sync_folder(place.absolute().parent)
    except OSError as error:
        raise SettingsError(
            f"--backup {place}: {error.strerror}; nothing was changed in the table"
        ) from None


class Repaired(msgspec.Struct, frozen=True):
    """The result of repairing one finding.

    The writes of a finding are made in their order, up to the first one whose condition fails. Such
    a row was changed by another program meanwhile, and the next run looks at it again. `applied` is
    the number of applied writes, `problem` the reason for the end.
    """

    finding: Finding
    applied: int
    problem: str = ""


def repair_all(table: LeaseTable, findings: Iterable[Finding]) -> tuple[Repaired, ...]:
    """Make the repairs. A failure stops the writes of its finding, but not of the others."""
    return tuple(_repair(table, finding) for finding in findings)


def _repair(table: LeaseTable, finding: Finding) -> Repaired:
    for applied, change in enumerate(finding.repair):
        outcome = table.write(change)
        if not isinstance(outcome, writes.Applied):
            return Repaired(finding, applied, _problem(outcome))
    return Repaired(finding, len(finding.repair))


def _problem(outcome: writes.Outcome) -> str:
    if isinstance(outcome, writes.ConditionFailed):
        return "the row has changed meanwhile: left as it is"
    return str(getattr(outcome, "message", type(outcome).__name__))


@click.command(cls=ConfigCommand)
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: findings, repairs, rest.")
@yes_option
@click.option(
    "--accept",
    "accepted",
    multiple=True,
    metavar="KIND",
    help="With --yes: also repair findings of a kind whose repair is a decision (marked `only`).",
)
@click.option(
    "--backup",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --yes: where all rows go first (default: TABLE-TIME.jsonl, here).",
)
def doctor(
    config: ConfigChoice,
    accepted: tuple[str, ...],
    backup: Path | None,
    *,
    as_json: bool,
    yes: bool,
) -> int:
    """Find what is wrong with the lease table, and repair what no manager heals by itself.

    It takes one failover (40 s if a lease is being asked for): a single look proves nothing.
    Exit code 0: healthy; 1: there are findings, which --yes repairs, a manager heals by itself or
    only you can decide.
    A repair that repeats records, gives some up or deletes rows is made only with --accept KIND.

    \b
    kclrun doctor --config app.yaml                   look, explain, change nothing
    kclrun doctor --config app.yaml --yes             back up all rows, repair, look again
    """
    _refuse_unknown(accepted)
    if accepted and not yes:
        raise click.UsageError("--accept goes with --yes: without it nothing is changed.")
    if backup is not None and not yes:
        raise click.UsageError("--backup goes with --yes: without it nothing is changed.")
    if backup is not None and os.path.exists(backup):  # raises nothing
        raise click.UsageError(f"--backup {backup} is there already; it is not overwritten.")
    aws, others = fleet_aws(config), OneByOne("doctor")
    examined = examine(aws, others)
    if not yes or not to_repair(examined.findings, accepted):
        code = _print_examination(examined, as_json=as_json)
    else:
        code = _repaired(aws, examined, accepted, backup, as_json=as_json)
    return others.code or code


def _refuse_unknown(accepted: Sequence[str]) -> None:
    kinds = [kind.value for kind in Kind if kind.needs_consent]
    for name in accepted:
        if name not in kinds:
            raise click.UsageError(
                f"--accept {name}: expected a kind whose repair is a decision: {', '.join(kinds)}"
            )


def _print_examination(examined: Examination, *, as_json: bool) -> int:
    print_report(examined, _print_plan, as_json=as_json, in_json=print_in_json)
    return _code(examined)


def _print_plan(examined: Examination) -> None:
    print_findings(examined)
    if any(finding.repair for finding in examined.findings):
        ends_with_plan(is_confirmed=False)


def _repaired(
    aws: Aws,
    examined: Examination,
    accepted: Sequence[str],
    backup: Path | None,
    *,
    as_json: bool,
) -> int:
    refuse_native(aws)
    if not as_json:
        print_findings(examined)
    place = backup or Path(backup_name(aws.settings.table, examined.seen_at))
    write_backup(place, examined.items)
    echo(f"{len(examined.items)} rows backed up to {place}", err=as_json)
    repaired: Sequence[Repaired] = repair_all(aws.table, to_repair(examined.findings, accepted))
    if not as_json:
        print_repaired(repaired)
        echo("Looking again.")
    after = examine(aws, OneByOne("doctor"))
    print_report(
        after,
        print_findings,
        as_json=as_json,
        in_json=lambda after: print_in_json(examined, repaired=repaired, backup=place, after=after),
    )
    return _code(after)


def _code(examined: Examination) -> int:
    return exit_codes.DRAINED if is_healthy(examined.findings) else exit_codes.UNMET
