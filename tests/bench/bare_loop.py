"""The loop a user would write without a runtime: fetch, decode, open, again.

Run by the same launcher as a lease process, in a process of the same make, and measured through
the same status slot, so that the runtime is the only difference. No lease, no other thread.
"""

import os

from kclrun.aws.kinesis import PollingReader
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import open_aggregates
from kclrun.ipc.board import Segment
from kclrun.ipc.messages import Begin, channel_of_worker
from kclrun.model.record import IteratorType, StartPoint
from kclrun.protocol.status import LeaseStatus, WorkerState

_LIMIT = 10_000


def run(segment_fd: int, _doorbell_fd: int, channel_fd: int) -> int:
    """Read until killed, or until the canned server has gone with the bench."""
    begin = channel_of_worker(channel_fd).receive(10.0)
    assert isinstance(begin, Begin), "a start command comes first"
    spec = begin.spec
    slot = Segment.attach(segment_fd).slot(spec.place)
    client = WireClient(spec.kinesis, lambda: spec.credentials, service="kinesis")
    reader = PollingReader(client, spec.stream_name)
    iterator: str | None = reader.iterator(spec.shard_id, StartPoint(IteratorType.TRIM_HORIZON))
    total = 0
    while iterator is not None:
        page = reader.fetch(iterator, _LIMIT)
        iterator = page.next_iterator
        total += len(open_aggregates(page.records))
        # Three microseconds beside the milliseconds of a page.
        slot.publish(
            LeaseStatus(
                pid=os.getpid(),
                incarnation=spec.incarnation,
                state=WorkerState.PROCESSING,
                records_total=total,
            )
        )
    return os.EX_OK
