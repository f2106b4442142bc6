"""The state of one shard in a task: read where its range begins, changed by user code, and claimed
where the range ends [K21].

Must not know: PySpark, rows, which attempt of a task Spark uses.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from kclrun.errors import LimitExceeded, SettingsError, SinkError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import CHANGED_OUTSIDE, Cursor, StoredCursors
from kclrun.model.record import Record
from kclrun.model.sequence import SHARD_END as ENDED
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.state import OF_PARENTS
from kclrun.ports import ClaimStore, VersionStore
from kclrun.spark.keyed.names import (
    BatchState,
    Family,
    claim_name,
    decode_claim,
    encode_claim,
    greatest,
)
from kclrun.spark.positions import SHARD_END, Position
from kclrun.state.chain import Chain
from kclrun.state.keyed import Journal, LiveEntries, MakeChange, Undoable, held_bytes
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.timers import Clock

# The limit of the fleet: the changes of a call wait in memory until it returns.
_CALL_BYTES_MAX: Final = 256 * 2**20
# A version stores its position at its end.
_UNKNOWN: Final = Cursor(TRIM_HORIZON)


def chain_at(store: VersionStore, shard_id: str, at: Position, run: int) -> Chain | None:
    """The versions of the shard's state at a position; None if no run has claimed it.

    Raises: SinkError; SettingsError for a claim that is damaged.
    """
    name = claim_name(at, run)  # as a rule, the batch before is of the same run
    content = store.read(shard_id, name)
    if content is None:
        found = greatest((listed_name for listed_name, _ in store.list(shard_id)), at, run)
        if found is None:
            return None
        name, content = found, store.read(shard_id, found)
    return None if content is None else decode_claim(name, content)


class _Entries(LiveEntries):
    """The entries of the fleet, without timers of the clock: the records do not decide when such a
    timer fires, so a task that is tried again would have other rows."""

    def set_timer(
        self,
        key: Record | str,
        at: float | datetime,
        name: str = "",
        clock: Clock = "event",
        *,
        journal: Journal | None = None,
    ) -> None:
        if clock != "event":
            raise SettingsError(f"timers of the {clock} clock are for engine: fleet")
        super().set_timer(key, at, name, clock, journal=journal)


class ShardState:
    """Begun by one task; a later task uses it only if `is_state_at` the beginning of its range.
    `token` makes the names of its versions unique.

    Around each call of user code: `begin_batch`, then `end_batch` or `take_back_batch`; `cover`
    when user code requests a checkpoint. `take_back_batch` also undoes the changes in the values
    that user code reads. Raises: SinkError; SettingsError where a version is missing or damaged,
    and where no claim names the state.
    """

    def __init__(
        self,
        store: ClaimStore,
        batch: BatchState,
        shard_id: str,
        begin: Position,
        *,
        token: int,
        max_bytes: int,
    ) -> None:
        self._store = store
        self._shard_id = shard_id
        # The changes that may still be taken back. Settled changes wait by key in `_versions`, so
        # the memory of a range grows with its keys, not with its records.
        self._changes: list[Undoable] = []
        self._covered = 0  # so many of the changes are not taken back
        self._call_bytes = 0
        self._is_open = False
        self._lock = threading.RLock()
        family = batch.families.get(shard_id, Family(None))
        self._versions = StateVersions(store, shard_id, token, secrets.token_hex(4))
        row, parents = rows_at(store, batch.run, shard_id, begin, family)
        values = self._versions.restore(row, lambda _: parents, family.hash_range)
        self._versions.begin(_UNKNOWN)
        self.live = _Entries(values, self._change, family.hash_range, max_bytes, threading.Lock())

    def is_state_at(self, batch: BatchState, begin: Position) -> bool:
        """Whether a batch that begins there would read exactly this [K14]."""
        chain = chain_at(self._store, self._shard_id, begin, batch.run)
        return chain is not None and chain.newest == self._versions.version

    def claim(self, end: Position, done: ExtendedSequenceNumber, run: int) -> bool:
        """Make the state durable, for the next batch to read. False: another attempt at the range
        was first, and the next batch reads the state of that attempt."""
        with self._lock:
            assert not self._changes, "no call of user code runs"
            self._versions.add((), Cursor(done))
        self._versions.commit()
        ours = encode_claim(self._versions.chain)
        return self._store.claim(self._shard_id, claim_name(end, run), ours) == ours

    def begin_batch(self) -> None:
        with self._lock:
            self._is_open, self._call_bytes = True, 0

    def end_batch(self, _: ExtendedSequenceNumber | None = None, /) -> None:
        with self._lock:
            self._is_open = False
            self._settle()

    def take_back_batch(self, _: ExtendedSequenceNumber | None = None, /) -> None:
        with self._lock:
            self._is_open = False
            self.live.undo_all(self._changes[self._covered :])
            del self._changes[self._covered :]
            self._settle()

    def cover(self) -> None:
        """User code requests a checkpoint: the changes until now stay, also if the call raises."""
        with self._lock:
            self._covered = len(self._changes)

    def _settle(self) -> None:
        self._versions.add(self._changes, _UNKNOWN)
        self._changes.clear()
        self._covered = 0

    def place(self, changes: Sequence[Undoable]) -> None:
        """The changes of records that are done; `live` has them already."""
        with self._lock:
            self._versions.add(changes, _UNKNOWN)

    def _change(self, change: MakeChange, key: str, name: str, value: bytes | None) -> None:
        """Implements `state.keyed.Journal`."""
        with self._lock:
            if not self._is_open:
                raise SinkError(CHANGED_OUTSIDE)
            if self._call_bytes + held_bytes(key, name, value, None) > _CALL_BYTES_MAX:
                raise LimitExceeded(f"one call changed more than {_CALL_BYTES_MAX} bytes of state")
            made = change(key, name, value)
            if made is not None:
                self._call_bytes += held_bytes(*made)
                self._changes.append(made)


def rows_at(
    store: VersionStore, run: int, shard_id: str, begin: Position, family: Family
) -> tuple[Lease, Mapping[LeaseKey, Lease | None]]:
    """The row of a lease that begins there, and the rows of its parents: so `StateVersions` decides
    as on the fleet with which state the shard begins. Raises: as `ShardState`."""
    key = LeaseKey(shard_id)
    chain = chain_at(store, shard_id, begin, run)
    if chain is not None:
        return Lease(key=key, checkpoint=TRIM_HORIZON, state_version=chain.newest), {}
    if not family.parents:
        raise SettingsError(
            f"no version of the state of {shard_id} at {begin} is in state.store: restore it, or"
            " begin a new query (spark.checkpoint) with the state of its lease table"
        )
    parents: dict[LeaseKey, Lease | None] = {}
    for parent in family.parents:
        ended = chain_at(store, parent, SHARD_END, run)
        if ended is None:
            raise SettingsError(
                f"no version of the state of {parent} at its end is in state.store, and {shard_id}"
                " begins with it: restore it"
            )
        if ended.newest is not None:
            parents[LeaseKey(parent)] = Lease(
                key=LeaseKey(parent),
                checkpoint=ENDED,
                state_version=ended.newest,
                outputs=StoredCursors(ENDED, ()),
            )
    row = Lease(
        key=key,
        checkpoint=TRIM_HORIZON,
        parents=frozenset(parents),
        state_version=OF_PARENTS if parents else None,
    )
    return row, parents
