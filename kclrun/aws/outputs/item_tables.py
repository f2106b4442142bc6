"""DynamoDB tables that hold items of ours, as rows or as versions of the state: their key, whether
items may be put, and how often a request is repeated."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from kclrun.aws.errors import service_error
from kclrun.aws.operations import DESCRIBE_TABLE, PUT_ITEM
from kclrun.aws.outputs.write_probes import may_write
from kclrun.aws.wire import RefusedReply, WireClient, call_json, garbled
from kclrun.model import statuses
from kclrun.model.row_schema import RowSchema
from kclrun.model.row_types import DataType, DecimalType, SimpleType
from kclrun.model.time import backoff_s

# DynamoDB's code for a condition that does not hold.
CONDITION_REFUSED: Final = "ConditionalCheckFailedException"
# A request is repeated after 50 ms, doubled up to a second: for four seconds altogether. Then the
# commit fails, and is repeated at the pace of the host.
TRIES: Final = 8
# A key of each type; in base64 that of bytes. The condition refuses the item whatever it is.
_KEYS: Final = {"S": "kclrun-check", "N": "0", "B": "a2NscnVu"}
_KINDS: Final = {
    **dict.fromkeys(("string", "date", "timestamp"), "S"),
    **dict.fromkeys(("byte", "short", "int", "long", "float", "double"), "N"),
    "binary": "B",
}
_NEVER: Final = "attribute_exists(#k) AND attribute_not_exists(#k)"

_encode: Final = msgspec.json.Encoder().encode


def pause_s(number: int) -> float:
    """The pause after attempt `number`, counted from 0."""
    return backoff_s(number, random.random(), max_s=1.0)


class KeyColumn(msgspec.Struct, rename="pascal", frozen=True):
    """An attribute of the key, and its type: S, N or B."""

    attribute_name: str
    attribute_type: str = ""


class _Index(msgspec.Struct, rename="pascal"):
    index_name: str
    key_schema: list[KeyColumn]


class _Table(msgspec.Struct, rename="pascal"):
    key_schema: list[KeyColumn]
    attribute_definitions: list[KeyColumn]
    table_arn: str = ""
    table_status: str = "ACTIVE"
    global_secondary_indexes: list[_Index] = []
    local_secondary_indexes: list[_Index] = []


class _Reply(msgspec.Struct, rename="pascal"):
    table: _Table


_DECODER: Final = msgspec.json.Decoder(_Reply)


class IndexColumn(msgspec.Struct, frozen=True):
    """An attribute of the key of a secondary index: an item may lack it, but not have it with
    another type, or empty. `at` is 0 for the partition key, 1 for the sort key."""

    index: str
    name: str
    type: str
    at: int


class ItemTable(msgspec.Struct, frozen=True):
    """A table as the service describes it: the partition key first, then the sort key, if any."""

    name: str
    arn: str
    key: tuple[KeyColumn, ...]
    indexed: tuple[IndexColumn, ...] = ()


def describe(client: WireClient, name: str) -> ItemTable:
    """The table of this name. Raises: a ServiceError leaf (NotFound without it, or while it is
    being deleted; InvalidRequest for a status that a person has to end; Unavailable for another
    with which it takes no items)."""
    table = call_json(client, DESCRIBE_TABLE, {"TableName": name}, _DECODER).table
    statuses.require(statuses.TABLE, f"the table {name}", table.table_status)
    types = {
        definition.attribute_name: definition.attribute_type
        for definition in table.attribute_definitions
    }
    try:
        key = tuple(
            KeyColumn(element.attribute_name, types[element.attribute_name])
            for element in table.key_schema
        )
        indexed = tuple(
            IndexColumn(index.index_name, element.attribute_name, types[element.attribute_name], at)
            for index in (*table.global_secondary_indexes, *table.local_secondary_indexes)
            for at, element in enumerate(index.key_schema)
        )
    except KeyError:
        raise garbled(DESCRIBE_TABLE, "a part of the key has no type") from None
    return ItemTable(name, table.table_arn or f"the table {name}", key, indexed)


def misfit(table: ItemTable, schema: RowSchema) -> str | None:
    """Why no row of this schema can be an item of the table; None if rows can."""
    types = {column.name: column.type for column in schema.columns}
    for column in table.key:
        name, wanted = column.attribute_name, column.attribute_type
        found = types.get(name)
        if found is None:
            return f"the schema lacks {name}, which is of the key of the table {table.name}"
        if _kind_of(found) != wanted:
            return f"column {name} is {found}: the key of the table {table.name} has type {wanted}"
    for indexed in table.indexed:
        found = types.get(indexed.name)
        if found is not None and _kind_of(found) != indexed.type:
            return (
                f"column {indexed.name} is {found}: the index {indexed.index} of the table"
                f" {table.name} has type {indexed.type}"
            )
    return None


def _kind_of(found: DataType) -> str | None:
    if isinstance(found, SimpleType):
        return _KINDS.get(found.name)
    return "N" if isinstance(found, DecimalType) else None


def trial_request(table: ItemTable, item: bytes) -> bytes:
    """The body of a PutItem that the service checks and does not perform: its condition cannot
    hold."""
    request = {
        "TableName": table.name,
        "ConditionExpression": _NEVER,
        "ExpressionAttributeNames": {"#k": table.key[0].attribute_name},
    }
    return _encode(request)[:-1] + b',"Item":' + item + b"}"


def may_put(client: WireClient, table: ItemTable) -> str:
    """Whether items may be put, in words: an item is put whose condition can never hold. Raises: as
    `may_write`."""
    item = {
        element.attribute_name: {element.attribute_type: _KEYS[element.attribute_type]}
        for element in table.key
    }

    def send() -> str | None:
        reply = client.ask(PUT_ITEM, trial_request(table, _encode(item)))
        if not isinstance(reply, RefusedReply):
            return (
                "the service put an item under a condition that does not hold: it is not DynamoDB"
            )
        if reply.error.code == CONDITION_REFUSED:
            return None
        raise service_error(PUT_ITEM, reply.error, reply.status)

    return may_write(PUT_ITEM, table.arn, send)
