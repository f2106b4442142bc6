"""Puts records into a stream: one PutRecords, and a sender that drops no record.

Used by the filler of the embedded AWS and for dead letters; all else sends by `producing/`.
Delivery is at least once. A record that
is refused for the moment is sent again, in its order, before any later one. A permanent or too long
refusal is an error, never a gap. Payloads and keys never appear in a message.
"""

from __future__ import annotations

import bisect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kclrun.aws.errors import ErrorReply, service_error
from kclrun.aws.operations import PUT_RECORDS
from kclrun.aws.outputs.write_probes import probe_stream
from kclrun.aws.wire import MALFORMED, WireClient
from kclrun.codec.aggregator import Aggregator
from kclrun.codec.kpl import effective_hash_key
from kclrun.codec.record_sizes import REQUEST_BYTES_MAX
from kclrun.errors import (
    InvalidRequest,
    NothingListens,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry, PutResult
from kclrun.model.retries import PASSING_OF_WRITES, Retries
from kclrun.model.shard import Shard
from kclrun.ports import RecordPutter

# Attempts without any progress. With the sender's backoff (0.1 s doubling to 3 s) they take about
# half a minute, far longer than any throttling of a stream that accepts records at all.
ATTEMPTS_MAX: Final = 12
# A block is one aggregate of small records. A hundred of 200 B make 25 kB, which is one payload
# unit of PutRecords, and small enough to hold in memory for each of hundreds of shards.
BLOCK_MAX: Final = 100
_RETRIES: Final = Retries(attempts_max=ATTEMPTS_MAX, base_s=0.1, passing=PASSING_OF_WRITES)
# The two codes the API documents for a record of an accepted request.
_RECORD_CODES: Final = frozenset({"ProvisionedThroughputExceededException", "InternalFailure"})


class _WireEntry(msgspec.Struct, rename="pascal", omit_defaults=True, gc=False):
    data: bytes
    partition_key: str
    explicit_hash_key: str | None = None


class _Request(msgspec.Struct, rename="pascal", omit_defaults=True):
    records: Sequence[_WireEntry]
    stream_name: str | None = None
    stream_arn: str | None = msgspec.field(name="StreamARN", default=None)


class _Reply(msgspec.Struct, rename="pascal"):
    records: tuple[PutResult, ...]


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Reply)


def put_records(
    client: WireClient, stream: str, entries: Sequence[PutEntry]
) -> tuple[PutResult, ...]:
    """Send one PutRecords (at most 500 entries), once; a result for each entry, in order.

    `stream` is a name or an ARN. Raises: a ServiceError leaf where the request as a whole failed.
    """
    is_arn = stream.startswith("arn:")
    request = _Request(
        records=[
            _WireEntry(entry.data, entry.partition_key, entry.explicit_hash_key)
            for entry in entries
        ],
        stream_name=None if is_arn else stream,
        stream_arn=stream if is_arn else None,
    )
    reply = client.call(PUT_RECORDS, _ENCODER.encode(request))
    try:
        results = _DECODER.decode(reply.body).records
    except MALFORMED:
        results = ()
    if len(results) != len(entries):
        text = ErrorReply(message="the reply is not one result a record")
        raise service_error(PUT_RECORDS, text, None)
    return results


class WirePutter:
    """Implements `ports.RecordPutter` for one stream (a name or an ARN) over the wire client."""

    def __init__(self, client: WireClient, stream: str) -> None:
        self._client = client
        self._stream = stream

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        return put_records(self._client, self._stream, entries)

    def prove(self) -> str:
        return probe_stream(self._client, self._stream)


class LonePutter:
    """Implements `ports.RecordPutter` over another: records that the service refuses for good fail
    alone. It refuses the whole request for one of them, so the records are then sent one by one."""

    def __init__(self, putter: RecordPutter) -> None:
        self._putter = putter

    def put(self, entries: Sequence[PutEntry]) -> tuple[PutResult, ...]:
        try:
            return self._putter.put(entries)
        except InvalidRequest:
            if len(entries) == 1:
                raise
        return tuple([self._put_one(entry) for entry in entries])

    def _put_one(self, entry: PutEntry) -> PutResult:
        try:
            (result,) = self._putter.put([entry])
        except InvalidRequest as error:
            return PutResult(error_code=error.code or "InvalidArgumentException")
        except PASSING_OF_WRITES:
            # Not known, or not now: the caller sends it again.
            return PutResult(error_code="InternalFailure")
        return result

    def prove(self) -> str:
        return self._putter.prove()


def batches(
    entries: Iterable[PutEntry], *, one_a_key: bool = False
) -> Iterator[tuple[PutEntry, ...]]:
    """Cut a stream of entries into requests that keep the service's limits.

    With `one_a_key` a key appears once in a request. So if one record in the middle of a request is
    refused, no later record with its key can overtake it.
    """
    batch: list[PutEntry] = []
    keys: set[str] = set()
    size_bytes = 0
    for entry in entries:
        added = entry.size_bytes
        is_full = len(batch) == PUT_RECORDS_MAX or size_bytes + added > REQUEST_BYTES_MAX
        if batch and (is_full or entry.partition_key in keys):
            yield tuple(batch)
            batch, keys, size_bytes = [], set(), 0
        batch.append(entry)
        size_bytes += added
        if one_a_key:
            keys.add(entry.partition_key)
    if batch:
        yield tuple(batch)


