"""Every error kclrun raises, as one tree: the responsible side first, the next action at the
leaves.

    KclrunError
    ├── ConfigError                the operator's: fix the file or the command line
    │   ├── SettingsError            a value in the configuration is wrong, unknown or missing
    │   ├── ProcessorLoadError       the processor cannot be imported or is not a RecordProcessor
    │   ├── HostRefused              this host lacks what kclrun needs, until a person changes it
    │   ├── TableRefused             the lease table is not one we may write to (KCL 3, other keys)
    │   └── OffsetRefused            the checkpoint is of another stream or of a newer version
    ├── ServiceError               AWS refused, or did not answer
    │   ├── Throttled                ask again later; nothing happened
    │   ├── Unavailable              5xx, refused or broken connection; harmless to repeat
    │   │   ├── NothingListens         refused on this host: start the service there
    │   │   └── ExpiredKeys            the keys have expired: renew them
    │   ├── OutcomeUnknown           a write may or may not have happened: read back before deciding
    │   ├── AccessDenied             grant the permission the message names
    │   ├── NotFound                 the stream, shard or table is not there
    │   ├── ExpiredIterator          ask for a new iterator
    │   └── InvalidRequest           the request itself was wrong: our bug or a wrong setting
    │       └── IndexMissing           the lease table has no owner index: scans find the offers
    ├── LeaseError                 the lease protocol refused
    │   ├── LeaseLost                another owner has the lease, or the fence has passed
    │   └── StaleCheckpoint          below the last checkpoint, or above the last delivered record
    ├── RecordError                the data is not valid
    │   ├── MalformedAggregate       bytes that look like a KPL aggregate and are not
    │   ├── MalformedBody            a GetRecords body that is not one
    │   ├── LimitExceeded            a size or a count above its declared limit
    │   ├── UndecodableRecord        `record.value`: the bytes are not what `decode` says
    │   ├── RowMismatch              an emitted row does not fit the schema of its output
    │   └── DataLoss                 records are gone before they were read: report it, and stop
    ├── HostFailed                 this host has no process, memory, descriptor or disk free now
    ├── SinkError                  an output cannot be written: no checkpoint passes its rows
    │   ├── LetterTooLarge           a dead letter does not fit into its queue or stream
    │   ├── BufferFull               a producer has no room now: put the record again later
    │   ├── OutputLocked             another process has the data file: try again, or another host
    │   └── Superseded               another owner wrote there: begin again from the row
    ├── ProcessorError             user code raised; names the position, never the payload
    ├── ProcessorVerdict           user code raises it to decide about its batch
    │   ├── FailedRecords            these records of the batch failed, the others are processed
    │   ├── RetryLater               give the same batch again after a pause
    │   └── HaltShard                halt the lease until an operator resumes it
    ├── EngineFailed               Spark ended a query for a reason of its own: start it again
    ├── PeerError                  another process of this manager sent or shared what it must not
    │   ├── MalformedFrame           bytes that are not a message: condemn the sending process
    │   └── SegmentRefused           shared memory of another layout, size or state than ours
    └── InvariantViolation         our bug: fatal to the lease process or the manager that sees it

Imports nothing of kclrun, so that every package may import it.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterable
from typing import Any, Final

__all__ = [
    "AccessDenied",
    "BufferFull",
    "ConfigError",
    "DataLoss",
    "EngineFailed",
    "ExpiredIterator",
    "ExpiredKeys",
    "FailedRecords",
    "HaltShard",
    "HostFailed",
    "HostRefused",
    "IndexMissing",
    "InvalidRequest",
    "InvariantViolation",
    "KclrunError",
    "LeaseError",
    "LeaseLost",
    "LimitExceeded",
    "MalformedAggregate",
    "MalformedBody",
    "MalformedFrame",
    "NotFound",
    "NothingListens",
    "OffsetRefused",
    "OutcomeUnknown",
    "OutputLocked",
    "PeerError",
    "ProcessorError",
    "ProcessorLoadError",
    "ProcessorVerdict",
    "RecordError",
    "RetryLater",
    "RowsRefused",
    "SegmentRefused",
    "ServiceError",
    "SettingsError",
    "SinkError",
    "StaleCheckpoint",
    "Superseded",
    "TableRefused",
    "Throttled",
    "Unavailable",
    "UndecodableRecord",
    "host_error",
    "host_refusal",
    "is_host_shortage",
]

# The kernel's answers when a host has no process, descriptor, memory or disk free.
_SCARCE: Final = frozenset(
    {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
)
_NOT_EXECUTED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOEXEC})
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
# The answers of the kernel, or of a sandbox around us, to a call that it will never allow.
_NEVER: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOENT})


class KclrunError(Exception):
    """The root: catch it to catch everything kclrun raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """An error that is copied or leaves a process pool is made again without its constructor,
        whose arguments are not its text: a pool would break."""
        return _made_again, (type(self), self.args, self.__dict__)


