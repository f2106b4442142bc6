"""Performs the requests of the planner, several at once; each outcome is a value. Decides nothing.

Must not know: offsets, the states of shards. Every request gets exactly one answer, also when it
fails.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from kclrun import errors
from kclrun.aws.credentials import CredentialSource
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.http.pool import CONNECTIONS_MAX
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.lease_table import DynamoLeaseTable
from kclrun.aws.wire import WireClient
from kclrun.codec.values import Decode
from kclrun.destinations import open_claims, open_letters, open_registry
from kclrun.model import statuses
from kclrun.model.letter import LetterDestination
from kclrun.model.retries import PASSING, Retries, repeated
from kclrun.model.state import StateDestination
from kclrun.model.stream import is_loopback
from kclrun.model.table import of_another_region
from kclrun.model.wire import WireEndpoint
from kclrun.ports import (
    ClaimStore,
    LetterStore,
    ShardReader,
    ShardSubscriber,
    StreamAdmin,
    StreamSummary,
)
from kclrun.spark.options import LeasesAt, StreamAddress
from kclrun.spark.planning import shard_cursor
from kclrun.spark.stream_set import StreamsAdmin, StreamsReader, StreamsSubscriber, admins_of
from kclrun.spark.subscribed import NamedConsumer

# Checks before a query starts that its stream can be read: one DescribeStreamSummary.
#
# A throttled or broken answer is tried again for some seconds. An error that does not pass is
# raised at once. The message names the stream, its place and the action that the user can take.

# A load balancer changes hosts within seconds; a user waits at the terminal for this answer.
_WAIT_MAX_S: Final = 10.0
_RETRIES: Final = Retries(lasts_s=_WAIT_MAX_S, base_s=0.5, max_s=0.5)


def require_stream(
    admin: StreamAdmin,
    address: StreamAddress,
    *,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> StreamSummary:
    """The stream's own summary, after ten seconds of trying and one more try at most.

    Raises: NotFound, AccessDenied, Unavailable, Throttled, InvalidRequest.
    """
    where = address.endpoint_url or address.region or "the region of this environment"
    try:
        summary = repeated(admin.summary, _RETRIES, wait=wait, chance=lambda: 1.0, clock=clock)
        if statuses.STREAM.trouble(summary.status) is None:
            return summary
    except errors.NotFound as error:
        raise error.reworded(
            f"there is no stream {address.name} at {where}: {error}\n"
            "Check streamName, region and endpointUrl; kclrun does not create streams"
        ) from None
    except errors.AccessDenied as error:
        raise error.reworded(
            f"the stream {address.name} at {where} may not be read: {error}"
        ) from None
    except PASSING as error:
        raise error.reworded(
            f"the stream {address.name} cannot be reached at {where}, tried for"
            f" {_WAIT_MAX_S:.0f} s: {error}\nCheck endpointUrl, region and the network"
        ) from None

    def usable() -> StreamSummary:
        summary = admin.summary()
        statuses.require(statuses.STREAM, f"the stream {address.name}", summary.status)
        return summary

    return repeated(usable, _RETRIES, wait=wait, chance=lambda: 1.0, clock=clock)


# The clients of this process, by the place of their stream: on the driver and on executors.
#
# Each process resolves endpoint and credentials by the AWS chain of its own host: no secret
# travels. A connection is made without a request. The tasks of all queries of an executor share its
# Python workers. Each task reads one stream, and there are few streams. A connection that is
# dropped from this cache stays usable for its users.
_KEPT_MAX: Final = 16


class Connected:
    """A reader and an administrator of one stream or several, over one client. Threads may share
    it.

    At most `connections_max` requests are under way at once; a further request waits for its turn.
    """

    def __init__(self, address: StreamAddress, connections_max: int = CONNECTIONS_MAX) -> None:
        settings = EndpointSettings(region=_region(address), endpoint_url=address.endpoint_url)
        session = open_session(settings)
        self._session = session
        self._registry: Decode | None = None
        self._versions: dict[str, ClaimStore] = {}
        self.endpoint: WireEndpoint = resolve_endpoint(session, "kinesis", settings)
        self._credentials = CredentialSource(
            session,
            endpoint_url=self.endpoint.url,
            role_arn=address.role_arn,
            role_external_id=address.role_external_id,
            role_session_name=address.role_session_name,
            # An emulator on this host also serves STS; any other custom URL serves Kinesis alone.
            sts_endpoint_url=self.endpoint.url if is_loopback(self.endpoint.url) else None,
        )
        self.client = WireClient(
            self.endpoint,
            self._credentials.current,
            service="kinesis",
            connections_max=connections_max,
            reread=self._credentials.reread,
        )
        self.reader: ShardReader
        self.admin: StreamAdmin
        if names := address.several:
            self.reader = StreamsReader({name: PollingReader(self.client, name) for name in names})
            self.admin = StreamsAdmin({name: WireStreamAdmin(self.client, name) for name in names})
        else:
            self.reader = PollingReader(self.client, address.stream)
            self.admin = WireStreamAdmin(self.client, address.stream)

    def subscriber(self, named: str) -> ShardSubscriber:
        """For the consumer of each stream that `consumerName` names, registered if it is not there.

        Raises: as `NamedConsumer.register`; Throttled and Unavailable wait for the first
        subscription.
        """
        by_name = {
            name: NamedConsumer(self.client, admin, named)
            for name, admin in admins_of(self.admin).items()
        }
        for consumer in by_name.values():
            with contextlib.suppress(*PASSING):
                consumer.register()
        return by_name[""] if "" in by_name else StreamsSubscriber(by_name)

    def lease_table(self, leases: LeasesAt) -> DynamoLeaseTable:
        """The table, in the stream's region and by the same credentials; sends nothing.

        Without an endpoint of its own the table is in AWS; if the stream is in an emulator on this
        host, the table is in that emulator.
        """
        wrong = of_another_region(leases.table, self.endpoint.region, "the stream")
        if wrong is not None:
            raise errors.SettingsError(f"startingLeases: {leases.table} {wrong}")
        url = leases.endpoint_url
        if url is None and is_loopback(self.endpoint.url):
            url = self.endpoint.url
        settings = EndpointSettings(region=self.endpoint.region, endpoint_url=url)
        endpoint = resolve_endpoint(self._session, "dynamodb", settings)
        keys = self._credentials
        client = WireClient(endpoint, keys.current, service="dynamodb", reread=keys.reread)
        return DynamoLeaseTable(client, leases.table)

    def letters(self, place: LetterDestination) -> LetterStore:
        """The dead letters at this place; sends nothing.

        With a stream in an emulator on this host, S3 and SQS are in that emulator, too.
        """
        if is_loopback(self.endpoint.url):
            url = self.endpoint.url
            place = msgspec.structs.replace(
                place, s3_url=place.s3_url or url, sqs_url=place.sqs_url or url
            )
        return open_letters(place, self.endpoint, self._credentials.current)

    def versions(self, place: StateDestination, folder: str) -> ClaimStore:
        """The versions of keyed state below a folder of this place; made once, sends nothing.

        With a stream in an emulator on this host, S3 is in that emulator, too. Raises:
        SettingsError for a table.
        """
        known = self._versions.get(folder)
        if known is None:
            if place.endpoint_url is None and is_loopback(self.endpoint.url):
                place = msgspec.structs.replace(place, endpoint_url=self.endpoint.url)
            known = open_claims(place, folder, self.endpoint, self._credentials.current)
            self._versions[folder] = known
        return known

    def registry(self, url: str | None) -> Decode:
        """The schema registry of the stream's region; made once, because it keeps its schemas."""
        if self._registry is None:
            if url is None and is_loopback(self.endpoint.url):
                url = self.endpoint.url
            self._registry = open_registry(self.endpoint, url, self._credentials.current)
        return self._registry

    def __repr__(self) -> str:
        return f"Connected({self.endpoint.url})"


