"""The lease table behind a network, and the units of all requests.

The rows are `local.lease_rows.LeaseRows`, under the conditions that DynamoDB gets. A reply is a
callback, and never comes in the same instant. The module does not know hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.ports import ScanPage
from kclrun.protocol import writes
from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.network import CALM, PATIENCE_S, Costs, Failed, FaultRates, Network

_READ_UNIT_BYTES: Final = 4096
# Lease rows have some 500 bytes, and a page of a scan is 1 MB at most.
_PAGE_ROWS: Final = 1_000
# A query of the index without a result: it is never consistent.
_QUERY_UNITS: Final = 0.5


class ItemWrite(msgspec.Struct, frozen=True):
    """One write of one item by another program than kclrun: it knows the raw item only."""

    key: LeaseKey

    def apply_to(self, rows: LeaseRows) -> writes.Outcome:
        """Apply the write as DynamoDB does."""
        raise NotImplementedError


class RowWatcher(Protocol):
    """Gets every row that a write changed."""

    def row_written(
        self,
        sender: str,
        change: writes.LeaseChange | ItemWrite,
        before: Lease | None,
        after: Lease | None,
    ) -> None:
        """`before` None: the row was created; `after` None: it was deleted."""
        ...

    def row_deleted_from_outside(self, row: Lease) -> None:
        """A row was deleted from outside the protocol."""
        ...

    def write_refused_in_silence(self, change: writes.LeaseChange | ItemWrite) -> None:
        """It arrived after its sender had stopped waiting, and did not apply."""
        ...

    def write_answered(
        self, sender: str, change: writes.LeaseChange | ItemWrite, outcome: writes.Outcome
    ) -> None:
        """The sender got an answer, or stopped waiting for one."""
        ...


class IdlePolls(Protocol):
    """One host's looks for offered rows, while there are none."""

    def wake(self) -> None:
        """A row is offered; or looks fail more or less often from now on."""
        ...

    def count(self) -> int:
        """The number of looks since the previous call of this method."""
        ...


