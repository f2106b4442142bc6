"""The exit codes of the program, for systemd and scripts (the names of sysexits.h).

A unit should not restart after 64, 65, 66, 77 and 78: an operator must act first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kclrun import errors

DRAINED: Final = os.EX_OK
# Not of sysexits.h: the question of a check or a script is answered with no.
UNMET: Final = 1
USAGE: Final = os.EX_USAGE
NO_STREAM: Final = os.EX_NOINPUT
UNAVAILABLE: Final = os.EX_UNAVAILABLE
# The manager's `ExitReason.HALTED` and `CUT_SHORT`; on Spark, the reason for the query's end.
HALTED: Final = os.EX_DATAERR
CUT_SHORT: Final = os.EX_TEMPFAIL
OUR_BUG: Final = os.EX_SOFTWARE
PERMISSION: Final = os.EX_NOPERM
CONFIGURATION: Final = os.EX_CONFIG
# Shells report this code for a program ended by SIGINT: 128 + 2.
INTERRUPTED: Final = 130

MEANINGS: Final[Mapping[int, str]] = {
    DRAINED: "done; for run: drained",
    UNMET: "lag: behind --max-behind; leases move, release: not moved; doctor, files: findings;"
    " state verify, export: a shard without its state",
    USAGE: "the command line is wrong",
    NO_STREAM: "the stream (or table) does not exist",
    UNAVAILABLE: "AWS did not answer within aws.start_timeout, nothing listens at an endpoint of"
    " this machine, or this host has nothing to give: no process, memory, descriptor or room on its"
    " disk",
    OUR_BUG: "a bug in kclrun",
    HALTED: "user code gave up: on shards (kclrun leases), or on Spark; or records were lost",
    CUT_SHORT: "stopped before all was drained and checkpointed; the rest is read again",
    PERMISSION: "AWS refused a permission, or there are no credentials",
    CONFIGURATION: "the configuration is wrong, the processor cannot be loaded, this host refuses"
    " what kclrun is built on, or the rows of the lease table are of another stream",
}

# The first match wins: subclasses come before their base classes.
_CODES: Final[tuple[tuple[type[errors.KclrunError], int], ...]] = (
    (errors.ConfigError, CONFIGURATION),
    (errors.AccessDenied, PERMISSION),
    (errors.ExpiredKeys, PERMISSION),
    (errors.NotFound, NO_STREAM),
    # "The request itself was wrong". The settings were checked, so a name or an endpoint in them is
    # wrong. A restart cannot repair this.
    (errors.InvalidRequest, CONFIGURATION),
    (errors.ServiceError, UNAVAILABLE),
    # On Spark: a person must fix the code or accept the loss.
    (errors.ProcessorError, HALTED),
    (errors.DataLoss, HALTED),
    (errors.EngineFailed, CUT_SHORT),
)


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ends the program."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    # A host may lack a resource only now. The service manager starts the program again.
    if errors.is_host_shortage(error):
        return UNAVAILABLE
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else OUR_BUG
