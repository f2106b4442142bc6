"""How the program ends, as numbers that systemd and scripts act on (the names of sysexits.h).

A unit should not restart 64, 65, 66, 77 and 78: nothing changes until a person does something.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from kclrun.errors import (
    AccessDenied,
    ConfigError,
    DataLoss,
    EngineFailed,
    InvalidRequest,
    KclrunError,
    NotFound,
    ProcessorError,
    ServiceError,
)

__all__ = [
    "CONFIGURATION",
    "CUT_SHORT",
    "DRAINED",
    "HALTED",
    "INTERRUPTED",
    "MEANINGS",
    "NO_STREAM",
    "OUR_BUG",
    "PERMISSION",
    "UNAVAILABLE",
    "UNMET",
    "USAGE",
    "exit_code_of",
]

DRAINED: Final = os.EX_OK
# Not of sysexits.h: what checks and scripts ask for, answered with no.
UNMET: Final = 1
USAGE: Final = os.EX_USAGE
NO_STREAM: Final = os.EX_NOINPUT
UNAVAILABLE: Final = os.EX_UNAVAILABLE
# The manager's `ExitReason.HALTED` and `CUT_SHORT`; on Spark, what ended the query.
HALTED: Final = os.EX_DATAERR
CUT_SHORT: Final = os.EX_TEMPFAIL
OUR_BUG: Final = os.EX_SOFTWARE
PERMISSION: Final = os.EX_NOPERM
CONFIGURATION: Final = os.EX_CONFIG
# What shells report for a program ended by SIGINT: 128 + 2.
INTERRUPTED: Final = 130

MEANINGS: Final[Mapping[int, str]] = {
    DRAINED: "done; for run: drained",
    UNMET: "lag: behind --max-behind; leases move, release: not moved; doctor: findings",
    USAGE: "the command line is wrong",
    NO_STREAM: "the stream (or table) does not exist",
    UNAVAILABLE: "AWS did not answer within aws.start_timeout",
    OUR_BUG: "a bug in kclrun",
    HALTED: "user code gave up: on shards (kclrun leases), or on Spark; or records were lost",
    CUT_SHORT: "stopped before it was drained; what was not checkpointed is read again",
    PERMISSION: "AWS refused a permission, or there are no credentials",
    CONFIGURATION: "the configuration is wrong, or the processor cannot be loaded",
}

# First match wins: leaves before branches.
_CODES: Final[tuple[tuple[type[KclrunError], int], ...]] = (
    (ConfigError, CONFIGURATION),
    (AccessDenied, PERMISSION),
    (NotFound, NO_STREAM),
    # "The request itself was wrong": with checked settings, a name or an endpoint that AWS knows
    # better about. Restarting will not mend it.
    (InvalidRequest, CONFIGURATION),
    (ServiceError, UNAVAILABLE),
    # On Spark: a person mends the code, or says that the loss is accepted.
    (ProcessorError, HALTED),
    (DataLoss, HALTED),
    (EngineFailed, CUT_SHORT),
)


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error that ends the program."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else OUR_BUG
