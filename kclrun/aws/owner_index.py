"""The index of the lease table by owner, and the rows it finds that wait for a taker [P17].

An index lags behind its table, so what it names is only a hint: every row is read again,
consistently, and counts only if it is still offered. Taking it is conditional anyway.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.operations import BATCH_GET_ITEM, QUERY
from kclrun.aws.rows import decode_page, text
from kclrun.aws.table_replies import BATCH_DECODER, ITEMS_DECODER, parsed
from kclrun.aws.wire import WireClient
from kclrun.errors import InvalidRequest, NotFound
from kclrun.model.lease import OFFERED, Lease

__all__ = ["INDEX_KEYS", "OWNER_INDEX", "find_offered"]

# The name and the shape that the Java KCL 3 gives it.
OWNER_INDEX: Final = "LeaseOwnerToLeaseKeyIndex"
INDEX_KEYS: Final = (("leaseOwner", "HASH"), ("leaseKey", "RANGE"))

# Of a key and an owner, some 100 bytes each: 100 KB, a tenth of what a page may hold. A drain of
# more than a thousand leases at once is found in several looks.
_KEYS_MAX: Final = 1_000
# DynamoDB: "up to 100 items".
_BATCH_KEYS_MAX: Final = 100
_INVALID: Final = "ValidationException"

_encode: Final = msgspec.json.Encoder().encode


def find_offered(client: WireClient, table: str, rows_max: int) -> tuple[Lease, ...]:
    """At most `rows_max` rows that are offered just now, at random among more.

    At random, so that many managers that look at once read different rows. Rows that the service
    did not get to (`UnprocessedKeys`) are left to the next look, half a second later.
    Raises: NotFound without table or index (one that is still being filled too); Throttled,
    Unavailable, AccessDenied.
    """
    keys = _offered_keys(client, table)
    if len(keys) > rows_max:
        keys = random.sample(keys, rows_max)
    found: list[Lease] = []
    for start in range(0, len(keys), _BATCH_KEYS_MAX):
        found += _rows(client, table, keys[start : start + _BATCH_KEYS_MAX])
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
        reply = parsed(ITEMS_DECODER, QUERY, client.call(QUERY, _encode(request)))
    except InvalidRequest as error:
        # It says "does not have the specified index: …", or "cannot read from backfilling …".
        if error.code == _INVALID and OWNER_INDEX in str(error):
            raise NotFound(
                f"{QUERY.name}: table {table} has no index {OWNER_INDEX} to ask",
                operation=QUERY.name,
                code=_INVALID,
            ) from None
        raise
    named = (item.get("leaseKey", {}).get("S") for item in reply.items)
    return [key for key in named if isinstance(key, str)]


def _rows(client: WireClient, table: str, keys: Sequence[str]) -> tuple[Lease, ...]:
    request: dict[str, Any] = {
        "RequestItems": {
            table: {"Keys": [{"leaseKey": text(key)} for key in keys], "ConsistentRead": True}
        }
    }
    body = client.call(BATCH_GET_ITEM, _encode(request))
    reply = parsed(BATCH_DECODER, BATCH_GET_ITEM, body)
    # A broken row is nobody's to take: the scan names it.
    return decode_page(reply.responses.get(table, ())).leases
