"""The rows, the keyed state and the checkpoints of a run in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from kclrun.calling.timer_run import TimerRun
from kclrun.errors import SettingsError, SinkError, StaleCheckpoint
from kclrun.model.output import MAIN_OUTPUT, no_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.processor import KeptRow
from kclrun.state.chain import Entries
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import LiveEntries, MakeChange, Undoable
from kclrun.state.timers import WATERMARK, Step, Timer, entry_of

# The default of `state.max_bytes`.
_MAX_BYTES: Final = 2**30


class Timing(NamedTuple):
    """The time of a run: the setting `watermark`, and the clock of the machine behind the last
    record; up to there it is the arrival of the record that is given."""

    lateness_s: float
    every_s: float
    wall_until: float | None
    idle_s: float | None = None


class Pending(Protocol):
    """The timers that are pending at the end of a run, and its watermark."""

    timers: list[Timer]
    watermark: Step


class MemoryState:
    """The state of one shard, and its timers. It begins with `values` (key → name → value), and
    with the timers and the watermark of the run `after`."""

    def __init__(
        self,
        timing: Timing,
        values: Mapping[str, Mapping[str, Any]] | None = None,
        after: Pending | None = None,
    ) -> None:
        self.timing = timing
        self._entries: Entries = {
            key: {name: msgspec.msgpack.encode(value) for name, value in of.items()}
            for key, of in (values or {}).items()
        }
        if after is not None:
            for timer in after.timers:
                key, name, value = entry_of(timer)
                self._entries.setdefault(key, {})[name] = value
            shard, name = WATERMARK
            self._entries[shard] = {name: msgspec.msgpack.encode(after.watermark)}
        self.live = LiveEntries(self._entries, self._change, None, _MAX_BYTES)
        self._changes: list[Undoable] = []
        self._covered = 0
        self._batch_start: int | None = None

    def values(self) -> dict[str, dict[str, Any]]:
        """Everything that is remembered, decoded without types."""
        return {
            key: {name: msgspec.msgpack.decode(value) for name, value in of.items()}
            for key, of in self._entries.items()
        }

    def timers(self) -> list[Timer]:
        """The pending timers, in the order in which those of a clock fire."""
        return self.live.reserved.pending()

    @property
    def watermark(self) -> Step:
        """The watermark as it was noted last."""
        return self.live.reserved.step

    def run_timers(self, position: ExtendedSequenceNumber, times: EventTimes) -> TimerRun:
        """The rules by which the timers fire, from `position` on."""
        self.live.reserved.is_served = True
        return TimerRun(
            self.live,
            position,
            lateness_s=self.timing.lateness_s,
            every_s=self.timing.every_s,
            times=times,
            idle_s=self.timing.idle_s,
        )

    def begin_batch(self) -> None:
        """A call starts."""
        self._batch_start = len(self._changes)

    def end_batch(self) -> None:
        """The call returned."""
        self._batch_start = None

    def take_back_batch(self) -> None:
        """The call raised: its changes are taken back, except those that a checkpoint covers."""
        self._undo(max(self._batch_start or 0, self._covered))
        self._batch_start = None

    def settle(self, changes: Iterable[Undoable]) -> None:
        """Records are done, with changes that they made and kept."""
        self._changes += changes

    def checkpoint(self) -> None:
        """A checkpoint covers every change made so far."""
        self._covered = len(self._changes)

    def crash(self) -> None:
        """The process ends: changes that no checkpoint covers are gone."""
        self._undo(self._covered)

    def _undo(self, kept: int) -> None:
        while len(self._changes) > kept:
            self.live.undo(self._changes.pop())

    def _change(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        if self._batch_start is None:
            raise SinkError(
                "context.state is changed in process_records, on_timer and shard_ended, while they"
                " run"
            )
        made = change(key, name, value)
        if made is not None:
            self._changes.append(made)


class Ledger:
    """Replaces the lease table and the output, over crashes and restarts.

    It keeps the rule of `kclrun.outputs.emitted_rows`: a checkpoint that user code asks for covers
    the rows emitted until the call, and a crash removes rows that no checkpoint covers.
    """

    def __init__(
        self,
        position: ExtendedSequenceNumber,
        state: MemoryState,
        outputs: Iterable[str] | None = None,
    ) -> None:
        self.state = state
        self.position = position  # the last checkpoint: a restart reads from here
        self.delivered = self.settled = position
        self.checkpoints: list[ExtendedSequenceNumber] = []
        self.rows: list[dict[str, Any]] = []
        self.outputs = {MAIN_OUTPUT: self.rows}
        self._has_all_outputs = outputs is not None
        for name in outputs or ():
            self.outputs.setdefault(name, [])
        self._covered: dict[str, int] = {}
        self._batch_start: dict[str, int] | None = None  # None outside a call that may emit

    def emit(self, row: Mapping[str, Any], to: str = MAIN_OUTPUT) -> None:
        if self._batch_start is None:
            raise SinkError(
                "emit() is for process_records, on_timer and shard_ended, while they run"
            )
        self._require(to)
        if not isinstance(row, Mapping):
            raise TypeError(f"a row is a mapping of names to values, not {type(row).__name__}")
        msgspec.json.encode(dict(row))  # a row that raises TypeError here raises it in production
        self.outputs.setdefault(to, []).append(dict(row))

    def begin_batch(self) -> None:
        self.state.begin_batch()
        self._batch_start = self.lengths()

    def prepare(self, row: Mapping[str, Any], to: str) -> KeptRow:
        """A row that a record keeps until it is done. Raises: SettingsError."""
        self._require(to)
        return KeptRow(to, dict(row), len(msgspec.json.encode(dict(row))))

    def _require(self, to: str) -> None:
        if self._has_all_outputs and to not in self.outputs:
            raise SettingsError(no_output(to, self.outputs))

    def settle(
        self,
        position: ExtendedSequenceNumber,
        rows: Iterable[KeptRow],
        changes: Iterable[Undoable],
    ) -> None:
        """Every record up to here is done; the rows, and the changes of the state, are theirs."""
        for row in rows:
            self.outputs.setdefault(row.to, []).append(row.encoded)
        self.state.settle(changes)
        self.settled = position

    def end_batch(self, _: ExtendedSequenceNumber, /) -> None:
        """User code returned: its rows stay until a crash, or for good once they are covered."""
        self.state.end_batch()
        self._batch_start = None

    def take_back_batch(self, _: ExtendedSequenceNumber | None = None, /) -> None:
        """User code raised: remove its rows, except those that a checkpoint covers."""
        self.state.take_back_batch()
        start = self._batch_start or {}
        for name, rows in self.outputs.items():
            del rows[max(start.get(name, 0), self._covered.get(name, 0)) :]
        self._batch_start = None

    def checkpoint(self, position: ExtendedSequenceNumber) -> None:
        """Write one checkpoint. Raises: StaleCheckpoint, as `Checkpointer.checkpoint` says."""
        if position < self.position:
            raise StaleCheckpoint(f"{position} is below the last checkpoint, {self.position}")
        if position > self.delivered:
            raise StaleCheckpoint(f"{position} is above what was delivered, {self.delivered}")
        if position != self.position:
            self.checkpoints.append(position)
        self.position = position
        self.state.checkpoint()
        self._covered = self.lengths()

    def crash(self) -> None:
        """The process crashed: rows that no checkpoint covers are undone."""
        self.state.crash()
        for name, rows in self.outputs.items():
            del rows[self._covered.get(name, 0) :]

    def lengths(self) -> dict[str, int]:
        """How many rows each output has."""
        return {name: len(rows) for name, rows in self.outputs.items()}
