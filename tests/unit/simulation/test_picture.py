"""What a picture is drawn from: rates out of totals, groups out of workers."""

from itertools import pairwise

import pytest

from kclrun.simulation.picture import _group_totals, _rate_of, _steps
from kclrun.simulation.what_if import OwnerSeries, Series


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
