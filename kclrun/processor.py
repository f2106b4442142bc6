"""The public interface: the class that users subclass, and the objects that the runtime passes.

Names follow kclpy v3 where they can. The same class runs on the fleet and on Spark. May know: the
model and the errors. Contracts stand in the docstrings; the ids in brackets are the guarantees of
the documents.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Literal, TypeVar

from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.model.lease import PendingCheckpoint
from kclrun.model.record import Record, RecordBatch
from kclrun.model.row_schema import RowSchema, row_mapping
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.state.keyed import Counter, State, Table

__all__ = [
    "MAIN_OUTPUT",
    "METHODS",
    "Checkpointer",
    "Context",
    "RecordProcessor",
    "call_method",
    "refuse_deferred",
]

Row = Mapping[str, Any]
T = TypeVar("T")

# The name of `output:` among the outputs of an application.
MAIN_OUTPUT: Final = "output"

# The methods of a processor, and the arguments of the runtime's calls.
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "initialize": ("context",),
    "process_records": ("batch", "checkpointer"),
    "shard_ended": ("checkpointer",),
    "lease_lost": (),
    "shutdown_requested": ("checkpointer",),
}


class Context:
    """The place of a processor: shard, options, checkpoint. Made by the runtime, one a processor.

    `position` is the checkpoint the shard is read from; `options` the mapping of the same name in
    the configuration; `fencing_token` the lease counter at the claim, which only grows;
    `pending_checkpoint` the state that a Java KCL worker left by a two-phase checkpoint, or None;
    `uncheckpointed_max` how many records may be delivered beyond the last checkpoint;
    `checkpoint_mode` says which side checkpoints: with `auto` and `batch` the runtime, with
    `manual` the processor.
    """

    def __init__(
        self,
        *,
        application: str,
        stream: str,
        shard_id: str,
        lease_key: str,
        position: ExtendedSequenceNumber,
        options: Mapping[str, Any],
        fencing_token: int,
        uncheckpointed_max: int,
        checkpoint_mode: Literal["auto", "batch", "manual"],
        emit: Callable[[Row, str], None],
        release: Callable[[], None],
        state: State | None = None,
        pending_checkpoint: PendingCheckpoint | None = None,
        schemas: Mapping[str, RowSchema] | None = None,
    ) -> None:
        self.application = application
        self.stream = stream
        self.shard_id = shard_id
        self.lease_key = lease_key
        self.position = position
        self.options = options
        self.fencing_token = fencing_token
        self.uncheckpointed_max = uncheckpointed_max
        self.checkpoint_mode = checkpoint_mode
        self.pending_checkpoint = pending_checkpoint
        self._emit = emit
        self._schemas = schemas or {}
        self._release = release
        self._state = state

    @property
    def state(self) -> State:
        """What is remembered of the keys of the shard; see `kclrun.state.keyed.State`. It is there
        from `initialize` on, as of `position`, and is changed in `process_records` and
        `shard_ended`. Raises: SettingsError if the settings have no `state`."""
        if self._state is None:
            raise SettingsError(
                "context.state needs a place that survives this machine: set state.store in the"
                " configuration to a folder or to s3://bucket/prefix (engine: fleet)"
            )
        return self._state

    def counter(self, name: str) -> Counter:
        """A number for each key, in `state` under this name."""
        return Counter(self.state, name)

    def table(self, name: str, of: type[T]) -> Table[T]:
        """A value of the type `of` for each key, in `state` under this name."""
        return Table(self.state, name, of)

    def emit(self, row: object, to: str = MAIN_OUTPUT) -> None:
        """Send one row to `output:`, or to that of `outputs:` which `to` names. Call it from
        `process_records` or `shard_ended`.

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
        schema = self._schemas.get(to)
        if schema is not None:
            row = schema.check(row)
        elif type(row) is not dict:
            row = row_mapping(row)
        self._emit(row, to)

    def release(self) -> None:
        """Give the lease up after this batch, in good order.

        The batch is finished, `shutdown_requested` called, every processed record checkpointed, and
        the lease offered to the other machines of the application, in one write [P17]. If there are
        no other machines, the lease is released, and taken again at the next look at the table. On
        Spark another instance goes on with the shard.
        """
        self._release()


class Checkpointer:
    """Makes progress durable. Usable during the call that it was passed to, from any thread."""

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


