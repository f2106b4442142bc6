"""`ShutdownTask` at the end of a shard: children first, then SHARD_END."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import ChildShard
from kclrun.simulation.java import rows
from kclrun.simulation.java.client import JavaClient
from kclrun.simulation.java.held import HeldLease
from kclrun.simulation.java.renewer import Renewer
from kclrun.simulation.java.threads import Steps

__all__ = ["end_shard"]

# While a merge waits for the other parent's row, one try in thirty drops the lease instead, so that
# another worker tries.
_DROPS: Final = 1 / 30


def end_shard(
    client: JavaClient,
    renewer: Renewer,
    lease: HeldLease,
    children: Sequence[ChildShard],
    chance: random.Random,
) -> Steps[bool]:
    """One try: the children's rows, their names on ours, user code's checkpoint at SHARD_END.

    False while it has to be tried again. Raises: ThroughputExceeded, DependencyFailed.
    """
    if len(children) == 1 and not (yield from _are_parents_alike(client, children[0])):
        if chance.random() < _DROPS:
            renewer.drop(lease)
        return False
    for child in children:
        row = yield from client.row(LeaseKey(child.shard_id))
        if row is None:
            yield from client.write(rows.create(child.shard_id, child.parents, child.hash_range))
    names = frozenset(child.shard_id for child in children)
    yield from client.write(rows.name_children(lease.key, names))
    lease.children = names
    row = yield from client.row(lease.key)
    if row is None:
        return False
    is_ended: bool = row.is_ended or (yield from renewer.checkpoint(lease, SHARD_END))
    return is_ended


def _are_parents_alike(client: JavaClient, child: ChildShard) -> Steps[bool]:
    """The child of a merge is created while both parents have rows, or neither has."""
    found = []
    for parent in child.parents:
        row = yield from client.row(LeaseKey(parent))
        found.append(row is None)
    return len(set(found)) == 1
