"""The parts that all pages have: frame, tables, states, strips, times. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from kclrun.model.lease import Lease
from kclrun.model.stream import display_name
from kclrun.model.time import WallTime
from kclrun.operating.summaries import duration_text, on_one_line, with_short_positions
from kclrun.page.lag_history import LEVELS, SAMPLES_MAX, measured_every_s
from kclrun.page.markup import Child, Html, element, joined, link, short
from kclrun.page.snapshot import OVER, About, ReadProblem, ShardRow, Snapshot

PAGES: Final = (
    ("/", "Fleet"),
    ("/shards", "Shards"),
    ("/lineage", "Lineage"),
    ("/outputs", "Outputs and dead letters"),
    ("/settings", "Settings"),
)
# Characters of a text in a list; the page of the shard shows the rest.
_LINE_MAX: Final = 400
_NAMED_MAX: Final = 4
# Columns of numbers, which are aligned at the right.
_NUMBERS: Final = frozenset(
    {
        "owners",
        "leases",
        "halted",
        "KiB/s",
        "CPU",
        "behind",
        "loss in",
        "generation",
        "calls",
        "share of the traffic",
    }
)
# Account, stream (128 characters), creation and shard (128): a longer key is of no shard.
_KEY_MAX: Final = 300
_STRIP_HEIGHT: Final = 12
_READS_ONLY: Final = (
    "This page only reads: it changes nothing in the table, the stream or the fleet. The commands"
    " on it are to be copied."
)
_CHANGES: Final = (
    "This page changes a lease or a dead letter only by a form that shows its plan and asks for the"
    " token."
)
_RUN: Final = re.compile(rb"(.)\1*", re.DOTALL)
_TONES: Final[Mapping[str, str]] = {
    "halted": "bad",
    "unreadable": "bad",
    "unowned": "warn",
    "offered": "warn",
    "paused": "warn",
    "no lease": "warn",
    "silent": "warn",
    "owned": "good",
    "ok": "good",
    "behind": "warn",
    "failing": "bad",
    "renewing": "good",
}


def page(
    about: About,
    snapshot: Snapshot,
    path: str,
    query: Mapping[str, str],
    *,
    title: str,
    body: Child,
    is_still: bool = False,
) -> bytes:
    """A whole page. `live.js` keeps it up to date; without scripts it loads itself again every
    `refresh_s`. With `live=off` in the query it does neither, nor with `is_still`, for a page on
    which a form is filled in.
    """
    is_live = query.get("live") != "off" and not is_still
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # A script is sent an event when there is something new.
        element("noscript", element("meta", http_equiv="refresh", content=about.refresh_s))
        if is_live
        else None,
        element("title", f"{title} · {about.application} · kclrun"),
        element("link", rel="stylesheet", href="/style.css"),
        element("script", src="/live.js", defer="defer") if is_live else None,
    )
    document = element(
        "html",
        head,
        element(
            "body",
            element("a", "Skip to the content", href="#content", class_="skip"),
            _header(about, path, query),
            element("p", id="news", class_="news", role="status", aria_live="polite"),
            element(
                "main",
                element("h1", title),
                None if is_still else _read_at(about, snapshot, path, query, is_live=is_live),
                [_problem(problem) for problem in snapshot.problems],
                body,
                id="content",
                data_news=news_of(snapshot),
            ),
            element("footer", _CHANGES if about.has_actions else _READS_ONLY),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{document}\n".encode()


def news_of(snapshot: Snapshot) -> str:
    """The state of the fleet in a sentence, which screen readers read aloud when it changes."""
    leases = snapshot.leases.values()
    counts = (
        (sum(lease.halt is not None for lease in leases), "halted"),
        (sum(is_paused(lease, snapshot) for lease in leases), "paused"),
        (len(snapshot.owners.expired), "with a silent owner"),
        (len(snapshot.broken), "unreadable"),
    )
    words = [f"{count} {name}" for count, name in counts if count]
    words += [problem.about for problem in snapshot.problems]
    return f"Shards: {', '.join(words) or 'none halted, paused or without its owner'}."


def is_paused(lease: Lease, snapshot: Snapshot) -> bool:
    """Whether the lease is not read now because an operator has paused it."""
    pause = lease.pause if not lease.is_ended else None
    return pause is not None and pause.stands_at(snapshot.taken_at)


def _header(about: About, path: str, query: Mapping[str, str]) -> Html:
    live = "off" if query.get("live") == "off" else None
    items = [
        element("li", link(target, name, {"live": live}, is_current=target == path))
        for target, name in PAGES
    ]
    return element(
        "header",
        element(
            "div",
            element("strong", about.application),
            element("span", f"stream {about.streams}"),
            element("span", f"lease table {about.table}"),
            element("span", about.place),
            class_="title",
        ),
        element("nav", element("ul", items), aria_label="Pages"),
    )


def _read_at(
    about: About, snapshot: Snapshot, path: str, query: Mapping[str, str], *, is_live: bool
) -> Html:
    table = _ago(snapshot.table_at, snapshot.taken_at, "the table is not read yet")
    lags = _ago(snapshot.lags_at, snapshot.taken_at, "not measured yet")
    others = {name: value for name, value in query.items() if name != "live"}
    switch = link(path, "go on", others)
    if is_live:
        switch = link(path, "stop", {**others, "live": "off"})
    mode = f"updates every {about.refresh_s} s" if is_live else "does not update by itself"
    return element(
        "p", f"Table: {table}. Lag: {lags}. This page {mode} (", switch, ").", class_="quiet"
    )


def _problem(problem: ReadProblem) -> Html:
    return element(
        "div",
        element("p", element("strong", f"{problem.about} since {instant(problem.since)}")),
        element("p", problem.message, class_="words"),
        class_="box bad",
        role="alert",
    )


def _ago(at: WallTime | None, now: WallTime, never: str) -> str:
    return never if at is None else f"read {duration_text(max(0.0, now - at))} ago"


def instant(at: WallTime | None) -> str:
    """A time of the service or of this host: `2026-03-01 06:00:00 UTC`."""
    if at is None:
        return "not known"
    date = date_of(at)
    return "not a time" if date is None else f"{date:%Y-%m-%d %H:%M:%S} UTC"


def date_of(at: WallTime) -> datetime | None:
    """The time as a date; None for a number that is not a time, which other programs may write."""
    try:
        return datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def table(caption: Child, heads: Sequence[str], rows: Iterable[Html], *, label: str) -> Html:
    """A table with its caption; wide ones scroll in their own frame, also by the keyboard."""
    titles = [
        element("th", head, scope="col", class_="n" if head in _NUMBERS else None) for head in heads
    ]
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", titles)),
            element("tbody", list(rows)),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=label,
    )


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values; a name without a value (None) is left out."""
    return element(
        "dl",
        [
            joined(element("dt", name), element("dd", value))
            for name, value in pairs
            if value is not None
        ],
    )


