"""One task of a micro-batch: the ranges of some shards, each through its processor instance."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import pyarrow as pa

from kclrun.codec.values import Decode
from kclrun.model.letter import Letter
from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.ports import ClaimStore, LetterStore
from kclrun.spark.executor.reading import ReadPage
from kclrun.spark.keyed.names import BatchState
from kclrun.spark.keyed.shard_state import ShardState
from kclrun.spark.offsets import ShardRange
from kclrun.spark.positions import PositionKind
from kclrun.spark.processors.hosting import ProcessorHost, ProcessorJob, report_batch
from kclrun.spark.processors.range_progress import (
    Absent,
    Found,
    Key,
    ProcessorCache,
    RangeReport,
    Stale,
    begins_at,
    cut,
)

Pages = Generator[ReadPage, None, None]
Instances = ProcessorCache[ProcessorHost]

# Belongs to this Python process: Spark gives one worker process one task at a time.
KEPT: Final[Instances] = ProcessorCache()


class Keyed:
    """The keyed state of a task's shards. `open_store` opens the versions of the lineage."""

    def __init__(
        self, batch: BatchState, max_bytes: int, open_store: Callable[[], ClaimStore]
    ) -> None:
        self.batch = batch
        self._max_bytes = max_bytes
        self._open_store = open_store

    def open(self, shard_range: ShardRange, token: int) -> ShardState:
        """The state where the range begins. Raises: as `ShardState`."""
        store, of = self._open_store(), shard_range.shard_id
        return ShardState(
            store, self.batch, of, shard_range.begin, token=token, max_bytes=self._max_bytes
        )


class ProcessorTask:
    """Runs once. `token` is greater than that of every attempt started before.

    `letters` opens the place of dead letters, at the first letter; `registry` the registry of
    schemas. With `keyed` the shards have keyed state. An instance is kept only when the whole task
    succeeded. If the task fails, its instances are dropped without a call, as after a crash.
    """

    def __init__(
        self,
        job: ProcessorJob,
        token: int,
        *,
        kept: Instances = KEPT,
        letters: Callable[[], LetterStore],
        registry: Callable[[], Decode],
        keyed: Keyed | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job = job
        self._decoding = job.decoding(registry)
        self._open_letters = letters
        self._letters: LetterStore | None = None
        self._keyed = keyed
        self._token = token
        self._kept = kept
        self._wait = wait
        self._hosts: dict[str, ProcessorHost] = {}
        # The positions of released instances, until another instance continues behind them.
        self._released: dict[str, tuple[ExtendedSequenceNumber, ShardState | None]] = {}
        self._finished: list[tuple[ShardRange, ProcessorHost]] = []
        self._accounts: dict[str, RangeReport] = {}

    def run(self, pages: Pages) -> Iterator[pa.RecordBatch]:
        """The emitted rows, in order within a shard, then an account of each range.

        All records of a range are processed, then, if it ends with its shard, `shard_ended` is
        called. Raises: ProcessorError, ProcessorLoadError, and the errors of reading.
        """
        with contextlib.closing(pages):
            for page in pages:
                for batch in cut(page.records, self._job.batch_max):
                    yield from self._process(page.range, batch)
                if page.is_last:
                    yield from self._finish(page.range)
        self._keep_instances()
        for account in self._accounts.values():
            yield report_batch(account)

    def _process(
        self, shard_range: ShardRange, records: Sequence[Record]
    ) -> Iterator[pa.RecordBatch]:
        host = self._instance(shard_range)
        host.process(records)
        if not host.is_released:
            yield from host.rows.batches()
            return
        # No other worker takes the shard over: a new instance continues behind this one.
        host.give_up()
        del self._hosts[shard_range.shard_id]
        self._released[shard_range.shard_id] = (host.position, host.state)
        yield from self._settle(shard_range, host)

    def _finish(self, shard_range: ShardRange) -> Iterator[pa.RecordBatch]:
        ends_shard = shard_range.end.kind is PositionKind.SHARD_END
        if shard_range.shard_id in self._released and not ends_shard:
            self._claim(shard_range, *self._released[shard_range.shard_id])
            return
        host = self._instance(shard_range)
        if ends_shard:
            host.end_shard()
        if self._claim(shard_range, host.done, host.state) and not ends_shard:
            self._finished.append((shard_range, host))
        yield from self._settle(shard_range, host)

    def _claim(
        self, shard_range: ShardRange, done: ExtendedSequenceNumber, state: ShardState | None
    ) -> bool:
        """Make the state at the range's end durable, before the task can succeed. False: the state
        of another attempt counts, and this instance has another version of it."""
        if state is None:
            return True
        assert self._keyed is not None, "a shard has state where the task has"
        return state.claim(shard_range.end, done, self._keyed.batch.run)

    def _settle(self, shard_range: ShardRange, host: ProcessorHost) -> Iterator[pa.RecordBatch]:
        yield from host.rows.batches(all_of_them=True)
        account = host.report()
        former = self._accounts.get(shard_range.shard_id)
        self._accounts[shard_range.shard_id] = former.then(account) if former else account

    def _instance(self, shard_range: ShardRange) -> ProcessorHost:
        shard_id = shard_range.shard_id
        if shard_id in self._released:
            self._hosts[shard_id] = self._host(shard_id, *self._released.pop(shard_id))
        elif shard_id not in self._hosts:
            self._hosts[shard_id] = self._first_instance(shard_range)
        return self._hosts[shard_id]

    def _first_instance(self, shard_range: ShardRange) -> ProcessorHost:
        match self._kept.take(self._key(shard_range.shard_id), shard_range.begin):
            case Found(host) if self._has_state_of(host, shard_range):
                host.go_on(self._token)
                return host
            case Found(host) | Stale(host):
                host.lose()
            case Absent():
                pass
        state = None if self._keyed is None else self._keyed.open(shard_range, self._token)
        return self._host(shard_range.shard_id, begins_at(shard_range.begin), state)

    def _has_state_of(self, host: ProcessorHost, shard_range: ShardRange) -> bool:
        if self._keyed is None or host.state is None:
            return self._keyed is None and host.state is None
        return host.state.is_state_at(self._keyed.batch, shard_range.begin)

    def _host(
        self, shard_id: str, begin: ExtendedSequenceNumber, state: ShardState | None
    ) -> ProcessorHost:
        return ProcessorHost(
            self._job,
            shard_id,
            begin,
            self._token,
            keep_letter=self._keep_letter,
            state=state,
            decoding=self._decoding,
            wait=self._wait,
        )

    def _keep_letter(self, letter: Letter) -> None:
        if self._letters is None:
            self._letters = self._open_letters()
        self._letters.keep(letter)

    def _keep_instances(self) -> None:
        for shard_range, host in self._finished:
            key = self._key(shard_range.shard_id)
            state_bytes = 0 if host.state is None else host.state.live.size_bytes
            for dropped in self._kept.keep(key, shard_range.end, host, state_bytes):
                dropped.lose()

    def _key(self, shard_id: str) -> Key:
        return Key(self._job.run, self._job.application, self._job.stream, shard_id)
