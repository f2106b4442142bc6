"""The list of all shards, their lineage, and the page of one shard. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import msgspec

from kclrun.model.lease import ANYBODY, OFFERED, Lease, Owner
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream import display_name
from kclrun.operating.finished import FinishedShards
from kclrun.operating.summaries import duration_text, host_of, shortened
from kclrun.page import layout
from kclrun.page.acting import kclrun_owners, letter_actions, shard_actions
from kclrun.page.detail_view import Details, detail_body
from kclrun.page.fleet_view import finding_box, findings_besides_halts, halt_box
from kclrun.page.markup import Child, Html, as_title, element, joined, link, short
from kclrun.page.snapshot import About, ShardRow, Snapshot, is_idle, most_urgent_first, rows_of

# A browser shows 1,000 rows at once without delay; a larger stream has several pages.
ROWS_MAX: Final = 1_000
# Deeper ones are drawn at this depth; their generation is given as a number.
_INDENT_MAX: Final = 6
_HEADS: Final = (
    "shard",
    "state",
    "behind",
    "loss in",
    "lag so far",
    "owner",
    "checkpoint",
    "parents",
    "children",
)

Query = Mapping[str, str]


def shards_body(about: About, snapshot: Snapshot, query: Query) -> Html:
    """The list, by `state`, in the order of `sort`, beginning at the row number `from`."""
    rows = [row for row in rows_of(snapshot) if _filter(query, snapshot)(row)]
    by_id = query.get("sort") == "shard"
    if not by_id:
        rows.sort(key=most_urgent_first)
    first = _number(query.get("from"))
    shown = rows[first : first + ROWS_MAX]
    order = "in the order of their ids" if by_id else "the most urgent first"
    part = f", rows {first + 1} to {first + len(shown)}" if len(shown) < len(rows) else ""
    caption = f"{len(rows)} shards{_which(query)}, {order}{part}."
    lines = [line for row in shown for line in _lines(row, snapshot)]
    return joined(
        _choices(query),
        layout.table(caption, _HEADS, lines, label="Shards"),
        _further(query, first, len(rows)),
        layout.legend(about, len(snapshot.lags)),
    )


def _filter(query: Query, snapshot: Snapshot) -> Callable[[ShardRow], bool]:
    wanted = query.get("state")
    if wanted == "idle":
        return is_idle
    if wanted == "silent":
        return lambda row: row.key in snapshot.owners.expired
    return lambda row: wanted is None or row.state == wanted


def _which(query: Query) -> str:
    wanted = query.get("state")
    words = {"idle": "without an owner", "silent": "with a silent owner"}
    return "" if wanted is None else f" {words.get(wanted, short(wanted, 20))}"


def _choices(query: Query) -> Html:
    kept = {name: query.get(name) for name in ("live", "state")}
    by_id = query.get("sort") == "shard"
    orders = joined(
        link("/shards", "most urgent first", kept, is_current=not by_id),
        " · ",
        link("/shards", "by shard id", {**kept, "sort": "shard"}, is_current=by_id),
    )
    every = link("/shards", "show all", {"live": query.get("live")}) if query.get("state") else None
    return element("p", "Order: ", orders, " · " if every is not None else None, every)


def _further(query: Query, first: int, total: int) -> Html | None:
    kept = {name: query.get(name) for name in ("live", "state", "sort")}
    before = max(0, first - ROWS_MAX)
    links = [
        link("/shards", "rows before", {**kept, "from": before}) if first else None,
        " " if first else None,
        link("/shards", "further rows", {**kept, "from": first + ROWS_MAX})
        if first + ROWS_MAX < total
        else None,
    ]
    return element("p", links)


def _number(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= 6):
        return 0
    return int(text)


def _lines(row: ShardRow, snapshot: Snapshot) -> Iterator[Html]:
    """A row; below it its note, where a window of any width shows it."""
    yield _line(row, snapshot)
    if row.note:
        note = element("div", layout.one_line(row.note))
        yield element("tr", element("td", note, colspan=len(_HEADS)), class_="why")


def _line(row: ShardRow, snapshot: Snapshot) -> Html:
    return element(
        "tr",
        element("th", layout.shard_link(row.key), scope="row", class_="id"),
        element("td", layout.state_badge(row.state)),
        element("td", layout.lag_text(row), class_="n"),
        element("td", layout.loss_text(row), class_="n"),
        element("td", layout.strip(snapshot.history.get(row.key)) if row.state != "ended" else "-"),
        element("td", short(host_of(row.owner), 40) or "-", class_="id one"),
        element("td", short(shortened(row.checkpoint), 40) or "-", class_="id one"),
        element("td", layout.shard_links(row.parents, in_short=True), class_="id one"),
        element("td", layout.shard_links(row.children, in_short=True), class_="id one"),
    )


def lineage_body(snapshot: Snapshot, ended: Collection[str] = frozenset()) -> Html:
    """The tree of splits and merges. `ended` are the shards that the recorded stories show as read
    to their end."""
    lineage = lineage_tree(snapshot.leases, snapshot.shards, ROWS_MAX)
    states = {row.key: row for row in rows_of(snapshot)}
    alone = f"{lineage.alone} shards have neither a parent nor a child here."
    if not lineage.descents:
        return element("p", f"No split and no merge is in the table or the stream. {alone}")
    judge = FinishedShards(snapshot.leases, snapshot.shards, ended)
    words = {
        descent.key: _standing(states.get(descent.key), judge, descent.key)
        for descent in lineage.descents
    }
    rows = [
        _descent(descent, states.get(descent.key), words[descent.key])
        for descent in lineage.descents
    ]
    left = (
        f" {lineage.left_out} more are not shown: beyond {ROWS_MAX}, or rows that name each other"
        " as parents."
        if lineage.left_out
        else ""
    )
    caption = (
        "A shard is below its parent; one that was merged of two is below the first of them."
        f" {alone}{left}{_explained(words.values())}"
    )
    heads = ("shard", "generation", "state", "behind", "came from", "became")
    return layout.table(caption, heads, rows, label="Lineage")


_FINISHED: Final = "finished"
_UNKNOWN: Final = "not known"


def _standing(row: ShardRow | None, judge: FinishedShards, key: str) -> str:
    """The state of a shard, which may have no row any more."""
    if row is not None:
        return row.state
    is_finished = judge.is_finished(key)
    if is_finished is None:
        return _UNKNOWN
    return _FINISHED if is_finished else "no lease"


def _explained(words: Collection[str]) -> str:
    finished = (
        " Finished: it was read to its end, and its row was deleted since."
        if _FINISHED in words
        else ""
    )
    unknown = (
        " Not known: it has no row, and nothing here shows whether it was read to its end or is"
        " from before the start of the application."
        if _UNKNOWN in words
        else ""
    )
    return finished + unknown


def _descent(of: Descent, row: ShardRow | None, standing: str) -> Html:
    depth = min(of.depth, _INDENT_MAX)
    began = {0: "oldest known", 1: "split of "}.get(len(of.parents), "merge of ")
    became = {0: "", 1: "merged or replaced: "}.get(len(of.children), "split: ")
    return element(
        "tr",
        element(
            "th",
            "└ " if depth else None,
            layout.shard_link(of.key),
            scope="row",
            class_=f"id i{depth}" if depth else "id",
        ),
        element("td", of.depth + 1, class_="n"),
        element("td", layout.state_badge(standing)),
        element("td", layout.lag_text(row) if row is not None else "-", class_="n"),
        element(
            "td",
            began,
            layout.shard_links(of.parents, in_short=True) if of.parents else None,
            class_="id",
        ),
        element("td", became, layout.shard_links(of.children, in_short=True), class_="id"),
    )


# The shards' ancestry through splits and merges, in the order of a tree.


class Descent(msgspec.Struct, frozen=True):
    """One shard of the tree: `depth` below its oldest known ancestor."""

    key: str
    depth: int
    parents: tuple[str, ...]
    children: tuple[str, ...]


class Lineage(msgspec.Struct, frozen=True):
    """`descents`: each shard below a parent. A merged shard is below the parent that comes first,
    and names both. `alone` counts the shards without known parents and children, `left_out` those
    beyond the limit, or in a circle."""

    descents: tuple[Descent, ...]
    alone: int
    left_out: int


def lineage_tree(leases: Mapping[str, Lease], shards: Mapping[str, Shard], most: int) -> Lineage:
    """The tree of all rows and listed shards, at most `most` of them. A row may name shards that
    neither the table nor the listing has: these are left out."""
    keys: set[str] = {*leases, *shards}
    parents: dict[str, set[str]] = {key: set() for key in keys}
    children: dict[str, set[str]] = {key: set() for key in keys}
    for parent, child in _edges(leases, shards):
        if parent in keys and child in keys and parent != child:
            parents[child].add(parent)
            children[parent].add(child)
    alone = sum(not parents[key] and not children[key] for key in keys)
    roots = sorted((key for key in keys if not parents[key] and children[key]), reverse=True)
    waiting = [(root, 0) for root in roots]
    seen: set[str] = set()
    descents: list[Descent] = []
    while waiting and len(descents) < most:
        key, depth = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        descents.append(Descent(key, depth, _sorted(parents[key]), _sorted(children[key])))
        waiting += [(child, depth + 1) for child in sorted(children[key], reverse=True)]
    return Lineage(tuple(descents), alone, len(keys) - alone - len(descents))


def _edges(leases: Mapping[str, Lease], shards: Mapping[str, Shard]) -> list[tuple[str, str]]:
    of_rows = [(parent, key) for key, lease in leases.items() for parent in lease.parents]
    of_rows += [(key, child) for key, lease in leases.items() for child in lease.children]
    return of_rows + [(parent, key) for key, shard in shards.items() for parent in shard.parents]


def _sorted(keys: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(keys))


# The page of one shard: everything on its row, in words.


def shard_body(
    about: About,
    snapshot: Snapshot,
    key: str,
    *,
    details: Details | None = None,
) -> Html | None:
    """The page of this key; None if there is neither a row nor a listed shard of it."""
    row = next((row for row in rows_of(snapshot) if row.key == key), None)
    lease = snapshot.leases.get(key)
    if row is None and key not in snapshot.shards:
        return None
    found = findings_besides_halts(snapshot)
    findings = [finding_box(about, finding) for finding in found or () if key in finding.keys]
    return joined(
        _halt(about, lease, row),
        _pause(about, lease, snapshot),
        _actions(about, lease, snapshot) if about.has_actions else None,
        element("h2", "Now"),
        layout.facts(_now(row)),
        layout.strip(snapshot.history.get(key), class_="strip wide")
        if row is not None and row.state != "ended"
        else None,
        joined(element("h2", "Findings of the doctor"), findings) if findings else None,
        detail_body(about, details, lease) if details is not None and lease is not None else None,
        _row(lease),
        _outputs(lease),
        _stream(snapshot, key),
        layout.legend(about, len(snapshot.lags)),
    )


def _halt(about: About, lease: Lease | None, row: ShardRow | None) -> Html | None:
    if lease is None or lease.halt is None or row is None:
        return None
    return halt_box(about, row, lease.halt, named=False)


def _pause(about: About, lease: Lease | None, snapshot: Snapshot) -> Html | None:
    pause = lease.pause if lease is not None and not lease.is_ended else None
    if lease is None or pause is None or not pause.stands_at(snapshot.taken_at):
        return None
    command = f"{about.of_shard(about.unpause_command, lease.key)} --yes"
    return element(
        "div",
        element("p", element("strong", f"{as_title(pause.in_words())}.")),
        element("p", "Its owner keeps and renews it, and reads nothing; its records expire."),
        element("p", "To go on: ", element("code", command)),
        class_="box warn",
    )


def _actions(about: About, lease: Lease | None, snapshot: Snapshot) -> Html | None:
    if lease is None:
        return None
    letters = letter_actions(lease, what="redrive its dead letters") if about.letters else None
    return joined(shard_actions(lease, kclrun_owners(snapshot)), letters)


def _now(row: ShardRow | None) -> Iterator[tuple[str, Child]]:
    if row is None:
        yield "state", "the stream lists it; it has no row in the lease table"
        return
    yield "state", layout.state_badge(row.state)
    yield "behind", layout.lag_text(row)
    yield "until records are lost", layout.loss_text(row)
    if row.lag is not None and row.lag.oldest_at is not None:
        yield "oldest record above the checkpoint", f"arrived at {row.lag.oldest_at}"
    if row.state != "halted" and row.note:
        yield "remarks", element("span", row.note, class_="words")
    yield "parents", layout.shard_links(row.parents) if row.parents else "none"
    yield "children", layout.shard_links(row.children) if row.children else "none"


def _row(lease: Lease | None) -> Html | None:
    if lease is None:
        return None
    return joined(
        element("h2", "The row of the lease table"),
        layout.facts(
            [("lease key", _id(lease.key)), *_owner(lease), *_position(lease), *_marks(lease)]
        ),
    )


def _owner(lease: Lease) -> Iterator[tuple[str, Child]]:
    if lease.owner is None:
        yield "owner", "none"
    elif lease.owner == OFFERED:
        yield "owner", "none: it was given away, and waits for its taker"
    else:
        yield "owner", _id(lease.owner)
        owner = Owner.parse(lease.owner)
        if owner is None:
            yield "kind of owner", "not kclrun: a Java KCL worker, or another program"
        else:
            yield "group", owner.group or "(none)"
            yield "host slot", _id(owner.slot)
    yield "counter", f"{lease.counter} (grows with each write of an owner)"
    yield "owner switches", f"{lease.owner_switches} since the last checkpoint"
    if lease.failover_s is not None:
        yield "failover", f"{duration_text(lease.failover_s)}, as its owner published it"
    if lease.load is not None:
        cpu = f"{lease.load.cpu:.3f} of one core"
        yield "load", f"{lease.load.kbps:.1f} KiB/s, {cpu}: means over two minutes"


def _position(lease: Lease) -> Iterator[tuple[str, Child]]:
    yield "checkpoint", _at(lease.checkpoint)
    if lease.pending is not None:
        yield "pending checkpoint", joined(_at(lease.pending.position), ", not finished")
    if lease.start is not None:
        yield "start", lease.start
    if lease.latest_pinned_at is not None:
        yield "LATEST is", layout.instant(lease.latest_pinned_at)
    if lease.stream_created_at is not None:
        yield "stream created", layout.instant(lease.stream_created_at)
    if lease.hash_range is not None:
        yield "hash keys", _id(f"{lease.hash_range.start} to {lease.hash_range.end}")
    if lease.generation:
        yield "generation", f"{lease.generation} resets by an operator"


def _marks(lease: Lease) -> Iterator[tuple[str, Child]]:
    if lease.handoff is not None:
        asker = "an operator" if lease.handoff.to == ANYBODY else lease.handoff.to
        yield (
            "asked for by",
            f"{asker}, at {layout.instant(lease.handoff.asked_at)} by its own clock",
        )
    if lease.offered_to is not None:
        yield "meant for", _id(lease.offered_to)
    if lease.offered_by is not None:
        yield "given away by", _id(lease.offered_by)
    if lease.checkpoint_owner is not None:
        yield "hand-off from", joined(_id(lease.checkpoint_owner), ", which still has to let it go")
    if lease.taken_from is not None:
        yield "taken by force from", _id(lease.taken_from)
    if lease.failed_slot is not None:
        yield "its processes died on", joined(_id(lease.failed_slot), ", again and again")


def _outputs(lease: Lease | None) -> Html | None:
    if lease is None or lease.outputs is None:
        return None
    moved = (
        element(
            "p",
            "The checkpoint was moved by another program since the outputs' cursors were written.",
        )
        if lease.is_moved_past_outputs
        else None
    )
    pairs = [(name, _id(str(cursor))) for name, cursor in lease.outputs.cursors]
    return joined(element("h2", "How far the outputs have its rows"), moved, layout.facts(pairs))


def _stream(snapshot: Snapshot, key: str) -> Html | None:
    shard = snapshot.shards.get(key)
    if shard is None:
        return None
    numbers = shard.ending_sequence_number
    return joined(
        element("h2", "The shard, as the stream lists it"),
        layout.facts(
            [
                ("name", display_name(key)),
                ("open", "yes" if shard.is_open else "no: Kinesis writes no more to it"),
                ("first sequence number", _id(shard.starting_sequence_number)),
                ("last sequence number", _id(numbers) if numbers is not None else None),
                ("hash keys", _id(f"{shard.hash_range.start} to {shard.hash_range.end}")),
                ("parents", layout.shard_links(shard.parents) if shard.parents else "none"),
            ]
        ),
    )


def _at(position: ExtendedSequenceNumber) -> Html:
    return _id(str(position))


def _id(text: str) -> Html:
    return element("span", text, class_="id")
