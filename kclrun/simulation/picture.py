"""Draws the figures of a what-if as a picture: four or five panels over virtual time.

It needs matplotlib, which kclrun does not depend on: `require_matplotlib` checks for it before a
long run would be wasted. The module does not know how the series are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.simulation.what_if import Figures, OwnerSeries, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Locator

SUFFIXES: Final = (".png", ".svg")

# The picture is read at the width of a README: 900 points of a screen.
_WIDTH_IN: Final = 9.0
_DOTS_PER_IN: Final = 100
# Colours that also colour-blind readers can distinguish; from the eleventh group on they repeat.
_COLOURS: Final = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9",
    "#e69f00", "#332288", "#882255", "#44aa99", "#666666",
)  # fmt: skip
_QUIET: Final = "#666666"
_ALARM: Final = "#b2182b"
# Rates are means over bars. There are at most so many bars. A bar is not shorter than the time in
# which a move becomes visible or, for units, the time between two checkpoints: shorter ones would
# only flicker.
_BARS_MAX: Final = 120
_MOVES_BAR_S: Final = 1.0
_UNITS_BAR_S: Final = 10.0
_SMALL: Final = 7


class _Rate(msgspec.Struct, frozen=True):
    """A total, per second, in bars of equal width."""

    begin_s: list[float]
    per_s: list[float]
    width_s: float


def require_matplotlib() -> None:
    """Raises: SettingsError with the line that installs it, if it is not there."""
    try:
        import matplotlib.figure  # noqa: F401 - checks that it can be imported
    except ImportError as error:
        raise SettingsError("--plot needs matplotlib: pip install 'kclrun[plot]'") from error


def draw_picture(figures: Figures, title: str, path: Path) -> None:
    """Draw it into a PNG or SVG file, by the suffix. Raises: OSError where it cannot be written."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    series = figures.series
    groups = sorted({owner.group for owner in series.owners.values()})
    heights = [2.4, *([1.3] if len(groups) > 1 else [])]
    heights += [*([1.6] if series.load_greatest else []), 1.3, 0.9, 1.1]
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + sum(heights)), layout="constrained")
    figure.suptitle(title, fontsize=9, family="monospace", x=0.01, ha="left")
    panels = list(figure.subplots(len(heights), 1, sharex=True, height_ratios=heights))
    colours = {group: _COLOURS[n % len(_COLOURS)] for n, group in enumerate(groups)}
    rest = iter(panels)
    _draw_owners(next(rest), series, colours)
    if len(groups) > 1:
        _draw_groups(next(rest), series, colours)
    if series.load_greatest:
        _draw_loads(next(rest), series)
    _draw_unread(next(rest), figures)
    _draw_moves(next(rest), figures)
    _draw_units(next(rest), series)
    _mark_phases(panels, figures)
    panels[-1].set_xlabel("virtual time [min:s]", fontsize=8)
    panels[-1].set_xlim(0, figures.virtual_s)
    panels[-1].xaxis.set_major_formatter(lambda at_s, _: f"{int(at_s) // 60}:{int(at_s) % 60:02d}")
    panels[-1].xaxis.set_major_locator(_tick_places(figures.virtual_s))
    with rc_context({"svg.hashsalt": "kclrun"}):
        figure.savefig(path, dpi=_DOTS_PER_IN, metadata=_without_date(path))


def _draw_owners(panel: Axes, series: Series, colours: dict[str, str]) -> None:
    """One thin line a worker; it ends where the worker does."""
    end_s, thin = series.at_s[-1], 0.9 if len(series.owners) <= 60 else 0.5
    for owner in series.owners.values():
        at_s, shards = _steps(owner, end_s)
        colour = colours[owner.group]
        panel.step(at_s, shards, where="post", lw=thin, alpha=0.75, color=colour)
    if len(colours) > 1:
        for group, colour in colours.items():
            panel.plot([], [], lw=1.4, color=colour, label=f"group {group}")
    even = _holes([even_share or None for even_share in series.shards_even])
    panel.plot(series.at_s, even, "--", lw=1.2, color="black", label="even share")
    panel.set_ylabel("shards\nper worker")
    most = max(count for owner in series.owners.values() for _, count in owner.shards)
    _leave_room(panel, most)


