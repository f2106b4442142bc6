"""The lease table over the signed wire client: scans, consistent reads, conditional writes.

Implements `ports.LeaseTable`, for lease processes and for the manager. It does not know the
meaning of a change: `expressions.py` defines the requests, `rows.py` the rows. A write is sent
once, and each outcome is a value [P6].
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws import operations
from kclrun.aws.errors import service_error
from kclrun.aws.expressions import CREATE, BoundWrite, bind
from kclrun.aws.rows import BrokenRow, Item, decode_page, decode_row, encode_row, kcl3_mode_of, text
from kclrun.aws.wire import MALFORMED, RefusedReply, WireClient, WireReply, call_json, garbled
from kclrun.errors import (
    IndexMissing,
    InvalidRequest,
    NotFound,
    ServiceError,
    TableRefused,
    Unavailable,
)
from kclrun.errors import OutcomeUnknown as OutcomeUnknownError
from kclrun.errors import Throttled as ThrottledError
from kclrun.model.lease import KCL3_MODE_KEY, OFFERED, Lease, LeaseKey, coordinator_table
from kclrun.model.quotas import BATCH_GET_ITEMS_MAX
from kclrun.ports import ScanPage
from kclrun.protocol import writes

_Item = dict[str, dict[str, Any]]


class _Reply(msgspec.Struct, rename="pascal"):
    """The members of the answers: a page of Scan or Query (`items`), the row of GetItem (`item`),
    the row after an UpdateItem (`attributes`), and the rows of BatchGetItem by table (`responses`;
    its `UnprocessedKeys` are not read: see `find_offered`). Without `items` an answer is not a
    page: an empty table would mean that every row was deleted."""

    items: list[_Item] | None = None
    last_evaluated_key: _Item | None = None
    item: _Item | None = None
    attributes: _Item | None = None
    responses: dict[str, list[_Item]] = {}


_DECODER: Final = msgspec.json.Decoder(_Reply)


def _page_of(reply: _Reply, operation: operations.Operation) -> list[_Item]:
    if reply.items is None:
        raise garbled(operation, "the answer is not a page of items")
    return reply.items


# The index of the lease table by owner. It is queried for offered rows [P17].
#
# An index lags behind its table, so its result is only a hint: every row is read again,
# consistently, and counts only if it is still offered. A take is conditional anyway.
# The Java KCL 3 creates the index with this name and these keys.
OWNER_INDEX: Final = "LeaseOwnerToLeaseKeyIndex"
INDEX_KEYS: Final = (("leaseOwner", "HASH"), ("leaseKey", "RANGE"))

# A key and an owner have some 100 bytes: 100 KB, a tenth of the limit of a page. If more than a
# thousand leases are drained at once, several queries find them.
_KEYS_MAX: Final = 1_000
_INVALID: Final = "ValidationException"

_encode: Final = msgspec.json.Encoder().encode


def find_offered(client: WireClient, table: str, rows_max: int) -> tuple[Lease, ...]:
    """At most `rows_max` rows that are offered now. If there are more, a random choice of them.

    The choice is random so that managers that query at the same time read different rows. Rows
    that the service did not return (`UnprocessedKeys`) are left to the next query, half a second
    later. Raises: NotFound without table, IndexMissing without index (or while it is being built);
    Throttled, Unavailable, AccessDenied.
    """
    keys = _offered_keys(client, table)
    if len(keys) > rows_max:
        keys = random.sample(keys, rows_max)
    found: list[Lease] = []
    for start in range(0, len(keys), BATCH_GET_ITEMS_MAX):
        found += _rows(client, table, keys[start : start + BATCH_GET_ITEMS_MAX])
    return tuple(lease for lease in found if lease.owner == OFFERED)


def _offered_keys(client: WireClient, table: str) -> list[str]:
    request = {
        "TableName": table,
        "IndexName": OWNER_INDEX,
        "KeyConditionExpression": "leaseOwner = :offered",
        "ExpressionAttributeValues": {":offered": text(OFFERED)},
        "Limit": _KEYS_MAX,
    }
    try:
        reply = call_json(client, operations.QUERY, request, _DECODER)
    except (InvalidRequest, NotFound) as error:
        # Message: "does not have the specified index: …", or "cannot read from backfilling …"; of
        # moto, with the code of a missing table: "Invalid index: …".
        if OWNER_INDEX in str(error) and (error.code == _INVALID or isinstance(error, NotFound)):
            raise IndexMissing(
                f"{operations.QUERY.name}: table {table} has no index {OWNER_INDEX} to query",
                operation=operations.QUERY.name,
                code=_INVALID,
            ) from None
        raise
    items = _page_of(reply, operations.QUERY)
    named = (item.get("leaseKey", {}).get("S") for item in items)
    return [key for key in named if isinstance(key, str)]


def _rows(client: WireClient, table: str, keys: Sequence[str]) -> tuple[Lease, ...]:
    request: dict[str, Any] = {
        "RequestItems": {
            table: {"Keys": [{"leaseKey": text(key)} for key in keys], "ConsistentRead": True}
        }
    }
    reply = call_json(client, operations.BATCH_GET_ITEM, request, _DECODER)
    # A broken row cannot be taken. The scan reports it.
    # One table was asked for. It is named as in the request, or otherwise where that is an ARN.
    return decode_page([row for rows in reply.responses.values() for row in rows]).leases


# A page holds up to 1 MB, some 2,000 rows of 500 bytes. So the limit is ten million leases, a
# thousand times the largest stream. It ends a scan of a service whose pages never end.
PAGES_MAX: Final = 5_000
# What DynamoDB says of a key that is not the table's, and of one that has more parts.
_ANOTHER_KEY: Final = ("key element does not match the schema", "conditions on the keys is invalid")
_CONDITION_FAILED: Final = "ConditionalCheckFailedException"
_CANCELLED: Final = "TransactionCanceledException"
_CONDITION_REASON: Final = "ConditionalCheckFailed"
_HELD_REASON: Final = "None"
# With these reasons nothing was written, and the same transaction may be sent again.
_BUSY_REASONS: Final = frozenset({"TransactionConflict", "ThrottlingError"})
_BUSY_REASON_THROUGHPUT: Final = "ProvisionedThroughputExceeded"


class DynamoLeaseTable:
    """The rows of one table. `page_rows_max` bounds a scan page (None: 1 MB, the service's own).

    Threads may share it, if only one thread writes each lease [P5].
    """

    def __init__(self, client: WireClient, table: str, *, page_rows_max: int | None = None) -> None:
        self._client = client
        self._table = table
        self._page_rows_max = page_rows_max

    def scan(self, *, consistent: bool = True) -> Iterator[ScanPage]:
        """All pages. Without `consistent` a row may be slightly old, for half the read units.

        Raises a ServiceError leaf; a broken row never fails it.
        """
        for items in self.items(consistent=consistent):
            yield decode_page(items)

    def items(self, *, consistent: bool = True) -> Iterator[Sequence[Item]]:
        """All pages of the table's items, leases and others, unchanged: for a backup of all rows.

        Read consistently by default. Raises: a ServiceError leaf; TableRefused for a table of
        another program.
        """
        request: dict[str, Any] = {"TableName": self._table, "ConsistentRead": consistent}
        if self._page_rows_max is not None:
            request["Limit"] = self._page_rows_max
        for _ in range(PAGES_MAX):
            reply = call_json(self._client, operations.SCAN, request, _DECODER)
            items = _page_of(reply, operations.SCAN)
            if items and "leaseKey" not in items[0]:
                raise self._no_lease_table()
            yield items
            if not reply.last_evaluated_key:
                return
            request["ExclusiveStartKey"] = reply.last_evaluated_key
        raise InvalidRequest(
            f"Scan: {self._table} has more than {PAGES_MAX} pages", operation=operations.SCAN.name
        )

    def read(self, key: LeaseKey) -> Lease | None:
        """One row by consistent read; None if it does not exist or is not a lease.

        Raises: a ServiceError leaf; a broken row is InvalidRequest with code `BROKEN_ROW`;
        TableRefused for a table of another program.
        """
        request = {"TableName": self._table, "Key": _key(key), "ConsistentRead": True}
        try:
            reply = call_json(self._client, operations.GET_ITEM, request, _DECODER)
        except InvalidRequest as error:
            if not any(words in str(error) for words in _ANOTHER_KEY):
                raise
            raise self._no_lease_table() from None
        if reply.item is None:
            return None
        try:
            return decode_row(reply.item)
        except BrokenRow as row:
            raise InvalidRequest(
                f"{operations.GET_ITEM.name}: {self._table}: {row}",
                operation=operations.GET_ITEM.name,
                code=writes.BROKEN_ROW,
            ) from None

    def _no_lease_table(self) -> TableRefused:
        return TableRefused(
            f"table {self._table} is not a lease table: its key is not leaseKey alone\n"
            "Name another with leases.table"
        )

    def offered(self, rows_max: int) -> tuple[Lease, ...]:
        """At most `rows_max` offered rows; if there are more, a random choice of them [P17].

        Raises a ServiceError leaf; IndexMissing where the table has no owner index.
        """
        return find_offered(self._client, self._table, rows_max)

    def write(self, change: writes.LeaseChange) -> writes.Outcome:
        """Send one change once. Never raises a ServiceError: each outcome is a value.

        An "applied" reply that cannot be parsed is OutcomeUnknown: read the row again.
        """
        match change:
            case writes.CreateChildren():
                return self._create_children(change)
            case writes.CreateLease(lease=lease):
                return self._send(operations.PUT_ITEM, self._put(lease), returns_row=False)
            case writes.DeleteEnded() | writes.DeleteTrimmed() | writes.DeleteReset():
                return self._send(
                    operations.DELETE_ITEM, self._conditioned(bind(change)), returns_row=False
                )
            case _:
                bound = bind(change)
                request = self._conditioned(bound) | {
                    "UpdateExpression": bound.expression.update,
                    "ReturnValues": "ALL_NEW",
                }
                return self._send(operations.UPDATE_ITEM, request, returns_row=True)

    def _create_children(self, change: writes.CreateChildren) -> writes.Outcome:
        """Create all children or none. Existing ones are left out, the rest is sent again [P12].

        No ClientRequestToken is sent. The conditions already make a repetition harmless, and with
        a token the service would repeat its former answer without reading the present rows.
        """
        checks = [{"ConditionCheck": self._conditioned(bind(parent))} for parent in change.parents]
        missing = list(change.children)
        while missing:
            puts = [{"Put": self._put(child)} for child in missing]
            outcome = self._transact([*checks, *puts])
            if isinstance(outcome, writes.Outcome):
                return outcome
            if any(outcome[: len(checks)]):
                return writes.ConditionFailed()
            # The list gets shorter in every round, so the loop ends.
            missing = [
                child
                for child, exists in zip(missing, outcome[len(checks) :], strict=True)
                if not exists
            ]
        return writes.Applied()

    def _transact(self, parts: list[dict[str, Any]]) -> writes.Outcome | list[bool]:
        """Send the parts once: an outcome, or for each part whether its condition failed."""
        try:
            reply = self._client.ask(
                operations.TRANSACT_WRITE_ITEMS, _encode({"TransactItems": parts})
            )
        except ServiceError as error:
            return _failed(error)
        if isinstance(reply, WireReply):
            return _written(operations.TRANSACT_WRITE_ITEMS, reply)
        reasons = [code for code, _ in reply.error.reasons]
        if reply.error.code != _CANCELLED or len(reasons) != len(parts):
            return _failed(
                service_error(operations.TRANSACT_WRITE_ITEMS, reply.error, reply.status)
            )
        busy = next((code for code in reasons if _is_busy(code)), None)
        if busy is not None:
            return writes.Throttled(f"{operations.TRANSACT_WRITE_ITEMS.name}: {busy}")
        refused = next((c for c in reasons if c not in {_HELD_REASON, _CONDITION_REASON}), None)
        if refused is not None:
            return writes.Refused(refused, f"{operations.TRANSACT_WRITE_ITEMS.name}: {refused}")
        failed = [code == _CONDITION_REASON for code in reasons]
        if not any(failed):
            return writes.Refused(
                _CANCELLED, f"{operations.TRANSACT_WRITE_ITEMS.name}: cancelled for no reason"
            )
        return failed

    def _send(
        self, operation: operations.Operation, request: dict[str, Any], *, returns_row: bool
    ) -> writes.Outcome:
        try:
            reply = self._client.ask(operation, _encode(request))
        except ServiceError as error:
            return _failed(error)
        if isinstance(reply, RefusedReply):
            return _refused(operation, reply)
        outcome = _written(operation, reply)
        if returns_row and outcome == writes.Applied():
            return writes.OutcomeUnknown(f"{operation.name}: the reply holds no lease")
        return outcome

    def _put(self, lease: Lease) -> dict[str, Any]:
        return {
            "TableName": self._table,
            "Item": encode_row(lease),
            "ConditionExpression": CREATE,
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


class DynamoCoordinatorState:
    """The table in which workers of KCL 3.0 to 3.4 keep the mode of their fleet (`model/lease.py`).

    Threads may share it.
    """

    def __init__(self, client: WireClient, application: str, leases: str) -> None:
        self._client = client
        self._table = coordinator_table(application, leases)

    def mode(self) -> str | None:
        """The mode in its item, by consistent read; None without the item or the table.

        Raises: AccessDenied, InvalidRequest (another application's table has this name),
        Throttled, Unavailable.
        """
        request = {
            "TableName": self._table,
            "Key": {"key": text(KCL3_MODE_KEY)},
            "ConsistentRead": True,
        }
        try:
            reply = call_json(self._client, operations.GET_ITEM, request, _DECODER)
        except NotFound:
            return None
        return kcl3_mode_of(reply.item) if reply.item is not None else None


def _written(operation: operations.Operation, reply: WireReply) -> writes.Outcome:
    """The outcome of an answer of status 200. A page of a proxy is not an answer of the service."""
    try:
        attributes = _DECODER.decode(reply.body).attributes
        # Our own +1 may exceed the largest counter that we accept. The row is ours anyway.
        row = decode_row(attributes, is_ours=True) if attributes is not None else None
    except (*MALFORMED, BrokenRow) as error:
        return writes.OutcomeUnknown(f"{operation.name}: the reply cannot be read: {error}")
    return writes.Applied(row)


def _key(key: LeaseKey) -> dict[str, Any]:
    return {"leaseKey": text(key)}


def _is_busy(reason: str) -> bool:
    return reason in _BUSY_REASONS or reason.startswith(_BUSY_REASON_THROUGHPUT)


def _refused(operation: operations.Operation, reply: RefusedReply) -> writes.Outcome:
    """The outcome of a refused write: a failed condition with the row, or an error."""
    if reply.error.code != _CONDITION_FAILED:
        return _failed(service_error(operation, reply.error, reply.status))
    item: Item | None = reply.error.item
    try:
        return writes.ConditionFailed(None if not item else decode_row(item))
    except BrokenRow as row:
        # Nothing was written. But "no row" would be wrong: it would mean a deleted row.
        return writes.Refused(writes.BROKEN_ROW, f"{operation.name}: {row}")


def _failed(error: ServiceError) -> writes.Outcome:
    match error:
        case ThrottledError():
            return writes.Throttled(str(error))
        case Unavailable():
            return writes.Unavailable(str(error))
        case OutcomeUnknownError():
            return writes.OutcomeUnknown(str(error))
        case _:
            return writes.Refused(error.code, str(error))
