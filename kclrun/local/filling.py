"""Fills the embedded stream from user code and reshards it meanwhile, in a process of its own.

Started by exec (`python -m kclrun.local.filling`) with one JSON line on standard input, the
`FillOrder`. Writes JSON lines: a `Filling` repeatedly and the `FillReport` at the end. It ends when
its standard input ends, because then its run has ended. Messages go to standard error, without
payloads.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec

from kclrun.aws.kinesis import WireStreamAdmin, create_stream
from kclrun.aws.operations import Operation
from kclrun.aws.put_records import ShardPacker, batches, send_all
from kclrun.aws.wire import WireClient
from kclrun.errors import KclrunError, ProcessorLoadError, SettingsError, Unavailable
from kclrun.loading import load_function
from kclrun.model.quotas import PUT_RECORDS_MAX
from kclrun.model.record import PutEntry
from kclrun.model.shard import HashRange, Shard
from kclrun.model.wire import WireCredentials, WireEndpoint

# The embedded AWS checks no signature unless it was started with credentials.
LOCAL_CREDENTIALS: Final = WireCredentials("embedded", "embedded")
_SPLIT: Final = Operation("kinesis", "SplitShard", is_write=True)
_MERGE: Final = Operation("kinesis", "MergeShards", is_write=True)
# The embedded stream reshards within milliseconds. After a minute it never will.
_ACTIVE_MAX_S: Final = 60.0
_ACTIVE_POLL_S: Final = 0.01
# Entries held before they are sent: one request.
_HELD_MAX: Final = PUT_RECORDS_MAX
# With a rate, held entries are sent this often.
_FLUSH_S: Final = 0.1
# The display draws twice a second.
_REPORT_EVERY_S: Final = 0.5

_encode: Final = msgspec.json.Encoder().encode


class Reshard(msgspec.Struct, frozen=True):
    """After this share of the records: split open shard `split`, or merge `merge` with its next."""

    after: float
    split: int | None = None
    merge: int | None = None


class FillOrder(msgspec.Struct, frozen=True):
    """The source and the target of a fill. `source` is `module:function`, searched in `paths`."""

    endpoint: WireEndpoint
    stream: str
    source: str
    paths: tuple[str, ...]
    aggregate: float = 0.0
    rate: int | None = None
    reshard: tuple[Reshard, ...] = ()


class Filling(msgspec.Struct, frozen=True, tag="filling"):
    """The progress: `done` user records are put. `total` is None if the source was not counted
    before. It is counted only for reshards, because it may be endless."""

    done: int
    total: int | None = None


class FillReport(msgspec.Struct, frozen=True, tag="report"):
    """The counts of user records, of the Kinesis records that hold them, and of reshards."""

    user_records: int
    records: int
    reshards: int


class Filler:
    """Puts all records of a source and reshards at the given shares of them.

    The order within a shard is kept. A record before a reshard is put before the reshard.
    """

    def __init__(
        self, order: FillOrder, report: Callable[[Filling], None] = lambda _: None
    ) -> None:
        self._order = order
        self._report = report
        self._reported_at = time.monotonic()
        self._total: int | None = None
        self._client = WireClient(order.endpoint, lambda: LOCAL_CREDENTIALS, service="kinesis")
        self._admin = WireStreamAdmin(self._client, order.stream)
        self._records = self._user_records = self._reshards = 0

    def fill(self, source: Callable[[], Iterable[Any]]) -> FillReport:
        """Put all records. With reshards, `source` is called twice: first to count its records.

        A timedelta among its pairs is a pause of the producer: the records before it are sent,
        then the filler sleeps. Raises: SettingsError for anything else; a ServiceError leaf.
        """
        steps = self._steps(source)
        packer = self._packer()
        pending: list[PutEntry] = []
        started = flushed = time.monotonic()
        for number, entry in enumerate(_entries(source())):
            while steps and number >= steps[0][0]:
                self._send([*pending, *packer.flush()])
                pending = []
                self._reshard(steps.pop(0)[1])
                packer = self._packer()
            if isinstance(entry, timedelta):
                self._send([*pending, *packer.flush()])
                pending = []
                time.sleep(entry.total_seconds())
                continue
            pending.extend(packer.add(entry))
            if self._order.rate is not None and time.monotonic() - flushed >= _FLUSH_S:
                pending.extend(packer.flush())
            if len(pending) >= _HELD_MAX or (pending and self._order.rate is not None):
                self._send(pending)
                pending, flushed = [], time.monotonic()
            self._keep_pace(started, number + 1)
        self._send([*pending, *packer.flush()])
        for _, step in steps:
            self._reshard(step)
        return FillReport(self._user_records, self._records, self._reshards)

    def _steps(self, source: Callable[[], Iterable[Any]]) -> list[tuple[int, Reshard]]:
        """The reshards, each with the number of items of the source before it, pauses included."""
        if not self._order.reshard:
            return []
        items = records = 0
        for item in source():
            items += 1
            records += not isinstance(item, timedelta)
        self._total = records
        return [(round(step.after * items), step) for step in self._order.reshard]

    def _packer(self) -> ShardPacker:
        return ShardPacker(self._admin.list_shards(), self._order.aggregate)

    def _send(self, entries: Iterable[PutEntry]) -> None:
        for batch in batches(entries):
            send_all(self._client, self._order.stream, batch)
            self._records += len(batch)
            self._user_records += sum(entry.user_records for entry in batch)
        if time.monotonic() - self._reported_at >= _REPORT_EVERY_S:
            self._reported_at = time.monotonic()
            self._report(Filling(self._user_records, self._total))

    def _keep_pace(self, started: float, done: int) -> None:
        if self._order.rate is not None:
            time.sleep(max(0.0, started + done / self._order.rate - time.monotonic()))

    def _reshard(self, step: Reshard) -> None:
        """Split or merge, and wait until the stream is active again. Raises: SettingsError."""
        shards = sorted(
            (shard for shard in self._admin.list_shards() if shard.is_open),
            key=lambda shard: shard.hash_range.start,
        )
        if step.split is not None:
            self._split(_nth(shards, step.split, "split", needs=1))
        elif step.merge is not None:
            first = _nth(shards, step.merge, "merge", needs=2)
            self._merge(first, shards[step.merge + 1])
        wait_until_active(self._admin)
        self._reshards += 1

    def _split(self, shard: Shard) -> None:
        request = {
            "StreamName": self._order.stream,
            "ShardToSplit": shard.shard_id,
            "NewStartingHashKey": str(middle(shard.hash_range)),
        }
        self._client.call(_SPLIT, _encode(request))

    def _merge(self, first: Shard, second: Shard) -> None:
        request = {
            "StreamName": self._order.stream,
            "ShardToMerge": first.shard_id,
            "AdjacentShardToMerge": second.shard_id,
        }
        self._client.call(_MERGE, _encode(request))


def middle(hash_range: HashRange) -> int:
    """The first hash key of the upper half of a range."""
    return (hash_range.start + hash_range.end + 1) // 2


def make_stream(
    endpoint: WireEndpoint, name: str, shards: int, credentials: WireCredentials = LOCAL_CREDENTIALS
) -> bool:
    """Create a stream on an emulator and wait until it is active; False if it exists already.

    Raises: a ServiceError leaf; Unavailable if it is not active within a minute.
    """
    client = WireClient(endpoint, lambda: credentials, service="kinesis")
    try:
        is_new = create_stream(client, name, shards)
        wait_until_active(WireStreamAdmin(client, name))
    finally:
        client.close()
    return is_new


def wait_until_active(admin: WireStreamAdmin) -> None:
    """Poll until the stream is ACTIVE. Raises: Unavailable after a minute."""
    deadline = time.monotonic() + _ACTIVE_MAX_S
    while (summary := admin.summary()).status != "ACTIVE":
        if time.monotonic() >= deadline:
            raise Unavailable(f"stream {summary.name} is still {summary.status}")
        time.sleep(_ACTIVE_POLL_S)


def _nth(shards: list[Shard], index: int, what: str, *, needs: int) -> Shard:
    if index + needs > len(shards):
        raise SettingsError(
            f"embedded.reshard: cannot {what} open shard {index}: there are {len(shards)},"
            " counted from 0"
        )
    return shards[index]


def _entries(source: Iterable[Any]) -> Iterator[PutEntry | timedelta]:
    """The pairs as entries, and the pauses. Raises: SettingsError for anything else."""
    for number, item in enumerate(source, 1):
        match item:
            case (str() as key, bytes() as data):
                yield PutEntry(data, key)
            case timedelta():
                yield item
            case _:
                raise SettingsError(
                    f"embedded.fill.source: item {number} is not a (key: str, data: bytes) pair"
                    f" but a {type(item).__name__}"
                )


def _end_with_the_run() -> None:
    """Exit when standard input ends: then the run that started this process has ended."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(os.EX_TEMPFAIL)


def _main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=FillOrder)
    threading.Thread(target=_end_with_the_run, name="run-watch", daemon=True).start()
    try:
        paths = [Path(path) for path in order.paths]
        source = load_function("embedded.fill.source", order.source, paths)
        report = Filler(order, _write).fill(source)
    except (SettingsError, ProcessorLoadError) as error:
        sys.stderr.write(f"The fill stopped: {error}\n")
        return os.EX_CONFIG
    except KclrunError as error:
        sys.stderr.write(f"The fill stopped: {error}\n")
        return os.EX_UNAVAILABLE
    except Exception:  # noqa: BLE001 - the source is user code: its traceback is shown
        traceback.print_exc()
        sys.stderr.write(f"The fill stopped: {order.source} raised\n")
        return os.EX_CONFIG
    _write(report)
    return os.EX_OK


def _write(line: Filling | FillReport) -> None:
    sys.stdout.buffer.write(_encode(line) + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(_main())
