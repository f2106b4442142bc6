"""What a manager measures and shows of itself while it runs, and the looks that may end its run."""

import os
import signal
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest

from kclrun.config.observing import ObserveSettings
from kclrun.config.schema import FetchSettings, LeaseSettings, Settings, ShutdownSettings
from kclrun.config.units import Duration
from kclrun.errors import Unavailable
from kclrun.ipc.messages import FailoverChanged
from kclrun.leases import events
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.transitions import State
from kclrun.manager.metering import open_metering
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.sampling import HostCpu, Sampler, heat_of, note_of, state_of
from kclrun.manager.watch import EndWhenCaughtUp, ManagerTimer
from kclrun.manager.world import ExitReason, RunNames
from kclrun.model.lease import OFFERED, Halt, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.subscribing import SILENCE_MAX_S
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.protocol.writes import CreateLease, ResumeLease
from kclrun.traffic.hot_keys import HotKey, ShardHeat
from tests.support.tables import over_rows
from tests.unit.manager.manager_rig import BEGAN, sampler_of_core

OTHER = "kclrun:g:other:n"
TERM = signal.SIGTERM


def sampler_of(run):
    return Sampler(
        run.manager,
        run.report,
        RunNames("orders", "orders-stream", run.identity.id),
        leases_max=64,
        began_instant=BEGAN,
    )


def sampled(run, *at, end=60.0):
    """The samples of a run, at these of its seconds."""
    sampler, samples = sampler_of(run), []
    for seconds in at:
        run.at(seconds, lambda: samples.append(sampler.take(run.loop.now())))
    run.signal_at(end, TERM)
    run.run()
    return samples


def a_row(key, owner=None, **fields):
    return CreateLease(Lease(key=key, checkpoint=TRIM_HORIZON, owner=owner, **fields))


# Samples.


def test_a_sample_has_the_figures_of_the_table_and_of_this_manager(rig):
    run = rig(shards=4)
    run.processes.statuses["s0"] = {"records_total": 7, "bytes_total": 70}

    before, then = sampled(run, 0.0, 30.0)

    assert (before.total_leases, before.total_shards, before.worker_leases) == (None, None, 0)
    assert before.launcher_away_s is None
    assert (then.application, then.stream, then.owner) == (
        "orders",
        "orders-stream",
        run.identity.id,
    )
    assert then.uptime_s == pytest.approx(30.0)
    assert (then.total_leases, then.total_shards, then.unclaimed_leases) == (4, 4, 0)
    assert (then.worker_leases, then.worker_leases_max) == (4, 64)
    assert [lease.shard for lease in then.leases] == ["s0", "s1", "s2", "s3"]
    assert (then.leases[0].records_total, then.leases[0].bytes_total) == (7, 70)
    assert (then.leases[1].records_total, then.leases[1].bytes_total) == (0, 0)
    assert {lease.state for lease in then.leases} == {"running"}
    assert (then.draining_s, then.launcher_away_s, then.host_short_s) == (None, None, None)
    assert (then.leases_command, then.outages) == ("kclrun leases", ())


def test_the_table_is_counted_anew_every_ten_seconds_and_not_at_each_look(rig):
    run = rig()
    run.at(21.0, lambda: run.table.write(a_row("x", OTHER)))

    counts = [each.total_leases for each in sampled(run, 20.0, 29.9, 30.0)]

    assert counts == [2, 2, 3]


def test_workers_needed_are_counted_every_twenty_seconds_by_the_hosts_cpu_and_the_table(
    rig, monkeypatch
):
    shares = iter([None, 0.9])
    # The first look, 20 s after the start, only begins to measure.
    monkeypatch.setattr(HostCpu, "share", lambda _self: next(shares))
    run = rig(shards=8)
    run.at(33.0, lambda: [run.table.write(a_row(f"x{n}", OTHER)) for n in range(4)])

    counts = [each.needed_workers for each in sampled(run, 5.0, 20.0, 39.0, 40.0, 59.0, 59.99)]

    # Two workers, by the row of another owner, and one machine at 90 %: three of 60 %.
    assert counts == [None, None, None, 3, 3, 3]


