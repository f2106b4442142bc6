"""The figures of `bin/shape` are no worse than the ratchets say, and no ratchet is left behind."""

import functools
from pathlib import Path

import pytest
import yaml

from tests.architecture import shape

pytestmark = pytest.mark.seconds

RATCHETS = yaml.safe_load(Path(__file__).with_name("ratchets.yaml").read_text())
# How far a figure may be better than its ratchet before the ratchet has to follow.
SLACK = 0.05

figures = functools.cache(shape.figures)


@pytest.mark.parametrize("name", RATCHETS)
def test_a_figure_of_the_codes_shape_is_no_worse_than_its_ratchet(name):
    ratchet, value = RATCHETS[name], figures()[name]

    assert "most" not in ratchet or value <= ratchet["most"]
    assert "least" not in ratchet or value >= ratchet["least"]


@pytest.mark.parametrize("name", RATCHETS)
def test_a_ratchet_above_its_goal_follows_a_figure_that_became_better(name):
    ratchet, value = RATCHETS[name], figures()[name]

    if "most" in ratchet:
        assert ratchet["most"] <= ratchet["goal"] or value >= ratchet["most"] * (1 - SLACK) - 1
    else:
        assert ratchet["least"] >= ratchet["goal"] or value <= ratchet["least"] * (1 + SLACK) + 1


def test_each_step_that_is_traced_makes_calls_between_files():
    for name, step in shape.STEPS.items():
        share, calls, files = shape.crossing(step)
        assert calls > 10, name
        assert files > 1, name
        assert 0 < share < 100, name
