"""Rows of a shard as whole items of a DynamoDB table, effectively once [K10].

Each item carries a mark: whose rows it holds and up to which cursor. An item is only put over a
lower mark, so that neither a replay nor a late request of a former owner brings back an older item.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from kclrun import errors
from kclrun.aws.endpoints import EndpointSettings, open_session, resolve_endpoint
from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import PUT_ITEM
from kclrun.aws.outputs.item_tables import (
    CONDITION_REFUSED,
    TRIES,
    ItemTable,
    describe,
    may_put,
    misfit,
    pause_s,
    trial_request,
)
from kclrun.aws.outputs.item_values import MARK, Attribute, Encoded, Key, encode_item
from kclrun.aws.wire import RefusedReply, WireClient, garbled
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.model.retries import PASSING_OF_WRITES
from kclrun.model.row_schema import RowSchema
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import Output
from kclrun.processor import Row

# An answer takes some 5 ms: 3,000 items a second and lease, in threads that mostly wait.
PARALLEL: Final = 16
# A table with a local index: the items of one partition key have 10 GB.
_COLLECTION_FULL: Final = "ItemCollectionSizeLimitExceededException"
_WORD: Final = re.compile(r"[\w.-]*\w")
_encode: Final = msgspec.json.Encoder().encode
# A mark below ours: of an earlier reset or an earlier stream of the name, or of our shard.
_NAMES: Final = {"#m": MARK, "#o": "of", "#e": "epoch", "#s": "shard", "#u": "upto"}
_LOWER: Final = (
    "attribute_not_exists(#m) OR (#m.#o = :o AND"
    " (#m.#e < :e OR (#m.#e = :e AND #m.#s = :s AND #m.#u < :u)))"
)
# The mark of an ancestor, as it was read.
_UNCHANGED: Final = "#m.#o = :o AND #m.#e = :e AND #m.#s = :s AND #m.#u = :u"


class _Mark(msgspec.Struct, frozen=True):
    """`epoch` orders streams of one name, and the resets of each; `upto` is a cursor, as text in
    its order."""

    of: str
    epoch: str
    shard: str
    upto: str

    def attribute(self) -> Attribute:
        return {"M": {name: {"S": getattr(self, name)} for name in self.__struct_fields__}}

    def values(self) -> Attribute:
        return {f":{name[0]}": {"S": getattr(self, name)} for name in self.__struct_fields__}


def open_dynamodb_output(
    place: OutputDestination,
    of: RowsOf,
    kinesis: WireEndpoint,
    credentials: Callable[[], WireCredentials],
) -> DynamoDbOutput:
    """The output for a table in the region of `kinesis`, or at `place.endpoint_url`. Sends
    nothing. Raises: SettingsError."""
    settings = EndpointSettings(region=kinesis.region, endpoint_url=place.endpoint_url)
    endpoint = resolve_endpoint(open_session(settings), "dynamodb", settings)
    client = WireClient(endpoint, credentials, service="dynamodb", connections_max=PARALLEL)
    return DynamoDbOutput(place, of, client)


class DynamoDbOutput:
    """Implements `ports.Output`: one item table, for one shard and one owner of its lease.

    A commit puts the last row of each key, with the commit's cursor as mark: the item is then the
    result of all records up to the cursor. So items can be compared however the records were cut
    into commits, and no ordinal within a commit is needed. A mark that is not below ours means
    that the item has this row or a later one.

    Marks of two shards do not compare: a mark of an ancestor is overwritten, any other is an error.
    Kinesis numbers shards as it makes them, so that ancestors have lower numbers, also those that
    were trimmed and have no lease any more. A lower number that is not an ancestor counts
    as one; as soon as it writes such an item itself, it finds the higher number and fails.
    """

    stores_cursor: bool = False

    def __init__(
        self,
        place: OutputDestination,
        of: RowsOf,
        client: WireClient,
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        assert place.dynamodb is not None, "the settings name a table"
        self._table = place.dynamodb
        self._schema = None if place.schema is None else RowSchema.parse(place.schema)
        self._client = client
        self._sleep = sleep
        self._of = f"{of.application}/{of.stream}"
        self._epoch = f"{round(of.stream_created_at * 1000):015d}-{of.generation:010d}"
        self._shard = of.shard_id
        self._is_letter = of.letter is not None
        self._there: ItemTable | None = None
        self._pending: dict[Key, Encoded] = {}
        self._unsent_bytes = 0
        self._upto: Cursor | None = None
        self._threads: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"DynamoDbOutput({self._table})"

    def encode(self, row: Row) -> tuple[Encoded, int]:
        """As `Output.encode`, with the key that `begin` found. A row is a whole item: attributes
        that the row lacks are removed from the item. Dates and UUIDs become texts; a float becomes
        the number of its shortest text."""
        encoded = encode_item(row, self._found)
        return encoded, encoded[2]

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`. The items have their own marks: `at` comes back."""
        try:
            self._there = self._described()
        except errors.ServiceError as error:
            raise errors.SinkError(str(error)) from None
        self._upto = at
        return at

    def add(self, rows: Sequence[Encoded], upto: Cursor) -> None:
        """As `Output.add`; nothing is sent here."""
        for row in rows:
            former = self._pending.pop(row[0], None)
            self._unsent_bytes += row[2] - (former[2] if former is not None else 0)
            self._pending[row[0]] = row
        self._upto = upto

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    def commit(self) -> Cursor:
        """As `Output.commit`. After a failure the items that were put are not put again."""
        assert self._upto is not None, "begin comes first"
        if self._pending:
            self._put_all(_Mark(self._of, self._epoch, self._shard, _ordered(self._upto)))
        return self._upto

    def check(self) -> str:
        """As `Output.check`, with an item whose condition can never hold."""
        table = self._described()
        wrong = None if self._schema is None else misfit(table, self._schema)
        if wrong is not None:
            raise errors.SettingsError(wrong)
        try:
            return f"the table {self._table}; {may_put(self._client, table)}"
        except errors.ServiceError as error:
            raise self._naming(error) from None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self._pending.clear()
        self._unsent_bytes = 0
        self._client.close()

    @property
    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PARALLEL, "items")
        return self._threads

    @property
    def _found(self) -> ItemTable:
        assert self._there is not None, "begin comes first"
        return self._there

    def _described(self) -> ItemTable:
        """Raises: SettingsError without the table; another leaf of ServiceError."""
        try:
            return describe(self._client, self._table)
        except errors.NotFound:
            raise errors.SettingsError(
                f"the table {self._table} does not exist\n"
                "Create it with its key, or correct its name in the settings"
            ) from None
        except errors.ServiceError as error:
            raise self._naming(error) from None

    def _naming(self, error: errors.ServiceError) -> errors.ServiceError:
        message = f"cannot use the table {self._table}: {error}"
        return error.reworded(message)

    def is_tried_with(self, other: Output) -> bool:
        """False: items do not depend on each other."""
        return False

    def try_rows(
        self, rows: Sequence[Encoded], before: Sequence[tuple[Output, Sequence[Encoded]]]
    ) -> None:
        """Try each item alone, with a condition that cannot hold. DynamoDB checks
        the item before it looks at the condition."""
        del before
        for failure in self._pool.map(self._tried, [row[1] for row in rows]):
            if failure is not None:
                raise failure

    def _tried(self, item: bytes) -> Exception | None:
        """Why an item is not taken; None if it is."""
        body = trial_request(self._found, self._marked(item, _Mark(self._of, self._epoch, "", "")))
        failure: errors.ServiceError | None = None
        for number in range(TRIES):
            try:
                reply = self._client.ask(PUT_ITEM, body)
            except (errors.Unavailable, errors.OutcomeUnknown) as error:
                failure = error
            else:
                if not isinstance(reply, RefusedReply):
                    return errors.SettingsError(
                        f"the table {self._table} put an item whose condition does not hold"
                    )
                if reply.error.code == CONDITION_REFUSED:
                    return None
                failure = service_error(PUT_ITEM, reply.error, reply.status)
                if self._is_of_item(failure):
                    return TypeError(self._refusal(reply.error))
            if not isinstance(failure, PASSING_OF_WRITES):
                break
            self._sleep(pause_s(number))
        return errors.SinkError(f"cannot put items into {self._table}: {failure}")

    @staticmethod
    def _is_of_item(failure: errors.ServiceError) -> bool:
        """Whether the item itself is refused, for good."""
        return isinstance(failure, errors.InvalidRequest) or failure.code == _COLLECTION_FULL

    def _refusal(self, error: ErrorReply) -> str:
        """In words; the message of the service may quote the item, and only names of ours are
        taken from it."""
        named = self._named_in(error)
        if not named:  # the table may have another index since the lease began
            with contextlib.suppress(errors.ServiceError, errors.SettingsError):
                self._there = self._described()
            named = self._named_in(error)
        return f"the table {self._table} refuses an item: {error.code}{named}"

    def _named_in(self, error: ErrorReply) -> str:
        words = set(_WORD.findall(error.message))
        table = self._found
        names = [*(it.attribute_name for it in table.key), *(it.name for it in table.indexed)]
        return "".join(f", column {name}" for name in dict.fromkeys(names) if name in words)

    def _put_all(self, mark: _Mark) -> None:
        """Put all items in parallel; a key is there once, so that their order is free."""
        stop = threading.Event()
        shared = iter(list(self._pending.values()))
        lock = threading.Lock()
        done: list[Encoded] = []

        def put_some() -> None:
            while not stop.is_set():
                with lock:
                    row = next(shared, None)
                if row is None:
                    return
                try:
                    self._put(row[1], mark, stop)
                except BaseException:
                    stop.set()
                    raise
                done.append(row)

        threads = min(PARALLEL, len(self._pending))
        futures = [self._pool.submit(put_some) for _ in range(threads)]
        failures = [future.exception() for future in futures]
        for row in done:
            del self._pending[row[0]]
            self._unsent_bytes -= row[2]
        # Failures that a repetition does not repair come first.
        known = [failure for failure in failures if failure is not None]
        for kind in (errors.SettingsError, errors.Superseded, BaseException):
            for failure in known:
                if isinstance(failure, kind):
                    raise failure

    def _put(self, item: bytes, mark: _Mark, stop: threading.Event) -> None:
        """One item, unless the table has it or a later one."""
        condition, values = _LOWER, mark.values()
        marked = self._marked(item, mark)
        for number in range(TRIES):
            found = self._ask(_request(self._table, marked, condition, values))
            if found is None:
                return
            if isinstance(found, _Mark):
                if not self._goes_over(found, mark):
                    return
                condition, values = _LOWER, mark.values()
                if found.shard != mark.shard and found.epoch == mark.epoch:
                    condition, values = _UNCHANGED, found.values()
                continue
            if number == TRIES - 1 or stop.is_set():
                raise errors.SinkError(f"cannot put items into {self._table}: {found}") from None
            self._sleep(pause_s(number))
        raise errors.SinkError(f"cannot put an item into {self._table}: others write the same one")

    @staticmethod
    def _marked(item: bytes, mark: _Mark) -> bytes:
        marked = item[:-1] + (b"," if len(item) > 2 else b"") + b'"%b":' % MARK.encode()
        return marked + _encode(mark.attribute()) + b"}"

    def _ask(self, body: bytes) -> errors.ServiceError | _Mark | None:
        """None once it is put; the mark of the item that is there instead; or a failure that
        passes. A lost answer is harmless: our own mark is then found."""
        try:
            reply = self._client.ask(PUT_ITEM, body)
        except (errors.Unavailable, errors.OutcomeUnknown) as error:
            return error
        if not isinstance(reply, RefusedReply):
            # A page of a proxy is not an answer: the item may not be there.
            is_answer = reply.body[:1] == b"{"
            return None if is_answer else garbled(PUT_ITEM, "the answer is not JSON")
        if reply.error.code == CONDITION_REFUSED:
            return self._mark_of(reply.error)
        failure = service_error(PUT_ITEM, reply.error, reply.status)
        if isinstance(failure, PASSING_OF_WRITES):
            return failure
        if self._is_of_item(failure):
            raise errors.RowsRefused(self._refusal(reply.error))
        raise errors.SinkError(f"cannot put items into {self._table}: {failure}")

    def _mark_of(self, error: ErrorReply) -> _Mark | errors.Unavailable:
        """The mark of the item that is there; a failure if it is not shown (it was just
        deleted)."""
        try:
            found: Any = (error.item or {})[MARK]
            return _Mark(*(found["M"][name]["S"] for name in _Mark.__struct_fields__))
        except (KeyError, TypeError):
            return errors.Unavailable("an item changed meanwhile", operation=PUT_ITEM.name)

    def _goes_over(self, found: _Mark, ours: _Mark) -> bool:
        """Whether our item goes over the one with the mark `found`.

        Raises: Superseded, SettingsError if it may not.
        """
        if found.of != ours.of:
            raise errors.SettingsError(
                f"the table {self._table} has items of {found.of} with our keys: two applications"
                " must not write the same items"
            )
        if found.epoch > ours.epoch:
            raise errors.Superseded(f"the table {self._table} has items of a later reset or stream")
        if found.epoch < ours.epoch:
            return True
        is_later = (_age(found.shard), found.upto) > (_age(ours.shard), ours.upto)
        if self._is_letter and is_later:
            # The mark is that of a commit, and the record of the item may be before the letter's.
            raise errors.SettingsError(
                f"the table {self._table} has an item with a key of this dead letter, from a commit"
                " behind it: which of the two is newer is not known\n"
                "Drop the dead letter, or put it back with --to stream: its item is the newest then"
            )
        if found.shard == ours.shard:
            return found.upto < ours.upto
        if _age(found.shard) > _age(ours.shard):
            raise errors.SettingsError(
                f"the table {self._table} has items of {found.shard} with keys of {self._shard}\n"
                "Items of one key must come from records of one partition key, so that one shard"
                " at a time writes them"
            )
        return True


def _request(table: str, item: bytes, condition: str, values: Attribute) -> bytes:
    request = {
        "TableName": table,
        "ConditionExpression": condition,
        "ExpressionAttributeNames": _NAMES,
        "ExpressionAttributeValues": values,
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    return _encode(request)[:-1] + b',"Item":' + item + b"}"


def _age(shard_id: str) -> tuple[int, str]:
    """`shardId-000000000007` in the order in which shards are made."""
    return len(shard_id), shard_id


def _ordered(cursor: Cursor) -> str:
    """The cursor as text in its order: a sequence number has up to 129 digits, never padded, and
    DynamoDB's own numbers have 38."""
    rank, length, digits, sub, _ = cursor.position.sort_key
    return f"{rank + 5:02d}-{length:03d}-{digits}-{sub:010d}-{cursor.tick:018d}"
