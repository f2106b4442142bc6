"""What `kclrun leases` shows: lines made from rows, and how they are printed.

Rule: only what was read. `lag_ms` None is "not asked, or not known", `is_renewed` None "not
watched"; a checkpoint carries no time, and none is guessed from its digits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kclrun.cli.messages import harmless
from kclrun.errors import NotFound, ServiceError
from kclrun.model.lease import Lease, LeaseKey, Owner
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.ports import IteratorType

if TYPE_CHECKING:
    from kclrun.aws.kinesis import PollingReader
    from kclrun.cli.world import Aws

__all__ = [
    "LeaseLine",
    "as_plain",
    "lease_lines",
    "line_of",
    "print_lines",
    "print_totals",
    "shortened",
    "totals",
]


class LeaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """One lease as shown. `state`: ended, halted, unowned or owned."""

    shard: str
    state: str
    owner: str
    group: str
    checkpoint: str
    counter: int
    owner_switches: int
    is_hopping: bool
    halt_reason: str = ""
    parents: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    lag_ms: int | None = None
    is_renewed: bool | None = None
    note: str = ""


def lease_lines(aws: Aws, *, with_lag: bool, with_age: bool) -> tuple[LeaseLine, ...]:
    """Read the table (twice with `with_age`, one failover apart), and the stream if asked.

    Raises: a ServiceError leaf; NotFound while there is no lease table.
    """
    leases, broken = _scan(aws)
    renewed: dict[LeaseKey, bool] = {}
    if with_age:
        later = _watch(aws, leases)
        renewed = {lease.key: later.get(lease.key) != lease.counter for lease in leases}
    lines = []
    for lease in leases:
        line = line_of(lease)
        if with_age and line.state in {"owned", "halted"}:
            line = msgspec.structs.replace(line, is_renewed=renewed[lease.key])
        if with_lag and not lease.is_ended:
            line = _with_lag(line, lease, aws.reader)
        lines.append(line)
    for key in broken:
        click.echo(
            f"{harmless(key)}: this row cannot be read as a lease; it is left alone", err=True
        )
    return tuple(sorted(lines, key=lambda line: line.shard))


def line_of(lease: Lease) -> LeaseLine:
    """What one row says."""
    owner = Owner.parse(lease.owner) if lease.owner is not None else None
    return LeaseLine(
        shard=lease.key,
        state=_state(lease),
        owner=lease.owner or "",
        group=owner.group if owner is not None else "",
        checkpoint=str(lease.checkpoint),
        counter=lease.counter,
        owner_switches=lease.owner_switches,
        is_hopping=lease.is_hopping,
        halt_reason=lease.halt.reason if lease.halt is not None else "",
        parents=tuple(sorted(lease.parents)),
        children=tuple(sorted(lease.children)),
    )


def _state(lease: Lease) -> str:
    if lease.is_ended:
        return "ended"
    if lease.halt is not None:
        return "halted"
    return "unowned" if lease.owner is None else "owned"


def _scan(aws: Aws) -> tuple[list[Lease], list[str]]:
    leases: list[Lease] = []
    broken: list[str] = []
    try:
        for page in aws.table.scan():
            leases.extend(page.leases)
            broken.extend(page.broken)
    except NotFound as error:
        message = f"there is no lease table {aws.settings.table}; the first start makes it"
        raise NotFound(message, operation=error.operation, code=error.code) from None
    return leases, broken


def _watch(aws: Aws, leases: Sequence[Lease]) -> Mapping[LeaseKey, int]:
    """The counters one failover later: an owner renews three times in that time [P9]."""
    failover_s = max(
        [float(aws.settings.leases.failover), *(lease.failover_s or 0.0 for lease in leases)]
    )
    click.echo(f"Watching the counters for {failover_s:g} s …", err=True)
    time.sleep(failover_s)
    later, _ = _scan(aws)
    return {lease.key: lease.counter for lease in later}


def _with_lag(line: LeaseLine, lease: Lease, reader: PollingReader) -> LeaseLine:
    """Read one record after the checkpoint: the answer says how far that is behind the tip."""
    try:
        iterator = _iterator(lease, reader)
        if iterator is None:
            return msgspec.structs.replace(line, note="lag not known before the first checkpoint")
        page = reader.fetch(iterator, 1)
    except ServiceError as error:
        return msgspec.structs.replace(line, note=f"lag not known: {error}")
    return msgspec.structs.replace(line, lag_ms=page.millis_behind_latest)


def _iterator(lease: Lease, reader: PollingReader) -> str | None:
    if not lease.checkpoint.is_sentinel:
        return reader.iterator(
            lease.key,
            IteratorType.AFTER_SEQUENCE_NUMBER,
            sequence_number=lease.checkpoint.sequence_number,
        )
    if lease.checkpoint == TRIM_HORIZON:
        return reader.iterator(lease.key, IteratorType.TRIM_HORIZON)
    if lease.checkpoint == LATEST and lease.latest_pinned_at is not None:
        return reader.iterator(
            lease.key, IteratorType.AT_TIMESTAMP, timestamp=lease.latest_pinned_at
        )
    return None


def as_plain(line: LeaseLine) -> dict[str, Any]:
    """For JSON: every field, positions in full."""
    plain: dict[str, Any] = msgspec.to_builtins(line)
    return plain


def totals(lines: Sequence[LeaseLine], by: str) -> dict[str, dict[str, int]]:
    """How many leases of each state each owner or group has; ended ones belong to nobody."""
    counted: dict[str, Counter[str]] = {}
    for line in lines:
        if line.state == "ended":
            continue
        name = (line.owner if by == "owner" else line.group) or "(none)"
        counted.setdefault(name, Counter())[line.state] += 1
    return {name: dict(counted[name]) for name in sorted(counted)}


def print_lines(lines: Sequence[LeaseLine]) -> None:
    """The table, as wide as it needs to be where the output is no terminal."""
    has_lag = any(line.lag_ms is not None for line in lines)
    has_age = any(line.is_renewed is not None for line in lines)
    titles = ["shard", "state", "owner", "checkpoint", "counter", "switches"]
    titles += ["lag"] * has_lag + ["renewing"] * has_age + ["note"]
    rows = [[*_cells(line, has_lag=has_lag, has_age=has_age), _note(line)] for line in lines]
    _print(titles, rows)


def _cells(line: LeaseLine, *, has_lag: bool, has_age: bool) -> list[str]:
    cells = [
        line.shard,
        line.state,
        line.owner or "-",
        shortened(line.checkpoint),
        str(line.counter),
        str(line.owner_switches),
    ]
    if has_lag:
        cells.append("-" if line.lag_ms is None else f"{line.lag_ms / 1000:.1f}s")
    if has_age:
        cells.append({True: "yes", False: "NO", None: "-"}[line.is_renewed])
    return cells


def _note(line: LeaseLine) -> str:
    notes = [line.halt_reason, line.note]
    if line.is_hopping:
        notes.append("hopping: passed on again and again without a checkpoint")
    return "; ".join(note.split("\n", 1)[0] for note in notes if note)


def shortened(checkpoint: str) -> str:
    """`49671…8322`: the ends tell positions of one shard apart; --json has all digits."""
    digits, slash, sub = checkpoint.partition("/")
    if not digits.isdecimal() or len(digits) <= 12:
        return checkpoint
    return f"{digits[:5]}…{digits[-6:]}{slash}{sub}"


def print_totals(counted: Mapping[str, Mapping[str, int]], by: str) -> None:
    """The totals as a table, one line an owner or group."""
    states = ("owned", "halted", "unowned")
    rows = [
        [name, *(str(states_of.get(state, 0)) for state in states)]
        for name, states_of in counted.items()
    ]
    _print([by, *states], rows)


def _print(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    safe = [[harmless(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(len(row[column]) for row in safe) for column in range(len(titles))]
    for row in safe:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
