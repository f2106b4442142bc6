"""The entries of a lease's last version on a disk of this machine, with the part of them that user
code uses in memory: for a state that is larger than memory, and for a quick restart.

It is a copy: if it is lost, the version has everything. It does not know how versions are stored.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import sqlite3
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import msgspec

from kclrun.errors import HostFailed, OutputLocked, SettingsError, SinkError
from kclrun.files.durable import close_locked, open_locked
from kclrun.model.sequence import SHARD_END
from kclrun.model.shard import HashRange, hash_key_of
from kclrun.state.beginning import BOTH_HAVE, known_range
from kclrun.state.chain import Chain
from kclrun.state.kept import Versions
from kclrun.state.keyed import KeyValues, Undoable, growth
from kclrun.state.timers import WATERMARK, is_reserved, merged_watermark
from kclrun.state.versions import Change, Version

_FORMAT: Final = 1
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# The memory of a key beside its characters, and of each of its values beside its bytes: two entries
# of a dict, the dict of its values, and the heads of a text and of bytes.
_KEY_BYTES: Final = 400
_VALUE_BYTES: Final = 60
# The working set's share of `state.memory`. The rest are pages of SQLite, and the changes since the
# last commit: they are there as rows, as changes, and as the bytes of the next version. (With 0.4
# the bench's 800,000 keys took 1.23 x 64 MiB, with 0.35 1.16 x.)
_WORKING_SHARE: Final = 0.35
_PAGES_SHARE: Final = 0.05  # of each of two connections
# While a state is read, nothing else is in memory but a part of its snapshot, decoded and sealed,
# and the bytes of the next one: by the sizes of their objects 60 MiB for values of 100 bytes. Pages
# have the rest of `state.memory`: parts have keys of all pages where memory alone had the entries.
_LOADING_SHARE: Final = 0.15
_PARTS_BYTES: Final = 96 * 2**20
# When a lease begins, so many folders of shards are searched for copies that nothing uses any more.
_SWEPT_MAX: Final = 100
_TABLE: Final = "(key TEXT, name TEXT, value BLOB, PRIMARY KEY (key, name)) WITHOUT ROWID"
_INTO_ENTRIES: Final = "INSERT OR IGNORE INTO entries VALUES (?, ?, ?)"
_INTO_PART: Final = "INSERT OR IGNORE INTO part VALUES (?, ?, ?)"
# Reserved names, which begin with NUL, come before all others.
_SIZE: Final = (
    "SELECT COALESCE(SUM(LENGTH(key) + LENGTH(name) + LENGTH(value) - 4), 0) FROM entries"
    " WHERE name >= CHAR(1)"
)
_KEYS: Final = (
    "SELECT DISTINCT key FROM entries WHERE key > ? AND name >= CHAR(1) ORDER BY key LIMIT 1000"
)
_VALUES: Final = "SELECT name, value FROM entries WHERE key = ? AND name >= CHAR(1)"
# Without an index a copy of 1 GB would be read whole for the reserved entries when a lease begins.
# The index has only these, so other values cost nothing more: 100,000 changes took 1.1 s of CPU
# with it and without it.
_RESERVED: Final = "SELECT key, name, value FROM entries WHERE name < CHAR(1)"
_OF_RESERVED: Final = "CREATE INDEX reserved ON entries (key, name) WHERE name < CHAR(1)"


class _CopyOf(msgspec.Struct, frozen=True):
    """The version of which a file is a copy. Nothing is synced to the disk, so a power cut may
    leave a mix of old and new pages: a copy is valid within one `boot` only."""

    format: int
    boot: str
    chain: Chain
    size_bytes: int


class _Place:
    """A folder with one copy, which no other process uses while this one is open."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.file = folder / "state.db"
        self._lock = lock

    @classmethod
    def locked(cls, folder: Path) -> _Place | None:
        """The place, if it is there and no process uses it. Raises: OSError."""
        try:
            return cls(folder, open_locked(folder / "lock", 0.0))
        except (OutputLocked, FileNotFoundError):
            return None

    @classmethod
    def made(cls, root: Path) -> _Place:
        """A new one. Raises: OSError."""
        while True:
            folder = root / secrets.token_hex(8)
            folder.mkdir(mode=0o700, parents=True)  # the state may be confidential
            place = cls.locked(folder)  # None if a sweep removed the folder
            if place is not None:
                return place

    def is_unused_since(self, age_s: float) -> bool:
        return time.time() - (self.folder / "lock").stat().st_mtime >= age_s

    def mark_used(self) -> None:
        os.utime(self.folder / "lock")

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        if self._lock >= 0:
            close_locked(self._lock)
            self._lock = -1