class ShardPacker:
    """Packs a share of the records into KPL aggregates, and keeps the order within each shard.

    Records are held per shard until a block of `BLOCK_MAX` is complete. The first part of a block
    becomes aggregates, the rest is sent as single records. So no record overtakes another one of
    its shard. `shards` must be the shards that are open now: after a change, call `flush` and make
    a new packer.
    """

    def __init__(self, shards: Iterable[Shard], share: float) -> None:
        self._share = share
        self._shards = sorted(
            (shard.hash_range.start, shard.shard_id) for shard in shards if shard.is_open
        )
        self._starts = [start for start, _ in self._shards]
        self._waiting: list[list[PutEntry]] = [[] for _ in self._shards]
        self._owed = 0.0
        self._aggregator = Aggregator()

    def add(self, entry: PutEntry) -> Sequence[PutEntry]:
        """Add a record; returns the entries to send now. Raises: LimitExceeded: an invalid key."""
        hash_key = effective_hash_key(entry.partition_key, entry.explicit_hash_key)
        block = self._waiting[max(0, bisect.bisect_right(self._starts, hash_key) - 1)]
        block.append(entry)
        return self._packed(block) if len(block) >= BLOCK_MAX else ()

    def flush(self) -> Sequence[PutEntry]:
        """All entries that are still held."""
        return [entry for block in self._waiting for entry in self._packed(block)]

    def _packed(self, block: list[PutEntry]) -> Sequence[PutEntry]:
        # The rounding error is carried over to the next block, so that the share is exact.
        self._owed += self._share * len(block)
        count = int(self._owed + 1e-9)
        self._owed -= count
        packed = [*self._aggregates(block[:count]), *block[count:]]
        block.clear()
        return packed

    def _aggregates(self, entries: Sequence[PutEntry]) -> Iterator[PutEntry]:
        for entry in entries:
            if self._add(entry):
                continue
            if len(self._aggregator):
                yield self._finished()
            if not self._add(entry):
                yield entry  # too large for any aggregate: sent as a single record
        if len(self._aggregator):
            yield self._finished()

    def _add(self, entry: PutEntry) -> bool:
        return self._aggregator.add(entry.partition_key, entry.data, entry.explicit_hash_key)

    def _finished(self) -> PutEntry:
        count = len(self._aggregator)
        made = self._aggregator.finish()
        return PutEntry(made.data, made.partition_key, made.explicit_hash_key, count)


def send_all(
    client: WireClient,
    stream: str,
    batch: Sequence[PutEntry],
    *,
    wait: Callable[[float], object] = time.sleep,
    chance: Callable[[], float] = random.random,
) -> int:
    """Put every entry of one batch, in order. Refused entries are sent again, and so is a request
    whose outcome is unknown. Returns the number of requests that left entries over.

    Raises: Throttled or Unavailable after `ATTEMPTS_MAX` attempts in a row without progress, any
    other ServiceError at once, and NothingListens.
    """
    pending = tuple(batch)
    refusals = fruitless = 0
    while pending:
        left, last = _attempt(client, stream, pending)
        if not left:
            break
        refusals += 1
        fruitless = 0 if len(left) < len(pending) else fruitless + 1
        pause_s = _RETRIES.pause_s(last, max(fruitless, 1), chance())
        if pause_s is None:
            raise last.reworded(
                f"{len(left)} records were not taken in {fruitless} attempts; the last: {last}"
            )
        pending = left
        wait(pause_s)
    return refusals


def send_accepted(
    client: WireClient, stream: str, batch: Sequence[PutEntry]
) -> dict[int, InvalidRequest]:
    """Send a batch as `send_all` does. Returns the entries that the service refuses for good, by
    their index, with the reason. It refuses the whole request for one such entry, so the entries of
    a refused request are sent one by one."""
    try:
        send_all(client, stream, batch)
    except InvalidRequest as error:
        if len(batch) == 1:
            return {0: error}
    else:
        return {}
    refused: dict[int, InvalidRequest] = {}
    for index, entry in enumerate(batch):
        try:
            send_all(client, stream, [entry])
        except InvalidRequest as error:
            refused[index] = error
    return refused


def _attempt(
    client: WireClient, stream: str, pending: Sequence[PutEntry]
) -> tuple[tuple[PutEntry, ...], ServiceError]:
    """The entries that are left after one request, and the reason."""
    try:
        results = put_records(client, stream, pending)
    except NothingListens:
        raise
    except PASSING_OF_WRITES as error:
        return tuple(pending), error
    refused = [
        (entry, code)
        for entry, result in zip(pending, results, strict=True)
        if (code := result.error_code) is not None
    ]
    return tuple(entry for entry, _ in refused), _why({code for _, code in refused})


def _why(codes: set[str]) -> ServiceError:
    """The error for a refusal of some records. Raises: InvalidRequest for a permanent refusal."""
    for code in codes:
        if code not in _RECORD_CODES and not code.startswith("KMS"):
            raise InvalidRequest(
                f"{PUT_RECORDS.name}: a record was refused with {code[:100]}",
                operation=PUT_RECORDS.name,
                code=code,
            )
    leaf = Throttled if "ProvisionedThroughputExceededException" in codes else Unavailable
    named = ", ".join(sorted(codes))
    return leaf(f"{PUT_RECORDS.name}: {named}", operation=PUT_RECORDS.name, code=named)
