"""Notifies systemd, or another service manager that started us: the datagrams of sd_notify(3).

A notification never waits. It does not know when a notification is due.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from kclrun.errors import SettingsError

_US_PER_S: Final = 1_000_000


class NotifySocket:
    """A datagram socket of a service manager: a path, or with `@` a name in the abstract space."""

    def __init__(self, address: str) -> None:
        self.address = address
        # sd_notify(3): the @ replaces the null byte, which an environment cannot contain.
        self._target = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(0.0)

    def tell(self, assignments: Mapping[str, str]) -> None:
        """Send the assignments as one datagram, all or nothing.

        A value must be one line. Raises: OSError if no process listens, or if the service manager
        has not read for so long that the queue is full.
        """
        lines = [f"{name}={value}" for name, value in assignments.items()]
        assert not any("\n" in line for line in lines), "a line break would begin another word"
        self._socket.sendto("\n".join(lines).encode(), self._target)

    def close(self) -> None:
        self._socket.close()


def notify_socket(environment: Mapping[str, str]) -> NotifySocket | None:
    """The socket of the service manager that started us, or None if it wants no notification.

    Raises: SettingsError for an address of another kind (systemd uses those for whole machines).
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return None
    if len(address) < 2 or address[0] not in "/@":
        raise SettingsError(f"NOTIFY_SOCKET: expected a path, or @ and a name, got {address!r}")
    return NotifySocket(address)


def watchdog_s(environment: Mapping[str, str]) -> float | None:
    """The longest time between two notifications (WatchdogSec), or None without a watchdog.

    As sd_watchdog_enabled(3): a WATCHDOG_PID that is not ours means another process.
    Raises: SettingsError for a period that is not a number above 0.
    """
    text = environment.get("WATCHDOG_USEC", "")
    if not text or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise SettingsError(f"WATCHDOG_USEC: expected microseconds, got {text!r}")
    return int(text) / _US_PER_S
