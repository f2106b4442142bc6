"""The command line: one file a verb, and the place where the rooms are wired together.

`program.py` finds the verb and turns every error into a message and an exit code
(`messages.py`, `exit_codes.py`); `world.py` builds what talks to AWS, from the settings.
Rule: nothing heavy is imported before a verb needs it, so that `kclrun --help` is instant.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process; the exit code."""
    from kclrun.cli.program import run_program

    return run_program(sys.argv[1:])