def connected(address: StreamAddress, connections_max: int = CONNECTIONS_MAX) -> Connected:
    """This process's connection to a stream, made at the first call and kept; sends nothing.

    There is one for each value of `connections_max`. A forked process makes its own. Raises:
    SettingsError where the region is unknown.
    """
    return _KEPT.get(address, connections_max)


class Kept:
    """The connections of this process, at most `count_max`; the longest unused leaves first."""

    def __init__(self, make: Callable[[StreamAddress, int], Connected], count_max: int) -> None:
        self._make = make
        self._count_max = count_max
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def get(self, address: StreamAddress, connections_max: int = CONNECTIONS_MAX) -> Connected:
        wanted = (address, connections_max)
        with self._lock:
            found = self._by_wanted.get(wanted)
            if found is None:
                found = self._by_wanted[wanted] = self._make(address, connections_max)
            self._by_wanted.move_to_end(wanted)
            if len(self._by_wanted) > self._count_max:
                self._by_wanted.popitem(last=False)
            return found

    def _forget(self) -> None:
        # A forked child also needs a new lock: a thread of the parent may hold the old one.
        self._lock = threading.Lock()
        self._by_wanted: OrderedDict[tuple[StreamAddress, int], Connected] = OrderedDict()


_KEPT: Final = Kept(Connected, _KEPT_MAX)


