"""`amazon_kclpy.v2.processor`: interface 2, and interface 1 as seen by it."""

from __future__ import annotations

from typing import Any

from kclrun.compat.kclpy.amazon_kclpy import messages

__all__ = ["RecordProcessorBase", "V1toV2Processor"]


class RecordProcessorBase:
    """The base class of processors of interface 2."""

    version = 2

    def initialize(self, initialize_input: messages.InitializeInput) -> None:
        """Called once, before the first record."""
        raise NotImplementedError

    def process_records(self, process_records_input: messages.ProcessRecordsInput) -> None:
        """Called with some records, in order."""
        raise NotImplementedError

    def shutdown(self, shutdown_input: messages.ShutdownInput) -> None:
        """Called at the end of the shard (`TERMINATE`) and when the lease is lost (`ZOMBIE`)."""
        raise NotImplementedError

    def shutdown_requested(self, shutdown_requested_input: messages.ShutdownRequestedInput) -> None:
        """The last chance to checkpoint before the lease is given away."""


class V1toV2Processor(RecordProcessorBase):
    """A processor of interface 1, called through interface 2."""

    def __init__(self, delegate: Any) -> None:
        self.delegate = delegate

    def initialize(self, initialize_input: messages.InitializeInput) -> None:
        self.delegate.initialize(initialize_input.shard_id)

    def process_records(self, process_records_input: messages.ProcessRecordsInput) -> None:
        given = process_records_input
        self.delegate.process_records(given.records, given.checkpointer)

    def shutdown(self, shutdown_input: messages.ShutdownInput) -> None:
        self.delegate.shutdown(shutdown_input.checkpointer, shutdown_input.reason)

    def shutdown_requested(self, shutdown_requested_input: messages.ShutdownRequestedInput) -> None:
        # `shutdownRequested` was its first name.
        for name in ("shutdownRequested", "shutdown_requested"):
            if hasattr(self.delegate, name):
                getattr(self.delegate, name)(shutdown_requested_input.checkpointer)
                return
