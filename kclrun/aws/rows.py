"""Converts DynamoDB items to leases and back: the KCL 2.x schema and our own attributes.

It is tolerant, because other programs write to the table too [P8]: an item of another `entityType`
is not a lease; a broken row is reported and never fails the whole scan; unknown attributes are left
alone (we always update and never put over a row). It bounds every value, because a row is input.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from kclrun.errors import LimitExceeded
from kclrun.model.lease import (
    FAILOVER_MAX_S,
    FAILOVER_MIN_S,
    KCL3_MODE_KEY,
    DiedOn,
    Halt,
    Handoff,
    Lease,
    LeaseKey,
    Load,
    OwnerId,
    Pause,
    PendingCheckpoint,
    Scope,
)
from kclrun.model.output import Cursor, Cursors, StoredCursors, sorted_cursors
from kclrun.model.quotas import ITEM_BYTES_MAX, PARTITION_KEY_BYTES_MAX, SHARD_ID_CHARACTERS_MAX
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.stream import ONLY_STREAM, StreamKey, qualified, shard_id_of, stream_of
from kclrun.model.time import WallTime
from kclrun.ports import ScanPage
from kclrun.protocol.conditions import reader

Item = Mapping[str, Mapping[str, Any]]

# KCL 3.5 and we together write at most 33 attributes to one row. 64 leaves room for others.
ATTRIBUTES_MAX: Final = 64
# Our owner ids have fewer than 200 characters; a Java worker id is a host name and a UUID.
TEXT_CHARACTERS_MAX: Final = 2048
# A merge has two parents; UpdateShardCount makes at most a few children of one shard.
SHARD_IDS_MAX: Final = 64
# With four outputs a row stays below 1 KB, the unit by which each renewal is billed.
OUTPUTS_MAX: Final = 64
# Ours have 26 (`state/versions.py`).
STATE_VERSION_CHARACTERS_MAX: Final = 64
# Plain decimals and what Java's Double.toString writes (1.0E-4), bounded before conversion.
_NUMBER: Final = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?(?:[Ee][+-]?\d{1,3})?\Z")
_DIED_ON: Final = re.compile(r"(\S{1,128}) ([0-9A-Z_]{1,128}) (\d{1,18})\Z", re.ASCII)
_INTEGER: Final = re.compile(r"\d{1,38}\Z")
# A Long of the Java KCL, and 64 bits of our messages: a larger counter would end each manager that
# takes the row. Just below the limit our own writes stay readable: half of the 63 bits are ahead.
_COUNTED_MAX: Final = 2**62


class BrokenRow(Exception):
    """This item cannot be read as a lease; `key` is its lease key, if it has one."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"row {key!r}: {reason}")
        self.key, self.reason = key, reason


def decode_page(items: Iterable[Item]) -> ScanPage:
    """Sort the items of one scan page into leases, broken rows and rows of other programs."""
    leases: list[Lease] = []
    broken: list[str] = []
    reasons: dict[str, str] = {}
    foreign = 0
    kcl3_mode = None
    for item in items:
        if _shown_key(item) == KCL3_MODE_KEY:
            foreign += 1
            kcl3_mode = kcl3_mode_of(item)
            continue
        try:
            lease = decode_row(item)
        except BrokenRow as row:
            broken.append(row.key)
            reasons[row.key] = row.reason
            continue
        if lease is None:
            foreign += 1
        else:
            leases.append(lease)
    return ScanPage(tuple(leases), tuple(broken), foreign, kcl3_mode, reasons)


def kcl3_mode_of(item: Item) -> str | None:
    """The mode of a KCL 3 fleet, from its item (`model/lease.py`)."""
    mode = item.get("cv", {}).get("S")
    return mode[:64] if isinstance(mode, str) else None