class LocalEntries:
    """Implements `KeptEntries` with SQLite below `root`, a folder of this shard alone.

    With the changes that no version has yet, it takes some `memory_bytes` of memory. `broke` ends
    the process: a damaged file is removed, and the next process reads the version.
    """

    def __init__(
        self, root: Path, memory_bytes: int, broke: Callable[[BaseException], None]
    ) -> None:
        self._root = root
        self._memory_bytes = memory_bytes
        self._broke = broke
        self._place: _Place | None = None
        self._writer: sqlite3.Connection | None = None
        self._working: WorkingSet | None = None
        self._size_bytes = 0  # of the last version
        # Of the changes that no version has yet: their number for each key, and the growth.
        self._noted: Counter[str] = Counter()
        self._grown_bytes = 0

    # The beginning of a lease.

    def adopt(self, version: str) -> Chain | None:
        """As `KeptEntries`: the copy that a former process of this machine left, if it is of this
        version. Every other one of this shard is removed."""
        self.close()
        chain = None
        with self._writing():
            for folder in sorted(self._root.glob("*/")):
                place = _Place.locked(folder)
                if place is None:
                    continue  # a process that is about to end uses it
                copy = _copy_in(place.file) if chain is None else None
                if copy is None or copy.chain.newest != version:
                    place.remove()
                    continue
                chain, self._place, self._size_bytes = copy.chain, place, copy.size_bytes
                self._writer = self._connected(place.file)
        return chain

    def copies(self) -> frozenset[str]:
        """As `KeptEntries`: those that no process uses."""
        found = set()
        with self._writing():
            for folder in self._root.glob("*/"):
                place = _Place.locked(folder)
                if place is not None:
                    copy = _copy_in(place.file)
                    place.close()
                    found.add(None if copy is None else copy.chain.newest)
        return frozenset(name for name in found if name is not None)

    def follow(self, deltas: Sequence[Version], chain: Chain) -> None:
        """As `KeptEntries`: in one transaction, so that a process that dies leaves the copy as it
        was."""
        with self._writing() as writer:
            for delta in deltas:
                self.apply(delta.changes)
            (self._size_bytes,) = writer.execute(_SIZE).fetchone()
        self.keep(chain)

    def load(self, versions: Versions) -> None:
        with self._loading() as writer:
            if _insert(writer, _INTO_ENTRIES, versions):
                writer.execute("DELETE FROM entries WHERE value IS NULL")

    def inherit(self, chains: Iterable[Versions], hash_range: HashRange | None) -> None:
        known = known_range(hash_range)
        shard, of = WATERMARK
        watermarks = []
        with self._loading() as writer:
            writer.execute(f"CREATE TABLE part {_TABLE}")
            for versions in chains:
                _insert(
                    writer,
                    _INTO_PART,
                    versions,
                    lambda key: key == shard or hash_key_of(key) in known,
                )
                writer.execute("DELETE FROM part WHERE value IS NULL")
                found = writer.execute("SELECT value FROM part WHERE key = ?", (shard,)).fetchone()
                watermarks.append(None if found is None else _opened(found[0]))
                writer.execute("DELETE FROM part WHERE key = ?", (shard,))
                if writer.execute("SELECT 1 FROM part JOIN entries USING (key) LIMIT 1").fetchone():
                    raise SettingsError(BOTH_HAVE)
                writer.execute("INSERT INTO entries SELECT * FROM part ORDER BY key, name")
                writer.execute("DELETE FROM part")
            writer.execute("DROP TABLE part")
            if (watermark := merged_watermark(watermarks, SHARD_END)) is not None:
                writer.execute(_INTO_ENTRIES, (shard, of, _sealed(watermark)))

    @contextlib.contextmanager
    def _loading(self) -> Iterator[sqlite3.Connection]:
        """A new file, which is there whole or not at all."""
        if self._place is not None:
            self._remove()
        with self._writing():
            self._place = _Place.made(self._root)
            room = 1 - _PARTS_BYTES / self._memory_bytes
            share = max(_LOADING_SHARE, room)
            writer = self._writer = self._connected(self._place.file, share)
            try:
                writer.execute("PRAGMA journal_mode = OFF")
                writer.execute("PRAGMA page_size = 8192")
                writer.execute(f"CREATE TABLE entries {_TABLE}")
                writer.execute(_OF_RESERVED)
                writer.execute("CREATE TABLE copy (of BLOB)")
                writer.execute("BEGIN")
                yield writer
                writer.execute("COMMIT")
                writer.execute("PRAGMA journal_mode = WAL")  # its reader waits for no writer
                (self._size_bytes,) = writer.execute(_SIZE).fetchone()
                self._limit_pages(writer, _PAGES_SHARE)
                writer.execute("PRAGMA shrink_memory")
            except BaseException:
                self._remove()
                raise

    def live(self) -> KeyValues:
        assert self._place is not None, "adopt(), load() or inherit() comes first"
        reader = self._connected(self._place.file)
        limit = int(self._memory_bytes * _WORKING_SHARE)
        self._working = WorkingSet(reader, self._size_bytes, limit, self._damaged)
        return self._working

    # The thread that commits.

    def note(self, rows: Sequence[Undoable]) -> None:
        of_users = [row for row in rows if not is_reserved(row[1])]
        self._noted.update([row[0] for row in of_users])
        self._grown_bytes += sum([growth(*row) for row in of_users])

    def apply(self, changes: Sequence[Change]) -> None:
        with self._writing() as writer:
            if not writer.in_transaction:
                writer.execute("BEGIN")
            writer.executemany(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?)",
                [
                    (key, of, _sealed(value))
                    for key, of, value in sorted(changes)
                    if value is not None
                ],
            )
            writer.executemany(
                "DELETE FROM entries WHERE key = ? AND name = ?",
                [(key, of) for key, of, value in changes if value is None],
            )

    def changes(self) -> Iterator[Change]:
        with self._writing() as writer:
            for key, name, value in writer.execute("SELECT * FROM entries ORDER BY key, name"):
                yield key, name, _opened(value)

    def keep(self, chain: Chain) -> None:
        size_bytes = self._size_bytes + self._grown_bytes
        copy = _CopyOf(_FORMAT, _boot(), chain, size_bytes)
        with self._writing() as writer:
            if not writer.in_transaction:
                writer.execute("BEGIN")
            writer.execute("DELETE FROM copy")
            writer.execute("INSERT INTO copy VALUES (?)", [msgspec.msgpack.encode(copy)])
            writer.execute("COMMIT")
            assert self._place is not None, "it has a connection"
            self._place.mark_used()
        self._size_bytes, self._grown_bytes = size_bytes, 0
        if self._working is not None:
            self._working.release(self._noted)
        self._noted.clear()

    def close(self) -> None:
        """As `KeptEntries`. The file stays, for the next process of this machine."""
        if self._working is not None:
            self._working.close()
        if self._writer is not None:
            with contextlib.suppress(sqlite3.Error):
                self._writer.close()
        self._working = self._writer = None
        if self._place is not None:
            self._place.close()
        self._place = None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Raises: SinkError, after a rollback, if the disk is full; and if the file is damaged,
        which ends the process."""
        try:
            yield self._writer  # type: ignore[misc]  # None before the file is opened
        except OSError as error:
            raise SinkError(f"{self._root}: {error.strerror}") from error
        except sqlite3.Error as error:
            if self._writer is not None and self._writer.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
            if getattr(error, "sqlite_errorname", "") == "SQLITE_FULL":
                raise SinkError(f"the disk of {self._root} is full") from error
            raise self._damaged(error) from error

    def _damaged(self, error: sqlite3.Error) -> SinkError:
        """Remove the file and end the process: the next one reads the version instead."""
        if self._place is not None:
            shutil.rmtree(self._place.folder, ignore_errors=True)
        message = f"the local copy of the state in {self._root} is damaged ({error}): it is removed"
        self._broke(HostFailed(message))
        return SinkError(message)

    def _connected(self, file: Path, share: float = _PAGES_SHARE) -> sqlite3.Connection:
        with contextlib.ExitStack() as kept_open:
            connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            kept_open.callback(connection.close)
            self._limit_pages(connection, share)
            # The file survives the end of the process; after a reboot it is not used.
            connection.execute("PRAGMA synchronous = OFF")
            kept_open.pop_all()
        return connection

    def _limit_pages(self, connection: sqlite3.Connection, share: float) -> None:
        connection.execute(f"PRAGMA cache_size = -{int(self._memory_bytes * share / 1024)}")

    def _remove(self) -> None:
        place = self._place
        self.close()
        if place is not None:
            shutil.rmtree(place.folder, ignore_errors=True)


class WorkingSet:
    """Implements `KeyValues`: keys used lately, and all keys with changes that the file lacks, are
    in memory; every other key is read from the file when it is used.

    Keys that are used become recent keys. When those take `limit_bytes / 2`, they become the older
    keys, and the older keys until then are dropped. Keys with changes are kept apart, and become
    recent keys once the file has the changes: so no collection is ever searched. They reduce the
    share of the recent keys, by up to seven eighths. One thread uses the set at a time; another one
    calls `release`.
    """

    def __init__(
        self,
        reader: sqlite3.Connection,
        size_bytes: int,
        limit_bytes: int,
        damaged: Callable[[sqlite3.Error], SinkError],
    ) -> None:
        self.size_bytes = size_bytes
        self._reader = reader
        self._limit_bytes = limit_bytes // 2
        self._damaged = damaged
        self._lock = threading.RLock()
        self._recent: dict[str, dict[str, bytes]] = {}
        self._older: dict[str, dict[str, bytes]] = {}
        self._recent_bytes = 0
        self._changed: dict[str, dict[str, bytes]] = {}
        self._changed_bytes = 0
        self._changes: dict[str, int] = {}  # by key of `_changed`: how many the file lacks

    def reserved(self) -> Iterable[tuple[str, str, bytes]]:
        """As `KeyValues`. Raises: SinkError if the file is damaged."""
        found = self._read(_RESERVED)
        return [(key, name, self._checked(value)) for key, name, value in found]

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """As `KeyValues`. Raises: SinkError if the file is damaged."""
        with self._lock:
            return self._values(key)

    def change(self, key: str, name: str, value: bytes | None) -> None:
        with self._lock:
            values = self._changed.get(key)
            if values is None:
                values = self._taken(key)
                if values is None:
                    values = self._read_values(key)
                self._changed[key] = values
                self._changed_bytes += _held_bytes(key, values)
            self._changes[key] = self._changes.get(key, 0) + 1
            self._set(values, name, value)

    def undo(self, key: str, name: str, before: bytes | None) -> None:
        with self._lock:
            self._set(self._changed[key], name, before)
            self._let_go(key, 1)

    def release(self, written: Mapping[str, int]) -> None:
        """The file has the changes now, so many of each key."""
        with self._lock:
            for key, count in written.items():
                self._let_go(key, count)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            changed = dict.fromkeys(self._changes)
        yield from (key for key in changed if self.get(key))
        last = ""
        while page := self._read(_KEYS, last):
            for (key,) in page:
                if key not in changed and (key not in self._changes or self.get(key)):
                    yield key
            last = page[-1][0]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def close(self) -> None:
        """The lease is over: keys that are not in memory cannot be read any more."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._reader.close()

    def _values(self, key: str) -> dict[str, bytes]:
        values = self._changed.get(key)
        if values is None:
            values = self._recent.get(key)
        if values is None:
            values = self._older.pop(key, None)
            if values is None:
                values = self._read_values(key)
            self._hold(key, values)
        return values

    def _taken(self, key: str) -> dict[str, bytes] | None:
        """Remove a key from the recent and older ones. Returns: its values, if it was there."""
        values = self._recent.pop(key, None)
        if values is None:
            return self._older.pop(key, None)
        self._recent_bytes -= _held_bytes(key, values)
        return values

    def _read_values(self, key: str) -> dict[str, bytes]:
        # A name is one object in memory, however many keys have it.
        found = self._read(_VALUES, key)
        return {sys.intern(name): self._checked(value) for name, value in found}

    def _hold(self, key: str, values: dict[str, bytes]) -> None:
        left = self._limit_bytes - self._changed_bytes
        if self._recent_bytes >= max(left, self._limit_bytes // 8):
            self._older, self._recent = self._recent, {}
            self._recent_bytes = 0
        self._recent[key] = values
        self._recent_bytes += _held_bytes(key, values)

    def _set(self, values: dict[str, bytes], name: str, value: bytes | None) -> None:
        before = values.pop(name, None)
        if before is not None:
            self._changed_bytes -= _VALUE_BYTES + len(before)
        if value is not None:
            values[sys.intern(name)] = value
            self._changed_bytes += _VALUE_BYTES + len(value)

    def _let_go(self, key: str, count: int) -> None:
        left = self._changes[key] - count
        if left:
            self._changes[key] = left
            return
        del self._changes[key]
        values = self._changed.pop(key)
        self._changed_bytes -= _held_bytes(key, values)
        self._hold(key, values)

    def _read(self, query: str, *arguments: str) -> list[Any]:
        with self._lock:
            try:
                return self._reader.execute(query, arguments).fetchall()
            except sqlite3.ProgrammingError:
                raise SinkError("the lease is over, and its state is closed") from None
            except sqlite3.Error as error:
                raise self._damaged(error) from error

    def _checked(self, value: bytes) -> bytes:
        try:
            return _opened(value)
        except sqlite3.Error as error:
            raise self._damaged(error) from error


def _held_bytes(key: str, values: dict[str, bytes]) -> int:
    """What a key and its values cost in memory."""
    value_bytes = sum([_VALUE_BYTES + len(value) for value in values.values()])
    return _KEY_BYTES + len(key) + value_bytes


def sweep(folder: Path, retain_s: float) -> None:
    """Remove copies below `folder` that were not used for so long: other machines read those
    shards. At most _SWEPT_MAX folders of shards; the next lease that begins does others."""
    for of_shard in itertools.islice(folder.glob("*/"), _SWEPT_MAX):
        for copy in of_shard.glob("*/"):
            with contextlib.suppress(OSError):
                place = _Place.locked(copy)
                if place is not None:
                    place.remove() if place.is_unused_since(retain_s) else place.close()
        with contextlib.suppress(OSError):
            of_shard.rmdir()  # unless it holds a copy


def _insert(
    writer: sqlite3.Connection,
    query: str,
    versions: Versions,
    is_ours: Callable[[str], bool] | None = None,
) -> bool:
    """Insert the entries of a chain whose newest version comes first: an entry that is there
    already is newer. A value that a later version removed is NULL. Returns: whether there are such
    values."""
    has_removed = False
    for version in versions:
        # Neighbours are in one page. A version changes each value once: values are not compared.
        changes = sorted(
            version.changes if is_ours is None else [c for c in version.changes if is_ours(c[0])]
        )
        has_removed = has_removed or None in map(itemgetter(2), changes)
        writer.executemany(
            query,
            [
                (key, name, None if value is None else _sealed(value))
                for key, name, value in changes
            ],
        )
    return has_removed


def _sealed(value: bytes) -> bytes:
    """The value with a checksum, which SQLite does not have."""
    return zlib.crc32(value).to_bytes(4, "big") + value


def _opened(sealed: bytes) -> bytes:
    """The value without its checksum. Raises: sqlite3.DatabaseError, as SQLite for a damaged
    page."""
    value = sealed[4:]
    if zlib.crc32(value).to_bytes(4, "big") != sealed[:4]:
        raise sqlite3.DatabaseError("the checksum of a value differs")
    return value


def _copy_in(file: Path) -> _CopyOf | None:
    """The version of which the file is a copy; None if it is not whole, or of a former boot."""
    try:
        uri = f"{file.absolute().as_uri()}?mode=rw"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            (of,) = connection.execute("SELECT of FROM copy").fetchone()
        copy = msgspec.msgpack.decode(of, type=_CopyOf)
    except (sqlite3.Error, TypeError, msgspec.MsgspecError):
        return None
    return copy if (copy.format, copy.boot) == (_FORMAT, _boot()) else None


def _boot() -> str:
    return _BOOT_ID.read_text().strip()
