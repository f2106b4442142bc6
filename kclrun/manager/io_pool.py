"""A few threads for requests that wait on the network, so that the loop never does.

Rule: a job returns or raises; either comes back as a call in the loop's thread. The threads are
daemons: a request that hangs when the manager leaves holds nothing up. Look next: `performing.py`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["IoPool"]

Result = TypeVar("Result")
# Renewals of 64 leases without a process, every 3.3 s, at 5 ms each keep a tenth of one busy; eight
# leave room for a slow scan and a burst of reads at a start.
_THREADS: Final = 8


class IoPool:
    """Jobs in order of arrival, on `threads` threads. `post` runs a callback in the loop."""

    def __init__(self, post: Callable[[Callable[[], None]], None], threads: int = _THREADS) -> None:
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"kclrun-io-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(
        self,
        job: Callable[[], Result],
        then: Callable[[Result], None],
        otherwise: Callable[[Exception], None],
    ) -> None:
        """Run `job` on a thread, then `then(result)` or `otherwise(error)` in the loop."""

        def work() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - carried to the loop, which judges it
                failure = error
                self._post(lambda: otherwise(failure))
            else:
                self._post(lambda: then(result))

        self._jobs.put(work)

    def close(self, patience_s: float = 0.0) -> None:
        """Take no more jobs; wait so long for those under way."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(patience_s / len(self._threads))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
