"""Who reads a lease, as far as it is watched."""

from __future__ import annotations

from typing import Protocol

from kclrun.model.lease import OWNER_PREFIX, LeaseKey, OwnerId

__all__ = ["Reader", "owner_of"]


class Reader(Protocol):
    """One incarnation of a lease process, or of a Java consumer. `who` begins with the name of its
    host; a lease process adds a slash and its number."""

    key: LeaseKey
    who: str


def owner_of(who: str) -> OwnerId:
    """In whose name a kclrun manager, or a lease process of its, writes."""
    return OwnerId(OWNER_PREFIX + who.partition("/")[0])
