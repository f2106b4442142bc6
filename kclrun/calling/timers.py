"""The calls of `on_timer`: the one driver of every host.

`TimerRun` decides which timer fires, `MethodCalls` repeats a call that raises. A `TimerHost` has
the clock, the checkpoints and the reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kclrun.calling.delivery import RowScope
from kclrun.calling.methods import MethodCalls
from kclrun.calling.timer_run import GROUP_MAX, TimerRun
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.state.timers import Timer

ON_TIMER: Final = "on_timer"
NextTimer = Callable[[], Timer | None]


class TimerHost(Protocol):
    """What `TimerCalls` needs of its shell, on the thread of `TimerCalls`.

    The bodies are those of a shell without a lease that could be stopped, and whose positions
    count timers.
    """

    def call(self, timer: Timer) -> None:
        """Call `on_timer`. Raises: what it raises."""
        ...

    def durable(self) -> ExtendedSequenceNumber | None:
        """The last position that a checkpoint covers."""
        ...

    def position_after(self, at: ExtendedSequenceNumber) -> ExtendedSequenceNumber:
        """The position of a timer that fires behind `at`."""
        return at.at_tick(at.tick + 1)

    def limit(self, at: ExtendedSequenceNumber | None) -> None:
        """A checkpoint in the next call covers no more than this position. None: the calls have
        ended."""
        ...

    def may_go_on(self) -> bool:
        """Whether more timers may fire now. False if a stop came: the others fire later."""
        return True

    def reached(self, at: ExtendedSequenceNumber) -> None:
        """Everything up to here is done."""
        ...


class TimerCalls:
    """The timers of one lease from the position `done` on, in groups whose rows and changes of the
    state belong to one position. A group has `group_max` timers at most."""

    def __init__(
        self,
        run: TimerRun,
        host: TimerHost,
        methods: MethodCalls,
        rows: RowScope,
        done: ExtendedSequenceNumber,
        *,
        group_max: int = GROUP_MAX,
    ) -> None:
        self.run = run
        self.done = done
        self._host = host
        self._methods = methods
        self._rows = rows
        self._group_max = group_max

    def note(self, done: ExtendedSequenceNumber) -> None:
        """Before a part is given to user code, write the watermark that it leads to into the state.
        Every record up to `done` is processed; later records may be running."""
        if self.run.must_note:
            self._rows.begin_batch()
            self.run.note()
            self._rows.end_batch(done)

    def arrive(self, done: ExtendedSequenceNumber) -> bool:
        """Every record up to `done` is processed: fire the event timers that are due. False if a
        call was given up, or a stop came."""
        self.done = done
        self.run.arrive()
        return self.fire_events()

    def advance(self, ticks: int) -> bool:
        """Move the watermark of an idle shard, so many ticks on. False if no event timer waits."""
        at = self.done.at_tick(self.done.tick + ticks)
        self._rows.begin_batch()
        is_moved = self.run.advance(self.done)
        self._rows.end_batch(at)
        self.reach(at)
        return is_moved

    def fire_events(self, tick_max: int | None = None) -> bool:
        """Fire the event timers that are due, as `fire`."""
        return self.fire(self.run.next_event, tick_max)

    def fire(self, next_timer: NextTimer, tick_max: int | None = None) -> bool:
        """Fire one timer after the other, up to a tick. False if a call was given up, or a stop
        came."""
        has_raised, is_first = False, True

        def group() -> None:
            nonlocal has_raised
            is_single, has_raised = has_raised, True
            self._fire_group(next_timer, tick_max, is_single=is_single)
            has_raised = False

        while next_timer() is not None and (tick_max is None or self.done.tick < tick_max):
            may_go = is_first or self._host.may_go_on()
            is_first = False
            if not may_go or not self._methods.run(ON_TIMER, group):
                return False
        return True

    def reach(self, at: ExtendedSequenceNumber) -> None:
        """Everything up to here is done."""
        self.done = at
        self._host.reached(at)

    def _fire_group(self, next_timer: NextTimer, tick_max: int | None, *, is_single: bool) -> None:
        """One attempt at the next timers. After an error they are called one by one, so that the
        report names the timer at fault, and the timers before it are done."""
        host, at = self._host, self.done
        durable = host.durable()
        if durable is not None and durable > at and durable.of_record == at.of_record:
            at = durable  # the attempt before made a checkpoint, and then raised
        most = 1 if is_single else min(self._group_max, self.run.group_max(at))
        most = most if tick_max is None else min(most, tick_max - at.tick)
        self._rows.begin_batch()
        try:
            for _ in range(most):
                timer = next_timer()
                if timer is None:
                    break
                at = host.position_after(at)
                self.run.take(timer)
                host.limit(at)
                host.call(timer)
            self._rows.end_batch(at)
        except BaseException:
            self._rows.take_back_batch(host.durable())
            raise
        finally:
            self.run.end_call()
            host.limit(None)
        self.reach(at)
