"""Which rows a reset by an operator writes, in which order, and whether a write holds [K4]. Pure.

The rows become those that a first sync makes at the new start; the others are removed, and come
back when their parents end [P12]. Must not know: who may reset, and what the outputs do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import assert_never

import msgspec

from kclrun.errors import TableRefused
from kclrun.leases.shard_sync import Listing, child_lease, sync_empty_table
from kclrun.model.lease import OFFERED, OWNER_PREFIX, Halt, Lease, LeaseKey, highest_generation
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.stream import display_name
from kclrun.model.time import WallTime
from kclrun.protocol import writes

ResetWrite = (
    writes.ResetLease
    | writes.CreateLease
    | writes.HaltForReset
    | writes.DeleteReset
    | writes.FinishReset
)


class ResetStart(msgspec.Struct, frozen=True):
    """Where reading begins: a start sentinel, with AT_TIMESTAMP its milliseconds as sub-sequence
    number. A reset to kept positions has one for each shard instead. `listed_at` is the service's
    time of the listings, which a LATEST stands for [P14]. `halt` is on the rows until the reset is
    complete; no other reset has its reason."""

    position: ExtendedSequenceNumber
    listed_at: WallTime
    halt: Halt
    stream_created_at: WallTime | None = None


class ResetPlan(msgspec.Struct, frozen=True):
    """The writes of a reset of one stream.

    1. `begin` and `halt`, in any order: the rows of the start, each halted; and halts on those that
       will be removed. Then nothing of the stream is read.
    2. `end`, in any order: the rows of shards that had ended at kept positions. Their children have
       rows by now [P12], and without them a manager would take these shards for children that are
       missing, and read them again.
    3. `remove`, one after the other, oldest shard first. An ended parent is gone before its child
       is: no manager that starts meanwhile finds a child missing and creates it.
    4. `finish`, in any order: the halts go.

    A reset that is cut leaves halted rows that name it, and rows as they were; doing it again
    begins from these.
    """

    generation: int
    begin: tuple[writes.ResetLease | writes.CreateLease, ...]
    halt: tuple[writes.HaltForReset, ...]
    end: tuple[writes.ResetLease | writes.CreateLease, ...]
    remove: tuple[writes.DeleteReset, ...]
    finish: tuple[writes.FinishReset, ...]

    @property
    def stages(self) -> Iterator[Sequence[ResetWrite]]:
        """The writes of a stage are sent in any order, those of the next one when all of them have
        applied."""
        yield (*self.begin, *self.halt)
        yield self.end
        for write in self.remove:
            yield (write,)
        yield self.finish


def position_at(at: WallTime) -> ExtendedSequenceNumber:
    """AT_TIMESTAMP with its own instant, whatever `start:` says later."""
    return ExtendedSequenceNumber(AT_TIMESTAMP.sequence_number, round(at * 1000))


def plan_reset(
    rows: Sequence[Lease], listing: Listing, at_start: Collection[Shard], start: ResetStart
) -> ResetPlan:
    """Reset a whole stream. `rows` are its rows, `listing` all its shards, `at_start` those that
    were there at the start position.

    Raises: TableRefused while a reshard, or a listing that lags, hides where the start is.
    """
    problem = listing.inconsistency or listing.contradiction(rows)
    first = sync_empty_table(at_start, start.position, start.listed_at)
    if problem is None:
        problem = first.problem
    if problem is not None:
        raise TableRefused(f"the shards are changing: {problem}\nRepeat this in a minute")
    targets = {lease.key for lease in first.leases}
    others = sorted((row for row in rows if row.key not in targets), key=lambda row: row.key)
    return reset_plan(rows, _at_start(first.leases, start), others, start)


def plan_shards(
    rows: Sequence[Lease], listing: Listing, keys: Collection[LeaseKey], start: ResetStart
) -> ResetPlan:
    """Reset these shards alone. Each has a row.

    Raises: TableRefused for a shard that the service does not list any more, and where a
    descendant has begun: its records would come before those of its parent.
    """
    known = {row.key: row for row in rows}
    leases = []
    for key in sorted(keys):
        if key not in listing:
            raise TableRefused(
                f"{display_name(key)} is not listed any more: its records have expired"
            )
        begun = begun_descendant(known[key], rows, listing, keys)
        if begun is not None:
            raise TableRefused(
                f"{display_name(begun)} descends from {display_name(key)} and has begun: the"
                " records of the parent would come after those of its child\nTo read both again,"
                " reset the whole stream: leave --shard out"
            )
        row = known[key]
        leases.append(child_lease(key, row.parents, listing.graph[key].hash_range))
    return reset_plan(rows, _at_start(leases, start), (), start)


def begun_descendant(
    row: Lease, rows: Iterable[Lease], listing: Listing, reset: Collection[LeaseKey]
) -> LeaseKey | None:
    """A descendant of a shard that has begun and is not reset itself; None if there is none."""
    children: dict[str, set[str]] = {}
    for one in rows:
        for parent in one.parents:
            children.setdefault(parent, set()).add(one.key)
    begun = {str(lease.key) for lease in rows if lease.has_begun}
    begun -= {str(key) for key in reset}
    waiting, seen = [str(row.key)], {str(row.key)}
    while waiting:
        key = waiting.pop()
        following = children.get(key, set()).union(listing.children_named(key)) - seen
        for child in sorted(following):
            if child in begun:
                return LeaseKey(child)
        seen |= following
        waiting += following
    return None


def _at_start(leases: Iterable[Lease], start: ResetStart) -> tuple[Lease, ...]:
    pinned_at = start.listed_at if start.position == LATEST else None
    return tuple(
        msgspec.structs.replace(lease, checkpoint=start.position, latest_pinned_at=pinned_at)
        for lease in leases
    )


def reset_plan(
    rows: Sequence[Lease],
    leases: Sequence[Lease],
    others: Sequence[Lease],
    start: ResetStart,
) -> ResetPlan:
    """The writes that leave `leases`, each at its checkpoint, and none of the rows `others`. Rows
    that are in neither stay."""
    known = {row.key: row for row in rows}
    generation = highest_generation(rows) + 1
    put = [_put(lease, known.get(lease.key), generation, start) for lease in leases]
    return ResetPlan(
        generation,
        tuple(write for lease, write in zip(leases, put, strict=True) if not lease.is_ended),
        tuple(
            writes.HaltForReset(row.key, row.owner, row.counter, start.halt)
            for row in others
            if not row.is_ended
        ),
        tuple(write for lease, write in zip(leases, put, strict=True) if lease.is_ended),
        tuple(_removal(row) for row in others),
        tuple(writes.FinishReset(lease.key, generation, start.halt.reason) for lease in leases),
    )


def _put(
    lease: Lease, row: Lease | None, generation: int, start: ResetStart
) -> writes.ResetLease | writes.CreateLease:
    """The write after which the lease is there, halted and in its generation."""
    if row is None:
        return writes.CreateLease(
            msgspec.structs.replace(
                lease,
                generation=generation,
                halt=start.halt,
                stream_created_at=start.stream_created_at,
            )
        )
    return writes.ResetLease(
        row.key,
        row.owner,
        row.counter,
        row.checkpoint,
        lease.checkpoint,
        generation,
        start.halt,
        lease.latest_pinned_at,
        lease.children,
    )


def _removal(row: Lease) -> writes.DeleteReset:
    """An ended row is deleted as seen, any other as its halt leaves it."""
    if row.is_ended:
        return writes.DeleteReset(row.key, row.owner, row.counter)
    return writes.DeleteReset(row.key, None, row.counter + 1)


def is_written(write: ResetWrite, row: Lease | None) -> bool:
    """Whether a write whose condition failed holds on the row all the same: an earlier send of it
    has applied, and its answer was lost [P6]. A manager may have taken the row since."""
    match write:
        case writes.ResetLease(generation=generation, halt=halt):
            return _is_of(row, generation, halt.reason)
        case writes.CreateLease(lease=lease):
            assert lease.halt is not None, "a reset creates rows that are halted"
            return _is_of(row, lease.generation, lease.halt.reason)
        case writes.HaltForReset(halt=halt):
            return row is not None and row.halt is not None and row.halt.reason == halt.reason
        case writes.DeleteReset():
            return row is None
        case writes.FinishReset(generation=generation):
            return row is not None and row.generation == generation and row.halt is None
        case _:
            assert_never(write)


def _is_of(row: Lease | None, generation: int, reason: str) -> bool:
    is_halted = row is not None and row.halt is not None and row.halt.reason == reason
    return is_halted and row is not None and row.generation == generation


def owned(rows: Iterable[Lease]) -> tuple[Lease, ...]:
    """The rows that an owner may still write: unended, and neither unowned nor offered."""
    return tuple(row for row in rows if not row.is_ended and row.owner not in {None, OFFERED})


def refuse_owners(rows: Iterable[Lease]) -> None:
    """Raises: TableRefused if a Java worker owns a lease. It does not know the halt of a reset."""
    java = sorted(str(r.owner) for r in owned(rows) if not str(r.owner).startswith(OWNER_PREFIX))
    if java:
        raise TableRefused(
            f"{len(java)} leases belong to Java workers, {java[0]} among them: they know neither"
            " the halt of a reset nor its generation\nStop them, let kclrun take their leases, stop"
            " kclrun, and repeat this"
        )


def refuse_life(earlier: Iterable[Lease], later: Iterable[Lease]) -> None:
    """Refuse a reset of a fleet that lives: a row was written between two scans, a failover apart
    [P9]. Raises: TableRefused."""
    before = {row.key: (row.owner, row.counter) for row in earlier}
    alive = sorted(
        str(row.owner) for row in owned(later) if before.get(row.key) != (row.owner, row.counter)
    )
    if alive:
        raise TableRefused(
            f"{len(alive)} leases are being renewed, by {alive[0]}: an owner would go on from its"
            " own position\nStop every manager of the application, and repeat this"
        )
