"""Tables on standard output. In a pipe or a file nothing is cut; on a terminal a table fits its
width, and notes that find no room beside their row are whole below it.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kclrun.cli.messages import columns_of, echo
from kclrun.model.text import escaped

Shorter = Mapping[str, Callable[[str], str]]

NOTE: Final = "note"
_NONE: Final[Shorter] = MappingProxyType({})
_GAP: Final = 2
_INDENT: Final = "  "
# A cell with fewer columns says nothing.
_CELL_LEAST: Final = 8
# A terminal that is narrower wraps the lines itself.
_WIDTH_LEAST: Final = 40


def terminal_width() -> int | None:
    """The columns of the terminal that standard output is; None for a pipe or a file."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return max(_WIDTH_LEAST, shutil.get_terminal_size().columns)


def most_on_terminal(most: int) -> int | None:
    """How many of a long list are shown: so many on a terminal, and in a pipe all (None)."""
    return None if terminal_width() is None else most


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    on_terminal: Shorter = _NONE,
    if_narrow: Shorter = _NONE,
) -> None:
    """Print rows below their titles, each column as wide as necessary, foreign text escaped.

    `on_terminal` shortens the cells of a column, by its title, wherever a person reads them;
    `if_narrow` does so where the table is wider than the terminal.
    """
    for line in table_lines(
        titles, rows, terminal_width(), on_terminal=on_terminal, if_narrow=if_narrow
    ):
        echo(line)


def table_lines(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    *,
    on_terminal: Shorter = _NONE,
    if_narrow: Shorter = _NONE,
) -> Iterator[str]:
    """The lines of a table, at most `width` columns wide; without a limit if that is None."""
    titles = [escaped(title) for title in titles]
    if width is None:
        yield from _lines(titles, _safe(rows))
        return
    table = _safe(_shortened(titles, rows, on_terminal))
    if _width_of(titles, table) > width:
        table = _safe(_shortened(titles, _shortened(titles, rows, on_terminal), if_narrow))
    if _width_of(titles, table) <= width:
        yield from _lines(titles, table)
    elif titles[-1] == NOTE:
        yield from _with_notes_below(titles, table, width)
    else:
        yield from _lines(titles, _cut(titles, table, width))


def _safe(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escaped(cell) for cell in row] for row in rows]


def _shortened(
    titles: Sequence[str], rows: Sequence[Sequence[str]], shorter: Shorter
) -> list[list[str]]:
    return [
        [
            shorter[title](cell) if title in shorter else cell
            for title, cell in zip(titles, row, strict=True)
        ]
        for row in rows
    ]


def _widths(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(columns_of(row[at]) for row in (titles, *rows)) for at in range(len(titles))]


def _width_of(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    return sum(_widths(titles, rows)) + _GAP * (len(titles) - 1)


def _lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = _widths(titles, rows)
    for row in (titles, *rows):
        yield _joined(row, widths)


def _joined(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell + " " * (width - columns_of(cell)) for cell, width in zip(row, widths, strict=True)
    )
    return (" " * _GAP).join(cells).rstrip()


def _with_notes_below(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[str]:
    shown = _cut(titles[:-1], [row[:-1] for row in rows], width)
    head, *lines = _lines(titles[:-1], shown)
    yield head
    for line, row in zip(lines, rows, strict=True):
        yield line
        yield from textwrap.wrap(
            row[-1],
            width,
            initial_indent=_INDENT,
            subsequent_indent=_INDENT,
            break_on_hyphens=False,
        )


def _cut(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The widest columns lose characters until the table fits."""
    widths = _widths(titles, rows)
    over = sum(widths) + _GAP * (len(titles) - 1) - width
    while over > 0:
        spare = [
            wide - max(_CELL_LEAST, columns_of(title))
            for title, wide in zip(titles, widths, strict=True)
        ]
        if not any(left > 0 for left in spare):
            break
        at = max(range(len(widths)), key=lambda at: (spare[at] > 0, widths[at]))
        widths[at] -= 1
        over -= 1
    return [[cut(cell, most) for cell, most in zip(row, widths, strict=True)] for row in rows]


def cut(text: str, most: int) -> str:
    """A text in at most so many columns: of a sentence the beginning, of an id both ends."""
    if columns_of(text) <= most:
        return text
    tail = "" if " " in text else text[-((most - 1) // 2) :]
    head = text[: most - 1 - len(tail)]
    while columns_of(head) + 1 + columns_of(tail) > most and (head or tail):
        head, tail = (head[:-1], tail) if len(head) >= len(tail) else (head, tail[1:])
    return f"{head}…{tail}"
