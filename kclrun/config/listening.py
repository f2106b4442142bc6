"""Where a server of ours listens, as people write it: `9464`, `0.0.0.0:9464`, `[::1]:9464`.

Pure.
"""

from __future__ import annotations

import ipaddress
from typing import Final

__all__ = ["parse_listen"]

_LOOPBACK: Final = "127.0.0.1"
_PORT_MAX: Final = 65535


def parse_listen(text: str | int) -> tuple[str, int]:
    """Host and port; a port alone is on loopback. Port 0 takes a free one.

    The host is an address, never a name: a name may stand for several, or for others tomorrow.
    Raises: ValueError saying what is expected.
    """
    host, colon, port = str(text).rpartition(":")
    address = host.removeprefix("[").removesuffix("]") if colon else _LOOPBACK
    address = _LOOPBACK if address == "localhost" else address
    try:
        ipaddress.ip_address(address)
        number = int(port) if port.isascii() and port.isdecimal() else -1
    except ValueError:
        number = -1
    if not 0 <= number <= _PORT_MAX:
        raise ValueError("expected a port of this machine such as 9464, or ADDRESS:PORT")
    return address, number