def decode_row(item: Item, *, is_ours: bool = False) -> Lease | None:
    """One item as a lease, or None if it is another entity. Raises: BrokenRow.

    `is_ours`: the image after our own applied write. Its counter was checked before the write.
    A row has parents and children as bare shard ids, with several streams too. Here they are
    qualified by the row's own key; a write stores the bare ids again (`bare_ids`).
    """
    key = _shown_key(item)
    try:
        if _text(item, "entityType") not in {None, "LEASE"}:
            return None
        lease = _lease(item)
    except (LimitExceeded, ValueError) as error:
        raise BrokenRow(key, str(error)[:200]) from None
    except (TypeError, AttributeError) as error:
        raise BrokenRow(key, f"an attribute has another type: {error}"[:200]) from None
    if not is_ours and max(lease.counter, lease.owner_switches) >= _COUNTED_MAX:
        raise BrokenRow(key, "leaseCounter or ownerSwitchesSinceCheckpoint is 2^62 or more")
    return lease


def _lease(item: Item) -> Lease:
    if len(item) > ATTRIBUTES_MAX:
        raise LimitExceeded(f"{len(item)} attributes are more than {ATTRIBUTES_MAX}")
    key = _text(item, "leaseKey", most=PARTITION_KEY_BYTES_MAX)
    counter = _integer(item, "leaseCounter")
    checkpoint = _position(item, "checkpoint", "checkpointSubSequenceNumber")
    if not key or counter is None or checkpoint is None:
        raise ValueError("leaseKey, leaseCounter or checkpoint is missing")
    stream = stream_of(key)
    outputs = _outputs(item)
    if outputs is not None and outputs.at.of_record == checkpoint:
        # The tick is written in `outputsAt` alone: Java workers compare and keep the other two.
        checkpoint = outputs.at
    return Lease(
        key=LeaseKey(key),
        checkpoint=checkpoint,
        counter=counter,
        owner=_owner(item, "leaseOwner"),
        owner_switches=_integer(item, "ownerSwitchesSinceCheckpoint") or 0,
        parents=_lease_keys(stream, item, "parentShardId"),
        children=_lease_keys(stream, item, "childShardIds"),
        hash_range=_hash_range(item),
        checkpoint_owner=_owner(item, "checkpointOwner"),
        pending=_pending(item),
        throughput_kbps=_number(item, "throughputKBps"),
        failover_s=_failover(item),
        start=_text(item, "startPosition"),
        stream_created_at=_wall_time(item, "streamCreatedAt") or None,  # 0: not known
        latest_pinned_at=_wall_time(item, "latestPinnedAt"),
        halt=_halt(item),
        handoff=_handoff(item),
        offered_to=_owner(item, "offeredTo"),
        offered_by=_owner(item, "offeredBy"),
        taken_from=_owner(item, "takenFrom"),
        died_on=_died_on(item),
        load=_load(item),
        outputs=outputs,
        generation=_integer(item, "outputGeneration") or 0,
        state_version=_text(item, "stateVersion", most=STATE_VERSION_CHARACTERS_MAX),
        pause=_pause(item),
        letters_to=_letters_to(item),
        endpoint=_text(item, "memberEndpoint"),
    )


def encode_row(lease: Lease) -> dict[str, dict[str, Any]]:
    """A whole item for a row that does not exist yet. An absent value is left out, never NULL.

    An index on `leaseOwner` refuses NULL and "", and for the Java KCL an absent owner is unowned.
    """
    item = {}
    for whole, columns in zip(msgspec.structs.astuple(lease), _COLUMNS_BY_FIELD, strict=True):
        if whole is not None:
            for column, part in columns:
                if not is_empty(value := part(whole)) and value != column.unwritten:
                    item[column.name] = column.encode(value)
    stream = stream_of(lease.key)
    if stream != ONLY_STREAM:
        item |= {"streamName": text(stream), "shardId": text(shard_id_of(lease.key))}
    return item


def bare_ids(keys: Iterable[str]) -> dict[str, Any]:
    """A set attribute of bare shard ids, from lease keys."""
    return {"SS": sorted(shard_id_of(key) for key in keys)}


def text(value: str) -> dict[str, Any]:
    """A string attribute."""
    return {"S": value}


