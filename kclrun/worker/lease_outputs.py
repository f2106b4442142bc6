"""The rows that user code of one lease emits, and its changes of the state, on their way to a file
that grows and to the outputs, which have a thread of their own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from kclrun.calling.delivery import destination_pause_s
from kclrun.calling.runners import MakeThread
from kclrun.codec.row_lines import encode_row
from kclrun.destinations import open_kept, open_output, open_versions
from kclrun.errors import ServiceError, SettingsError, SinkError
from kclrun.ipc.board import StartSpec, boottime
from kclrun.lease import events
from kclrun.lease.commands import CommitOutputs
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import (
    CHANGED_OUTSIDE,
    MAIN_OUTPUT,
    Cursor,
    OutputDestination,
    RowsOf,
    file_name,
    naming_output,
    no_output,
)
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.state import StateDestination, version_folder
from kclrun.model.time import Instant, WallTime
from kclrun.model.wire import WireCredentials
from kclrun.outputs.emitted_rows import CursorRows, EmittedRows
from kclrun.outputs.outbox import BoxedOutput, Decided
from kclrun.outputs.state_versions import StateVersions
from kclrun.ports import Output
from kclrun.processor import KeptRow, Row
from kclrun.protocol.reports import (
    OUTPUT,
    STATE,
    ProcessorRaised,
    ProcessorRecovered,
    ProcessWarned,
    Report,
)
from kclrun.state.keyed import LiveEntries, MakeChange, Undoable
from kclrun.worker.delivery_queue import DeliveryQueue
from kclrun.worker.lanes import Pace
from kclrun.worker.outputs import STATE_BUFFER_BYTES, Keyed, Outputs
from kclrun.worker.row_trials import RowTrials

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

# Reading so much takes some 5 s at each start of the lease, in which no record is processed.
WARN_BYTES: Final = 256 * 2**20
T = TypeVar("T")
# A commit is made before it is due when changes take an eighth of `state.memory`: while it is under
# way they are in memory as rows, as changes, and twice as bytes of the version.
_CHANGES_SHARE: Final = 8
# A commit of an SQL output and of the row takes some 50 ms.
ROUND_EVERY_S: Final = 1.0
# When the lease is over, a request under way may end later than this: the next owner sees its
# outcome.
_CLOSE_WAIT_S: Final = 1.0


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
        *,
        post: Callable[[events.Event], None],
        report: Callable[[Report], None],
        broke: Callable[[BaseException], None],
        credentials: Callable[[], WireCredentials],
        make_thread: MakeThread,
        read_row: Callable[[LeaseKey], Lease | None] = lambda _: None,
        spans: LeaseSpans | None = None,
    ) -> None:
        self._spec = spec
        self._queue = queue
        self._post = post
        self._report = report
        self._broke = broke
        self._credentials = credentials
        self._make_thread = make_thread
        self._read_row = read_row
        self._spans = spans
        self.entries: LiveEntries | None = None  # the state of user code, once the lease has begun
        self.cuts: tuple[ExtendedSequenceNumber, ...] = ()
        self._file: EmittedRows | None = None
        self._outputs: Outputs | None = None
        self._opened_places: list[EmittedRows | Outputs] = []  # those of the two that are open
        # Those that are opened, until the thread that serves and closes them starts.
        self._unserved: list[Output] = []
        self._thread: threading.Thread | None = None
        self._places = [place for place in spec.outputs if not place.grows]
        self._begun: Lease | None = None
        self._emit_to: dict[str, Callable[[Row], None]] = {}
        self._has_prepared = False  # the rows of the call under way were prepared
        # In a replay: the outputs whose rows go to one file with their cursors, to be compared; the
        # outputs whose rows are dropped.
        replay = spec.replay
        self._compared = () if replay is None or replay.drops_rows else replay.row_names
        self._dropped = frozenset(replay.row_names if replay and replay.drops_rows else ())

    def open(self, row: Lease) -> Lease:
        """Open every output, the state first. Returns: the row with the position at which reading
        begins. No record is fetched before, and renewals go on, however long the state takes.

        Called again if `initialize` is repeated, and then does nothing. Raises: SinkError when
        delivery was stopped while a destination was away; SettingsError.
        """
        if self._begun is not None:
            return self._begun
        spec = self._spec
        self._emit_to |= dict.fromkeys(self._dropped, _drop)
        for place in spec.outputs:
            if place.grows and place.path is not None and self._file is None:
                name = file_name(spec.shard_id, row.generation)
                self._file = self._opened_file(Path(place.path), name, row.checkpoint)
                self._opened_places.append(self._file)
        has_lanes = self._places or spec.state is not None
        try:
            self._begun = self._open_outputs(row) if has_lanes else row
        finally:
            for output in self._unserved:  # it failed, and other leases may share the process
                output.close()
            self._unserved.clear()
        return self._begun

    def _opened_file(
        self, folder: Path, name: str, position: ExtendedSequenceNumber
    ) -> EmittedRows:
        if not self._compared:
            file = EmittedRows.open(folder, name, position)
            self._emit_to[MAIN_OUTPUT] = file.emit
            return file
        rows = CursorRows.open(folder, name, position)
        for to in self._compared:
            self._emit_to[to] = lambda row, to=to: rows.keep(to, encode_row(row))  # type: ignore[misc]
        return rows

    def _open_outputs(self, row: Lease) -> Lease:
        opened = []
        for place in self._places:
            pace = Pace(place.roll_s, place.roll_bytes, place.buffer_bytes)
            opened.append((place.name, self._opened(place, row), pace))
        at_row, row = row, self._decided(row, opened)
        keyed = None if self._spec.state is None else self._restored(self._spec.state, row)
        outputs = Outputs(
            opened,
            post=self._post,
            hold=self._queue.hold,
            now=boottime,
            is_manual=self._spec.checkpoint.mode == "manual",
            state=keyed,
            spans=self._spans,
            trials=RowTrials(self._spec.trial, self._post, self._report, boottime),
            waits=self._queue.destinations,
        )
        decided = None if row is at_row or keyed is None else self._boxed(keyed.versions, row)
        start, cuts = self._begin(outputs, at_row, decided)
        self.cuts = cuts
        self._queue.cut_at(cuts)
        if decided is None:
            self._post(events.OutputsBegan(start, outputs.cursors()))
        self._outputs = outputs
        self._opened_places.append(outputs)
        if self.entries is not None:
            self.entries.journal = outputs.change_state
        self._emit_to |= {place.name: outputs.emit_to(place.name) for place in self._places}
        thread = self._make_thread(self._serve, "outputs")
        thread.start()  # may fail: `close` joins only what was started
        self._thread = thread
        self._unserved.clear()
        return msgspec.structs.replace(row, checkpoint=start)

    def _decided(self, row: Lease, opened: Sequence[tuple[str, Output, Pace]]) -> Lease:
        """The row as it would be if its last owner had finished the commit that the first output
        decided [K12]. The same row without such a commit, and without an outbox."""
        if self._spec.state is None or not self._spec.state.has_outbox or not opened:
            return row
        name, first, _ = opened[0]
        assert isinstance(first, BoxedOutput), "with an outbox every output is one"
        stored = None if row.outputs is None else row.outputs.of(name)
        at = stored or Cursor.of(row.checkpoint)

        def begin() -> Cursor:
            with naming_output(name):
                return first.begin(at)

        there = self.until_there(OUTPUT, begin).reached
        if there <= row.checkpoint or not first.decided:
            return row
        return msgspec.structs.replace(row, checkpoint=there, state_version=first.decided)

    def _boxed(self, versions: StateVersions, row: Lease) -> Decided:
        name = row.state_version
        assert name is not None, "the first output named it"
        boxes = self.until_there(STATE, lambda: versions.boxes(name))
        return Decided(name, Cursor.of(row.checkpoint), boxes)

    def _serve(self) -> None:
        assert self._outputs is not None, "the thread starts once they are open"
        try:
            self._outputs.serve()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: the process ends
            self._broke(error)

    def _opened(self, place: OutputDestination, row: Lease) -> Output:
        spec = self._spec
        of = RowsOf(
            application=spec.application,
            stream=spec.stream_name,
            stream_created_at=row.stream_created_at or WallTime(0.0),
            shard_id=spec.shard_id,
            generation=row.generation,
            token=row.counter,
        )
        output = open_output(place, of, spec.kinesis, self._credentials)
        self._unserved.append(output)
        has_outbox = spec.state is not None and spec.state.has_outbox
        return BoxedOutput(output) if has_outbox else output

    def _restored(self, place: StateDestination, row: Lease) -> Keyed:
        """Read the state at the row's checkpoint. While its store is away, try again."""
        spec = self._spec
        folder = version_folder(spec.application, spec.stream_name)
        store = open_versions(place, folder, spec.kinesis, self._credentials)
        kept = open_kept(place, folder, spec.shard_id, self._broke)
        nonce = secrets.token_hex(4)
        versions = StateVersions(
            store, spec.shard_id, row.counter, nonce, kept, may_begin_empty=place.may_begin_empty
        )
        self._unserved.append(versions)
        entries = self.until_there(
            STATE, lambda: versions.restore(row, self._read_rows, row.hash_range)
        )
        live = LiveEntries(entries, _refused, row.hash_range, place.max_bytes, threading.Lock())
        if row.state_version is None and not row.checkpoint.is_sentinel:
            self._report(ProcessWarned(_begins_empty(row)))
        if live.size_bytes > WARN_BYTES:
            self._report(ProcessWarned(_large(live.size_bytes, place.max_bytes)))
        self.entries = live
        return keyed(place, versions, live)

    def _read_rows(self, keys: Sequence[LeaseKey]) -> dict[LeaseKey, Lease | None]:
        try:
            return {key: self._read_row(key) for key in keys}
        except ServiceError as error:
            raise SinkError(f"cannot read the rows of its parents: {error}") from None

    def _begin(
        self, outputs: Outputs, row: Lease, decided: Decided | None
    ) -> tuple[ExtendedSequenceNumber, tuple[ExtendedSequenceNumber, ...]]:
        """Take the destinations over. While one of them is away, try again."""
        cursors = dict(row.outputs.cursors) if row.outputs is not None else {}
        may_adopt = self._file is None
        return self.until_there(
            OUTPUT,
            lambda: outputs.begin(row.checkpoint, cursors, may_adopt=may_adopt, decided=decided),
        )

    def until_there(self, what: str, call: Callable[[], T]) -> T:
        """Repeat `call` until it returns, because `what` may be away. Raises: SinkError when
        delivery was stopped meanwhile; what else `call` raises."""
        failed, answers = 0, True
        try:
            while True:
                try:
                    return call()
                except SinkError as error:
                    failed += 1
                    answers = self._may_try_again(what, error, failed)
                    if not answers:
                        raise
        finally:
            self._queue.destinations.over()
            if failed and answers:
                self._report(ProcessorRecovered(what, failed + 1))

    def _may_try_again(self, what: str, error: SinkError, failed: int) -> bool:
        """Report the failure, and rest. False if delivery was stopped meanwhile."""
        pause_s = destination_pause_s(failed)
        self._report(ProcessorRaised(what, str(error), "", "", "", failed, pause_s))
        with self._queue.destinations.rest():
            return self._queue.may_try_again(pause_s, is_batch=False)

    # For user code.

    def emit(self, row: Row, to: str) -> None:
        emit = self._emit_to.get(to)
        if emit is None:
            raise SettingsError(no_output(to, self._emit_to))
        emit(row)

    def prepare(self, row: Row, to: str) -> KeptRow:
        """The row in the form of its output. Its record keeps it until the record is done. Raises:
        as `emit`, except for a full disk."""
        if to not in self._emit_to:
            raise SettingsError(no_output(to, self._emit_to))
        if to in self._dropped:
            return KeptRow(to, b"", 0)
        if self._file is not None and (to == MAIN_OUTPUT or to in self._compared):
            line = encode_row(row)
            return KeptRow(to, line, len(line))
        assert self._outputs is not None, "the name of an output"
        outputs = self._outputs
        if self._spec.trial is None:
            return outputs.prepare(row, to)
        return self.until_there(OUTPUT, lambda: outputs.prepare(row, to))

    def place(self, row: KeptRow) -> None:
        """Add a row that was prepared. Raises: SinkError for a full disk."""
        self._has_prepared = True  # and was tried then
        if row.to in self._dropped:
            return
        if isinstance(self._file, CursorRows):
            self._file.keep(row.to, row.encoded)
        elif self._file is not None and row.to == MAIN_OUTPUT:
            self._file.place(row.encoded)
        else:
            assert self._outputs is not None, "it was prepared by them"
            self._outputs.place(row)

    def place_changes(self, changes: Sequence[Undoable]) -> None:
        """Add changes of the state that records made; the last call before `end_batch`."""
        if changes:
            assert self._outputs is not None, "the state is the first of them"
            self._outputs.place_changes(changes)

    def begin_batch(self) -> None:
        self._has_prepared = False
        for place in self._opened_places:
            place.begin_batch()

    def end_batch(self, position: ExtendedSequenceNumber) -> None:
        """As `RowScope`. Raises: TypeError if a destination refuses the rows in a trial."""
        self._try_rows(position)
        for place in self._opened_places:
            place.end_batch(position)

    def take_back_batch(self, checkpoint: ExtendedSequenceNumber | None = None) -> None:
        for place in reversed(self._opened_places):
            place.take_back_batch(checkpoint)

    def cover(self, position: ExtendedSequenceNumber) -> None:
        """User code requests a checkpoint: it covers all rows emitted until this call. Raises: as
        `end_batch`."""
        self._try_rows(position)
        for place in self._opened_places:
            place.cover(position)

    def _try_rows(self, position: ExtendedSequenceNumber) -> None:
        outputs = self._outputs
        is_tried = self._spec.trial is not None and not self._has_prepared
        if outputs is not None and is_tried:
            self.until_there(OUTPUT, lambda: outputs.try_rows(position))

    def settle(self, position: ExtendedSequenceNumber) -> None:
        """Every record up to `position` is processed or given up."""
        if self._outputs is not None:
            self._outputs.settle(position)

    def sent(self) -> ExtendedSequenceNumber | None:
        """Rows of records up to here were given to their destinations; None if no rows were."""
        return self._outputs.sent if self._outputs is not None else None

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


def keyed(place: StateDestination, versions: StateVersions, live: LiveEntries) -> Keyed:
    """The keyed state as the first output of its lease."""
    buffer_bytes = STATE_BUFFER_BYTES
    if place.local is not None:
        buffer_bytes = min(buffer_bytes, place.memory_bytes // _CHANGES_SHARE)
    return Keyed(versions, live.undo, place.retain_s, buffer_bytes, place.has_outbox)


def _begins_empty(row: Lease) -> str:
    return (
        f"the state of this shard begins empty at {row.checkpoint}, as state.begin says: what"
        " earlier records would have left is not in it. Take state.begin out of the settings once"
        " every lease has begun"
    )


def _large(size: int, most: int) -> str:
    return (
        f"the state of this shard has {size} bytes, and is read whole whenever the lease begins; at"
        f" state.max_bytes ({most}) the lease halts: delete keys that are done, or split the shard"
    )


def _refused(_change: MakeChange, _key: str, _name: str, _value: bytes | None, /) -> None:
    """The journal of the state until the outputs are open: no call may change it."""
    raise SinkError(CHANGED_OUTSIDE)


def _drop(_row: Row) -> None:
    """Drop a row while a lost state is made again: the outputs have the row already."""
