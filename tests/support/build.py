"""Values that tests are made of: each takes what matters to the test and defaults the rest."""

from typing import Any

from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.record import Record
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import ALL_HASH_KEYS, HashRange, Shard
from kclrun.model.time import WallTime

NOW = WallTime(1_780_000_000.0)


def position(number: int | str, sub: int = 0) -> ExtendedSequenceNumber:
    """The position of a record; 0 is the beginning of the shard."""
    return ExtendedSequenceNumber(str(number), sub) if number else TRIM_HORIZON


def key(shard: int | str) -> LeaseKey:
    """Of a shard by its number, or by its id."""
    return LeaseKey(f"shardId-{shard:012d}" if isinstance(shard, int) else shard)


def shard(
    shard_id: int | str = "s0",
    *parents: int | str,
    keys: HashRange = ALL_HASH_KEYS,
    begin: str = "1",
    end: str | None = None,
) -> Shard:
    """An open one, unless it has an end."""
    return Shard(key(shard_id), keys, begin, end, *map(key, parents))


def lease(
    shard: int | str = "s0", checkpoint: ExtendedSequenceNumber = TRIM_HORIZON, **fields: Any
) -> Lease:
    return Lease(key=key(shard), checkpoint=checkpoint, **fields)


def records(*numbers: int, data: bytes = b"x", arrived_at: float = 0.0) -> list[Record]:
    return [Record(data, "k", str(number), arrived_at) for number in numbers]


def settings(text: str, *overrides: str, **environment: str) -> Settings:
    return settings_of(text, overrides, environment=environment, now=NOW)
