"""Who leads a Java fleet: `DeterministicShuffleShardSyncLeaderDecider`.

Every worker shuffles the sorted owners of all rows in the same way, with `java.util.Random` of a
fixed seed, and the first is the leader. An owner of another kind can be drawn as well as any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from kclrun.model.lease import Lease, OwnerId

__all__ = ["leader_of"]

_SEED: Final = 1947
# The linear congruential generator of `java.util.Random`, as its documentation states it.
_MULTIPLIER: Final = 0x5DEECE66D
_ADDEND: Final = 0xB
_MASK: Final = (1 << 48) - 1


def leader_of(leases: Iterable[Lease]) -> OwnerId | None:
    """None if nobody owns anything: then everybody leads."""
    owners = sorted({lease.owner for lease in leases if lease.owner is not None})
    if not owners:
        return None
    _shuffle(owners)
    return owners[0]


def _shuffle(owners: list[OwnerId]) -> None:
    """`Collections.shuffle`: from the last to the second, each swapped with one up to itself."""
    bits = _bits_31()
    for size in range(len(owners), 1, -1):
        at = _below(size, bits)
        owners[size - 1], owners[at] = owners[at], owners[size - 1]


def _bits_31() -> Iterator[int]:
    """`Random.next(31)`, one after the other."""
    state = (_SEED ^ _MULTIPLIER) & _MASK
    while True:
        state = (state * _MULTIPLIER + _ADDEND) & _MASK
        yield state >> 17


def _below(bound: int, bits: Iterator[int]) -> int:
    """`Random.nextInt(bound)`."""
    if bound & (bound - 1) == 0:
        return (bound * next(bits)) >> 31
    drawn = next(bits)
    while drawn - drawn % bound + bound - 1 >= 1 << 31:
        drawn = next(bits)
    return drawn % bound