def test_a_host_has_used_some_of_its_cpu(tmp_path):
    """Of this machine: what it had since then was used by somebody, or stood still."""
    host = HostCpu(tmp_path, tmp_path)
    assert tick(host.share) is not None


def tick(look):
    """The first answer once the kernel's counters, of 10 ms, have moved."""
    return next(share for share in iter(look, object()) if share is not None)


def test_a_container_is_measured_by_its_own_limit(tmp_path, monkeypatch):
    group = tmp_path / "system.slice" / "a"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/system.slice/a\n")
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 5000000\nuser_usec 1\n")
    clock = iter([10.0, 20.0, 20.0, 30.0])
    monkeypatch.setattr("kclrun.manager.sampling.time.monotonic", lambda: next(clock))
    host = HostCpu(tmp_path, tmp_path)
    assert host.share() is None

    (group / "cpu.stat").write_text("usage_usec 11000000\nuser_usec 1\n")
    used = host.share()
    at_once = host.share()
    (group / "cpu.stat").write_text("usage_usec 99000000\nuser_usec 1\n")

    # 6 s of the 15 s that one and a half CPUs have in ten.
    assert used == 0.4
    assert at_once is None
    assert host.share() == 1.0


@pytest.mark.parametrize(
    ("process", "limit"),
    [
        pytest.param(None, None, id="no list of cgroups"),
        pytest.param("3:cpu:/a\n", None, id="cgroup v1"),
        pytest.param("0::/\n", "max 100000\n", id="no limit"),
        pytest.param("0::/\n", "", id="an empty file"),
        pytest.param("0::/\n", "1 2 3", id="a file of another form"),
    ],
)
def test_without_a_limit_the_machine_is_measured(tmp_path, monkeypatch, process, limit):
    if process is not None:
        (tmp_path / "cgroup").write_text(process)
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    times = iter([(10.0, 80.0, 5.0, 5.0), (20.0, 140.0, 15.0, 25.0)])

    class Times(NamedTuple):
        user: float
        idle: float
        iowait: float
        steal: float

    monkeypatch.setattr("psutil.cpu_times", lambda: Times(*next(times)))
    host = HostCpu(tmp_path, tmp_path)
    assert host.share() is None

    # Of 100 s, 60 were idle and 10 waited for a disk; what a hypervisor stole was not to be had.
    assert host.share() == 0.3


def test_a_host_that_shows_no_counters_has_no_share(tmp_path, monkeypatch):
    def unreadable():
        raise OSError(24, "too many open files")

    monkeypatch.setattr("psutil.cpu_times", unreadable)
    host = HostCpu(tmp_path, tmp_path)
    assert [host.share(), host.share()] == [None, None]


def test_for_how_long_a_stop_lasts_is_measured_from_its_first_sample(rig):
    run = rig()
    run.processes.is_stuck = True

    running, first, later = sampled(run, 29.0, 30.5, 40.5, end=30.0)

    assert (running.draining_s, first.draining_s, later.draining_s) == (None, 0.0, 10.0)


def test_a_stop_that_came_to_its_end_and_stays_for_its_machine_is_none_that_lasts(rig):
    run = rig()
    run.manager.stays = lambda: run.seconds < 80.0

    (staying,) = sampled(run, 50.0, end=30.0)

    assert staying.draining_s is None


def test_for_how_long_there_is_no_launcher_is_measured_from_the_sample_that_missed_it(rig):
    run = rig()
    run.at(9.0, lambda: setattr(run.processes, "has_launcher", False))
    run.at(19.0, lambda: setattr(run.processes, "has_launcher", True))
    run.at(29.0, lambda: setattr(run.processes, "has_launcher", False))

    away = [each.launcher_away_s for each in sampled(run, 8.0, 10.0, 15.0, 20.0, 30.0)]

    assert away == [None, 0.0, 5.0, None, 0.0]


