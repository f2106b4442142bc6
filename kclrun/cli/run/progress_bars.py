"""The progress bars below the live table: the share of the fill that is put, and that is read.

Only on a terminal; a log has no bars. Pure, except for the call of `filling`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kclrun.observe.sample import ManagerSample

if TYPE_CHECKING:
    from kclrun.local.filling import Filling

_BAR_COLUMNS: Final = 30


class Bar(NamedTuple):
    """One bar. `share` is from 0 to 1; `told` is the text beside it."""

    title: str
    share: float
    told: str


class Bars:
    """The bars of one run. `filling` returns the progress of the fill (None without a fill);
    `is_until`: the run ends when everything is read.

    A bar is shown only if its total is known, and a share is never guessed. Without a fill, the
    total is the largest lag of the shards so far.
    """

    def __init__(self, filling: Callable[[], Filling | None], *, is_until: bool) -> None:
        self._filling = filling
        self._is_until = is_until
        self._behind_ms = 0

    def at(self, sample: ManagerSample) -> tuple[Bar, ...]:
        """The bars to draw with this sample. Call it for each sample, in order."""
        filling = self._filling()
        bars = []
        if filling is not None and filling.total and filling.done < filling.total:
            bars.append(_counted("filled", filling.done, filling.total))
        if self._is_until:
            if filling is None:
                bars += self._by_lag(sample)
            elif filling.total:
                bars.append(_counted("read", sample.records_total, filling.total))
        return tuple(bars)

    def _by_lag(self, sample: ManagerSample) -> list[Bar]:
        lag_ms = sample.lag_ms_max
        if lag_ms is None:
            return []
        self._behind_ms = max(self._behind_ms, lag_ms)
        if self._behind_ms == 0:
            return []
        share = 1 - lag_ms / self._behind_ms
        return [Bar("read", share, f"of {self._behind_ms / 1000:,.0f} s that were behind")]


def _counted(title: str, done: int, total: int) -> Bar:
    # A record that is processed again counts again, so the share is limited to 1.
    return Bar(title, min(1.0, done / total), f"{min(done, total):,} of {total:,} records")


def drawn_bars(bars: tuple[Bar, ...]) -> Table:
    """The bars as a table, a line for each."""
    table = Table.grid(padding=(0, 1))
    for bar in bars:
        table.add_row(
            Text(bar.title, style="bold"),
            ProgressBar(total=1.0, completed=bar.share, width=_BAR_COLUMNS),
            Text(f"{bar.share:4.0%}  {bar.told}"),
        )
    return table
