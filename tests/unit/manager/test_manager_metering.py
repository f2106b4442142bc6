"""When a manager measures and publishes, and what other threads see of it."""

import math
import os

import msgspec
import pytest

from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.manager.metering import (
    SAMPLE_EVERY_S,
    CloudWatchFeed,
    HealthBoard,
    Metering,
    _output_lag_max_s,
    open_metering,
)
from kclrun.manager.report_writer import ReportWriter
from kclrun.model.time import WallTime
from kclrun.observe.health import HealthLimits
from kclrun.observe.logs import EventLog, LineSink
from kclrun.observe.metrics import MetricWindow
from kclrun.observe.publishing import Publisher
from kclrun.observe.sample import LeaseSample, ManagerSample, ShardReport
from kclrun.protocol.status import LeaseStatus, WorkerState

LIMITS = HealthLimits(stall_s=120.0, look_age_max_s=10.0, drain_max_s=70.0, output_lag_max_s=180.0)


def sample(records, now):
    lease = LeaseSample(
        shard="a", state="running", records_total=records, bytes_total=records * 10, still_s=0.0
    )
    return ManagerSample(
        application="orders",
        stream="orders",
        owner="me",
        uptime_s=now,
        total_leases=1,
        total_shards=1,
        unclaimed_leases=0,
        worker_leases=1,
        leases=(lease,),
    )


class Clock:
    """A loop whose time is the test's."""

    def __init__(self):
        self.time = 0.0
        self.due = []

    def now(self):
        return self.time

    def after(self, delay_s, callback):
        self.due.append((self.time + delay_s, callback))

    def run_to(self, end):
        while self.due and self.due[0][0] <= end:
            self.time, callback = self.due.pop(0)
            callback()
        self.time = end


class Sampler:
    """One record a second; `departed` is what the next look finds gone."""

    def __init__(self):
        self.departed = {}

    def take(self, now):
        return sample(int(now), now)

    def take_departed(self, _sample):
        departed, self.departed = self.departed, {}
        return departed


class Outlet:
    def __init__(self):
        self.put_batches = []

    def batches(self, measurements):
        yield measurements

    def put(self, batch):
        self.put_batches.append({one.name: one.statistics for one in batch})


@pytest.fixture
def log(tmp_path):
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sink = LineSink(fd)
    yield EventLog(sink, app="orders", owner="me")
    sink.close()
    os.close(fd)


class World:
    def __init__(self, log):
        self.clock = Clock()
        self.sampler = Sampler()
        self.board = HealthBoard(LIMITS, self.clock.now)
        self.outlet = Outlet()
        self.metering = Metering(
            self.sampler,
            self.board,
            loop=self.clock,
            log=log,
            cloudwatch=CloudWatchFeed(Publisher(self.outlet, log), MetricWindow("orders", {})),
        )

    def look(self):
        """As the manager's timer does."""
        self.metering.read(self.sampler.take(self.clock.now()))
        self.clock.after(SAMPLE_EVERY_S, self.look)


@pytest.fixture
def world(log):
    made = World(log)
    yield made
    made.metering.close()


def test_the_fleet_is_measured_every_20_s_a_lease_every_10_s_and_all_of_it_published_by_the_minute(
    world,
):
    world.look()
    world.clock.run_to(119.0)
    world.metering.close()

    first, second, rest = world.outlet.put_batches
    assert first["total_leases"].count == second["total_leases"].count == 3
    assert first["worker_leases"].count == 3
    assert first["records"].count == second["records"].count == 6
    # Nothing is lost between one minute and the next, nor at the end.
    assert first["records"].total == 52
    assert second["records"].total == 60
    assert rest["records"].total == 119 - 112
    assert second["bytes"].total == 600


def test_what_a_lease_did_that_came_and_went_between_two_looks_is_counted(world):
    world.look()
    world.clock.run_to(5.0)
    world.sampler.departed = {"b": ShardReport(records=400, bytes=4000)}
    world.clock.run_to(30.0)
    world.metering.close()

    (published,) = world.outlet.put_batches
    assert published["records"].total == 30 + 400


def test_health_is_200_or_503_and_says_why(world):
    world.look()

    well = world.board.health()
    world.clock.time += 10.0  # and the loop does not turn
    unwell = world.board.health()

    assert (well.status, msgspec.json.decode(well.body)["status"]) == (200, "ok")
    assert unwell.status == 503
    body = msgspec.json.decode(unwell.body)
    assert body["reasons"][0]["text"] == "the manager has not looked after its leases for 10 s"


def test_nothing_is_opened_that_was_not_asked_for(log):
    settings = Settings(application="orders", stream="orders")
    clock = Clock()

    opened = open_metering(
        settings, Sampler(), failover_s=10.0, owner="o", outlet=None, loop=clock, log=log
    )

    assert opened is None


@pytest.mark.parametrize(
    ("more", "longest_s"),
    [
        ("output: {s3: 's3://bucket', roll: {every: 5m}}\n", 300.0 + 120.0),
        ("output: {s3: 's3://bucket'}\ncheckpoint: {every: batch}\n", 60.0 + 120.0),
        ("output: {path: out}\nstall: 30s\n", 10.0 + 30.0),
        ("output: {path: out}\ncheckpoint: {every: manual}\n", math.inf),
    ],
)
def test_rows_may_wait_for_their_roll_or_checkpoint_and_a_stall(more, longest_s):
    settings = settings_of(
        f"application: orders\nstream: orders\n{more}",
        environment={},
        now=WallTime(1_780_000_000.0),
    )
    assert _output_lag_max_s(settings) == longest_s


def test_a_report_knows_whose_process_died_since_it_was_last_asked():
    report = ReportWriter()
    status = LeaseStatus(pid=1, incarnation=1, state=WorkerState.FINISHED, records_total=5)
    report.started("a")
    assert report.take_departed() == frozenset()

    report.departed("a", status)

    assert report.take_departed() == {"a"}
    assert report.take_departed() == frozenset()
    assert report.shard("a", None).records == 5


def test_a_board_judges_by_the_age_of_its_sample_at_the_moment_of_the_look():
    clock = Clock()
    clock.time = 1_000.0
    board = HealthBoard(LIMITS, clock.now)
    assert (board.look()[0], board.health().status) == (None, 200), "it is starting"
    clock.time = 1_000.0 + LIMITS.stall_s
    assert board.health().status == 503, "it never looked"

    board.show(sample(1, clock.time), clock.time)
    assert board.health().status == 200
    clock.time += LIMITS.look_age_max_s - 0.5
    assert board.health().status == 200
    clock.time += 0.5

    shown, verdict = board.look()
    assert (shown.uptime_s, verdict.is_healthy) == (1_000.0 + LIMITS.stall_s, False)
    assert board.health().status == 503
