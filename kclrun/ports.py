"""The needs of the shells, as small Protocols; the pure retry classification; and the pump, which
drives a core.

May know: the model and the errors. Must not know: how they are implemented. Implementations: `aws/`
(the service), `local/` (in memory, the embedded model). One contract suite for each port runs over
all of them (`tests/contract/`).
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from kclrun.codec.record_sizes import RecordLimit
from kclrun.errors import ServiceError
from kclrun.model.instance import InstanceIdentity, InstanceLook, LifecycleAction
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.letter import KeptLetter, Letter, Takeover, Unusable, refuse_entry
from kclrun.model.output import Cursor, Message, MessageLimits
from kclrun.model.reading import RECORDS_A_CALL, FetchedPage, PageCursor
from kclrun.model.record import PutEntry, PutResult, StartPoint
from kclrun.model.sequence import AT_TIMESTAMP, ExtendedSequenceNumber
from kclrun.model.shard import Shard
from kclrun.model.time import Instant, WallTime
from kclrun.processor import Row
from kclrun.protocol.writes import LeaseChange, Outcome


class ShardReader(Protocol):
    """Reading one shard by polling. Calls raise ServiceError leaves and do not retry."""

    def iterator(self, shard_id: str, start: StartPoint) -> str:
        """A shard iterator, good for five minutes. Raises: NotFound, Throttled, Unavailable, …"""
        ...

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        """One GetRecords. Raises: ExpiredIterator, Throttled, Unavailable, NotFound, …"""
        ...


class Subscription(Protocol):
    """One subscription to one shard (enhanced fan-out). Used by one thread."""

    @property
    def is_over(self) -> bool:
        """Whether the service has ended it: after five minutes, or with the shard."""
        ...

    def next_page(self, timeout_s: float) -> FetchedPage | None:
        """The next event; None if none came in that time, or none will (`is_over`).

        Raises: a ServiceError leaf, RecordError; then close it.
        """
        ...

    def close(self) -> None:
        """The service sends no more to it."""
        ...


class ShardSubscriber(Protocol):
    """Reading shards by subscriptions of one registered consumer."""

    def subscribe(self, shard_id: str, start: StartPoint) -> Subscription:
        """Sent once. Raises: Unavailable (the consumer is not ACTIVE yet, or subscribed to this
        shard less than five seconds ago), Throttled, NotFound, AccessDenied, InvalidRequest."""
        ...


def next_page(
    reader: ShardReader, shard_id: str, cursor: PageCursor, limit: int = RECORDS_A_CALL
) -> FetchedPage:
    """The cursor's next page, by one call, or by two where it needs an iterator first.

    Raises: a ServiceError leaf, RecordError; the cursor has noted the error and can go on.
    """
    try:
        if cursor.iterator is None:
            cursor.opened(reader.iterator(shard_id, cursor.start))
        assert cursor.iterator is not None, "it has just been opened"
        page = cursor.unreceived(reader.fetch(cursor.iterator, limit))
    except ServiceError as error:
        cursor.failed(error)
        raise
    cursor.took(page)
    return page


class StreamSummary(msgspec.Struct, frozen=True):
    """DescribeStreamSummary, as far as we use it. `created_at` identifies a re-created stream.
    `record_bytes_max` is None where the service does not say it."""

    name: str
    arn: str
    status: str
    retention_hours: int
    open_shards: int
    created_at: WallTime
    record_bytes_max: int | None = None
    is_on_demand: bool = False


class ShardFilter(msgspec.Struct, frozen=True):
    """A ListShards filter: AT_TRIM_HORIZON, AT_LATEST, AT_TIMESTAMP (with its time), …"""

    kind: str
    timestamp: WallTime | None = None

    @classmethod
    def at(cls, position: ExtendedSequenceNumber, at: WallTime | None) -> ShardFilter:
        """The shards at a start sentinel; `at` is the instant of AT_TIMESTAMP."""
        if position.sequence_number == AT_TIMESTAMP.sequence_number:
            return cls(position.sequence_number, at)
        return cls(f"AT_{position.sequence_number}")


class StreamAdmin(Protocol):
    """The control plane of one stream."""

    def summary(self) -> StreamSummary: ...

    def list_shards(self, shard_filter: ShardFilter | None = None) -> tuple[Shard, ...]:
        """A complete listing (all pages), or a ServiceError; never a part."""
        ...


def record_limit(admin: StreamAdmin) -> RecordLimit:
    """The limit of the records of a stream; asks for it when it matters."""
    return RecordLimit(
        lambda: admin.summary().record_bytes_max, clock=time.monotonic, wait=time.sleep
    )


class RecordPutter(Protocol):
    """Writing to one stream. Threads may share it."""

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        """One PutRecords, sent once: a result for each entry, in order.

        At most 500 entries within the request's bytes. A refused entry is a result with its
        `error_code`, not an error. Raises, where the request as a whole failed: Throttled,
        Unavailable, OutcomeUnknown (some of it may be in the stream), AccessDenied, NotFound,
        InvalidRequest.
        """
        ...

    def prove(self) -> str:
        """In words whether the caller may write: proven, or why it is not. Leaves nothing behind.
        Raises: AccessDenied with what to allow; another leaf of ServiceError."""
        ...


class MessageSender(Protocol):
    """Sending to one queue, topic or delivery stream. Threads may share it."""

    @property
    def where(self) -> str:
        """The destination, for people."""
        ...

    @property
    def limits(self) -> MessageLimits:
        """Those of the service, until `look` has found those of the destination itself."""
        ...

    def look(self) -> None:
        """Find the destination and its limits; changes nothing. Raises: a ServiceError leaf."""
        ...

    def send(self, messages: Sequence[Message]) -> Sequence[str | None]:
        """One request, sent once, within the limits: for each message None once it is taken, or
        the error code of its refusal. Raises, where the request as a whole failed: Throttled,
        Unavailable, OutcomeUnknown (some of it may be there), AccessDenied, NotFound,
        InvalidRequest."""
        ...

    def prove(self) -> str:
        """In words whether the caller may send, once `look` has found the destination: proven, or
        why it is not. Leaves nothing behind. Raises: AccessDenied with what to allow; another leaf
        of ServiceError."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class ScanPage(msgspec.Struct, frozen=True):
    """One page of a scan: the rows that are leases, and the keys of broken rows.

    `foreign` counts rows of another `entityType` [P8]. `kcl3_mode` is the state of a KCL 3 fleet,
    from the row that holds it; None if that row is not on this page. `reasons`: why each broken row
    cannot be read.
    """

    leases: tuple[Lease, ...]
    broken: tuple[str, ...] = ()
    foreign: int = 0
    kcl3_mode: str | None = None
    reasons: Mapping[str, str] = {}