def _region(address: StreamAddress) -> str | None:
    """The region given, or that of the ARN; None leaves it to the AWS chain."""
    is_arn = address.stream.startswith("arn:")
    return address.stream.split(":")[3] if is_arn else address.region


Ask = shard_cursor.AskPage | shard_cursor.AskListing
T = TypeVar("T")


class Asking:
    """Sends requests and returns answers. With `calls_at_once` 0 the caller's thread performs
    them."""

    def __init__(
        self,
        reader: ShardReader,
        admin: StreamAdmin,
        *,
        clock: Callable[[], float],
        calls_at_once: int,
    ) -> None:
        self._reader = reader
        self._admin = admin
        self._clock = clock
        self._answers: queue.SimpleQueue[tuple[Ask, shard_cursor.Answer | BaseException] | None] = (
            queue.SimpleQueue()
        )
        self._under_way = 0
        self._pool = None
        if calls_at_once:
            self._pool = ThreadPoolExecutor(calls_at_once, thread_name_prefix="kclrun-requests")

    @property
    def is_waiting(self) -> bool:
        """Whether an answer is still to come."""
        return self._under_way > 0

    def send(self, asks: Sequence[Ask]) -> None:
        """Begin to perform all of these requests."""
        for ask in asks:
            self._under_way += 1
            if self._pool is None:
                self._perform(ask)
            else:
                self._pool.submit(self._perform, ask)

    def receive(self, timeout_s: float) -> tuple[Ask, shard_cursor.Answer] | None:
        """The next answer, None if none comes in time, or at `wake`. Raises: errors that waiting
        cannot repair."""
        try:
            answered = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if answered is None:
            return None
        ask, answer = answered
        self._under_way -= 1
        if isinstance(answer, BaseException):
            raise answer
        return ask, answer

    def all_of(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Perform these calls; their results, in order. Raises: the error of a call; further calls
        are not begun then."""
        if self._pool is None:
            return [call() for call in calls]
        return list(self._pool.map(lambda call: call(), calls))

    def wake(self) -> None:
        """End a `receive` that waits, or the next one. For any thread."""
        self._answers.put(None)

    def close(self) -> None:
        """Send no further request; calls under way end by their own time-outs."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _perform(self, ask: Ask) -> None:
        try:
            answer: shard_cursor.Answer | BaseException = (
                self._list() if ask == shard_cursor.AskListing() else self._page(ask)
            )
        except BaseException as error:  # noqa: BLE001 - passed to the caller, which raises it
            answer = error
        self._answers.put((ask, answer))

    def _list(self) -> shard_cursor.Listed | shard_cursor.NotListed:
        sent_at = self._clock()
        try:
            return shard_cursor.Listed(self._admin.list_shards(), sent_at)
        except PASSING as error:
            return shard_cursor.NotListed(error)

    def _page(self, ask: Ask) -> shard_cursor.Outcome:
        assert isinstance(ask, shard_cursor.AskPage)
        token, opening, sent_at = ask.read.token, ask.read.opening, self._clock()
        try:
            if token is None:
                assert opening is not None
                token = self._reader.iterator(ask.shard_id, opening)
            asked_at = self._clock()
            page = self._reader.fetch(token, ask.read.limit)
        except errors.ExpiredIterator as error:
            return shard_cursor.Expired(error)
        except errors.Throttled as error:
            return shard_cursor.Slowed(token, error)
        except errors.Unavailable as error:
            return shard_cursor.Delayed(token, error)
        except errors.NotFound as error:
            return shard_cursor.Gone(error, sent_at)
        except errors.InvalidRequest as error:
            return shard_cursor.Refused(error)
        return shard_cursor.Paged(token, page, asked_at, self._clock())