def number(value: float) -> dict[str, Any]:
    """A number attribute in DynamoDB's format: as text, without an exponent for integers."""
    return {"N": str(value)}


def died_on_text(died_on: DiedOn) -> str:
    """One short text: every renewal is billed by the size of the row."""
    at = died_on.position
    return f"{died_on.slot} {at.sequence_number} {at.sub_sequence_number}"


def milliseconds(seconds: float) -> dict[str, Any]:
    """A number attribute of whole milliseconds."""
    return number(round(seconds * 1000))


def _digits_text(value: int) -> dict[str, Any]:
    return text(str(value))


def _cursors_map(cursors: Cursors) -> dict[str, Any]:
    """A map attribute of texts: some 80 bytes for each output."""
    return {"M": {name: text(str(cursor)) for name, cursor in cursors}}


def _binary(value: bytes) -> dict[str, Any]:
    return {"B": base64.b64encode(value).decode("ascii")}


class Column(msgspec.Struct, frozen=True):
    """An attribute of a row: the field of the lease that it keeps, or the part of one.

    `absent`: the value that an absent attribute stands for, while other attributes of the field
    are there. If it is the only one, it is written in place of None.
    `may_be_null`: some clients write NULL, or "", instead of no value. `unwritten`: a value that a
    new row leaves out.
    """

    name: str
    field: str
    encode: Callable[[Any], dict[str, Any]] = text
    absent: int | None = None
    may_be_null: bool = False
    unwritten: int | None = None


COLUMNS: Final = (
    Column("leaseKey", "key"),
    Column("leaseCounter", "counter", number),
    Column("leaseOwner", "owner", may_be_null=True),
    Column("ownerSwitchesSinceCheckpoint", "owner_switches", number),
    Column("checkpoint", "checkpoint.sequence_number"),
    Column("checkpointSubSequenceNumber", "checkpoint.sub_sequence_number", number, absent=0),
    Column("parentShardId", "parents", bare_ids),
    Column("childShardIds", "children", bare_ids),
    Column("startingHashKey", "hash_range.start", _digits_text),
    Column("endingHashKey", "hash_range.end", _digits_text),
    Column("checkpointOwner", "checkpoint_owner"),
    Column("pendingCheckpoint", "pending.position.sequence_number"),
    Column("pendingCheckpointSubSequenceNumber", "pending.position.sub_sequence_number", number),
    Column("pendingCheckpointState", "pending.state", _binary),
    Column("throughputKBps", "throughput_kbps", number),
    Column("failoverMs", "failover_s", milliseconds),
    Column("startPosition", "start"),
    Column("streamCreatedAt", "stream_created_at", lambda at: milliseconds(at or 0.0), absent=0),
    Column("latestPinnedAt", "latest_pinned_at", milliseconds),
    Column("haltReason", "halt.reason"),
    Column("haltedAt", "halt.halted_at", milliseconds),
    Column("haltWaitingSince", "halt.waiting_since", milliseconds),
    Column("handoffTo", "handoff.to"),
    Column("handoffAt", "handoff.asked_at", milliseconds, absent=0),
    Column("offeredTo", "offered_to"),
    Column("offeredBy", "offered_by"),
    Column("takenFrom", "taken_from"),
    Column("diedOn", "died_on", lambda died_on: text(died_on_text(died_on))),
    Column("loadKBps", "load.kbps", number),
    Column("loadCpu", "load.cpu", number),
    Column("outputsAt", "outputs.at", lambda at: text(str(at))),
    Column("outputCursors", "outputs.cursors", _cursors_map),
    Column("outputGeneration", "generation", number, absent=0, unwritten=0),
    Column("stateVersion", "state_version"),
    Column("pausedAt", "pause.paused_at", milliseconds),
    Column("pausedUntil", "pause.until", milliseconds, absent=0),
    Column("pauseScope", "pause.scope", lambda scope: text(scope.value)),
    Column("lettersTo", "letters_to", lambda at: text(str(at))),
    Column("memberEndpoint", "endpoint"),
)
_EMPTY: Final[frozenset[str]] = frozenset()


