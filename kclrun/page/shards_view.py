"""The list of all shards, and their lineage. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from kclrun.leases.lines import shortened
from kclrun.model.lease import Lease, Owner
from kclrun.model.shard import Shard
from kclrun.page import layout
from kclrun.page.markup import Html, element, joined, link, short
from kclrun.page.snapshot import About, Row, Snapshot, is_idle, most_urgent_first, rows_of

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
    "note",
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
    lines = [_line(row, snapshot) for row in shown]
    return joined(
        _choices(query),
        layout.table(caption, _HEADS, lines, label="Shards"),
        _further(query, first, len(rows)),
        layout.legend(about, len(snapshot.lags)),
    )


def _filter(query: Query, snapshot: Snapshot) -> Callable[[Row], bool]:
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


def _line(row: Row, snapshot: Snapshot) -> Html:
    return element(
        "tr",
        element("th", layout.shard_link(row.key), scope="row", class_="id"),
        element("td", layout.state(row.state)),
        element("td", layout.lag_text(row), class_="n"),
        element("td", layout.loss_text(row), class_="n"),
        element("td", layout.strip(snapshot.history.get(row.key)) if row.state != "ended" else "-"),
        element("td", _host(row.owner), class_="id one"),
        element("td", short(shortened(row.checkpoint), 40) or "-", class_="id one"),
        element("td", layout.shard_links(row.parents, in_short=True), class_="id one"),
        element("td", layout.shard_links(row.children, in_short=True), class_="id one"),
        element("td", layout.one_line(row.note), class_="note"),
    )


def _host(owner: str) -> str:
    """Group and host slot of an owner; the page of the shard has the whole id."""
    parsed = Owner.parse(owner)
    if parsed is None:
        return short(owner, 40) or "-"
    return short(f"{parsed.group} {parsed.slot}".lstrip(), 40)


def lineage_body(snapshot: Snapshot) -> Html:
    """The tree of splits and merges."""
    lineage = lineage_of(snapshot.leases, snapshot.shards, ROWS_MAX)
    states = {row.key: row for row in rows_of(snapshot)}
    alone = f"{lineage.alone} shards have neither a parent nor a child here."
    if not lineage.descents:
        return element("p", f"No split and no merge is in the table or the stream. {alone}")
    rows = [_descent(each, states.get(each.key)) for each in lineage.descents]
    left = (
        f" {lineage.left_out} more are not shown: beyond {ROWS_MAX}, or rows that name each other"
        " as parents."
        if lineage.left_out
        else ""
    )
    caption = (
        "A shard is below its parent; one that was merged of two is below the first of them."
        f" {alone}{left}"
    )
    heads = ("shard", "generation", "state", "behind", "came from", "became")
    return layout.table(caption, heads, rows, label="Lineage")


def _descent(of: Descent, row: Row | None) -> Html:
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
        element("td", layout.state(row.state if row is not None else "not in the table")),
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
    """`descents`: each shard below a parent. A merge is below the one that comes first, and names
    both. `alone` counts the shards without known parents and children, `left_out` those beyond the
    limit, or in a circle."""

    descents: tuple[Descent, ...]
    alone: int
    left_out: int


def lineage_of(leases: Mapping[str, Lease], shards: Mapping[str, Shard], most: int) -> Lineage:
    """The tree of all rows and listed shards, at most so many. Rows may name shards that neither
    the table nor the listing has: those are left out."""
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
