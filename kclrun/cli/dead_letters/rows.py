"""The rows of redriven letters on their way to the outputs of the fleet [K20].

A letter lies below the cursor of its shard at every destination. So its rows have an identity of
their own, the position of its record, and are written by the outputs' own code as those of a shard
that has this one record: they are there once, however often and by however many processes at the
same time the letter is redriven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Final

from kclrun.errors import ConfigError, RecordError, SinkError, Superseded
from kclrun.model.letter import Letter
from kclrun.model.output import MAIN_OUTPUT, OutputPlace, RowsOf, redriven, setting_of
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime, backoff_s
from kclrun.ports import Output

# Pauses of 0.5, 1 and 2 s: a connection is repaired in them. Its operator waits for the verb, and
# if a destination is away for longer, the letters stay: the verb is run again.
_TRIES: Final = 4
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 2.0

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
Open = Callable[[OutputPlace, RowsOf], Output]


class LetterRefused(Exception):
    """The rows of this letter cannot be written, those of another one may; in words."""


class LetterRows:
    """Writes the rows of one letter after the other to `places`, which do not grow."""

    def __init__(
        self,
        places: Sequence[OutputPlace],
        open_output: Open,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        # Where rows may appear again, they follow when all others are there.
        self._places = sorted(places, key=lambda place: not place.stores_cursor)
        self._open = open_output
        self._sleep = sleep

    def write(self, letter: Letter, rows: Rows) -> None:
        """The rows are durable when this returns. Raises: LetterRefused; SinkError if a destination
        is away: then some may have the rows, and will not take them again."""
        for name in rows.keys() - {place.name for place in self._places} - {MAIN_OUTPUT}:
            if rows[name]:
                raise LetterRefused(f"there is no {setting_of(name)} in the settings")
        try:
            self._write(letter, rows)
        except Superseded:
            # Another redrive wrote them at this moment, or sent rows are gone: look again.
            try:
                self._write(letter, rows)
            except Superseded as error:
                raise LetterRefused(str(error)) from None

    def _write(self, letter: Letter, rows: Rows) -> None:
        """Every row is checked by its destination before any is written."""
        record = ExtendedSequenceNumber(letter.sequence_number, letter.sub_sequence_number)
        begin, end = redriven(record)
        waiting: list[tuple[OutputPlace, Output, list[Any]]] = []
        with ExitStack() as opened:
            for place in self._places:
                if not rows.get(place.name):
                    continue
                with _naming(place):
                    output = opened.enter_context(closing(self._open(place, _of(letter, record))))
                    there = self._trying(partial(output.begin, begin))
                    if output.stores_cursor and there >= end:
                        continue  # a former redrive did not get to remove the letter
                    encoded = [output.encode(row)[0] for row in rows[place.name]]
                waiting.append((place, output, encoded))
            for place, output, encoded in waiting:
                with _naming(place):
                    self._trying(partial(output.add, encoded, end))
                    self._trying(output.commit)

    def _trying(self, call: Callable[[], Any]) -> Any:
        for failed in range(_TRIES - 1):
            try:
                return call()
            except Superseded:
                raise
            except SinkError:
                self._sleep(backoff_s(failed, 1.0, base_s=_PAUSE_S, max_s=_PAUSE_MAX_S))
        return call()


@contextmanager
def _naming(place: OutputPlace) -> Iterator[None]:
    """Errors of the destination, with the setting in front."""
    try:
        yield
    except (ConfigError, RecordError, TypeError) as error:
        raise LetterRefused(f"{setting_of(place.name)}: {error}") from None
    except SinkError as error:
        raise type(error)(f"{setting_of(place.name)}: {error}") from None


def _of(letter: Letter, record: ExtendedSequenceNumber) -> RowsOf:
    """All redrives have one token: none of them takes a destination from another."""
    return RowsOf(
        application=letter.application,
        stream=letter.stream,
        stream_created_at=WallTime(letter.stream_created_at),
        shard_id=letter.shard_id,
        generation=letter.generation,
        token=0,
        letter=record,
    )
