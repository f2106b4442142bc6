"""Bugs to plant into the cores and the table, each with the world that must find it.

A search that finds none of what is wrong proves nothing by finding nothing wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import msgspec

from kclrun.lease.checkpoints import CheckpointLedger
from kclrun.lease.events import WriteResolved
from kclrun.lease.lease_writer import LeaseWriter
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.leases import held_lease, held_leases, table_view
from kclrun.leases.table_view import Observation
from kclrun.local import lease_rows
from kclrun.protocol.in_flight import InFlight
from kclrun.protocol.writes import Claim, ConditionFailed, Take


class Bug(NamedTuple):
    """`rule` is the one that must be found broken, in `world`, by `fault` alone if it takes one.

    `moves` is the length of the shortest story.
    """

    says: str
    world: str
    rule: str
    moves: int
    plant: Callable[[], object]
    fault: str | None = None


@contextmanager
def _takes_without_counter() -> Iterator[None]:
    holds = lease_rows.holds

    def careless(change, row):
        return row.owner == change.seen_owner if isinstance(change, Take) else holds(change, row)

    with mock.patch.object(lease_rows, "holds", careless):
        yield


@contextmanager
def _claims_from_a_hint() -> Iterator[None]:
    judge = LeaseWriter._judge

    def hopeful(self, row, *, answered):
        flight = self.in_flight
        is_mine = row is not None and (row.owner, row.counter) == (self.me, self.counter + 1)
        if isinstance(flight.change, Claim) and is_mine and flight.unresolved:
            self._confirm(row, min(flight.unresolved))
            return self._settle(flight.change)
        return judge(self, row, answered=answered)

    with mock.patch.object(LeaseWriter, "_judge", hopeful):
        yield


@contextmanager
def _fences_from_the_reply() -> Iterator[None]:
    handle = LeaseStateMachine.handle

    def generous(self, event, now):
        if isinstance(event, WriteResolved):
            event = msgspec.structs.replace(event, sent_instant=now)
        return handle(self, event, now)

    with mock.patch.object(LeaseStateMachine, "handle", generous):
        yield


@contextmanager
def _fences_from_the_last_send() -> Iterator[None]:
    resolve = LeaseWriter.resolve

    def generous(self, outcome, sent):
        if isinstance(outcome, ConditionFailed) and self.in_flight.unresolved:
            self.in_flight.unresolved = [sent]
        return resolve(self, outcome, sent)

    with mock.patch.object(LeaseWriter, "resolve", generous):
        yield


@contextmanager
def _writes_while_one_is_unresolved() -> Iterator[None]:
    def hasty(self):
        self.change = None
        return True

    with mock.patch.object(InFlight, "withdraw", hasty):
        yield


@contextmanager
def _starts_after_one_parent() -> Iterator[None]:
    def any_ended(parents):
        rows = [row for row in parents if row is not None]
        return not rows or any(row.is_ended for row in rows)

    def any_seems_over(lease, rows, broken=()):
        return any_ended([rows.get(parent) for parent in lease.parents])

    with (
        mock.patch.object(held_lease, "have_ended", any_ended),
        mock.patch.object(held_leases, "seem_over", any_seems_over),
        mock.patch.object(table_view, "seem_over", any_seems_over),
    ):
        yield


@contextmanager
def _takes_what_is_renewed() -> Iterator[None]:
    def every(self, leases, now):
        return frozenset(lease.key for lease in leases)

    with mock.patch.object(Observation, "expired", every):
        yield


@contextmanager
def _checkpoints_what_is_delivered() -> Iterator[None]:
    deliver = CheckpointLedger.deliver

    def hasty(self, last, records):
        deliver(self, last, records)
        self.processed = max(self.processed, last)
        self.has_unsaved = self.processed > self.checkpointed

    with mock.patch.object(CheckpointLedger, "deliver", hasty):
        yield


BUGS = (
    Bug(
        "a take looks at the owner alone",
        "network",
        "I5",
        18,
        _takes_without_counter,
        "lose request",
    ),
    Bug("a claim is believed from a read", "network", "P4", 3, _claims_from_a_hint, "lose reply"),
    Bug("the fence counts from the reply", "network", "I4", 13, _fences_from_the_reply, "slow"),
    Bug(
        "the fence counts from the last send",
        "network",
        "I4",
        18,
        _fences_from_the_last_send,
        "late",
    ),
    Bug(
        "a renewal passes an unresolved checkpoint",
        "network",
        "P5",
        8,
        _writes_while_one_is_unresolved,
        "late",
    ),
    Bug("one parent of two is enough", "half-merge", "I3", 4, _starts_after_one_parent),
    Bug("every lease is taken for expired", "calm", "I4", 7, _takes_what_is_renewed),
    Bug("a delivered record counts as processed", "calm", "I2b", 6, _checkpoints_what_is_delivered),
)
