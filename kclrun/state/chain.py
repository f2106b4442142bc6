"""The chain of a version: the versions that it rests on, down to a snapshot. How a chain is read,
when the next version is a snapshot, and which versions are garbage [K13, K15]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.state.versions import Change, Version, decode_version, token_of

# A restore reads one object for each delta: 64 of 20 to 40 ms take 2 s.
DELTAS_MAX: Final = 64
# A part of a snapshot is encoded in one call, while no other thread of the process runs: 8 MiB are
# some 20 ms. A state of 1 GiB is read as 128 objects, in 4 s beside the 20 s for its bytes.
PART_BYTES: Final = 8 * 2**20
# 512 GiB in a shard.
PARTS_MAX: Final = 65_536

# The entries of a shard: partition key → name → the value's bytes.
Entries = dict[str, dict[str, bytes]]


class Chain(msgspec.Struct, frozen=True):
    """The versions that a state rests on, the parts of its snapshot first. Empty: there is none."""

    names: tuple[str, ...] = ()
    snapshot_bytes: int = 0
    delta_bytes: int = 0
    parts: int = 1

    @property
    def newest(self) -> str | None:
        """The name of the version that holds the state."""
        return self.names[-1] if self.names else None

    def takes_delta(self, size: int) -> bool:
        """Whether the next version, with so many bytes of changes, is a delta."""
        is_short = 0 < len(self.names) < self.parts + DELTAS_MAX
        return is_short and self.delta_bytes + size <= self.snapshot_bytes

    def followed_by(self, name: str, size: int, *, is_delta: bool) -> Chain:
        """The chain once this version of `size` bytes is written."""
        if not is_delta:
            return Chain((name,), size)
        names = (*self.names, name)
        return Chain(names, self.snapshot_bytes, self.delta_bytes + size, self.parts)

    def with_part(self, name: str, size: int) -> Chain:
        """A chain that is a snapshot only, with a further part of it."""
        names = (*self.names, name)
        return Chain(names, self.snapshot_bytes + size, 0, len(names))


class ChainReader:
    """Iterates over the versions of a chain, the newest first. `cursor` is that of the newest,
    known from the first version on; `chain` is known once all are read. `read` returns the bytes of
    a version of this shard, None if it is missing. `ahead` gets the name of the next version while
    the version before it is used."""

    def __init__(
        self,
        newest: str,
        shard: str,
        read: Callable[[str], bytes | None],
        ahead: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ahead = ahead
        self._newest = newest
        self._shard = shard
        self._read = read
        self.chain = Chain()
        self.cursor = ""

    def __iter__(self) -> Iterator[Version]:
        """Raises: SettingsError, naming the version, for one that is missing or damaged: an empty
        state in its place would lose what the keys hold."""
        names, delta_bytes, snapshot_bytes, deltas = [self._newest], 0, 0, 0
        while True:
            version, size = self._version(names[-1])
            self.cursor = self.cursor or version.cursor
            if version.base is None or version.is_part:
                snapshot_bytes += size
            else:
                deltas, delta_bytes = deltas + 1, delta_bytes + size
            if deltas > DELTAS_MAX:
                raise SettingsError(
                    f"the state version {self._newest} rests on more than {DELTAS_MAX}"
                )
            if version.base is not None:
                self._ahead(version.base)
            yield version
            if version.base is None:
                break
            if len(names) >= DELTAS_MAX + PARTS_MAX:
                raise SettingsError(f"the snapshot of {self._newest} has no end")
            names.append(version.base)
        parts = len(names) - deltas
        self.chain = Chain(tuple(reversed(names)), snapshot_bytes, delta_bytes, parts)

    def _version(self, name: str) -> tuple[Version, int]:
        content = self._read(name)
        if content is None:
            rests = "" if name == self._newest else f", which {self._newest} rests on,"
            raise SettingsError(
                f"the state version {name} of {self._shard}{rests} is missing from state.store:"
                " restore it, or make it again with  kclrun state rebuild  and resume the lease"
            )
        version = decode_version(name, content)
        if version.shard != self._shard:
            raise SettingsError(
                f"the state version {name} is of {version.shard}, not of {self._shard}"
            )
        return version, len(content)


def read_chain(
    newest: str, shard: str, read: Callable[[str], bytes | None]
) -> tuple[Entries, Chain, str]:
    """The entries that a version holds, its chain, and its cursor. Raises: as `ChainReader`."""
    reader = ChainReader(newest, shard, read)
    return entries_of(reader), reader.chain, reader.cursor


def entries_of(versions: Iterable[Version]) -> Entries:
    """The entries that a chain holds. The newest version comes first, and each version is released
    before the next one is read."""
    entries: Entries = {}
    removed: set[tuple[str, str]] = set()  # by a newer version
    for version in versions:
        for key, name, value in version.changes:
            if value is None:
                removed.add((key, name))
            elif not removed or (key, name) not in removed:
                values = entries.get(key)
                if values is None:
                    entries[key] = {name: value}
                elif name not in values:
                    values[name] = value
    return entries


def apply_changes(entries: Entries, changes: Iterable[Change]) -> None:
    """Put the changes into the entries, in order. The dict of a key is replaced, never changed: the
    entries of user code may share it."""
    for key, name, value in changes:
        values = entries.get(key)
        if values is None:
            if value is not None:
                entries[key] = {name: value}
        elif value is not None:
            entries[key] = {**values, name: value}
        elif name in values:
            rest = {other: each for other, each in values.items() if other != name}
            if rest:
                entries[key] = rest
            else:
                del entries[key]


def parts_of(changes: Iterable[Change]) -> Iterator[list[Change]]:
    """The changes of a snapshot, in lists of some `PART_BYTES`: at least one list."""
    part: list[Change] = []
    size = 0
    for change in changes:
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
        part.append(change)
        size += len(change[0]) + len(change[1]) + len(change[2] or b"")
    yield part


def garbage(
    listed: Iterable[tuple[str, float]], chain: Chain, token: int, retain_s: float
) -> tuple[str, ...]:
    """The versions that the owner with `token` may delete while its row names `chain` and no
    version of its own is under way [K15]. `listed`: names with their ages in seconds.

    Versions with a greater token are of a later owner, whose row this owner does not know.
    """
    kept = frozenset(chain.names)
    return tuple(
        name
        for name, age_s in listed
        if (of := token_of(name)) is not None
        and of <= token
        and name not in kept
        and age_s >= retain_s
    )


def outlived(listed: Iterable[tuple[str, float]], retain_s: float) -> tuple[str, ...]:
    """The versions of a shard that needs none any more, if all of them are that old: a younger
    version is of an owner whose row was not there yet when the row was read."""
    found = [(name, age_s) for name, age_s in listed if token_of(name) is not None]
    is_quiet = all(age_s >= retain_s for _, age_s in found)
    return tuple(name for name, _ in found) if is_quiet else ()
