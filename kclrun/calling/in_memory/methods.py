"""The other methods and the timers in memory: the host of `initialize`, `on_timer` and the last
calls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from kclrun.calling.in_memory.ends import Ends
from kclrun.calling.in_memory.states import Ledger
from kclrun.calling.methods import MethodCalls, MethodHost, MethodRaised
from kclrun.calling.timer_run import TimerRun
from kclrun.calling.timers import TimerCalls, TimerHost
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import IDLE_TICKS, ExtendedSequenceNumber
from kclrun.state.timers import Timer


class MemoryMethods(MethodHost):
    """The `MethodHost` of a run in memory. `MethodCalls.run` raises the error for which a lease
    would halt."""

    def __init__(self, policy: ErrorPolicy, ledger: Ledger, ends: Ends) -> None:
        self._ends = ends
        self._ledger = ledger
        self.calls = MethodCalls(self, policy)

    # As `MethodHost`.

    def ends_run(self, where: str, error: BaseException) -> bool:
        return self._ends.are_reached_by(error)

    def durable(self) -> ExtendedSequenceNumber:
        return self._ledger.position

    def raised(self, raised: MethodRaised) -> None:
        if raised.pause_s is None:
            raise raised.error


class MemoryTimers(TimerHost):
    """The `TimerHost` of a run in memory. `call` calls `on_timer`; the clock stands at the arrival
    of the next record, and after the last one at `wall_until`."""

    def __init__(
        self,
        run: TimerRun,
        ledger: Ledger,
        methods: MethodCalls,
        *,
        call: Callable[[Timer], None],
        is_released: Callable[[], bool],
        wall_until: float | None,
    ) -> None:
        self.run = run
        self._ledger = ledger
        self._call = call
        self._is_released = is_released
        self._wall_until = wall_until
        self._quiet_since: float | None = None  # the arrival of the last record
        self._calls = TimerCalls(run, self, methods, ledger, ledger.delivered)

    def before(self, batch: list[Record]) -> list[Record]:
        """Fire the timers that are due before these records. Returns: those of the next call."""
        self._calls.done = self._ledger.delivered
        self._calls.fire_events()
        self._fire_clock(batch[0].approximate_arrival_timestamp)
        part = batch[: self.run.part_end(batch, 0)]
        self._quiet_since = part[-1].approximate_arrival_timestamp
        self._calls.note(self._ledger.delivered)
        return part

    def after(self, part: list[Record]) -> None:
        """A part was given: fire the timers that are due behind it, if all of it is done."""
        if self._ledger.delivered == part[-1].position:
            self._calls.arrive(part[-1].position)

    def end(self) -> None:
        """No record follows: the clock goes on to its end."""
        if self._quiet_since is None:
            self._quiet_since = -math.inf
        self._calls.done = self._ledger.delivered
        self._fire_clock(self._wall_until)

    def _fire_clock(self, now: float | None) -> None:
        """Fire the timers due up to `now`: of the wall clock, and those of an idle shard."""
        run = self.run
        while now is not None and not self._is_released():
            wall_at, idle_at = run.wall_at(), run.idle_at(self._quiet_since)
            due = [at for at in (wall_at, idle_at) if at is not None and at <= now]
            if not due:
                return
            at = min(due)
            if at == wall_at:
                self._calls.fire(functools.partial(run.next_wall, at, is_forced=False))
            else:
                self._calls.advance(IDLE_TICKS)
                self._calls.fire_events()

    # As `TimerHost`.

    def call(self, timer: Timer) -> None:
        self._call(timer)

    def durable(self) -> ExtendedSequenceNumber:
        return self._ledger.position

    def limit(self, at: ExtendedSequenceNumber | None) -> None:
        self._ledger.delivered = self._calls.done if at is None else at

    def may_go_on(self) -> bool:
        return not self._is_released()

    def reached(self, at: ExtendedSequenceNumber) -> None:
        self._ledger.delivered = at
