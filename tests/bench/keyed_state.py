"""Row `state`: what keyed state costs: changes, commits, and reading it when a lease begins."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.measuring import timed
from bench.servers import CREDENTIALS, endpoint_at, stock_client
from kclrun.consuming.commands import CommitOutputs
from kclrun.local.server import start_embedded
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import StatePlace
from kclrun.ports import VersionStore
from kclrun.sinks.state_versions import StateVersions
from kclrun.state.keyed import LiveEntries, State, Undoable
from kclrun.state.versions import Version, encode_version, version_name
from kclrun.worker.clock import boottime
from kclrun.worker.opening import open_versions
from kclrun.worker.outputs import Keyed, Outputs

_ROW: Final = "state"
_KEYS: Final = 1_000_000
_VALUE: Final = b"v" * 98  # with its header of two bytes, 100 are stored
_BATCH: Final = 10_000
_BATCHES: Final = 50
_SHARD: Final = "shardId-000000000000"
_EVERYTHING: Final = HashRange(0, HASH_KEY_MAX)
_BUCKET: Final = "bench"
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
    """
    keys = [f"user-{number:07}" for number in range(_KEYS)]
    with tempfile.TemporaryDirectory() as folder, _bucket() as in_s3:
        in_folder = open_versions(StatePlace(path=folder), "bench/bench", *_NOWHERE)
        size = sum(_snapshot(store, keys) for store in (in_folder, in_s3)) / 2
        lease = _Lease(in_folder, keys)
        by_hand = _ByHand(keys, Path(folder) / "by-hand")
        changes, plain = [], []
        for _ in range(rounds):
            changes.append(timed(lease.change))
            plain.append(timed(by_hand.change))
        commits = [lease.timed_commit() for _ in range(rounds * 5)]
        del lease, by_hand
        restores = [timed(lambda: _restored(in_s3, size)) for _ in range(rounds)]
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
    ]


_NOWHERE: Final = (endpoint_at("http://127.0.0.1:9"), lambda: CREDENTIALS)


@contextmanager
def _bucket() -> Iterator[VersionStore]:
    with start_embedded() as embedded:
        url = embedded.endpoint
        stock_client("s3", url).create_bucket(Bucket=_BUCKET)
        place = StatePlace(s3=f"s3://{_BUCKET}/state", endpoint_url=url)
        yield open_versions(place, "bench/bench", endpoint_at(url), lambda: CREDENTIALS)


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
    LiveEntries(entries, lambda change: None, _EVERYTHING, 2**30)
    return size


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

    def __init__(self, store: VersionStore, keys: list[str]) -> None:
        self._keys = keys
        versions = StateVersions(store, _SHARD, 2, f"{next(_numbers):08x}")
        entries = versions.restore(_row(), lambda keys: {}, _EVERYTHING)
        live = LiveEntries(entries, self._journal, _EVERYTHING, 2**30)
        self._state = State(live)
        self._outputs = Outputs(
            [],
            post=lambda event: None,
            hold=lambda is_held: None,
            now=boottime,
            state=Keyed(versions, live.undo, 86400.0),
        )
        self._outputs.begin(TRIM_HORIZON, {}, may_adopt=True)
        self._random = random.Random(_SEED)
        self._batch = 0

    def _journal(self, change: Callable[[], Undoable | None]) -> None:
        self._outputs.change_state(change)  # as LeaseOutputs does

    def change(self) -> float:
        """Fifty batches and a commit; the number of changes."""
        for _ in range(_BATCHES):
            self._update(self._random.choices(self._keys, k=_BATCH))
        self._commit()
        return float(_BATCHES * _BATCH)

    def timed_commit(self) -> Sample:
        """A commit of 10,000 changed keys."""
        self._update(self._random.sample(self._keys, _BATCH))
        return timed(self._commit)

    def _update(self, keys: list[str]) -> None:
        self._batch += 1
        value = self._batch.to_bytes(98, "big")
        state, at = self._state, _at(self._batch)
        self._outputs.begin_batch()
        for key in keys:
            state[key]["n"] = value
        self._outputs.end_batch(at)
        self._outputs.settle(at)

    def _commit(self) -> float:
        self._outputs.commit(CommitOutputs(_at(self._batch), must=True))
        self._outputs.turn()
        return 1.0