def test_what_fails_is_in_the_sample_and_what_leases_go_on_without_is_not_vital(rig):
    run = rig()
    away = Unavailable("refused", operation="Scan", code="Timeout")
    outages = run.manager.service_calls.outages
    run.at(10.5, lambda: outages.failed("look for offered leases", away, BEGAN + 8.0))
    run.at(10.5, lambda: outages.failed("read the mode of a KCL 3 fleet", away, BEGAN + 8.0))
    run.at(10.5, lambda: outages.failed("read a lease", away, BEGAN + 9.0))

    (sample,) = sampled(run, 10.5)

    reported = [(one.operation, one.error, one.lasted_s, one.is_vital) for one in sample.outages]
    assert reported == [
        ("look for offered leases", "Timeout", 2.5, False),
        ("read the mode of a KCL 3 fleet", "Timeout", 2.5, False),
        ("read a lease", "Timeout", 1.5, True),
    ]


def test_a_kcl_3_fleet_in_its_own_mode_is_in_the_sample(rig):
    run = rig()
    mode = {"leaseKey": {"S": "Migration3.0"}, "cv": {"S": "CLIENT_VERSION_3X"}}
    run.at(20.0, lambda: run.table.plant(mode))

    before, then = sampled(run, 19.0, 30.0)

    assert (before.native_mode, then.native_mode) == (None, "CLIENT_VERSION_3X")


def test_a_halted_lease_is_as_far_behind_as_the_oldest_record_that_waits_for_it(rig):
    run = rig(shards=1)
    run.table.write(a_row("s0", halt=Halt("KeyError: 1", 4_500.0, waiting_since=4_000.0)))

    (sample,) = sampled(run, 30.0)

    (halted,) = sample.leases
    assert halted.state == "halted"
    # It is 5,000 s by the service's clock at each listing, and those are 5 s apart.
    assert 1_000_000 <= halted.lag_ms <= 1_006_000


def test_a_lease_stands_still_since_it_last_got_on_or_else_since_it_was_first_seen(rig):
    run = rig(shards=2)
    run.processes.statuses["s0"] = {"last_batch_instant": BEGAN + 18.0}

    samples = sampled(run, 10.0, 20.0, 26.0)

    still = [[lease.still_s for lease in sample.leases] for sample in samples]
    assert still == [[0.0, 0.0], [2.0, 10.0], [8.0, 16.0]]


def test_what_got_on_does_not_stand_still_longer_for_a_process_that_died_since(rig):
    run = rig(shards=1)
    run.processes.statuses["s0"] = {"last_batch_instant": BEGAN + 18.0}
    run.at(21.0, run.processes.statuses.clear)

    still = [sample.leases[0].still_s for sample in sampled(run, 10.0, 20.0, 26.0)]

    assert still == [0.0, 2.0, 8.0]


def test_a_lease_that_waits_for_a_person_does_not_stand_still_and_starts_over_afterwards(rig):
    run = rig(shards=1)

    def fail():
        run.manager.deliver(
            events.ProcessReported(
                "s0", reports.ProcessorFailed("process_records", "KeyError: 1", 1)
            )
        )
        run.processes._die("s0", "exit code 5 (failed)")

    run.at(15.0, fail)
    run.at(26.5, lambda: run.table.write(ResumeLease("s0")))

    running, halted, later, resumed = (
        sample.leases[0] for sample in sampled(run, 10.0, 20.0, 26.0, 40.0)
    )

    assert (running.still_s, halted.still_s, later.still_s) == (0.0, None, None)
    assert (halted.state, halted.note, resumed.state) == (
        "halted",
        "process_records failed once: KeyError: 1",
        "running",
    )
    assert resumed.still_s == 14.0, "since it was last seen halted"


def test_what_leases_did_that_are_gone_is_taken_once(rig):
    run = rig(shards=1)
    (sample,) = sampled(run, 20.0)
    sampler = sampler_of(run)
    gone = LeaseStatus(
        pid=1, incarnation=1, state=WorkerState.FINISHED, records_total=3, bytes_total=30
    )
    for key in ("gone", "s0"):
        run.report.departed(key, gone)

    departed = sampler.take_departed(sample)

    assert {key: (one.records, one.bytes) for key, one in departed.items()} == {"gone": (3, 30)}
    assert sampler.take_departed(sample) == {}


