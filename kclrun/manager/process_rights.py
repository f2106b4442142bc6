"""What a process may do and what it is given: prctl, limits, environment, descriptors [S9].

Rule: each function changes the calling process only, and works between fork and the first line of
anyone else's code. Look next: `launcher.py`, which calls most of them in each lease process.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = [
    "adopt_orphans",
    "allowed_environment",
    "close_descriptors_except",
    "drop_rights",
    "name_process",
    "speak_on_the_channel_only",
]

# From <linux/prctl.h>; the numbers are part of the kernel's stable interface.
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

# What Python, OpenSSL, proxies, locale and the AWS libraries of user code read. A further variable
# is passed when it is named in KCLRUN_PASS_ENV, separated by commas.
_ALLOWED: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|NO_COLOR|COLUMNS"
    r"|PYTHON[A-Z0-9_]*|VIRTUAL_ENV|LD_LIBRARY_PATH|SSL_CERT_(?:FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|(?i:https?_proxy|no_proxy|all_proxy)|XDG_[A-Z_]+|AWS_[A-Z0-9_]+|KCLRUN_[A-Z0-9_]+"
)
# The web page's token opens the page: nobody but the manager needs it.
_NEVER: Final = re.compile(r"KCLRUN_[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD)[A-Z0-9_]*")


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of `environment` that lease processes get."""
    named = {name.strip() for name in environment.get("KCLRUN_PASS_ENV", "").split(",")}
    return {
        name: value
        for name, value in environment.items()
        if (_ALLOWED.fullmatch(name) and not _NEVER.fullmatch(name)) or name in named
    }


def adopt_orphans() -> None:
    """Be the parent of every descendant whose parent dies, so that we can reap it.

    Raises: OSError (no kernel we run on refuses it).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """The name in `ps` and `top`; the kernel keeps 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.create_string_buffer(name.encode()[:15]))


def drop_rights() -> None:
    """No core dumps (they would hold payloads and keys), no setuid gains, files for the owner."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o077)


def speak_on_the_channel_only() -> None:
    """A session of its own and no heed of outside signals: the manager decides when to stop.

    Handlers of the launcher do not live on in its children.
    """
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def close_descriptors_except(kept: Iterable[int]) -> None:
    """Close all but stdin, stdout, stderr and `kept`: a sibling's channel held open here would
    hide the manager's death from that sibling."""
    keep = {0, 1, 2, *kept}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, not paths
        fd = int(name)
        if fd not in keep:
            # The listing's own descriptor is in it, and closed by now.
            try:
                os.close(fd)
            except OSError:
                continue


def _prctl(option: int, argument: int | ctypes.Array[ctypes.c_char]) -> None:
    if _LIBC.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