def _made_again(kind: type[KclrunError], args: tuple[Any, ...], fields: dict[str, Any]) -> Any:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(KclrunError):
    """For the operator to correct; ends the program with exit code 78."""


class SettingsError(ConfigError):
    """A setting is wrong, unknown or missing; the message names its path."""


class RowsRefused(SettingsError):
    """A destination refuses rows at their commit for the values in them. The message names the
    column, as far as the destination does, and never a value. Without these rows it works.
    `output` is the name of the output, once that is known."""

    output = ""


class ProcessorLoadError(ConfigError):
    """`processor:` cannot be imported, or names something that is not a RecordProcessor."""


class HostRefused(ConfigError):
    """The kernel of this host, or a sandbox on it, refuses a call that kclrun needs."""


class TableRefused(ConfigError):
    """The lease table is not one we may share (KCL 3 native mode, another key schema)."""


class OffsetRefused(ConfigError):
    """A Spark checkpoint that is not this query's: another stream, a re-created one, a newer
    version of kclrun, or not an offset of ours."""


class ServiceError(KclrunError):
    """AWS refused, failed or did not answer. `code` is the service's own error name, or ours."""

    def __init__(self, message: str, *, operation: str = "", code: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.code = code

    def reworded(self, message: str, kind: type[ServiceError] | None = None) -> ServiceError:
        """This failure in other words, or as another kind."""
        return (kind or type(self))(message, operation=self.operation, code=self.code)


class Throttled(ServiceError):
    """Too many requests; nothing happened; the same request may be sent again after a pause."""


class Unavailable(ServiceError):
    """The service or the way to it is down; the request had no effect that matters if repeated."""


class NothingListens(Unavailable):
    """This host refused the connection to an address of its own. Repeating the request does not
    help a start; what runs already waits for the service, as while it is unavailable."""


class ExpiredKeys(Unavailable):
    """The service refused keys that have expired, before it did anything. Repeating the request
    does not help a start; what runs already goes on with keys that are renewed."""


class OutcomeUnknown(ServiceError):
    """A write was sent and its outcome is not known: read back, consistently, before deciding."""


class AccessDenied(ServiceError):
    """The credentials are missing, wrong or lack the permission the message names."""


class NotFound(ServiceError):
    """The stream, shard, consumer or table does not exist."""


class ExpiredIterator(ServiceError):
    """The shard iterator is older than five minutes, or its stream has gone: ask for a new one."""


class InvalidRequest(ServiceError):
    """The service calls the request invalid; sending it again will not help."""


class IndexMissing(InvalidRequest):
    """The lease table exists and has no owner index, or the index is still being made."""


class LeaseError(KclrunError):
    """The lease protocol refused."""


class LeaseLost(LeaseError):
    """The lease belongs to another owner now, or can no longer be proven ours."""


class StaleCheckpoint(LeaseError):
    """A checkpoint below the last one, or above the last record given to the processor."""


class RecordError(KclrunError):
    """The bytes of a record are not valid."""


class MalformedAggregate(RecordError):
    """The magic bytes of a KPL aggregate, but not an aggregate after them."""


class MalformedBody(RecordError):
    """A response body that does not parse as the service documents it."""


class LimitExceeded(RecordError):
    """A count or size above the limit declared for it."""


class UndecodableRecord(RecordError):
    """Raised by `record.value`: the payload is not what `decode` says.

    A call that ends with it is not repeated: `record` alone is at fault, and the same bytes would
    fail again. `on_error.then` decides about the record at once. The message has the reason, never
    the payload.
    """

    def __init__(self, reason: str, record: Any = None) -> None:
        self.record = record
        at = "" if record is None else f" at {record.position}"
        super().__init__(f"the record{at} cannot be decoded: {reason}")


class RowMismatch(RecordError):
    """An emitted row does not fit `output.schema`; the message names the column, never a value."""


class DataLoss(RecordError):
    """Records between a position and the oldest one the stream still has are gone."""


class HostFailed(KclrunError):
    """This host cannot start or serve a lease process now; another host, or this one later, can."""


class SinkError(KclrunError):
    """An output cannot be written, read back or locked; the message names the file and why."""


class LetterTooLarge(SinkError):
    """A dead letter does not fit into its queue or stream: no repetition helps."""


class BufferFull(SinkError):
    """`Producer.put`: as many records wait as may wait, and the producer was made with
    `when_full="raise"`. The record was not accepted: put it again later."""


class OutputLocked(SinkError):
    """Another process holds the lock of the data file: nothing is wrong with the lease."""


class Superseded(SinkError):
    """Another owner's rows are at the destination, where ours were to be: ours are not written. The
    lease process ends, and the next one begins from the row and from what is there."""


class ProcessorError(KclrunError):
    """User code raised. The message names where, the lease and the position; never a payload."""


class ProcessorVerdict(KclrunError):
    """User code decides about its batch, where other exceptions leave it to
    `on_error`."""


class FailedRecords(ProcessorVerdict):
    """Raised by `process_records`: these records of the batch failed, all others are processed.

    The others are not given again, and rows emitted for them stay. The failed ones are given again
    as `on_error.retries` says, together and in their order; then `on_error.then` decides about each
    of them. `records` are `Record`s of the batch of the call. `cause` is why they failed, in words
    without payload; or raise it `from` the exception.
    """

    def __init__(self, records: Iterable[Any], cause: str = "") -> None:
        self.records = tuple(records)
        super().__init__(cause or f"{len(self.records)} records failed")


class RetryLater(ProcessorVerdict):
    """Raised by `process_records`: give the same records again after so many seconds.

    For a service that is known to be away: it counts as no attempt, so nothing is given up,
    unless the oldest record is above `on_error.max_age`. At most an hour.
    """

    def __init__(self, after_s: float, cause: str = "") -> None:
        if not after_s >= 0:
            raise ValueError("RetryLater: expected a number of seconds that is not negative")
        self.after_s = after_s
        super().__init__(cause or f"again in {after_s:g} s")


class HaltShard(ProcessorVerdict):
    """Raised by `process_records`: halt this lease now, with this reason; an operator resumes it.

    Nothing is given up, whatever `on_error.then` says. The reason is in the lease table, the log
    and /health: no payload in it.
    """


class EngineFailed(KclrunError):
    """Spark ended the query, and neither user code nor records were the cause: an executor, the
    JVM, an output or the checkpoint's place. Committed results stay; the rest is read again."""


class PeerError(KclrunError):
    """A process of the same manager sent or shared what it must not; says which process to end."""


class MalformedFrame(PeerError):
    """Bytes that are not a message of ours. They condemn the sending process, and only it."""


class SegmentRefused(PeerError):
    """Shared memory that is not a segment of this version, or whose bookkeeping is damaged."""


class InvariantViolation(KclrunError):
    """A state the design excludes was reached: our bug. Exit code 70."""


def host_error(what: str, reason: str, number: int | None) -> HostRefused | HostFailed:
    """The error for a resource that this host refuses: for good, or for now, by the kernel's error
    `number`. `what` is a sentence about its purpose for kclrun."""
    if number in _NEVER:
        return HostRefused(
            f"this host refuses it: {reason}. {what} See what confines kclrun here (seccomp,"
            " AppArmor, ProcSubset=, an old kernel)"
        )
    if number in _NO_ROOM:
        return HostFailed(
            f"this host has no more to give: {reason}. {what} See what its disks have left (df -h,"
            " quotas)"
        )
    return HostFailed(
        f"this host has no more to give: {reason}. {what} See its limits of processes, memory and"
        " descriptors (ulimit -a, the cgroup's pids.max and memory.max)"
    )


def host_refusal(error: BaseException) -> HostRefused | None:
    """The refusal of this host that an error of the kernel stands for: a limit of the sizes of
    files, or an interpreter that it does not execute. None for another error."""
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EFBIG:
        return HostRefused(
            f"this host refuses it: {error.strerror}. kclrun has files and shared memory that are"
            " larger than its limit of their sizes: raise that (ulimit -f, LimitFSIZE= of systemd)"
        )
    if error.filename == sys.executable and error.errno in _NOT_EXECUTED:
        return HostRefused(
            f"this host does not execute {sys.executable}: {error.strerror}. kclrun runs user code"
            " in processes of this interpreter: may this user execute it, is it on a disk that is"
            " mounted noexec, and was it removed?"
        )
    return None


def is_host_shortage(error: BaseException) -> bool:
    """Whether `error` says that this host has no resource left: as an error of the kernel, of
    Python, or of kclrun. Its causes are not looked at."""
    if isinstance(error, OSError):
        return error.errno in _SCARCE
    # Python names neither the limit nor an errno when it cannot start a thread.
    is_threadless = isinstance(error, RuntimeError) and "start new thread" in str(error)
    return is_threadless or isinstance(error, MemoryError | HostFailed)
