"""Runs one task of a micro-batch: the ranges of some shards, each through its processor instance.

It knows the pages of the reader, hosted instances, and the instances kept from former tasks.
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
from kclrun.spark.fused.hosting import Hosted, ProcessorJob, ack_batch
from kclrun.spark.fused.tenure import Absent, Ack, Found, Key, ProcessorCache, Stale, begins_at, cut
from kclrun.spark.offsets import ShardRange
from kclrun.spark.positions import Place

Pages = Generator[ReadPage, None, None]
Instances = ProcessorCache[Hosted]

# Belongs to this Python process: Spark gives one worker process one task at a time.
KEPT: Final[Instances] = ProcessorCache()


class ProcessorTask:
    """Runs once. `token` is greater than that of every attempt started before.

    An instance is kept only when the whole task succeeded. If the task fails, its instances are
    dropped without a call, as after a crash.
    """

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
        # The positions of released instances, until another instance continues behind them.
        self._released: dict[str, ExtendedSequenceNumber] = {}
        self._finished: list[tuple[ShardRange, Hosted]] = []
        self._accounts: dict[str, Ack] = {}

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
            yield ack_batch(account)

    def _process(
        self, shard_range: ShardRange, records: Sequence[Record]
    ) -> Iterator[pa.RecordBatch]:
        hosted = self._instance(shard_range)
        hosted.process(records)
        if not hosted.is_released:
            yield from hosted.rows.batches()
            return
        # No other worker takes the shard over: a new instance continues behind this one.
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
