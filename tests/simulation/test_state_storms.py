"""Storms over lease processes with keyed state and single records at the same time: at every
position of a row, the state that it names is the fold of the records up to there, per key. The
store, its faults and the oracle: tests/support/storms/states.py."""

import functools
from unittest import mock

import pytest

from kclrun.errors import InvariantViolation
from kclrun.lease import state_machine
from kclrun.lease.outputs import OutputCommits
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.outputs.waiting_rows import WaitingRows
from kclrun.protocol import writes
from kclrun.state.beginning import Empty, ParentVersions, beginning
from kclrun.state.keyed import LiveEntries
from kclrun.state.stores import state_versions
from tests.support.storms import states
from tests.support.storms.states import play_with_state, state_profile


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(104_100, 104_103))
def test_the_state_is_the_fold_of_its_records_at_every_position_of_a_row(seed):
    played, store = play_with_state(state_profile(seed))

    assert played.records > 1000
    reached = {"restored", "out of order", "raised", "given up", "left", "unknown", "deleted"}
    assert {name for name in reached if not store.seen[name]} == set()
    assert store.seen["checked"] > 100


def _by_anybody(listed, chain, _, __):
    """V5, V6: versions of any owner are garbage, of any age."""
    return tuple(name for name, _ in listed if name not in chain.names)


def _begins_empty(row, parents, **asked):
    """V8: a child does not read what its parents' rows name."""
    begun = beginning(row, parents, **asked)
    return Empty() if isinstance(begun, ParentVersions) else begun


def _first_version(commits, row, _):
    """K2: the version is written once, and the checkpoint goes on without it."""
    return (), commits._state_version if row.state_version is None else None


def _late(machine, now, of=LeaseStateMachine._make_last_call):
    """P19 with state: the row goes on to what was processed, and keeps the version it has."""
    with (
        mock.patch.object(machine, "_covered", lambda position: position),
        mock.patch.object(state_machine, "late_checkpoint", _with_the_version_of_before),
    ):
        return of(machine, now)


def _with_the_version_of_before(own, _commits, position, last, _policy):
    if own.is_gone or position <= last:
        return None
    generation = own.confirmed.generation
    return writes.LateCheckpoint(
        *(own.key, own.me, last, position, (), None), generation=generation
    )


def _in_place(rows, changes, of=WaitingRows.place_changes):
    """R11: what is written is what the values are by now."""
    live = rows._undo.__self__
    of(rows, [(key, name, live.found(key).get(name), None) for key, name, *_ in changes])


# What is broken, and the promise that then breaks.
BROKEN = {
    "K15: versions of any owner are deleted": (state_versions, "garbage", _by_anybody, "K15"),
    "K16: a child begins empty": (state_versions, "beginning", _begins_empty, "K19"),
    "K2: a checkpoint keeps the version of the one before": (
        *(OutputCommits, "to_write", _first_version, "K19"),
    ),
    "K5: a checkpoint does not wait for its version": (
        *(OutputCommits, "covered", lambda _, wanted, *__: wanted, "K1[39]"),
    ),
    "K3: a late checkpoint with state": (LeaseStateMachine, "_make_last_call", _late, "K19"),
    "R11: values in place": (WaitingRows, "place_changes", _in_place, "K19"),
    "K19: a call that raises leaves its changes": (LiveEntries, "undo_all", lambda *_: None, "K19"),
    "K19: no order of a key": (
        *(states, "Concurrency", functools.partial(states.Concurrency, order="none"), "K19"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_a_rule_is_caught(name, monkeypatch):
    where, attribute, broken, promise = BROKEN[name]
    monkeypatch.setattr(where, attribute, broken)

    with pytest.raises(InvariantViolation, match=f"{promise}: "):
        _play_seeds()


def _play_seeds():
    for seed in range(104_100, 104_110):
        play_with_state(state_profile(seed))
