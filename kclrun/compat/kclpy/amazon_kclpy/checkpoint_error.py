"""The one error that `checkpointer.checkpoint(...)` raises."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(Exception):
    """A checkpoint was refused. `value` names the reason, as the Java KCL names its exceptions.

    `ShutdownException`: the lease is not ours any more. `IllegalArgumentException`: the position is
    below the last checkpoint, above the last delivered record, or not a sequence number.
    `KinesisClientLibDependencyException`: an output that the checkpoint would cover.
    `ThrottlingException`, `InvalidStateException`: DynamoDB, or its table. The lease process waits
    for both by itself, and reports `ShutdownException` once it cannot prove the lease any more.
    """

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return repr(self.value)
