"""The rows that user code of one lease emits, and its changes of the state, on their way to a file
that grows and to the outputs, which have a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from kclrun.calling.delivery import RowScope
from kclrun.calling.runners import MakeThread
from kclrun.errors import SettingsError, SinkError
from kclrun.ipc.board import StartSpec
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease
from kclrun.model.output import MAIN_OUTPUT, file_name, no_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.outputs.emitted_rows import CursorRows, EmittedRows
from kclrun.outputs.sending import Outputs
from kclrun.processor import KeptRow, Row, RowOutputs
from kclrun.protocol.reports import OUTPUT
from kclrun.state.keyed import LiveEntries, Undoable
from kclrun.worker.delivery_queue import DeliveryQueue
from kclrun.worker.opening import DestinationRetries, Opened, OutputOpening

# A commit of an SQL output and of the row takes some 50 ms.
ROUND_EVERY_S: Final = 1.0
# When the lease is over, a request under way may end later than this: the next owner sees its
# outcome.
_CLOSE_WAIT_S: Final = 1.0


class CalledRows(RowScope, Protocol):
    """The rows of a call of user code, which may request a checkpoint."""

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code requests a checkpoint: it covers all rows emitted until this call."""
        ...


class RowPlace(Protocol):
    """Where the rows of some outputs go: a file that grows, or the outputs with a thread."""

    def emit_to(self, name: str) -> Callable[[Row], None]:
        """The function that adds one row for the output of this name. It raises SinkError outside
        of a call, and TypeError and LimitExceeded as `Output.encode` does."""
        ...

    def prepare(self, row: Row, to: str) -> KeptRow:
        """The row in the form of its output. Its record keeps it until the record is done. Raises:
        as `emit`, except for a full disk."""
        ...

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared. Raises: SinkError for a full disk."""
        ...


class RowsBetweenRecords:
    """Implements `processor.RowOutputs` for the context of a shard whose records are processed one
    by one: that context emits while no call of a record runs."""

    def __init__(self, rows: RowOutputs, runs_records: Callable[[], bool]) -> None:
        self._rows = rows
        self._runs_records = runs_records
        self.prepare = rows.prepare

    def emit(self, row: Row, to: str) -> None:
        if self._runs_records():
            raise SinkError(
                "rows of a record leave by its own context: process_record(self, record, context)"
                " calls context.emit(row)"
            )
        self._rows.emit(row, to)


class LeaseOutputs:
    """Implements `RowScope` for the main thread, and durability for the lease thread.

    `open` is called once the lease is claimed. Without outputs in the settings every method does
    nothing, and `emit` raises. `broke` ends the process after an error that no output may raise:
    otherwise the rows would never be sent, and the lease would stand still.
    """

    def __init__(
        self,
        spec: StartSpec,
        queue: DeliveryQueue,
        retries: DestinationRetries,
        opening: OutputOpening,
        *,
        post: Callable[[events.Event], None],
        broke: Callable[[BaseException], None],
        make_thread: MakeThread,
    ) -> None:
        self._spec = spec
        self._queue = queue
        self._retries = retries
        self._opening = opening
        self._post = post
        self._broke = broke
        self._make_thread = make_thread
        self.entries: LiveEntries | None = None  # the state of user code, once the lease has begun
        self.cuts: tuple[ExtendedSequenceNumber, ...] = ()
        self._file: EmittedRows | None = None
        self._outputs: Outputs | None = None
        self._thread: threading.Thread | None = None
        self._begun: Lease | None = None
        self._called: list[CalledRows] = []  # the file and the outputs that take part in each call
        self._place_of: dict[str, RowPlace] = {}
        self._emit_to: dict[str, Callable[[Row], None]] = {}
        self._has_prepared = False  # the rows of the call under way were prepared

    def open(self, row: Lease) -> Lease:
        """Open every output, the state first. Returns: the row with the position at which reading
        begins. No record is fetched before, and renewals go on, however long the state takes.

        Called again if `initialize` is repeated, and then does nothing. Raises: SinkError when
        delivery was stopped while a destination was away; SettingsError.
        """
        if self._begun is not None:
            return self._begun
        if self._file is None:
            self._open_file(row)
        if self._spec.state is None and all(place.grows for place in self._spec.outputs):
            self._begun = row
        else:
            self._opening.open(row, self._begin, may_adopt=self._file is None)
        assert self._begun is not None, "the outputs have begun"
        return self._begun

    def _open_file(self, row: Lease) -> None:
        """In a replay it takes the rows of all outputs that are compared; or their rows are
        dropped."""
        spec, replay = self._spec, self._spec.replay
        names = replay.row_names if replay is not None else ()
        is_compared = bool(names) and replay is not None and not replay.drops_rows
        if names and not is_compared:
            self._take(DroppedRows(), names)
        grown = next((place for place in spec.outputs if place.grows and place.path), None)
        if grown is None or grown.path is None:
            return
        kind = CursorRows if is_compared else EmittedRows
        name = file_name(spec.shard_id, row.generation)
        self._file = kind.open(Path(grown.path), name, row.checkpoint)
        self._called.append(self._file)
        self._take(self._file, names if is_compared else [MAIN_OUTPUT])

    def _begin(self, opened: Opened) -> None:
        """The outputs are open, and taken over: start their thread."""
        outputs = opened.outputs
        self.cuts, self.entries = opened.cuts, opened.entries
        self._queue.cut_at(opened.cuts)
        if opened.is_ready:
            self._post(events.OutputsBegan(opened.row.checkpoint, outputs.cursors()))
        self._outputs = outputs
        self._called.append(outputs.rows)
        if opened.entries is not None:
            opened.entries.journal = outputs.rows.change_state
        self._take(outputs.rows, [place.name for place in self._spec.outputs if not place.grows])
        thread = self._make_thread(self._serve, "outputs")
        thread.start()  # may fail: `close` joins only what was started
        self._thread = thread
        self._begun = opened.row

    def _take(self, place: RowPlace, names: Sequence[str]) -> None:
        """Rows for the outputs of these names go there."""
        for name in names:
            self._place_of[name], self._emit_to[name] = place, place.emit_to(name)

    def _serve(self) -> None:
        assert self._outputs is not None, "the thread starts once they are open"
        try:
            self._outputs.serve()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the process ends
            self._broke(error)

    # For user code.

    def emit(self, row: Row, to: str) -> None:
        emit = self._emit_to.get(to)
        if emit is None:
            raise SettingsError(no_output(to, self._emit_to))
        emit(row)

    def prepare(self, row: Row, to: str) -> KeptRow:
        """The row in the form of its output. Its record keeps it until the record is done. Raises:
        as `emit`, except for a full disk."""
        place = self._place_of.get(to)
        if place is None:
            raise SettingsError(no_output(to, self._place_of))
        if self._spec.trial is None:
            return place.prepare(row, to)
        return self._retries.until_there(OUTPUT, lambda: place.prepare(row, to))

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared. Raises: SinkError for a full disk."""
        self._has_prepared = True  # and was tried then
        self._place_of[row.to].place(row)

    def place_changes(self, changes: Sequence[Undoable]) -> None:
        """Add changes of the state that records made; the last call before `end_batch`."""
        if changes:
            assert self._outputs is not None, "the state is the first of them"
            self._outputs.rows.place_changes(changes)

    def begin_batch(self) -> None:
        self._has_prepared = False
        for rows in self._called:
            rows.begin_batch()

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """As `RowScope`. Raises: TypeError if a destination refuses the rows in a trial."""
        self._try_rows(position)
        for rows in self._called:
            rows.end_batch(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        for rows in reversed(self._called):
            rows.take_back_batch(checkpoint)

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code requests a checkpoint: it covers all rows emitted until this call. Raises: as
        `end_batch`."""
        self._try_rows(position)
        for rows in self._called:
            rows.cover(position)

    def _try_rows(self, position: ExtendedSequenceNumber) -> None:
        outputs = self._outputs
        is_tried = self._spec.trial is not None and not self._has_prepared
        if outputs is not None and is_tried:
            self._retries.until_there(OUTPUT, lambda: outputs.rows.try_rows(position))

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up."""
        if self._outputs is not None:
            self._outputs.settle(position)

    def sent(self) -> ExtendedSequenceNumber | None:
        """Rows of records up to here were given to their destinations; None if no rows were."""
        return self._outputs.rows.sent if self._outputs is not None else None

    # For the lease thread.

    def make_durable(self, position: ExtendedSequenceNumber) -> None:
        """The rows in the file survive a crash when this returns. Raises: SinkError."""
        if self._file is not None:
            self._file.make_durable(position)

    def commit(self, asked: CommitOutputs) -> None:
        """Request a commit of the outputs; `OutputsCommitted` follows."""
        if self._outputs is not None:
            self._outputs.commit(asked)

    def confirm(self, state_version: str | None) -> None:
        """A checkpoint of ours put this version of the state on the row."""
        if self._outputs is not None:
            self._outputs.confirm(state_version)

    @property
    def round_every_s(self) -> float | None:
        """The least time between two rounds of wall timers; None if no output stores its cursor.

        Each round ends with a commit, which also ends the rolls of the outputs. Where outputs have
        rolls, rounds are not more frequent than checkpoints.
        """
        storing = [place for place in self._spec.outputs if place.stores_cursor]
        if not storing:
            return None
        rolls = any(place.roll_s for place in storing)
        return max(ROUND_EVERY_S, self._spec.checkpoint.every_s if rolls else 0.0)

    def commits_at_tip(self) -> bool:
        """Whether a run that ends at the tip has to wait for a commit."""
        outputs = self._outputs
        return self._spec.ends_at_tip and outputs is not None and outputs.commits_at_tip()

    def waiting_since(self) -> Instant:
        return self._outputs.waiting_since if self._outputs is not None else Instant(0.0)

    def close(self) -> None:
        """The lease is over."""
        if self._outputs is not None and self._thread is not None:
            self._outputs.close()
            self._thread.join(_CLOSE_WAIT_S)
        if self._file is not None:
            self._file.close()


class DroppedRows:
    """Drops rows while a lost state is made again: the outputs have them already."""

    def emit_to(self, _name: str) -> Callable[[Row], None]:
        return lambda _row: None

    def prepare(self, _row: Row, to: str) -> KeptRow:
        return KeptRow(to, b"", 0)

    def place(self, row: KeptRow) -> None: ...
