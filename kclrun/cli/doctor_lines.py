"""How `kclrun doctor` tells its findings: the gravest first, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kclrun.cli.messages import harmless
from kclrun.leases.doctor.diagnosis import is_healthy
from kclrun.leases.doctor.findings import Finding, MendingChange
from kclrun.model.changes import (
    Amend,
    Claim,
    CreateChildren,
    CreateLease,
    DeleteTrimmed,
    NameChildren,
    Release,
    ResumeLease,
    Take,
)
from kclrun.model.stream_key import called

if TYPE_CHECKING:
    from kclrun.cli.doctor_looks import Examination
    from kclrun.cli.doctor_mending import Mended

__all__ = ["change_in_words", "print_findings", "print_json", "print_mended"]

_KEYS_SHOWN_MAX: Final = 5


def print_findings(examined: Examination) -> None:
    """A paragraph each; or that there is nothing."""
    for finding in examined.findings:
        _print(finding)
    if is_healthy(examined.findings):
        click.echo(f"The lease table is healthy: {len(examined.items)} rows.")
        return
    mendable = [finding.kind for finding in examined.findings if finding.mend]
    consented = sum(kind.needs_consent for kind in mendable)
    found = "1 finding" if len(examined.findings) == 1 else f"{len(examined.findings)} findings"
    also = f", and {consented} more with your --accept KIND" if consented else ""
    click.echo(f"{found}, of which --yes can mend {len(mendable) - consented}{also}.")


def _print(finding: Finding) -> None:
    about = f" {_keys(finding.keys)}" if finding.keys else ""
    lines = [
        f"{finding.gravity.name}  {finding.kind.value}{about}",
        f"  seen:     {finding.evidence}",
        f"  records:  {finding.kind.means}",
        *(f"  mend:     {change_in_words(change)}" for change in finding.mend),
    ]
    if finding.mend and finding.kind.needs_consent:
        lines.append(f"  only:     with --yes --accept {finding.kind.value}")
    if finding.advice and (not finding.mend or finding.kind.needs_consent):
        lines.append(f"  you:      {finding.advice}")
    click.echo("\n".join(map(harmless, lines)))


def print_mended(mended: Sequence[Mended]) -> None:
    """A line for each finding that was to be mended."""
    for each in mended:
        total = len(each.finding.mend)
        how = "mended" if each.applied == total else f"{each.problem} ({each.applied} of {total})"
        click.echo(harmless(f"{each.finding.kind.value} {_keys(each.finding.keys)}: {how}"))


def print_json(
    examined: Examination,
    *,
    mended: Sequence[Mended] = (),
    backup: Path | None = None,
    after: Examination | None = None,
) -> None:
    """One object; `left` is what a look after the mends found, null where nothing was mended."""
    last = after or examined
    plain = {
        "healthy": is_healthy(last.findings),
        "findings": [_plain(finding) for finding in examined.findings],
        "backup": None if backup is None else str(backup),
        "mended": [
            {
                "kind": each.finding.kind.value,
                "keys": each.finding.keys,
                "is_mended": each.applied == len(each.finding.mend),
                "problem": each.problem,
            }
            for each in mended
        ],
        "left": None if after is None else [_plain(finding) for finding in after.findings],
    }
    click.echo(json.dumps(plain, indent=2))


def change_in_words(change: MendingChange) -> str:
    """What one write of a mend does."""
    match change:
        case CreateLease(lease=lease):
            return f"create {called(lease.key)} at {lease.checkpoint}, if it has no row"
        case CreateChildren(children=children):
            names = ", ".join(called(child.key) for child in children)
            return f"create {names} at TRIM_HORIZON, if the parents' rows are as seen"
        case DeleteTrimmed(key=key, seen_counter=counter):
            return f"delete {called(key)}, if its owner and counter ({counter}) are as seen"
        case Take(key=key, seen_counter=counter):
            return f"take {called(key)}, if its owner and counter ({counter}) are as seen"
        case Claim(key=key):
            return f"remove takenFrom of {called(key)}"
        case NameChildren(key=key, children=children):
            return f"name the children of {called(key)}: {', '.join(sorted(map(called, children)))}"
        case Amend(key=key, latest_pinned_at=pinned_at):
            pinned = "" if pinned_at is None else ", and LATEST is now"
            return f"parents and range of {called(key)} as the service lists them{pinned}"
        case Release(key=key, position=position, last=last):
            where = "the same checkpoint" if position == last else f"its checkpoint {position}"
            return f"let {called(key)} go: no owner, no hand-off, {where}"
        case ResumeLease(key=key):
            return f"remove the halt of {called(key)}"


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "gravity": finding.gravity.name.lower(),
        "keys": finding.keys,
        "evidence": finding.evidence,
        "records": finding.kind.means,
        "mend": [change_in_words(change) for change in finding.mend],
        "needs_consent": bool(finding.mend) and finding.kind.needs_consent,
        "advice": finding.advice,
    }


def _keys(keys: Sequence[str]) -> str:
    shown = [called(key) for key in keys[:_KEYS_SHOWN_MAX]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
