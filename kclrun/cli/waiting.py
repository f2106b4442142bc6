"""What a start or a verb waits for: silent while it is quick, then a line for each thing.

    waiting for the stream orders, Kinesis at http://10.0.0.9:4567: …; trying for 55 s more
    (aws.start_timeout)

The line is a sentence on standard error, or an event where the log of a run is JSON. Only the main
thread waits for what a person waits for: other threads say nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec

from kclrun.cli.messages import echo

if TYPE_CHECKING:
    from kclrun.config.schema import Settings

_FIRST_S: Final = 1.0
# A line each half a minute shows that the program lives, and fills no screen within an hour.
_AGAIN_S: Final = (5.0, 15.0, 30.0)
_STDERR: Final = 2


class Waiting(msgspec.Struct, frozen=True):
    """One line: what is waited for, for how long so far, and why it takes so long if it failed."""

    what: str
    waited_s: float
    error: str | None = None
    left_s: float | None = None

    def __str__(self) -> str:
        why = "" if self.error is None else f": {self.error}"
        if self.left_s is None:
            return f"waiting for {self.what}{why} (for {self.waited_s:.0f} s so far)"
        left = f"trying for {self.left_s:.0f} s more (aws.start_timeout)"
        return f"waiting for {self.what}{why}; {left}"


Say = Callable[[Waiting], None]


def next_line_s(waited_s: float, first_s: float) -> float:
    """After so many seconds of waiting the next line is due: after 1, 5, 15, 30, 60, 90, …"""
    for due_s in (first_s, *_AGAIN_S):
        if due_s > waited_s:
            return due_s
    step_s = _AGAIN_S[-1]
    return (waited_s // step_s + 1.0) * step_s


class Wait:
    """One thing that is waited for. `failed` notes the last failure of an attempt."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._failure: tuple[str, float] | None = None
        self.is_over = threading.Event()

    def failed(self, error: Exception, left_s: float) -> None:
        """An attempt failed; it is repeated for `left_s` more seconds."""
        first_line = str(error).partition("\n")[0]
        self._failure = first_line, time.monotonic() + left_s

    def line(self) -> Waiting:
        """The line of now."""
        now = time.monotonic()
        error, until = self._failure or (None, None)
        left_s = None if until is None else max(0.0, until - now)
        return Waiting(self._what, now - self._began, error, left_s)

    def say_until_over(
        self, is_innermost: Callable[[Wait], bool], say: Say, first_s: float
    ) -> None:
        """In a thread of its own, until `is_over` is set."""
        due_s = first_s
        while not self.is_over.wait(max(0.0, self._began + due_s - time.monotonic())):
            if is_innermost(self):
                with suppress(OSError):  # a text that cannot be shown ends no start
                    say(self.line())
            due_s = next_line_s(time.monotonic() - self._began, first_s)


def _say_in_words(waiting: Waiting) -> None:
    echo(str(waiting), err=True)


class _Now:
    """What the main thread waits for now, the innermost last, and how that is said."""

    say: Say = staticmethod(_say_in_words)
    first_s: float = _FIRST_S
    waits: Final[list[Wait]] = []

    @classmethod
    def is_innermost(cls, wait: Wait) -> bool:
        return cls.waits[-1:] == [wait]


@contextmanager
def waiting_for(what: str, first_s: float = 0.0) -> Iterator[Wait]:
    """Say what is waited for, if it takes longer than a second, or than `first_s` if that is more.
    Inside of another wait, only this one is said."""
    wait = Wait(what)
    if threading.current_thread() is not threading.main_thread():
        yield wait
        return
    arguments = (_Now.is_innermost, _Now.say, max(first_s, _Now.first_s))
    sayer = threading.Thread(
        target=wait.say_until_over, args=arguments, name="waiting", daemon=True
    )
    _Now.waits.append(wait)
    try:
        with suppress(RuntimeError):  # no thread can be started here: what follows says so
            sayer.start()
        yield wait
    finally:
        wait.is_over.set()
        _Now.waits.remove(wait)


@contextmanager
def said_in_the_log(settings: Settings) -> Iterator[None]:
    """Meanwhile the lines are events of the log, if that is JSON."""
    from kclrun.observe.logs import LineSink, log_of

    sink = LineSink(_STDERR)
    log = log_of(settings, f"starting:{os.getpid()}", sink)

    def note(waiting: Waiting) -> None:
        known = msgspec.structs.asdict(waiting).items()
        log.write(
            "start_waiting",
            {name: value for name, value in known if value is not None},
            level="info" if waiting.error is None else "warning",
        )

    former = _Now.say
    if log.as_json:
        _Now.say = staticmethod(note)
    try:
        yield
    finally:
        _Now.say = staticmethod(former)
        sink.close()