class SimulatedTable:
    """`faults` may be changed at any time: a storm, then calm. `page_rows_max` bounds a page of a
    scan."""

    def __init__(
        self, scheduler: Scheduler, watcher: RowWatcher, *, page_rows_max: int = _PAGE_ROWS
    ) -> None:
        self.network = Network(scheduler)
        self._costs = self.network.costs
        self._idle: dict[IdlePolls, None] = {}
        self._scheduler = scheduler
        self._watcher = watcher
        choose = scheduler.chance("offers").sample
        self._rows = LeaseRows(page_rows_max=page_rows_max, choose=choose)
        self._row_bytes = 0

    @property
    def faults(self) -> FaultRates:
        return self.network.faults

    @faults.setter
    def faults(self, faults: FaultRates) -> None:
        self.network.faults = faults if faults.total else CALM
        self._wake_idle()

    @property
    def costs(self) -> Costs:
        """The costs up to now."""
        for polls in self._idle:
            self._count_idle(polls)
        return self._costs

    def leases(self) -> Iterator[Lease]:
        """All rows, as they are now: for the observer."""
        for page in self._rows.scan():
            yield from page.leases

    def row(self, key: LeaseKey) -> Lease | None:
        """One row as it is now: for the observer."""
        return self._rows.read(key)

    def delete_by_hand(self, row: Lease) -> None:
        """Delete a row from outside, at once and without a condition."""
        self._rows.write(writes.DeleteTrimmed(row.key, row.owner, row.counter))
        self._watcher.row_deleted_from_outside(row)

    def write(
        self,
        sender: str,
        change: writes.LeaseChange | ItemWrite,
        reply: Callable[[writes.Outcome], None],
    ) -> None:
        """Send a change once: one of ours, or a raw write of another program."""
        self._costs.requests += 1
        after, network = self._scheduler.after, self.network
        answer = partial(self._answer, sender, change, reply)
        fate = network.draw_fate()
        match fate:
            case None:
                after(network.leg_s(), partial(self._apply_and_answer, sender, change, answer))
            case "throttled":
                after(network.leg_s(2), partial(answer, writes.Throttled("slow down")))
            case "unreachable":
                after(network.leg_s(2), partial(answer, writes.Unavailable("no route")))
            case _:
                late_s = network.late_s() if fate == "late" else 0.0
                after(network.leg_s() + late_s, partial(self._apply_in_silence, sender, change))
                after(PATIENCE_S, partial(answer, writes.OutcomeUnknown("timed out")))

    def read(self, key: LeaseKey, reply: Callable[[Lease | None], None], failed: Failed) -> None:
        """One row, consistently."""
        self._costs.read_units += 1
        self.network.ask(lambda: self._rows.read(key), reply, failed)

    def offered(
        self, rows_max: int, reply: Callable[[tuple[Lease, ...]], None], failed: Failed
    ) -> None:
        """The rows that wait for a taker: a query of the index, then a read of each."""

        def query() -> tuple[Lease, ...]:
            found = self._rows.offered(rows_max)
            self._costs.read_units += _QUERY_UNITS + len(found)
            return found

        self.network.ask(query, reply, failed)

    def let_idle(self, polls: IdlePolls) -> bool:
        """Whether looks for offered rows find nothing. If so, the polls are woken before one finds
        a row."""
        if self._rows.has_offers:
            return False
        self._idle[polls] = None
        return True

    def idle_no_more(self, polls: IdlePolls) -> bool:
        """Its host looks no further. Returns: whether it idled."""
        if polls not in self._idle:
            return False
        self._count_idle(polls)
        del self._idle[polls]
        return True

    def scan(
        self,
        reply: Callable[[tuple[Lease, ...]], None],
        failed: Failed,
        *,
        consistent: bool = True,
    ) -> None:
        """Page by page: rows written meanwhile show as they are when their page is read. A scan
        that is not consistent is as new here, and costs half."""
        self._scan_on(None, (), reply, failed, 1.0 if consistent else 0.5)

    def _scan_on(
        self,
        key: str | None,
        found: tuple[Lease, ...],
        reply: Callable[[tuple[Lease, ...]], None],
        failed: Failed,
        share: float,
    ) -> None:
        def took(answer: tuple[ScanPage, str | None]) -> None:
            page, last_key = answer
            units = max(1.0, len(page.leases) * self._row_size() / _READ_UNIT_BYTES)
            self._costs.read_units += units * share
            if last_key is None:
                reply(found + page.leases)
            else:
                self._scan_on(last_key, found + page.leases, reply, failed, share)

        self.network.ask(lambda: self._rows.page_after(key), took, failed)

    def _apply_in_silence(self, sender: str, change: writes.LeaseChange | ItemWrite) -> None:
        if not isinstance(self._apply(sender, change), writes.Applied):
            self._watcher.write_refused_in_silence(change)

    def _apply_and_answer(
        self,
        sender: str,
        change: writes.LeaseChange | ItemWrite,
        answer: Callable[[writes.Outcome], None],
    ) -> None:
        outcome = self._apply(sender, change)
        self._scheduler.after(self.network.leg_s(), partial(answer, outcome))

    def _answer(
        self,
        sender: str,
        change: writes.LeaseChange | ItemWrite,
        reply: Callable[[writes.Outcome], None],
        outcome: writes.Outcome,
    ) -> None:
        self._watcher.write_answered(sender, change, outcome)
        reply(outcome)

    def _apply(self, sender: str, change: writes.LeaseChange | ItemWrite) -> writes.Outcome:
        keys = (change.key,) if isinstance(change, ItemWrite) else writes.keys_of(change)
        before = [(key, self._rows.read(key)) for key in keys]
        if isinstance(change, ItemWrite):
            outcome = change.apply_to(self._rows)
        else:
            outcome = self._rows.write(change)
        self._costs.write_units += len(keys)
        if isinstance(outcome, writes.Applied):
            self._notify_watcher(sender, change, before)
        return outcome

    def _notify_watcher(
        self,
        sender: str,
        change: writes.LeaseChange | ItemWrite,
        before: list[tuple[LeaseKey, Lease | None]],
    ) -> None:
        for key, was in before:
            now = self._rows.read(key)
            if was is None and now is None:
                continue  # a deletion without a condition, of a missing row
            if _owner_of(was) != _owner_of(now):
                self._costs.write_units += (_owner_of(was) is not None) + (
                    _owner_of(now) is not None
                )
                if _owner_of(now) == OFFERED:
                    self._wake_idle()
            self._watcher.row_written(sender, change, was, now)

    def _wake_idle(self) -> None:
        for polls in tuple(self._idle):
            self.idle_no_more(polls)
            polls.wake()

    def _count_idle(self, polls: IdlePolls) -> None:
        looks = polls.count()
        self._costs.requests += looks
        self._costs.read_units += _QUERY_UNITS * looks

    def _row_size(self) -> int:
        """The size of one row in DynamoDB's bytes, measured once: rows differ by a few bytes."""
        if not self._row_bytes:
            lease = next(self.leases(), None)
            item: Mapping[str, Any] = (self._rows.raw(lease.key) if lease else None) or {}
            self._row_bytes = sum(len(name) + len(str(value)) for name, value in item.items())
        return self._row_bytes


def _owner_of(row: Lease | None) -> str | None:
    return None if row is None else row.owner