# The report that samples read.


def test_a_report_keeps_the_last_position_and_checkpoint_over_a_process_that_said_neither():
    report = ReportWriter()
    at = ExtendedSequenceNumber
    base = {"pid": 1, "incarnation": 1, "state": WorkerState.PROCESSING}
    report.departed("s", LeaseStatus(**base, processed=at("5"), checkpointed=at("4")))
    report.departed("s", LeaseStatus(**base, first_delivered=at("6"), records_total=2))

    shard = report.shard("s", None)

    assert (shard.last_position, shard.checkpoint, shard.first_position) == ("5", "4", "6")
    assert (shard.records, report.records_total) == (2, 2)


# What the live table shows.


def test_a_sample_counts_who_has_the_other_leases(rig):
    run = rig(shards=2, leases_max=2)
    ended = {"checkpoint": SHARD_END}
    for change in (
        a_row("o1", OTHER),
        a_row("o2", OTHER),
        a_row("o3", "java"),
        a_row("e1", OTHER, children=frozenset({"s0"})),
    ):
        run.table.write(change)
    run.table.write(CreateLease(Lease(key="e2", owner=OTHER, **ended)))
    shots = []
    sampler = sampler_of(run)
    run.report.departed(
        "old",
        LeaseStatus(pid=1, incarnation=1, state=WorkerState.FINISHED, records_total=11),
    )
    run.report.ended("old")

    def look():
        shots.append(sampler.take(run.loop.now()))

    run.at(8.0, look)
    run.at(8.1, lambda: run.manager.drain("test"))
    run.at(8.15, look)
    run.run()

    shown, draining = shots
    held = {view.shard for view in shown.leases}
    rows = {lease.key: lease for page in run.table.scan() for lease in page.leases}
    others = [
        key
        for key, row in rows.items()
        if key not in held and not row.is_ended and row.owner not in (None, OFFERED)
    ]
    assert shown.leases_elsewhere == len(others) == 4
    unended = {key for key, row in rows.items() if not row.is_ended}
    assert shown.leases_free == len(unended - held - set(others)) == 1
    assert (shown.ended_total, shown.records_departed) == (1, 11)
    assert (shown.is_draining, draining.is_draining) == (False, True)


def test_rates_are_over_the_last_five_looks_and_never_negative(rig):
    run = rig(shards=1)
    shots = []
    statuses = run.processes.statuses
    statuses["s0"] = {"records_total": 1_000}
    sampler = sampler_of(run)

    def look():
        shots.append(sampler.take(run.loop.now()).leases[0].records_per_s)
        statuses["s0"]["records_total"] += 10 if len(shots) < 8 else -500

    for second in range(20, 29):
        run.at(float(second), look)
    run.signal_at(40.0, TERM)
    run.run()

    assert shots == pytest.approx([0.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 0.0])


@over_rows(
    ("claim", "fields", "trouble", "note"),
    [
        ("it is well", {"state": State.RUNNING}, "", ""),
        ("what raised is called again", {"state": State.RUNNING}, "KeyError", "KeyError"),
        ("it halts for a failure", {"state": State.HALTING, "failure": "bad"}, "KeyError", "bad"),
        (
            "between two processes",
            {"state": State.BACKING_OFF, "rest_until": 13.4},
            "",
            "restarts in",
        ),
        ("the rest is over", {"state": State.BACKING_OFF, "rest_until": 10.0}, "", ""),
        ("its parents", {"state": State.WAITING}, "", "its parents are not ended"),
    ],
)
def test_a_lease_that_stands_still_says_why(claim, fields, trouble, note):
    reported = note_of(HeldLease(key="a", **fields), 10.0, trouble)

    assert reported.startswith(note)
    assert bool(reported) == bool(note)


