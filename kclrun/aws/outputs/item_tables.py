"""DynamoDB tables that hold items of ours, as rows or as versions of the state: their key, and
whether items may be put."""

from __future__ import annotations

from typing import Final

import msgspec

from kclrun.aws.errors import service_error
from kclrun.aws.operations import DESCRIBE_TABLE, PUT_ITEM
from kclrun.aws.outputs.write_probes import may_write
from kclrun.aws.wire import RefusedReply, WireClient
from kclrun.errors import SinkError
from kclrun.model.row_schema import DecimalType, RowSchema, SimpleType

# DynamoDB's code for a condition that does not hold.
CONDITION_REFUSED: Final = "ConditionalCheckFailedException"
# A key of each type; in base64 that of bytes. The condition refuses the item whatever it is.
_KEYS: Final = {"S": "kclrun-check", "N": "0", "B": "a2NscnVu"}
_KINDS: Final = {
    **dict.fromkeys(("string", "date", "timestamp"), "S"),
    **dict.fromkeys(("byte", "short", "int", "long", "float", "double"), "N"),
    "binary": "B",
}
_NEVER: Final = "attribute_exists(#k) AND attribute_not_exists(#k)"

_encode: Final = msgspec.json.Encoder().encode


class KeyColumn(msgspec.Struct, rename="pascal", frozen=True):
    """An attribute of the key, and its type: S, N or B."""

    attribute_name: str
    attribute_type: str = ""


class _Table(msgspec.Struct, rename="pascal"):
    key_schema: list[KeyColumn]
    attribute_definitions: list[KeyColumn]
    table_arn: str = ""


class _Reply(msgspec.Struct, rename="pascal"):
    table: _Table


class ItemTable(msgspec.Struct, frozen=True):
    """A table as the service describes it: the partition key first, then the sort key, if any."""

    name: str
    arn: str
    key: tuple[KeyColumn, ...]


def describe(client: WireClient, name: str) -> ItemTable:
    """The table of this name. Raises: a ServiceError leaf (NotFound without it); SinkError for an
    answer that is not one."""
    reply = client.call(DESCRIBE_TABLE, _encode({"TableName": name}))
    try:
        table = msgspec.json.decode(reply.body, type=_Reply).table
        types = {each.attribute_name: each.attribute_type for each in table.attribute_definitions}
        names = [each.attribute_name for each in table.key_schema]
        key = tuple(KeyColumn(each, types[each]) for each in names)
    except (msgspec.DecodeError, KeyError) as error:
        raise SinkError(f"cannot use the table {name}: {error}") from None
    return ItemTable(name, table.table_arn or f"the table {name}", key)


def misfit(table: ItemTable, schema: RowSchema) -> str | None:
    """Why no row of this schema can be an item of the table; None if rows can."""
    types = {each.name: each.type for each in schema.columns}
    for column in table.key:
        name, wanted = column.attribute_name, column.attribute_type
        found = types.get(name)
        if found is None:
            return f"the schema lacks {name}, which is of the key of the table {table.name}"
        kind = "N" if isinstance(found, DecimalType) else None
        if isinstance(found, SimpleType):
            kind = _KINDS.get(found.name)
        if kind != wanted:
            return f"column {name} is {found}: the key of the table {table.name} has type {wanted}"
    return None


def may_put(client: WireClient, table: ItemTable) -> str:
    """In words whether items may be put, by one whose condition can never hold. Raises: as
    `may_write`."""
    item = {
        each.attribute_name: {each.attribute_type: _KEYS[each.attribute_type]} for each in table.key
    }
    asked = {
        "TableName": table.name,
        "Item": item,
        "ConditionExpression": _NEVER,
        "ExpressionAttributeNames": {"#k": table.key[0].attribute_name},
    }

    def send() -> str | None:
        reply = client.ask(PUT_ITEM, _encode(asked))
        if not isinstance(reply, RefusedReply):
            return (
                "the service put an item under a condition that does not hold: it is not DynamoDB"
            )
        if reply.error.code == CONDITION_REFUSED:
            return None
        raise service_error(PUT_ITEM, reply.error, reply.status)

    return may_write(PUT_ITEM, table.arn, send)