def is_empty(value: Any) -> bool:
    """Whether a row has no attribute for this value: DynamoDB has no empty set."""
    return value is None or value == _EMPTY


def columns_of(field: str) -> tuple[tuple[Column, Callable[[Any], Any]], ...]:
    """The attributes of a field, each with the reader of its part of the field's value."""
    whole = ((column, itself) for column in COLUMNS if column.field == field)
    parts = (
        (column, reader(column.field.removeprefix(f"{field}.")))
        for column in COLUMNS
        if column.field.startswith(f"{field}.")
    )
    return (*whole, *parts)


def itself(value: Any) -> Any:
    """The part of a value that one attribute keeps whole."""
    return value


_COLUMNS_BY_FIELD: Final = tuple(map(columns_of, Lease.__struct_fields__))


def _shown_key(item: Item) -> str:
    value = item.get("leaseKey", {}).get("S")
    return value[:256] if isinstance(value, str) else "?"


def _text(item: Item, name: str, *, most: int = TEXT_CHARACTERS_MAX) -> str | None:
    attribute = item.get(name)
    if attribute is None or "NULL" in attribute:
        return None
    value = attribute.get("S")
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{name} is not a text of at most {most} characters")
    return value


# The KCL's own, which its workers read so, too.
_EMPTY_IS_ABSENT: Final = frozenset({"leaseOwner", "checkpointOwner"})


def _owner(item: Item, name: str) -> OwnerId | None:
    """Absent, NULL and "" (as some clients write it) all mean unowned, as for the KCL. Of our own
    attributes none is ever empty."""
    owner = _text(item, name)
    if owner == "" and name not in _EMPTY_IS_ABSENT:
        raise ValueError(f"{name} is empty")
    return OwnerId(owner) if owner else None


def _digits(item: Item, name: str, pattern: re.Pattern[str]) -> str | None:
    attribute = item.get(name)
    if attribute is None or "NULL" in attribute:
        return None
    value: Any = attribute.get("N")
    if not isinstance(value, str) or not pattern.match(value):
        raise ValueError(f"{name} is not a number in its range")
    return str(value)


def _integer(item: Item, name: str) -> int | None:
    digits = _digits(item, name, _INTEGER)
    return None if digits is None else int(digits)


def _number(item: Item, name: str) -> float | None:
    digits = _digits(item, name, _NUMBER)
    return None if digits is None else float(digits)


def _seconds(item: Item, name: str) -> float | None:
    value = _integer(item, name)
    return None if value is None else value / 1000


def _failover(item: Item) -> float | None:
    """A failover that the settings would not allow is ignored. Expiry uses the largest failover
    and fences use the smallest, so one wrong row could stop the whole fleet."""
    value = _seconds(item, "failoverMs")
    return value if value is not None and FAILOVER_MIN_S <= value <= FAILOVER_MAX_S else None


def _wall_time(item: Item, name: str) -> WallTime | None:
    value = _seconds(item, name)
    return None if value is None else WallTime(value)


def _position(item: Item, name: str, sub_name: str) -> ExtendedSequenceNumber | None:
    sequence_number = _text(item, name)
    if sequence_number is None:
        return None
    sub_sequence_number = _integer(item, sub_name) or 0
    if sub_sequence_number >= 2**63:  # a Long of Java; reports hold no more
        raise ValueError(f"{sub_name} has more than 63 bits")
    return ExtendedSequenceNumber(sequence_number, sub_sequence_number)


def _pending(item: Item) -> PendingCheckpoint | None:
    if _text(item, "pendingCheckpoint") == "":
        return None  # as for the KCL
    position = _position(item, "pendingCheckpoint", "pendingCheckpointSubSequenceNumber")
    if position is None:
        return None
    encoded = item.get("pendingCheckpointState", {}).get("B")
    if encoded is None:
        return PendingCheckpoint(position)
    try:
        state = base64.b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError("pendingCheckpointState is not base64") from None
    if len(state) > ITEM_BYTES_MAX:
        raise ValueError("pendingCheckpointState is too long")
    return PendingCheckpoint(position, state)


