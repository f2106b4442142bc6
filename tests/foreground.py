"""Programs that a test starts heed signals as those started in the foreground of a terminal do.

A shell without job control starts background jobs with SIGINT ignored, `nohup` does so with SIGHUP,
and what a process ignores its children ignore from their start: a test that sends such a signal
would pass whatever the program does about it.
"""

import contextlib
import signal

# What a program has that is started in the foreground.
HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextlib.contextmanager
def heeding_signals():
    """What is started inside heeds INT, TERM and HUP. In the main thread."""
    former = {number: signal.signal(number, handler) for number, handler in HANDLERS.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            # None: a handler that is none of Python's, so none that it can set again.
            if handler is not None:
                signal.signal(number, handler)
