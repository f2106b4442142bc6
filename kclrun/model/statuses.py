"""What the statuses of AWS's resources mean to us, each of them once, by the API references.

A resource can be used; or it cannot, and that passes by itself, or a person has to end it. A status
that the tables do not have is new: it is said as it is, and waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, assert_never

import msgspec

from kclrun import errors
from kclrun.model.stream import is_change_stream

# Of most resources; named where a caller makes one again.
CREATING: Final = "CREATING"
DELETING: Final = "DELETING"
# Of a table's stream: each shard that closes has a child, at once or within seconds.
ROLLING: Final = frozenset({"ENABLING", "ENABLED"})


class Ends(Enum):
    """How the trouble with a resource ends."""

    BY_ITSELF = "by itself"
    BY_A_PERSON = "by a person"
    WITH_ITS_DELETION = "with its deletion"


class StatusTrouble(msgspec.Struct, frozen=True):
    """Why a resource cannot be used now, and what to do."""

    meaning: str
    advice: str
    ends: Ends = Ends.BY_ITSELF


class Statuses(msgspec.Struct, frozen=True):
    """The statuses of one kind of resource. Those in `usable` have a remark, or an empty text."""

    usable: Mapping[str, str]
    troubles: Mapping[str, StatusTrouble]

    def trouble(self, status: str) -> StatusTrouble | None:
        """Why a resource of this status cannot be used; None if it can."""
        if status in self.usable:
            return None
        return self.troubles.get(status, _NEW)

    def remark(self, status: str) -> str:
        """What is unusual in a status with which a resource can be used, in words; or empty."""
        return self.usable.get(status, "")


_WAIT: Final = "Wait until it is ACTIVE, and try again"
_NEW: Final = StatusTrouble("", _WAIT)
_MADE: Final = StatusTrouble("it is being made", _WAIT)
_DELETED: Final = StatusTrouble(
    "it is being deleted", "Name another one, or make it again", Ends.WITH_ITS_DELETION
)

# StreamStatus of DescribeStreamSummary. A stream that is changed is read and written.
STREAM: Final = Statuses({"ACTIVE": "", "UPDATING": ""}, {"CREATING": _MADE, "DELETING": _DELETED})
# StreamStatus of DescribeStream of DynamoDB Streams. One that was switched off is kept for a day.
_SWITCHED_OFF: Final = (
    "the stream of the table was switched off, gets no further records, and is gone a day later"
)
# ENABLED is ACTIVE to those that read either kind (`ports.StreamSummary`).
CHANGE_STREAM: Final = Statuses(
    {"ACTIVE": "", "ENABLED": "", "DISABLING": _SWITCHED_OFF, "DISABLED": _SWITCHED_OFF},
    {
        "ENABLING": StatusTrouble(
            "it is being switched on", "Wait until it is ENABLED, and try again"
        )
    },
)
# ConsumerStatus of DescribeStreamConsumer.
CONSUMER: Final = Statuses(
    {"ACTIVE": ""},
    {
        "CREATING": StatusTrouble("it is being made", "Subscriptions begin when it is ACTIVE"),
        "DELETING": StatusTrouble(
            "it is being deleted", "When it is gone, the next start registers it again"
        ),
    },
)
# TableStatus of DescribeTable. A table that is changed serves reads and writes.
TABLE: Final = Statuses(
    {"ACTIVE": "", "UPDATING": ""},
    {
        "CREATING": _MADE,
        "DELETING": _DELETED,
        "INACCESSIBLE_ENCRYPTION_CREDENTIALS": StatusTrouble(
            "DynamoDB cannot use the KMS key that encrypts it",
            "Enable the key again, or give DynamoDB its grant back:"
            " it archives the table in a week",
            Ends.BY_A_PERSON,
        ),
        "ARCHIVING": StatusTrouble(
            "its KMS key could not be used for seven days, and DynamoDB puts it into a backup",
            "Restore it from that backup under another name when it is done, and name that one",
            Ends.BY_A_PERSON,
        ),
        "ARCHIVED": StatusTrouble(
            "its KMS key could not be used for seven days, and DynamoDB has put it into a backup",
            "Restore it from that backup under another name, and name that one",
            Ends.BY_A_PERSON,
        ),
        "REPLICATION_NOT_AUTHORIZED": StatusTrouble(
            "DynamoDB may not replicate it",
            "Allow the replication of the global table in its resource policy",
            Ends.BY_A_PERSON,
        ),
    },
)
# IndexStatus of DescribeTable: an index that is being made cannot be queried.
INDEX: Final = Statuses({"ACTIVE": "", "UPDATING": ""}, {"CREATING": _MADE, "DELETING": _DELETED})
# DeliveryStreamStatus of DescribeDeliveryStream.
DELIVERY_STREAM: Final = Statuses(
    {"ACTIVE": ""},
    {
        "CREATING": _MADE,
        "DELETING": _DELETED,
        "CREATING_FAILED": StatusTrouble(
            "Firehose could not make it", "Delete it, and make it again", Ends.BY_A_PERSON
        ),
        "DELETING_FAILED": StatusTrouble(
            "Firehose could not delete it, and it takes no records",
            "Delete it again, or name another one",
            Ends.BY_A_PERSON,
        ),
    },
)
# Status of DeliveryStreamEncryptionConfiguration. With ENABLING_FAILED records are refused or kept
# in the clear, as Firehose says; the others take records.
DELIVERY_ENCRYPTION: Final = Statuses(
    dict.fromkeys(("ENABLED", "ENABLING", "DISABLED", "DISABLING"), "")
    | {
        "ENABLING_FAILED": "Firehose could not switch its encryption on",
        "DISABLING_FAILED": "Firehose could not switch its encryption off",
    },
    {},
)
# Status of GetSchemaVersion. The definition of each is that by which its records were written.
SCHEMA_VERSION: Final = Statuses(
    {
        "AVAILABLE": "",
        "PENDING": "the registry is still checking it",
        "FAILURE": "the registry has refused it: it is not compatible with the version before",
        "DELETING": "it is being deleted",
    },
    {},
)


def of_stream(arn: str) -> Statuses:
    """The statuses of a stream, by its ARN: a Kinesis stream, or that of a DynamoDB table."""
    return CHANGE_STREAM if is_change_stream(arn) else STREAM


def require(statuses: Statuses, what: str, status: str) -> None:
    """Check that a resource can be used; `what` names it in the message.

    Raises: NotFound for one that is being deleted; InvalidRequest for a status that a person has to
    end; Unavailable for any other, with the status as their code.
    """
    trouble = statuses.trouble(status)
    if trouble is None:
        return
    meaning = f": {trouble.meaning}" if trouble.meaning else ""
    message = f"{what} is {status}{meaning}\n{trouble.advice}"
    match trouble.ends:
        case Ends.WITH_ITS_DELETION:
            raise errors.NotFound(f"{what} is being deleted ({status})", code=status)
        case Ends.BY_A_PERSON:
            raise errors.InvalidRequest(message, code=status)
        case Ends.BY_ITSELF:
            raise errors.Unavailable(message, code=status)
        case _:
            assert_never(trouble.ends)
