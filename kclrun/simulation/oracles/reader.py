"""Who reads a lease, as far as it is watched."""

from __future__ import annotations

from typing import Protocol

from kclrun.model.lease import LeaseKey

__all__ = ["Reader"]


class Reader(Protocol):
    """One incarnation of a lease process, or of a Java consumer. `who` begins with the name of its
    host; a lease process adds a slash and its number."""

    key: LeaseKey
    who: str