def state_badge(word: str) -> Html:
    """A state in a word, and in a colour."""
    return element("span", word, class_=f"state {_TONES.get(word, '')}".rstrip())


def shard_link(key: str) -> Html:
    """The link to the page of a shard."""
    return shard_links((key,))


def shard_links(keys: Sequence[str], *, in_short: bool = False) -> Html:
    """Links to a few shards, and how many more there are; `in_short` by their numbers, which every
    verb accepts too."""
    if not keys:
        return joined("-")
    named = [
        joined(", " if number else None, _shard_link(key, in_short=in_short))
        for number, key in enumerate(keys[:_NAMED_MAX])
    ]
    more = len(keys) - _NAMED_MAX
    return joined(named, f" and {more} more" if more > 0 else None)


def _shard_link(key: str, *, in_short: bool) -> Child:
    name = _number_of(key) if in_short else short(display_name(key), 80)
    return link("/shard", name, {"key": key}) if len(key) <= _KEY_MAX else name


def _number_of(key: str) -> str:
    _, _, number = display_name(key).rpartition("shardId-")
    return (
        str(int(number))
        if number.isascii() and number.isdecimal()
        else short(display_name(key), 30)
    )


def one_line(text: str) -> str:
    """A text from a row or from user code, in a list: without its lines, and with its sequence
    numbers in short."""
    return short(with_short_positions(on_one_line(text)), _LINE_MAX)


def lag_text(row: ShardRow) -> str:
    """How far a row is behind: `4m 10s`, `≥ 4m 10s` where only that is known, `?` if it was not
    measured, `-` where it is over."""
    if row.urgency == OVER:
        return "-"
    least = "≥ " if row.is_lag_least else ""
    return f"{least}{duration_text(row.lag.behind_s if row.lag is not None else None)}"


def loss_text(row: ShardRow) -> str:
    """The time until its records are lost."""
    loss_in_s = row.lag.loss_in_s if row.lag is not None else None
    return "-" if loss_in_s is None else duration_text(loss_in_s)


def strip(levels: bytes | None, *, class_: str = "strip") -> Html:
    """The heat strip of a shard: a bar for each sample, the latest at the right end; higher and
    warmer is further behind. Bars of one level are one path."""
    if not levels:
        return joined(element("span", "not measured yet", class_="quiet"))
    offset = SAMPLES_MAX - len(levels)
    paths: dict[int, list[str]] = {}
    for run in _RUN.finditer(levels):
        level = run[0][0]
        height = 2 * (level + 1)
        paths.setdefault(level, []).append(
            f"M{offset + run.start()} {_STRIP_HEIGHT}v-{height}h{len(run[0])}v{height}z"
        )
    worst = max(levels)
    words = f"lag so far: now {LEVELS[levels[-1]]}, at most {LEVELS[worst]}"
    return element(
        "svg",
        [element("path", class_=f"l{level}", d="".join(d)) for level, d in sorted(paths.items())],
        class_=class_,
        viewBox=f"0 0 {SAMPLES_MAX} {_STRIP_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=words,
    )


def legend(about: About, shards: int) -> Html:
    """The meaning of the colours and heights of the strips, of so many shards."""
    items = [
        element(
            "li",
            element(
                "svg",
                element(
                    "path",
                    class_=f"l{level}",
                    d=f"M0 {_STRIP_HEIGHT}v-{2 * (level + 1)}h{_STRIP_HEIGHT}v{2 * (level + 1)}z",
                ),
                viewBox=f"0 0 {_STRIP_HEIGHT} {_STRIP_HEIGHT}",
                aria_hidden="true",
            ),
            name,
        )
        for level, name in enumerate(LEVELS)
    ]
    span = duration_text(SAMPLES_MAX * measured_every_s(about.refresh_s, shards))
    return joined(
        element(
            "p",
            f"A strip shows the lag while this page ran, the last {span} at most, now at the"
            " right. Behind is the age of the oldest record above the checkpoint.",
            class_="quiet",
        ),
        element("ul", items, class_="legend"),
    )
