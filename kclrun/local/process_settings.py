"""What the parent tells its two children, and what they say back.

Holds the frame only, so that the parent need not load a server. Look next: `server.py`,
`serving.py`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.local.limits import STORED_BYTES_MAX
from kclrun.local.signatures import Credentials

__all__ = ["READY", "ProcessSettings"]

# What a child writes once it accepts connections.
READY: Final = b"ready\n"


class ProcessSettings(msgspec.Struct, frozen=True):
    """What a child is told. `elsewhere_port` is where the face passes on what is not Kinesis."""

    credentials: Credentials | None = None
    limits: bool = False
    settle_s: float = 0.0
    stored_bytes_max: int = STORED_BYTES_MAX
    elsewhere_port: int | None = None
