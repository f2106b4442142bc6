"""The keyed state of one lease as the first of its outputs: its rows are the changes of the state,
and each commit writes one version of it [K5, K14].

It knows which version the changes rest on, and when the next one is a snapshot. It does not know
what user code does, nor when a commit is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.shard import HashRange
from kclrun.model.stream import shard_id_of
from kclrun.ports import VersionStore
from kclrun.processor import Row
from kclrun.state.beginning import (
    Empty,
    OwnVersion,
    ParentVersions,
    beginning,
    inherited,
    parents_to_read,
)
from kclrun.state.chain import (
    Chain,
    Entries,
    all_changes,
    apply_changes,
    garbage,
    read_chain,
)
from kclrun.state.keyed import Undoable
from kclrun.state.versions import Change, Version, encode_version, version_name

ReadRows = Callable[[Sequence[LeaseKey]], Mapping[LeaseKey, Lease | None]]

# Beside its bytes, a change costs about this much until it is written.
CHANGE_BYTES: Final = 64


class StateVersions:
    """Implements `Output`. `restore` comes before `begin`, and everything but `restore` is called
    by one thread. `nonce` is random, of this process (`version_name`)."""

    stores_cursor = False

    def __init__(self, store: VersionStore, shard_id: str, token: int, nonce: str) -> None:
        self._store = store
        self._shard_id = shard_id
        self._token = token
        self._nonce = nonce
        self._attempt = 0
        self._at: Cursor | None = None
        self._chain = Chain()
        self._entries: Entries = {}  # those of the last version, and of the changes added since
        self._pending: dict[tuple[str, str], bytes | None] = {}
        self._pending_bytes = 0
        # The version under way: a repetition has the same name and the same contents [K6].
        self._sealed: tuple[str, bytes, bool] | None = None

    @property
    def version(self) -> str | None:
        """The name of the last version that is durable; None if there is none of this shard."""
        return self._chain.newest

    @property
    def must_write(self) -> bool:
        """Whether the next commit writes a version although nothing changed: a row beyond its
        initial position names one, and that of a child rests on no parent [K13, K16]."""
        return self._chain.newest is None

    def restore(self, row: Lease, read_rows: ReadRows, hash_range: HashRange | None) -> Entries:
        """The entries at the row's checkpoint, for user code to change: a copy. Reads the version
        that the row names, or those of its parents' rows. Raises: SinkError, a ServiceError leaf
        (again later); SettingsError where a version is missing or damaged. [K13, K16]"""
        keys = parents_to_read(row)
        match beginning(row, read_rows(keys) if keys else {}):
            case OwnVersion(name):
                self._entries, self._chain = self._read(self._shard_id, name)
            case ParentVersions(versions):
                parts = [self._read(shard_id_of(key), name)[0] for key, name in versions]
                self._entries = inherited(parts, hash_range)
            case Empty():
                self._entries = {}
        return {key: dict(values) for key, values in self._entries.items()}

    def _read(self, shard: str, name: str) -> tuple[Entries, Chain]:
        entries, chain, _ = read_chain(name, shard, lambda each: self._store.read(shard, each))
        return entries, chain

    def encode(self, _row: Row) -> tuple[Any, int]:
        """Changes come as values of their own, never as rows."""
        raise TypeError("the state is changed with context.state")

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: the row alone says how far the state is."""
        self._at = at
        return at

    def add(self, rows: Sequence[Undoable], upto: Cursor) -> None:
        """As `Output.add`."""
        assert self._sealed is None, "a commit under way is repeated before anything is added"
        for key, name, value, _ in rows:
            self._pending[key, name] = value
            self._pending_bytes += CHANGE_BYTES + len(key) + len(name) + len(value or b"")
        apply_changes(self._entries, ((key, name, value) for key, name, value, _ in rows))
        self._at = upto

    @property
    def unsent_bytes(self) -> int:
        """As `Output.unsent_bytes`."""
        return self._pending_bytes

    def commit(self) -> Cursor:
        """As `Output.commit`: `version` is durable and holds every change that was added."""
        assert self._at is not None, "begin() comes first"
        if self._sealed is None and (self._pending or self.must_write):
            self._sealed = self._seal(self._at)
        if self._sealed is not None:
            name, content, is_delta = self._sealed
            self._store.create(self._shard_id, name, content)
            self._chain = self._chain.followed_by(name, len(content), is_delta=is_delta)
            self._pending.clear()
            self._pending_bytes, self._sealed = 0, None
        return self._at

    def _seal(self, at: Cursor) -> tuple[str, bytes, bool]:
        self._attempt += 1
        name = version_name(self._token, self._attempt, self._nonce)
        changes = [(key, of, value) for (key, of), value in self._pending.items()]
        delta = self._encoded(name, at, self._chain.newest, changes)
        if self._chain.takes_delta(len(delta)):
            return name, delta, True
        return name, self._encoded(name, at, None, all_changes(self._entries)), False

    def _encoded(self, name: str, at: Cursor, base: str | None, changes: list[Change]) -> bytes:
        return encode_version(
            Version(
                name=name,
                shard=self._shard_id,
                cursor=str(at),
                token=self._token,
                attempt=self._attempt,
                base=base,
                changes=changes,
            )
        )

    def collect(self, retain_s: float) -> int:
        """Delete the versions that the row does not need, and say how many they were. Called
        between two commits, once the row names `version` by a checkpoint of ours. [K15]"""
        assert self._sealed is None, "a version is under way"
        if self._chain.newest is None:
            return 0
        names = garbage(self._store.list(self._shard_id), self._chain, self._token, retain_s)
        if names:
            self._store.delete(self._shard_id, names)
        return len(names)

    def check(self) -> str:
        """As `Output.check`."""
        return self._store.check()

    def close(self) -> None:
        """As `Output.close`."""
        self._store.close()
