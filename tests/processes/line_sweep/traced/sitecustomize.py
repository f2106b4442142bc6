"""Loaded by every Python of the rig as it starts: makes each fork of the launcher trace itself.

Within a *window* of its life a lease process writes down the lines of kclrun that it runs, on all
its threads; or, once lines are queued, takes one of them and kills itself just before it would run.
KCLRUN_RIG_WINDOW says which: `checkpoint`, from each fetch to the next acknowledged checkpoint, the
first one left out, so that each death follows progress; or `end`, from the last record of a shard
to the end of its process.

The folder KCLRUN_RIG_SWEEP holds `lines`, appended to by all; `queue`, a file a line; `taken`,
where a file is moved by who takes it; `killed` and `missed`.
"""

import os
import signal
import sys
import threading
from pathlib import Path

# A line that did not come in so many windows comes seldom: it goes back for another try.
WINDOWS_MAX = 8
# Five deaths without progress halt a lease; at its shard's end there is no more progress.
DEATHS_AT_AN_END_MAX = 4


class Tracer:
    def __init__(self, folder, window):
        import kclrun

        self.folder = Path(folder)
        self.is_at_end = window == "end"
        self.root = f"{Path(kclrun.__file__).parent}{os.sep}"
        self.known = set()
        self.target = None
        self.taken = None
        self.windows = 0
        self.has_begun = self.is_open = self.is_durable = False

    def trace(self, frame, event, arg):
        """For each call on each thread; what it returns is told of each line."""
        code = frame.f_code
        if not code.co_filename.startswith(self.root):
            return None
        if self.is_at_end:
            if self.is_handling(code):
                self.note_end(frame.f_locals["event"], frame.f_locals["self"])
        elif code.co_qualname == "FetchThread._fetch":
            self.is_open = self.has_begun
        return self.follow

    def follow(self, frame, event, arg):
        if event == "line":
            if self.is_open:
                self.meet(frame.f_code.co_filename, frame.f_lineno)
        elif event == "return" and not self.is_at_end:
            if self.is_handling(frame.f_code):
                self.is_durable |= is_durable_checkpoint(frame.f_locals["event"])
            elif self.is_durable and frame.f_code.co_qualname == "Pump.run":
                self.close_window()
        return self.follow

    def is_handling(self, code):
        """The lease thread gives an event to the core."""
        return code.co_qualname == "LeaseStateMachine.handle"

    def meet(self, path, number):
        place = f"{path[len(self.root) :]}:{number}"
        if self.target is None:
            if place not in self.known:
                self.known.add(place)
                # One write with O_APPEND; a descriptor kept open the lease process would close.
                with (self.folder / "lines").open("ab", buffering=0) as file:
                    file.write(f"{place}\n".encode())
        elif place == self.target:
            self.move("killed")
            os.kill(os.getpid(), signal.SIGKILL)

    def note_end(self, event, state_machine):
        if type(event).__name__ == "ShardExhausted" and not self.is_open:
            key = state_machine.own.key
            deaths = len(tuple((self.folder / "killed").glob(f"*-{key}")))
            if deaths < DEATHS_AT_AN_END_MAX:
                self.take(key)
            self.is_open = True

    def close_window(self):
        """The core knows that its checkpoint is durable, and the commands that follow are done."""
        self.is_durable = False
        self.has_begun, self.is_open = True, False
        self.windows += 1
        if self.target is not None and self.windows > WINDOWS_MAX:
            self.move("missed")
            self.target = None
        if self.target is None:
            self.take("any")

    def take(self, key):
        for path in sorted((self.folder / "queue").iterdir()):
            # Named after the process, so that its end tells whose line it was.
            taken = self.folder / "taken" / f"{path.name}-{os.getpid()}-{key}"
            try:
                path.rename(taken)
            except FileNotFoundError:
                continue
            self.taken, self.target, self.windows = taken, taken.read_text(), 0
            return

    def move(self, to):
        self.taken.rename(self.folder / to / self.taken.name)


def is_durable_checkpoint(event):
    outcome = type(getattr(event, "outcome", None)).__name__
    return outcome == "Applied" and type(event.change).__name__ == "Checkpoint"


def trace_this_fork():
    tracer = Tracer(os.environ["KCLRUN_RIG_SWEEP"], os.environ["KCLRUN_RIG_WINDOW"])
    sys.settrace(tracer.trace)
    threading.settrace(tracer.trace)


if "kclrun.manager.launcher" in sys.orig_argv:
    os.register_at_fork(after_in_child=trace_this_fork)
