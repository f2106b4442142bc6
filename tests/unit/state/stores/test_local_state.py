"""The copy of the state on a local disk: when it is used again, and that a version takes its place
when it is damaged, another one's, or half-way."""

import contextlib
import signal
import sqlite3
import sys
import time
from subprocess import PIPE, Popen, run
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from kclrun.errors import HostFailed, SettingsError, SinkError
from kclrun.manager.orphans import reap_adopted
from kclrun.manager.service_calls import _is_copied
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.state import OF_PARENTS, PrefetchJob, StateDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.state import chain
from kclrun.state.keyed import LiveEntries
from kclrun.state.stores import local_state
from kclrun.state.stores.local_state import LocalEntries, sweep
from kclrun.state.stores.state_files import StateFiles
from kclrun.state.stores.state_versions import StateVersions
from kclrun.state.timers import WATERMARK, Step, Timer
from tests.patience import HUNG_S
from tests.support.build import position as at
from tests.support.memory_versions import MemoryVersions, Versions

SHARD = "shard"
EVERYTHING = HashRange(0, HASH_KEY_MAX)
KEYS = [f"key-{number}" for number in range(40)]


OPENED = []


@pytest.fixture(autouse=True)
def closed():
    """Python 3.13 warns of a database that nothing closed."""
    yield
    while OPENED:
        OPENED.pop().close()


class Owner:
    """One lease process; `row` names the version that it begins with."""

    def __init__(self, disk, store, token, version=None, *, shard=SHARD, rows=None, memory=1000):
        self.broken = []
        self.local = LocalEntries(disk / shard, memory, self.broken.append)
        OPENED.append(self.local)
        self.versions = StateVersions(store, shard, token, f"{token:08x}", self.local)
        row = Lease(
            key=LeaseKey(shard),
            checkpoint=at(token) if version not in {None, OF_PARENTS} else TRIM_HORIZON,
            state_version=version,
            parents=frozenset(rows or ()),
        )
        values = self.versions.restore(row, lambda keys: rows, EVERYTHING)
        self.versions.begin(Cursor(row.checkpoint))
        self.rows = []
        self.live = LiveEntries(
            values, lambda change, *of: self.rows.append(change(*of)), EVERYTHING, 10**6
        )
        self.number = 100 * token

    def put(self, key, value, name="n"):
        self.live.put(key, name, value)

    def add(self):
        self.number += 1
        self.versions.add(self.rows, Cursor(at(self.number)))
        self.rows = []

    def commit(self):
        if self.rows:
            self.add()
        self.versions.commit()
        return self.versions.version

    def values(self):
        return {key: dict(self.live.values_of(key)) for key in list(self.live.keys())}


@pytest.fixture
def stored():
    return Versions()


@pytest.fixture
def first(tmp_path, stored):
    """An owner that has committed a value of each key."""
    owner = Owner(tmp_path, MemoryVersions(stored), 1)
    for number, key in enumerate(KEYS):
        owner.put(key, b"%d" % number)
    owner.commit()
    return owner


ALL = {key: {"n": b"%d" % number} for number, key in enumerate(KEYS)}


def test_a_process_that_starts_again_begins_with_the_copy_and_reads_no_version(
    tmp_path, stored, first
):
    first.put("key-1", None)
    first.put("key-2", b"later", "m")
    version = first.commit()
    first.versions.close()
    content, stored.content = stored.content, {}
    again = Owner(tmp_path, MemoryVersions(stored), 2, version)
    expected = {**ALL, "key-2": {"n": b"2", "m": b"later"}}
    del expected["key-1"]
    assert again.values() == expected
    assert again.live.size_bytes == first.live.size_bytes
    # The chain goes on: its next version is a delta, and both are read from the store elsewhere.
    stored.content = content
    again.put("key-3", b"3!")
    entries, read, _ = chain.read_chain(
        again.commit(), SHARD, lambda name: stored.content.get((SHARD, name))
    )
    assert entries == {**expected, "key-3": {"n": b"3!"}}
    assert len(read.names) == 3


