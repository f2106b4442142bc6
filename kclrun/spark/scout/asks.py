"""What the scout asks of the service, and what can come of it: types, no flags."""

from __future__ import annotations

import msgspec

from kclrun.errors import ServiceError
from kclrun.model.reading import StartPoint
from kclrun.model.shard import Shard
from kclrun.ports import FetchedPage

__all__ = [
    "Answer",
    "AskListing",
    "AskPage",
    "Delayed",
    "Expired",
    "Gone",
    "Listed",
    "NotListed",
    "Outcome",
    "Paged",
    "Read",
    "Refused",
    "Slowed",
]


class Read(msgspec.Struct, frozen=True):
    """Where a walk wants to read: on from a token, or from a start that needs an iterator first."""

    limit: int
    token: str | None = None
    opening: StartPoint | None = None


class AskPage(msgspec.Struct, frozen=True):
    """One GetRecords of one shard, after one GetShardIterator where `read` has no token.

    `turn` tells answers to this question from those to questions that are no longer open.
    """

    shard_id: str
    turn: int
    read: Read


class AskListing(msgspec.Struct, frozen=True):
    """A complete ListShards."""


class Paged(msgspec.Struct, frozen=True):
    """A page, and the iterator that gave it: it stands before the page's first record."""

    token: str
    page: FetchedPage
    sent_at: float
    received_at: float


class Expired(msgspec.Struct, frozen=True):
    """The iterator was too old."""


class Slowed(msgspec.Struct, frozen=True):
    """Throttled: nothing happened. `token` if the iterator was made before that."""

    token: str | None
    error: ServiceError


class Delayed(msgspec.Struct, frozen=True):
    """No answer, or a server's error: harmless to ask again. `token` as with `Slowed`."""

    token: str | None
    error: ServiceError


class Gone(msgspec.Struct, frozen=True):
    """The service knows no such shard, or no such stream."""

    error: ServiceError
    sent_at: float


class Refused(msgspec.Struct, frozen=True):
    """The request was called invalid: a time that has not come yet, a number of another stream."""

    error: ServiceError


class Listed(msgspec.Struct, frozen=True):
    """All shards, as of some moments between sending and receiving."""

    shards: tuple[Shard, ...]
    sent_at: float


class NotListed(msgspec.Struct, frozen=True):
    """The listing was throttled or failed: what is known stays known."""

    error: ServiceError


Outcome = Paged | Expired | Slowed | Delayed | Gone | Refused
Answer = Outcome | Listed | NotListed
