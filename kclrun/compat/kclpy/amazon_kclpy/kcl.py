"""`amazon_kclpy.kcl`: the checkpointer, the oldest interface, and the last call of every script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

from kclrun.compat.kclpy.amazon_kclpy.checkpoint_error import CheckpointError

__all__ = ["CheckpointError", "Checkpointer", "KCLProcess", "RecordProcessorBase"]


class Checkpointer:
    """A processor gets it to make its progress durable. Made by the adapter."""

    def __init__(self, write: Callable[[str | None, int], None]) -> None:
        self._write = write

    def checkpoint(self, sequence_number: Any = None, sub_sequence_number: Any = None) -> None:
        """Everything up to here is processed; returns once that is durable.

        Without arguments: all records delivered so far. With a record: that one and all before it.
        With a sequence number (a text or a number): the same by its number. A sub-sequence number
        that is left out is 0, as in the Java KCL.

        Raises: CheckpointError, of the class that `amazon_kclpy.kcl` has.
        """
        if sequence_number is None:
            self._write(None, 0)
            return
        if hasattr(sequence_number, "sequence_number"):
            sub_sequence_number = sequence_number.sub_sequence_number
            sequence_number = sequence_number.sequence_number
        self._write(str(sequence_number), int(sub_sequence_number or 0))


class RecordProcessorBase:
    """The first interface: plain arguments instead of input objects."""

    version = 1

    def initialize(self, shard_id: str) -> None:
        """Called once, before the first record."""
        raise NotImplementedError

    def process_records(self, records: list[Any], checkpointer: Checkpointer) -> None:
        """Called with some records, in order."""
        raise NotImplementedError

    def shutdown(self, checkpointer: Checkpointer, reason: str) -> None:
        """Called at the end of the shard (`TERMINATE`) and when the lease is lost (`ZOMBIE`)."""
        raise NotImplementedError

    def shutdown_requested(self, checkpointer: Checkpointer) -> None:
        """The last chance to checkpoint before the lease is given away."""


class KCLProcess:
    """The last two lines of a script: `KCLProcess(processor).run()`.

    `hand_over` is set while a script is run for its processor (`scripts.py`).
    """

    hand_over: ClassVar[Callable[[Any], None] | None] = None

    def __init__(self, record_processor: Any, *_files: object, **_named_files: object) -> None:
        self._processor = record_processor

    def run(self) -> None:
        """Give the processor to the lease process; the script runs no further than this."""
        if KCLProcess.hand_over is None:
            script = sys.argv[0].rpartition("/")[2] or "script.py"
            raise RuntimeError(
                "KCLProcess.run() was called outside of a lease process of kclrun\n"
                "Start kclrun --config app.yaml, and write into that file:"
                f" processor: kclpy:{script}"
            )
        KCLProcess.hand_over(self._processor)