def test_a_copy_is_found_in_a_folder_whose_name_a_url_would_read_otherwise(tmp_path, stored):
    disk = tmp_path / "50%20 #1 ?a=b"
    disk.mkdir()
    owner = Owner(disk, MemoryVersions(stored), 1)
    owner.put("key-1", b"1")
    version = owner.commit()
    owner.versions.close()
    stored.content = {}

    assert Owner(disk, MemoryVersions(stored), 2, version).values() == {"key-1": {"n": b"1"}}


class Counted(MemoryVersions):
    """Notes which versions are read."""

    def __init__(self, stored):
        super().__init__(stored)
        self.names = []

    def read(self, shard, name):
        self.names.append(name)
        return super().read(shard, name)


def test_a_lease_that_comes_back_to_a_machine_reads_only_what_was_written_elsewhere(
    tmp_path, stored, first
):
    first.versions.close()
    elsewhere = Owner(tmp_path / "elsewhere", MemoryVersions(stored), 2, first.versions.version)
    elsewhere.put("key-1", None)
    elsewhere.put("key-2", b"later", "m")
    second = elsewhere.commit()
    elsewhere.put("key-2", b"last", "m")
    elsewhere.put("new", b"0")
    third = elsewhere.commit()
    store = Counted(stored)
    again = Owner(tmp_path, store, 3, third)

    assert again.values() == elsewhere.values()
    assert again.live.size_bytes == elsewhere.live.size_bytes
    assert store.names == [third, second]
    # A commit there, and another process here: the copy is of the version that it followed.
    fourth = again.put("key-3", b"3!") or again.commit()
    again.versions.close()
    store.names.clear()
    assert Owner(tmp_path, store, 4, fourth).values() == again_values(elsewhere, b"3!")
    assert store.names == []


def again_values(owner, value):
    return {**owner.values(), "key-3": {"n": value}}


def test_a_copy_below_the_next_snapshot_or_in_use_is_not_followed(tmp_path, stored, first):
    zombie = first.versions.version
    elsewhere = Owner(tmp_path / "elsewhere", MemoryVersions(stored), 2, zombie)
    elsewhere.put("key-2", b"later")
    version = elsewhere.commit()
    store = Counted(stored)
    # The former process still holds its copy.
    assert Owner(tmp_path, store, 3, version).values() == elsewhere.values()
    assert store.names == [version, zombie]

    first.versions.close()
    for key in KEYS:
        elsewhere.put(key, b"x" * 200)
    snapshot = elsewhere.commit()
    OPENED.pop().close()
    store.names.clear()
    assert Owner(tmp_path, store, 4, snapshot).values() == elsewhere.values()
    assert set(store.names) == {snapshot}


@pytest.mark.parametrize("why", ["another version", "another boot", "a later format"])
def test_a_copy_of_anything_else_is_not_used(tmp_path, stored, first, monkeypatch, why):
    version = first.versions.version
    if why == "another version":  # R9: durable, and no checkpoint names it
        first.put("key-1", b"never checkpointed")
        first.commit()
    first.versions.close()
    if why == "another boot":
        monkeypatch.setattr(local_state, "_boot", lambda: "later")
    if why == "a later format":
        monkeypatch.setattr(local_state, "_FORMAT", 2)
    assert Owner(tmp_path, MemoryVersions(stored), 2, version).values() == ALL
    assert len(list((tmp_path / SHARD).iterdir())) == 1, "the other copy is removed"
    stored.content.clear()
    with pytest.raises(SettingsError, match=r"is missing from state\.store"):
        Owner(tmp_path, MemoryVersions(stored), 3, "0000000001-000009-0badcafe")


def damage(folder, how):
    (file,) = folder.glob("*/state.db")
    content = file.read_bytes()
    match how:
        case "removed":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "no database":
            file.write_bytes(b"\xff" * 100 + content[100:])
        case "cut":
            file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("how", ["removed", "empty", "no database", "cut"])
def test_a_copy_that_is_damaged_is_never_a_state(tmp_path, stored, first, how):
    version = first.versions.version
    first.versions.close()
    damage(tmp_path / SHARD, how)
    again = Owner(tmp_path, MemoryVersions(stored), 2, version)
    if again.broken:  # it was found while it was read, and the next process begins anew
        again.versions.close()
        again = Owner(tmp_path, MemoryVersions(stored), 3, version)
    assert again.values() == ALL


