"""The lease table over the signed wire client: scans, consistent reads, conditional writes.

Implements `ports.LeaseTable`, in lease processes and in the manager alike. Knows nothing of what a
change means: `expressions.py` says what it looks like, `rows.py` what a row is. Rule: a write is
sent once, and each way it can go is a value [P6].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.binding import bind, bind_parent
from kclrun.aws.errors import service_error
from kclrun.aws.expressions import CREATE, BoundWrite
from kclrun.aws.operations import (
    DELETE_ITEM,
    GET_ITEM,
    PUT_ITEM,
    SCAN,
    TRANSACT_WRITE_ITEMS,
    UPDATE_ITEM,
    Operation,
)
from kclrun.aws.owner_index import find_offered
from kclrun.aws.rows import BrokenRow, Item, decode_page, decode_row, encode_row, text
from kclrun.aws.table_replies import ITEMS_DECODER, ROW_DECODER, parsed
from kclrun.aws.wire import RefusedReply, WireClient, WireReply
from kclrun.errors import InvalidRequest, ServiceError, Unavailable
from kclrun.errors import OutcomeUnknown as OutcomeUnknownError
from kclrun.errors import Throttled as ThrottledError
from kclrun.model.changes import (
    CreateChildren,
    CreateLease,
    DeleteEnded,
    DeleteTrimmed,
    LeaseChange,
)
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.outcomes import (
    Applied,
    ConditionFailed,
    Outcome,
    OutcomeUnknown,
    Refused,
    Throttled,
)
from kclrun.model.outcomes import Unavailable as UnavailableOutcome
from kclrun.ports import ScanPage

__all__ = ["DynamoLeaseTable"]

# A page holds up to 1 MB, some 2,000 rows of 500 bytes: ten million leases, a thousand times the
# largest stream; a service that never ends its pages must not hold a scan for ever.
PAGES_MAX: Final = 5_000
_CONDITION_FAILED: Final = "ConditionalCheckFailedException"
_CANCELLED: Final = "TransactionCanceledException"
_CONDITION_REASON: Final = "ConditionalCheckFailed"
_HELD_REASON: Final = "None"
# A reason under which nothing happened and the same transaction may be sent again.
_BUSY_REASONS: Final = frozenset({"TransactionConflict", "ThrottlingError"})
_BUSY_REASON_THROUGHPUT: Final = "ProvisionedThroughputExceeded"

_encode: Final = msgspec.json.Encoder().encode


class DynamoLeaseTable:
    """The rows of one table. `page_rows_max` bounds a scan page (None: 1 MB, the service's own).

    Threads may share one, if each lease is still written by one thread only [P5].
    """

    def __init__(self, client: WireClient, table: str, *, page_rows_max: int | None = None) -> None:
        self._client = client
        self._table = table
        self._page_rows_max = page_rows_max

    def scan(self) -> Iterator[ScanPage]:
        """All pages, consistently read. Raises a ServiceError leaf; a broken row never fails it."""
        for items in self.items():
            yield decode_page(items)

    def items(self) -> Iterator[Sequence[Item]]:
        """All pages of items as they stand in the table, leases or not: for a backup of all rows.

        Consistently read. Raises a ServiceError leaf.
        """
        request: dict[str, Any] = {"TableName": self._table, "ConsistentRead": True}
        if self._page_rows_max is not None:
            request["Limit"] = self._page_rows_max
        for _ in range(PAGES_MAX):
            reply = parsed(ITEMS_DECODER, SCAN, self._client.call(SCAN, _encode(request)))
            yield reply.items
            if not reply.last_evaluated_key:
                return
            request["ExclusiveStartKey"] = reply.last_evaluated_key
        raise InvalidRequest(
            f"Scan: {self._table} has more than {PAGES_MAX} pages", operation=SCAN.name
        )

    def read(self, key: LeaseKey) -> Lease | None:
        """One row by consistent read; None if there is none, or it is no lease.

        Raises a ServiceError leaf; a broken row is InvalidRequest with code `BrokenRow`.
        """
        request = {"TableName": self._table, "Key": _key(key), "ConsistentRead": True}
        reply = parsed(ROW_DECODER, GET_ITEM, self._client.call(GET_ITEM, _encode(request)))
        if reply.item is None:
            return None
        try:
            return decode_row(reply.item)
        except BrokenRow as row:
            raise InvalidRequest(
                f"{GET_ITEM.name}: {self._table}: {row}", operation=GET_ITEM.name, code="BrokenRow"
            ) from None

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """Rows that wait for a taker, at random among more than `rows_max` [P17].

        Raises a ServiceError leaf; NotFound where the table has no owner index.
        """
        return find_offered(self._client, self._table, rows_max)

    def write(self, change: LeaseChange) -> Outcome:
        """Send one change once. Never raises a ServiceError: each outcome is a value.

        A reply that says "applied" but cannot be read is OutcomeUnknown: read back.
        """
        match change:
            case CreateChildren():
                return self._create_children(change)
            case CreateLease(lease=lease):
                return self._send(PUT_ITEM, self._put(lease), returns_row=False)
            case DeleteEnded() | DeleteTrimmed():
                return self._send(DELETE_ITEM, self._conditioned(bind(change)), returns_row=False)
            case _:
                bound = bind(change)
                assert bound.expression.update is not None
                request = self._conditioned(bound) | {
                    "UpdateExpression": bound.expression.update.code,
                    "ReturnValues": "ALL_NEW",
                }
                return self._send(UPDATE_ITEM, request, returns_row=True)

    def _create_children(self, change: CreateChildren) -> Outcome:
        """All or none; children that exist already are left out and the rest sent again [P12].

        No ClientRequestToken: the conditions already make a repetition harmless, and with a token
        the service would answer it from memory, without looking at the rows as they are now.
        """
        checks = [
            {"ConditionCheck": self._conditioned(bind_parent(parent))} for parent in change.parents
        ]
        missing = list(change.children)
        while missing:
            puts = [{"Put": self._put(child)} for child in missing]
            outcome = self._transact([*checks, *puts])
            if isinstance(outcome, Outcome):
                return outcome
            if any(outcome[: len(checks)]):
                return ConditionFailed()
            # Shorter in every round, so this ends.
            missing = [
                child
                for child, exists in zip(missing, outcome[len(checks) :], strict=True)
                if not exists
            ]
        return Applied()

    def _transact(self, parts: list[dict[str, Any]]) -> Outcome | list[bool]:
        """Send the parts once: an outcome, or for each part whether its condition failed."""
        try:
            reply = self._client.ask(TRANSACT_WRITE_ITEMS, _encode({"TransactItems": parts}))
        except ServiceError as error:
            return _failed(error)
        if isinstance(reply, WireReply):
            return Applied()
        reasons = [code for code, _ in reply.error.reasons]
        if reply.error.code != _CANCELLED or len(reasons) != len(parts):
            return _failed(service_error(TRANSACT_WRITE_ITEMS, reply.error, reply.status))
        busy = next((code for code in reasons if _is_busy(code)), None)
        if busy is not None:
            return Throttled(f"{TRANSACT_WRITE_ITEMS.name}: {busy}")
        refused = next((c for c in reasons if c not in {_HELD_REASON, _CONDITION_REASON}), None)
        if refused is not None:
            return Refused(refused, f"{TRANSACT_WRITE_ITEMS.name}: {refused}")
        failed = [code == _CONDITION_REASON for code in reasons]
        if not any(failed):
            return Refused(_CANCELLED, f"{TRANSACT_WRITE_ITEMS.name}: cancelled for no reason")
        return failed

    def _send(self, operation: Operation, request: dict[str, Any], *, returns_row: bool) -> Outcome:
        try:
            reply = self._client.ask(operation, _encode(request))
        except ServiceError as error:
            return _failed(error)
        if isinstance(reply, RefusedReply):
            return _refused(operation, reply)
        if not returns_row:
            return Applied()
        try:
            attributes = ROW_DECODER.decode(reply.body).attributes
            row = decode_row(attributes) if attributes is not None else None
        except (msgspec.DecodeError, UnicodeDecodeError, BrokenRow) as error:
            return OutcomeUnknown(f"{operation.name}: the reply cannot be read: {error}")
        if row is None:
            return OutcomeUnknown(f"{operation.name}: the reply holds no lease")
        return Applied(row)

    def _put(self, lease: Lease) -> dict[str, Any]:
        return {
            "TableName": self._table,
            "Item": encode_row(lease),
            "ConditionExpression": CREATE.condition,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }

    def _conditioned(self, bound: BoundWrite) -> dict[str, Any]:
        request: dict[str, Any] = {
            "TableName": self._table,
            "Key": _key(bound.key),
            "ConditionExpression": bound.expression.condition,
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        if bound.values:  # the service refuses an empty map
            request["ExpressionAttributeValues"] = bound.values
        return request


def _key(key: LeaseKey) -> dict[str, Any]:
    return {"leaseKey": text(key)}


def _is_busy(reason: str) -> bool:
    return reason in _BUSY_REASONS or reason.startswith(_BUSY_REASON_THROUGHPUT)


def _refused(operation: Operation, reply: RefusedReply) -> Outcome:
    """The service put it into words: a failed condition with the row, or an error."""
    if reply.error.code != _CONDITION_FAILED:
        return _failed(service_error(operation, reply.error, reply.status))
    item: Item | None = reply.error.item
    try:
        return ConditionFailed(None if not item else decode_row(item))
    except BrokenRow as row:
        # Nothing was written, but "no row" would be a lie: it would read as deleted.
        return Refused("BrokenRow", f"{operation.name}: {row}")


def _failed(error: ServiceError) -> Outcome:
    match error:
        case ThrottledError():
            return Throttled(str(error))
        case Unavailable():
            return UnavailableOutcome(str(error))
        case OutcomeUnknownError():
            return OutcomeUnknown(str(error))
        case _:
            return Refused(error.code, str(error))
