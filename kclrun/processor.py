"""The public interface: what a user subclasses, and what the runtime hands in.

Names follow kclpy v3 where they can. The same class runs on the fleet and on Spark. May know:
the model and the errors. Contracts stand in the docstrings; the ids in brackets are the
guarantees of the README.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

from kclrun.model.lease import PendingCheckpoint
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber

__all__ = ["Checkpointer", "Context", "RecordProcessor"]

Row = Mapping[str, Any]


class Context:
    """What a processor knows about its place in the world. Made by the runtime, one a processor.

    `position` is the checkpoint the shard is read from; `options` the mapping of the same name in
    the configuration; `fencing_token` the lease counter at the claim, which only grows;
    `pending_checkpoint` what a Java KCL worker left by a two-phase checkpoint, or None;
    `uncheckpointed_max` how many records may be delivered beyond the last checkpoint;
    `checkpoint_mode` who checkpoints: `auto` and `batch` the runtime, `manual` the processor.
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
        emit: Callable[[Row], None],
        release: Callable[[], None],
        pending_checkpoint: PendingCheckpoint | None = None,
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
        self._release = release

    def emit(self, row: Row) -> None:
        """Send one row to `output:`. Call it from `process_records` or `shard_ended`.

        Guaranteed: rows leave in the order of the calls and are durable before the checkpoint that
        covers the records being processed; a row whose checkpoint was never written is taken back
        before the shard is read again, so a crash leaves no row twice. A row emitted after a
        `checkpoint()` of its own batch belongs to the next checkpoint. On Spark the rows are those
        of the resulting DataFrame, and count once with the commit of the batch they belong to.
        Raises: SettingsError when the application has no `output:`; TypeError for a row that JSON
        cannot hold.
        """
        self._emit(row)

    def release(self) -> None:
        """Give the lease up after this batch, in good order.

        The batch is finished, `shutdown_requested` called, all that was processed checkpointed, and
        the lease offered to the other machines of the application, in one write [P17]; alone, it
        is released, and taken again at the next look at the table. On Spark another instance
        goes on with the shard.
        """
        self._release()


class Checkpointer:
    """Makes progress durable. Usable during the call it was handed to, from any thread."""

    def __init__(self, write: Callable[[ExtendedSequenceNumber | None], None]) -> None:
        self._write = write

    def checkpoint(
        self, at: Record | str | None = None, sub_sequence_number: int | None = None
    ) -> None:
        """Everything up to here is processed; returns once that is durable in the lease table.

        `checkpoint()` covers all records given to the processor so far, this batch included;
        `checkpoint(record)` covers that record and all before it; `checkpoint("4963…", 3)` the
        same by its number. A position equal to the last checkpoint is no error and no write.
        Emitted rows are made durable first. On Spark it is durable with the commit of the batch,
        which covers all its records.

        Raises: StaleCheckpoint below the last checkpoint or above what was delivered; LeaseLost
        when the lease is not ours any more: stop working on the batch. A throttled or silent
        lease table is waited for, as long as the lease can be proven ours.
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
    """

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
        Raises: whatever you like; the same batch is given again after a back-off, and when the
        retries of `on_error` are spent the lease is halted. Nothing is skipped [I9].
        """

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Everything in the shard was processed; its children wait for this call.

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
        With `checkpoint: auto` or `batch` what was processed is checkpointed anyway.
        """
