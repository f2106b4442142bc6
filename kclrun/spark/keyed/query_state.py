"""The driver's part of a query's state: takes the number of the run, writes the state that the
query begins with, and removes the versions that no batch reads any more [K21].

Must not know: PySpark, processors.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kclrun.errors import ServiceError, SettingsError, SinkError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import ShardGraph
from kclrun.ports import ClaimStore, VersionStore
from kclrun.spark.keyed.names import (
    ANY_RUN,
    ORIGIN,
    RUNS,
    RUNS_KEPT,
    BatchState,
    Family,
    claim_name,
    decode_claim,
    encode_claim,
    is_claim,
    old_claims,
    old_versions,
    run_name,
    run_of,
)
from kclrun.spark.keyed.shard_state import chain_at, rows_at
from kclrun.spark.offsets import Offset
from kclrun.spark.planning.beginnings import position_of_row
from kclrun.spark.positions import SHARD_END, Position
from kclrun.state.chain import Chain
from kclrun.state.kept import KeptEntries, MemoryEntries
from kclrun.state.stores.state_versions import StateVersions

_log = logging.getLogger(__name__)
# Shards whose state is copied at the same time: as many as a client has connections.
_SHARDS_AT_ONCE: Final = 8
# So many batches can be read again by hand: Spark's default of
# spark.sql.streaming.minBatchesToRetain.
BATCHES_KEPT: Final = 100
# So many shards are looked at after each batch, with a listing each: a thousand in 500 batches.
_SHARDS_LOOKED_AT: Final = 2
# Starts at the same instant take the next numbers one after the other.
_CLAIMS_MAX: Final = 100

OpenStore = Callable[[str], ClaimStore]


class FleetState:
    """The state that a fleet left: the rows of its lease table by shard, and its store."""

    def __init__(self, rows: Mapping[str, Lease], store: VersionStore) -> None:
        self._rows = rows
        self._store = store

    def entries(self, shard_id: str, at: Position, *, may_begin_empty: bool) -> KeptEntries | None:
        """The entries with which a lease of the shard would begin at this position; None if there
        are none. Raises: SinkError; SettingsError where they are not those of the position."""
        row = self._rows.get(shard_id)
        if row is None:
            return None
        if not row.checkpoint.is_sentinel and position_of_row(row, 0) != at:
            raise SettingsError(
                f"the lease of {shard_id} is at {row.checkpoint}, and the query begins at {at}: its"
                " fleet has gone on meanwhile\nStop it, and begin with a new checkpoint"
            )
        if row.state_version is not None and row.is_moved_past_outputs:
            raise SettingsError(
                f"the lease of {shard_id} was moved to {row.checkpoint} by another program, and its"
                " row names the state of another position"
            )
        if row.is_ended and row.state_version is None and not may_begin_empty:
            raise SettingsError(
                f"{shard_id} was read to its end without state: to begin with an empty one for its"
                " children, set state.begin: empty"
            )
        kept = MemoryEntries()
        versions = StateVersions(
            self._store,
            shard_id,
            row.counter,
            secrets.token_hex(4),
            kept,
            may_begin_empty=may_begin_empty,
        )
        versions.restore(row, self._parents, row.hash_range)
        is_empty = next(kept.changes(), None) is None
        return None if is_empty else kept

    def _parents(self, keys: Sequence[LeaseKey]) -> Mapping[LeaseKey, Lease | None]:
        return {key: self._rows.get(key) for key in keys}


def entries_at(store: VersionStore, shard_id: str, at: Position, family: Family) -> KeptEntries:
    """The entries of a stopped query's shard where its last batch ended, or where its first range
    would begin. Raises: SinkError; SettingsError where no claim names them."""
    row, parents = rows_at(store, ANY_RUN, shard_id, at, family)
    kept = MemoryEntries()
    versions = StateVersions(store, shard_id, row.counter, secrets.token_hex(4), kept)
    versions.restore(row, lambda _: parents, family.hash_range)
    return kept


def written(kept: KeptEntries, store: VersionStore, shard_id: str, token: int, at: Cursor) -> Chain:
    """The entries as a snapshot in a store, durable. Raises: SinkError."""
    versions = StateVersions(store, shard_id, token, secrets.token_hex(4), kept)
    versions.begin(at)
    versions.commit()
    return versions.chain


class QueryState:
    """The state of one query, in the process that plans for it; one thread at a time.

    `open_store` opens the versions of a lineage; `listed` lists the stream's shards; `fleet` reads
    the state to begin with, if the query begins at the leases of a fleet. `token` is the fencing
    token of the run's start. Raises: SinkError; SettingsError where the state is not that of the
    positions.
    """

    def __init__(
        self,
        open_store: OpenStore,
        listed: Callable[[], ShardGraph],
        fleet: Callable[[], FleetState] | None,
        *,
        token: int,
        retain_s: float,
        may_begin_empty: bool,
    ) -> None:
        self._open_store = open_store
        self._listed = listed
        self._fleet = fleet
        self._token = token
        self._retain_s = retain_s
        self._may_begin_empty = may_begin_empty
        self._graph = ShardGraph([])
        self._stores: dict[str, ClaimStore] = {}
        self._runs: dict[str, int] = {}
        self._committed: deque[Offset] = deque(maxlen=BATCHES_KEPT)
        self._looked_at = ""

    def batch(self, lineage: str, shard_ids: Collection[str]) -> BatchState:
        """The facts for the tasks of a batch; the first call takes the number of the run."""
        families = {shard_id: self._family(shard_id) for shard_id in shard_ids}
        return BatchState(lineage, self._run(lineage), families)

    def begin(self, lineage: str, start: Offset, end: Offset) -> None:
        """Make the state with which the query begins durable, before its first batch is read.

        Called again if that batch was planned and not committed: existing claims stay.
        """
        origin = self._origin(start, end)
        store = self._store(lineage)
        fleet = None if self._fleet is None else self._fleet()

        def put(shard_id: str) -> None:
            at = origin[shard_id]
            if chain_at(store, shard_id, at, ORIGIN) is not None:
                return
            kept = None
            if fleet is not None:
                kept = fleet.entries(shard_id, at, may_begin_empty=self._may_begin_empty)
            chain = Chain()
            if kept is not None:
                chain = written(kept, store, shard_id, self._token, Cursor(TRIM_HORIZON))
            store.claim(shard_id, claim_name(at, ORIGIN), encode_claim(chain))

        with ThreadPoolExecutor(_SHARDS_AT_ONCE) as pool:
            list(pool.map(put, sorted(origin)))

    def _origin(self, start: Offset, end: Offset) -> dict[str, Position]:
        """Where the query's first batch begins, for each shard that no ended parent precedes. Spark
        may have requested the start again, with another result: the batch's end decides."""
        begun = {
            shard_id: end.began.get(shard_id, at)
            for shard_id, at in start.shards.items()
            if at.is_exact or shard_id in end.shards
        }
        for shard_id, at in end.shards.items():
            parents = self._family(shard_id).parents
            if not any(start.shards.get(parent) == SHARD_END for parent in parents):
                exact = start.shards.get(shard_id)
                known = exact if exact is not None and exact.is_exact else at
                begun[shard_id] = end.began.get(shard_id, known)
        return begun

    def committed(self, lineage: str, end: Offset) -> None:
        """A batch that ends there is committed: remove from some shards the claims and versions
        that no batch reads again. After an error they are removed later."""
        self._committed.append(end)
        if len(self._committed) < BATCHES_KEPT:
            return
        kept: dict[str, set[Position]] = {}
        for offset in self._committed:
            for shard_id, at in offset.shards.items():
                kept.setdefault(shard_id, set()).add(at)
        try:
            self._collect(self._store(lineage), kept)
        except (SinkError, ServiceError) as error:
            _log.warning("old versions of the state stay for now: %s", error)

    def _collect(self, store: ClaimStore, kept: Mapping[str, set[Position]]) -> None:
        shards = sorted(
            set(store.shards()) - {RUNS},
            key=lambda shard_id: (shard_id <= self._looked_at, shard_id),
        )
        for shard_id in shards[:_SHARDS_LOOKED_AT]:
            self._looked_at = shard_id
            listed = list(store.list(shard_id))
            positions = {*kept.get(shard_id, ())}
            if positions or not self._is_passed(store, shard_id):
                positions.add(SHARD_END)  # its children begin with it
            old = old_claims(listed, positions, self._retain_s)
            if old:
                store.delete(shard_id, old)
            left = {name for name, _ in listed if is_claim(name)} - set(old)
            chains = [self._chain(store, shard_id, name) for name in sorted(left)]
            versions = old_versions(listed, chains, self._retain_s)
            if versions:
                store.delete(shard_id, versions)

    def _is_passed(self, store: ClaimStore, shard_id: str) -> bool:
        """Whether every listed child of the shard has a claim of its own [K17]; the shard itself
        may have left the listing."""
        children = self._graph.children_naming(shard_id)
        return bool(children) and all(
            any(is_claim(name) for name, _ in store.list(child)) for child in children
        )

    @staticmethod
    def _chain(store: ClaimStore, shard_id: str, name: str) -> Chain:
        content = store.read(shard_id, name)
        return Chain() if content is None else decode_claim(name, content)

    def _family(self, shard_id: str) -> Family:
        if shard_id not in self._graph:
            self._graph = self._listed()
        if shard_id not in self._graph:
            return Family(None)  # expired: its range is refused when it is read
        shard = self._graph[shard_id]
        return Family(shard.hash_range, tuple(shard.parents))

    def _store(self, lineage: str) -> ClaimStore:
        if lineage not in self._stores:
            self._stores[lineage] = self._open_store(lineage)
        return self._stores[lineage]

    def _run(self, lineage: str) -> int:
        """The number of this start, greater than the number of every start before."""
        if lineage in self._runs:
            return self._runs[lineage]
        store, ours = self._store(lineage), secrets.token_bytes(16)
        store.check()  # that it refuses to create a name twice, for instance
        found = sorted(
            number for name, _ in store.list(RUNS) if (number := run_of(name)) is not None
        )
        first = (found[-1] if found else ORIGIN) + 1
        for run in range(first, first + _CLAIMS_MAX):
            if store.claim(RUNS, run_name(run), ours) == ours:
                self._runs[lineage] = run
                if old := [run_name(number) for number in found if number < run - RUNS_KEPT]:
                    store.delete(RUNS, old)
                return run
        raise SinkError(f"{_CLAIMS_MAX} starts of this query took a number at the same time")
