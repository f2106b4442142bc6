"""The diagnosis of a lease table: from two looks to findings, each with its mend if it has one.

Pure: `kclrun doctor` looks and writes. Rule: what is wrong between rows and shards counts only if
both looks show it, for a manager heals most of it within one of its cycles.
Look next: `lineage.py`, `handoffs.py`, `rows.py` (the rules), `mending.py` (what may be written).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kclrun.leases.doctor.findings import Finding, Gravity
from kclrun.leases.doctor.handoffs import handoff_findings
from kclrun.leases.doctor.lineage import lineage_findings
from kclrun.leases.doctor.looks import Circumstances, Look, Pair
from kclrun.leases.doctor.mending import settled
from kclrun.leases.doctor.rows import row_findings, table_findings

__all__ = ["diagnose", "is_healthy"]


def diagnose(first: Look, second: Look, circumstances: Circumstances) -> tuple[Finding, ...]:
    """What is wrong, the gravest first. `second` was taken `watched_s` after `first`."""
    pair = Pair(first, second, circumstances)
    found = (
        *_between_rows_and_shards(pair),
        *table_findings(pair),
        *row_findings(pair),
        *handoff_findings(pair),
    )
    return settled(found, pair)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether there is nothing but notes."""
    return all(finding.gravity == Gravity.NOTE for finding in findings)


def _between_rows_and_shards(pair: Pair) -> Iterator[Finding]:
    for stream, facts in pair.circumstances.streams.items():
        earlier, now = pair.views_of(stream)
        seen = {
            (finding.kind, finding.keys)
            for finding in lineage_findings(
                earlier, pair.first.listings[stream], facts.start, pair.circumstances
            )
        }
        for finding in lineage_findings(
            now, pair.second.listings[stream], facts.start, pair.circumstances
        ):
            if (finding.kind, finding.keys) in seen:
                yield finding