def _draw_groups(panel: Axes, series: Series, colours: dict[str, str]) -> None:
    """The total of each group, and its fair share: as much of the work as of the workers."""
    held, present = _group_totals(series)
    even = series.shards_even
    for group, colour in colours.items():
        share = [
            count * even_share or None
            for count, even_share in zip(present[group], even, strict=True)
        ]
        lasts = [total if n else None for total, n in zip(held[group], present[group], strict=True)]
        panel.plot(series.at_s, _holes(lasts), lw=1.4, color=colour, drawstyle="steps-post")
        panel.plot(series.at_s, _holes(share), ":", lw=1.0, color=colour)
    panel.plot([], [], ":", lw=1.0, color=_QUIET, label="its share")
    panel.set_ylabel("shards\nper group")
    _leave_room(panel, max(max(counts) for counts in held.values()))


def _draw_loads(panel: Axes, series: Series) -> None:
    """The largest load of a worker, and the least that even counts allow."""
    for name, loads, style in (
        ("largest of a worker", series.load_greatest, "-"),
        ("least with even counts", series.load_least, ":"),
    ):
        colour = _ALARM if style == "-" else _QUIET
        panel.plot(series.at_s, loads, style, lw=1.4, color=colour, label=name)
    panel.axhline(1.0, lw=1.0, ls="--", color="black", label="mean worker")
    panel.set_ylabel("load, in\nthe mean")
    _leave_room(panel, max(series.load_greatest))


def _draw_unread(panel: Axes, figures: Figures) -> None:
    series = figures.series
    panel.fill_between(series.at_s, series.unread, step="post", color=_ALARM, alpha=0.25, lw=0)
    panel.step(series.at_s, series.unread, where="post", lw=0.8, color=_ALARM)
    panel.set_ylabel("shards\nnot read")
    panel.yaxis.label.set_color(_ALARM)
    panel.set_ylim(0, max(1.0, *series.unread) * 1.3)
    waits = panel.twinx()
    waits.plot(series.at_s, series.unread_longest_s, lw=1.0, color="black")
    waits.set_ylabel("longest\nfor [s]", fontsize=8)
    waits.set_ylim(0, max(1.0, *series.unread_longest_s) * 1.3)
    waits.spines["top"].set_visible(False)
    waits.tick_params(labelsize=_SMALL)
    for phase in figures.phases:
        if phase.gap_max_s is not None:
            _write(panel, phase.began_s, f"{phase.gaps} gaps, the longest {phase.gap_max_s:.1f} s")


def _draw_moves(panel: Axes, figures: Figures) -> None:
    series = figures.series
    rate = _rate_of([float(moves) for moves in series.moves], series.at_s, _MOVES_BAR_S)
    panel.bar(rate.begin_s, rate.per_s, rate.width_s, align="edge", color=_QUIET)
    panel.set_ylabel("moves\n[1/s]")
    panel.set_ylim(0, max(1.0, *rate.per_s) * 1.4)
    for phase in figures.phases:
        _write(panel, phase.began_s, f"{phase.moves} moves")


def _draw_units(panel: Axes, series: Series) -> None:
    most = 1.0
    kinds = (("write", series.write_units, "#7b3294"), ("read", series.read_units, "#1b7837"))
    for name, totals, colour in kinds:
        rate = _rate_of(totals, series.at_s, _UNITS_BAR_S)
        at_s = [*rate.begin_s, rate.begin_s[-1] + rate.width_s]
        per_s = [*rate.per_s, rate.per_s[-1]]
        panel.step(at_s, per_s, where="post", lw=1.0, color=colour, label=name)
        most = max(most, *per_s)
    panel.set_ylabel("DynamoDB\n[units/s]")
    _leave_room(panel, most)


