"""Row `state`: what keyed state costs: changes, commits, and reading it when a lease begins."""

import itertools
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec

from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.measuring import timed
from bench.servers import CREDENTIALS, endpoint_at, stock_client
from kclrun.destinations import open_kept, open_versions
from kclrun.ipc.board import boottime
from kclrun.lease.commands import CommitOutputs
from kclrun.local.server import start_embedded
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import StateDestination
from kclrun.outputs.sending import Outputs
from kclrun.ports import VersionStore
from kclrun.state.keyed import LiveEntries, MakeChange, State
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.versions import Version, encode_version, version_name
from kclrun.worker.opening import keyed
from tests.support.outputs_host import FakeHost

_ROW: Final = "state"
_KEYS: Final = 1_000_000
_VALUE: Final = b"v" * 98  # with its header of two bytes, 100 are stored
_BATCH: Final = 10_000
_BATCHES: Final = 50
_SHARD: Final = "shardId-000000000000"
_EVERYTHING: Final = HashRange(0, HASH_KEY_MAX)
_BUCKET: Final = "bench"
_FOLDER: Final = "bench/bench"
# More than `state.memory` has.
_LARGE: Final = 800_000
_SEED: Final = 15
_numbers = itertools.count(1)


def state(rounds: int) -> list[Figure]:
    """The state of a lease with a million keys of 100 bytes, by the path of its process.

    Changes: 50 batches of 10,000 updates of random keys, each by `context.state`, and one commit
    into a folder; the CPU is that of all threads, the version's included. By hand: the same values,
    encoded, into a dict of dicts, and one file of those that changed; nothing is checked, nor can
    be taken back. A commit: 10,000 changed
    keys; all of its CPU is an upper bound of what it takes from the thread of user code. Restoring:
    a snapshot from the embedded S3, whose server is another process, until user code could begin.
    On disk: a process of its own fills a state beyond its memory, updates random keys of all and
    then of a fiftieth, and ends; its anonymous memory beyond that of the start is looked at after
    each batch. Another lease of it begins with the copy.
    """
    keys = [f"user-{number:07}" for number in range(_KEYS)]
    with tempfile.TemporaryDirectory() as folder, _bucket() as in_s3:
        place = StateDestination(path=folder)
        in_folder = open_versions(place, _FOLDER, *_NOWHERE)
        size = sum(_snapshot(store, keys) for store in (in_folder, in_s3)) / 2
        lease = _Lease(place, _row())
        by_hand = _ByHand(keys, Path(folder) / "by-hand")
        changes, plain = [], []
        for _ in range(rounds):
            changes.append(timed(partial(lease.change, keys)))
            plain.append(timed(by_hand.change))
        commits = [lease.timed_commit(keys) for _ in range(rounds * 5)]
        del lease, by_hand
        restores = [timed(lambda: _restored(in_s3, size)) for _ in range(rounds)]
    on_disk = [_on_disk() for _ in range(max(1, rounds // 4))]
    return [
        figure(
            *(_ROW, "updates of 1 M keys x 100 B, committed", "k/s/core"),
            [each.per_cpu_s / 1000 for each in changes],
            target=Target(at_least=150.0),
        ),
        figure(
            *(_ROW, "updates ÷ by hand", "x"),
            paired_ratios([each.per_cpu_s for each in changes], [e.per_cpu_s for e in plain]),
        ),
        figure(
            *(_ROW, "a commit of 10,000 changed keys, CPU of all threads", "ms"),
            [1000 * each.cpu_s for each in commits],
            target=Target(at_most=60.0),
        ),
        figure(
            *(_ROW, "restoring from S3 (embedded)", "MB/s/core"),
            [each.per_cpu_s / 1e6 for each in restores],
            target=Target(at_least=50.0),
        ),
        figure(
            *(_ROW, "restoring from S3 (embedded), with the server's time", "MB/s"),
            [each.per_wall_s / 1e6 for each in restores],
        ),
        figure(
            *(_ROW, f"memory of {_LARGE} keys x 100 B ÷ state.memory of 64 MiB", "x"),
            [each.memory_share for each in on_disk],
            target=Target(at_most=1.2),
        ),
        figure(
            *(_ROW, "their updates, a fiftieth of the keys", "k/s/core"),
            [each.updates_per_cpu_s / 1000 for each in on_disk],
        ),
        figure(
            *(_ROW, "beginning with their local copy", "s"),
            [each.warm_s for each in on_disk],
            target=Target(at_most=1.0),
        ),
    ]


_NOWHERE: Final = (endpoint_at("http://127.0.0.1:9"), lambda: CREDENTIALS)


@contextmanager
def _bucket() -> Iterator[VersionStore]:
    with start_embedded() as embedded:
        url = embedded.endpoint
        stock_client("s3", url).create_bucket(Bucket=_BUCKET)
        place = StateDestination(s3=f"s3://{_BUCKET}/state", endpoint_url=url)
        yield open_versions(place, _FOLDER, endpoint_at(url), lambda: CREDENTIALS)


def _row() -> Lease:
    name = version_name(1, 1, "0badcafe")
    return Lease(key=LeaseKey(_SHARD), checkpoint=_at(0), counter=2, state_version=name)


def _at(number: int) -> ExtendedSequenceNumber:
    return ExtendedSequenceNumber(str(10**20 + number))


def _snapshot(store: VersionStore, keys: list[str]) -> float:
    """Write the version that `_row` names; its bytes."""
    value = msgspec.msgpack.encode(_VALUE)
    version = Version(
        name=version_name(1, 1, "0badcafe"),
        shard=_SHARD,
        cursor=str(_at(0)),
        token=1,
        attempt=1,
        base=None,
        changes=[(key, "n", value) for key in keys],
    )
    content = encode_version(version)
    store.create(_SHARD, version.name, content)
    return float(len(content))


def _restored(store: VersionStore, size: float) -> float:
    """Read the state as a starting lease does, until user code could begin; its bytes."""
    versions = StateVersions(store, _SHARD, 2, f"{next(_numbers):08x}")
    entries = versions.restore(_row(), lambda keys: {}, _EVERYTHING)
    LiveEntries(entries, _no_journal, _EVERYTHING, 2**30)
    return size


def _no_journal(_change: MakeChange, _key: str, _name: str, _value: bytes | None, /) -> None:
    raise AssertionError("nothing is changed before the outputs have begun")


class _OnDisk(msgspec.Struct):
    memory_share: float
    updates_per_cpu_s: float
    warm_s: float


def _on_disk() -> _OnDisk:
    """In a process of its own, whose memory is that of the state alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_beyond_memory).result()


def _beyond_memory() -> _OnDisk:
    with tempfile.TemporaryDirectory() as folder:
        place = StateDestination(
            path=f"{folder}/kept", local=f"{folder}/local", memory_bytes=64 * 2**20
        )
        began_kib = peak_kib = _anonymous_kib()
        lease = _Lease(place, Lease(key=LeaseKey(_SHARD), checkpoint=TRIM_HORIZON))
        every, few = range(_LARGE), range(_LARGE // 50)
        chances = [lease.random.choices(every, k=_BATCH) for _ in range(10)]
        for numbers in (*(every[at : at + _BATCH] for at in range(0, _LARGE, _BATCH)), *chances):
            lease.update([f"user-{number:07}" for number in numbers])
            peak_kib = max(peak_kib, _anonymous_kib())
        keys = [f"user-{number:07}" for number in few]
        taken = timed(lambda: lease.change(keys))
        peak_kib = max(peak_kib, _anonymous_kib())
        row = lease.closed()
        shutil.rmtree(place.path or "")  # so that nothing but the copy can be read
        warm = timed(lambda: _Lease(place, row).size_bytes)
        assert warm.work == lease.size_bytes, "the copy is another state"
        share = (peak_kib - began_kib) * 1024 / place.memory_bytes
        return _OnDisk(share, taken.per_cpu_s, warm.wall_s)


def _anonymous_kib() -> int:
    """Memory of this process that no file backs."""
    (line,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line)


class _ByHand:
    """What one writes for one's own program."""

    def __init__(self, keys: list[str], path: Path) -> None:
        self._keys = keys
        self._path = path
        self._entries = {key: {"n": msgspec.msgpack.encode(_VALUE)} for key in keys}
        self._random = random.Random(_SEED)

    def change(self) -> float:
        changed = {}
        for number in range(_BATCHES):
            value = number.to_bytes(98, "big")
            for key in self._random.choices(self._keys, k=_BATCH):
                changed[key] = self._entries[key]["n"] = msgspec.msgpack.encode(value)
        self._path.write_bytes(msgspec.msgpack.encode(changed))
        return float(_BATCHES * _BATCH)


class _Lease:
    """The state of a lease among its outputs; this thread is that of user code, and theirs."""

    def __init__(self, place: StateDestination, row: Lease) -> None:
        store = open_versions(place, _FOLDER, *_NOWHERE)
        kept = open_kept(place, _FOLDER, _SHARD, print)
        token = next(_numbers) + 1
        self._versions = StateVersions(store, _SHARD, token, f"{token:08x}", kept)
        values = self._versions.restore(row, lambda keys: {}, _EVERYTHING)
        self._live = LiveEntries(values, _no_journal, _EVERYTHING, 2**30)
        self._state = State(self._live)
        self._outputs = Outputs(
            [],
            FakeHost(lambda event: None),
            now=boottime,
            state=keyed(place, self._versions, self._live),
        )
        self._outputs.begin(row.checkpoint, {}, may_adopt=True)
        self._live.journal = self._outputs.rows.change_state  # as LeaseOutputs does
        self.random = random.Random(_SEED)
        self._batch = 0

    @property
    def size_bytes(self) -> float:
        return float(self._live.size_bytes)

    def change(self, keys: list[str]) -> float:
        """Fifty batches and a commit; the number of changes."""
        for _ in range(_BATCHES):
            self.update(self.random.choices(keys, k=_BATCH))
        self.commit()
        return float(_BATCHES * _BATCH)

    def timed_commit(self, keys: list[str]) -> Sample:
        """A commit of 10,000 changed keys."""
        self.update(self.random.sample(keys, _BATCH))
        return timed(self.commit)

    def update(self, keys: list[str]) -> float:
        """A batch; the number of changes."""
        self._batch += 1
        value = self._batch.to_bytes(98, "big")
        state, at = self._state, _at(self._batch)
        self._outputs.rows.begin_batch()
        for key in keys:
            state[key]["n"] = value
        self._outputs.rows.end_batch(at)
        self._outputs.settle(at)
        self._outputs.turn()
        return float(len(keys))

    def commit(self) -> float:
        self._outputs.commit(CommitOutputs(_at(self._batch), must=True))
        self._outputs.turn()
        return 1.0

    def closed(self) -> Lease:
        """It ends; its row."""
        version = self._versions.version
        self._versions.close()
        return Lease(key=LeaseKey(_SHARD), checkpoint=_at(self._batch), state_version=version)
