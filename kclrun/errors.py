"""Every error kclrun raises, as one tree: whose fault first, what to do next at the leaves.

    KclrunError
    ├── ConfigError                the operator's: mend the file or the command line
    │   ├── SettingsError            a value in the configuration is wrong, unknown or missing
    │   ├── ProcessorLoadError       the processor cannot be imported or is not a RecordProcessor
    │   ├── TableRefused             the lease table is not one we may write to (KCL 3, other keys)
    │   └── OffsetRefused            the checkpoint is of another stream or of a newer version
    ├── ServiceError               AWS said no, or said nothing
    │   ├── Throttled                ask again later; nothing happened
    │   ├── Unavailable              5xx, refused or broken connection; harmless to repeat
    │   ├── OutcomeUnknown           a write may or may not have happened: read back before deciding
    │   ├── AccessDenied             grant the permission the message names
    │   ├── NotFound                 the stream, shard or table is not there
    │   ├── ExpiredIterator          ask for a new iterator
    │   └── InvalidRequest           the request itself was wrong: our bug or a wrong setting
    ├── LeaseError                 the lease protocol said no
    │   ├── LeaseLost                another owner has the lease, or the fence has passed
    │   └── StaleCheckpoint          below the last checkpoint, or above what was delivered
    ├── RecordError                the data said no
    │   ├── MalformedAggregate       bytes that look like a KPL aggregate and are not
    │   ├── MalformedBody            a GetRecords body that is not one
    │   ├── LimitExceeded            a size or a count above its declared limit
    │   └── DataLoss                 records are gone before they were read: say so, and stop
    ├── SinkError                  an output cannot be written: no checkpoint passes its rows
    ├── ProcessorError             user code raised; names the position, never the payload
    ├── EngineFailed               Spark ended a query for a reason of its own: start it again
    ├── PeerError                  another process of this manager sent or shared what it must not
    │   ├── MalformedFrame           bytes that are no message: condemn the process they came from
    │   └── SegmentRefused           shared memory of another layout, size or state than ours
    └── InvariantViolation         our bug: fatal to the lease process or the manager that sees it

May not know anything: it imports nothing, so that every room may import it.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "ConfigError",
    "DataLoss",
    "EngineFailed",
    "ExpiredIterator",
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
    "OffsetRefused",
    "OutcomeUnknown",
    "PeerError",
    "ProcessorError",
    "ProcessorLoadError",
    "RecordError",
    "SegmentRefused",
    "ServiceError",
    "SettingsError",
    "SinkError",
    "StaleCheckpoint",
    "TableRefused",
    "Throttled",
    "Unavailable",
]


class KclrunError(Exception):
    """The root: catch it to catch everything kclrun raises on purpose."""


class ConfigError(KclrunError):
    """The operator's to mend; ends the program with exit code 78."""


class SettingsError(ConfigError):
    """A setting is wrong, unknown or missing; the message names its path."""


class ProcessorLoadError(ConfigError):
    """`processor:` cannot be imported, or names something that is no RecordProcessor."""


class TableRefused(ConfigError):
    """The lease table is not one we may share (KCL 3 native mode, another key schema)."""


class OffsetRefused(ConfigError):
    """A Spark checkpoint that is not this query's: another stream, a re-created one, a newer
    version of kclrun, or no offset of ours at all."""


class ServiceError(KclrunError):
    """AWS refused, failed or did not answer. `code` is the service's own error name, or ours."""

    def __init__(self, message: str, *, operation: str = "", code: str = "") -> None:
        super().__init__(message)
        self.operation = operation
        self.code = code


class Throttled(ServiceError):
    """Too many requests; nothing happened; the same request may be sent again after a pause."""


class Unavailable(ServiceError):
    """The service or the way to it is down; the request had no effect that matters if repeated."""


class OutcomeUnknown(ServiceError):
    """A write was sent and its fate is not known: read back, consistently, before deciding."""


class AccessDenied(ServiceError):
    """The credentials are missing, wrong or lack the permission the message names."""


class NotFound(ServiceError):
    """The stream, shard, consumer or table does not exist."""


class ExpiredIterator(ServiceError):
    """The shard iterator is older than five minutes, or its stream has gone: ask for a new one."""


class InvalidRequest(ServiceError):
    """The service calls the request invalid; sending it again will not help."""


class LeaseError(KclrunError):
    """The lease protocol said no."""


class LeaseLost(LeaseError):
    """The lease belongs to somebody else now, or can no longer be proven ours."""


class StaleCheckpoint(LeaseError):
    """A checkpoint below the last one, or above the last record given to the processor."""


class RecordError(KclrunError):
    """The bytes of a record said no."""


class MalformedAggregate(RecordError):
    """Magic bytes of a KPL aggregate, and then something that is none."""


class MalformedBody(RecordError):
    """A response body that does not parse as what the service promises."""


class LimitExceeded(RecordError):
    """A count or size above the limit declared for it."""


class DataLoss(RecordError):
    """Records between a position and the oldest one the stream still has are gone."""


class SinkError(KclrunError):
    """An output cannot be written, read back or locked; the message names the file and why."""


class ProcessorError(KclrunError):
    """User code raised. The message names where, the lease and the position; never a payload."""


class EngineFailed(KclrunError):
    """Spark ended the query, and neither user code nor records did: an executor, the JVM, an output
    or the checkpoint's place. What was committed stays; the rest is read again."""


class PeerError(KclrunError):
    """A process of the same manager sent or shared what it must not; says which process to end."""


class MalformedFrame(PeerError):
    """Bytes that are no message of ours. They condemn the process they came from, and only it."""


class SegmentRefused(PeerError):
    """Shared memory that is not a segment of this version, or whose bookkeeping is damaged."""


class InvariantViolation(KclrunError):
    """A state the design excludes was reached: our bug. Exit code 70."""
