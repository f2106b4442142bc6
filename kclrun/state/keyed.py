"""`context.state` and its typed views, over the entries of one shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from datetime import datetime
from typing import Any, Final, Generic, Protocol, TypeVar, overload

import msgspec

from kclrun.errors import HaltShard, LimitExceeded, SettingsError
from kclrun.model.record import Record
from kclrun.model.shard import HashRange, hash_key_of
from kclrun.state.chain import Entries
from kclrun.state.timers import Clock, ReservedEntries, Timer, entry_of, is_reserved, seconds_of

# Of a partition key Kinesis allows 256 characters; the names of its values are shorter.
KEY_CHARACTERS_MAX: Final = 256

# A change of the live entries: partition key, name, the new value and the one before.
Undoable = tuple[str, str, bytes | None, bytes | None]
T = TypeVar("T")
_MISSING: Final = object()


class Journal(Protocol):
    """Takes each change as it is made, for the version that will have it."""

    def __call__(self, change: Callable[[], Undoable | None]) -> None:
        """Make the change, which is None if it changes nothing. Raises: SinkError outside of a call
        that may change the state."""
        ...


class LiveEntries:
    """The entries as user code sees them: every change made so far, durable or not.

    `entries` are those that the lease began with. Values are kept as their bytes: what user code
    does with an object that it read or stored changes nothing until it stores it again.
    """

    def __init__(
        self, entries: Entries, journal: Journal, hash_range: HashRange | None, max_bytes: int
    ) -> None:
        self._entries = entries
        self._journal = journal
        self._hash_range = hash_range
        self._max_bytes = max_bytes
        self.size_bytes = sum(
            _size(key, name, value) for key, of in entries.items() for name, value in of.items()
        )
        self.reserved = ReservedEntries()
        for key, name in [(key, name) for key, of in entries.items() for name in of]:
            if is_reserved(name):
                self.reserved.set(key, name, entries[key].pop(name))
                if not entries[key]:
                    del entries[key]

    def values_of(self, key: str) -> dict[str, bytes]:
        """The values of one key, by name; empty if it has none."""
        return self._entries.get(key) or {}

    def keys(self) -> list[str]:
        """The keys that have values."""
        return list(self._entries)

    def put(self, key: str, name: str, value: bytes | None) -> None:
        """Set a value, or remove it with None. Raises: LimitExceeded, HaltShard, SinkError."""
        for text in (key, name):
            if not 0 < len(text) <= KEY_CHARACTERS_MAX:
                raise LimitExceeded(f"keys and names have 1 to {KEY_CHARACTERS_MAX} characters")
        if is_reserved(name):
            raise LimitExceeded("a name does not begin with the character NUL")
        self.change(key, name, value)

    def put_timer(self, timer: Timer, value: bytes | None) -> None:
        """Set a timer, or remove the one of its key and name with None. Raises: as `put`."""
        for text, least in ((timer.key, 1), (timer.name, 0)):
            if not least <= len(text) <= KEY_CHARACTERS_MAX:
                raise LimitExceeded(f"keys and names have 1 to {KEY_CHARACTERS_MAX} characters")
        key, name, _ = entry_of(timer)
        if value is not None:
            self.reserved.refuse(timer, key, name)
        self.change(key, name, value)

    def change(self, key: str, name: str, value: bytes | None) -> None:
        """As `put`, also for a reserved name. The empty key is that of the shard."""
        if key and key not in self._entries and not self._is_ours(key):
            raise LimitExceeded(
                "the MD5 hash of a state key is not in the hash range of this shard: state belongs"
                " to the partition keys of the shard's own records, and to records put without an"
                " explicit hash key"
            )
        self._journal(lambda: self._change(key, name, value))

    def _is_ours(self, key: str) -> bool:
        """A split gives each child the keys of its hash range: any other key would be lost then."""
        return self._hash_range is None or hash_key_of(key) in self._hash_range

    def undo(self, change: Undoable) -> None:
        """Take the last change back."""
        key, name, value, before = change
        self._set(key, name, before, value)

    def _change(self, key: str, name: str, value: bytes | None) -> Undoable | None:
        of_ours = is_reserved(name)
        before = self.reserved.get(key, name) if of_ours else self.values_of(key).get(name)
        if value == before:
            return None
        grown = self._growth(key, name, value, before)
        if grown > 0 and key and self.size_bytes + grown > self._max_bytes:
            raise HaltShard(
                f"the state of this shard would exceed state.max_bytes ({self._max_bytes} bytes):"
                " delete keys that are done, raise the limit, or split the shard"
            )
        self._set(key, name, value, before)
        return key, name, value, before

    def _set(self, key: str, name: str, value: bytes | None, before: bytes | None) -> None:
        self.size_bytes += self._growth(key, name, value, before)
        if is_reserved(name):
            self.reserved.set(key, name, value)
        elif value is not None:
            self._entries.setdefault(key, {})[name] = value
        elif before is not None:
            values = self._entries[key]
            del values[name]
            if not values:
                del self._entries[key]

    @staticmethod
    def _growth(key: str, name: str, value: bytes | None, before: bytes | None) -> int:
        return _size(key, name, value) - _size(key, name, before)


def _size(key: str, name: str, value: bytes | None) -> int:
    return 0 if value is None else len(key) + len(name) + len(value)


class State:
    """What the processor remembers of the keys of its shard: `context.state`.

    `state[record]` are the values of the record's partition key, `state["key"]` those of a key by
    its name; iteration gives the keys that have values. Changes are made in `process_records`,
    `on_timer` and `shard_ended`, and become durable in one write with the checkpoint that covers
    their records: a call that raises leaves none of them, and after a crash the state is that of
    the checkpoint.

    A key is a partition key of this shard's own records, because a reshard moves each key to the
    shard that its records go to: another one raises LimitExceeded.
    """

    def __init__(self, live: LiveEntries) -> None:
        self._live = live

    def __getitem__(self, key: Record | str) -> KeyState:
        return KeyState(self._live, _name_of(key))

    def __iter__(self) -> Iterator[str]:
        return iter(self._live.keys())

    def __contains__(self, key: object) -> bool:
        name = key.partition_key if isinstance(key, Record) else key
        return isinstance(name, str) and bool(self._live.values_of(name))

    def __len__(self) -> int:
        return len(self._live.keys())

    def set_timer(
        self, key: Record | str, at: float | datetime, name: str = "", clock: Clock = "event"
    ) -> None:
        """As `Context.set_timer`."""
        if not self._live.reserved.is_served:
            raise SettingsError(
                "a timer needs a processor that defines on_timer(self, timer, checkpointer)"
            )
        timer = Timer(seconds_of(at), _name_of(key), name, clock)
        self._live.put_timer(timer, entry_of(timer)[2])

    def delete_timer(self, key: Record | str, name: str = "") -> None:
        """As `Context.delete_timer`."""
        self._live.put_timer(Timer(0.0, _name_of(key), name), None)


def _name_of(key: Record | str) -> str:
    return key if isinstance(key, str) else key.partition_key


class KeyState(MutableMapping[str, Any]):
    """The values of one key, by name: a mapping of texts to numbers, texts, bytes, lists, mappings,
    dates, dataclasses or msgspec.Structs.

    A value is stored as it is at that moment: change an object that was read, and set it again.
    Without a type a Struct is read as the mapping of its fields; `get(name, type=Order)` makes one.
    Raises: TypeError for a value that msgspec cannot encode; LimitExceeded for a name of more than
    256 characters; HaltShard above `state.max_bytes`; SinkError outside of `process_records`,
    `on_timer` and `shard_ended`.
    """

    def __init__(self, live: LiveEntries, key: str) -> None:
        self._live = live
        self._key = key

    def __getitem__(self, name: str) -> Any:
        return msgspec.msgpack.decode(self._live.values_of(self._key)[name])

    def get(self, name: str, default: Any = None, *, type: Any = Any) -> Any:  # noqa: A002
        """The value, or `default` if there is none. Raises: msgspec.ValidationError if it is not of
        this type."""
        value = self._live.values_of(self._key).get(name)
        return default if value is None else msgspec.msgpack.decode(value, type=type)

    def __setitem__(self, name: str, value: Any) -> None:
        self._live.put(self._key, name, msgspec.msgpack.encode(value))

    def set(self, name: str, value: Any) -> None:
        """As `state[name] = value`."""
        self[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._live.values_of(self._key):
            raise KeyError(name)
        self.delete(name)

    def delete(self, name: str | None = None) -> None:
        """Remove the value, or all values of the key; nothing happens where there is none."""
        names = list(self) if name is None else [name]
        for each in names:
            if each in self._live.values_of(self._key):
                self._live.put(self._key, each, None)

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
        found = self.get(key, _MISSING)
        if found is _MISSING:
            raise KeyError(self._name)
        return found  # type: ignore[no-any-return]  # decoded as T, or raised

    @overload
    def get(self, key: Record | str) -> T | None: ...
    @overload
    def get(self, key: Record | str, default: Any) -> Any: ...
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
