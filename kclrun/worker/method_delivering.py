"""The other methods of a lease's processor: the host of `initialize`, `on_timer` and the last calls
in a lease process."""

from __future__ import annotations

from kclrun.calling.delivery import host_fault
from kclrun.calling.methods import MethodCalls, MethodHost, MethodRaised
from kclrun.calling.timers import ON_TIMER
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol.reports import ProcessorRecovered
from kclrun.worker.delivery_queue import DeliveryQueue
from kclrun.worker.giving_up import Trouble
from kclrun.worker.progress import DeliveryHost, Progress

INITIALIZE = "initialize"


class MethodDelivery(MethodHost):
    """The `MethodHost` of a lease."""

    def __init__(
        self, policy: ErrorPolicy, host: DeliveryHost, progress: Progress, queue: DeliveryQueue
    ) -> None:
        self._host = host
        self._progress = progress
        self._queue = queue
        self._trouble: Trouble
        self.calls = MethodCalls(self, policy)

    # As `MethodHost`.

    def ends_run(self, where: str, error: BaseException) -> bool:
        """A lease that cannot begin for want of something on its host is not at fault."""
        return where == INITIALIZE and host_fault(error) is not None

    def durable(self) -> ExtendedSequenceNumber | None:
        return self._progress.durable()

    def raised(self, raised: MethodRaised) -> None:
        if raised.calls == 1:
            self._trouble = Trouble(raised.where)
        self._trouble.note(raised.failure, is_host_fault=raised.is_host_fault)
        if raised.pause_s is None:
            self._queue.halt()
            self._host.post(self._trouble.given_up())
        else:
            self._host.report(self._trouble.raised(raised.pause_s))

    def rest(self, where: str, pause_s: float) -> bool:
        return self._queue.may_try_again(pause_s, is_batch=where == ON_TIMER)

    def recovered(self, where: str, calls: int) -> None:
        self._host.report(ProcessorRecovered(where, calls))
