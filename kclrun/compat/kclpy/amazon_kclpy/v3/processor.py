"""`amazon_kclpy.v3.processor`: interface 3, and interface 2 as seen by it."""

from __future__ import annotations

from typing import Any

from kclrun.compat.kclpy.amazon_kclpy import messages

__all__ = ["RecordProcessorBase", "V2toV3Processor"]


class RecordProcessorBase:
    """The base class of processors of interface 3."""

    version = 3

    def initialize(self, initialize_input: messages.InitializeInput) -> None:
        """Called once, before the first record."""
        raise NotImplementedError

    def process_records(self, process_records_input: messages.ProcessRecordsInput) -> None:
        """Called with some records, in order."""
        raise NotImplementedError

    def lease_lost(self, lease_lost_input: messages.LeaseLostInput) -> None:
        """Another owner has the shard: write nothing."""
        raise NotImplementedError

    def shard_ended(self, shard_ended_input: messages.ShardEndedInput) -> None:
        """All records were delivered: checkpoint, or the shard stays open."""
        raise NotImplementedError

    def shutdown_requested(self, shutdown_requested_input: messages.ShutdownRequestedInput) -> None:
        """The last chance to checkpoint before the lease is given away."""
        raise NotImplementedError


class V2toV3Processor(RecordProcessorBase):
    """A processor of interface 2, called through interface 3."""

    def __init__(self, delegate: Any) -> None:
        self.delegate = delegate

    def initialize(self, initialize_input: messages.InitializeInput) -> None:
        self.delegate.initialize(initialize_input)

    def process_records(self, process_records_input: messages.ProcessRecordsInput) -> None:
        self.delegate.process_records(process_records_input)

    def lease_lost(self, lease_lost_input: messages.LeaseLostInput) -> None:
        self.delegate.shutdown(messages.ShutdownInput.zombie(lease_lost_input.checkpointer))

    def shard_ended(self, shard_ended_input: messages.ShardEndedInput) -> None:
        self.delegate.shutdown(messages.ShutdownInput.terminate(shard_ended_input.checkpointer))

    def shutdown_requested(self, shutdown_requested_input: messages.ShutdownRequestedInput) -> None:
        # Newer than interface 2: a class that does not derive from the base class may lack it.
        if hasattr(self.delegate, "shutdown_requested"):
            self.delegate.shutdown_requested(shutdown_requested_input)
