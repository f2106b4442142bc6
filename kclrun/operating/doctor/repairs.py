"""The repairs of the doctor: which of them are made, and each in words. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import assert_never

from kclrun.model.stream import display_name
from kclrun.operating.doctor.findings import Finding, RepairingChange
from kclrun.protocol import writes


def to_repair(findings: Iterable[Finding], accepted: Collection[str]) -> tuple[Finding, ...]:
    """The findings with a repair, and with the operator's consent if the kind needs it."""
    return tuple(
        finding
        for finding in findings
        if finding.repair and (not finding.kind.needs_consent or finding.kind.value in accepted)
    )


def change_in_words(change: RepairingChange) -> str:
    """The effect of one write of a repair."""
    match change:
        case writes.CreateLease(lease=lease):
            return f"create {display_name(lease.key)} at {lease.checkpoint}, if it has no row"
        case writes.DeleteTrimmed(key=key, seen_counter=counter):
            return f"delete {display_name(key)}, if its owner and counter ({counter}) are as seen"
        case writes.Take(key=key, seen_counter=counter):
            return f"take {display_name(key)}, if its owner and counter ({counter}) are as seen"
        case writes.Claim(key=key):
            return f"remove takenFrom of {display_name(key)}"
        case writes.NameChildren(key=key, children=children):
            named = ", ".join(sorted(map(display_name, children)))
            return f"name the children of {display_name(key)}: {named}"
        case writes.Amend(key=key):
            return f"parents and range of {display_name(key)} as the service lists them"
        case writes.Release(key=key, position=position, last=last):
            where = "the same checkpoint" if position == last else f"its checkpoint {position}"
            return f"let {display_name(key)} go: no owner, no hand-off, {where}"
        case writes.ResumeLease(key=key):
            return f"remove the halt of {display_name(key)}"
        case _:
            assert_never(change)
