"""Everything that can come about with the rows of one shard graph, step by step from no row at all.

The stream is resharded; managers scan, list (the listing may be one reshard old), plan, and write
what they planned when it suits them, or die in between; lease processes begin what may begin,
create the children of what they read to its end, and end it, or die in between; a client that never
creates children may end a shard too. Two plans may be under way at once.

One bound: no creation is on its way for as long as it takes to read a shard to its end and to clean
up after it. One that arrives even later finds no row, and nothing that it could be judged by.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from kclrun.lease.commands import ListShards, ReadRows
from kclrun.leases.table_view import have_ended
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease
from kclrun.model.sequence import LATEST, SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, Shard
from kclrun.protocol.writes import Applied, CreateChildren, CreateLease, DeleteEnded, LeaseChange
from tests.properties.shard_graphs import Graph
from tests.unit.lease.lease_driver import shard_end

ME = "kclrun::a:1"
# Where every shard that was begun stands until it ends.
BEGUN = ExtendedSequenceNumber("5")
# Each round begins or ends at least one of a few shards.
_ROUNDS_MAX = 40
Rows = dict[str, Lease]
Planner = Callable[..., list[LeaseChange]]


class Life(NamedTuple):
    """`reshards` so far; `seen` is a scan that no plan was made of yet; `plans` what is still to be
    written of each; `gone` the keys that were deleted; `strangers` how many shards may still be
    ended by a client that creates no children."""

    reshards: int
    rows: Rows
    seen: Rows | None = None
    plans: tuple[tuple[LeaseChange, ...], ...] = ()
    gone: frozenset[str] = frozenset()
    strangers: int = 1

    @property
    def key(self) -> object:
        """Equal for lives that are the same."""
        seen = None if self.seen is None else frozenset(self.seen.values())
        rows = frozenset(self.rows.values())
        return (self.reshards, rows, seen, self.plans, self.gone, self.strangers)


def lives(graph: Graph, start: ExtendedSequenceNumber, plan: Planner, plans_max: int):
    """All of them, each once, with the one it came from (None for the first)."""
    first = Life(0, {})
    known = {first.key}
    waiting = [(first, None)]
    while waiting:
        life, before = waiting.pop()
        yield life, before
        for following in _next_lives(graph, life, start, plan, plans_max):
            if following.key not in known:
                known.add(following.key)
                waiting.append((following, life))


def _next_lives(
    graph: Graph, life: Life, start: ExtendedSequenceNumber, plan: Planner, plans_max: int
) -> Iterator[Life]:
    """What each thing that can happen next makes of it."""
    shards = graph.listed(life.reshards)
    if life.reshards + 1 < len(graph.came):
        yield life._replace(reshards=life.reshards + 1)
    if len(life.plans) < plans_max:
        yield from _planned(graph, life, start, plan)
    for place, (change, *rest) in enumerate(life.plans):
        others = life.plans[:place] + life.plans[place + 1 :]
        yield life._replace(plans=others)
        if isinstance(change, DeleteEnded) and _are_creating(others):
            continue
        left = (*others, tuple(rest)) if rest else others
        yield _written(life, change)._replace(plans=left)
    for row in life.rows.values():
        if is_startable(life.rows, row) and not row.is_ended:
            yield from _read(life, row, shards)


def _are_creating(plans) -> bool:
    changes = (change for plan in plans for change in plan)
    return any(isinstance(change, CreateLease | CreateChildren) for change in changes)


def _planned(graph: Graph, life: Life, start, plan: Planner) -> Iterator[Life]:
    if life.seen is None:
        yield life._replace(seen=life.rows)
        return
    for reshards in {life.reshards, max(0, life.reshards - 1)}:
        listed = graph.listed(reshards)
        at_start = None if life.seen else _at_start(graph, listed, start)
        changes = plan(life.seen, listed, start, at_start=at_start)
        plans = (*life.plans, tuple(changes)) if changes else life.plans
        yield life._replace(seen=None, plans=plans)


def _at_start(graph: Graph, listed: tuple[Shard, ...], start) -> tuple[Shard, ...]:
    """ListShards filtered by the start: the open ones, or those that were there first."""
    return (
        tuple(each for each in listed if each.is_open) if start == LATEST else listed[: graph.roots]
    )


def settled(graph: Graph, life: Life, start: ExtendedSequenceNumber, plan: Planner) -> Rows:
    """The rows once nothing goes wrong any more and all that may happen has happened."""
    shards = graph.listed()
    life = life._replace(reshards=len(graph.came) - 1, plans=(), strangers=0)
    for _ in range(_ROUNDS_MAX):
        before = life.rows
        at_start = None if life.rows else _at_start(graph, shards, start)
        for change in plan(life.rows, shards, start, at_start=at_start):
            life = _written(life, change)
        for key in sorted(life.rows):
            row = life.rows[key]
            if is_startable(life.rows, row) and not row.is_ended:
                life = [life, *_read(life, row, shards)][-1]
        if life.rows == before:
            return life.rows
    raise AssertionError(f"no rest after {_ROUNDS_MAX} rounds: {life}")


def _read(life: Life, row: Lease, shards: tuple[Shard, ...]) -> Iterator[Life]:
    """What a lease process does with a row that may be read."""
    shard = next(each for each in shards if each.shard_id == row.key)
    if row.checkpoint != BEGUN:
        yield _put(life, row, checkpoint=BEGUN)
        return
    if shard.is_open:
        return
    if life.strangers:
        yield _put(life, row, checkpoint=SHARD_END)._replace(strangers=life.strangers - 1)
    creation = _creation(life.rows, row, shards)
    if creation is not None:
        created = _written(life, creation)
        yield created
        names = frozenset(child.key for child in creation.children)
        if names <= created.rows.keys() | life.gone:
            yield _put(created, row, checkpoint=SHARD_END, children=names)


def _creation(rows: Rows, row: Lease, shards: tuple[Shard, ...]) -> CreateChildren | None:
    """As the process at the end of its shard finds out: None where the children must wait."""
    named = [each for each in shards if row.key in each.parents]
    children = [ChildShard(each.shard_id, each.parents, each.hash_range) for each in named]
    end = shard_end(*children, key=row.key)
    while True:
        step = end.next_step(row, 1.0, failover_s=10.0)
        match step:
            case ReadRows(keys):
                end.read((key, rows.get(key)) for key in keys)
            case ListShards():
                end.list(shards, row)
            case CreateChildren():
                return step
            case _:
                return None


def _written(life: Life, change: LeaseChange) -> Life:
    rows, _ = apply(life.rows, change)
    return life._replace(rows=rows, gone=life.gone | (life.rows.keys() - rows.keys()))


def _put(life: Life, row: Lease, **changed: object) -> Life:
    changed.setdefault("owner", ME)
    return life._replace(rows={**life.rows, row.key: msgspec.structs.replace(row, **changed)})


def apply(rows: Rows, change: LeaseChange) -> tuple[Rows, bool]:
    """By the real table's conditions: the rows after it, and whether it applied."""
    table, after = LeaseRows(), dict(rows)
    table.hold(after)
    return after, isinstance(table.write(change), Applied)


def is_startable(rows: Rows, row: Lease) -> bool:
    return have_ended(rows.get(parent) for parent in row.parents)


def ancestors(shards: tuple[Shard, ...], shard_id: str) -> set[str]:
    """All shards above this one."""
    by_id = {shard.shard_id: shard for shard in shards}
    found, waiting = set(), list(by_id[shard_id].parents)
    while waiting:
        parent = waiting.pop()
        if parent not in found:
            found.add(parent)
            waiting += by_id[parent].parents
    return found
