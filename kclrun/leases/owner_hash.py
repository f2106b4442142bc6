"""An order of owners that nobody chooses, and all managers agree on."""

from __future__ import annotations

import functools
import hashlib

from kclrun.model.lease import OwnerId

__all__ = ["owner_hash"]


# Four times the owners of a large fleet, for they are new at every start.
@functools.lru_cache(maxsize=4096)
def owner_hash(owner: OwnerId) -> bytes:
    """The same in every process; asked for each owner in each plan, so the answers are kept."""
    return hashlib.blake2b(owner.encode(), digest_size=8).digest()
