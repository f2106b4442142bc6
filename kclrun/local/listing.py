"""Which shards a ListShards names: the six filters, page after page.

Source: ListShards and ShardFilter in the Kinesis API reference. A page token carries the stream,
the filter and the last shard given, for five minutes. May not know: how shards store records.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kclrun.local.refusals import expired_token, invalid_argument, validation
from kclrun.local.shards import ShardLog
from kclrun.local.tokens import seal, unseal
from kclrun.model.time import WallTime

__all__ = [
    "FILTER_KINDS",
    "PageToken",
    "ShardQuery",
    "open_page_token",
    "seal_page_token",
    "select",
]

FILTER_KINDS: Final = frozenset(
    {
        "AFTER_SHARD_ID",
        "AT_LATEST",
        "AT_TIMESTAMP",
        "AT_TRIM_HORIZON",
        "FROM_TIMESTAMP",
        "FROM_TRIM_HORIZON",
    }
)
# "Tokens expire after 300 seconds."
_TOKEN_AGE_MAX_S: Final = 300.0
_PURPOSE: Final = b"shards"


class ShardQuery(msgspec.Struct, frozen=True):
    """What is asked for; `after` is an exclusive first shard id."""

    kind: str = "FROM_TRIM_HORIZON"
    timestamp: WallTime | None = None
    shard_id: str | None = None
    after: str | None = None

    def check(self) -> None:
        """Raises: InvalidRequest if the filter's fields do not go together."""
        if self.kind not in FILTER_KINDS:
            raise validation(
                "Value at 'shardFilter.type' failed to satisfy constraint: Member must satisfy"
                f" enum value set: [{', '.join(sorted(FILTER_KINDS))}]"
            )
        if ("TIMESTAMP" in self.kind) != (self.timestamp is not None):
            raise invalid_argument(
                f"ShardFilter type {self.kind}: Timestamp is required by AT_TIMESTAMP and"
                " FROM_TIMESTAMP and not allowed with the others."
            )
        if (self.kind == "AFTER_SHARD_ID") != (self.shard_id is not None):
            raise invalid_argument(
                f"ShardFilter type {self.kind}: ShardId is required by AFTER_SHARD_ID and not"
                " allowed with the others."
            )


class PageToken(msgspec.Struct, frozen=True):
    """Where a listing goes on."""

    stream_id: int
    issued_at: WallTime
    query: ShardQuery


def select(shards: Iterable[ShardLog], query: ShardQuery, horizon: WallTime) -> list[ShardLog]:
    """The shards a query names, in the order of their ids; `horizon` is the stream's trim time."""
    return [
        shard
        for shard in shards
        if (query.after is None or shard.shard_id > query.after) and _matches(shard, query, horizon)
    ]


def _matches(shard: ShardLog, query: ShardQuery, horizon: WallTime) -> bool:
    match query.kind:
        case "AT_LATEST":
            return shard.closed_at is None
        case "AFTER_SHARD_ID":
            return shard.shard_id > (query.shard_id or "")
        case "AT_TRIM_HORIZON":
            # A shard that ended at the very horizon gives way to its children: the answer tiles.
            is_still_open = shard.closed_at is None or shard.closed_at > horizon
            return shard.created_at <= horizon and is_still_open
        case "AT_TIMESTAMP":
            at = _timestamp(query, horizon)
            return shard.created_at <= at and (shard.closed_at is None or shard.closed_at >= at)
        case "FROM_TIMESTAMP":
            at = _timestamp(query, horizon)
            return shard.closed_at is None or shard.closed_at >= at
        case _:
            return True


def _timestamp(query: ShardQuery, horizon: WallTime) -> WallTime:
    """The query's time, "corrected to TRIM_HORIZON" where it is older than that."""
    return max(query.timestamp or horizon, horizon)


def seal_page_token(secret: bytes, token: PageToken) -> str:
    return seal(secret, _PURPOSE, msgspec.json.encode(token))


def open_page_token(secret: bytes, text: str, now: WallTime) -> PageToken:
    """Raises: InvalidRequest for a token that is not ours or is older than five minutes."""
    payload = unseal(secret, _PURPOSE, text)
    if payload is None:
        raise invalid_argument("Invalid NextToken.")
    token = msgspec.json.decode(payload, type=PageToken)
    if now - token.issued_at > _TOKEN_AGE_MAX_S:
        raise expired_token(f"NextToken is older than {_TOKEN_AGE_MAX_S:.0f} seconds.")
    return token
