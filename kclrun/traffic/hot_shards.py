"""Which shards are hot, since when and until when, and the advice that applies to each. Pure.

It knows the heat of the shards that one manager reads (`hot_keys.py`), and no partition key.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kclrun.model.lease import LeaseKey
from kclrun.model.quotas import SHARD_READ_BYTES_MAX
from kclrun.model.stream import shard_id_of, stream_name_of, stream_of
from kclrun.traffic.hot_keys import LOAD_WEIGHED_MIN, HotKey, ShardHeat


class _Bound(msgspec.Struct, frozen=True):
    """A value at or above `begin` makes a shard hot; below `end` it is not hot any more."""

    begin: float
    end: float

    def holds(self, value: float, *, is_hot: bool) -> bool:
        return value >= (self.end if is_hot else self.begin)


# A rate is an average over one to two minutes. Producers do not send evenly: at 80 % of a limit on
# average, single seconds exceed it, and the service throttles by the second. Below 60 % again: a
# rate that swings by a tenth around the beginning is one event. The heavier side of a split is
# below two thirds (`HELPED_MAX`) of the limit, so the shards of a split are not hot.
_LOAD: Final = _Bound(0.8, 0.6)
# The same for the reads of all consumers without fan-out, of which we see only ours.
_READ: Final = _Bound(0.8, 0.6)
# Throttling by itself is normal where applications share the five reads a second. It is a problem
# if a third of the requests fail and the reader is behind.
_THROTTLED: Final = _Bound(1 / 3, 0.1)
_BEHIND_MS_MIN: Final = 10_000
# Far above the others: four times their median, of three others at least, and a quarter of a
# shard's limit, for a shard that is nearly empty takes no harm.
_TIMES: Final = _Bound(4.0, 3.0)
_TIMES_LOAD: Final = _Bound(0.25, LOAD_WEIGHED_MIN)
_OTHERS_MIN: Final = 3
# Splitting helps if the heavier side is left with two thirds at most. No number of splits makes the
# side of a key lighter than the key.
HELPED_MAX: Final = 2 / 3


class HotShard(msgspec.Struct, frozen=True):
    """Why a shard is hot, in words, and the advice; both without a partition key."""

    reason: str
    advice: str


class Heated(msgspec.Struct, frozen=True):
    """A shard has become hot."""

    key: LeaseKey
    hot: HotShard


class Cooled(msgspec.Struct, frozen=True):
    """A shard is not hot any more; `reason` is its traffic, in words."""

    key: LeaseKey
    reason: str


Change = Heated | Cooled


class HotShards:
    """The hot shards of one manager, over time.

    `stream_name` is for the commands of an application with one stream; with several, the lease key
    names the stream.
    """

    def __init__(self, stream_name: str) -> None:
        self._stream_name = stream_name
        self._hot: dict[LeaseKey, HotShard] = {}

    @property
    def hot(self) -> Mapping[LeaseKey, HotShard]:
        """The hot shards, with the reason and the advice of the last `look`."""
        return self._hot

    def look(self, heats: Mapping[LeaseKey, ShardHeat | None]) -> list[Change]:
        """The changes since the last call: each beginning and each end once.

        `heats` has every lease of the manager; None means that its heat is not known now, which
        changes nothing. A lease that is missing has left, and is forgotten without a change.
        """
        known = {key: heat for key, heat in heats.items() if heat is not None}
        loads = {key: heat.load for key, heat in known.items()}
        changes: list[Change] = []
        for key in [key for key in self._hot if key not in heats]:
            del self._hot[key]
        for key, heat in sorted(known.items()):
            was_hot = key in self._hot
            reason = next(_reasons(heat, loads, key, is_hot=was_hot), None)
            if reason is not None:
                words = (
                    _READS_ADVICE if reason.is_of_reads else advice(heat, key, self._stream_name)
                )
                self._hot[key] = HotShard(reason.words, words)
                changes += [] if was_hot else [Heated(key, self._hot[key])]
            elif was_hot:
                del self._hot[key]
                changes.append(Cooled(key, traffic(heat)))
        return changes


class _HeatReason(msgspec.Struct, frozen=True):
    """Why a shard is hot. `is_of_reads`: because of what consumers read, not of what is put."""

    words: str
    is_of_reads: bool = False


def _reasons(
    heat: ShardHeat, loads: Mapping[LeaseKey, float], key: LeaseKey, *, is_hot: bool
) -> Iterator[_HeatReason]:
    """Why the shard is hot, the strongest reason first. `loads` are those of all shards."""
    if _LOAD.holds(heat.load, is_hot=is_hot):
        yield _HeatReason(f"{traffic(heat)}: {heat.load:.0%} of the limit of a shard")
    is_behind = heat.behind_ms >= _BEHIND_MS_MIN
    if is_behind and _THROTTLED.holds(heat.throttled, is_hot=is_hot):
        share, behind_s = f"{heat.throttled:.0%}", round(heat.behind_ms / 1000)
        words = f"{share} of the reads are throttled, and the reader is {behind_s} s behind"
        yield _HeatReason(words, is_of_reads=True)
    # A backlog is read at the limit, which harms nothing: the limit matters if the reader is at the
    # tip.
    read = heat.read_bytes_per_s / SHARD_READ_BYTES_MAX
    if not is_behind and _READ.holds(read, is_hot=is_hot):
        words = f"{_bytes(heat.read_bytes_per_s)}/s out: {read:.0%} of the limit of a shard"
        yield _HeatReason(words, is_of_reads=True)
    if len(loads) > _OTHERS_MIN and _TIMES_LOAD.holds(heat.load, is_hot=is_hot):
        usual = statistics.median(load for other, load in loads.items() if other != key)
        if _TIMES.holds(heat.load / usual if usual else math.inf, is_hot=is_hot):
            times = f"{heat.load / usual:.0f} times" if usual else "far more than"
            yield _HeatReason(f"{traffic(heat)}: {times} what the other shards of this manager get")


def traffic(heat: ShardHeat) -> str:
    """What producers put into the shard, in words."""
    return f"{traffic_in_words(heat.in_bytes_per_s, heat.in_records_per_s)} in"


def traffic_in_words(bytes_per_s: float, records_per_s: float) -> str:
    """Two rates, in decimal units, as those of the limits of Kinesis."""
    return f"{_bytes(bytes_per_s)}/s and {records_per_s:,.0f} records/s"


def _bytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


_READS_ADVICE: Final = (
    "the applications that poll this shard share 2 MB and 5 reads a second: read it by enhanced"
    " fan-out (fetch.mode: fan-out), or with fewer applications"
)


def advice(heat: ShardHeat, key: LeaseKey, stream_name: str) -> str:
    """What an operator can do about what producers put, in words; with the command, where a split
    helps."""
    heaviest = heat.keys[0] if heat.keys else None
    if heaviest is not None and heaviest.share > HELPED_MAX and heat.routing != "hidden":
        return (
            f"{key_in_words(heaviest)} carries {_share(heaviest.share, heat.error)}: splitting"
            " cannot help, because a key is in one shard. Spread it over several partition keys"
        )
    if heat.routing == "hidden":
        return (
            "its records do not lie where their partition keys would put them: producers set"
            " explicit hash keys, which a consumer does not see. Choose the position of a split"
            " from the hash keys that they set"
        )
    if not heat.split_at:
        return "too few records were sampled to name a key or a position for a split"
    lighter = 1.0 - heat.split_share
    again = " (a heavy key keeps the rest together)" if heat.split_share > HELPED_MAX else ""
    return (
        f"split at hash key {heat.split_at}: {heat.split_share:.0%} of the bytes on one side,"
        f" {lighter:.0%} on the other{again}: {split_command(heat.split_at, key, stream_name)}"
    )


def split_command(at: str, key: LeaseKey, stream_name: str) -> str:
    """The command that splits a shard at a hash key."""
    name = stream_name_of(stream_of(key)) or stream_name
    return (
        f"aws kinesis split-shard --stream-name {shlex.quote(name)}"
        f" --shard-to-split {shlex.quote(shard_id_of(key))} --new-starting-hash-key {at}"
    )


def key_in_words(key: HotKey) -> str:
    """A key without its text."""
    return f"the partition key with hash key {key.hash_key}"


def _share(share: float, error: float) -> str:
    return f"{share:.0%} (± {error * 100:.0f})"
