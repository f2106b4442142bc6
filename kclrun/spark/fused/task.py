"""One task of a micro-batch: the ranges of some shards, each through its processor instance.

Knows: pages as the reader gives them, hosted instances, those kept from former tasks. Rule: an
instance is kept only when the whole task came through; whatever a task that fails had in hand is
gone without a call, as after a crash. Next: `source.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final

import pyarrow as pa

from kclrun.model.record import Record
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.spark.executor.reading import ReadPage
from kclrun.spark.fused.cache import Absent, Found, Key, ProcessorCache, Stale
from kclrun.spark.fused.emitting import ack_batch
from kclrun.spark.fused.hosting import Hosted, ProcessorJob
from kclrun.spark.fused.tenure import Ack, begins_at, cut
from kclrun.spark.positions import Place
from kclrun.spark.ranges import ShardRange

__all__ = ["KEPT", "Instances", "Pages", "ProcessorTask"]

Pages = Generator[ReadPage, None, None]
Instances = ProcessorCache[Hosted]

# Of this Python process: Spark gives one worker process one task at a time.
KEPT: Final[Instances] = ProcessorCache()


class ProcessorTask:
    """Runs once. `token` is greater than that of every attempt started before."""

    def __init__(
        self,
        job: ProcessorJob,
        token: int,
        *,
        kept: Instances = KEPT,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._job = job
        self._token = token
        self._kept = kept
        self._wait = wait
        self._hosted: dict[str, Hosted] = {}
        # Where instances stood that asked to be released, until another goes on behind them.
        self._released: dict[str, ExtendedSequenceNumber] = {}
        self._finished: list[tuple[ShardRange, Hosted]] = []
        self._accounts: dict[str, Ack] = {}

    def run(self, pages: Pages) -> Iterator[pa.RecordBatch]:
        """The emitted rows, in order within a shard, then an account of each range.

        All records of a range are processed, then, if it ends with its shard, `shard_ended` is
        called. Raises: ProcessorError, ProcessorLoadError, and what reading raises.
        """
        with contextlib.closing(pages):
            for page in pages:
                for batch in cut(page.records, self._job.batch_max):
                    yield from self._process(page.range, batch)
                if page.is_last:
                    yield from self._finish(page.range)
        self._keep_instances()
        for account in self._accounts.values():
            yield ack_batch(account)

    def _process(
        self, shard_range: ShardRange, records: Sequence[Record]
    ) -> Iterator[pa.RecordBatch]:
        hosted = self._instance(shard_range)
        hosted.process(records)
        if not hosted.is_released:
            yield from hosted.rows.batches()
            return
        # There is nobody else to take the shard over: a new instance goes on behind this one.
        hosted.give_up()
        del self._hosted[shard_range.shard_id]
        self._released[shard_range.shard_id] = hosted.position
        yield from self._settle(shard_range, hosted)

    def _finish(self, shard_range: ShardRange) -> Iterator[pa.RecordBatch]:
        ends_shard = shard_range.end.place is Place.SHARD_END
        if shard_range.shard_id in self._released and not ends_shard:
            return
        hosted = self._instance(shard_range)
        if ends_shard:
            hosted.end_shard()
        else:
            self._finished.append((shard_range, hosted))
        yield from self._settle(shard_range, hosted)

    def _settle(self, shard_range: ShardRange, hosted: Hosted) -> Iterator[pa.RecordBatch]:
        yield from hosted.rows.batches(all_of_them=True)
        account = hosted.ack(shard_range)
        former = self._accounts.get(shard_range.shard_id)
        self._accounts[shard_range.shard_id] = former.then(account) if former else account

    def _instance(self, shard_range: ShardRange) -> Hosted:
        shard_id = shard_range.shard_id
        if shard_id in self._released:
            self._hosted[shard_id] = self._host(shard_id, self._released.pop(shard_id))
        elif shard_id not in self._hosted:
            self._hosted[shard_id] = self._first_instance(shard_range)
        return self._hosted[shard_id]

    def _first_instance(self, shard_range: ShardRange) -> Hosted:
        match self._kept.take(self._key(shard_range.shard_id), shard_range.begin):
            case Found(hosted):
                hosted.go_on(self._token)
                return hosted
            case Stale(hosted):
                hosted.lose()
            case Absent():
                pass
        return self._host(shard_range.shard_id, begins_at(shard_range.begin))

    def _host(self, shard_id: str, begin: ExtendedSequenceNumber) -> Hosted:
        return Hosted(self._job, shard_id, begin, self._token, wait=self._wait)

    def _keep_instances(self) -> None:
        for shard_range, hosted in self._finished:
            for dropped in self._kept.keep(
                self._key(shard_range.shard_id), shard_range.end, hosted
            ):
                dropped.lose()

    def _key(self, shard_id: str) -> Key:
        return Key(self._job.run, self._job.application, self._job.stream, shard_id)