def _lease_keys(stream: StreamKey, item: Item, name: str) -> frozenset[str]:
    return frozenset(qualified(stream, shard_id) for shard_id in _shard_ids(item, name))


def _shard_ids(item: Item, name: str) -> frozenset[str]:
    attribute = item.get(name)
    if attribute is None or "NULL" in attribute:
        return frozenset()
    ids = attribute.get("SS")
    if not isinstance(ids, list) or len(ids) > SHARD_IDS_MAX:
        raise ValueError(f"{name} is not a set of at most {SHARD_IDS_MAX} shard ids")
    if not all(len(shard_id) <= SHARD_ID_CHARACTERS_MAX for shard_id in ids):
        raise ValueError(f"{name} holds something that is not a shard id")
    return frozenset(ids)


def _hash_range(item: Item) -> HashRange | None:
    start, end = _text(item, "startingHashKey"), _text(item, "endingHashKey")
    if start is None or end is None:
        return None
    # 2**128 has 39 digits.
    if not re.fullmatch(r"\d{1,39},\d{1,39}", f"{start},{end}"):
        raise ValueError("startingHashKey or endingHashKey is not a hash key")
    if not int(start) <= int(end) <= HASH_KEY_MAX:
        raise ValueError("the hash range is empty or too large")
    return HashRange(int(start), int(end))


def _halt(item: Item) -> Halt | None:
    reason = _text(item, "haltReason")
    if reason is None:
        return None
    waiting_since = _wall_time(item, "haltWaitingSince")
    return Halt(reason, _wall_time(item, "haltedAt") or WallTime(0.0), waiting_since)


def _pause(item: Item) -> Pause | None:
    """A scope of another version counts as a shard's: the row is paused in any case."""
    paused_at = _wall_time(item, "pausedAt")
    if paused_at is None:
        return None
    named = _text(item, "pauseScope")
    scope = next((scope for scope in Scope if scope.value == named), Scope.SHARD)
    return Pause(paused_at, _wall_time(item, "pausedUntil") or WallTime(0.0), scope)


def _load(item: Item) -> Load | None:
    """Both figures, or None: a figure that no lease has is ignored, and the row stays readable."""
    try:
        kbps, cpu = _number(item, "loadKBps"), _number(item, "loadCpu")
    except (ValueError, TypeError, AttributeError):
        return None
    if kbps is None or cpu is None or not (0 <= kbps < math.inf and 0 <= cpu < math.inf):
        return None
    return Load(kbps, cpu)


def _outputs(item: Item) -> StoredCursors | None:
    """A cursor that cannot be read makes the row a broken one, unlike a measured figure: otherwise
    rows of its output would be written twice, or be missing."""
    at = _text(item, "outputsAt")
    if at is None:
        return None
    known = item.get("outputCursors", {}).get("M")
    if not isinstance(known, dict) or len(known) > OUTPUTS_MAX:
        raise ValueError(f"outputCursors is not a map of at most {OUTPUTS_MAX} outputs")
    cursors = {name: Cursor.parse(_text(known, name) or "") for name in known}
    return StoredCursors(Cursor.parse(at).reached, sorted_cursors(cursors))


def _letters_to(item: Item) -> ExtendedSequenceNumber | None:
    at = _text(item, "lettersTo")
    return None if at is None else Cursor.parse(at).position


def _died_on(item: Item) -> DiedOn | None:
    """A value in another format is ignored; then the lease is tried on one more host."""
    value = item.get("diedOn", {}).get("S")
    match = _DIED_ON.match(value) if isinstance(value, str) else None
    if match is None:
        return None
    return DiedOn(match[1], ExtendedSequenceNumber(match[2], int(match[3])))


def _handoff(item: Item) -> Handoff | None:
    """A handoff request without a time counts as one from time 0. A time without a requester is
    not a request."""
    to, asked_at = _owner(item, "handoffTo"), _wall_time(item, "handoffAt")
    return None if to is None else Handoff(to, asked_at or WallTime(0.0))
