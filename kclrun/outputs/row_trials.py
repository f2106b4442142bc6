"""Rows that a destination refuses at their commit, for the values in them.

Which record emitted such a row is not known any more. So the process ends, and the next one begins
from the checkpoint of the row and tries the rows of each call at the destination before the call
counts as done. A refusal is then an error of that call, as if `emit` had raised it: it is repeated,
its records are searched for those at fault, and `on_error` decides about them. The commit, with its
cursor and its token, stays as it is.

Only rows of an output that refused some are tried, and of those that are tried with it: a trial is
a request, and a destination that takes all rows must not pay for another one.

A trial keeps nothing at the destination. Rows that the destination has already, or gets before, are
part of it: a row that is one of a kind (a unique index) is refused if a row before it has its key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kclrun.errors import RowsRefused, SettingsError, SinkError, Superseded
from kclrun.lease import events
from kclrun.model.output import RowTrial, naming_output, setting_of
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.ports import Output
from kclrun.protocol.reports import Report, RowsWereRefused

# Trials go on for so long after the last refusal: rows that are refused tend to come again, and a
# new start of the process costs more than a trial of each call.
_GO_ON_S: Final = 600.0
# A destination may refuse at the commit what it took in a trial, once another writer was faster.
# After so many starts without a commit that passed, the lease halts.
_ROUNDS_MAX: Final = 3


class TriedLane(Protocol):
    """An output of the lease, with the rows that wait for it."""

    name: str
    output: Output
    known: ExtendedSequenceNumber | None

    def waiting(self, first: int, last: int | None = None) -> Sequence[Any]:
        """The rows from `first` to `last`, counted since the lease began, that were not added."""
        ...


# Of each output: the number of its rows that it has already (a replay emits them again), and the
# number of its rows when the call began.
Marks = Sequence[tuple[int, int]]


class RowTrials:
    """The trials of one lease, on while `is_on`. `post` passes an event to the core."""

    def __init__(
        self,
        trial: RowTrial | None,
        post: Callable[[events.Event], None],
        report: Callable[[Report], None],
        now: Callable[[], Instant],
    ) -> None:
        self._trial = trial
        self._post = post
        self._report = report
        self._now = now
        names = trial.outputs if trial is not None else ()
        self._until = dict.fromkeys(names, Instant(now() + _GO_ON_S))

    def is_on(self, position: ExtendedSequenceNumber | None, output: str | None = None) -> bool:
        """Whether the rows of a call for records up to `position` are tried; those for `output`,
        or any."""
        trial = self._trial
        if trial is None or (output is not None and output not in trial.outputs):
            return False
        if position is None or position <= trial.upto:
            return True
        names = trial.outputs if output is None else (output,)
        return any(self._now() < self._until[name] for name in names)

    def committed(self, upto: ExtendedSequenceNumber) -> None:
        """All outputs have the rows up to there."""
        if self._trial is not None and self._trial.rounds and self._trial.upto <= upto:
            self._trial = RowTrial(self._trial.upto, self._trial.outputs, 0)

    def refused(
        self,
        error: RowsRefused,
        upto: ExtendedSequenceNumber,
        lanes: Sequence[TriedLane],
        *,
        is_final: bool,
    ) -> None:
        """A commit of rows up to `upto` was refused by one of the `lanes`: the process ends, and
        the next one tries them. `is_final`: their calls are not repeated, or another output has
        their commit already."""
        tried = _tried_with(error.output, lanes)
        before = self._still_tried()
        rounds = 1 if self._trial is None else self._trial.rounds
        if error.output in before:
            rounds += 1
        if is_final or rounds > _ROUNDS_MAX:
            self._post(events.OutputsRefused(str(error)))
            return
        names = tuple(lane.name for lane in lanes if lane.name in tried | before)
        self._report(RowsWereRefused(upto, max(1, rounds), str(error), names))
        words = str(error).partition("\n")[0]
        self._post(events.OutputsSuperseded(f"its rows are tried one call at a time: {words}"))

    def _still_tried(self) -> frozenset[str]:
        """The outputs whose rows the next process tries, too."""
        trial = self._trial
        if trial is None:
            return frozenset()
        now = self._now()
        return frozenset(n for n in trial.outputs if trial.rounds or now < self._until[n])

    def try_rows(
        self, lanes: Sequence[TriedLane], marks: Marks, position: ExtendedSequenceNumber
    ) -> None:
        """Try the rows of the call under way. Raises: TypeError, as `emit` does, if a destination
        refuses them; SinkError while one is away, and if the process ends."""
        before: list[tuple[Output, Sequence[Any]]] = []
        called: list[tuple[TriedLane, Sequence[Any]]] = []
        for lane, (had, began) in zip(lanes, marks, strict=True):
            before.append((lane.output, lane.waiting(had, began)))
            is_new = lane.known is None or lane.known < position
            if is_new and self.is_on(position, lane.name):
                called.append((lane, lane.waiting(began)))
        for lane, rows in called:
            self._try_some(lane, rows, before, lanes)
            before.append((lane.output, rows))

    def try_single(
        self,
        lanes: Sequence[TriedLane],
        lane: TriedLane,
        row: Any,
        settled: ExtendedSequenceNumber | None,
    ) -> None:
        """Try a row that its record keeps until it is done. Every record up to `settled` is.
        Raises: as `try_rows`."""
        is_new = lane.known is None or (settled is not None and lane.known <= settled)
        if is_new and self.is_on(None, lane.name):
            self._try_some(lane, [row], [(it.output, it.waiting(0)) for it in lanes], lanes)

    def _try_some(
        self,
        lane: TriedLane,
        rows: Sequence[Any],
        before: Sequence[tuple[Output, Sequence[Any]]],
        lanes: Sequence[TriedLane],
    ) -> None:
        """Try these rows of one output. Raises: as `try_rows`."""
        try_rows = getattr(lane.output, "try_rows", None)
        if try_rows is None or not rows:
            return
        try:
            with naming_output(lane.name):
                try_rows(rows, before)
        except TypeError as error:
            self._until[lane.name] = Instant(self._now() + _GO_ON_S)
            raise TypeError(f"{setting_of(lane.name)}: {error}") from None
        except Superseded as error:
            self._post(events.OutputsSuperseded(str(error)))
            raise SinkError(str(error)) from None
        except RowsRefused as error:
            assert self._trial is not None, "trials are on"
            self.refused(error, self._trial.upto, lanes, is_final=False)
            raise SinkError(str(error)) from None
        except SettingsError as error:
            self._post(events.OutputsRefused(str(error)))
            raise SinkError(str(error)) from None


def _tried_with(name: str, lanes: Sequence[TriedLane]) -> frozenset[str]:
    """The outputs whose rows are tried because this one refused some."""
    found = {name}
    for lane in lanes:
        is_tried_with = getattr(lane.output, "is_tried_with", None)
        if lane.name == name and is_tried_with is not None:
            found |= {other.name for other in lanes if is_tried_with(other.output)}
    return frozenset(found)