class LeaseTable(Protocol):
    """The rows that all owners share. Every write is conditional; calls do not retry."""

    def scan(self, *, consistent: bool = True) -> Iterator[ScanPage]:
        """All pages, consistently read; else each row may be a moment old, for half the read units.

        Raises a ServiceError leaf; a broken row never fails it.
        """
        ...

    def read(self, key: LeaseKey) -> Lease | None:
        """One row by consistent read; None if there is none. Raises a ServiceError leaf."""
        ...

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """Rows that wait for a taker: found by the owner index, read consistently [P17].

        At most `rows_max`, at random among more. Raises a ServiceError leaf;
        `IndexMissing` if the table has no such index.
        """
        ...

    def write(self, change: LeaseChange) -> Outcome:
        """Send one change once. Never raises a ServiceError: each outcome is a value."""
        ...


class CoordinatorState(Protocol):
    """The place where a KCL 3 fleet of an early version keeps its mode: not in the lease table."""

    def mode(self) -> str | None:
        """The current mode; None if there was not such a fleet yet.

        Raises: AccessDenied and InvalidRequest, for good; Throttled, Unavailable.
        """
        ...


Metric = TypeVar("Metric")


class MetricOutlet(Protocol[Metric]):
    """A service that keeps metrics, each in its own form. Used by one thread."""

    def batches(self, measurements: Sequence[Metric]) -> Iterator[Sequence[Metric]]:
        """The measurements, in parts that each fit into one request."""
        ...

    def put(self, batch: Sequence[Metric]) -> None:
        """Send one batch once. Raises: Throttled, Unavailable (nothing happened), OutcomeUnknown
        (it may count already), AccessDenied, InvalidRequest, and errors of wrong settings."""
        ...


