"""How long a test waits for what must come: a limit says that something hangs, and nothing else."""

import time

# What takes 2 s on a quiet machine takes 40 s at a load of 20 on two cores; seven times that is no
# load any more.
HUNG_S = 300.0
# A test may meet a few such waits, each well below; the mark `timeout` gives one more, never less.
TEST_S = 600.0


def until(condition, timeout_s=HUNG_S, *, every_s=0.05, why=lambda: ""):
    """Poll until the condition holds, at last every `every_s`, and return what it was; fail after
    the deadline."""
    timeout_s = max(timeout_s, HUNG_S)
    deadline, pause_s = time.monotonic() + timeout_s, 0.001
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s. {why()}"
        time.sleep(pause_s)
        pause_s = min(every_s, 1.3 * pause_s)
    return found