def test_the_rest_of_a_lease_is_reported_in_seconds_and_a_halt_before_anything_else():
    resting = HeldLease(key="a", state=State.BACKING_OFF, rest_until=13.4)
    assert note_of(resting, 10.0) == "restarts in 3 s"
    halted = Lease(key="a", checkpoint=TRIM_HORIZON, halt=Halt("KeyError", 1.0))
    assert (
        note_of(HeldLease(key="a", state=State.HALTED, row=halted, failure="x"), 1.0) == "KeyError"
    )
    assert note_of(None, 1.0, "KeyError") == "KeyError"
    assert state_of(None, None) == "ending"
    assert state_of(HeldLease(key="a", state=State.HALTED), None, "KeyError") == "halted"


# Looks.


class Judge:
    """A watchdog that only sees."""

    def __init__(self):
        self.seen = []

    def look(self, living, now):
        self.seen.append((now, [child.key for child in living]))


def watched(run, *, until=True, source_is_done=lambda: True, readers=()):
    judge = Judge()
    end = EndWhenCaughtUp(run.manager, run.log, source_is_done=source_is_done) if until else None
    watch = ManagerTimer(
        run.manager,
        sampler_of(run),
        loop=run.loop,
        log=run.log,
        watchdog=judge,
        failover_s=10.0,
        readers=readers,
        end=end,
    )
    run.loop.after(0.0, watch.look)
    return watch, judge


def test_a_run_until_caught_up_ends_by_itself_once_all_is_read_to_the_tip(rig):
    run = rig(shards=2)
    run.processes.statuses.update(s0={"at_tip": True}, s1={"at_tip": False})
    run.at(20.0, lambda: run.processes.statuses.update(s1={"at_tip": True}))
    watched(run)

    assert run.run() is ExitReason.CAUGHT_UP

    assert run.seconds == pytest.approx(22.8, abs=0.6)
    assert [line["halted"] for line in run.lines("caught_up")] == [0]
    assert {said[2] for said in run.processes.reported("drain")} == {"caught up"}


