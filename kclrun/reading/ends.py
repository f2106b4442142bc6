"""Where a reading ends before its shards do: never, at an instant, or at the tip. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.lease.policy import EVERY_S
from kclrun.model.reading import FetchedPage, Replay
from kclrun.model.time import Instant, WallTime

# A reading takes no more than an application does at the tip, also while it is behind: it is beside
# the application of the stream, which is not to be throttled.
FLOOR_S: Final = EVERY_S
# As a rule a record becomes readable within 200 ms after it was put, and Kinesis documents no
# limit: seven times that.
SETTLED_S: Final = 1.5


class ReadingEnd(msgspec.Struct, frozen=True):
    """The end of a reading in an open shard. Without a field there is none.

    `until_at`: records that arrived at or after it are left out, as in a replay. `began_instant`:
    reading goes up to the tip that the stream had then, by this host's monotonic clock.
    """

    until_at: WallTime | None = None
    began_instant: Instant | None = None

    def cut(self, page: FetchedPage) -> tuple[FetchedPage, bool]:
        """The page without the records after the end, and whether there was one."""
        if self.until_at is None:
            return page, False
        return Replay(until_at=self.until_at).cut(page)

    def is_past(self, page: FetchedPage, asked_instant: Instant) -> bool:
        """Whether an open shard gets no more records before the end: reading stands behind it.

        `asked_instant` is when the page was asked for. A page without a lag says that reading stood
        at the tip then, if it has no records.
        """
        if self.until_at is not None:
            return Replay(until_at=self.until_at).is_past(page)
        if self.began_instant is None:
            return False
        behind_ms = page.millis_behind_latest
        if behind_ms is None and page.records:
            return False
        return asked_instant - (behind_ms or 0) / 1000 >= self.began_instant + SETTLED_S

    def pause_s(self, pause_s: float, asked_instant: Instant) -> float:
        """The pause before the next page: if that is at the tip, the page that decides."""
        if self.began_instant is None:
            return pause_s
        left_s = self.began_instant + SETTLED_S - asked_instant
        return max(FLOOR_S, left_s) if 0 < left_s <= pause_s + FLOOR_S else pause_s


FOR_EVER: Final = ReadingEnd()
