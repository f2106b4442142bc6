"""The entries of a lease's last version, from which its next snapshot is written. They are kept in
memory, here, or on the local disk (`stores/local_state.py`).

Must not know: the store of the versions, what user code does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kclrun.model.shard import HashRange
from kclrun.state.beginning import inherited
from kclrun.state.chain import Chain, Entries, apply_changes, entries_of
from kclrun.state.keyed import KeyValues, MemoryValues, Undoable
from kclrun.state.versions import Change, Version

# A chain of versions, the newest first.
Versions = Iterable[Version]


class KeptEntries(Protocol):
    """The entries of a lease's last version. First `adopt`, `load` or `inherit`, and `live`; then
    `note`, `apply`, `changes` and `keep` as often as needed, by one thread. Every method raises
    SinkError while the entries cannot be written; the call is repeated then."""

    def adopt(self, version: str) -> Chain | None:
        """The chain of the version, if entries of a former process are those of exactly this
        version [K14]: they are used. Else None, and the entries have to be loaded."""
        ...

    def copies(self) -> frozenset[str]:
        """The versions of which a former process left the entries here. `adopt` shows whether they
        can be used."""
        ...

    def follow(self, deltas: Sequence[Version], chain: Chain) -> None:
        """After `adopt`: apply the versions that follow the adopted one, the oldest first. The
        entries are then those of `chain`."""
        ...

    def load(self, versions: Versions) -> None:
        """The entries become those of a chain."""
        ...

    def inherit(self, chains: Iterable[Versions], hash_range: HashRange | None) -> None:
        """The entries become those of the parents' chains whose keys are in the hash range. Raises:
        SettingsError, as `state.beginning.inherited`."""
        ...

    def live(self) -> KeyValues:
        """The entries for user code. Its changes do not change the entries here."""
        ...

    def note(self, rows: Sequence[Undoable]) -> None:
        """Changes that user code made will be in the next version."""
        ...

    def apply(self, changes: Sequence[Change]) -> None:
        """Change the entries; provisional until `keep`. A repeated call changes nothing more."""
        ...

    def changes(self) -> Iterator[Change]:
        """All entries, in an order that only `apply` changes."""
        ...

    def keep(self, chain: Chain) -> None:
        """The newest version of the chain is durable: the entries are now those of this version."""
        ...

    def close(self) -> None:
        """Close the files. Idempotent."""
        ...


class MemoryEntries:
    """Implements `KeptEntries` in memory. No copy is left when the process ends, so nothing has
    to be noted, kept or closed."""

    def __init__(self) -> None:
        self._entries: Entries = {}

    def adopt(self, _version: str) -> Chain | None:
        return None

    def copies(self) -> frozenset[str]:
        return frozenset()

    def follow(self, deltas: Sequence[Version], chain: Chain) -> None:
        for delta in deltas:
            self.apply(delta.changes)
        self.keep(chain)

    def load(self, versions: Versions) -> None:
        self._entries = entries_of(versions)

    def inherit(self, chains: Iterable[Versions], hash_range: HashRange | None) -> None:
        self._entries = inherited(map(entries_of, chains), hash_range)

    def live(self) -> KeyValues:
        return MemoryValues(self._entries.copy())

    def note(self, rows: Sequence[Undoable]) -> None: ...

    def apply(self, changes: Sequence[Change]) -> None:
        apply_changes(self._entries, changes)

    def changes(self) -> Iterator[Change]:
        for key, values in self._entries.items():
            for name, value in values.items():
                yield key, name, value

    def keep(self, chain: Chain) -> None: ...

    def close(self) -> None: ...
