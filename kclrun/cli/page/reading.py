"""Reads the table and the lag for the page, each again and again in a thread of its own.

It only reads. Viewers do not cause reads: however many there are, the table is scanned once in
`every_s`, eventually consistent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kclrun.cli.doctor import circumstances_of, look_of, with_surroundings
from kclrun.cli.lag import lag_summaries
from kclrun.cli.messages import naming_table
from kclrun.cli.services import OpenStream, open_streams
from kclrun.cli.waiting import waiting_for
from kclrun.errors import KclrunError, NotFound, NothingListens
from kclrun.leases.table_view import Observation
from kclrun.model.stream import StreamKey
from kclrun.model.time import Instant, WallTime
from kclrun.operating.doctor.diagnosis import diagnose
from kclrun.operating.doctor.findings import Look, watch_s
from kclrun.page.lag_history import LagHistory, measured_every_s
from kclrun.page.snapshot import ReadProblem, Snapshot, owners_seen

if TYPE_CHECKING:
    from kclrun.cli.services import Aws

# A large table, or a slow network, is read for a fifth of the time at most.
_PAUSE_A_READING: Final = 4.0
# A stream that was made anew, or whose retention was changed, is described again after so long.
# An account has 20 such calls a second, which its managers need.
_DESCRIBED_FOR_S: Final = 300.0
# A page that starts with its fleet sees an empty table first.
_SECOND_S: Final = 5.0

_TABLE: Final = "The lease table cannot be read"
_LAG: Final = "The lag cannot be measured"
_FINDINGS: Final = "The doctor cannot examine the lease table"


class _TableLook(msgspec.Struct, frozen=True):
    look: Look
    at: float


class FleetReader:
    """Keeps a snapshot of the fleet up to date from `start` to `close`.

    A failed reading is a ReadProblem of the snapshot, until it succeeds; the former values stay.
    """

    def __init__(self, aws: Aws, *, every_s: float) -> None:
        self._aws = aws
        self._every_s = every_s
        self._lock = threading.Lock()
        self._snapshot = Snapshot(taken_at=WallTime(time.time()))
        self._problems: dict[str, ReadProblem] = {}
        self._observation = Observation(float(aws.settings.leases.failover))
        self._history = LagHistory()
        self._earlier: _TableLook | None = None
        self._streams: tuple[Mapping[StreamKey, OpenStream], float] | None = None
        self._missing: Sequence[NotFound] = ()
        self._refusal: NothingListens | None = None
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Read the table once, then read on in the background."""
        self.read_table()
        readings = (
            (self.read_table, lambda: self._every_s, min(_SECOND_S, self._every_s)),
            (self.read_lags, lambda: measured_every_s(self._every_s, self._shards()), 0.0),
        )
        for reading in readings:
            thread = threading.Thread(target=self._repeat, args=reading, daemon=True)
            self._threads.append(thread)
            thread.start()

    def require_listener(self) -> None:
        """Raises: NothingListens if a reading so far was refused on this host: what it shows would
        stay empty."""
        if self._refusal is not None:
            raise self._refusal

    def close(self) -> None:
        """Read no more. Does not wait for a reading under way."""
        self._is_closed.set()

    def look(self) -> Snapshot:
        """The values read so far."""
        with self._lock:
            return msgspec.structs.replace(
                self._snapshot,
                taken_at=WallTime(time.time()),
                problems=tuple(self._problems.values()),
            )

    def read_table(self) -> None:
        """Scan the table, and examine it if the time of a look has come."""
        with self._reporting(_TABLE):
            with naming_table(self._aws.settings.table):
                pages = self._aws.table.items(consistent=False)
                with waiting_for(self._aws.called_table):
                    items = tuple(item for page in pages for item in page)
                look = look_of(items, {})
            self._update(
                leases={lease.key: lease for lease in look.leases},
                broken=look.broken,
                owners=owners_seen(
                    look.leases, look.broken, self._observation, Instant(time.monotonic())
                ),
                table_at=WallTime(time.time()),
            )
            with self._reporting(_FINDINGS):
                self._examine(look)

    def _examine(self, look: Look) -> None:
        """Make the findings of this look and the one before, which is a failover old or more."""
        earlier, now = self._earlier, time.monotonic()
        failover_s = float(self._aws.settings.leases.failover)
        if earlier is not None and now - earlier.at < watch_s(earlier.look.leases, failover_s):
            return
        streams = self._open_streams()
        self._require_all()
        look = with_surroundings(look, self._aws, streams)
        self._earlier = _TableLook(look, now)
        shards = {
            shard.shard_id: shard
            for listing in look.listings.values()
            for shard in listing.graph.unordered()
        }
        self._update(shards=shards)
        # A stream that was made anew has another key: the two looks cannot be compared.
        if earlier is None or earlier.look.listings.keys() != look.listings.keys():
            return
        circumstances = circumstances_of(self._aws, streams, now - earlier.at)
        self._update(
            findings=diagnose(earlier.look, look, circumstances), findings_at=circumstances.now
        )

    def read_lags(self) -> None:
        """Measure the lag of every shard that is left to read."""
        with self._reporting(_LAG):
            leases = self._snapshot.leases.values()
            lags = {
                line.shard: line
                for key, stream in self._open_streams().items()
                for line in lag_summaries(key, stream, leases)
            }
            self._history.add({key: line.behind_s for key, line in lags.items()})
            self._update(lags=lags, history=self._history.look(), lags_at=WallTime(time.time()))
            self._require_all()

    def _open_streams(self) -> Mapping[StreamKey, OpenStream]:
        now = time.monotonic()
        with self._lock:
            known = self._streams
        if known is None or now - known[1] > _DESCRIBED_FOR_S:
            missing: list[NotFound] = []
            known = open_streams(self._aws, on_missing=lambda _, why: missing.append(why)), now
            with self._lock:
                self._streams, self._missing = known, missing
        return known[0]

    def _require_all(self) -> None:
        """Raises: NotFound for one of several streams that is gone."""
        if self._missing:
            raise self._missing[0]

    def _update(self, **fields: Any) -> None:
        with self._lock:
            self._snapshot = msgspec.structs.replace(self._snapshot, **fields)

    @contextmanager
    def _reporting(self, about: str) -> Iterator[None]:
        """Keep an error as a ReadProblem, with the time since when it has been one."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - one failed reading must not end the others
            message = str(error) if isinstance(error, KclrunError) else type(error).__name__
            if isinstance(error, NothingListens):
                self._refusal = error
            with self._lock:
                before = self._problems.get(about)
                since = before.since if before is not None else WallTime(time.time())
                self._problems[about] = ReadProblem(about, message, since)
        else:
            with self._lock:
                self._problems.pop(about, None)

    def _shards(self) -> int:
        """Those that a measurement reads, also if it failed before its end."""
        snapshot = self._snapshot
        return max(len(snapshot.lags), sum(not it.is_ended for it in snapshot.leases.values()))

    def _repeat(
        self, read: Callable[[], None], every_s: Callable[[], float], first_s: float
    ) -> None:
        pause_s = first_s
        while not self._is_closed.wait(pause_s):
            began = time.monotonic()
            read()
            pause_s = max(every_s(), _PAUSE_A_READING * (time.monotonic() - began))