class RecordProcessor(ABC):
    """User code over one shard. One instance a shard, in a process of its own, one call at a time.

    Delivery is at least once [I1] and in the order of the shard [I6]; a planned stop causes no
    duplicate [I8], a crash at most `checkpoint.uncheckpointed_max` of them [I7]. On Spark an
    instance lives in a task and sees one range of the shard, or several that follow each other; a
    task that is tried again gives its range again, and the rows of the attempts before are dropped.

    `decode_as` says what `record.value` is, where the settings have no `decode`: a type that JSON
    is decoded into (a msgspec.Struct, a dataclass, a TypedDict), or a text as that setting takes,
    but for `glue`.
    """

    decode_as: ClassVar[Any] = None

    def initialize(self, context: Context) -> None:  # noqa: B027 - optional by design
        """Get ready for a shard: open connections, keep `context`.

        Called once, before the first record, when the lease has been proven ours.
        Must not: read the stream. Raises: whatever you like; after the retries of `on_error` the
        lease is halted with the reason, the other leases go on.
        """

    @abstractmethod
    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Process some records of the shard, in order.

        Called again and again while the lease is held, never concurrently. `batch` has from 1 to
        `fetch.batch_max` records, aggregates opened.
        Guaranteed: when it returns, the batch counts as processed and may be checkpointed; the
        checkpoint never passes a batch that has not returned [I2b].
        Must not: return before the work is done, unless `checkpoint: manual` is set.
        Raises: whatever you like; the same batch is given again after a back-off. When the retries
        of `on_error` are spent, the lease is halted; or, with `on_error.then`, the records at fault
        are found and become dead letters, or are skipped. Nothing else is skipped [I9, I13].
        FailedRecords names the records at fault; RetryLater asks for the batch again without
        counting; HaltShard halts at once.
        """

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Every record of the shard was processed; its children wait for this call.

        Called once, after the last `process_records` returned, while the lease is held.
        Guaranteed: no further record of this shard will come to any processor [I1, I3].
        Must not: keep work in memory; after this the position cannot be read again. With
        `checkpoint: manual`, call `checkpointer.checkpoint()` here.
        Raises: whatever you like; it is called again after a back-off, as for a batch.
        """
        checkpointer.checkpoint()

    def lease_lost(self) -> None:  # noqa: B027 - optional by design
        """Another owner has the shard: write nothing, release what you hold.

        Called at most once, when no other call is under way. Not called after a crash. On Spark it
        says that another task goes on with the shard.
        """

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:  # noqa: B027 - optional
        """The last chance to checkpoint: the lease is released when this returns.

        Called once, after the running batch returned, when the machine drains or the lease moves.
        On Spark only after `context.release()`: tasks end with their range.
        With `checkpoint: auto` or `batch` the processed records are checkpointed anyway.
        """


def refuse_deferred(processor: object, called: str, methods: Iterable[str] = METHODS) -> None:
    """Refuse a processor (a class or an instance) with a method whose call runs none of its code.

    Calling an `async def`, or a function with `yield`, only makes an object: the records would
    count as processed, and checkpoints would pass them [I9]. `called` names it in the message.
    Raises: ProcessorLoadError.
    """
    for name in methods:
        method = getattr(processor, name, None)
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise ProcessorLoadError(
                f"{called}: {name} is `async def`: the runtime calls it without an event loop, so"
                " nothing in it would run\n"
                "Write `def`; for asynchronous work call asyncio.run(...) in it"
            )
        if inspect.isgeneratorfunction(method):
            raise ProcessorLoadError(
                f"{called}: {name} has a `yield`, which makes it a generator: nothing in it would"
                " run\n"
                "Remove the `yield`; rows leave with context.emit(row)"
            )


def call_method(processor: RecordProcessor, method: str, *arguments: object) -> None:
    """Call a method of a processor; each returns None once its work is done.

    Any other result fails the call [I9]: a coroutine or a generator is work that has not begun.
    Raises: the method's exception; ProcessorLoadError for a result, which calling it again would
    not change.
    """
    result = getattr(processor, method)(*arguments)
    if result is None:
        return
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns of it later, at another place
    is_deferred = (
        inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)
    )
    why = "nothing of it has run" if is_deferred else "the runtime has no use for it"
    raise ProcessorLoadError(
        f"{method} returned a {type(result).__name__}, and {why}: a method does its work and"
        " returns None"
    )
