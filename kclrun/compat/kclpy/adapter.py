"""A processor of `amazon_kclpy` as a `RecordProcessor` of the runtime: translates its calls.

Errors of the processor are raised: the same records are delivered again, and then the lease is
halted. `amazon_kclpy` wrote the traceback to standard error and continued with the next records
[I9].
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from kclrun import errors
from kclrun.compat.kclpy.amazon_kclpy import kcl, messages
from kclrun.compat.kclpy.amazon_kclpy.v2.processor import V1toV2Processor
from kclrun.compat.kclpy.amazon_kclpy.v3.processor import V2toV3Processor
from kclrun.compat.kclpy.standing_in import stand_in
from kclrun.methods import refuse_deferred
from kclrun.model.record import RecordBatch
from kclrun.processor import Checkpointer, Context, RecordProcessor

Make = Callable[[Mapping[str, Any]], Any]

_INTERFACES: Final = {
    1: ("initialize", "process_records", "shutdown"),
    2: ("initialize", "process_records", "shutdown"),
    3: ("initialize", "process_records", "lease_lost", "shard_ended", "shutdown_requested"),
}
# Optional methods of interfaces 1 and 2, by both of their names.
_OPTIONAL: Final = ("shutdown_requested", "shutdownRequested")
# The Java KCL's names of the exceptions, with which processors compare.
_VALUES: Final[tuple[tuple[type[errors.KclrunError], str], ...]] = (
    (errors.LeaseLost, "ShutdownException"),
    (errors.StaleCheckpoint, "IllegalArgumentException"),
    (errors.LimitExceeded, "IllegalArgumentException"),
    (errors.Throttled, "ThrottlingException"),
    (errors.NotFound, "InvalidStateException"),
    (errors.KclrunError, "KinesisClientLibDependencyException"),
)


class KclpyProcessor(RecordProcessor):
    """Around one processor of `amazon_kclpy`. `make` makes it from the options when its shard
    starts."""

    make: Make

    def initialize(self, context: Context) -> None:
        """Make the processor, and pass it its shard and the checkpoint in the table."""
        stand_in()
        self._processor_of_user = type(self).make(context.options)
        self._processor = _in_interface_3(self._processor_of_user)
        position = context.position
        messages.InitializeInput(
            {
                "action": "initialize",
                "shardId": context.shard_id,
                "sequenceNumber": position.sequence_number,
                "subSequenceNumber": position.sub_sequence_number,
            }
        ).dispatch(None, self._processor)

    def process_records(self, batch: RecordBatch, checkpointer: Checkpointer) -> None:
        """Pass the batch as records of `amazon_kclpy`."""
        messages.ProcessRecordsInput(
            {
                "action": "processRecords",
                "records": [messages.DeliveredRecord(record) for record in batch],
                "millisBehindLatest": batch.millis_behind_latest,
            }
        ).dispatch(_translated(checkpointer), self._processor)

    def shard_ended(self, checkpointer: Checkpointer) -> None:
        """Call `shard_ended`, or `shutdown` with TERMINATE: the processor has to checkpoint.

        The KCL calls it again and again until it does. Raises: HaltShard if it returned without.
        """
        checkpoints: list[str | None] = []
        ended = messages.ShardEndedInput({"action": "shardEnded"})
        ended.dispatch(_translated(checkpointer, checkpoints.append), self._processor)
        if not checkpoints:
            raise errors.HaltShard(
                "the processor returned from the end of its shard without a checkpoint, which the"
                " KCL asks for there"
            )

    def lease_lost(self) -> None:
        """Call `lease_lost`, or `shutdown` with ZOMBIE, with a checkpointer that refuses."""
        lost = messages.LeaseLostInput({"action": "leaseLost"})
        lost.dispatch(_translated(Checkpointer(_refuse)), self._processor)

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """Call `shutdown_requested`, if the processor has it."""
        requested = messages.ShutdownRequestedInput({"action": "shutdownRequested"})
        requested.dispatch(_translated(checkpointer), self._processor)


def adapted(made_by: Callable[[], Any]) -> type[RecordProcessor]:
    """The `RecordProcessor` of a processor class of `amazon_kclpy`, or of a function making one.

    Raises: ProcessorLoadError if it cannot be called without arguments, or if the class has no
    interface of `amazon_kclpy`.
    """
    name = getattr(made_by, "__qualname__", repr(made_by))
    if isinstance(made_by, type):
        _require_interface(made_by, name)
    try:
        inspect.signature(made_by).bind()
    except TypeError as error:
        raise errors.ProcessorLoadError(
            f"{name} cannot be called without arguments: {error}\n"
            "Name a function without arguments that returns the processor, or the script, as"
            " kclpy:script.py, whose own last lines make it"
        ) from None
    except ValueError:  # written in C, without a signature: the call itself will fail
        pass
    return adapted_maker(lambda _options: made_by(), name)


def adapted_maker(make: Make, name: str) -> type[RecordProcessor]:
    """The same for a function that makes the processor from the options; `name` is for people."""
    return type(f"Kclpy:{name}", (KclpyProcessor,), {"make": staticmethod(make)})


def _require_interface(processor: Any, name: str) -> int:
    version = getattr(processor, "version", None)
    if version not in _INTERFACES:
        raise errors.ProcessorLoadError(
            f"{name} is not a processor of amazon_kclpy: it has no `version` of"
            f" {', '.join(map(str, _INTERFACES))}\n"
            "Derive it from amazon_kclpy.v3.processor.RecordProcessorBase; a RecordProcessor of"
            " kclrun is named without kclpy:"
        )
    missing = [
        method for method in _INTERFACES[version] if not callable(getattr(processor, method, None))
    ]
    if missing:
        raise errors.ProcessorLoadError(f"{name} (interface {version}) has no {', '.join(missing)}")
    refuse_deferred(processor, name, (*_INTERFACES[version], *_OPTIONAL))
    return int(version)


def _in_interface_3(processor: Any) -> Any:
    version = _require_interface(processor, type(processor).__qualname__)
    if version == 1:
        processor = V1toV2Processor(processor)
    return processor if version == 3 else V2toV3Processor(processor)


def _translated(
    checkpointer: Checkpointer, done: Callable[[str | None], None] = lambda _: None
) -> kcl.Checkpointer:
    """`done` gets the sequence number of each checkpoint that is durable."""

    def write(sequence_number: str | None, sub_sequence_number: int) -> None:
        try:
            checkpointer.checkpoint(sequence_number, sub_sequence_number)
        except errors.KclrunError as error:
            _raise_as_checkpoint_error(error)
        done(sequence_number)

    return kcl.Checkpointer(write)


def _raise_as_checkpoint_error(error: errors.KclrunError) -> NoReturn:
    value = next(value for kind, value in _VALUES if isinstance(error, kind))
    # The class that the processor catches: that of the installed package, if there is one.
    checkpoint_error: type[Exception] = importlib.import_module("amazon_kclpy.kcl").CheckpointError
    raise checkpoint_error(value) from error


def _refuse(_position: object) -> NoReturn:
    raise errors.LeaseLost("another owner has the lease")
