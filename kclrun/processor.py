"""The public interface: the class that users subclass, and the objects that the runtime passes.

Names follow kclpy v3 where they can. The same class runs on the fleet and on Spark. May know: the
model and the errors. Contracts stand in the docstrings.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol

import msgspec

from kclrun.deprecation import warn_of_old_name
from kclrun.errors import LimitExceeded, SettingsError, SinkError
from kclrun.model.lease import ClaimedLease, PendingCheckpoint
from kclrun.model.output import MAIN_OUTPUT
from kclrun.model.policies import CheckpointMode, CheckpointPolicy
from kclrun.model.record import Record, RecordBatch
from kclrun.model.row_schema import RowSchema, row_mapping
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.state.event_times import EventTimes
from kclrun.state.keyed import (
    Counter,
    LiveEntries,
    MakeChange,
    OwnKey,
    State,
    Table,
    Undoable,
    held_bytes,
)
from kclrun.state.timers import Clock, Timer

__all__ = [
    "Checkpointer",
    "Context",
    "KeptRow",
    "NoState",
    "RecordCall",
    "RecordContext",
    "RecordProcessor",
    "RowOutputs",
]

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # see model/record.py

    V = TypeVar("V", default=Any)
    O_co = TypeVar("O_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    V = TypeVar("V")
    O_co = TypeVar("O_co", covariant=True)

Row = Mapping[str, Any]
T = TypeVar("T")


# The most bytes of rows and changes of the state that one `process_record` may make: a row of the
# largest size. They wait in memory until every record before is done, beside those of the records
# that run with it.
RECORD_ROWS_BYTES_MAX: Final = 16 * 2**20


class KeptRow(NamedTuple):
    """A row that an output took as its own, and that waits for its record: `encoded` is for the
    output `to` alone."""

    to: str
    encoded: Any
    size: int


class RowOutputs(Protocol):
    """The outputs of one lease, as contexts send rows to them."""

    def emit(self, row: Row, to: str, /) -> None:
        """Take a row of the shard's context. Raises: as `Context.emit`."""
        ...

    def prepare(self, row: Row, to: str, /) -> KeptRow:
        """Encode the row of a record, which waits for its record. Raises: as `Context.emit`."""
        ...


class NoState(msgspec.Struct, frozen=True):
    """The lease has no state, and why, in words."""

    reason: str = (
        "context.state needs a place that survives this machine: set state.store in the"
        " configuration to a folder or to s3://bucket/prefix (engine: fleet)"
    )


