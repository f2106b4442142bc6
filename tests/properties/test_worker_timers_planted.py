"""Bugs planted in the rules of timers: the drawn lives of `test_worker_timers.py` find each."""

from typing import Any

import pytest

from kclrun.calling import timer_run
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.timers import TimerCalls
from kclrun.model.sequence import IDLE_TICKS
from kclrun.worker import timer_delivering
from kclrun.worker.timer_delivering import TimerDelivery
from tests.properties.test_worker_timers import FOUND, Both, Single, World, drawn, live


def _advance_alone(run: TimerRun, _: Any) -> bool:
    """The watermark moves, and the state does not know."""
    upcoming = run._idle_watermark()
    if upcoming is None:
        return False
    run._fired, run.watermark = run.watermark, upcoming
    return True


def _below_cursors(of: Any) -> Any:
    """As if no output were ahead of the row."""

    def broken(run: TimerRun, *arguments: Any) -> Any:
        stored, run._stored = run._stored, []
        try:
            return of(run, *arguments)
        finally:
            run._stored = stored

    return broken


def _without_ticks(advance: Any) -> Any:
    return lambda delivery, _: advance(delivery, 0)


PLANTED: dict[str, list[tuple[Any, str, Any]]] = {
    "a round of an idle shard is repeated as one of the clock": [
        (timer_delivering, "is_of_idle", lambda *_: False),
    ],
    "a round of the clock behind one of an idle shard is repeated as such a one": [
        (timer_delivering, "is_of_idle", lambda stored, _: stored.tick >= IDLE_TICKS),
    ],
    "a round of an idle shard has no ticks of its own": [
        (TimerCalls, "advance", _without_ticks(TimerCalls.advance)),
    ],
    "the watermark moves without a record below the cursor of an output": [
        (TimerRun, "idle_at", _below_cursors(TimerRun.idle_at)),
        (TimerRun, "may_idle", property(_below_cursors(TimerRun.may_idle.fget))),
    ],
    "the watermark of an idle shard is no change of the state": [
        (TimerRun, "advance", _advance_alone),
    ],
    "a round does not end with a checkpoint": [
        (TimerDelivery, "_end_round", lambda *_: None),
    ],
    "a lease that begins between two event timers gives records first": [
        (TimerRun, "is_event_due", lambda _: False),
    ],
    "a group of timers passes a cursor": [
        (TimerRun, "group_max", lambda *_: timer_run.GROUP_MAX),
    ],
    "batches join though the watermark moves": [
        (TimerRun, "may_join", property(lambda _: True)),
    ],
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name, monkeypatch):
    for kind, attribute, broken in PLANTED[name]:
        monkeypatch.setattr(kind, attribute, broken)

    with pytest.raises(AssertionError):
        _look_for_it()


def _look_for_it() -> None:
    for steps in FOUND.values():
        live(World(), steps)
    for seed in range(300):
        live(World(1.0, (Both, Single)[seed % 2]), drawn(seed)[1])
