"""`run_fleet` put together, in this process: its first line, its last, its report; and small parts
that only a whole run would meet."""

import json
import resource
import stat
import subprocess
import sys

import pytest

from kclrun.config.schema import (
    LeaseSettings,
    LogSettings,
    Settings,
    ShutdownSettings,
    StreamSettings,
)
from kclrun.config.units import Duration
from kclrun.errors import ServiceError
from kclrun.local.lease_rows import LeaseRows
from kclrun.manager.locks import LockFolder, state_folder
from kclrun.manager.runtime import _policy, _starts, run_fleet
from kclrun.manager.service_calls import _scanned
from kclrun.manager.world import ExitReason, FleetServices, SourceStream
from kclrun.model.lease import Lease, Owner
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.wire import WireCredentials
from kclrun.ports import ScanPage, ShardFilter
from tests.support.descriptors import open_descriptors
from tests.unit.manager.children_rig import StandIn
from tests.unit.manager.manager_rig import ENDPOINT, Stream


class Keys:
    def current(self):
        return WireCredentials("AKIAEXAMPLEEXAMPLE", "s")

    def notify(self, replaced):
        pass


class NoShards(Stream):
    def list_shards(self, shard_filter=None):
        return ()


@pytest.fixture
def fleet(tmp_path, monkeypatch, capfd):
    """A run of no shards until it is caught up: its reason, and the lines of its log."""
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setattr("kclrun.lifecycle.caught_up.LOOK_APART_S", 0.1)
    monkeypatch.setattr("kclrun.manager.watch._LOOK_EVERY_S", 0.05)
    # Adopting orphans would outlast the test.
    monkeypatch.setattr("kclrun.manager.runtime.adopt_orphans", lambda: None)
    launcher = StandIn()

    def run(leases_max=64, **how):
        settings = Settings(
            application="orders",
            stream="orders",
            processor="orders:Price",
            leases=LeaseSettings(failover=Duration(12), max=leases_max),
            shutdown=ShutdownSettings(grace=Duration(9)),
            log=LogSettings(format="json"),
        )
        source = SourceStream(NoShards(), NoShards().summary(), settings.sources[0])
        world = FleetServices(LeaseRows(), {ONLY_STREAM: source}, Keys(), ENDPOINT, ENDPOINT)
        reason = run_fleet(settings, world, until="caught-up", launcher=launcher, **how)
        return reason, [json.loads(line) for line in capfd.readouterr().err.splitlines()]

    yield run
    launcher.close()


def test_a_whole_run_says_what_it_runs_and_how_it_ended_and_leaves_nothing_behind(fleet, tmp_path):
    samples = []
    report = tmp_path / "report.json"

    reason, lines = fleet(report_path=report, on_sample=samples.append)

    assert reason is ExitReason.CAUGHT_UP
    first, last = lines[0], lines[-1]
    assert first["event"] == "manager_started"
    reported = {
        "table": "orders",
        "stream": "orders",
        "start": "TRIM_HORIZON",
        "processor": "orders:Price",
        "failover_s": 12.0,
        "leases_max": 64,
        "grace_s": 9.0,
        "stall_s": 120.0,
    }
    assert {name: first[name] for name in reported} == reported
    assert (last["event"], last["reason"], last["records"]) == ("manager_stopped", "caught up", 0)
    written = json.loads(report.read_bytes())
    assert (written["application"], written["exit_reason"]) == ("orders", "caught up")
    assert 0.0 < written["seconds"] < 300.0
    assert samples[0].application == "orders"
    assert 0.0 <= samples[0].uptime_s < 300.0
    left = [path.name for path in (tmp_path / "state" / "orders").iterdir()]
    assert left == ["story"], "its lock file is gone; `kclrun why` goes on telling"


def test_a_limit_of_descriptors_that_is_too_low_for_the_leases_is_reported_at_the_start(
    fleet, monkeypatch
):
    limits = {resource.RLIMIT_NOFILE: (199, 4096)}
    monkeypatch.setattr("kclrun.manager.runtime.resource.getrlimit", limits.__getitem__)
    _, lines = fleet(leases_max=68)
    (line,) = [line for line in lines if line["event"] == "descriptors_short"]
    assert (line["what"], line["expected"], line["leases_max"]) == (199, 200, 68)


@pytest.mark.parametrize("limit", [192, resource.RLIM_INFINITY])
def test_a_limit_of_descriptors_that_suffices_is_not_worth_a_word(fleet, monkeypatch, limit):
    limits = {resource.RLIMIT_NOFILE: (limit, limit)}
    monkeypatch.setattr("kclrun.manager.runtime.resource.getrlimit", limits.__getitem__)

    assert "descriptors_short" not in [line["event"] for line in fleet()[1]]


