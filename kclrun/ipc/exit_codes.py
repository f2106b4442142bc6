"""The exit codes of a lease process: for people, and for tests.

A code proves nothing, because user code may exit with any code. An exit that neither a transition
on the ring nor the status slot confirms counts as a crash.
"""

from __future__ import annotations

from typing import Final

# Ended, released or drained: nothing is left to do.
DONE: Final = 0
# 1 and 2 are not used: Python and shells exit with them for many reasons.
UNCLAIMED: Final = 3
LOST: Final = 4
# The processor failed finally: the lease is to be halted, not restarted.
FAILED: Final = 5
# The next process begins from the row, which is ours as far as this one knows.
REPLACED: Final = 6
# `EX_SOFTWARE` of sysexits: an invariant was violated; the manager exits with the same code.
BUG: Final = 70
# `EX_OSERR` of sysexits: this host cannot serve the lease now.
HOST: Final = 71

NAMES: Final = {
    DONE: "done",
    UNCLAIMED: "unclaimed",
    LOST: "lost",
    FAILED: "failed",
    REPLACED: "replaced",
    BUG: "bug",
    HOST: "host",
}
