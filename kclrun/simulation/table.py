"""The lease table behind a network: latency, faults, and the cost of all requests.

A request is sent, arrives, is applied, and answered; each fault happens between two of these steps.
The rows are `local.lease_rows.LeaseRows`, under the conditions that DynamoDB gets. A reply is a
callback, and never comes in the same instant. The module does not know hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec

from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease, LeaseKey
from kclrun.ports import ScanPage
from kclrun.protocol import writes
from kclrun.simulation.clocks import Scheduler

Answer = TypeVar("Answer")
Failed = Callable[[str], None]

# One way: 1.5 ms and an exponential tail of as much, so that a write takes some 6 ms, like
# DynamoDB's single-digit milliseconds from within the region.
_LEG_MIN_S: Final = 0.0015
LEG_MEAN_S: Final = 2 * _LEG_MIN_S
# The time that a client waits for a reply before its outcome is unknown.
PATIENCE_S: Final = 2.0
# A late request arrives up to two failovers after it was sent.
LATE_MAX_S: Final = 20.0
_READ_UNIT_BYTES: Final = 4096
# Lease rows have some 500 bytes, and a page of a scan is 1 MB at most.
_PAGE_ROWS: Final = 1_000
# A query of the index without a result: it is never consistent.
_QUERY_UNITS: Final = 0.5


class FaultRates(msgspec.Struct, frozen=True):
    """The share of requests that each fault meets. Reads meet the sum of all as a failure.

    `lost_reply`: applied, and the sender gets no answer. `late`: arrives after the sender gave up.
    """

    throttled: float = 0.0
    unreachable: float = 0.0
    lost_reply: float = 0.0
    late: float = 0.0

    @property
    def total(self) -> float:
        return self.throttled + self.unreachable + self.lost_reply + self.late


CALM: Final = FaultRates()


class Costs(msgspec.Struct):
    """Requests, and DynamoDB's units as it counts them: 1 KB a write, 4 KB a consistent read.

    A write that changes the owner also deletes and puts an entry of the owner index.
    """

    requests: int = 0
    faults: int = 0
    write_units: float = 0.0
    read_units: float = 0.0


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
    """`faults` may be changed at any time: a storm, then calm; and so may `kinesis_failing`, the
    share of requests to Kinesis that fail. `page_rows_max` bounds a page of a scan."""

    def __init__(
        self, scheduler: Scheduler, watcher: RowWatcher, *, page_rows_max: int = _PAGE_ROWS
    ) -> None:
        self._faults = CALM
        self.kinesis_failing = 0.0
        self._costs = Costs()
        self._idle: dict[IdlePolls, None] = {}
        self._scheduler = scheduler
        self._watcher = watcher
        self._latency = scheduler.chance("network").random
        self._fate = scheduler.chance("faults")
        choose = scheduler.chance("offers").sample
        self._rows = LeaseRows(page_rows_max=page_rows_max, choose=choose)
        self._row_bytes = 0

    @property
    def faults(self) -> FaultRates:
        return self._faults

    @faults.setter
    def faults(self, faults: FaultRates) -> None:
        self._faults = faults if faults.total else CALM
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
        after, answer = self._scheduler.after, partial(self._answer, sender, change, reply)
        fate = self._draw_fate()
        match fate:
            case None:
                after(self._leg_s(), partial(self._apply_and_answer, sender, change, answer))
            case "throttled":
                after(self._leg_s(2), partial(answer, writes.Throttled("slow down")))
            case "unreachable":
                after(self._leg_s(2), partial(answer, writes.Unavailable("no route")))
            case _:
                is_late = fate == "late"
                delay_s = self._fate.uniform(PATIENCE_S, LATE_MAX_S) if is_late else 0.0
                after(self._leg_s() + delay_s, partial(self._apply_in_silence, sender, change))
                after(PATIENCE_S, partial(answer, writes.OutcomeUnknown("timed out")))

    def read(self, key: LeaseKey, reply: Callable[[Lease | None], None], failed: Failed) -> None:
        """One row, consistently."""
        self._costs.read_units += 1
        self._ask(lambda: self._rows.read(key), reply, failed)

    def offered(
        self, rows_max: int, reply: Callable[[tuple[Lease, ...]], None], failed: Failed
    ) -> None:
        """The rows that wait for a taker: a query of the index, then a read of each."""

        def query() -> tuple[Lease, ...]:
            found = self._rows.offered(rows_max)
            self._costs.read_units += _QUERY_UNITS + len(found)
            return found

        self._ask(query, reply, failed)

    def offered_in_vain(self, failed: Failed) -> None:
        """As `offered`, for a query that is known to fail."""
        self._costs.requests += 1
        self._costs.faults += 1
        self._scheduler.after(PATIENCE_S, lambda: failed("timed out"))

    def let_idle(self, polls: IdlePolls) -> bool:
        """Whether looks for offered rows find nothing. If so, the polls are woken before one finds
        a row."""
        if self._rows.has_offers:
            return False
        self._idle[polls] = None
        return True

    def reads_until_failure(self) -> float:
        """The number of successful reads in a row before one fails, drawn with the current faults:
        as many as if each read were drawn by itself. Infinite in calm."""
        failing = self._faults.total
        if failing == 0.0 or failing >= 1.0:
            return math.inf if failing == 0.0 else 0
        return math.floor(math.log1p(-self._fate.random()) / math.log1p(-failing))

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

    def ask_kinesis(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        """A request to the other service, on the same network."""
        self._costs.requests += 1
        if self.kinesis_failing and self._fate.random() < self.kinesis_failing:
            self._costs.faults += 1
            self._scheduler.after(PATIENCE_S, lambda: failed("timed out"))
        else:
            self._send(ask, reply)

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

        self._ask(lambda: self._rows.page_after(key), took, failed)

    def _ask(
        self, ask: Callable[[], Answer], reply: Callable[[Answer], None], failed: Failed
    ) -> None:
        self._costs.requests += 1
        if self._draw_fate() is not None:
            self._scheduler.after(PATIENCE_S, lambda: failed("timed out"))
        else:
            self._send(ask, reply)

    def _send(self, ask: Callable[[], Answer], reply: Callable[[Answer], None]) -> None:
        self._scheduler.after(self._leg_s(), partial(self._arrived, ask, reply))

    def _arrived(self, ask: Callable[[], Answer], reply: Callable[[Answer], None]) -> None:
        self._scheduler.after(self._leg_s(), partial(reply, ask()))

    def _draw_fate(self) -> str | None:
        faults = self._faults
        if faults is CALM:
            return None
        drawn = self._fate.random()
        for name in faults.__struct_fields__:
            share: float = getattr(faults, name)
            if drawn < share:
                self._costs.faults += 1
                return name
            drawn -= share
        return None

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
        self._scheduler.after(self._leg_s(), partial(answer, outcome))

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

    def _leg_s(self, legs: int = 1) -> float:
        return legs * _LEG_MIN_S * (1.0 - math.log(1.0 - self._latency()))


def _owner_of(row: Lease | None) -> str | None:
    return None if row is None else row.owner