@pytest.mark.parametrize(
    ("start", "shown"),
    [
        (None, ShardFilter("AT_TRIM_HORIZON")),
        ("LATEST", ShardFilter("AT_LATEST")),
        ("1970-01-01T00:01:00Z", ShardFilter("AT_TIMESTAMP", 60.0)),
    ],
)
def test_shards_are_listed_from_where_a_stream_begins(start, shown):
    settings = StreamSettings(name="s", start=start)
    source = SourceStream(Stream(), Stream().summary(), settings)
    world = FleetServices(None, {ONLY_STREAM: source}, None, ENDPOINT, ENDPOINT)

    starts = _starts(world, 1_000.0)

    start = starts[ONLY_STREAM]
    assert ShardFilter.at(start.sentinel, start.at) == shown


# A scan, page by page.


class Pages:
    def __init__(self, *pages):
        self.pages = pages

    def scan(self, *, consistent):
        self.consistent = consistent
        return iter(self.pages)


def scanned(*pages):
    return _scanned(FleetServices(Pages(*pages), {}, None, ENDPOINT, ENDPOINT), consistent=True)


def rows(*keys):
    return tuple(Lease(key=key, checkpoint=TRIM_HORIZON) for key in keys)


def test_a_scan_is_the_sum_of_its_pages_and_what_one_page_says_of_kcl_3_holds_for_all():
    mode = "MIGRATION"
    found = scanned(
        ScanPage(rows("a"), ("x",), 2, None),
        ScanPage(rows("b"), ("y",), 3, mode),
        ScanPage(rows("c"), (), 0, None),
    )

    assert [lease.key for lease in found.leases] == ["a", "b", "c"]
    assert (found.broken, found.foreign, found.kcl3_mode) == (("x", "y"), 5, mode)


@pytest.mark.parametrize("coordinator", [None, object()])
def test_the_mode_of_an_early_kcl_3_fleet_is_read_where_one_can_be(coordinator):
    world = FleetServices(Pages(), {}, None, ENDPOINT, ENDPOINT, coordinator=coordinator)

    policy = _policy(Settings(application="a", stream="s"), world, {}, Owner("g", "s", "n"))

    assert policy.reads_kcl3_mode is (coordinator is not None)


def test_the_core_knows_when_the_streams_were_described():
    world = FleetServices(Pages(), {}, None, ENDPOINT, ENDPOINT, described_instant=7.0)

    policy = _policy(Settings(application="a", stream="s"), world, {}, Owner("g", "s", "n"))

    assert policy.described_instant == 7.0


def test_of_many_broken_rows_a_hundred_are_reported():
    assert len(scanned(ScanPage((), ("x",) * 101, 0, None)).broken) == 100


def test_a_table_of_more_leases_than_a_manager_serves_is_refused(monkeypatch):
    monkeypatch.setattr("kclrun.manager.service_calls._ROWS_MAX", 2)

    assert len(scanned(ScanPage(rows("a", "b"), (), 0, None)).leases) == 2
    with pytest.raises(ServiceError, match="more than 2 leases"):
        scanned(ScanPage(rows("a", "b"), (), 0, None), ScanPage(rows("c"), (), 0, None))


# Locks and rights.


def test_lock_files_and_their_folder_are_their_owner_s_alone(tmp_path):
    path = state_folder("app", {"KCLRUN_STATE_DIR": str(tmp_path)})
    folder = LockFolder(path)
    _, lock = folder.hold(lambda: Owner("g", "slot", "0123456789abcdef"))

    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
    lock.retire()
    assert lock.fileno() == -1
    lock.retire()


def test_no_descriptor_of_a_former_owner_s_file_stays_open(tmp_path):
    folder = LockFolder(tmp_path)
    nonces = ("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb")
    for nonce in nonces:
        (tmp_path / f"{nonce}.lock").write_text(f"kclrun:g:slot:{nonce}")
    before = open_descriptors()

    gained = folder.seize_former("slot", "own")
    folder.forget({"kclrun:g:slot:aaaaaaaaaaaaaaaa"})
    folder.close()

    assert gained == {f"kclrun:g:slot:{nonce}" for nonce in nonces}
    assert open_descriptors() <= before
    assert folder.held == frozenset()
    assert [path.stem for path in tmp_path.iterdir()] == ["bbbbbbbbbbbbbbbb"]


def test_orphans_come_to_us_and_descriptors_go_but_those_kept():
    program = """
import ctypes, os
from kclrun.manager.launcher import adopt_orphans, close_descriptors_except, drop_rights
adopt_orphans()
drop_rights()
is_reaper, no_new = ctypes.c_int(), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)
ctypes.CDLL(None).prctl(37, ctypes.byref(is_reaper), 0, 0, 0)
kept, lost = os.pipe()
close_descriptors_except((kept,))
for fd in (0, 1, 2, kept):
    os.fstat(fd)
try:
    os.fstat(lost)
except OSError:
    print(is_reaper.value, no_new, oct(os.umask(0)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )

    assert done.stdout.split() == [b"1", b"1", b"0o77"]