def test_a_run_without_an_end_goes_on_at_the_tip(rig):
    run = rig(shards=1)
    run.processes.statuses.update(s0={"at_tip": True})
    watched(run, until=False)
    run.signal_at(40.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert run.lines("caught_up") == []


def test_a_run_whose_source_is_not_done_does_not_end(rig):
    run = rig(shards=1)
    run.processes.statuses.update(s0={"at_tip": True})
    watched(run, source_is_done=lambda: run.seconds > 30.0)

    assert run.run() is ExitReason.CAUGHT_UP

    assert run.seconds > 30.0


def test_a_run_with_a_halted_shard_ends_once_the_others_are_read_and_says_so(rig):
    run = rig(shards=2)
    run.processes.statuses.update(s0={"at_tip": True}, s1={"at_tip": True})

    def fail():
        run.manager.deliver(
            events.ProcessReported(
                "s1", reports.ProcessorFailed("process_records", "KeyError: 1", 1)
            )
        )
        run.processes._die("s1", "exit code 5 (failed)")

    run.at(5.0, fail)
    watched(run, source_is_done=lambda: run.seconds > 10.0)

    assert run.run() is ExitReason.HALTED

    assert run.manager._exit_reason.exit_code == 65
    assert [line["halted"] for line in run.lines("caught_up")] == [1]


def test_looks_come_twice_a_second_and_each_reader_gets_its_samples(rig):
    run = rig(shards=1)
    shots, rare = [], []
    _, judge = watched(run, until=False, readers=((1.0, shots.append), (2.0, rare.append)))
    run.signal_at(20.2, TERM)

    run.run()

    assert len(judge.seen) == pytest.approx(41, abs=1)
    assert [round(shot.uptime_s) for shot in shots[:5]] == [0, 1, 2, 3, 4]
    assert rare == shots[::2], "a sample that both want is taken once"
    assert judge.seen[-2][1] == ["s0"]


def test_the_shortest_failover_of_the_fleet_is_told_to_every_process_when_it_changes(rig):
    run = rig(shards=1)
    watch, _ = watched(run, until=False)
    run.at(10.0, lambda: run.table.write(a_row("x", OTHER, failover_s=4.0)))
    run.at(16.0, lambda: seen.append(watch.failover_s))
    run.at(17.0, lambda: run.table.uproot("x"))
    run.signal_at(60.0, TERM)
    seen = [watch.failover_s]

    run.run()

    assert seen == [10.0, 4.0]
    reported = [said for said in run.processes.said if isinstance(said, FailoverChanged)]
    assert reported == [FailoverChanged(4.0), FailoverChanged(10.0)]


# What a manager is judged by.


class Clock:
    def now(self):
        return 1_000.0

    def after(self, delay_s, callback):
        pass


@pytest.mark.parametrize(
    ("failover_s", "look_age_max_s", "fetch", "stall_s"),
    [
        (3.0, 10.0, FetchSettings(idle=Duration(7)), 107.0),
        (30.0, 30.0, FetchSettings(mode="fan-out", idle=Duration(7)), 100.0 + SILENCE_MAX_S),
        (30.0, 30.0, FetchSettings(mode="fan-out", idle=Duration(70)), 170.0),
    ],
)
def test_health_is_judged_by_the_settings_and_an_idle_read_is_no_standstill(
    rig, failover_s, look_age_max_s, fetch, stall_s
):
    run = rig()
    settings = Settings(
        application="orders",
        stream="orders",
        stall=Duration(100),
        fetch=fetch,
        shutdown=ShutdownSettings(grace=Duration(50)),
        leases=LeaseSettings(failover=Duration(failover_s)),
        observe=ObserveSettings(listen=0),
    )

    metering = open_metering(
        settings,
        sampler_of(run),
        failover_s=failover_s,
        owner="kclrun::h:n",
        outlet=None,
        loop=Clock(),
        log=run.log,
    )

    limits = metering._board._limits
    assert msgspec.structs.asdict(limits) == {
        "stall_s": stall_s,
        "look_age_max_s": look_age_max_s,
        "drain_max_s": 60.0,
        "output_lag_max_s": 110.0,
    }
    metering.introduce()
    assert run.lines("endpoint_listening")[0]["endpoint"].startswith("http://127.0.0.1:")
    metering.close()


def test_a_sample_of_a_table_without_us_has_free_leases():
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n", leases_max=1), lambda: 0.5)
    core.handle(events.Started(5.0), 1.0)
    rows = (
        Lease(key="f1", checkpoint=TRIM_HORIZON),
        Lease(key="f2", checkpoint=TRIM_HORIZON, owner=OFFERED),
        Lease(key="o1", checkpoint=TRIM_HORIZON, owner=OTHER),
        Lease(key="o2", checkpoint=TRIM_HORIZON, owner=OTHER),
        Lease(key="m1", checkpoint=TRIM_HORIZON, owner="kclrun::h:n"),
    )
    core.handle(events.LeasesScanned(rows), 1.0)
    held = set(core.held())

    shown = sampler_of_core(core).take(1.0)

    assert shown.leases_elsewhere == 2
    assert shown.leases_free == len({"f1", "f2"} - held)
    assert {view.shard for view in shown.leases} == held


def test_a_lease_process_is_shown_with_its_memory_and_from_the_second_look_on_its_cpu():
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n", leases_max=1), lambda: 0.5)
    core.handle(events.Started(5.0), 1.0)
    children = [
        SimpleNamespace(key=key, pid=pid, trouble="", awaited="", heat=None, look=lambda: None)
        for key, pid in (("s0", os.getpid()), ("s1", None))
    ]
    sampler = sampler_of_core(core, lambda: children, has_gauge=True)

    first, first_waiting = sampler.take(1.0).leases
    second, second_waiting = sampler.take(2.0).leases

    assert (first.pid, first.cpu_percent, first.memory_bytes > 0) == (os.getpid(), None, True)
    assert second.cpu_percent >= 0.0
    unmeasured, _ = sampler_of_core(core, lambda: children).take(3.0).leases
    assert (unmeasured.pid, unmeasured.memory_bytes) == (os.getpid(), None)
    for waiting in (first_waiting, second_waiting):
        assert (waiting.pid, waiting.cpu_percent, waiting.memory_bytes) == (None, None, None)


@over_rows(
    ("claim", "fields", "second", "lag_ms", "is_unread"),
    [
        ("it has read no page yet, for a moment", {}, 19.0, None, False),
        ("it has read no page at all", {}, 45.0, None, True),
        ("at the tip, just now", {"last_fetch_instant": 40.0}, 45.0, 0, False),
        ("at the tip, long ago", {"last_fetch_instant": 5.0}, 45.0, None, True),
        (
            "behind, long ago: the lag is at least its age",
            {"last_fetch_instant": 5.0, "millis_behind_latest": 1_000},
            45.0,
            41_000,
            True,
        ),
        (
            "user code runs, and reads wait for it",
            {"last_fetch_instant": 5.0, "processing_since_instant": 5.0},
            45.0,
            0,
            False,
        ),
        (
            "records wait for user code",
            {"last_fetch_instant": 5.0, "fetched": ExtendedSequenceNumber("5")},
            45.0,
            0,
            False,
        ),
    ],
)
def test_the_lag_of_a_shard_of_which_no_page_is_read_is_not_known(
    claim, fields, second, lag_ms, is_unread
):
    core = LeaseManager(ManagerPolicy(me="kclrun::h:n", leases_max=1), lambda: 0.5)
    core.handle(events.Started(5.0), 1.0)
    behind = 0 if "last_fetch_instant" in fields else -1
    status = LeaseStatus(
        pid=1,
        incarnation=1,
        state=WorkerState.PROCESSING,
        **({"millis_behind_latest": behind} | fields),
    )
    child = SimpleNamespace(
        key="s0", pid=None, trouble="", awaited="", heat=None, look=lambda: status
    )
    sampler = sampler_of_core(core, lambda: [child])

    sampler.take(0.0)
    (lease,) = sampler.take(second).leases

    is_said = "no page of the shard was read" in lease.note
    assert (lease.lag_ms, is_said) == (lag_ms, is_unread), claim


# Hot shards.

FULL = ShardHeat(60.0, 1e6, 900.0, 1e6, 0.0, 0, 0.05, "keys", (HotKey("77", 0.2),), "9", 0.5)
QUIET = ShardHeat(60.0, 1e3, 1.0, 1e3, 0.0, 0)


def test_a_traffic_is_known_while_its_process_reads():
    def reading(at):
        return LeaseStatus(
            pid=1, incarnation=1, state=WorkerState.PROCESSING, last_fetch_instant=at
        )

    assert heat_of(FULL, reading(40.0), 100.0) is FULL
    assert heat_of(FULL, reading(39.9), 100.0) is None
    short = msgspec.structs.replace(FULL, covered_s=2.0)
    assert heat_of(short, reading(90.0), 100.0) is short, "a busy machine may be late"
    assert heat_of(None, reading(99.0), 100.0) is None
    assert heat_of(FULL, None, 100.0) is None


def test_a_hot_shard_is_logged_when_it_begins_and_when_it_ends_and_shown_in_between(rig):
    run = rig(shards=2)
    statuses, heats, shots = run.processes.statuses, run.processes.heats, []
    _, _ = watched(run, until=False, readers=((1.0, shots.append),))

    def heat_up():
        for key in ("s0", "s1"):
            statuses[key] = {"last_fetch_instant": run.loop.now() + 1000.0}
        heats.update(s0=FULL, s1=QUIET)

    run.at(10.0, heat_up)
    run.at(40.0, lambda: heats.update(s0=QUIET))
    run.at(60.0, lambda: run.manager.drain("test"))
    run.run()

    (hot,), (cooled,) = run.lines("shard_hot"), run.lines("shard_cooled")
    assert (hot["shard"], cooled["shard"], hot["level"]) == ("s0", "s0", "warning")
    assert hot["reason"] == "1.00 MB/s and 900 records/s in: 95% of the limit of a shard"
    assert "--shard-to-split s0 --new-starting-hash-key 9" in hot["advice"]
    shown = [lease.hot for shot in shots for lease in shot.leases if lease.shard == "s0"]
    assert [at for at, one in enumerate(shown) if one is not None] != []
    assert shown[-1] is None
    assert max(shot.of_fleet["hot_leases"] for shot in shots) == 1
