"""How a lease process ends, in its exit code: what is left to say when its ring could not.

May not know: who reads them. Rule: any other code, and any signal, is a crash. The details of an
end are a transition on the ring; the code only stands in for one that found no room.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BUG", "DONE", "FAILED", "LOST", "NAMES", "UNCLAIMED"]

# Ended, released or drained: nothing is owed.
DONE: Final = 0
# 1 and 2 are what Python and shells use for anything.
UNCLAIMED: Final = 3
LOST: Final = 4
# The processor failed for good: the lease is to be halted, not restarted.
FAILED: Final = 5
# `EX_SOFTWARE` of sysexits: an invariant was violated; the same code the manager ends with.
BUG: Final = 70

NAMES: Final = {
    DONE: "done",
    UNCLAIMED: "unclaimed",
    LOST: "lost",
    FAILED: "failed",
    BUG: "bug",
}
