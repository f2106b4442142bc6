"""`context.state` and its typed views, over the entries of one shard or of one record's key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import msgspec

from kclrun.errors import HaltShard, LimitExceeded, SettingsError, SinkError
from kclrun.model.record import Record
from kclrun.model.shard import HashRange, hash_key_of
from kclrun.state.chain import Entries
from kclrun.state.timers import (
    RESERVED,
    Clock,
    ReservedEntries,
    Timer,
    entry_of,
    is_reserved,
    seconds_of,
)

# Kinesis allows 256 characters for a partition key; the names of its values are shorter.
KEY_CHARACTERS_MAX: Final = 256
# Beside its bytes, a change costs about this much until it is written.
CHANGE_BYTES: Final = 64

# A change of the live entries: partition key, name, the new value and the one before.
Undoable = tuple[str, str, bytes | None, bytes | None]
# Makes a change of partition key, name and new value. Returns: None if nothing changed.
MakeChange = Callable[[str, str, bytes | None], Undoable | None]
T = TypeVar("T")
D = TypeVar("D")
_MISSING: Final = object()
_encode: Final = msgspec.msgpack.Encoder().encode


class Journal(Protocol):
    """Collects each change as it is made, for the next version of the state."""

    def __call__(self, change: MakeChange, key: str, name: str, value: bytes | None, /) -> None:
        """Call `change(key, name, value)`, and keep the change that it returns. Raises: SinkError
        outside of a call that may change the state."""
        ...


class KeyValues(Protocol):
    """The values of every key of a shard, as user code sees them."""

    size_bytes: int  # of keys, names and values when the lease begins, without reserved entries

    def reserved(self) -> Iterable[tuple[str, str, bytes]]:
        """The entries of the timers and of the watermark when the lease begins. User code does not
        see them: `get`, `change` and iteration leave them out."""
        ...

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """The values of one key, by name; None or empty if it has none."""
        ...

    def change(self, key: str, name: str, value: bytes | None) -> None:
        """Set a value, or remove it with None."""
        ...

    def undo(self, key: str, name: str, before: bytes | None) -> None:
        """Undo the last change of this value, which was `before` until then."""
        ...

    def __iter__(self) -> Iterator[str]:
        """The keys that have values."""
        ...

    def __len__(self) -> int:
        """How many keys have values."""
        ...


class OwnValues(dict[str, bytes]):
    """The values of one key, in a dict that only one `MemoryValues` holds, so that it may be
    changed in place. The type of the dict is the mark of that and takes no memory."""

    __slots__ = ()


class MemoryValues:
    """Implements `KeyValues` with all values in memory.

    The dict of a key in `entries` is never changed, because another thread may hold it, too: the
    first change of a key copies it. So a million keys are neither copied when a lease begins, nor
    in memory twice.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._reserved = [
            (key, name, values[name])
            for key, values in entries.items()
            for name in values
            if name[:1] == RESERVED  # a call of is_reserved() costs as much as the rest
        ]
        for key, name, _ in self._reserved:
            self.change(key, name, None)
        self.get = entries.get
        self.size_bytes = size_of(entries)

    def reserved(self) -> Iterable[tuple[str, str, bytes]]:
        return self._reserved

    def change(self, key: str, name: str, value: bytes | None) -> None:
        values = self._entries.get(key)
        if type(values) is dict:
            values = self._entries[key] = OwnValues(values)
        if value is not None:
            if values is None:
                self._entries[key] = OwnValues({name: value})
            else:
                values[name] = value
        elif values is not None:
            values.pop(name, None)
            if not values:
                del self._entries[key]

    undo = change

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


class Reach(Protocol):
    """The entries that a call may read and change."""

    def values_of(self, key: str) -> Mapping[str, bytes]: ...

    def keys(self) -> KeyValues: ...

    def put(self, key: str, name: str, value: bytes | None) -> None: ...


