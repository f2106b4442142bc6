"""The fetching of one lease process, reduced to the times of its events.

A poll without new records is not an event; it is only counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

import msgspec

from kclrun.errors import Unavailable
from kclrun.lease.policy import EVERY_S, Pacing
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.shard import Shard
from kclrun.model.subscribing import SubscriptionPlan
from kclrun.model.time import Instant
from kclrun.protocol.trimming import ExpiryWatch
from kclrun.simulation.observer import Observer, Reader
from kclrun.simulation.shards import FetchFate, ShardStream
from kclrun.simulation.world import FleetSettings

# A round trip to Kinesis; an event of a subscription takes as long from the record's arrival.
_FETCH_S: Final = 0.012


class QueueTimes(msgspec.Struct, frozen=True):
    """The world's clock and the machine's; `after` schedules for the process."""

    world_now: Callable[[], float]
    now: Callable[[], Instant]
    after: Callable[[float, Callable[[], None]], None]


class FetchHost(Protocol):
    """Takes the news of the fetching."""

    def page_came(self) -> None:
        """A page, or an event, has arrived; `fetched` counts its records."""
        ...

    def shard_expired(self) -> None:
        """It is proven that the shard was trimmed."""
        ...


class SimulatedFetching:
    """A poll each idle interval brings the records that have arrived, or with `fan_out` an event at
    once. As in a lease process `model/subscribing.py` decides about subscriptions.

    `fetch_fault` returns the error of a fetch, or None for a page. `chance` is for the pauses after
    a failed fetch. `list_shards` answers with None where it fails.
    """

    def __init__(
        self,
        reader: Reader,
        stream: ShardStream,
        observer: Observer,
        times: QueueTimes,
        settings: FleetSettings,
        *,
        chance: Callable[[], float],
        fetch_fault: Callable[[], FetchFate | None],
        list_shards: Callable[[Callable[[tuple[Shard, ...] | None], None]], None],
    ) -> None:
        self._key: LeaseKey = reader.key
        self._stream = stream
        self._observer = observer
        self._world_now = times.world_now
        self._now = times.now
        self._after = times.after
        self._chance = chance
        self._fetch_fault = fetch_fault
        self._list_shards = list_shards
        self._failover_s = settings.failover_s
        self._host: FetchHost
        # The number of the last record that has arrived here.
        self.fetched = 0
        self.is_expired = self._saw_end = False
        self._expiry: ExpiryWatch | None = None
        self._pacing = Pacing(settings.poll_s, every_s=EVERY_S)
        self._poll_s = self._pacing.idle_s
        self._subscribing = SubscriptionPlan() if settings.fan_out else None
        self._subscription: object | None = None  # the one that stands
        self._is_failing = False
        self._fetches = 0

    def begin(self, row: Lease, host: FetchHost) -> None:
        """Fetch from the row's checkpoint on."""
        self._host = host
        self.fetched = self._stream.records.number_of(self._key, row.checkpoint)
        self._expiry = ExpiryWatch(self._key, row.hash_range, row.parents, apart_s=self._failover_s)
        self._fetch_in(_FETCH_S)

    def shard_closed(self) -> None:
        """The shard was split or merged: the next poll, or an event, has its end."""
        if self._fetches:
            self._fetch_in(_FETCH_S if self._subscription else self._poll_s)

    def is_over(self) -> bool:
        """Whether its last page, which contains the shard's end, came before it was trimmed."""
        if not self._saw_end and self._stream.finds(self._key):
            self._saw_end = self.fetched == self._stream.records.total(self._key)
        return self._saw_end

    def _fetch(self) -> None:
        """A page has arrived, or an event, or an error instead of it."""
        if self._subscribing is not None:
            self._subscribe_if_due(self._subscribing)
        fault = self._fetch_fault()
        if fault is None and not self._stream.finds(self._key):
            fault = "not_found"
        if fault == "not_found" and self._is_checking_for_expiry():
            return
        if self._subscription and fault in {"unreachable", "not_found"}:
            self._subscription_broke(self._subscription, "subscription_broke")
            return
        if self._subscription:
            fault = None  # an event is not throttled, and needs no iterator
        if fault is not None:
            self._is_failing = True
            self._fetch_in(self._pause_after(fault))
            return
        if self._expiry is not None:
            self._expiry.page_came()
        if self._is_failing:
            self._is_failing = False
            self._pacing.after_page(0, 0)
        if self._subscribing is not None:
            if self._subscription:
                self._subscribing.event_came()
            else:
                self._subscribing.polled(self._now())
        now = self._world_now()
        self.fetched = max(self.fetched, self._stream.records.arrived(self._key, now))
        self._host.page_came()
        self._fetch_next(now)

    def _fetch_next(self, now: float) -> None:
        """Fetch the next page at the poll by which new records will have arrived, or when an event
        brings them; or when the next subscription is due, or the renewal of this one."""
        if self.is_over():
            return
        due_in_s = math.inf
        if self._subscribing is not None:
            due_in_s = self._subscribing.next_change_in_s(self._now())
        arrives = self._stream.records.arrival_of(self._key, self.fetched + 1)
        if self._subscription:
            pause_s = max(0.0, arrives - now) + _FETCH_S
        else:
            pause_s = math.inf
            if math.isfinite(arrives):
                pause_s = max(1, math.ceil((arrives - now) / self._poll_s)) * self._poll_s
        if min(pause_s, due_in_s) < math.inf:
            self._fetch_in(min(pause_s, due_in_s))

    def _subscribe_if_due(self, plan: SubscriptionPlan) -> None:
        if self._subscription and plan.is_renewal_due(self._now()):
            self._subscription = None
            plan.ended(self._now(), self._chance())
        if self._subscription or not plan.is_due(self._now()):
            return
        fault = self._fetch_fault()
        if fault is not None or not self._stream.finds(self._key):
            plan.failed(Unavailable(fault or "not_found"), self._now(), self._chance())
            return
        subscription = object()

        def taken_over() -> None:
            """It arrives as an event of the stream, when this process runs."""
            broke = partial(self._subscription_broke, subscription, "subscription_taken_over")
            self._after(_FETCH_S, broke)

        if self._stream.subscribe(self._key, self._world_now(), taken_over):
            self._subscription = subscription
            plan.began(self._now(), self._chance())
        else:
            self._observer.coverage.seen("subscription_refused")
            plan.failed(Unavailable("in use"), self._now(), self._chance())

    def _subscription_broke(self, subscription: object, situation: str) -> None:
        """Go on by polling. Does nothing for a subscription that stands no more."""
        if self._subscribing is None or subscription is not self._subscription:
            return
        self._subscription = None
        self._observer.coverage.seen(situation)
        self._subscribing.failed(Unavailable(situation), self._now(), self._chance())
        self._fetch_in(_FETCH_S)

    def _pause_after(self, fault: FetchFate) -> float:
        match fault:
            case "expired_iterator":  # GetShardIterator after the last record, then GetRecords
                self._observer.coverage.seen("iterator_expired")
                return 2 * _FETCH_S
            case "throttled":
                self._observer.coverage.seen("reads_throttled")
                return self._pacing.after_throttle(self._chance())
            case "unreachable" | "not_found":
                return self._pacing.after_error(self._chance())

    def _is_checking_for_expiry(self) -> bool:
        """As in the fetch thread: two listings may prove that the shard was trimmed [P13]."""
        expiry = self._expiry
        if expiry is None or not expiry.is_listing_due(self._now()):
            return False

        def listed(shards: tuple[Shard, ...] | None) -> None:
            if shards is None:
                expiry.listing_failed(self._now())
            elif expiry.listing_came(shards, self._now()):
                self.is_expired = True
                self._host.shard_expired()
                return
            self._fetch_in(self._pause_after("not_found"))

        self._list_shards(listed)
        return True

    def _fetch_in(self, pause_s: float) -> None:
        self._fetches += 1
        number = self._fetches
        self._after(pause_s, lambda: self._fetch() if number == self._fetches else None)
