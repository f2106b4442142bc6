"""Which events are expected in which state, and which are late and ignored: the list.

An event that is neither is an error: our bug, or a shell that lost its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kclrun.consuming import events as on
from kclrun.consuming.states import FINAL, State
from kclrun.errors import InvariantViolation

__all__ = ["EXPECTED", "LATE", "is_expected"]

_ALL: Final = frozenset(State)
_ALIVE: Final = _ALL - FINAL
_DELIVERING: Final = frozenset({State.PROCESSING, State.STOPPING, State.LOSING})
_LEAVING: Final = frozenset({State.STOPPING, State.RELEASING, State.FAILING, State.LOSING}) | FINAL

EXPECTED: Final[Mapping[type[on.Event], frozenset[State]]] = {
    on.Started: frozenset({State.CLAIMING}),
    on.Ticked: _ALIVE,
    on.WriteResolved: _ALIVE,
    on.OwnRowRead: _ALIVE,
    on.ReadFailed: _ALIVE,
    on.RowsRead: frozenset({State.CREATING}),
    on.ShardsListed: frozenset({State.CREATING}),
    on.LookUpFailed: frozenset({State.CREATING}),
    on.BatchDelivered: _DELIVERING,
    on.BatchProcessed: _DELIVERING,
    on.ShardExhausted: frozenset({State.PROCESSING}),
    on.CheckpointRequested: _ALL,
    on.CallReturned: frozenset({State.INITIALIZING, State.CLOSING, State.STOPPING, State.LOSING}),
    on.ProcessorFailed: frozenset(
        {State.INITIALIZING, State.PROCESSING, State.CLOSING, State.STOPPING, State.LOSING}
    ),
    on.GateShut: frozenset({State.STOPPING, State.LOSING}),
    on.DrainRequested: _ALIVE,
    on.ReleaseRequested: _ALIVE,
    on.ManagerGone: _ALIVE,
    on.FailoverChanged: _ALIVE,
    on.OthersInSight: _ALIVE,
    on.ThreadStalled: _ALIVE,
}

# What was under way when the lease moved on: answers and calls that nobody waits for any more.
LATE: Final[Mapping[type[on.Event], frozenset[State]]] = {
    on.Ticked: FINAL,
    on.WriteResolved: FINAL,
    on.OwnRowRead: FINAL,
    on.ReadFailed: FINAL,
    on.RowsRead: _LEAVING,
    on.ShardsListed: _LEAVING,
    on.LookUpFailed: _LEAVING,
    # A batch behind the one that failed must not move the position past it [I9].
    on.BatchDelivered: FINAL | {State.FAILING},
    on.BatchProcessed: FINAL | {State.FAILING},
    on.ShardExhausted: _LEAVING,
    on.CallReturned: FINAL,
    on.ProcessorFailed: FINAL,
    on.GateShut: FINAL | {State.RELEASING, State.FAILING},
    on.DrainRequested: FINAL,
    on.ReleaseRequested: FINAL,
    on.ManagerGone: FINAL,
    on.FailoverChanged: FINAL,
    on.OthersInSight: FINAL,
    on.ThreadStalled: FINAL,
}


def is_expected(event: on.Event, state: State) -> bool:
    """Whether to act on it; False for a late one. Raises: InvariantViolation for any other."""
    if state in EXPECTED[type(event)]:
        return True
    if state in LATE.get(type(event), frozenset()):
        return False
    raise InvariantViolation(f"{type(event).__name__} in state {state.value}")
