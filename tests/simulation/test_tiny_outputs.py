"""Every order of events of two owners and one output, by the real life, row and outputs of a lease
(tiny_worlds/outputs.py); and bugs that it must find."""

import pytest

from kclrun.lease.outputs import OutputCommits
from kclrun.outputs.sending import Outputs
from tests.simulation.tiny_worlds.outputs import Table, explore


@pytest.mark.parametrize(
    "within",
    [pytest.param({"faults": 1, "ticks": 0}, marks=pytest.mark.long), {"faults": 0, "ticks": 1}],
)
def test_no_row_is_twice_at_the_output_and_none_below_the_checkpoint_is_missing(within):
    found = explore(**within)

    assert not found.words, found
    assert found.whole > 50


def _begins_at_the_row(begin):
    def broken(outputs, checkpoint, cursors, **_):
        begun = begin(outputs, checkpoint, cursors, may_adopt=False)
        for lane in outputs._lanes:
            lane.known = None
        return begun

    return broken


# What is broken; the promise that then breaks; the moves of the shortest story.
BUGS = {
    "K7: the token alone": (Table, "holds", lambda table, token, _: token >= table.token, "K5", 4),
    "K5: the checkpoint does not wait": (
        *(OutputCommits, "covered", lambda _, wanted, *__: wanted, "I13", 3),
    ),
    "K12: rows that are there come again": (
        *(Outputs, "begin", _begins_at_the_row(Outputs.begin), "K5", 7),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_broken_rule_is_found_by_its_shortest_story(name, monkeypatch):
    kind, attribute, broken, promise, moves = BUGS[name]
    monkeypatch.setattr(kind, attribute, broken)

    found = explore(faults=1, ticks=0)

    assert found.words.startswith(f"{promise}: ")
    assert len(found.story) == moves
