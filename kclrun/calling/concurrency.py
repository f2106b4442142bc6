"""Which records of a shard are processed at the same time, and up to which all are done. Pure.

`admit` takes records in and numbers them, from 0 in their order. The shell starts the records that
`starts` returns, and reports how each call ended. `next_step` returns how far all are done:

    admitted ──► waits for its key ──► runs ──► done ───────────► settled, in the shard's order
                                        │ ▲                        ▲
                                        ▼ │ rests                  │ its letter is durable
                                      raised ─────────► given up ──┘

A record is settled once it is done or let go of, and every record before it is settled. A commit
covers settled records and no others [K19]. `failures.BatchRun` decides about a record whose call
raised, as about a batch of that one record. With `order: key` the next record of a key waits until
the record before it is done, also while that one rests before its repetition or waits for its
letter.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from kclrun.calling.failures import (
    OUTAGE_AFTER,
    BatchRun,
    Breaker,
    Halt,
    LetGo,
    Rest,
    outage_words,
)
from kclrun.model.policies import Concurrency, ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.time import Instant, WallTime

# Further batches join while fewer records than this are unsettled: as many as one batch may have.
# So memory holds two batches at most, and a record that takes long delays the commit of some 10,000
# records, as one call with a batch does.
AHEAD_MAX: Final = 10_000
# The rows and changes of the state that records keep which are done and not settled. With so many
# bytes kept, only the first record that is not done may start. Each record that runs at that moment
# may still add its own (RECORD_ROWS_BYTES_MAX of `processor.py`).
KEPT_BYTES_MAX: Final = 64 * 2**20
_NO_LIMIT: Final = 2**63


class Settled(msgspec.Struct, frozen=True, gc=False):
    """Every record below the number `upto` is settled: its effects may be committed."""

    upto: int


WindowStep = Settled | LetGo | Halt


class _State(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    RESTING = enum.auto()
    DONE = enum.auto()
    GIVEN_UP = enum.auto()
    LETTER = enum.auto()  # its letter is being kept
    HALTS = enum.auto()
    LEFT = enum.auto()  # undone, for the next owner

    __hash__ = object.__hash__


class _Entry:
    __slots__ = ("halt", "record", "run", "state")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.state = _State.WAITING
        self.run: BatchRun | None = None
        self.halt = ""


class RecordWindow:
    """The records from the first that is not settled to the last admitted.

    The shell admits records, calls `starts` whenever a call ended or time passed, and then performs
    `next_step` until that is None. The window ends when `is_over`: every record is settled, or no
    record that is left may start.
    """

    def __init__(self, concurrency: Concurrency, policy: ErrorPolicy, breaker: Breaker) -> None:
        self._records_max = concurrency.records
        self._order: Literal["shard", "key", "none"] = concurrency.order
        if concurrency.records == 1:
            self._order = "shard"
        self._policy = policy
        self._breaker = breaker
        self._entries: dict[int, _Entry] = {}
        self._base = self._reported = self._next = 0
        self._highest = -1  # the highest number that started
        self._ready: list[int] = []
        # By key: the numbers that wait for the record under way; None if none waits.
        self._chains: dict[str, deque[int] | None] = {}
        self._resting: dict[int, Instant] = {}
        self._limit = _NO_LIMIT
        self._is_stopped = self._is_halted = False
        self.running = 0
        # Since the last admission: whether a record succeeded, and how many were given up.
        self._has_success = False
        self._given_up = 0

    @property
    def first(self) -> int:
        """The first number that is not settled."""
        return self._base

    @property
    def end(self) -> int:
        """The number of the next record that is admitted."""
        return self._next

    @property
    def unsettled(self) -> int:
        """The records that are admitted and not settled."""
        return self._next - self._base

    @property
    def may_admit(self) -> bool:
        """Whether another batch may join."""
        return self.unsettled < AHEAD_MAX and self._limit == _NO_LIMIT

    @property
    def is_over(self) -> bool:
        """Whether no call runs and none will start. Ask after `next_step` returned None."""
        if self.running or self._is_halted:
            return not self.running
        return not self._resting and not (self._ready and self._ready[0] < self._limit)

    @property
    def wake_instant(self) -> Instant | None:
        """When the next repetition is due."""
        return min(self._resting.values(), default=None)

    def record(self, number: int) -> Record:
        """An admitted record that is not settled."""
        return self._entries[number].record

    def admit(self, records: Sequence[Record]) -> None:
        """Take in the next records of the shard."""
        self._has_success, self._given_up = False, 0
        for record in records:
            number = self._next
            self._next += 1
            self._entries[number] = _Entry(record)
            if self._order == "none":
                heapq.heappush(self._ready, number)
                continue
            key = record.partition_key if self._order == "key" else ""
            if key not in self._chains:
                self._chains[key] = None
                heapq.heappush(self._ready, number)
            elif (chain := self._chains[key]) is not None:
                chain.append(number)
            else:
                self._chains[key] = deque((number,))

    def starts(self, now: Instant, kept_bytes: int = 0) -> list[int]:
        """The numbers to start now, the lowest first. They count as running from here on.

        `kept_bytes`: the bytes that records keep which are done and not settled.
        """
        if self._resting:
            for number in [number for number, due in self._resting.items() if due <= now]:
                del self._resting[number]
                heapq.heappush(self._ready, number)
        started: list[int] = []
        ready, is_full = self._ready, kept_bytes >= KEPT_BYTES_MAX
        while ready and self.running < self._records_max:
            number = ready[0]
            if number >= self._limit or (is_full and number != self._base):
                break
            heapq.heappop(ready)
            self._entries[number].state = _State.RUNNING
            self.running += 1
            self._highest = max(self._highest, number)
            started.append(number)
        return started

    def returned(self, number: int) -> int | None:
        """The call returned: the record is done. Returns: how many attempts failed before, which
        RetryLater is not; None if no call raised."""
        entry = self._entries[number]
        entry.state = _State.DONE
        self.running -= 1
        self._has_success = True
        self._let_key_go_on(entry)
        return None if entry.run is None else entry.run.calls

    def checked(self, number: int, error: BaseException) -> BaseException:
        return self._run_of(self._entries[number]).checked(error)

    def raised(
        self,
        number: int,
        error: BaseException,
        now: Instant,
        wall: WallTime,
        *,
        is_host_fault: bool = False,
    ) -> float | None:
        """The call raised the error that `checked` returned. Returns: the pause before the call is
        repeated; None if it is not repeated."""
        entry = self._entries[number]
        self.running -= 1
        run = self._run_of(entry)
        pause_s = run.raised(
            error, now, wall, at=entry.record.position, is_host_fault=is_host_fault
        )
        if run.is_isolating:
            self._give_up(number, entry)
            return None
        match run.next_step(now):
            case Rest() if self._is_stopped:
                self._leave(number, entry)
                return None
            case Rest(rest_s):
                entry.state = _State.RESTING
                self._resting[number] = Instant(now + rest_s)
            case Halt(reason):
                self._halt(number, entry, reason)
        return pause_s

    def abandoned(self, number: int) -> None:
        """The call was cancelled: the record is left to the next owner."""
        self.running -= 1
        self._leave(number, self._entries[number])

    def let_go(self, number: int) -> None:
        """The letter of the last LetGo is durable, or its record was counted as skipped."""
        entry = self._entries[number]
        entry.state = _State.DONE
        self._let_key_go_on(entry)

    def next_step(self, now: Instant) -> WindowStep | None:
        """The next step for the shell; None while it waits for a call to end or for time to
        pass."""
        while (entry := self._entries.get(self._base)) is not None:
            if entry.state is not _State.DONE:
                break
            del self._entries[self._base]
            self._base += 1
        if self._base > self._reported:
            self._reported = self._base
            return Settled(self._base)
        if entry is None or self._is_halted:
            return None
        if entry.state is _State.GIVEN_UP and self._may_let_go():
            match self._run_of(entry).next_step(now):
                case LetGo(_, calls):
                    entry.state = _State.LETTER
                    return LetGo(self._base, calls)
                case Halt(reason):
                    self._halt(self._base, entry, reason)
                case _:
                    pass
        if entry.state is _State.HALTS and not self.running:
            self._is_halted = True
            return Halt(entry.halt)
        return None

    def stop(self) -> None:
        """The lease is given away. Records below the last one that started may still start, because
        later records that are done count only once all before them are done. No other may, and none
        behind a record that is left undone."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._limit = min(self._limit, self._highest + 1)
        for number in tuple(self._resting):
            del self._resting[number]
            self._leave(number, self._entries[number])

    def stop_at_once(self) -> None:
        """The lease is lost: start no record any more."""
        self.stop()
        self._limit = self._base

    def _run_of(self, entry: _Entry) -> BatchRun:
        """The `BatchRun` of this one record, made at its first failure."""
        if entry.run is None:
            entry.run = BatchRun((entry.record,), self._policy, self._breaker)
        return entry.run

    def _let_key_go_on(self, entry: _Entry) -> None:
        if self._order == "none":
            return
        key = entry.record.partition_key if self._order == "key" else ""
        chain = self._chains[key]
        if chain:
            heapq.heappush(self._ready, chain.popleft())
        else:
            del self._chains[key]

    def _give_up(self, number: int, entry: _Entry) -> None:
        """As for a batch: if the first ten records fail and none succeeds, it is an outage."""
        entry.state = _State.GIVEN_UP
        self._given_up += 1
        if self._given_up >= OUTAGE_AFTER and not self._has_success:
            given_up = (
                n for n, candidate in self._entries.items() if candidate.state is _State.GIVEN_UP
            )
            first = min(given_up, default=number)
            self._halt(first, self._entries[first], outage_words())

    def _may_let_go(self) -> bool:
        """Whether a record may be let go of: another one succeeded, or none is left that could."""
        has_more = bool(self._ready) and self._ready[0] < self._limit
        return self._has_success or not (self.running or self._resting or has_more)

    def _halt(self, number: int, entry: _Entry, reason: str) -> None:
        """Records before this one go on; no record behind it starts."""
        entry.state, entry.halt = _State.HALTS, reason
        self._limit = min(self._limit, number)
        for behind in [n for n in self._resting if n > number]:
            del self._resting[behind]
            self._entries[behind].state = _State.LEFT

    def _leave(self, number: int, entry: _Entry) -> None:
        entry.state = _State.LEFT
        self._limit = min(self._limit, number)