def test_a_value_that_is_damaged_ends_the_process_and_the_next_one_reads_the_version(
    tmp_path, stored, first
):
    value = b"a value that is easily found"
    first.put("key-7", value)
    version = first.commit()
    first.versions.close()
    (file,) = (tmp_path / SHARD).glob("*/state.db")
    file.write_bytes(file.read_bytes().replace(value, value.upper()))
    again = Owner(tmp_path, MemoryVersions(stored), 2, version)
    assert again.live.values_of("key-8") == {"n": b"8"}
    with pytest.raises(SinkError, match=r"is damaged .the checksum of a value differs.*is removed"):
        again.live.values_of("key-7")
    assert [type(error) for error in again.broken] == [HostFailed]
    third = Owner(tmp_path, MemoryVersions(stored), 3, version)
    assert third.live.values_of("key-7") == {"n": value}


def test_a_commit_that_failed_in_a_part_is_repeated_with_the_same_versions(
    tmp_path, stored, monkeypatch
):
    monkeypatch.setattr(chain, "PART_BYTES", 50)
    fates = []
    owner = Owner(tmp_path, MemoryVersions(stored, fates), 1)
    for number, key in enumerate(KEYS):
        owner.put(key, b"%d" % number)
    fates += ["lost", "", ""]  # the reply for the third part
    with pytest.raises(SinkError):
        owner.commit()
    before = dict(stored.content)
    assert len(before) == 3
    version = owner.commit()
    assert before.items() <= stored.content.items()
    elsewhere = Owner(tmp_path / "elsewhere", MemoryVersions(stored), 2, version)
    assert elsewhere.values() == ALL
    assert elsewhere.versions.collect(0.0) == 0, "all of them are the snapshot"
    # A further version on top of the parts is a delta.
    owner.put("key-1", b"1!")
    count = len(stored.content)
    owner.commit()
    assert len(stored.content) == count + 1


KILLED = """
import os, signal, sys
from pathlib import Path
from kclrun.state.stores.state_files import StateFiles
from tests.unit.state.stores import test_local_state as rig

class Store(StateFiles):
    def create(self, shard, name, content):
        if self.is_armed:
            os.kill(os.getpid(), signal.SIGKILL)
        super().create(shard, name, content)

folder, versions = map(Path, sys.argv[1:])
store = Store(versions, "app")
store.is_armed = False
owner = rig.Owner(folder, store, 1)
for number, key in enumerate(rig.KEYS):
    owner.put(key, b"%d" % number)
print(owner.commit(), flush=True)
store.is_armed = True
for key in rig.KEYS:
    owner.put(key, b"x" * 3000)  # more than SQLite keeps in memory, and than a delta has
owner.commit()
"""


