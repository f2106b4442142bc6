"""The keyed state of one lease as the first of its outputs: its rows are the changes of the state,
and each commit writes one version of the state [K5, K14].

This module decides on which version the changes rest, and when the next one is a snapshot. It does
not know user code, nor when a commit is due.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, Final

from kclrun.errors import SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.shard import HashRange
from kclrun.model.stream import ONLY_STREAM, qualified, shard_id_of, stream_of
from kclrun.ports import VersionStore
from kclrun.processor import Row
from kclrun.state.beginning import Empty, OwnVersion, ParentVersions, beginning, parents_to_read
from kclrun.state.boxes import Boxes, decode_box, encode_box
from kclrun.state.chain import Chain, ChainReader, garbage, outlived, parts_of
from kclrun.state.kept import KeptEntries, MemoryEntries
from kclrun.state.keyed import CHANGE_BYTES, KeyValues, Undoable
from kclrun.state.timers import is_reserved
from kclrun.state.versions import (
    FORMAT,
    FORMAT_WITHOUT_TIMERS,
    Change,
    Version,
    decode_version,
    encode_version,
    version_name,
)

ReadRows = Callable[[Sequence[LeaseKey]], Mapping[LeaseKey, Lease | None]]

# Each costs one GetItem an hour: a thousand leases check 20,000 shards.
_SHARDS_LOOKED_AT: Final = 20
# Of a change: its key with its name, and its parts.
_ENTRY: Final = itemgetter(0, 1)
_KEY, _OF, _VALUE = itemgetter(0), itemgetter(1), itemgetter(2)


class StateVersions:
    """Implements `Output`. `restore` comes before `begin`; everything but `restore` is called by
    one thread. `nonce` is random, of this process (`version_name`). `kept` has the entries of the
    last version, for the next snapshot; in memory by default."""

    stores_cursor = False

    def __init__(
        self,
        store: VersionStore,
        shard_id: str,
        token: int,
        nonce: str,
        kept: KeptEntries | None = None,
        *,
        may_begin_empty: bool = False,
    ) -> None:
        self._store = store
        self._may_begin_empty = may_begin_empty
        self._kept = MemoryEntries() if kept is None else kept
        self._shard_id = shard_id
        self._token = token
        self._nonce = nonce
        self._read_rows: ReadRows = dict.fromkeys
        self._stream = ONLY_STREAM
        # The shards without a row at the last checks, and the shard behind which the next check
        # begins.
        self._gone: set[str] = set()
        self._looked_at = shard_id
        self._attempt = 0
        self._at: Cursor | None = None
        self._chain = Chain()
        self._pending: dict[tuple[str, str], bytes | None] = {}
        self._pending_bytes = 0
        # The rows of the next version's commit, by their outputs; empty without an outbox.
        self._boxes: Boxes = {}
        # A commit is under way, or failed: it is repeated with the same names and contents [K6].
        self._is_under_way = False

    @property
    def version(self) -> str | None:
        """The name of the last durable version; None if this shard has none yet."""
        return self._chain.newest

    @property
    def chain(self) -> Chain:
        """The chain of `version`."""
        return self._chain

    @property
    def must_write(self) -> bool:
        """Whether the next commit writes a version although nothing changed: a row beyond its
        initial position names one, and that of a child rests on no parent [K13, K16]."""
        return self._chain.newest is None

    def restore(self, row: Lease, read_rows: ReadRows, hash_range: HashRange | None) -> KeyValues:
        """The values at the row's checkpoint, for user code to change. Reads the version that the
        row names, unless this machine has a copy, or the versions of its parents' rows. Raises:
        SinkError (again later); SettingsError if a version is missing or damaged [K13, K16]."""
        self._read_rows, self._stream = read_rows, stream_of(row.key)
        keys = parents_to_read(row)
        parents = read_rows(keys) if keys else {}
        match beginning(row, parents, may_begin_empty=self._may_begin_empty):
            case OwnVersion(name):
                self._chain = self._followed(name) or self._kept.adopt(name) or self._loaded(name)
            case ParentVersions(versions):
                self._kept.inherit(
                    [self._read(shard_id_of(key), name) for key, name in versions], hash_range
                )
            case Empty():
                self._kept.load([])
        return self._kept.live()

    def _followed(self, name: str) -> Chain | None:
        """The chain of this version, made from a copy of an earlier version on this machine and the
        deltas between the two. None if this machine has no such copy."""
        copies = self._kept.copies()
        if not copies or name in copies:
            return None
        sizes: dict[str, int] = {}

        def read(each: str) -> bytes | None:
            content = self._store.read(self._shard_id, each)
            sizes[each] = len(content or b"")
            return content

        deltas = []
        for version in ChainReader(name, self._shard_id, read):
            if version.base is None or version.is_part:
                return None  # the copies rest on former snapshots
            deltas.append(version)
            if version.base in copies:
                break
        deltas.reverse()
        base = deltas[0].base
        chain = None if base is None else self._kept.adopt(base)
        if chain is None:
            return None
        for delta in deltas:
            chain = chain.followed_by(delta.name, sizes[delta.name], is_delta=True)
        self._kept.follow(deltas, chain)
        return chain

    def _loaded(self, name: str) -> Chain:
        reader = self._read(self._shard_id, name)
        self._kept.load(reader)
        self._kept.keep(reader.chain)
        return reader.chain

    def _read(self, shard: str, name: str) -> ChainReader:
        reads = _ReadAhead(lambda each: self._store.read(shard, each))
        return ChainReader(name, shard, reads.read, reads.begin)

    def encode(self, _row: Row) -> tuple[Any, int]:
        """Never called: user code changes the state, and emits no rows to it."""
        raise TypeError("the state is changed with context.state")

    def boxes(self, name: str) -> Boxes:
        """The rows of the commit that wrote this version. Raises: SinkError; SettingsError if they
        are missing or damaged [K12]."""
        content = self._store.read(self._shard_id, name)
        if content is None:
            raise SettingsError(
                f"the state version {name} is missing, and an output names it: restore it"
            )
        version = decode_version(name, content)
        if version.outbox is None:
            return {}
        return decode_box(version.outbox, self._store.read(self._shard_id, version.outbox))

    def box(self, boxes: Boxes) -> None:
        """The next version also holds these rows of its commit. With an outbox, called before each
        `commit`, and again with the same rows if the commit is repeated."""
        self._boxes = boxes

    def begin(self, at: Cursor) -> Cursor:
        """As `Output.begin`: the cursor of the state is on the row only."""
        self._at = at
        return at

    def add(self, rows: Sequence[Undoable], upto: Cursor) -> None:
        assert not self._is_under_way, "a commit under way is repeated before anything is added"
        self._pending.update(zip(map(_ENTRY, rows), map(_VALUE, rows), strict=True))
        # Sums without a line of Python for each change.
        texts = sum(map(len, map(_KEY, rows))) + sum(map(len, map(_OF, rows)))
        values = sum(map(len, filter(None, map(_VALUE, rows))))
        self._pending_bytes += CHANGE_BYTES * len(rows) + texts + values
        self._kept.note(rows)
        self._at = upto

    @property
    def unsent_bytes(self) -> int:
        return self._pending_bytes

    def commit(self) -> Cursor:
        """As `Output.commit`: `version` is durable and holds every change that was added."""
        assert self._at is not None, "begin() comes first"
        if self._pending or self._boxes or self.must_write:
            self._is_under_way = True
            changes = [(key, of, value) for (key, of), value in self._pending.items()]
            self._kept.apply(changes)
            chain, attempt = self._written(self._at, changes)
            self._kept.keep(chain)
            self._chain, self._attempt = chain, attempt
            self._pending.clear()
            self._pending_bytes, self._is_under_way, self._boxes = 0, False, {}
        return self._at

    def _written(self, at: Cursor, changes: list[Change]) -> tuple[Chain, int]:
        """Write the next version. Returns: its chain, and the number of its last attempt."""
        attempt, chain = self._attempt + 1, self._chain
        outbox = None
        if self._boxes:
            outbox = version_name(self._token, attempt, self._nonce)
            self._store.create(self._shard_id, outbox, encode_box(self._boxes))
            attempt += 1
        name, delta = self._encoded(attempt, at, chain.newest, changes, outbox)
        if chain.takes_delta(len(delta)):
            self._store.create(self._shard_id, name, delta)
            return chain.followed_by(name, len(delta), is_delta=True), attempt
        chain = Chain()
        for number, part in enumerate(parts_of(self._kept.changes())):
            name, content = self._encoded(
                attempt + number, at, chain.newest, part, outbox, is_part=number > 0
            )
            self._store.create(self._shard_id, name, content)
            chain = chain.with_part(name, len(content))
        return chain, attempt + len(chain.names) - 1

    def _encoded(
        self,
        attempt: int,
        at: Cursor,
        base: str | None,
        changes: list[Change],
        outbox: str | None,
        *,
        is_part: bool = False,
    ) -> tuple[str, bytes]:
        name = version_name(self._token, attempt, self._nonce)
        has_timers = any(map(is_reserved, {of for _, of, _ in changes}))
        version = Version(
            name=name,
            shard=self._shard_id,
            cursor=str(at),
            token=self._token,
            attempt=attempt,
            base=base,
            changes=changes,
            format=FORMAT if has_timers else FORMAT_WITHOUT_TIMERS,
            is_part=is_part,
            outbox=outbox,
        )
        return name, encode_version(version)

    def collect(self, retain_s: float) -> int:
        """Delete the versions that no row needs. Returns: their number. Called between two commits,
        once the row names `version` by a checkpoint of ours [K15, K17]. Raises: SinkError; the next
        call goes on."""
        assert not self._is_under_way, "a version is under way"
        if self._chain.newest is None:
            return 0
        names = garbage(self._store.list(self._shard_id), self._chain, self._token, retain_s)
        if names:
            self._store.delete(self._shard_id, names)
        return len(names) + self._collect_ended(retain_s)

    def _collect_ended(self, retain_s: float) -> int:
        """Delete the versions of shards without a row, some shards at each call. A row is deleted
        when its shard has ended and each child's row names a version of its own [K17]. A row that
        an operator deleted is written again, so only a shard without a row at two calls counts."""
        others = [shard for shard in self._store.shards() if shard != self._shard_id]
        others.sort(key=lambda shard: (shard <= self._looked_at, shard))
        shards = others[:_SHARDS_LOOKED_AT]
        self._looked_at = shards[-1] if shards else self._looked_at
        keys = {LeaseKey(qualified(self._stream, shard)): shard for shard in shards}
        rows = self._read_rows(tuple(keys))
        gone = {shard for key, shard in keys.items() if rows.get(key) is None}
        deleted = 0
        for shard in sorted(gone & self._gone):
            names = outlived(self._store.list(shard), retain_s)
            if names:
                self._store.delete(shard, names)
            deleted += len(names)
        self._gone = (self._gone - set(shards)) | gone
        return deleted

    def check(self) -> str:
        return self._store.check()

    def close(self) -> None:
        self._kept.close()
        self._store.close()


class _ReadAhead:
    """Reads the next version in a thread while the version before it is decoded."""

    def __init__(self, read: Callable[[str], bytes | None]) -> None:
        self._read = read
        self._next: tuple[str, Future[bytes | None]] | None = None

    def begin(self, name: str) -> None:
        self._next = (name, Future())
        threading.Thread(target=self._run, args=self._next, name="read-ahead", daemon=True).start()

    def _run(self, name: str, result: Future[bytes | None]) -> None:
        try:
            result.set_result(self._read(name))
        except BaseException as error:  # noqa: BLE001 - the thread that asks raises it
            result.set_exception(error)

    def read(self, name: str) -> bytes | None:
        """Raises: SinkError."""
        ahead, self._next = self._next, None
        if ahead is None or ahead[0] != name:
            return self._read(name)
        return ahead[1].result()
