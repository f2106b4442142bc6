"""Contexts of processors, as the runtime makes them, for tests without a runtime."""

from kclrun.model.lease import ClaimedLease
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.processor import Context, KeptRow, NoState


class TakenRows:
    """Implements `processor.RowOutputs` by two functions."""

    def __init__(self, emit=lambda row, to: None, prepare=lambda row, to: KeptRow(to, row, 1)):
        self.emit = emit
        self.prepare = prepare


def made_context(
    *,
    shard="shardId-000000000000",
    position=TRIM_HORIZON,
    token=1,
    uncheckpointed_max=100,
    rows=None,
    state=None,
    release=lambda: None,
    **further,
):
    """A context of the application and stream `test`, with what a test is about."""
    return Context(
        lease=ClaimedLease(
            application="test",
            stream="test",
            shard_id=shard,
            key=shard,
            position=position,
            fencing_token=token,
        ),
        options={},
        checkpoint=CheckpointPolicy(uncheckpointed_max=uncheckpointed_max),
        rows=rows or TakenRows(),
        release=release,
        state=NoState() if state is None else state,
        **further,
    )