class LiveEntries:
    """The entries as user code sees them: every change made so far, durable or not.

    `entries` are those that the lease began with. Values are kept as bytes: user code that changes
    an object which it read or stored changes nothing here until it stores the object again. `lock`
    is held while the entries change, because records of several keys may run at the same time.
    While `is_of_records` is set, calls of `process_record` run, and each reaches its own key only.
    """

    def __init__(
        self,
        entries: Entries | KeyValues,
        journal: Journal,
        hash_range: HashRange | None,
        max_bytes: int,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._values = MemoryValues(entries) if isinstance(entries, dict) else entries
        self._get = self._values.get
        self._make = self._change  # bound once, not for each change
        self.journal = journal
        self._hash_range = hash_range
        self._max_bytes = max_bytes
        self._lock = lock or nullcontext()
        self.is_of_records = False
        self.size_bytes = self._values.size_bytes
        self.reserved = ReservedEntries()
        for key, name, value in self._values.reserved():
            self.reserved.set(key, name, value)
            self.size_bytes += growth(key, name, value, None)

    def values_of(self, key: str) -> Mapping[str, bytes]:
        """The values of one key, by name; empty if it has none."""
        self._require_alone()
        return self.found(key)

    def keys(self) -> KeyValues:
        """The values of all keys, to iterate over the keys and to count them."""
        self._require_alone()
        return self._values

    # This is the hot path of every change, down to `_change`.
    def put(self, key: str, name: str, value: bytes | None) -> None:
        """Set a value, or remove it with None. Raises: LimitExceeded, HaltShard, SinkError."""
        if self.is_of_records:
            self._require_alone()
        self.journal(self._make, key, name, value)

    def _require_alone(self) -> None:
        if self.is_of_records:
            raise SinkError(
                "in process_record the state is that of the call's own context: context.state of"
                " its second argument, not that of initialize"
            )

    def found(self, key: str) -> Mapping[str, bytes]:
        """As `values_of`, also while calls of records run."""
        return self._get(key) or {}

    def put_in(self, journal: Journal, key: str, name: str, value: bytes | None) -> None:
        """As `put`, with the journal of one call."""
        journal(self._make, key, name, value)

    def set_timer(
        self,
        key: Record | str,
        at: float | datetime,
        name: str = "",
        clock: Clock = "event",
        *,
        journal: Journal | None = None,
    ) -> None:
        """As `Context.set_timer`. `journal` is that of the call of one record."""
        if not self.reserved.is_served:
            raise SettingsError(
                "a timer needs a processor that defines on_timer(self, timer, checkpointer)"
            )
        timer = Timer(seconds_of(at), _name_of(key), name, clock)
        self._put_timer(journal, timer, entry_of(timer)[2])

    def delete_timer(
        self, key: Record | str, name: str = "", *, journal: Journal | None = None
    ) -> None:
        """As `Context.delete_timer`. `journal` is that of the call of one record."""
        self._put_timer(journal, Timer(0.0, _name_of(key), name), None)

    def earliest_timer(self, clock: Clock) -> Timer | None:
        """The timer of this clock that fires first; None if none is pending. Any thread."""
        with self._lock:
            return self.reserved.earliest(clock)

    def _put_timer(self, journal: Journal | None, timer: Timer, value: bytes | None) -> None:
        if journal is None:
            self._require_alone()
            journal = self.journal
        _require_text(timer.key)
        _require_text(timer.name, characters_min=0)
        key, name, _ = entry_of(timer)
        if value is not None:
            self.reserved.refuse(timer, key, name)
        journal(self._change_reserved, key, name, value)

    def change_reserved(self, key: str, name: str, value: bytes | None) -> None:
        """As `put`, for a timer or the watermark. The empty key is that of the shard."""
        self.journal(self._change_reserved, key, name, value)

    def undo(self, change: Undoable) -> None:
        """Undo the last change."""
        key, name, value, before = change
        with self._lock:
            self.size_bytes += growth(key, name, before, value)
            if is_reserved(name):
                self.reserved.set(key, name, before)
            else:
                self._values.undo(key, name, before)

    def undo_all(self, changes: Sequence[Undoable]) -> None:
        """Undo changes that are the last ones of their keys."""
        for change in reversed(changes):
            self.undo(change)

    def _change(self, key: str, name: str, value: bytes | None) -> Undoable | None:
        values = self._get(key)
        before = values.get(name) if values else None
        if before is None:
            _require_allowed(key, name)
            if not values:
                self._require_ours(key)
        if value == before:
            return None
        with self._lock:
            if value is None or before is None or len(value) != len(before):
                self._grow(growth(key, name, value, before))
            if type(values) is OwnValues and value is not None:  # `change`, without the call
                values[name] = value
            else:
                self._values.change(key, name, value)
        return key, name, value, before

    def _change_reserved(self, key: str, name: str, value: bytes | None) -> Undoable | None:
        if key:
            self._require_ours(key)
        with self._lock:
            before = self.reserved.get(key, name)
            if value == before:
                return None
            if key:
                self._grow(growth(key, name, value, before))
            else:
                self.size_bytes += growth(key, name, value, before)  # the watermark has no limit
            self.reserved.set(key, name, value)
        return key, name, value, before

    def _require_ours(self, key: str) -> None:
        """A split gives each child the keys of its hash range: another key would be lost then."""
        if self._hash_range is not None and hash_key_of(key) not in self._hash_range:
            raise LimitExceeded(
                "the MD5 hash of a state key is not in the hash range of this shard: state belongs"
                " to the partition keys of the shard's own records, and to records put without an"
                " explicit hash key"
            )

    def _grow(self, by_bytes: int) -> None:
        size_bytes = self.size_bytes + by_bytes
        if self._max_bytes < size_bytes > self.size_bytes:
            raise HaltShard(
                f"the state of this shard would exceed state.max_bytes ({self._max_bytes} bytes):"
                " delete keys that are done, raise the limit, or split the shard"
            )
        self.size_bytes = size_bytes


def _require_allowed(key: str, name: str) -> None:
    """Called for the first value only: later ones have the same key and name."""
    _require_text(key)
    _require_text(name)
    if is_reserved(name):
        raise LimitExceeded("a name does not begin with the character NUL")


def _require_text(text: str, *, characters_min: int = 1) -> None:
    """Raises: LimitExceeded for a key or a name that a version of the state cannot hold."""
    if not characters_min <= len(text) <= KEY_CHARACTERS_MAX:
        raise LimitExceeded(
            f"keys and names have {characters_min} to {KEY_CHARACTERS_MAX} characters"
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LimitExceeded("a key or a name holds a lone surrogate and has no UTF-8") from None


def size_of(entries: Entries) -> int:
    """The bytes of keys, names and values."""
    return sum(
        [
            len(key) + len(name) + len(value)
            for key, values in entries.items()
            for name, value in values.items()
        ]
    )


def growth(key: str, name: str, value: bytes | None, before: bytes | None) -> int:
    """By how many bytes the state grows with this change."""
    if value is None:
        return 0 if before is None else -len(key) - len(name) - len(before)
    return len(key) + len(name) + len(value) if before is None else len(value) - len(before)


def held_bytes(key: str, name: str, value: bytes | None, before: bytes | None) -> int:
    """What a change costs in memory until it is written."""
    return len(key) + len(name) + len(value or b"") + len(before or b"") + CHANGE_BYTES


class OwnKey:
    """The entries that the call of one record may reach: those of its key, with the changes of
    earlier records of the key, committed or not. `journal` keeps the changes of this call."""

    def __init__(self, live: LiveEntries, key: str, journal: Journal) -> None:
        self._live = live
        self._key = key
        self._journal = journal

    def values_of(self, key: str) -> Mapping[str, bytes]:
        """The values of the own key. Raises: LimitExceeded for another one."""
        self._require_own(key)
        return self._live.found(key)

    def keys(self) -> KeyValues:
        """Raises: LimitExceeded."""
        raise LimitExceeded(
            "process_record reaches the state of its record's partition key: only shard_ended and"
            " process_records see all keys"
        )

    def put(self, key: str, name: str, value: bytes | None) -> None:
        """As `LiveEntries.put`, for the own key."""
        self._require_own(key)
        self._live.put_in(self._journal, key, name, value)

    def set_timer(self, key: Record | str, at: float | datetime, name: str, clock: Clock) -> None:
        """As `LiveEntries.set_timer`, for the own key."""
        self._require_own(_name_of(key))
        self._live.set_timer(key, at, name, clock, journal=self._journal)

    def delete_timer(self, key: Record | str, name: str) -> None:
        """As `LiveEntries.delete_timer`, for the own key."""
        self._require_own(_name_of(key))
        self._live.delete_timer(key, name, journal=self._journal)

    def _require_own(self, key: str) -> None:
        if key != self._key:
            raise LimitExceeded(
                "process_record reaches the state of its record's partition key, and this is"
                " another key: records of other keys run at the same time"
            )


class State:
    """What the processor remembers of the keys of its shard: `context.state`.

    `state[record]` are the values of the record's partition key, `state["key"]` those of a key by
    its name; iteration gives the keys that have values. Changes are made in `process_records`,
    `on_timer` and `shard_ended`, and become durable in one write with the checkpoint that covers
    their records: a call that raises leaves none of them, and after a crash the state is that of
    the checkpoint.

    In `process_record` it is `context.state` of the call, and has the record's own partition key
    alone: another key, iteration and `len` raise LimitExceeded.

    A key is a partition key of this shard's own records, because a reshard moves each key to the
    shard that its records go to: another one raises LimitExceeded.
    """

    def __init__(self, live: Reach) -> None:
        self._live = live

    def __getitem__(self, key: Record | str) -> KeyState:
        return KeyState(self._live, key if type(key) is str else _name_of(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.keys())

    def __contains__(self, key: object) -> bool:
        name = key.partition_key if isinstance(key, Record) else key
        return isinstance(name, str) and bool(self._live.values_of(name))

    def __len__(self) -> int:
        return len(self._live.keys())


def _name_of(key: Record | str) -> str:
    return key if isinstance(key, str) else key.partition_key


class KeyState(MutableMapping[str, Any]):
    """The values of one key, by name: a mapping of texts to numbers, texts, bytes, lists, mappings,
    dates, dataclasses or msgspec.Structs.

    A value is stored as it is at that moment: change an object that was read, and set it again.
    Without a type a Struct is read as the mapping of its fields; `get(name, type=Order)` makes one.
    Raises: TypeError for a value that msgspec cannot encode; LimitExceeded for a name of more than
    256 characters; HaltShard above `state.max_bytes`; SinkError outside of the calls that may
    change it.
    """

    __slots__ = ("_key", "_live")

    def __init__(self, live: Reach, key: str) -> None:
        self._live = live
        self._key = key

    def __getitem__(self, name: str) -> Any:
        return msgspec.msgpack.decode(self._live.values_of(self._key)[name])

    @overload
    def get(self, name: str, default: Any = None) -> Any: ...
    @overload
    def get(self, name: str, *, type: type[T]) -> T | None: ...
    @overload
    def get(self, name: str, default: D, *, type: type[T]) -> T | D: ...
    def get(self, name: str, default: Any = None, *, type: Any = Any) -> Any:  # noqa: A002
        """The value, or `default` if there is none. Raises: msgspec.ValidationError if it is not of
        this type."""
        value = self._live.values_of(self._key).get(name)
        return default if value is None else msgspec.msgpack.decode(value, type=type)

    def __setitem__(self, name: str, value: Any) -> None:
        self._live.put(self._key, name, _encode(value))

    def set(self, name: str, value: Any) -> None:
        """Store the value, as `state[key][name] = value` does."""
        self[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._live.values_of(self._key):
            raise KeyError(name)
        self.delete(name)

    def delete(self, name: str | None = None) -> None:
        """Remove the value, or all values of the key; nothing happens where there is none."""
        names = list(self) if name is None else [name]
        for removed in names:
            if removed in self._live.values_of(self._key):
                self._live.put(self._key, removed, None)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._live.values_of(self._key)))

    def __len__(self) -> int:
        return len(self._live.values_of(self._key))


class Table(Generic[T]):
    """One value of a type for each key: `context.table(name, Type)`."""

    def __init__(self, state: State, name: str, of: type[T]) -> None:
        self._state = state
        self._name = name
        self._of = of

    def __getitem__(self, key: Record | str) -> T:
        if key not in self:
            raise KeyError(self._name)
        return self._state[key].get(self._name, type=self._of)  # type: ignore[return-value]  # it is there

    @overload
    def get(self, key: Record | str) -> T | None: ...
    @overload
    def get(self, key: Record | str, default: D) -> T | D: ...
    def get(self, key: Record | str, default: Any = None) -> Any:
        """The value of the key, or `default` if it has none."""
        return self._state[key].get(self._name, default, type=self._of)

    def __setitem__(self, key: Record | str, value: T) -> None:
        self._state[key][self._name] = value

    def __delitem__(self, key: Record | str) -> None:
        del self._state[key][self._name]

    def __contains__(self, key: Record | str) -> bool:
        return self._name in self._state[key]


class Counter:
    """A number for each key, 0 at first: `context.counter(name)`."""

    def __init__(self, state: State, name: str) -> None:
        self._state = state
        self._name = name

    def __getitem__(self, key: Record | str) -> int:
        value: int = self._state[key].get(self._name, 0, type=int)
        return value

    def __setitem__(self, key: Record | str, value: int) -> None:
        self._state[key][self._name] = value

    def add(self, key: Record | str, number: int = 1) -> int:
        """Add to the key's number, and return the sum."""
        total = self[key] + number
        self[key] = total
        return total
