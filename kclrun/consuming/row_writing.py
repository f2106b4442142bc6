"""Sending the one write under way until it is decided: repetitions, pauses, read-backs [P5, P6].

Knows: what each verdict of the own row asks for next. May not know: what the write is for; the
life follows the verdicts that decide something. Look next: `own_row.py`, `life.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.agenda import Agenda
from kclrun.consuming.own_row import OwnRow, Verdict, VerdictKind
from kclrun.consuming.states import MAY_PUT_OFF, State
from kclrun.model import changes
from kclrun.model.time import Instant

__all__ = ["RowWriting"]

Answer = on.WriteResolved | on.OwnRowRead | on.ReadFailed


class RowWriting:
    """Takes in the answers of the table about the own row."""

    def __init__(self, own: OwnRow, agenda: Agenda, chance: Callable[[], float]) -> None:
        self._own = own
        self._agenda = agenda
        self._chance = chance
        self._reads_failed = 0

    def take_in(
        self, answer: Answer, state: State, now: Instant
    ) -> tuple[Verdict | None, tuple[do.Command, ...]]:
        """The verdict, None where nothing new is known; and what to send or read next."""
        if self._own.pending is None:
            return None, ()  # It was given up meanwhile (the fence passed): nothing is decided.
        match answer:
            case on.WriteResolved(_, outcome, sent):
                verdict = self._own.resolve(outcome, sent)
            case on.OwnRowRead(row):
                self._reads_failed = 0
                verdict = self._own.read_back(row)
            case on.ReadFailed():
                self._reads_failed += 1
                pause_s = self._own.retry_pause_s(self._reads_failed, self._chance())
                return None, (do.ReadOwnRow(not_before=Instant(now + pause_s)),)
        return verdict, self._next(verdict, state, now)

    def _next(self, verdict: Verdict, state: State, now: Instant) -> tuple[do.Command, ...]:
        match verdict.kind:
            case VerdictKind.READ_BACK:
                return (do.ReadOwnRow(),)
            case VerdictKind.AGAIN:
                assert verdict.change is not None, "a repetition names its change"
                paused_s = self._own.retry_pause_s(self._own.retries, self._chance())
                at = Instant(now + (paused_s if verdict.slower else 0.0))
                is_checkpoint = isinstance(verdict.change, changes.Checkpoint)
                if at > now and is_checkpoint and state in MAY_PUT_OFF and self._own.put_off():
                    self._agenda.put_off(at)
                    return ()
                return (do.SendWrite(verdict.change, at),)
            case _:
                return ()
