"""The bodies of DynamoDB's answers, as far as the lease table reads them."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from kclrun.aws.operations import Operation
from kclrun.aws.wire import WireReply
from kclrun.errors import Unavailable

__all__ = ["BATCH_DECODER", "ITEMS_DECODER", "ROW_DECODER", "parsed"]

T = TypeVar("T")
_Item = dict[str, dict[str, Any]]


class ItemsReply(msgspec.Struct, rename="pascal"):
    """A page of Scan or Query."""

    items: list[_Item] = []
    last_evaluated_key: _Item | None = None


class RowReply(msgspec.Struct):
    """GetItem's row, or UpdateItem's row after the write."""

    item: _Item | None = msgspec.field(name="Item", default=None)
    attributes: _Item | None = msgspec.field(name="Attributes", default=None)


class BatchReply(msgspec.Struct, rename="pascal"):
    """BatchGetItem's rows by table. `UnprocessedKeys` is not read: see `owner_index.py`."""

    responses: dict[str, list[_Item]] = {}


ITEMS_DECODER: Final = msgspec.json.Decoder(ItemsReply)
ROW_DECODER: Final = msgspec.json.Decoder(RowReply)
BATCH_DECODER: Final = msgspec.json.Decoder(BatchReply)


def parsed(decoder: msgspec.json.Decoder[T], operation: Operation, reply: WireReply) -> T:
    """The body of a read's answer. Raises: Unavailable for a garbled one: reads may ask again."""
    try:
        return decoder.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Unavailable(
            f"{operation.name}: the answer is not what the service promises",
            operation=operation.name,
            code="MalformedBody",
        ) from None
