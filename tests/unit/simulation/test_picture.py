"""What a picture is drawn from: rates out of totals, groups out of workers; and what it shows."""

import hashlib
import json
from itertools import pairwise

import pytest

from kclrun.simulation.picture import _group_totals, _rate_of, _steps, _tick_places, draw_picture
from kclrun.simulation.what_if import Figures, OwnerSeries, PhaseFigures, Series
from tests.support.tables import over_rows
from tests.unit.simulation.golden import require_as_before

# In the environment for development; the quick tests of a checkout do without.
pytest.importorskip("matplotlib")


@pytest.mark.parametrize("shortest_s", [1.0, 3.0, 10.0])
def test_the_bars_of_a_rate_add_up_to_the_total_whatever_their_width(shortest_s):
    at_s = [number / 2 for number in range(121)]
    totals = [float(number**2) for number in range(121)]

    rate = _rate_of(totals, at_s, shortest_s)

    assert rate.width_s >= shortest_s
    assert sum(rate.per_s) * rate.width_s == pytest.approx(totals[-1])
    assert {later - earlier for earlier, later in pairwise(rate.begin_s)} == {rate.width_s}
    assert min(rate.per_s) >= 0


def test_a_long_run_has_no_more_bars_than_can_be_seen():
    at_s = [float(number) for number in range(86_401)]

    rate = _rate_of(at_s, at_s, 1.0)

    assert len(rate.per_s) == 120
    assert set(rate.per_s) == {1.0}


def test_a_group_has_what_its_workers_have_until_they_leave():
    owners = {
        "one": OwnerSeries("a", [(0.0, 2), (1.0, 3)], left_s=2.0),
        "two": OwnerSeries("a", [(1.0, 4)]),
        "three": OwnerSeries("b", [(0.0, 1), (3.0, 0)]),
    }
    series = Series(at_s=[0.0, 1.0, 2.0, 3.0], owners=owners)

    held, present = _group_totals(series)

    assert held == {"a": [2, 7, 4, 4], "b": [1, 1, 1, 0]}
    assert present == {"a": [1, 2, 1, 1], "b": [1, 1, 1, 1]}


def test_the_line_of_a_worker_ends_where_it_left_or_with_the_picture():
    assert _steps(OwnerSeries("a", [(0.0, 2), (1.0, 3)], left_s=2.0), 9.0) == (
        [0.0, 1.0, 2.0],
        [2, 3, 3],
    )
    assert _steps(OwnerSeries("a", [(4.0, 2)]), 9.0) == ([4.0, 9.0], [2, 2])


@over_rows(
    ("virtual_s", "tick_s"),
    [
        (60, 5),
        (61, 10),
        (120, 10),
        (240, 30),
        (3600, 300),
        (7200, 600),
        (21_600, 1800),
        (43_200, 3600),
        (86_400, 7200),
        (86_401, 14_400),
    ],
)
def test_a_dozen_ticks_at_most_are_at_whole_minutes_or_parts_of_them(virtual_s, tick_s):
    first, second, *_ = [at for at in _tick_places(virtual_s).tick_values(0, virtual_s) if at >= 0]

    assert second - first == tick_s


def phase(name, began_s, *, moves, gap_max_s, gaps):
    return PhaseFigures(
        name=name,
        began_s=began_s,
        balanced_after_s=None,
        gaps=gaps,
        gap_p50_s=gap_max_s,
        gap_p99_s=gap_max_s,
        gap_max_s=gap_max_s,
        moves=moves,
        duplicates=0,
        write_units=0.0,
        read_units=0.0,
    )


def figures_of(owners, loads=(), *, quiet=False):
    """Ten looks, half a minute apart. Groups come and go by their workers; `quiet`: nothing moves
    and all is read."""
    steps = [0.0] * 10 if quiet else [float(number) for number in range(10)]
    series = Series(
        at_s=[30.0 * number for number in range(10)],
        unread=[int(each) % 4 for each in steps],
        unread_longest_s=[each / 2 for each in steps],
        shards_even=[0.0, *[3.5] * 9],
        moves=[int(each) * 40 for each in steps],
        write_units=[each * 90.0 for each in steps],
        read_units=[each * 50.0 for each in steps],
        load_greatest=[each * 1.1 for each in loads],
        load_least=list(loads),
        owners=owners,
    )
    return Figures(
        phases=(
            phase("cold start", 0.0, moves=40, gaps=2, gap_max_s=None if quiet else 3.25),
            phase("group b lost", 150.0, moves=0, gaps=0, gap_max_s=None),
        ),
        workers=len(owners),
        shards=7,
        shards_per_owner_min=1,
        shards_per_owner_max=2,
        shards_per_owner_even=1.5,
        records=0,
        duplicates=0,
        moves=0,
        write_units=0.0,
        read_units=0.0,
        virtual_s=270.0,
        events=0,
        load_by_counts=None,
        series=series,
    )