class Context(Generic[O_co]):
    """The place of a processor: its shard, its options, its state and its outputs.

    The runtime makes one for each processor and passes it to `initialize`. Keep it there, and use
    it in `process_records`, `on_timer` and `shard_ended`. A `process_record` uses the context that
    it is called with. In a test `kclrun.testing.run_processor` makes one.

    `Context[Options]` is one whose `options` are of that type: see `RecordProcessor`.
    """

    def __init__(  # noqa: PLR0913 - the context of user code is made in one place
        self,
        *,
        lease: ClaimedLease,
        options: O_co,
        checkpoint: CheckpointPolicy,
        rows: RowOutputs,
        release: Callable[[], None],
        state: LiveEntries | NoState,
        times: EventTimes | None = None,
        watermark: Callable[[], float | None] = lambda: None,
        schemas: Mapping[str, RowSchema] | None = None,
    ) -> None:
        self._lease = lease
        self._options = options
        self._checkpoint = checkpoint
        self._emit = rows.emit
        self._prepare = rows.prepare
        self._schemas = schemas or {}
        self._release = release
        self._live = state
        self._watermark = watermark
        self._times = times or EventTimes()

    @property
    def application(self) -> str:
        """The setting `application`: the name of the fleet, and of its lease table."""
        return self._lease.application

    @property
    def stream(self) -> str:
        """The name of the stream, without the ARN around it; of a DynamoDB stream that of its
        table."""
        return self._lease.stream

    @property
    def shard_id(self) -> str:
        """The id of the shard, such as `shardId-000000000000`. Two streams have shards of the same
        id: `lease_key` tells them apart."""
        return self._lease.shard_id

    @property
    def lease_key(self) -> str:
        """The key of the shard's row in the lease table: its id, or with several streams
        `stream:shard id`."""
        return self._lease.key

    @property
    def position(self) -> ExtendedSequenceNumber:
        """The checkpoint that the shard is read from: records come from after it. TRIM_HORIZON,
        LATEST or AT_TIMESTAMP if there is none yet. It does not move while the shard is read."""
        return self._lease.position

    @property
    def options(self) -> O_co:
        """The setting `options`: a mapping, or what `options_as` of the processor makes of it."""
        return self._options

    @property
    def fencing_token(self) -> int:
        """A number that only grows with each owner of the shard: the counter of the lease at its
        claim. A store that refuses a smaller one than it has seen is safe from a former owner."""
        return self._lease.fencing_token

    @property
    def pending_checkpoint(self) -> PendingCheckpoint | None:
        """What a worker of the Java KCL left by the first half of a two-phase checkpoint: its
        position, and its application state as bytes. None if it left nothing."""
        return self._lease.pending

    @property
    def uncheckpointed_max(self) -> int:
        """The setting `checkpoint.uncheckpointed_max`: how many records may be delivered beyond the
        last checkpoint. With `checkpoint.every: manual` no further record comes before the
        processor checkpoints."""
        return self._checkpoint.uncheckpointed_max

    @property
    def checkpoint_every(self) -> float | Literal["batch", "manual"]:
        """The setting `checkpoint.every`: the runtime checkpoints every so many seconds or after
        each `batch`, or `manual`: the processor does. On Spark it is `batch`."""
        policy = self._checkpoint
        return policy.every_s if policy.mode == "auto" else policy.mode

    @property
    def checkpoint_mode(self) -> CheckpointMode:
        """The former name of `checkpoint_every`: `auto` for a number of seconds. Deprecated."""
        warn_of_old_name("context.checkpoint_mode", "context.checkpoint_every", gone_in="2.0")
        return self._checkpoint.mode

    @property
    def state(self) -> State:
        """What the processor remembers of the keys of the shard; see `State`. It is there from
        `initialize` on, as of `position`. Change it in `process_records`, `on_timer` and
        `shard_ended`; in `process_record` use that of the call's own context.

        Raises: SettingsError if the settings have no `state`.
        """
        return State(self._require_live())

    def _require_live(self) -> LiveEntries:
        if isinstance(self._live, NoState):
            raise SettingsError(self._live.reason)
        return self._live

    def counter(self, name: str) -> Counter:
        """A number for each key, in `state` under this name. Raises: as `state`."""
        return Counter(self.state, name)

    def table(self, name: str, of: type[T]) -> Table[T]:
        """A value of the type `of` for each key, in `state` under this name. Raises: as `state`."""
        return Table(self.state, name, of)

    def set_timer(
        self, key: Record | str, at: float | datetime, name: str = "", *, clock: Clock = "event"
    ) -> None:
        """Have `on_timer` called for the key at a time: seconds since the epoch, or a datetime with
        a zone. Call it from `process_records`, `on_timer` or `shard_ended`; `process_record` has
        that of the call's own context.

        `event`: when the `watermark` has reached that time. `wall`: when the clock of the machine
        has, also on a shard without records. A key (that of a record, or of the state) has one
        timer of each `name`: setting it again replaces it. In `on_timer` the time has to be later
        than that of the timer that fires, if both are of one clock.
        Guaranteed: timers are a part of the state. A call that raises sets none; after a crash
        those of the checkpoint are pending; a reshard moves them with their keys.
        Raises: SettingsError without `state` in the settings, or without `on_timer`; LimitExceeded
        for a time or a key that cannot be; HaltShard above 500,000 pending timers of a shard.
        """
        self._require_live().set_timer(key, at, name, clock)

    def delete_timer(self, key: Record | str, name: str = "") -> None:
        """Forget the timer of this key and name; nothing happens where none is pending."""
        self._require_live().delete_timer(key, name)

    @property
    def watermark(self) -> float | None:
        """No record before this time is expected any more, in seconds since the epoch: the latest
        time of a record that is done, less `watermark.lateness`, in steps of `watermark.every`.
        None before the first record. A record before it is late. It needs a processor with
        `on_timer`, and moves between two calls, never in one."""
        return self._watermark()

    def emit(self, row: object, to: str = MAIN_OUTPUT) -> None:
        """Send one row to `output:`, or to that of `outputs:` which `to` names. Call it from
        `process_records`, `on_timer` or `shard_ended`.

        `row` is a mapping of names to values, a dataclass instance or a msgspec.Struct.

        Guaranteed: rows leave in the order of the calls and are durable before the checkpoint that
        covers the records being processed; a row whose checkpoint was never written is taken back
        before the shard is read again, so a crash leaves no row twice. A row emitted after a
        `checkpoint()` of its own batch belongs to the next checkpoint. On Spark the rows are those
        of the resulting DataFrame, and count once with the commit of the batch they belong to.
        Raises: SettingsError when the application has no such output; RowMismatch for a row that
        does not fit the `schema` of the output; TypeError, naming the column, for a row that the
        output cannot hold. None of them shows a value.
        """
        self._emit(self._checked(row, to), to)

    def _checked(self, row: object, to: str) -> Row:
        schema = self._schemas.get(to)
        if schema is not None:
            return schema.check(row)
        return row if type(row) is dict else row_mapping(row)

    def release(self) -> None:
        """Give the lease up after this batch, in good order.

        The batch is finished, `shutdown_requested` called, every processed record checkpointed, and
        the lease offered to the other machines of the application, in one write. If there are
        no other machines, the lease is released, and taken again at the next look at the table. On
        Spark another instance goes on with the shard.
        """
        self._release()