def _leave_room(panel: Axes, most: float) -> None:
    """Leaves room for a legend above all lines; whole numbers at the axis."""
    from matplotlib.ticker import MaxNLocator

    panel.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panel.set_ylim(0, max(1.0, most) * 1.3)
    panel.legend(loc="upper right", fontsize=_SMALL, ncols=6, frameon=False, borderaxespad=0.1)


def _write(panel: Axes, at_s: float, words: str) -> None:
    """Write words at the top of a panel, from an instant on."""
    panel.annotate(
        words,
        (at_s, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(3, 0),
        textcoords="offset points",
        fontsize=_SMALL,
        va="top",
    )


def _mark_phases(panels: Sequence[Axes], figures: Figures) -> None:
    """Draw a line where each phase begins, with its name above the first panel."""
    for panel in panels:
        panel.spines["top"].set_visible(False)
        panel.tick_params(labelsize=_SMALL)
        panel.yaxis.label.set_fontsize(8)
        panel.grid(axis="y", lw=0.3, color="#dddddd")
        for phase in figures.phases[1:]:
            panel.axvline(phase.began_s, lw=0.9, color=_QUIET, ls=(0, (4, 3)))
    for phase in figures.phases:
        panels[0].annotate(
            phase.name,
            (phase.began_s, 1.02),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8,
            weight="bold",
        )


def _steps(owner: OwnerSeries, end_s: float) -> tuple[list[float], list[int]]:
    """The times when the number changed; the last number holds until the worker left."""
    until_s = end_s if owner.left_s is None else owner.left_s
    at_s = [at for at, _ in owner.shards]
    shards = [count for _, count in owner.shards]
    return [*at_s, until_s], [*shards, shards[-1]]


def _group_totals(series: Series) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """At each look: the shards of each group, and its workers that take part."""
    groups = sorted({owner.group for owner in series.owners.values()})
    place = {at: number for number, at in enumerate(series.at_s)}
    held = {group: [0] * len(place) for group in groups}
    present = {group: [0] * len(place) for group in groups}
    for owner in series.owners.values():
        last = len(place) if owner.left_s is None else place[owner.left_s]
        begins = [place[at] for at, _ in owner.shards]
        for (_, count), (begin, end) in zip(owner.shards, pairwise([*begins, last]), strict=True):
            for number in range(begin, end):
                held[owner.group][number] += count
                present[owner.group][number] += 1
    return held, present


def _holes(values: Sequence[float | None]) -> list[float]:
    """Replaces None by NaN, which is not drawn."""
    return [float("nan") if value is None else value for value in values]


def _rate_of(totals: Sequence[float], at_s: Sequence[float], shortest_s: float) -> _Rate:
    """Means per second over bars of equal width, from totals."""
    width_s = max(at_s[-1] / _BARS_MAX, shortest_s)
    count = max(1, round(at_s[-1] / width_s))
    at_ends = [0.0] * (count + 1)
    for at, total in zip(at_s, totals, strict=True):
        at_ends[min(count, math.ceil(at / width_s))] = total
    for number in range(1, count + 1):
        at_ends[number] = max(at_ends[number], at_ends[number - 1])
    per_s = [(later - earlier) / width_s for earlier, later in pairwise(at_ends)]
    return _Rate([number * width_s for number in range(count)], per_s, width_s)


def _tick_places(virtual_s: float) -> Locator:
    """A dozen ticks at most, on whole minutes or parts of them."""
    from matplotlib.ticker import MultipleLocator

    whole_s = (5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200)
    return MultipleLocator(next((step_s for step_s in whole_s if virtual_s / step_s <= 12), 14_400))


def _without_date(path: Path) -> dict[str, str | None]:
    """Metadata without a date, so that the same run makes the same file."""
    return {"Date": None} if path.suffix == ".svg" else {"Software": None}