@pytest.mark.seconds
def test_after_a_sigkill_in_a_commit_the_copy_is_that_of_the_version_before(tmp_path):
    folder, versions = tmp_path / "local", tmp_path / "versions"
    ended = run(
        [sys.executable, "-c", KILLED, folder, versions],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    store = SimpleNamespace(read=None)  # nothing is read from the store
    again = Owner(folder, store, 2, ended.stdout.strip())
    assert again.values() == ALL
    assert StateFiles(versions, "app").read(SHARD, ended.stdout.strip())


def test_a_zombie_and_its_successor_have_a_copy_each(tmp_path, stored, first):
    """The former process is frozen, and writes on when it comes back."""
    version = first.versions.version
    second = Owner(tmp_path, MemoryVersions(stored), 2, version)
    first.put("key-1", b"of the zombie")
    second.put("key-1", b"of its successor")
    names = first.commit(), second.commit()
    assert second.values()["key-1"] == {"n": b"of its successor"}
    first.versions.close()
    second.versions.close()
    third = Owner(tmp_path, MemoryVersions(stored), 3, names[1])
    assert third.values()["key-1"] == {"n": b"of its successor"}
    assert len(list((tmp_path / SHARD).iterdir())) == 1


def test_a_full_disk_delays_the_commit_and_loses_nothing(tmp_path, stored, first):
    pages = first.local._writer.execute("PRAGMA page_count").fetchone()[0]
    first.local._writer.execute(f"PRAGMA max_page_count = {pages}")
    for key in KEYS:
        first.put(key, b"x" * 3000)
    with pytest.raises(SinkError, match="is full"):
        first.commit()
    assert first.broken == []
    assert first.values() == {key: {"n": b"x" * 3000} for key in KEYS}
    first.local._writer.execute("PRAGMA max_page_count = 100000")
    version = first.commit()
    elsewhere = Owner(tmp_path / "elsewhere", MemoryVersions(stored), 2, version)
    assert elsewhere.values() == first.values()


def test_what_a_failed_call_changed_is_taken_back_though_its_key_was_forgotten(first):
    before = first.values()
    for key in KEYS:
        first.put(key, b"never")
    first.put("key-new", b"never")
    for change in reversed(first.rows):
        first.live.undo(change)
    first.rows.clear()
    assert first.values() == before == ALL
    assert len(first.live.keys()) == len(KEYS)
    assert first.local._working._changes == {}


def test_keys_in_memory_are_those_used_lately_and_those_with_changes(first):
    working = first.local._working
    for key in KEYS:
        first.live.values_of(key)
    assert len(working._recent) + len(working._older) < 5
    for key in KEYS[:10]:
        first.put(key, b"changed")
    for key in KEYS:
        first.live.values_of(key)
    assert {*working._changed} == {*KEYS[:10]}
    first.commit()
    assert not working._changed
    assert working._changed_bytes == 0
    for key in KEYS:
        first.live.values_of(key)
    assert len(working._recent) + len(working._older) < 5
    assert first.values()["key-3"] == {"n": b"changed"}


@pytest.mark.parametrize("both", [False, True])
def test_a_child_begins_with_what_its_parents_versions_hold(tmp_path, stored, both):
    rows = {}
    for token, parent in ((1, "left"), (2, "right")):
        owner = Owner(tmp_path, MemoryVersions(stored), token, shard=parent)
        owner.put(f"of-{parent}", parent.encode())
        if both:
            owner.put("of-both", b"")
        rows[LeaseKey(parent)] = Lease(
            key=LeaseKey(parent),
            checkpoint=SHARD_END,
            state_version=owner.commit(),
            outputs=StoredCursors(SHARD_END, ()),
        )
    given = (tmp_path, MemoryVersions(stored), 3, OF_PARENTS)
    if both:
        with pytest.raises(SettingsError, match="both parents have state for one key"):
            Owner(*given, shard="child", rows=rows)
        return
    child = Owner(*given, shard="child", rows=rows)
    assert child.values() == {"of-left": {"n": b"left"}, "of-right": {"n": b"right"}}


def test_timers_and_the_watermark_are_in_the_copy_and_are_no_values_of_their_keys(
    tmp_path, stored, first
):
    step = msgspec.msgpack.encode(Step(9.0, 9.0))
    first.live.reserved.is_served = True
    first.live.change_reserved(*WATERMARK, step)
    for timer in (late := Timer(8.0, "key-1", "n"), lonely := Timer(7.0, "alone")):
        first.live.set_timer(timer.key, timer.at, timer.name, timer.clock)
    first.live.set_timer("key-2", 5.0)
    first.commit()
    first.live.delete_timer("key-2")
    version = first.commit()
    first.versions.close()
    own = Owner(tmp_path, MemoryVersions(stored), 2, version)
    parent = Lease(
        key=LeaseKey(SHARD),
        checkpoint=SHARD_END,
        state_version=version,
        outputs=StoredCursors(SHARD_END, ()),
    )
    rows = {parent.key: parent}
    child = Owner(tmp_path, MemoryVersions(stored), 3, OF_PARENTS, shard="child", rows=rows)
    for each in (own, child):
        assert each.live.reserved.pending() == [lonely, late]
        assert each.live.reserved.step == Step(9.0, 9.0)
        assert each.values() == ALL
        assert each.live.size_bytes == first.live.size_bytes


def test_a_lease_finds_its_timers_in_a_copy_without_reading_the_other_values(tmp_path, first):
    (file,) = tmp_path.rglob("state.db")
    with contextlib.closing(sqlite3.connect(file)) as database:
        plan = database.execute(f"EXPLAIN QUERY PLAN {local_state._RESERVED}").fetchall()

    ((*_, how),) = plan
    assert how.endswith("USING INDEX reserved")


def test_copies_that_nothing_used_for_long_are_removed_and_those_in_use_stay(
    tmp_path, stored, first
):
    Owner(tmp_path, MemoryVersions(stored), 1, shard="left-here").versions.close()
    sweep(tmp_path, 3600.0)
    assert {each.name for each in tmp_path.iterdir()} == {SHARD, "left-here"}
    sweep(tmp_path, 0.0)
    assert [each.name for each in tmp_path.iterdir()] == [SHARD]
    assert first.values() == ALL


def test_after_the_end_of_the_lease_a_key_on_the_disk_is_an_error_and_the_copy_stays(
    tmp_path, stored, first
):
    version = first.versions.version
    first.versions.close()
    with pytest.raises(SinkError, match="the lease is over"):
        first.values()
    assert first.broken == []
    stored.content.clear()
    assert Owner(tmp_path, MemoryVersions(stored), 2, version).values() == ALL


def job_for(tmp_path, version):
    return PrefetchJob(
        place=StateDestination(path=str(tmp_path / "kept"), local=str(tmp_path / "local")),
        folder="a/s",
        shard_id=SHARD,
        checkpoint=at(5),
        version=version,
        kinesis=WireEndpoint("http://127.0.0.1:1", "us-east-1", "us-east-1"),
        credentials=WireCredentials("id", "secret"),
    )


def prefetching(tmp_path, version):
    """The process that a manager starts for a lease that it asked for."""
    job = job_for(tmp_path, version)
    process = Popen([sys.executable, "-P", "-m", "kclrun.worker.prefetching"], stdin=PIPE)
    process.stdin.write(msgspec.json.encode(job) + b"\n")
    process.stdin.flush()
    return process


@pytest.mark.seconds
def test_a_lease_that_was_asked_for_begins_with_the_prefetched_copy_and_reads_the_deltas_since(
    tmp_path,
):
    store = StateFiles(tmp_path / "kept", "a/s")
    owner = Owner(tmp_path / "elsewhere", store, 1)
    for key in KEYS:
        owner.put(key, b"1" * 100)
    named = owner.commit()
    with prefetching(tmp_path, named) as process:
        assert process.wait(HUNG_S) == 0
    owner.put("key-1", b"2")
    later = owner.commit()
    store.delete(SHARD, [named])  # so that only the copy has it

    taker = Owner(tmp_path / "local" / "a/s", store, 2, later)

    assert taker.values() == owner.values()
    assert later == taker.versions.version


@pytest.mark.seconds
def test_a_manager_that_reaps_orphans_leaves_the_exit_code_of_a_failed_copy(tmp_path):
    before = {child.pid for child in psutil.Process().children()}

    def is_dead():
        children = [child for child in psutil.Process().children() if child.pid not in before]
        return all(child.status() == psutil.STATUS_ZOMBIE for child in children)

    def reaps():
        """Called while the copy is waited for: the manager finds the exited process first."""
        deadline = time.monotonic() + HUNG_S
        while not is_dead() and time.monotonic() < deadline:
            time.sleep(0.01)
        reap_adopted(frozenset())
        return False

    assert not _is_copied(job_for(tmp_path, "0000000001-000001-0badcafe"), reaps)


@pytest.mark.seconds
def test_a_prefetch_ends_with_its_manager_and_fails_in_silence(tmp_path):
    with prefetching(tmp_path, "0000000001-000001-0badcafe") as process:
        assert process.wait(HUNG_S) == 1, "there is no such version: the lease process says so"
    process = Popen([sys.executable, "-P", "-m", "kclrun.worker.prefetching"], stdin=PIPE)
    with process:
        process.stdin.close()
        assert process.wait(HUNG_S) != 0
