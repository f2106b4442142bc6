"""A version and what it rests on, down to its snapshot: when the next one is a snapshot, how it is
read, and which versions are garbage [K13, K15]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kclrun.errors import SettingsError
from kclrun.state.versions import Change, decode_version, token_of

# A restore reads one object for each: 64 of 20 to 40 ms are 2 s.
DELTAS_MAX: Final = 64

# The entries of a shard: partition key → name → the value's bytes.
Entries = dict[str, dict[str, bytes]]


class Chain(msgspec.Struct, frozen=True):
    """The versions that a state rests on, the snapshot first. Empty: there is none yet."""

    names: tuple[str, ...] = ()
    snapshot_bytes: int = 0
    delta_bytes: int = 0

    @property
    def newest(self) -> str | None:
        """The name of the version that holds the state."""
        return self.names[-1] if self.names else None

    def takes_delta(self, size: int) -> bool:
        """Whether the next version, with so many bytes of changes, is a delta."""
        is_short = 0 < len(self.names) <= DELTAS_MAX
        return is_short and self.delta_bytes + size <= self.snapshot_bytes

    def followed_by(self, name: str, size: int, *, is_delta: bool) -> Chain:
        """The chain once this version of `size` bytes is written."""
        if not is_delta:
            return Chain((name,), size)
        return Chain((*self.names, name), self.snapshot_bytes, self.delta_bytes + size)


def read_chain(
    newest: str, shard: str, read: Callable[[str], bytes | None]
) -> tuple[Entries, Chain, str]:
    """The entries that a version holds, its chain, and its cursor. `read` gives the bytes of a
    version of this shard, None if it is not there.

    Raises: SettingsError, naming the version, for one that is missing or damaged: an empty state in
    its place would lose what the keys hold.
    """
    found: list[tuple[str, int, list[Change]]] = []
    cursor, name = "", newest
    while True:
        content = read(name)
        if content is None:
            rests = "" if name == newest else f", which {newest} rests on,"
            raise SettingsError(
                f"the state version {name} of {shard}{rests} is missing from state.store: restore"
                " it, and resume the lease"
            )
        version = decode_version(name, content)
        if version.shard != shard:
            raise SettingsError(f"the state version {name} is of {version.shard}, not of {shard}")
        cursor = cursor or version.cursor
        found.append((name, len(content), version.changes))
        if version.base is None:
            break
        if len(found) > DELTAS_MAX:
            raise SettingsError(f"the state version {newest} rests on more than {DELTAS_MAX}")
        name = version.base
    entries: Entries = {}
    for _, _, changes in reversed(found):
        apply_changes(entries, changes)
    sizes = [size for _, size, _ in reversed(found)]
    names = tuple(each for each, _, _ in reversed(found))
    return entries, Chain(names, sizes[0], sum(sizes[1:])), cursor


def apply_changes(entries: Entries, changes: Iterable[Change]) -> None:
    """Put the changes into the entries, in order."""
    for key, name, value in changes:
        values = entries.get(key)
        if value is None:
            if values is not None and values.pop(name, None) is not None and not values:
                del entries[key]
        elif values is None:
            entries[key] = {name: value}
        else:
            values[name] = value


def all_changes(entries: Entries) -> list[Change]:
    """The entries as the changes of a snapshot."""
    return [(key, name, value) for key, of in entries.items() for name, value in of.items()]


def garbage(
    listed: Iterable[tuple[str, float]], chain: Chain, token: int, retain_s: float
) -> tuple[str, ...]:
    """The versions that the owner with `token` may delete while `chain` is what its row names, and
    nothing of its own is under way [K15]. `listed`: names with their ages in seconds.

    A greater token is that of a later owner, whose row this owner does not know.
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
