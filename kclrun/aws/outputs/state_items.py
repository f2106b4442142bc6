"""Versions of the keyed state as items of a DynamoDB table, for small deltas: created, never
replaced [K14].

The key is `place` and `version`:

    <folder>                    <shard>   the shard has versions
    <folder>/<shard>            <name>    a version: its content, or the number of its parts
    <folder>/<shard>/<name>     <number>  a part of a version's content

A version of several items is noted first, then written, then marked as whole. So a listing also
shows a version that a crash left incomplete, and only whole versions are read.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from kclrun import errors
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.errors import service_error
from kclrun.aws.operations import DELETE_ITEM, GET_ITEM, PUT_ITEM, QUERY, Operation
from kclrun.aws.outputs.item_tables import CONDITION_REFUSED, TRIES, describe, pause_s
from kclrun.aws.wire import MALFORMED, RefusedReply, WireClient, garbled
from kclrun.errors import SettingsError, SinkError
from kclrun.model.quotas import ITEM_BYTES_MAX, KIB
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.state import StateDestination
from kclrun.model.wire import WireCredentials, WireEndpoint

# The key of the table: both are texts.
PLACE: Final = "place"
VERSION: Final = "version"
# How the table is created.
TABLE: Final[dict[str, Any]] = {
    "KeySchema": [
        {"AttributeName": PLACE, "KeyType": "HASH"},
        {"AttributeName": VERSION, "KeyType": "RANGE"},
    ],
    "AttributeDefinitions": [
        {"AttributeName": name, "AttributeType": "S"} for name in (PLACE, VERSION)
    ],
    "BillingMode": "PAY_PER_REQUEST",
}
# A listing reads the items of a shard whole, at one unit for 4 KB. With 64 deltas of 32 KiB it
# costs 512 units, which is less than a tenth of a cent per thousand listings.
INLINE_BYTES_MAX: Final = 32 * 1024
# The rest of an item is for names and the key.
PART_BYTES: Final = ITEM_BYTES_MAX - 16 * KIB
_NAMES: Final = {"#p": PLACE}
_KEY_WORDS: Final = f"the key `{PLACE}` (partition) and `{VERSION}` (sort), both texts"

_encode: Final = msgspec.json.Encoder().encode
_Item = dict[str, dict[str, Any]]


class _Reply(msgspec.Struct, rename="pascal"):
    """The members of an answer to GetItem (`item`) and to Query; writes are answered with none."""

    item: _Item | None = None
    items: list[_Item] | None = None
    last_evaluated_key: _Item | None = None


_DECODER: Final = msgspec.json.Decoder(_Reply)


def open_state_items(
    place: StateDestination,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
    folder: str,
) -> StateItems:
    """The versions below `folder` in the table of `place`, in the region of `kinesis`, or at
    `place.endpoint_url`; sends nothing. Raises: SettingsError."""
    assert place.dynamodb is not None, "the settings name a table"
    settings = EndpointSettings(region=kinesis.region, endpoint_url=place.endpoint_url)
    endpoint = resolve_endpoint(open_session(settings), "dynamodb", settings)
    return StateItems(WireClient(endpoint, credentials, service="dynamodb"), place.dynamodb, folder)


class StateItems:
    """Implements `VersionStore`. Every request may be repeated: a name has one content."""

    def __init__(
        self,
        client: WireClient,
        table: str,
        folder: str,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._client = client
        self._table = table
        self._folder = folder
        self._sleep = sleep
        self._known: set[str] = set()  # shards that are noted in the table

    def create(self, shard: str, name: str, content: bytes) -> None:
        if shard not in self._known:
            self._put(self._folder, shard, {})
            self._known.add(shard)
        place = self._place(shard)
        written = {"written_at": {"N": f"{time.time():.3f}"}}
        if len(content) <= INLINE_BYTES_MAX:
            self._put(place, name, {**written, "content": _bytes(content)}, is_new=True)
            return
        parts = range(0, len(content), PART_BYTES)
        noted = {**written, "parts": {"N": str(len(parts))}}
        is_noted = self._put(place, name, {**noted, "whole": {"BOOL": False}}, is_new=True)
        if not is_noted and _is_whole(self._get(place, name)):
            return  # an attempt of ours arrived
        for number, at in enumerate(parts):
            part = {"content": _bytes(content[at : at + PART_BYTES])}
            self._put(f"{place}/{name}", f"{number:06}", part)
        if not self._put(place, name, {**noted, "whole": {"BOOL": True}}, is_new=False):
            raise SinkError(f"the version {name} of {shard} was removed while it was written")

    def read(self, shard: str, name: str) -> bytes | None:
        place = self._place(shard)
        item = self._get(place, name)
        if item is None or not _is_whole(item):
            return None
        if "content" in item:
            return base64.b64decode(item["content"]["B"])
        parts = [base64.b64decode(part["content"]["B"]) for part in self._all(f"{place}/{name}")]
        return b"".join(parts) if len(parts) == int(item["parts"]["N"]) else None

    def list(self, shard: str) -> Iterator[tuple[str, float]]:
        """As `VersionStore`; also versions that a crash left incomplete."""
        now = time.time()
        for item in self._all(self._place(shard), "written_at"):
            yield item[VERSION]["S"], now - float(item["written_at"]["N"])

    def shards(self) -> Iterator[str]:
        for item in self._all(self._folder):
            yield item[VERSION]["S"]

    def delete(self, shard: str, names: Sequence[str]) -> None:
        place = self._place(shard)
        for name in names:
            item = self._get(place, name)
            if item is None:
                continue
            for number in range(int(item["parts"]["N"]) if "parts" in item else 0):
                self._delete(f"{place}/{name}", f"{number:06}")
            self._delete(place, name)  # last: a listing shows it until its parts are gone
        if names and not any(True for _ in self.list(shard)):
            self._known.discard(shard)
            self._delete(self._folder, shard)

    def check(self) -> str:
        """As `VersionStore`: the table has the key, and an item of our own is written, read and
        removed."""
        try:
            table = describe(self._client, self._table)
        except errors.NotFound:
            raise SettingsError(
                f"state.store: the table {self._table} does not exist; create it with {_KEY_WORDS}"
            ) from None
        key = [(element.attribute_name, element.attribute_type) for element in table.key]
        if key != [(PLACE, "S"), (VERSION, "S")]:
            raise SettingsError(f"state.store: the table {self._table} needs {_KEY_WORDS}")
        shard, name = "probe", f"{random.getrandbits(64):016x}"
        self.create(shard, name, b"")
        if self.read(shard, name) != b"":
            raise SinkError(f"an item of {self._table} was not there after it was written")
        self.delete(shard, [name])
        return f"the table {self._table}"

    def close(self) -> None:
        self._client.close()

    def _place(self, shard: str) -> str:
        return f"{self._folder}/{shard}"

    def _put(self, place: str, version: str, more: _Item, *, is_new: bool | None = None) -> bool:
        """Put an item; with `is_new` True only if it is not there, with False only if it is.
        Returns whether it was put."""
        asked: dict[str, Any] = {"Item": {**_key(place, version), **more}}
        if is_new is not None:
            exists = "attribute_not_exists" if is_new else "attribute_exists"
            asked |= {
                "ConditionExpression": f"{exists}(#p)",
                "ExpressionAttributeNames": _NAMES,
            }
        return self._ask(PUT_ITEM, asked) is not None

    def _get(self, place: str, version: str) -> _Item | None:
        reply = self._ask(GET_ITEM, {"Key": _key(place, version), "ConsistentRead": True})
        assert reply is not None, "a read has no condition"
        return reply.item

    def _all(self, place: str, *attributes: str) -> Iterator[_Item]:
        """The items of a place in the order of their versions; `attributes` alone, if any."""
        names = {f"#{number}": each for number, each in enumerate((VERSION, *attributes))}
        asked: dict[str, Any] = {
            "KeyConditionExpression": "#p = :p",
            "ExpressionAttributeNames": _NAMES | (names if attributes else {}),
            "ExpressionAttributeValues": {":p": {"S": place}},
            "ConsistentRead": True,
        }
        if attributes:
            asked["ProjectionExpression"] = ", ".join(names)
        is_more = True
        while is_more:
            page = self._ask(QUERY, asked)
            assert page is not None, "a query has no condition that is refused"
            if page.items is None:
                raise SinkError(f"the table {self._table} of the state: the answer is not a page")
            yield from page.items
            is_more = page.last_evaluated_key is not None
            asked["ExclusiveStartKey"] = page.last_evaluated_key

    def _delete(self, place: str, version: str) -> None:
        self._ask(DELETE_ITEM, {"Key": _key(place, version)})

    def _ask(self, operation: Operation, asked: dict[str, Any]) -> _Reply | None:
        """The answer; None where the condition was refused. Raises: SinkError for any other
        failure, after the request was repeated for some seconds if that may help."""
        body = _encode({"TableName": self._table, **asked})
        for number in range(TRIES):
            try:
                reply = self._client.ask(operation, body)
                if not isinstance(reply, RefusedReply):
                    return _DECODER.decode(reply.body)
                if reply.error.code == CONDITION_REFUSED:
                    return None
                failure = service_error(operation, reply.error, reply.status)
            except (errors.Unavailable, errors.OutcomeUnknown) as error:
                failure = error
            except MALFORMED:
                failure = garbled(operation, "the answer is not what the service promises")
            if not isinstance(failure, PASSING_OF_WRITES) or number == TRIES - 1:
                break
            self._sleep(pause_s(number))
        if isinstance(failure, errors.InvalidRequest):  # its message may quote the item
            raise SinkError(f"the table {self._table} refuses {operation.name}: {failure.code}")
        raise SinkError(f"the table {self._table} of the state: {failure}") from None


def _key(place: str, version: str) -> _Item:
    return {PLACE: {"S": place}, VERSION: {"S": version}}


def _bytes(content: bytes) -> dict[str, str]:
    return {"B": base64.b64encode(content).decode()}


def _is_whole(item: _Item | None) -> bool:
    return item is not None and ("content" in item or item["whole"]["BOOL"] is True)
