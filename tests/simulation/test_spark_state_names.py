"""Names of state versions on Spark (docs/explanation/spark-batches.md), in a small
model: one shard, three batches of one record, three starts; each claim may land late or never.

A state is the marks of the code that folded each record; a new start may bring new code. State
agrees with the rows where a batch reads the marks of the batches that were committed before it.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

_BATCHES, _STARTS, _RETAIN = 3, 3, 1


class _Name(NamedTuple):
    lineage: int
    end: int
    run: int


_Marks = tuple[int, ...]
_Claim = tuple[_Name, _Marks]


class _World(NamedTuple):
    starts: int = 1
    lineage: int = 1
    run: int = 1
    committed: _Marks = ()
    has_run: bool = False
    older: tuple[int, int] | None = None  # a driver that lives on: its start and its run
    versions: frozenset[_Claim] = frozenset()
    flying: frozenset[_Claim] = frozenset()


class _Rules(NamedTuple):
    has_new_code: bool = True
    is_drained: bool = True
    names_run: bool = True
    names_lineage: bool = True
    reads_greatest: bool = True
    folds_again: bool = True
    deletes_before_commit: bool = False
    has_two_drivers: bool = False


def _name(rules: _Rules, world: _World) -> _Name:
    lineage = world.lineage if rules.names_lineage else 0
    return _Name(lineage, len(world.committed) + 1, world.run if rules.names_run else 0)


def _mark(rules: _Rules, world: _World) -> int:
    return world.starts if rules.has_new_code else 0


def _read(rules: _Rules, world: _World) -> _Marks:
    start, mine = len(world.committed), _name(rules, world)
    for end in range(start, 0, -1):
        at_end = [
            (name.run, marks)
            for name, marks in world.versions
            if (name.lineage, name.end) == (mine.lineage, end) and name.run <= mine.run
        ]
        if at_end:
            found = (max if rules.reads_greatest else min)(at_end)[1]
            return found + (_mark(rules, world),) * (start - end)
        if not rules.folds_again:
            return ()
    return (_mark(rules, world),) * start


def _moves(rules: _Rules, world: _World) -> Iterator[_World]:
    name, mark = _name(rules, world), _mark(rules, world)
    if len(world.committed) < _BATCHES:
        claim = (name, (*_read(rules, world), mark))
        yield world._replace(has_run=True, flying=world.flying | {claim})
        if not rules.is_drained:
            yield world._replace(has_run=True)
    for landing in world.flying:
        is_taken = any(landing[0] == there for there, _ in world.versions)
        kept = world.versions if is_taken else world.versions | {landing}
        if rules.deletes_before_commit:
            kept = frozenset(one for one in kept if one[0].end >= landing[0].end)
        yield world._replace(versions=kept, flying=world.flying - {landing})
    is_durable = any(name == there for there, _ in world.versions)
    if world.has_run and (is_durable or not rules.is_drained):
        committed = (*world.committed, mark)
        kept = frozenset(
            one
            for one in world.versions
            if one[0].lineage != name.lineage or one[0].end >= len(committed) - _RETAIN
        )
        yield world._replace(committed=committed, has_run=False, versions=kept)
    if world.starts < _STARTS:
        again = world._replace(starts=world.starts + 1, run=world.run + 1, has_run=False)
        yield again
        if rules.has_two_drivers:
            yield again._replace(older=(world.starts, world.run))
        yield again._replace(lineage=world.lineage + 1, run=1, committed=())


def _moves_of_older(rules: _Rules, world: _World) -> Iterator[_World]:
    """The driver before does the same batch. Of two that commit one batch Spark ends the second,
    and a later start goes on."""
    if world.older is None or len(world.committed) == _BATCHES:
        return
    its = world._replace(starts=world.older[0], run=world.older[1])
    name, mark = _name(rules, its), _mark(rules, its)
    yield world._replace(flying=world.flying | {(name, (*_read(rules, its), mark))})
    if any(name == there for there, _ in world.versions) and world.starts < _STARTS:
        yield world._replace(
            starts=world.starts + 1,
            run=world.run + 1,
            committed=(*world.committed, mark),
            has_run=False,
            older=None,
        )


def _search(rules: _Rules) -> tuple[int, _World | None]:
    seen, queue = {_World()}, deque([_World()])
    while queue:
        world = queue.popleft()
        if _read(rules, world) != world.committed:
            return len(seen), world
        for after in (*_moves(rules, world), *_moves_of_older(rules, world)):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen), None


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        _Rules(),
        _Rules(has_new_code=False, is_drained=False),
        _Rules(has_new_code=False, has_two_drivers=True),
    ],
    ids=["new-code", "undrained", "two-drivers"],
)
def test_state_agrees_with_the_committed_rows_whatever_lands_late(rules):
    states, broken = _search(rules)
    assert broken is None
    assert states > 100


@pytest.mark.parametrize(
    "rules",
    [
        _Rules(names_run=False),
        _Rules(names_lineage=False),
        _Rules(reads_greatest=False),
        _Rules(has_new_code=False, is_drained=False, folds_again=False),
        _Rules(deletes_before_commit=True),
        _Rules(is_drained=False),
        _Rules(has_two_drivers=True),
    ],
    ids=[
        *("no-run", "no-lineage", "smallest-run", "empty", "early-delete"),
        *("undrained-new-code", "two-drivers-of-different-code"),
    ],
)
def test_each_broken_rule_reads_another_state_than_the_committed_rows_have(rules):
    assert _search(rules)[1] is not None
