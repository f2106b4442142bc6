"""The other methods of a processor, in a Python worker of Spark: the host of `initialize`,
`on_timer` and the last calls. Where a lease of the fleet would halt, the task fails.
"""

from __future__ import annotations

from collections.abc import Callable

from kclrun.calling.methods import MethodCalls, MethodHost, MethodRaised
from kclrun.errors import ProcessorError
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import ExtendedSequenceNumber


class TaskMethods(MethodHost):
    """The `MethodHost` of one instance. `failure` has the words for a call that is given up, and
    `warn` logs. `MethodCalls.run` raises ProcessorError."""

    def __init__(
        self,
        policy: ErrorPolicy,
        *,
        durable: Callable[[], ExtendedSequenceNumber],
        failure: Callable[[MethodRaised], str],
        wait: Callable[[float], None],
        warn: Callable[[str], None],
    ) -> None:
        self._durable = durable
        self._failure = failure
        self._wait = wait
        self._warn = warn
        self.calls = MethodCalls(self, policy)

    # As `MethodHost`.

    def durable(self) -> ExtendedSequenceNumber:
        return self._durable()

    def raised(self, raised: MethodRaised) -> None:
        if raised.pause_s is None:
            raise ProcessorError(self._failure(raised)) from None
        words = raised.failure.error
        self._warn(f"{raised.where} raised {words}; again in {raised.pause_s:g} s")

    def rest(self, where: str, pause_s: float) -> bool:
        self._wait(pause_s)
        return True