class RecordContext(msgspec.Struct, Generic[O_co]):
    """What one call of `process_record` may do: emit rows, and change the state and the timers of
    the record's key.

    The runtime makes one for each call, and any thread may use it while that call runs. A call that
    is over cannot emit or change anything: it raises SinkError. What a call emits and changes is
    kept for its record until a commit covers the record, and is dropped if the call raises.
    """

    # A Struct: one is made for each record, in half the time of a class.

    _of: Context[O_co]
    _record: Record

    @property
    def options(self) -> O_co:
        """The options of the settings, as `Context.options`."""
        return self._of.options

    @property
    def stream(self) -> str:
        """The name of the stream, as `Context.stream`."""
        return self._of.stream

    @property
    def shard_id(self) -> str:
        """The id of the shard, as `Context.shard_id`."""
        return self._of.shard_id

    @property
    def state(self) -> State:
        """What is remembered of the record's partition key: `context.state[record]`.

        Guaranteed: it has what the records of the key before this one changed, and nothing else.
        What this call changes becomes durable with the checkpoint that covers its record; a call
        that raises leaves no change, also where it is repeated. Raises: as `Context.state`;
        LimitExceeded for another key, for iteration, and for more than 16 MiB of one record;
        SinkError when the call is over.
        """
        return State(self._own_key())

    def _own_key(self) -> OwnKey:
        live = self._of._require_live()  # noqa: SLF001 - the two are one interface
        return OwnKey(live, self._record.partition_key, self._change)

    def counter(self, name: str) -> Counter:
        """A number for the record's key, in `state` under this name."""
        return Counter(self.state, name)

    def table(self, name: str, of: type[T]) -> Table[T]:
        """A value of the type `of` for the record's key, in `state` under this name."""
        return Table(self.state, name, of)

    def set_timer(
        self, key: Record | str, at: float | datetime, name: str = "", *, clock: Clock = "event"
    ) -> None:
        """As `Context.set_timer`, for the record's partition key.

        Guaranteed: the timer is a change of the state as the others of this call: it fires once
        every record before and every record that runs beside it are done, and a call that raises
        sets none. Raises: as `Context.set_timer`, and as `state` for another key.
        """
        self._own_key().set_timer(key, at, name, clock)

    def delete_timer(self, key: Record | str, name: str = "") -> None:
        """Forget the timer of the record's key and this name; nothing happens where none is
        pending. Raises: as `state`."""
        self._own_key().delete_timer(key, name)

    @property
    def watermark(self) -> float | None:
        """As `Context.watermark`: it moves while no call runs."""
        return self._of.watermark

    def emit(self, row: object, to: str = MAIN_OUTPUT) -> None:
        """Send one row, as `Context.emit` does.

        Guaranteed: the rows of a record leave once its call has returned and every record before it
        is done, in the order of the records, each record's once; a call that raises leaves none.
        Raises: as `Context.emit`; LimitExceeded beyond 16 MiB of one record; SinkError when the
        call is over: it returned, or it ran out of time.
        """
        of = self._of
        self._keep(of._prepare(of._checked(row, to), to))  # noqa: SLF001 - the two are one interface

    def release(self) -> None:
        """Give the lease up in good order, as `Context.release` does: no further record starts, but
        those before one that started already."""
        self._of.release()

    def _keep(self, row: KeptRow) -> None:
        raise NotImplementedError

    def _change(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        """Implements `state.keyed.Journal`."""
        raise NotImplementedError


class RecordCall(RecordContext[Any]):
    """What a call of `process_record` gets, with what it emitted and changed: the runtime's side of
    its context."""

    is_open: bool = True
    kept: list[KeptRow] | None = None
    changes: list[Undoable] | None = None
    kept_bytes: int = 0

    def __dir__(self) -> list[str]:
        """Completion shows what a user may use, and not the runtime's side."""
        return list(dir(RecordContext))

    def _keep(self, row: KeptRow) -> None:
        if not self.is_open:
            raise SinkError("emit() of a record is for its call of process_record, while it runs")
        if self.kept_bytes + row.size > RECORD_ROWS_BYTES_MAX:
            raise LimitExceeded(
                f"one record emitted more than {RECORD_ROWS_BYTES_MAX} bytes, which wait in memory"
                " until all records before it are done"
            )
        if self.kept is None:
            self.kept = []
        self.kept.append(row)
        self.kept_bytes += row.size

    def _change(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        if not self.is_open:
            raise SinkError(
                "the state and the timers of a record are changed in its call of process_record,"
                " while it runs"
            )
        if self.kept_bytes + held_bytes(key, name, value, None) > RECORD_ROWS_BYTES_MAX:
            raise LimitExceeded(
                f"one record changed more than {RECORD_ROWS_BYTES_MAX} bytes of state, which wait"
                " in memory until all records before it are done"
            )
        made = change(key, name, value)
        if made is not None:
            if self.changes is None:
                self.changes = []
            self.changes.append(made)
            self.kept_bytes += held_bytes(*made)


class Checkpointer:
    """Makes progress durable: what a checkpoint covers is not given again after a crash.

    The runtime passes one to each call that may checkpoint; use it during that call, from any
    thread. With `checkpoint.every` as a duration or `batch` the runtime checkpoints by itself, and
    a call of yours is one more. With `manual` only yours counts.
    """

    def __init__(self, write: Callable[[ExtendedSequenceNumber | None], None]) -> None:
        self._write = write

    def checkpoint(
        self, at: Record | str | None = None, sub_sequence_number: int | None = None
    ) -> None:
        """Everything up to here is processed; returns once that is durable in the lease table.

        `checkpoint()` covers all records given to the processor so far, this batch included;
        `checkpoint(record)` covers that record and all before it; `checkpoint("4963…", 3)` the
        same by its number. A position equal to the last checkpoint is not an error and causes no
        write. Emitted rows are made durable first. On Spark it is durable with the commit of the
        batch, which covers all its records.

        Raises: StaleCheckpoint below the last checkpoint or above the last delivered record;
        LeaseLost when the lease is not ours any more: stop working on the batch. A throttled or
        silent lease table is waited for, as long as the lease can be proven ours.
        """
        if at is None:
            self._write(None)
        elif isinstance(at, Record):
            self._write(at.position)
        else:
            self._write(ExtendedSequenceNumber(at, sub_sequence_number or 0))


class RecordProcessor(ABC, Generic[V]):
    """User code over one shard. One instance a shard, in a process of its own, one call at a time.

    Delivery is at least once and in the order of the shard; a planned stop causes no
    duplicate, a crash at most `checkpoint.uncheckpointed_max` of them. On Spark an
    instance lives in a task and sees one range of the shard, or several that follow each other; a
    task that is tried again gives its range again, and the rows of the attempts before are dropped.

    `class Orders(RecordProcessor[Order])` says what `record.value` is: JSON is decoded into that
    type (a msgspec.Struct, a dataclass, a TypedDict). `decode_as` names another decoder: a type, or
    a text as the setting `decode` takes, but for `glue`. The setting goes before both.

    `options_as` is a type for the `options` of the settings, such as a msgspec.Struct:
    `context.options` is one of these, and an option that it does not know, or that has another
    type, is an error of the start and of `kclrun check`.
    """

    decode_as: ClassVar[Any] = None
    options_as: ClassVar[Any] = None

    def initialize(self, context: Context) -> None:
        """Get ready for a shard: open connections, keep `context`.

        Called once, before the first record, when the lease has been proven ours.
        Must not: read the stream. Raises: whatever you like; after the retries of `on_error` the
        lease is halted with the reason, the other leases go on.
        """

    def process_records(self, batch: RecordBatch[V], checkpointer: Checkpointer) -> None:
        """Process some records of the shard, in order.

        Called again and again while the lease is held, never concurrently. `batch` has from 1 to
        `fetch.batch_max` records, aggregates opened.
        Guaranteed: when it returns, the batch counts as processed and may be checkpointed; the
        checkpoint never passes a batch that has not returned.
        Must not: return before the work is done, unless `checkpoint: manual` is set.
        Raises: whatever you like; the same batch is given again after a back-off. When the retries
        of `on_error` are spent, the lease is halted; or, with `on_error.then`, the records at fault
        are found and become dead letters, or are skipped. Nothing else is skipped.
        FailedRecords names the records at fault; RetryLater asks for the batch again without
        counting; HaltShard halts at once.
        """
        raise NotImplementedError

    def process_record(self, record: Record[V], context: RecordContext) -> Awaitable[None] | None:
        """Process one record; instead of `process_records`, and as `def` or `async def`.

        Called once for each record. Without `concurrency` one call at a time, in the order of the
        shard, on the thread of the other methods. With it up to `concurrency.records` at a time:
        `def` on threads, `async def` as tasks of one event loop; records of one partition key
        follow each other, unless `concurrency.order` is `none`. No other method runs meanwhile.
        Guaranteed: the checkpoint never passes a record whose call has not returned, nor one that
        follows such a record. After a crash records beyond the checkpoint are given again,
        also those that had returned: none of their rows has left, and no change of the state.
        Must not: return before the work is done, keep `context`, checkpoint (`checkpoint.every:
        manual` is refused), or block the event loop in an `async def`.
        Raises: whatever you like; the same record is given again after a back-off, and its key
        waits. Then `on_error.then` decides about this record alone. RetryLater and
        HaltShard are as for `process_records`. An `async def` may be cancelled when the lease is
        given away, and by `concurrency.timeout`, which counts as an error: let CancelledError pass.
        """
        raise NotImplementedError

    def on_timer(self, timer: Timer, checkpointer: Checkpointer) -> None:
        """A timer of `context.set_timer` fires; it is not pending any more.

        Called between two calls of `process_records`, never concurrently: event timers in the order
        of `(at, key, name)` once the watermark has reached them, before the next record; those of
        the wall clock in the same order, at their time or when the call under way has returned.
        With `process_record` every record before the timer is done when it fires, and none behind
        it has begun; it is called on the thread of `initialize`, with the context given there.
        With an output that stores its cursor (`sql:`, `s3:`, rolled files) a round of wall timers
        ends with a checkpoint, and rounds are 1 s apart, or `checkpoint.every` if the output rolls.
        Guaranteed: rows and changes of the state, among them new timers, become durable in the
        commit that forgets the timer. After a crash a timer that no checkpoint covers fires again,
        with the state of the checkpoint. Event timers do not depend on how records came in batches.
        Must not: return before the work is done.
        Raises: whatever you like; it is called again after a back-off, with its rows and changes
        taken back. After the retries of `on_error` the lease is halted, whatever `then` says: a
        timer is not a record that could be put aside. HaltShard halts at once.
        """

    def event_time(self, record: Record[V]) -> float:
        """When the record happened, in seconds since the epoch, for the watermark and for
        `Windows`: its arrival in the stream, unless you override it. Only with `on_timer`.

        Called before user code gets a record that may move the watermark, and by `Windows.add`.
        For the watermark a time after the arrival counts as the arrival, so that one producer with
        a wrong clock does not close the windows of all others; the log says how many there were.
        Must not: depend on anything but the record, nor change anything. Raises: whatever you like;
        such a record does not move the watermark.
        """
        return record.approximate_arrival_timestamp

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Every record of the shard was processed; its children wait for this call.

        Called once, after the last `process_records` returned, while the lease is held.
        Guaranteed: no further record of this shard will come to any processor. Its rows
        and changes of the state are committed with the shard's end, once; before that a process
        that ends has it called again.
        Must not: keep work in memory; after this the position cannot be read again. When it returns
        the shard is done, also with `checkpoint: manual`.
        Raises: whatever you like; it is called again after a back-off, as for a batch.
        """

    def lease_lost(self) -> None:
        """Another owner has the shard: write nothing, release what you hold.

        Called at most once, when no other call is under way. Not called after a crash. On Spark it
        says that another task goes on with the shard.
        """

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """The last chance to checkpoint: the lease is released when this returns.

        Called once, after the running batch returned, when the machine drains or the lease moves.
        On Spark only after `context.release()`: tasks end with their range.
        With `checkpoint: auto` or `batch` the processed records are checkpointed anyway.
        """
