"""Makes the writes that mend findings, each finding's in their order and no further than one holds.

Rule: what does not apply was changed by somebody else meanwhile, and is left to the next look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from kclrun.leases.doctor.findings import Finding
from kclrun.model.outcomes import Applied, ConditionFailed, Outcome
from kclrun.ports import LeaseTable

__all__ = ["Mended", "mend_all", "to_mend"]


class Mended(msgspec.Struct, frozen=True):
    """What became of one finding's mend: `applied` of its writes, and why no more, if so."""

    finding: Finding
    applied: int
    problem: str = ""


def to_mend(findings: Iterable[Finding], accepted: Collection[str]) -> tuple[Finding, ...]:
    """Those with a mend, and with consent where the kind needs it."""
    return tuple(
        finding
        for finding in findings
        if finding.mend and (not finding.kind.needs_consent or finding.kind.value in accepted)
    )


def mend_all(table: LeaseTable, findings: Iterable[Finding]) -> tuple[Mended, ...]:
    """Make their mends; a failure stops that finding's writes, not the others'."""
    return tuple(_mend(table, finding) for finding in findings)


def _mend(table: LeaseTable, finding: Finding) -> Mended:
    for applied, change in enumerate(finding.mend):
        outcome = table.write(change)
        if not isinstance(outcome, Applied):
            return Mended(finding, applied, _problem(outcome))
    return Mended(finding, len(finding.mend))


def _problem(outcome: Outcome) -> str:
    if isinstance(outcome, ConditionFailed):
        return "the row has changed meanwhile: left as it is"
    return str(getattr(outcome, "message", type(outcome).__name__))
