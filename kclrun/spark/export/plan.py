"""Decides which rows of a lease table to write for a query's offset. Pure.

A row never moves back; a row that is further than the query stays. An ancestor of a shard that the
query reads is done. Children of ended shards get their rows together with them. Other children get
none: their rows come with their parents' end [P12].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import Shard, ShardGraph
from kclrun.spark.export.checkpoints import LeaseCheckpoint
from kclrun.spark.lineage import KEY_SPACE, ancestors_of


class Create(msgspec.Struct, frozen=True, tag=True):
    """The shard has no row yet: one is put."""

    lease: Lease
    note: str = ""


class Move(msgspec.Struct, frozen=True, tag=True):
    """The row is further back. `children` are named on it where the shard has ended."""

    row: Lease
    to: ExtendedSequenceNumber
    children: frozenset[str] = frozenset()
    note: str = ""


class Keep(msgspec.Struct, frozen=True, tag=True):
    """Nothing is written; `why` is the reason. `row` is None where the table has none."""

    shard_id: str
    row: Lease | None
    why: str


Step = Create | Move | Keep


def plan_rows(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> tuple[Step, ...]:
    """One step for each shard, children before the parents that end [P12].

    `checkpoints` are those of the query's offset, `rows` the table as scanned, by shard id.
    """
    steps = [
        *_children(checkpoints, graph, rows),
        *(_step(each, checkpoints[each], graph, rows) for each in sorted(checkpoints)),
        *_passed(checkpoints, graph, rows),
    ]
    return tuple(steps)


def _step(
    shard_id: str, done: LeaseCheckpoint, graph: ShardGraph, rows: Mapping[str, Lease]
) -> Step:
    row, shard = rows.get(shard_id), graph.get(shard_id)
    if row is not None:
        return _forward(row, done, graph)
    if shard is None:
        is_done = done.checkpoint == SHARD_END
        why = "ended and expired" if is_done else "expired, with records that were not read: lost"
        return Keep(shard_id, None, why)
    return Create(_lease(shard, done, graph), done.note)


def _forward(row: Lease, done: LeaseCheckpoint, graph: ShardGraph) -> Step:
    to = done.checkpoint
    if row.checkpoint == to:
        return Keep(row.key, row, "stands there already")
    if to.is_sentinel and to != SHARD_END:
        return Keep(row.key, row, f"the query has read nothing there yet ({to})")
    if to < row.checkpoint:
        return Keep(row.key, row, f"is further than the query ({to})")
    is_ended = to == SHARD_END
    children = frozenset(graph.children_of(row.key)) if is_ended else frozenset[str]()
    return Move(row, to, children - row.children, done.note)


def _children(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> Iterator[Step]:
    """Children of parents that the query has ended; the query has not begun these children."""
    for shard in graph:
        is_known = shard.shard_id in checkpoints or shard.shard_id in rows
        parents = [each for each in shard.parents if each in checkpoints or each in graph]
        if is_known or not any(each in checkpoints for each in parents):
            continue
        ended = (checkpoints.get(each, LeaseCheckpoint(TRIM_HORIZON)) for each in parents)
        if all(each.checkpoint == SHARD_END for each in ended):
            yield Create(
                _lease(shard, LeaseCheckpoint(TRIM_HORIZON), graph), "a child; not begun yet"
            )


def _passed(
    checkpoints: Mapping[str, LeaseCheckpoint], graph: ShardGraph, rows: Mapping[str, Lease]
) -> Iterator[Step]:
    """Rows of shards that the query has passed: it reads their children."""
    lineage = ShardGraph([*graph, *(_shard(row) for row in rows.values() if row.key not in graph)])
    above = {parent for each in checkpoints for parent in ancestors_of(lineage, each)}
    for shard_id in sorted(above.intersection(rows) - checkpoints.keys()):
        row = rows[shard_id]
        if not row.is_ended:
            yield _forward(
                row, LeaseCheckpoint(SHARD_END, note="the query reads its descendants"), graph
            )


def _lease(shard: Shard, done: LeaseCheckpoint, graph: ShardGraph) -> Lease:
    is_ended = done.checkpoint == SHARD_END
    return Lease(
        key=LeaseKey(shard.shard_id),
        checkpoint=done.checkpoint,
        parents=frozenset(shard.parents),
        children=frozenset(graph.children_of(shard.shard_id)) if is_ended else frozenset(),
        hash_range=shard.hash_range,
        latest_pinned_at=done.pinned_at,
    )


def _shard(row: Lease) -> Shard:
    parents = sorted(row.parents)[:2]
    return Shard(row.key, row.hash_range or KEY_SPACE, "0", "0", *parents)
