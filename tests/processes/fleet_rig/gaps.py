"""From one owner's last word on a lease to the next one's first GetRecords, as the servers saw it.

For a planned move the last word is the acknowledged give-away; for a lost host it is
the moment of the loss.
"""

from dataclasses import dataclass

from tests.processes.ledger_rig.rounds import percentile

# Writes that are not the owner's say nothing about whether it lives.
_OTHERS_WRITES = ("ask", "withdraw", "decline", "late checkpoint", "resume")


@dataclass(frozen=True)
class Gap:
    key: str
    began: float
    seconds: float
    kind: str


def planned_gaps(notes, since=0.0, until=float("inf")):
    """A gap for each give-away in the time given; `seconds` is infinite where nobody came."""
    found = []
    for given in notes:
        if given.is_given and since <= given.at < until:
            read_at = next(
                (
                    n.at
                    for n in notes
                    if n.kind == "first read" and n.key == given.key and n.at > given.at
                ),
                float("inf"),
            )
            kind = "offer" if given.is_offer else "release"
            found.append(Gap(given.key, given.at, read_at - given.at, kind))
    return found


def reads_after(notes, keys, instant):
    """Seconds from `instant` to the first read of each key."""
    first = {}
    for note in notes:
        if note.kind == "first read" and note.key in keys and note.at > instant:
            first.setdefault(note.key, note.at - instant)
    return {key: first.get(key, float("inf")) for key in keys}


def silences(notes, longest_s):
    """When each lease was written again after its owner had been silent for longer than that.

    Its lease process stood still, or its machine: records may come twice then, and leases move.
    """
    found, last = {}, {}
    for note in notes:
        is_owners = note.is_applied and note.owner and not note.kind.startswith(_OTHERS_WRITES)
        if note.key is None or not is_owners:
            continue
        before = last.get(note.key)
        if before is not None and note.at - before > longest_s:
            found.setdefault(note.key, []).append(note.at)
        if note.is_given or note.kind.startswith("end"):
            last.pop(note.key, None)
        else:
            last[note.key] = note.at
    return found


def reported_gaps(what, gaps):
    """Count, p50, p99 and the longest three, with their leases."""
    seconds = [gap.seconds for gap in gaps]
    worst = sorted(gaps, key=lambda gap: -gap.seconds)[:3]
    return (
        f"{what}: {len(gaps)}, p50 {percentile(seconds, 50):.3f} s,"
        f" p99 {percentile(seconds, 99):.3f} s, worst"
        f" {[(round(gap.seconds, 3), gap.kind, gap.key) for gap in worst]}"
    )
