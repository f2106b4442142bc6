"""The rows that user code of one lease emits: to a file that grows, and to outputs of a thread of
their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kclrun.codec.row_lines import encode_row
from kclrun.consuming import events
from kclrun.consuming.commands import CommitOutputs
from kclrun.consuming.delivery import destination_pause_s
from kclrun.errors import SettingsError, SinkError
from kclrun.ipc.board import StartSpec
from kclrun.model.lease import Lease
from kclrun.model.output import MAIN_OUTPUT, OutputPlace, RowsOf, file_name
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials
from kclrun.ports import Output
from kclrun.processor import KeptRow, Row
from kclrun.protocol.reports import OUTPUT, ProcessorRaised, Report
from kclrun.sinks.emitted_rows import EmittedRows
from kclrun.worker.clock import boottime
from kclrun.worker.delivery_queue import DeliveryQueue
from kclrun.worker.opening import open_output
from kclrun.worker.outputs import Outputs, Pace
from kclrun.worker.sharing import MakeThread

# A request under way when the lease is over may end late: its outcome is for the next owner to see.
_CLOSE_WAIT_S: Final = 1.0


class LeaseOutputs:
    """Implements `RowScope` for the main thread, and durability for the lease thread.

    `open` is called once the lease is claimed. Without outputs in the settings every method does
    nothing, and `emit` raises. `broke` ends the process, after an error that no output may raise: a
    lease whose rows are not sent would stand still.
    """

    def __init__(
        self,
        spec: StartSpec,
        queue: DeliveryQueue,
        *,
        post: Callable[[events.Event], None],
        report: Callable[[Report], None],
        broke: Callable[[BaseException], None],
        credentials: Callable[[], WireCredentials],
        make_thread: MakeThread,
    ) -> None:
        self._spec = spec
        self._queue = queue
        self._post = post
        self._report = report
        self._broke = broke
        self._credentials = credentials
        self._make_thread = make_thread
        self._file: EmittedRows | None = None
        self._outputs: Outputs | None = None
        self._thread: threading.Thread | None = None
        self._places = [place for place in spec.outputs if not place.grows]
        self._begun: Lease | None = None
        self._emit_to: dict[str, Callable[[Row], None]] = {}

    def open(self, row: Lease) -> Lease:
        """Open every output; returns the row with the position from which reading begins.

        Called again if `initialize` is repeated, and then does nothing. Raises: SinkError when
        delivery was stopped while a destination was away; SettingsError.
        """
        if self._begun is not None:
            return self._begun
        spec = self._spec
        for place in spec.outputs:
            if place.grows and place.path is not None and self._file is None:
                name = file_name(spec.shard_id, row.generation)
                self._file = EmittedRows.open(Path(place.path), name, row.checkpoint)
                self._emit_to[place.name] = self._file.emit
        self._begun = self._open_outputs(row) if self._places else row
        return self._begun

    def _open_outputs(self, row: Lease) -> Lease:
        outputs = Outputs(
            [(place.name, self._opened(place, row), _pace(place)) for place in self._places],
            post=self._post,
            hold=self._queue.hold,
            now=boottime,
            is_manual=self._spec.checkpoint.mode == "manual",
        )
        start, cuts = self._begin(outputs, row)
        self._queue.cut_at(cuts)
        self._post(events.OutputsBegan(start, outputs.cursors()))
        self._outputs = outputs
        self._emit_to |= {place.name: outputs.emit_to(place.name) for place in self._places}
        self._thread = self._make_thread(self._serve, "outputs")
        self._thread.start()
        return msgspec.structs.replace(row, checkpoint=start)

    def _serve(self) -> None:
        assert self._outputs is not None, "the thread starts once they are open"
        try:
            self._outputs.serve()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the process ends
            self._broke(error)

    def _opened(self, place: OutputPlace, row: Lease) -> Output:
        spec = self._spec
        of = RowsOf(
            application=spec.application,
            stream=spec.stream_name,
            stream_created_at=row.stream_created_at or WallTime(0.0),
            shard_id=spec.shard_id,
            generation=row.generation,
            token=row.counter,
        )
        return open_output(place, of, spec.kinesis, self._credentials)

    def _begin(
        self, outputs: Outputs, row: Lease
    ) -> tuple[ExtendedSequenceNumber, tuple[ExtendedSequenceNumber, ...]]:
        """Take the destinations over, however long one of them is away."""
        failed = 0
        cursors = dict(row.outputs.cursors) if row.outputs is not None else {}
        while True:
            try:
                return outputs.begin(row.checkpoint, cursors, may_adopt=self._file is None)
            except SinkError as error:
                failed += 1
                pause_s = destination_pause_s(failed)
                where = (OUTPUT, str(error), "", "", "")
                self._report(ProcessorRaised(*where, failed, pause_s))
                if not self._queue.may_try_again(pause_s, is_batch=False):
                    raise

    # User code.

    def emit(self, row: Row, to: str) -> None:
        """As `Context.emit`."""
        emit = self._emit_to.get(to)
        if emit is None:
            raise self._unknown(to)
        emit(row)

    def prepare(self, row: Row, to: str) -> KeptRow:
        """A row that its record keeps until it is done, in the form of its output. Raises: as
        `emit`, but for a full disk."""
        if to not in self._emit_to:
            raise self._unknown(to)
        if to == MAIN_OUTPUT and self._file is not None:
            line = encode_row(row)
            return KeptRow(to, line, len(line))
        assert self._outputs is not None, "a name without a file is of an output"
        return self._outputs.prepare(row, to)

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared. Raises: SinkError for a full disk."""
        if row.to == MAIN_OUTPUT and self._file is not None:
            self._file.place(row.encoded)
        else:
            assert self._outputs is not None, "it was prepared by them"
            self._outputs.place(row)

    def _unknown(self, to: str) -> SettingsError:
        if to == MAIN_OUTPUT:
            return SettingsError(
                "context.emit() needs a place for the rows: set output.path in the configuration"
            )
        return SettingsError(
            f"context.emit(…, to={to!r}): there is no outputs.{to} in the settings"
        )

    def begin_batch(self) -> None:
        """As `RowScope`."""
        if self._file is not None:
            self._file.begin_batch()
        if self._outputs is not None:
            self._outputs.begin_batch()

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """As `RowScope`."""
        if self._file is not None:
            self._file.end_batch(position)
        if self._outputs is not None:
            self._outputs.end_batch(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        """As `RowScope`."""
        if self._outputs is not None:
            self._outputs.take_back_batch(checkpoint)
        if self._file is not None:
            self._file.take_back_batch(checkpoint)

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code asks for a checkpoint: it covers all rows emitted until this call."""
        if self._file is not None:
            self._file.cover(position)
        if self._outputs is not None:
            self._outputs.cover(position)

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up."""
        if self._outputs is not None:
            self._outputs.settle(position)

    def sent(self) -> ExtendedSequenceNumber | None:
        """Rows of records up to here left for their destinations."""
        return self._outputs.handed if self._outputs is not None else None

    # The lease thread.

    def make_durable(self, position: ExtendedSequenceNumber) -> None:
        """The rows in the file survive a crash when this returns. Raises: SinkError."""
        if self._file is not None:
            self._file.make_durable(position)

    def commit(self, asked: CommitOutputs) -> None:
        """The outputs are to commit; `OutputsCommitted` follows."""
        if self._outputs is not None:
            self._outputs.commit(asked)

    def waiting_since(self) -> Instant:
        """Since when rows of processed records wait for an output; 0 if none do."""
        return self._outputs.waiting_since if self._outputs is not None else Instant(0.0)

    def close(self) -> None:
        """The lease is over."""
        if self._outputs is not None and self._thread is not None:
            self._outputs.close()
            self._thread.join(_CLOSE_WAIT_S)
        if self._file is not None:
            self._file.close()


def _pace(place: OutputPlace) -> Pace:
    return Pace(place.roll_s, place.roll_bytes, place.buffer_bytes)
