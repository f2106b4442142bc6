"""The stream of one DynamoDB table: shards that close and get children by themselves. Pure.

`now` is an argument of every call. Source: the API reference of DynamoDB Streams, and "Change data
capture for DynamoDB Streams" of its developer guide. A shard is open for some four hours, then it
has one child, or two where its partition was split. Children may be listed a moment later than they
take changes. Records are kept for 24 hours, a closed shard as long as its last record could be.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import msgspec

from kclrun.errors import ExpiredIterator, InvalidRequest, NotFound, ServiceError
from kclrun.model.quotas import (
    CHANGE_ITERATOR_LIVES_S,
    CHANGE_SHARDS_MAX,
    CHANGES_BYTES_MAX,
    CHANGES_MAX,
    CHANGES_RETENTION_HOURS,
)
from kclrun.model.record import IteratorType
from kclrun.model.shard import ALL_HASH_KEYS, HashRange, hash_key_of
from kclrun.model.time import WallTime

LIVES_S: Final = 4 * 3600.0
RETENTION_S: Final = CHANGES_RETENTION_HOURS * 3600.0
# The numbers of a young stream differ in length, as those of the service may: they grow by a digit
# after some records.
_FIRST_NUMBER: Final = 10**20 - 30
# The API reference: 21 to 40 characters.
_DIGITS_MAX: Final = 40


class ChangeSettings(msgspec.Struct, frozen=True):
    """How the shards of all streams behave.

    `lives_s`: how long a shard is open. `partitions`: the shards of a new stream; while there are
    fewer than `partitions_max` open ones, a shard that closes gets two children. `listed_after_s`:
    how much later than it opens a child is listed; the second of two, twice as late.
    """

    lives_s: float = LIVES_S
    partitions: int = 1
    partitions_max: int = 1
    listed_after_s: float = 0.0


class Change(msgspec.Struct, frozen=True):
    """One stream record: `event` is complete but for its number and its time."""

    number: int
    created_at: WallTime
    event: dict[str, Any]

    def described(self) -> dict[str, Any]:
        change = self.event["dynamodb"] | {
            "SequenceNumber": str(self.number),
            "ApproximateCreationDateTime": int(self.created_at),
        }
        return self.event | {"dynamodb": change}


class ChangeShard:
    """One shard: its partition of the keys, and the changes that are left."""

    def __init__(
        self,
        *,
        shard_id: str,
        parent_id: str | None,
        keys: HashRange,
        number: int,
        opened_at: WallTime,
        listed_at: WallTime,
    ) -> None:
        self.shard_id = shard_id
        self.parent_id = parent_id
        self.keys = keys
        self.starting_number = number
        self.ending_number: int | None = None
        self.opened_at = opened_at
        self.listed_at = listed_at
        self.closed_at: WallTime | None = None
        self.changes: list[Change] = []
        # The number of the last change that was trimmed.
        self.trimmed_to = 0

    def described(self) -> dict[str, Any]:
        numbers = {"StartingSequenceNumber": str(self.starting_number)}
        if self.ending_number is not None:
            numbers["EndingSequenceNumber"] = str(self.ending_number)
        parent = {} if self.parent_id is None else {"ParentShardId": self.parent_id}
        return {"ShardId": self.shard_id, "SequenceNumberRange": numbers, **parent}


class _Place(msgspec.Struct, frozen=True):
    """The position of an iterator: changes from `number` on."""

    arn: str
    shard_id: str
    number: int
    made_at: float


_PLACE: Final = msgspec.json.Decoder(_Place)


class ChangeStream:
    """The stream of one table."""

    def __init__(self, arn: str, settings: ChangeSettings, now: WallTime) -> None:
        self.arn = arn
        self.created_at = now
        self._settings = settings
        self._number = _FIRST_NUMBER
        self._made = 0
        self._shards: dict[str, ChangeShard] = {}
        width = (ALL_HASH_KEYS.end + 1) // settings.partitions
        for index in range(settings.partitions):
            last = index == settings.partitions - 1
            end = ALL_HASH_KEYS.end if last else (index + 1) * width - 1
            self._open(None, HashRange(index * width, end), now, now)

    def add(self, event: dict[str, Any], now: WallTime) -> str:
        """Write a change of an item to the open shard of its partition; the shard's id."""
        self._pass_time(now)
        key = msgspec.json.encode(event["dynamodb"]["Keys"], order="sorted").decode()
        hashed = hash_key_of(key)
        shard = next(open_shard for open_shard in self._open_shards() if hashed in open_shard.keys)
        shard.changes.append(Change(self._next_number(), now, event))
        return shard.shard_id

    def roll(self, now: WallTime) -> None:
        """Close every open shard now."""
        self._pass_time(now)
        for shard in self._open_shards():
            self._close(shard, now)

    def describe(
        self, after: str | None, limit: int, now: WallTime, *, children_of: str | None = None
    ) -> dict[str, Any]:
        """The parts of a DescribeStream answer that depend on the shards: all, or the children of
        one. Raises: NotFound (no such parent)."""
        self._pass_time(now)
        listed = [shard for shard in self._shards.values() if shard.listed_at <= now]
        if children_of is not None:
            self._shard(children_of, now)
            listed = [shard for shard in listed if shard.parent_id == children_of]
        ids = [shard.shard_id for shard in listed]
        begin = ids.index(after) + 1 if after in ids else 0
        page = listed[begin : begin + min(limit, CHANGE_SHARDS_MAX)]
        has_more = begin + len(page) < len(listed)
        return {
            "StreamArn": self.arn,
            "StreamStatus": "ENABLED",
            "CreationRequestDateTime": self.created_at,
            "Shards": [shard.described() for shard in page],
            **({"LastEvaluatedShardId": page[-1].shard_id} if has_more else {}),
        }

    def iterator(
        self, shard_id: str, kind: IteratorType, sequence_number: str | None, now: WallTime
    ) -> str:
        """GetShardIterator. Raises: NotFound, InvalidRequest (trimmed, or malformed)."""
        shard = self._shard(shard_id, now)
        match kind:
            case IteratorType.TRIM_HORIZON:
                number = shard.starting_number
            case IteratorType.LATEST:
                number = self._number + 1
            case IteratorType.AT_SEQUENCE_NUMBER | IteratorType.AFTER_SEQUENCE_NUMBER:
                number = _number_in(sequence_number)
                if number <= shard.trimmed_to:
                    raise trimmed()
                number += kind is IteratorType.AFTER_SEQUENCE_NUMBER
            case _:
                raise InvalidRequest(f"{kind.value} is not supported", code="ValidationException")
        return self._sealed(shard, number, now)

    def fetch(self, iterator: str, limit: int, now: WallTime) -> dict[str, Any]:
        """GetRecords. Raises: ExpiredIterator, NotFound, InvalidRequest (trimmed meanwhile)."""
        place = opened(iterator)
        if now - place.made_at > CHANGE_ITERATOR_LIVES_S:
            raise ExpiredIterator("The iterator is too old.", code="ExpiredIteratorException")
        shard = self._shard(place.shard_id, now)
        is_from_oldest = place.number == shard.starting_number
        if place.number <= shard.trimmed_to and not is_from_oldest:
            raise trimmed()
        page: list[tuple[int, dict[str, Any]]] = []
        size = 0
        for change in shard.changes:
            if change.number < place.number:
                continue
            described = change.described()
            size += len(msgspec.json.encode(described))
            if page and (size > CHANGES_BYTES_MAX or len(page) == min(limit, CHANGES_MAX)):
                break
            page.append((change.number, described))
        following = page[-1][0] + 1 if page else place.number
        last = shard.changes[-1].number if shard.changes else 0
        is_end = shard.closed_at is not None and following > last
        token = {} if is_end else {"NextShardIterator": self._sealed(shard, following, now)}
        return {"Records": [described for _, described in page], **token}

    def _sealed(self, shard: ChangeShard, number: int, now: WallTime) -> str:
        place = _Place(self.arn, shard.shard_id, number, now)
        return base64.urlsafe_b64encode(msgspec.json.encode(place)).decode()

    def _shard(self, shard_id: str, now: WallTime) -> ChangeShard:
        self._pass_time(now)
        shard = self._shards.get(shard_id)
        if shard is None:
            raise NotFound(
                f"Requested resource not found: Shard: {shard_id} not found",
                code="ResourceNotFoundException",
            )
        return shard

    def _open_shards(self) -> list[ChangeShard]:
        return [shard for shard in self._shards.values() if shard.closed_at is None]

    def _pass_time(self, now: WallTime) -> None:
        for shard in self._open_shards():
            if now - shard.opened_at >= self._settings.lives_s:
                self._close(shard, now)
        for shard in list(self._shards.values()):
            kept = [change for change in shard.changes if now - change.created_at < RETENTION_S]
            if len(kept) < len(shard.changes):
                shard.trimmed_to = shard.changes[len(shard.changes) - len(kept) - 1].number
                shard.changes = kept
            if shard.closed_at is not None and now - shard.closed_at >= RETENTION_S:
                del self._shards[shard.shard_id]

    def _close(self, shard: ChangeShard, now: WallTime) -> None:
        shard.closed_at, shard.ending_number = now, self._next_number()
        late_s = self._settings.listed_after_s
        is_split = len(self._open_shards()) + 1 < self._settings.partitions_max
        middle = (shard.keys.start + shard.keys.end) // 2
        if not is_split or middle == shard.keys.end:
            self._open(shard.shard_id, shard.keys, now, WallTime(now + late_s))
            return
        lower, upper = HashRange(shard.keys.start, middle), HashRange(middle + 1, shard.keys.end)
        self._open(shard.shard_id, lower, now, WallTime(now + late_s))
        self._open(shard.shard_id, upper, now, WallTime(now + 2 * late_s))

    def _open(
        self, parent_id: str | None, keys: HashRange, now: WallTime, listed_at: WallTime
    ) -> None:
        """As in the service, an id has the time of the shard's making and a random part."""
        self._made += 1
        shard_id = f"shardId-{int(now * 1000):020d}-{self._made:08x}"
        self._shards[shard_id] = ChangeShard(
            shard_id=shard_id,
            parent_id=parent_id,
            keys=keys,
            number=self._next_number(),
            opened_at=now,
            listed_at=listed_at,
        )

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def opened(iterator: str) -> _Place:
    """The place of an iterator. Raises: InvalidRequest for a text that is not one."""
    try:
        return _PLACE.decode(base64.urlsafe_b64decode(iterator))
    except (ValueError, msgspec.MsgspecError):
        raise InvalidRequest("Invalid ShardIterator", code="ValidationException") from None


def trimmed() -> ServiceError:
    """The refusal of a place whose record is not kept any more."""
    return InvalidRequest(
        "The operation attempted to read past the oldest stream record in a shard",
        code="TrimmedDataAccessException",
    )


def _number_in(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX):
        raise InvalidRequest("SequenceNumber is missing", code="ValidationException")
    return int(text)
