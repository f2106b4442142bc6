"""Shards that are trimmed at the moment they are closed, and which of their records that excuses.

What a reader has not read by then is gone, with what is left of the shard's ancestors: Kinesis
forgets those first. Excused is a record of such a shard that nobody was
given, if the product has said so: an event `records_expired` of that shard, with a position below
the record; or, of a shard that never had a lease, one of the shard it came of that says so. Nothing
else is.
"""

import time
from typing import NamedTuple

_SENTINELS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")


class Trims:
    """`arm` has the next closed shard trimmed; `closed` is called once for each reshard.

    `trim(shard_id)` does it, in the thread that reshards: a few milliseconds after the close, while
    the last records are unread. `parents` has those of each shard. `at` says when each was trimmed.
    """

    def __init__(self, trim, parents, rng):
        self._trim = trim
        self._parents = parents
        self._rng = rng
        self._is_armed = False
        self.at = {}

    @property
    def shards(self):
        """Those trimmed so far, whatever the other thread does meanwhile."""
        return frozenset(self.at.copy())

    def arm(self):
        """False if it waits for a reshard already."""
        was_armed, self._is_armed = self._is_armed, True
        return not was_armed

    def closed(self, shards):
        if self._is_armed:
            self._is_armed = False
            chosen = self._rng.choice(shards)
            self._trim(chosen)
            now, found = time.monotonic(), [chosen]
            while found:
                # The ancestors of one that was trimmed before were trimmed with it.
                if (shard := found.pop()) not in self.at:
                    self.at[shard] = now
                    found += self._parents.get(shard, ())


class Told(NamedTuple):
    """What an event of the product says: behind this checkpoint, records of this shard are lost;
    with `children`, children of it as well, whole, which never had a lease."""

    shard: str
    position: str
    children: bool = False


def expired_records(put, delivered, trimmed, reported, parents):
    """The sequence numbers of the records that are excused."""
    behind = dict.fromkeys(unnamed_shards(trimmed, reported, parents), -1)
    for each in reported:
        number = -1 if each.position in _SENTINELS else int(each.position)
        behind[each.shard] = max(number, behind.get(each.shard, -1))
    return {
        number
        for shard in trimmed
        if shard in behind
        for number, _, _ in put.get(shard, ())
        if number not in delivered and int(number) > behind[shard]
    }


def unnamed_shards(trimmed, reported, parents):
    """Trimmed shards that no event names, and one tells the loss of: the children of a shard whose
    event says so, and theirs. The ids of shards grow as they are made."""
    named = {each.shard for each in reported}
    found = {each.shard for each in reported if each.children}
    for shard in sorted(set(trimmed) - named):
        if any(parent in found for parent in parents.get(shard, ())):
            found.add(shard)
    return found - named


def untrue_expiries(trimmed, reported):
    """What the product says has expired, and nobody trimmed."""
    return [
        f"{shard}: records_expired, and nobody trimmed this shard [P13]"
        for shard in sorted({each.shard for each in reported} - set(trimmed))
    ]