class LetterStore(Protocol):
    """The place of an application's dead letters. Used by one thread at a time."""

    def keep(self, letter: Letter) -> None:
        """Durable when this returns; if it raises, the letter may or may not be there. The same
        record may be kept twice, after a crash.

        Raises: SinkError; LetterTooLarge, where no try can succeed.
        """
        ...

    def take_over(self, takeover: Takeover) -> None:
        """Durable when this returns, as a letter is: `kept` then marks letters of former owners as
        those of uncommitted work. Raises: SinkError.
        """
        ...

    def kept(self, unusable: Unusable = refuse_entry) -> Iterator[KeptLetter]:
        """The letters, shard by shard in the order of the records, as `classified` gives them.

        `unusable` gets a sentence about each entry of the place that is not a letter that this
        version reads; the others follow. Raises: what it raises; SettingsError, if the place as a
        whole cannot be read; a ServiceError leaf.
        """
        ...

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        """Remove letters that `kept` gave; it does not matter if one is gone already. Raises: a
        ServiceError leaf; then some of them may be left."""
        ...

    def check(self) -> str:
        """The place in words. If it is a service: it is there and may be used.
        Changes nothing. Raises: a ServiceError leaf."""
        ...

    def close(self) -> None:
        """Other readers may receive the letters that `kept` gave and that were not removed."""
        ...


class VersionStore(Protocol):
    """Where the versions of the keyed state are, by shard and name (`state/versions.py`). A name is
    written by one process only, at most once with success, and never again after `delete`.

    Every method raises SinkError while the store is away.
    """

    def create(self, shard: str, name: str, content: bytes) -> None:
        """The version is durable when this returns, whole. Called again with the same content after
        an error, also if the first attempt did arrive."""
        ...

    def read(self, shard: str, name: str) -> bytes | None:
        """The content; None if there is no such version, and never because the store is away."""
        ...

    def list(self, shard: str) -> Iterable[tuple[str, float]]:
        """The names of the shard's versions, each with its age in seconds."""
        ...

    def shards(self) -> Iterable[str]:
        """The shards that have versions here, in the order of their ids."""
        ...

    def delete(self, shard: str, names: Sequence[str]) -> None:
        """Remove these versions; one that is gone already is not an error."""
        ...

    def check(self) -> str:
        """The store in words, if it may be used: a probe is written and read. Raises: a
        ServiceError leaf, SinkError or SettingsError."""
        ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...


class ClaimStore(VersionStore, Protocol):
    """A store in which several writers may want one name, and the first has it: on Spark each
    attempt at a task claims the name of its shard's state [K21]."""

    def claim(self, shard: str, name: str, content: bytes) -> bytes:
        """Create the name, durable when this returns, unless it is there. Returns the content that
        it has from now on: this one, or that of the writer that was first."""
        ...


