"""The verdict on each output, and how far each has the rows of each shard. Pure.

An output is judged by what holds up checkpoints: none passes a row that an output lacks. So while
no shard is behind, every output has its rows; a shard that is behind is held up by the output that
its warnings name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kclrun.model.lease import Lease
from kclrun.model.text import sanitize
from kclrun.model.time import WallTime
from kclrun.operating.summaries import duration_text, shortened, with_short_positions
from kclrun.page import layout
from kclrun.page.markup import Child, Html, element, joined, short
from kclrun.page.snapshot import About, ShardRow, ShownOutput, Snapshot, rows_of

_ROWS_MAX: Final = 1_000
# A checkpoint is at most so far behind where nothing is wrong: `checkpoint.every`, the reading, and
# twice the time that a roll is open.
_BEHIND_S: Final = 30.0
_ROLLS: Final = 2.0
# The clocks of two machines.
_CLOCKS_S: Final = 5.0
_SHARDS_ASKED_MAX: Final = 4
_REASON_MAX: Final = 400
OK, BEHIND, FAILING, UNKNOWN = "ok", "behind", "failing", "not known"


class Warned(msgspec.Struct, frozen=True):
    """The last warning of the process of a lease, by the clock of its machine."""

    at: WallTime
    words: str


class OutputVerdict(msgspec.Struct, frozen=True):
    """How an output does, and why, in words; `shards` are those that it holds up."""

    word: str
    why: str = ""
    shards: tuple[str, ...] = ()


def leases_to_ask(about: About, snapshot: Snapshot) -> tuple[Lease, ...]:
    """The leases that an output may hold up: their owners know which one it is."""
    rows = _held_up(about, snapshot)[:_SHARDS_ASKED_MAX]
    return tuple(snapshot.leases[row.key] for row in rows if row.key in snapshot.leases)


def verdict_of(
    about: About, snapshot: Snapshot, place: ShownOutput, warned: Mapping[str, Warned]
) -> OutputVerdict:
    """The verdict on one output. `warned` are the last warnings, by lease."""
    rows = rows_of(snapshot)
    failing = {
        row.key: words
        for row in rows
        if (words := _failure(row, snapshot, place, warned.get(row.key)))
    }
    if failing:
        first = next(iter(failing.values()))
        return OutputVerdict(
            FAILING, short(with_short_positions(first), _REASON_MAX), tuple(failing)
        )
    read = [row for row in rows if row.state == "owned"]
    if not read:
        return OutputVerdict(UNKNOWN, "no shard is read now")
    if any(row.lag is None or row.lag.behind_s is None for row in read):
        return OutputVerdict(UNKNOWN, "the lag of some shards is not known")
    late = _held_up(about, snapshot)
    unexplained = [row for row in late if not _names_other(row, snapshot, place, about, warned)]
    if unexplained:
        lag = unexplained[0].lag
        behind = duration_text(lag.behind_s if lag is not None else None)
        why = (
            f"a checkpoint is {behind} behind: rows wait for an output, or the processor is slow;"
            " nothing that this page can read says which"
        )
        return OutputVerdict(BEHIND, why, tuple(row.key for row in unexplained))
    return OutputVerdict(OK)


def _held_up(about: About, snapshot: Snapshot) -> list[ShardRow]:
    """The shards that are read and whose checkpoint stands too long, the longest first."""
    roll_s = max((place.roll_s for place in about.outputs), default=0.0)
    limit_s = _BEHIND_S + _ROLLS * roll_s
    late = [
        (row.lag.behind_s, row)
        for row in rows_of(snapshot)
        if row.state == "owned" and row.lag is not None and (row.lag.behind_s or 0.0) > limit_s
    ]
    return [row for _, row in sorted(late, key=lambda pair: (-(pair[0] or 0.0), pair[1].key))]


def _failure(row: ShardRow, snapshot: Snapshot, place: ShownOutput, warned: Warned | None) -> str:
    """What this output says of its failure at this shard; empty if it says nothing, or goes on."""
    lease = snapshot.leases.get(row.key)
    if row.state == "halted" and lease is not None and lease.halt is not None:
        _, found, words = lease.halt.reason.partition(f": {place.setting}: ")
        return words if found else ""
    named, found, words = (warned.words if warned is not None else "").partition(": ")
    stands = _stands(row, snapshot, warned)
    return words if found and stands and named == place.setting else ""


def _names_other(
    row: ShardRow,
    snapshot: Snapshot,
    place: ShownOutput,
    about: About,
    warned: Mapping[str, Warned],
) -> bool:
    """Whether another output holds this shard up."""
    others = (other for other in about.outputs if other.setting != place.setting)
    return any(_failure(row, snapshot, other, warned.get(row.key)) for other in others)


def _stands(row: ShardRow, snapshot: Snapshot, warned: Warned | None) -> bool:
    """Whether the checkpoint has not moved past the records of the warning since."""
    if warned is None or row.state != "owned" or row.lag is None or snapshot.lags_at is None:
        return False
    behind_s = row.lag.behind_s
    if behind_s is None or row.lag.oldest_at is None:
        return False
    return warned.at >= snapshot.lags_at - behind_s - _CLOCKS_S


def outputs_body(about: About, snapshot: Snapshot, warned: Mapping[str, Warned]) -> Html:
    """The outputs with their verdicts, and their cursors on the rows."""
    return joined(
        element("h2", "Outputs"), _verdicts(about, snapshot, warned), _cursors(about, snapshot)
    )


def _verdicts(about: About, snapshot: Snapshot, warned: Mapping[str, Warned]) -> Html:
    if not about.outputs:
        return joined()
    rows = [_verdict(place, verdict_of(about, snapshot, place, warned)) for place in about.outputs]
    caption = (
        "No checkpoint passes a row that an output lacks: while checkpoints advance, every output"
        " has its rows."
    )
    return layout.table(caption, ("output", "where", "verdict"), rows, label="Outputs")


def _verdict(place: ShownOutput, verdict: OutputVerdict) -> Html:
    held: Child = None
    if verdict.shards:
        held = joined("It holds up " if verdict.word == FAILING else "Shards: ")
    return element(
        "tr",
        element("th", short(place.name), scope="row"),
        element("td", short(place.where), class_="id"),
        element(
            "td",
            layout.state_badge(verdict.word),
            element("p", sanitize(verdict.why), class_="words") if verdict.why else None,
            element("p", held, layout.shard_links(verdict.shards, in_short=True))
            if held is not None
            else None,
        ),
    )


def _cursors(about: About, snapshot: Snapshot) -> Html:
    leases = sorted(snapshot.leases.values(), key=lambda lease: lease.key)
    rows = [row for lease in leases for row in _of_lease(lease)]
    if not rows:
        return element(
            "p",
            "No row of the lease table has the cursor of an output."
            if about.outputs
            else "The application has no output.",
        )
    more = f" The first {_ROWS_MAX} are shown." if len(rows) > _ROWS_MAX else ""
    caption = (
        "How far each output has the rows of each shard, where its cursor is on the lease row: all"
        f" digits are on the page of the shard.{more}"
    )
    heads = ("shard", "cursors", "checkpoint")
    return layout.table(caption, heads, rows[:_ROWS_MAX], label="Cursors")


def _of_lease(lease: Lease) -> Sequence[Html]:
    if lease.outputs is None or not lease.outputs.cursors:
        return ()
    at: dict[str, list[str]] = {}
    for name, cursor in lease.outputs.cursors:
        at.setdefault(with_short_positions(str(cursor)), []).append(name)
    cursors = "; ".join(f"{', '.join(names)}: {cursor}" for cursor, names in at.items())
    return (
        element(
            "tr",
            element(
                "th", layout.shard_links((lease.key,), in_short=True), scope="row", class_="id"
            ),
            element("td", short(cursors), class_="id"),
            element("td", short(shortened(str(lease.checkpoint))), class_="id one"),
        ),
    )
