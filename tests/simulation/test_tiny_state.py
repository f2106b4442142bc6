"""Every order of events of two owners with keyed state, timers and one output, by the real parts of
a lease (tiny_worlds/keyed.py); and broken rules that it must find."""

import functools

import pytest

from kclrun.calling.timer_run import TimerRun
from kclrun.lease.outputs import OutputCommits
from kclrun.state.stores import state_versions
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.timers import entry_of
from tests.simulation.tiny_worlds import outputs
from tests.simulation.tiny_worlds.keyed import StateWorld
from tests.simulation.tiny_worlds.outputs import Table

explore = functools.partial(outputs.explore, kind=StateWorld)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "within",
    [
        {"faults": 0, "ticks": 1},
        pytest.param({"faults": 1, "ticks": 0}, marks=pytest.mark.long),
    ],
)
def test_the_state_at_the_row_is_the_fold_and_each_timer_fires_once_in_every_order(within):
    found = explore(**within)

    assert not found.words, found
    assert found.whole > 500


def _fires_from_memory(run, timer):
    """The timer that fires is taken from what this process knows, not from the state."""
    key, name, _ = entry_of(timer)
    run._live.reserved.set(key, name, None)
    run._live.reserved.firing = timer


def _first_version(commits, row, _):
    return (), commits._state_version if row.state_version is None else None


def _same_name(versions, *of, of_parts=StateVersions._encoded, **more):
    """V5: a version has one name, whoever writes it."""
    versions._token, versions._nonce = 1, "0" * 8
    return of_parts(versions, *of, **more)


# What is broken; the promise that then breaks; the moves of the shortest story.
BUGS = {
    "K2: a checkpoint keeps the version of the one before": (
        *(OutputCommits, "to_write", _first_version, "K19", 7),
    ),
    "K5: a checkpoint does not wait for its version": (
        *(OutputCommits, "covered", lambda _, wanted, *__: wanted, "K13", 3),
    ),
    "K7: the token alone": (Table, "holds", lambda table, token, _: token >= table.token, "K5", 4),
    "K14: an owner names versions as the others do": (
        *(StateVersions, "_encoded", _same_name, "a name is written once", 8),
    ),
    "K15: versions of the confirmed chain are garbage": (
        *(state_versions, "garbage", lambda listed, *_: tuple(name for name, _ in listed)),
        *("K13", 5),
    ),
    "K18: a timer that fires is no change of the state": (
        *(TimerRun, "take", _fires_from_memory, "K18", 6),
    ),
    "K18: the cursor of an output forces no round": (
        *(TimerRun, "forced", lambda *_: None, "K5", 12),
    ),
}


# Those that need a request to fail, and the one that takes seconds.
WITH_A_FAULT = {"K7: the token alone"}
LONG = {"K18: the cursor of an output forces no round"}


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in BUGS],
)
def test_a_broken_rule_is_found_by_its_shortest_story(name, monkeypatch):
    kind, attribute, broken, promise, moves = BUGS[name]
    monkeypatch.setattr(kind, attribute, broken)

    found = explore(faults=int(name in WITH_A_FAULT), ticks=1)

    assert found.words.startswith(f"{promise}: " if promise[0] == "K" else promise)
    assert len(found.story) == moves
