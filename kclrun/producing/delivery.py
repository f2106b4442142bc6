"""What became of one record that was put: `Delivery`, as the future of `concurrent.futures`."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Final, NamedTuple, cast

import msgspec

from kclrun.errors import KclrunError
from kclrun.producing.backlog import Outcome, Settled

_LOG: Final = logging.getLogger("kclrun.producer")


class Delivered(NamedTuple):
    """Where a record is in the stream. In a KPL aggregate it is user record number
    `sub_sequence_number`, from 0, of the record with this sequence number; otherwise None."""

    shard_id: str
    sequence_number: str
    sub_sequence_number: int | None


class Batch:
    """The records between two calls of `flush`: how many were put, and how many are done. All
    batches of a producer share the condition."""

    __slots__ = ("condition", "done", "put")

    def __init__(self, condition: threading.Condition) -> None:
        self.condition = condition
        self.put = self.done = 0

    @property
    def is_done(self) -> bool:
        return self.done == self.put


class Delivery(msgspec.Struct, eq=False, gc=False):
    """What becomes of one record that `Producer.put` has accepted.

    It is done when the stream has the record, or when the producer has given the record up. All
    threads may use it, and `await delivery` waits for it in asyncio.
    """

    # Not for the garbage collector, which would look at each of 50,000: a cycle through a callback
    # ends with its call.
    _batch: Batch
    deadline: float
    _outcome: Outcome | None = None
    _number: int = 0
    _callbacks: list[Callable[[Delivery], object]] | None = None

    def done(self) -> bool:
        """Whether the stream has the record, or the producer has given it up."""
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Delivered:
        """Wait until the record is done, at most `timeout` seconds. Returns where it is.

        A record waits up to `linger_s` for others first; `Producer.flush` sends it at once.

        Raises: Throttled, Unavailable or OutcomeUnknown if the record was not sent within
        `give_up_after_s`; AccessDenied, NotFound or InvalidRequest as the service refused it;
        SinkError if the producer was closed by an error of its block; TimeoutError if it is not
        done in time: the producer goes on with it.
        """
        outcome = self._awaited(timeout)
        if outcome.error is not None:
            raise outcome.error
        first = outcome.sub_sequence_number
        number = None if first is None else first + self._number
        return Delivered(outcome.shard_id, outcome.sequence_number, number)

    def exception(self, timeout: float | None = None) -> KclrunError | None:
        """Wait as `result`. Returns why the record is not in the stream; None if it is there."""
        return self._awaited(timeout).error

    def add_done_callback(self, callback: Callable[[Delivery], object]) -> None:
        """Call `callback(delivery)` once it is done; at once if it is.

        The call is made by the producer's thread, which sends nothing meanwhile: it has to be
        short, and must not wait for this producer. What it raises is logged.
        """
        with self._batch.condition:
            if self._outcome is None:
                self._callbacks = [*(self._callbacks or ()), callback]
                return
        callback(self)

    def __await__(self) -> Generator[None, None, Delivered]:
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            done = asyncio.Event()
            self.add_done_callback(lambda _: _in_loop(loop, done.set))
            yield from done.wait().__await__()
        return self.result(0)

    def call_back(self) -> None:
        """For the producer: make the calls of `add_done_callback`."""
        for callback in self._callbacks or ():
            try:
                callback(self)
            except Exception:  # noqa: BLE001 - user code; the other records must go on
                _LOG.exception("a callback of a delivery failed")
        self._callbacks = None

    def __repr__(self) -> str:
        outcome = self._outcome
        if outcome is None:
            return "Delivery(waiting)"
        if outcome.error is not None:
            return f"Delivery(failed: {type(outcome.error).__name__})"
        return f"Delivery({outcome.shard_id}, {outcome.sequence_number})"

    def _awaited(self, timeout: float | None) -> Outcome:
        if self._outcome is None:
            if threading.current_thread().name == SENDER and timeout != 0:
                raise RuntimeError(
                    "a callback of a delivery runs in the thread that sends and must not wait"
                )
            with self._batch.condition:
                self._batch.condition.wait_for(self.done, timeout)
        if self._outcome is None:
            raise TimeoutError("the record is not acknowledged yet")
        return self._outcome


def settle(settled: Settled) -> list[Delivery]:
    """For the producer, which holds the condition: these records are done. Returns the deliveries
    with callbacks: `call_back` comes next, without the condition."""
    called: list[Delivery] = []
    outcome = settled.outcome
    for number, delivery in enumerate(_deliveries(settled)):
        delivery._outcome = outcome  # noqa: SLF001 - of this module
        delivery._number = number  # noqa: SLF001
        if delivery._callbacks is not None:  # noqa: SLF001
            called.append(delivery)
    return called


def count_done(settled: Settled) -> None:
    """For the producer: count the records in their batches, after their callbacks."""
    for delivery in _deliveries(settled):
        delivery._batch.done += 1  # noqa: SLF001 - of this module


def _deliveries(settled: Settled) -> Sequence[Delivery]:
    # A check of each would take a tenth of the time of the thread that sends.
    return cast("Sequence[Delivery]", settled.receipts)


# The name of the thread that sends.
SENDER: Final = "kclrun-producer"


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