class Output(Protocol):
    """One destination of the rows of one shard, for one owner of its lease.

    `encode` is called by threads of user code, everything else by one thread at a time, in this
    order: `begin`, again while another output of the lease is away; then `add` and `commit` as
    often as needed; `close` at the end. Rows that were given to `add` are never taken back.

    `stores_cursor`: the destination keeps the cursor of a commit together with its rows, so that
    they are there exactly once. Without it rows appear again after a crash.
    """

    stores_cursor: bool

    def encode(self, row: Row) -> tuple[Any, int]:
        """The row in the form that `add` takes, and its size in bytes. `Context.emit` has checked
        it: with a schema in the settings it has every column, in their order.

        Raises: TypeError or LimitExceeded, naming the column and never a value, for a row that can
        never be written."""
        ...

    def begin(self, at: Cursor) -> Cursor:
        """Take the destination over from every former owner, whose late writes fail from here on
        [K11]. `at` is the cursor that the lease's row has for this output.

        Returns the cursor of the destination: `at`, or a greater one, up to which its rows are
        there already. Raises: SinkError (again later); SettingsError, in words, where no
        repetition helps (a token above ours, a table with other columns).
        """
        ...

    def add(self, rows: Sequence[Any], upto: Cursor) -> None:
        """Take the rows of finished calls, which follow those of the last `add`: rows up to
        `upto` are complete. Some of them may be sent already. Raises: SinkError; none was taken
        then, and the same rows are given again."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the next `commit` has to send."""
        ...

    def commit(self) -> Cursor:
        """All rows that were added are durable, with their cursor, when this returns; the cursor
        is that of the last `add`. Nothing is sent if no row was added since the last commit and
        the destination needs no mark.

        Raises: SinkError (it is called again before anything is added: the same rows, the same
        condition; an unknown outcome is resolved first [K6]); Superseded if another owner has
        written there: the process ends and begins again from the row; SettingsError where no
        repetition helps.
        """
        ...

    def check(self) -> str:
        """The destination in words, if it is there and may be used. Leaves nothing behind that a
        reader would take for a row. Needs no `begin`. Raises: a ServiceError leaf, SinkError or
        SettingsError, naming the destination."""
        ...

    def close(self) -> None:
        """Release connections and files; rows that were not committed are dropped. Idempotent."""
        ...


class TryingOutput(Output, Protocol):
    """An output whose destination may refuse rows for their values: `commit` raises RowsRefused
    then, and has committed none of them, or whole rows that a repetition does not double."""

    def is_tried_with(self, other: Output) -> bool:
        """Whether rows of the other output may be needed for ours, or in their way: where rows of
        one of the two are tried, those of both are."""
        ...

    def try_rows(self, rows: Sequence[Any], before: Sequence[tuple[Output, Sequence[Any]]]) -> None:
        """Let the destination check rows that were not added yet, and keep none of them. `before`:
        the rows that outputs, also this one, get before these, and that they may not have yet.

        Raises: TypeError, naming the column and never a value, if it refuses `rows`; RowsRefused
        if it refuses those before; what `commit` raises."""
        ...


class InstanceMetadata(Protocol):
    """The metadata that EC2 offers an instance about itself. Used by one thread at a time. A
    missing service costs its caller a second, one that hangs a few."""

    def identify(self) -> InstanceIdentity:
        """The identity of this instance. Raises: Unavailable without an answer or outside EC2."""
        ...

    def look(self) -> InstanceLook:
        """The announced events of the instance. Raises: Unavailable."""
        ...


class LifecycleActions(Protocol):
    """The lifecycle actions of an autoscaling group. Threads may share it; each request is sent
    once.

    Both raise: NotFound (no such hook or group, or nothing waits there), Throttled, Unavailable,
    OutcomeUnknown, AccessDenied, InvalidRequest.
    """

    def heartbeat(self, action: LifecycleAction) -> None:
        """Restart the time of the hook."""
        ...

    def complete(self, action: LifecycleAction) -> None:
        """Ask the group to go on."""
        ...


# The next try repairs a dropped connection or a single 5xx; if it fails too, it is an outage.
NOTICED_S: Final = 1.0


