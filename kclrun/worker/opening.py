"""Opens the outputs of a lease and its state, once the lease is claimed, and takes them over from
their former owners. No record is fetched before that; renewals go on, however long it takes."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from kclrun.calling.delivery import destination_pause_s
from kclrun.destinations import open_kept, open_output, open_versions
from kclrun.errors import ServiceError, SinkError
from kclrun.ipc.board import StartSpec, boottime
from kclrun.lease import events
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import CHANGED_OUTSIDE, Cursor, OutputDestination, RowsOf, naming_output
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.state import StateDestination, version_folder
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials
from kclrun.outputs.commits import STATE_BUFFER_BYTES, Keyed
from kclrun.outputs.lanes import Pace, PacedOutput
from kclrun.outputs.outbox import BoxedOutput, Decided
from kclrun.outputs.row_trials import RowTrials
from kclrun.outputs.sending import Outputs, OutputsHost
from kclrun.ports import Output
from kclrun.protocol.reports import (
    OUTPUT,
    STATE,
    ProcessorRaised,
    ProcessorRecovered,
    ProcessWarned,
    Report,
)
from kclrun.state.keyed import LiveEntries, MakeChange
from kclrun.state.stores.state_versions import StateVersions
from kclrun.worker.delivery_queue import DeliveryQueue

if TYPE_CHECKING:
    from kclrun.observe.traces import LeaseSpans

T = TypeVar("T")
# Reading so much takes some 5 s at each start of the lease, in which no record is processed.
WARN_BYTES: Final = 256 * 2**20
# A commit is made before it is due when changes take an eighth of `state.memory`: while it is under
# way they are in memory as rows, as changes, and twice as bytes of the version.
_CHANGES_SHARE: Final = 8


class DestinationRetries:
    """Repeats what a destination of the lease did not do, until it does."""

    def __init__(self, queue: DeliveryQueue, report: Callable[[Report], None]) -> None:
        self._queue = queue
        self._report = report

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


class StateOpening:
    """Reads the keyed state of a lease at its checkpoint. `broke` ends the process after an error
    that no store may raise."""

    def __init__(
        self,
        spec: StartSpec,
        retries: DestinationRetries,
        *,
        report: Callable[[Report], None],
        broke: Callable[[BaseException], None],
        credentials: Callable[[], WireCredentials],
        read_row: Callable[[LeaseKey], Lease | None],
    ) -> None:
        self._spec = spec
        self._retries = retries
        self._report = report
        self._broke = broke
        self._credentials = credentials
        self._read_row = read_row

    def restore(
        self, place: StateDestination, row: Lease, opened: Callable[[Output], None]
    ) -> tuple[Keyed, LiveEntries]:
        """Read the state at the row's checkpoint. While its store is away, try again. What is
        `opened` is to be closed, also after an error. Raises: SinkError when delivery was stopped;
        SettingsError."""
        spec = self._spec
        folder = version_folder(spec.application, spec.stream_name)
        store = open_versions(place, folder, spec.kinesis, self._credentials)
        kept = open_kept(place, folder, spec.shard_id, self._broke)
        nonce = secrets.token_hex(4)
        versions = StateVersions(
            store, spec.shard_id, row.counter, nonce, kept, may_begin_empty=place.may_begin_empty
        )
        opened(versions)
        entries = self._retries.until_there(
            STATE, lambda: versions.restore(row, self._read_rows, row.hash_range)
        )
        live = LiveEntries(entries, _refused, row.hash_range, place.max_bytes, threading.Lock())
        if row.state_version is None and not row.checkpoint.is_sentinel:
            self._report(ProcessWarned(_begins_empty(row)))
        if live.size_bytes > WARN_BYTES:
            self._report(ProcessWarned(_large(live.size_bytes, place.max_bytes)))
        return keyed(place, versions, live), live

    def _read_rows(self, keys: Sequence[LeaseKey]) -> dict[LeaseKey, Lease | None]:
        try:
            return {key: self._read_row(key) for key in keys}
        except ServiceError as error:
            raise SinkError(f"cannot read the rows of its parents: {error}") from None


class Opened(NamedTuple):
    """The outputs that have a thread of their own, and the state of user code, if there is state.
    `row` has the position at which reading begins; `cuts` are the positions at which a batch must
    end. With `is_ready` every output has its rows up to the position of the row."""

    outputs: Outputs
    entries: LiveEntries | None
    row: Lease
    cuts: tuple[ExtendedSequenceNumber, ...]
    is_ready: bool


class _Host(OutputsHost):
    """The lease process: events go to its core, and a full output holds its delivery."""

    def __init__(self, post: Callable[[events.Event], None], queue: DeliveryQueue) -> None:
        self._post = post
        self._queue = queue

    def post(self, event: events.Event) -> None:
        self._post(event)

    def hold(self) -> None:
        self._queue.hold()

    def release(self) -> None:
        self._queue.release()


class OutputOpening:
    """Opens the outputs that have a thread of their own: all but a file that grows. The state is
    the first of them."""

    def __init__(
        self,
        spec: StartSpec,
        state: StateOpening,
        retries: DestinationRetries,
        queue: DeliveryQueue,
        *,
        post: Callable[[events.Event], None],
        report: Callable[[Report], None],
        credentials: Callable[[], WireCredentials],
        spans: LeaseSpans | None = None,
    ) -> None:
        self._spec = spec
        self._state = state
        self._retries = retries
        self._queue = queue
        self._post = post
        self._report = report
        self._credentials = credentials
        self._spans = spans
        # Those that are opened, until the thread that serves and closes them has started.
        self._unserved: list[Output] = []

    def open(self, row: Lease, start: Callable[[Opened], None], *, may_adopt: bool) -> None:
        """Open every output, take them over, and `start` their thread. `may_adopt`: reading may
        begin beyond the checkpoint, where every output has its rows.

        Raises: SinkError when delivery was stopped while a destination was away; SettingsError;
        what `start` raises. Then all are closed, because other leases may share the process.
        """
        try:
            start(self._open(row, may_adopt=may_adopt))
            self._unserved.clear()
        finally:
            for output in self._unserved:
                output.close()
            self._unserved.clear()

    def _open(self, at_row: Lease, *, may_adopt: bool) -> Opened:
        opened = []
        for place in self._spec.outputs:
            if not place.grows:
                pace = Pace(place.roll_s, place.roll_bytes, place.buffer_bytes)
                opened.append(PacedOutput(place.name, self._opened(place, at_row), pace))
        row = self._decided(at_row, opened)
        keyed = entries = decided = None
        if self._spec.state is not None:
            keyed, entries = self._state.restore(self._spec.state, row, self._unserved.append)
            decided = None if row is at_row else self._boxed(keyed.versions, row)
        outputs = Outputs(
            opened,
            _Host(self._post, self._queue),
            now=boottime,
            is_manual=self._spec.checkpoint.mode == "manual",
            state=keyed,
            spans=self._spans,
            trials=RowTrials(self._spec.trial, self._post, self._report, boottime),
            waits=self._queue.destinations,
        )
        cursors = dict(at_row.outputs.cursors) if at_row.outputs is not None else {}
        start, cuts = self._retries.until_there(
            OUTPUT,
            lambda: outputs.begin(at_row.checkpoint, cursors, may_adopt=may_adopt, decided=decided),
        )
        row = msgspec.structs.replace(row, checkpoint=start)
        return Opened(outputs, entries, row, cuts, decided is None)

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

    def _decided(self, row: Lease, opened: Sequence[PacedOutput]) -> Lease:
        """The row as it would be if its last owner had finished the commit that the first output
        decided [K12]. The same row without such a commit, and without an outbox."""
        if self._spec.state is None or not self._spec.state.has_outbox or not opened:
            return row
        name, first = opened[0].name, opened[0].output
        assert isinstance(first, BoxedOutput), "with an outbox every output is one"
        stored = None if row.outputs is None else row.outputs.of(name)
        at = stored or Cursor.of(row.checkpoint)

        def begin() -> Cursor:
            with naming_output(name):
                return first.begin(at)

        there = self._retries.until_there(OUTPUT, begin).reached
        if there <= row.checkpoint or not first.decided:
            return row
        return msgspec.structs.replace(row, checkpoint=there, state_version=first.decided)

    def _boxed(self, versions: StateVersions, row: Lease) -> Decided:
        name = row.state_version
        assert name is not None, "the first output named it"
        boxes = self._retries.until_there(STATE, lambda: versions.boxes(name))
        return Decided(name, Cursor.of(row.checkpoint), boxes)


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
