"""The list of all shards, and their lineage. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kclrun.leases.lines import shortened
from kclrun.model.lease import Owner
from kclrun.page.layout import (
    lag_text,
    legend,
    loss_text,
    shard_link,
    shard_links,
    state,
    strip,
    table,
    told,
)
from kclrun.page.lineage import Descent, lineage_of
from kclrun.page.markup import Html, element, joined, link, short
from kclrun.page.snapshot import About, Row, Snapshot, is_idle, most_urgent_first, rows_of

# A browser shows 1,000 rows at once without delay; a larger stream has several pages.
ROWS_MAX: Final = 1_000
# Deeper ones are drawn at this depth; their generation is told in words.
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
        table(caption, _HEADS, lines, label="Shards"),
        _further(query, first, len(rows)),
        legend(about),
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
        element("th", shard_link(row.key), scope="row", class_="id"),
        element("td", state(row.state)),
        element("td", lag_text(row), class_="n"),
        element("td", loss_text(row), class_="n"),
        element("td", strip(snapshot.history.get(row.key)) if row.state != "ended" else "-"),
        element("td", _host(row.owner), class_="id one"),
        element("td", short(shortened(row.checkpoint), 40) or "-", class_="id one"),
        element("td", shard_links(row.parents, in_short=True), class_="id one"),
        element("td", shard_links(row.children, in_short=True), class_="id one"),
        element("td", told(row.note), class_="note"),
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
    return table(caption, heads, rows, label="Lineage")


def _descent(of: Descent, row: Row | None) -> Html:
    depth = min(of.depth, _INDENT_MAX)
    began = {0: "oldest known", 1: "split of "}.get(len(of.parents), "merge of ")
    became = {0: "", 1: "merged or replaced: "}.get(len(of.children), "split: ")
    return element(
        "tr",
        element(
            "th",
            "└ " if depth else None,
            shard_link(of.key),
            scope="row",
            class_=f"id i{depth}" if depth else "id",
        ),
        element("td", of.depth + 1, class_="n"),
        element("td", state(row.state if row is not None else "not in the table")),
        element("td", lag_text(row) if row is not None else "-", class_="n"),
        element(
            "td", began, shard_links(of.parents, in_short=True) if of.parents else None, class_="id"
        ),
        element("td", became, shard_links(of.children, in_short=True), class_="id"),
    )