MANY_GROUPS = {
    f"{group}{number}": OwnerSeries(group, [(30.0, number), (90.0, number + 1)], left_s)
    for number, (group, left_s) in enumerate(
        [*[(each, None) for each in "abcdefghijkl"], ("b", 240.0)]
    )
}
MANY_WORKERS = {f"a{number}": OwnerSeries("a", [(0.0, 1)]) for number in range(61)}


def reported(value):
    """Numbers to four digits, whatever kind the library made of them."""
    if isinstance(value, str | bool) or value is None:
        return value
    if hasattr(value, "__iter__"):
        return [reported(each) for each in value]
    return float(f"{float(value):.4g}")


def looks(artist, *names):
    return {name: reported(getattr(artist, f"get_{name}")()) for name in names}


def shown(figure):
    """All that the code decides about a picture, panel by panel, a digest for each part."""
    words = ("text", "fontsize", "weight", "color", "va", "ha")
    title = figure._suptitle
    yield "size", reported(figure.get_size_inches())
    yield "heights", reported(figure.axes[0].get_gridspec().get_height_ratios())
    yield "layout", type(figure.get_layout_engine()).__name__
    yield "title", [looks(title, *words, "fontfamily"), reported(title.get_position())]
    for number, panel in enumerate(figure.axes):
        axes = (panel.xaxis, panel.yaxis)
        legend = panel.get_legend()
        parts = {
            "axes": [looks(panel, "xlim", "ylim", "ylabel", "xlabel")],
            "labels": [looks(each.label, "fontsize", "color") for each in axes],
            "ticks": [each.get_tick_params()["labelsize"] for each in axes],
            "places": reported(panel.yaxis.get_major_locator().tick_values(0, 4.4)),
            "at 75 s": panel.xaxis.get_major_formatter()(75.0, 0),
            "top": panel.spines["top"].get_visible(),
            "grid": [looks(axis.get_gridlines()[0], "linewidth", "color") for axis in axes],
            "lines": [
                [
                    looks(each, "color", "linewidth", "linestyle", "alpha", "drawstyle", "label"),
                    reported(each._unscaled_dash_pattern),
                    reported(each.get_xydata()),
                ]
                for each in panel.lines
            ],
            "bars": [looks(each, "x", "width", "height", "facecolor") for each in panel.patches],
            "areas": [
                [
                    looks(each, "facecolor", "alpha", "linewidth"),
                    reported(each.get_paths()[0].vertices),
                ]
                for each in panel.collections
            ],
            "words": [
                [looks(each, *words), reported(each.xy), reported(each.xyann)]
                for each in panel.texts
            ],
            "legend": legend
            and [reported(legend._loc), legend._ncols, legend.borderaxespad, legend.get_frame_on()]
            + [looks(each, "text", "fontsize") for each in legend.get_texts()],
        }
        for part, look in parts.items():
            yield f"{number} {part}", look


def digests(parts):
    return {
        part: hashlib.sha256(json.dumps(look, default=str).encode()).hexdigest()[:8]
        for part, look in parts
    }


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "figures", "suffix"),
    [
        (
            "many groups",
            figures_of(MANY_GROUPS, [1.0 + number / 10 for number in range(10)]),
            ".png",
        ),
        ("many workers", figures_of(MANY_WORKERS), ".svg"),
        ("quiet", figures_of({"a": OwnerSeries("a", [(0.0, 0)])}, quiet=True), ".svg"),
    ],
)
def test_a_picture_shows_what_it_showed_before(name, figures, suffix, monkeypatch, tmp_path):
    # Here, not above: each of pytest's workers imports each file of tests.
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda figure, path, **said: saved.append((figure, path, said, rcParams["svg.hashsalt"])),
    )

    draw_picture(figures, "kclrun simulate", tmp_path / f"went{suffix}")

    [(figure, path, said, salt)] = saved
    assert (path, salt) == (tmp_path / f"went{suffix}", "kclrun")
    assert said == {"dpi": 100, "metadata": {"Date" if suffix == ".svg" else "Software": None}}
    require_as_before(f"picture: {name}", digests(shown(figure)))
