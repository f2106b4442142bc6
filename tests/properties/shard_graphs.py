"""All shard graphs of a few shards, and every way their rows may stand: an odometer of choices.

A graph grows from one or more first shards by splits of a leaf and merges of two neighbours; graphs
that differ only in the order of unrelated reshards are one.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard

# Shards are cut in halves at most five times.
_UNITS = 2**5
_UNIT = (HASH_KEY_MAX + 1) // _UNITS


class Odometer:
    """Runs through every combination of choices: ask `choose` as often as it takes, then `turn`.

    The choices of one round are the digits; `turn` moves the last one that has not run out.
    """

    def __init__(self) -> None:
        self._digits: list[list[int]] = []  # each with its limit
        self._at = 0

    def choose(self, limit: int) -> int:
        """A number from 0 to below `limit`."""
        if self._at == len(self._digits):
            self._digits.append([0, limit])
        digit = self._digits[self._at]
        assert digit[1] == limit, "the same choices must be offered in every round"
        self._at += 1
        return digit[0]

    def turn(self) -> bool:
        """Go on to the next combination; False when all were there."""
        self._at = 0
        while self._digits and self._digits[-1][0] + 1 == self._digits[-1][1]:
            self._digits.pop()
        if not self._digits:
            return False
        self._digits[-1][0] += 1
        return True


class Graph(NamedTuple):
    """`shards` in the order in which they came to be; the first `roots` were there from the
    start. `came` counts those that are there after each reshard."""

    roots: int
    shards: tuple[Shard, ...]
    came: tuple[int, ...]

    def listed(self, reshards: int | None = None) -> tuple[Shard, ...]:
        """What the service lists after so many reshards: parents are closed, all others open."""
        count = self.came[-1 if reshards is None else reshards]
        there = self.shards[:count]
        closed = {parent for shard in there for parent in shard.parents}
        return tuple(
            Shard(
                shard.shard_id,
                shard.hash_range,
                shard.starting_sequence_number,
                "9" if shard.shard_id in closed else None,
                *shard.parents,
            )
            for shard in there
        )


def all_graphs(shards_max: int) -> Iterator[Graph]:
    """Every graph of at most so many shards, each once."""
    seen = set()
    odometer = Odometer()
    while True:
        graph, form = _grown(odometer, shards_max)
        if graph is not None and form not in seen:
            seen.add(form)
            yield graph
        if not odometer.turn():
            return


def _grown(odometer: Odometer, shards_max: int):
    roots = 1 + odometer.choose(shards_max)
    # A leaf: its first unit of the hash range, the unit after its last one, its form, its id.
    bounds = [place * _UNITS // roots for place in range(roots + 1)]
    leaves = [(bounds[i], bounds[i + 1], ("root", i, roots), f"s{i}") for i in range(roots)]
    shards = [_shard(f"s{i}", leaf, 0, ()) for i, leaf in enumerate(leaves)]
    forms = [leaf[2] for leaf in leaves]
    came = [len(shards)]
    while True:
        splits = len(leaves) if len(shards) + 2 <= shards_max else 0
        merges = len(leaves) - 1 if len(shards) + 1 <= shards_max else 0
        choice = odometer.choose(1 + splits + merges)
        if choice == 0:
            return Graph(roots, tuple(shards), tuple(came)), frozenset(forms)
        number = len(came)
        if choice <= splits:
            leaf = leaves[choice - 1]
            new = _halves(leaf, len(shards))
            if new is None:
                return None, None
            parents = (leaf[3],)
            leaves[choice - 1 : choice] = new
        else:
            place = choice - splits - 1
            left, right = leaves[place], leaves[place + 1]
            new = [(left[0], right[1], (left[2], right[2]), f"s{len(shards)}")]
            parents = (left[3], right[3])
            leaves[place : place + 2] = new
        shards += [_shard(leaf[3], leaf, number, parents) for leaf in new]
        forms += [leaf[2] for leaf in new]
        came.append(len(shards))


def _halves(leaf, count: int):
    first, after, form, _ = leaf
    middle = (first + after) // 2
    if middle == first:
        return None
    return [
        (first, middle, (form, "left"), f"s{count}"),
        (middle, after, (form, "right"), f"s{count + 1}"),
    ]


def _shard(name: str, leaf, number: int, parents) -> Shard:
    hash_range = HashRange(leaf[0] * _UNIT, leaf[1] * _UNIT - 1)
    return Shard(name, hash_range, str(number + 1), None, *parents)
