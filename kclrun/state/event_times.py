"""When the records of a shard happened, for its watermark and its windows; and which of them do not
fit: late ones, ones from after their arrival, ones without a usable time.

Must not know: timers, windows, the log. It counts, and makes the sentence that a log or a test
shows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Final

from kclrun.model.record import Record

# The years 1 to 9999. `event_time` may return any number of a payload, and -1.7e308 / 0.5 is -inf.
_TIMES: Final = (-62_135_596_800.0, 253_402_300_800.0)
# Two machines with NTP differ by milliseconds, and Kinesis stamps an arrival approximately.
AHEAD_S: Final = 1.0


def arrival_of(record: Record) -> float:
    """The time of a record for a processor without `event_time`."""
    return record.approximate_arrival_timestamp


class EventTimes:
    """The times of the records of one lease. `time_of` is the processor's `event_time`.

    `report` gets a sentence at the first, the tenth, the hundredth … record of a kind, so that a
    log shows how many there are, and a shard full of them writes few lines. Any thread.
    """

    def __init__(
        self,
        time_of: Callable[[Record], float] = arrival_of,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._time_of = time_of
        self._report = report
        self._numbers: dict[str, itertools.count[int]] = {
            kind: itertools.count(1) for kind in ("late", "ahead", "unusable")
        }
        self.late = self.ahead = self.unusable = 0
        self.ahead_s_max = 0.0

    def of(self, record: Record) -> float:
        """The time that the processor gives the record, for its windows. Raises: as `event_time`;
        TypeError or ValueError for a result that is not a number."""
        return float(self._time_of(record))

    def seen_at(self, record: Record) -> float:
        """The time of a record for the watermark: not after its arrival, and before all others if
        it has no usable one."""
        try:
            seen_at = float(self._time_of(record))
        except Exception as error:  # noqa: BLE001 - user code; process_records will meet this record
            self._note_unusable(f"raised {type(error).__name__}")
            return -math.inf
        arrival = record.approximate_arrival_timestamp
        if seen_at - arrival > AHEAD_S:
            self._note_ahead(seen_at - arrival)
        seen_at = min(seen_at, arrival)
        if _TIMES[0] <= seen_at < _TIMES[1]:
            return seen_at
        self._note_unusable("is not a time from year 1 to 9999")  # also NaN
        return -math.inf

    def note_late(self, windows: str) -> None:
        """A record is in none of the windows of this name: the watermark has passed them."""
        self.late = number = next(self._numbers["late"])
        if _is_reported(number):
            self._report(
                f"{_records(number)} late for the windows {windows!r} and in none of them: the"
                " watermark had passed. Windows.add was False; emit such records to an output of"
                " their own, or raise watermark.lateness. If every record is late, time_of of the"
                " windows is far before event_time, which moves the watermark"
            )

    def _note_ahead(self, ahead_s: float) -> None:
        self.ahead = number = next(self._numbers["ahead"])
        self.ahead_s_max = max(self.ahead_s_max, ahead_s)
        if _is_reported(number):
            self._report(
                f"{_records(number)} from after the arrival in the stream, by up to"
                f" {self.ahead_s_max:.0f} s: for the watermark the arrival counts. A clock of a"
                " producer is wrong, or event_time does not return seconds since the epoch"
            )

    def _note_unusable(self, how: str) -> None:
        self.unusable = number = next(self._numbers["unusable"])
        if _is_reported(number):
            self._report(
                f"{_records(number)} without a usable time, and did not move the watermark: the"
                f" last event_time {how}"
            )


def _is_reported(number: int) -> bool:
    return str(number).rstrip("0") == "1"


def _records(number: int) -> str:
    return "1 record was" if number == 1 else f"{number} records were"
