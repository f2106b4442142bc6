"""The order in which a shell drives a core: events, the commands that follow, answers of requests.

Manager, lease thread and simulator use it, so the simulator proves the order of the code that runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")


class Pump(Generic[EventT, CommandT]):
    """Gives a core its events one after another, and performs all commands of one before the next.

    So a core never sees the consequence of a command before the command was performed. The answer
    of a request that holds the shell comes before the events that happened meanwhile. While
    `is_held`, nothing is handled: a request is under way, or the core has come to its end.
    """

    def __init__(
        self,
        handle: Callable[[EventT], Iterable[CommandT]],
        perform: Callable[[CommandT], None],
    ) -> None:
        self.is_held = False
        self._handle = handle
        self._perform = perform
        self._commands: deque[CommandT] = deque()
        self._answers: deque[EventT] = deque()
        self._events: deque[EventT] = deque()
        self._is_running = False

    def post(self, event: EventT) -> None:
        """An event happened; it is handled after the earlier ones, by `run`."""
        self._events.append(event)

    def answer(self, event: EventT) -> None:
        """A request was answered; the answer is handled first, by `run`."""
        self.is_held = False
        self._answers.append(event)

    def run(self) -> bool:
        """Handle everything that has happened. False from within a command: the outer call does."""
        if self._is_running:
            return False
        self._is_running = True
        try:
            while not self.is_held:
                if self._commands:
                    self._perform(self._commands.popleft())
                elif self._answers or self._events:
                    event = (self._answers or self._events).popleft()
                    self._commands.extend(self._handle(event))
                else:
                    break
        finally:
            self._is_running = False
        return True
