"""The calls of every other method, `initialize`, `on_timer` and `shard_ended` among them: repeated
until they return or are given up. The one driver of every host.

`Attempts` decides. A `MethodHost` has the rests, the reports and the halt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, assert_never

from kclrun.calling.delivery import Attempts, GiveUp, RetryAfter, RowScope, attempt, host_fault
from kclrun.calling.tracebacks import Failure, describe
from kclrun.model.policies import ErrorPolicy
from kclrun.model.sequence import ExtendedSequenceNumber


class MethodRaised(NamedTuple):
    """A call of the method `where` raised, for the `calls`th time in a row.

    `pause_s` is the pause before it is repeated; None: it is given up, and the lease halts.
    """

    where: str
    error: BaseException
    failure: Failure
    is_host_fault: bool
    calls: int
    pause_s: float | None


class MethodHost(Protocol):
    """What `MethodCalls` needs of its shell, on the thread of `MethodCalls.run`."""

    def ends_run(self, where: str, error: BaseException) -> bool:
        """Whether this error is not one of user code, so that `run` raises it."""
        return False

    def durable(self) -> ExtendedSequenceNumber | None:
        """The last position of which a checkpoint covers the rows."""
        ...

    def raised(self, raised: MethodRaised) -> None:
        """A call raised. If it is given up, halt the lease."""
        ...

    def rest(self, where: str, pause_s: float) -> bool:
        """Wait before the call is repeated. False if a stop came meanwhile."""
        return True

    def recovered(self, where: str, calls: int) -> None:
        """The call returned after others of it raised, with so many calls."""
        return


class MethodCalls:
    """The calls of one processor's methods but those that get records."""

    def __init__(self, host: MethodHost, policy: ErrorPolicy) -> None:
        self._host = host
        self._policy = policy

    def run(
        self,
        where: str,
        call: Callable[[], None],
        rows: RowScope | None = None,
        covers: ExtendedSequenceNumber | None = None,
    ) -> bool:
        """Repeat `call` until it returns. False if it is given up, or if a stop came meanwhile.

        `covers` is the position of the rows that the call emits; None if it emits none.
        """
        host, attempts = self._host, None
        while True:
            try:
                attempt(call, rows, covers, host.durable)
            except BaseException as error:
                if not host.ends_run(where, error):
                    attempts = attempts or Attempts(where, self._policy)
                    pause_s = self._raised(error, attempts)
                    if pause_s is not None and host.rest(where, pause_s):
                        continue
                    return False
                raise
            if attempts is not None:
                host.recovered(where, attempts.failed + 1)
            return True

    def _raised(self, error: BaseException, attempts: Attempts) -> float | None:
        """Returns: the pause before the call is repeated; None if it is given up."""
        decision = attempts.raised(error)
        match decision:
            case GiveUp():
                pause_s = None
            case RetryAfter(seconds):
                pause_s = seconds
            case _:
                assert_never(decision)
        is_host_fault = host_fault(error) is not None
        failure = describe(error)
        self._host.raised(
            MethodRaised(attempts.where, error, failure, is_host_fault, attempts.failed, pause_s)
        )
        return pause_s
