"""The output of `kclrun leases`: makes lines from rows and prints them.

It shows only values that were read. A checkpoint has no time, and none is guessed from its digits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.cli.messages import echo, naming_table
from kclrun.cli.tables import NOTE, print_table
from kclrun.cli.waiting import waiting_for
from kclrun.errors import TableRefused
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.stream import display_name, short_name
from kclrun.model.time import WallTime
from kclrun.observe.sample import how_to_resume
from kclrun.operating.summaries import (
    LeaseSummary,
    host_of,
    lease_summary,
    on_one_line,
    shortened,
    with_short_positions,
)
from kclrun.ports import ScanPage

if TYPE_CHECKING:
    from kclrun.cli.services import Aws

# As many as fit in a line of a terminal.
_SHARDS_NAMED_MAX: Final = 3
# How the columns of leases are shortened for a person; `owner` and `shard` in a narrow terminal.
ON_TERMINAL: Final = {"checkpoint": shortened, NOTE: with_short_positions}
IF_NARROW: Final = {"owner": host_of, "shard": short_name}


def lease_summaries(aws: Aws, *, with_age: bool) -> tuple[LeaseSummary, ...]:
    """Read the table, twice with `with_age`, one failover apart.

    Raises: a ServiceError leaf; NotFound while the lease table does not exist.
    """
    leases = scan_leases(aws)
    renewed: dict[LeaseKey, bool] = {}
    if with_age:
        counters = {lease.key: lease.counter for lease in watch_table(aws, leases).leases}
        renewed = {lease.key: counters.get(lease.key) != lease.counter for lease in leases}
    lines = []
    for lease in leases:
        line = lease_summary(lease, WallTime(time.time()))
        if with_age and line.state in {"owned", "halted", "paused"}:
            line = msgspec.structs.replace(line, is_renewed=renewed[lease.key])
        lines.append(line)
    return tuple(sorted(lines, key=lambda line: line.shard))


def scan_table(aws: Aws) -> ScanPage:
    """All leases and broken rows of the table, as one page.

    Raises: a ServiceError leaf; NotFound while the lease table does not exist.
    """
    leases: list[Lease] = []
    broken: list[str] = []
    reasons: dict[str, str] = {}
    with naming_table(aws.settings.table), waiting_for(aws.called_table):
        for page in aws.table.scan():
            leases.extend(page.leases)
            broken.extend(page.broken)
            reasons |= page.reasons
    return ScanPage(tuple(leases), tuple(broken), reasons=reasons)


def unreadable_rows(scanned: ScanPage) -> list[tuple[LeaseKey, TableRefused]]:
    """The rows that cannot be read, each as the outcome of what was to be done with it."""
    return [
        (
            LeaseKey(key),
            TableRefused(
                f"this row cannot be read as a lease ({scanned.reasons.get(key, 'no reason')});"
                " repair or delete it, see  kclrun doctor"
            ),
        )
        for key in sorted(scanned.broken)
    ]


def scan_leases(aws: Aws) -> tuple[Lease, ...]:
    """The rows that can be read as leases. The others are reported on standard error.

    Raises: as `scan_table`.
    """
    scanned = scan_table(aws)
    for key in scanned.broken:
        echo(f"{key}: this row cannot be read as a lease; it is left alone", err=True)
    return scanned.leases


def watch_table(aws: Aws, leases: Sequence[Lease]) -> ScanPage:
    """The table one failover later. In that time an owner renews three times [P9]."""
    failover_s = failover_of(aws, leases)
    echo(f"Watching the counters for {failover_s:g} s …", err=True)
    time.sleep(failover_s)
    return scan_table(aws)


def failover_of(aws: Aws, leases: Sequence[Lease]) -> float:
    """The longest failover of the settings and of the rows."""
    return max(
        [float(aws.settings.leases.failover), *(lease.failover_s or 0.0 for lease in leases)]
    )


def totals(lines: Sequence[LeaseSummary], by: str) -> dict[str, dict[str, int]]:
    """The number of leases in each state, for each owner or group. Ended leases are not counted."""
    counted: dict[str, Counter[str]] = {}
    for line in lines:
        if line.state == "ended":
            continue
        name = (line.owner if by == "owner" else line.group) or "(none)"
        counted.setdefault(name, Counter())[line.state] += 1
    return {name: dict(counted[name]) for name in sorted(counted)}


def print_lines(lines: Sequence[LeaseSummary]) -> None:
    """Print the table: whole in a pipe, as wide as the terminal on one."""
    has_age = any(line.is_renewed is not None for line in lines)
    has_load = any(line.load_kbps is not None for line in lines)
    titles = ["shard", "state", "owner", "checkpoint", "counter", "switches"]
    titles += ["KiB/s", "CPU"] if has_load else []
    titles += ["renewing", "note"] if has_age else ["note"]
    rows = [
        [
            *_cells(line),
            *(_load_cells(line) if has_load else ()),
            *([{True: "yes", False: "NO", None: "-"}[line.is_renewed]] if has_age else ()),
            _note(line),
        ]
        for line in lines
    ]
    print_table(titles, rows, on_terminal=ON_TERMINAL, if_narrow=IF_NARROW)


def print_remedy(lines: Sequence[LeaseSummary], leases_command: str) -> None:
    """Print below the table how to resume the halted leases."""
    halted = [line.shard for line in lines if line.state == "halted"]
    if halted:
        shards = " ".join(halted) if len(halted) <= _SHARDS_NAMED_MAX else "SHARD..."
        echo(f"\n{len(halted)} halted: {how_to_resume(leases_command, shards)}")


def _cells(line: LeaseSummary) -> list[str]:
    return [
        display_name(line.shard),
        line.state,
        line.owner or "-",
        line.checkpoint,
        str(line.counter),
        str(line.owner_switches),
    ]


def _load_cells(line: LeaseSummary) -> list[str]:
    if line.load_kbps is None or line.load_cpu is None:
        return ["-", "-"]
    return [f"{line.load_kbps:.1f}", f"{line.load_cpu:.3f}"]


def _note(line: LeaseSummary) -> str:
    notes = [line.halt_reason, line.note]
    if line.is_hopping:
        notes.append("hopping: passed on again and again without a checkpoint")
    return "; ".join(on_one_line(note) for note in notes if note)


def print_totals(counted: Mapping[str, Mapping[str, int]], by: str) -> None:
    """The totals as a table, one line an owner or group."""
    states = ("owned", "halted", "paused", "offered", "unowned")
    rows = [
        [name, *(str(states_of.get(state, 0)) for state in states)]
        for name, states_of in counted.items()
    ]
    print_table([by, *states], rows)