class Outage:
    """The outage of one kind of work in one thread. Warns once at its beginning, when it has lasted
    for `noticed_s`, and at its end."""

    def __init__(
        self,
        work: str,
        now: Callable[[], Instant],
        warn: Callable[[str], None],
        noticed_s: float = NOTICED_S,
    ) -> None:
        self._work = work
        self._now = now
        self._warn = warn
        self._noticed_s = noticed_s
        self._since: Instant | None = None
        self._is_logged = False

    def note(self, message: str, asked: Instant) -> None:
        """A try that began at `asked` failed: the outage of a hanging service begins then."""
        if self._since is None:
            self._since = asked
        if self._now() - self._since >= self._noticed_s:
            self._tell(message)

    def note_lasting(self, message: str, asked: Instant) -> None:
        """As `note`, for a failure that a repetition does not change: the warning comes at once."""
        self.note(message, asked)
        self._tell(message)

    def _tell(self, message: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            self._warn(f"{self._work} fails and is tried again: {message}")

    def end(self) -> None:
        """A try succeeded."""
        if self._is_logged and self._since is not None:
            self._warn(f"{self._work} works again after {self._now() - self._since:.1f} s")
        self._since = None
        self._is_logged = False


class Retry(enum.Enum):
    """The reaction to a failed request."""

    AGAIN_SLOWER = "throttled: nothing happened, wait longer"
    AGAIN = "not sent or harmless to repeat: ask again"
    READ_BACK = "a write with an unknown outcome: read before deciding"
    NEW_ITERATOR = "the iterator expired"
    GIVE_UP = "repeating will not help"


_THROTTLES: Final = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "LimitExceededException",
        "Throttling",  # CloudWatch and STS, by their older protocol
        "ThrottlingException",
        "ThrottledException",
        "RequestLimitExceeded",
        "TooManyRequestsException",
        "KMSThrottlingException",
        "KmsThrottled",  # SQS
        "RequestThrottled",  # SQS
        "SlowDown",
    }
)
# The operator must repair a KMS error while the shard waits; the Java KCL retries them for ever.
_TRANSIENT: Final = frozenset(
    {
        "InternalFailure",
        "InternalFailureException",
        "InternalServerError",
        "ServiceUnavailable",
        "ServiceUnavailableException",
        "TransactionInProgressException",
        "TransactionConflictException",
        "KMSAccessDeniedException",
        "KMSDisabledException",
        "KMSInvalidStateException",
        "KMSNotFoundException",
        "KMSOptInRequired",
        "ResourceInUseException",
    }
)


def classify(code: str, status: int | None, *, is_write: bool, was_sent: bool) -> Retry:
    """Decide the reaction to a failed request, only from these facts about it.

    `code` is the service's error name, or "" for a transport failure; `status` the HTTP status,
    None where no answer came; `was_sent` whether any byte of the request may have reached the
    service. A write without a clear answer is READ_BACK [P6].
    """
    if code in _THROTTLES or status == 429:
        return Retry.AGAIN_SLOWER
    if code == "ExpiredIteratorException":
        return Retry.NEW_ITERATOR
    unclear = status is None or status >= 500
    if unclear and is_write and was_sent:
        return Retry.READ_BACK
    if unclear or code in _TRANSIENT:
        return Retry.AGAIN
    return Retry.GIVE_UP


# The order in which a shell drives a core: events, the commands that follow, answers of requests.
# The simulator uses it, too, and so proves the order of the code that runs.
EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")


class Pump(Generic[EventT, CommandT]):
    """Gives a core its events one after another, and performs all commands of one before the next.

    So a core never sees the consequence of a command before the command was performed. The answer
    of a request that holds the shell comes before the events that happened meanwhile. While
    `is_held`, nothing is handled: a request is under way, or the core has come to its end.
    """

    def __init__(
        self,
        handle: Callable[[EventT], Iterable[CommandT]],
        perform: Callable[[CommandT], None],
    ) -> None:
        self.is_held = False
        self._handle = handle
        self._perform = perform
        self._commands: deque[CommandT] = deque()
        self._answers: deque[EventT] = deque()
        self._events: deque[EventT] = deque()
        self._is_running = False

    def post(self, event: EventT) -> None:
        """An event happened; it is handled after the earlier ones, by `run`."""
        self._events.append(event)

    def answer(self, event: EventT) -> None:
        """A request was answered; the answer is handled first, by `run`."""
        self.is_held = False
        self._answers.append(event)

    def run(self) -> bool:
        """Handle everything that has happened. False from within a command: the outer call does."""
        if self._is_running:
            return False
        self._is_running = True
        try:
            while not self.is_held:
                if self._commands:
                    self._perform(self._commands.popleft())
                elif self._answers or self._events:
                    event = (self._answers or self._events).popleft()
                    self._commands.extend(self._handle(event))
                else:
                    break
        finally:
            self._is_running = False
        return True
