"""The small pure decisions of the parent: how a stop goes, what stalls, what is caught up."""

import signal
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.lifecycle.caught_up import LOOK_APART_S, CaughtUp, is_at_tip
from kclrun.lifecycle.stall import silence_max_s, stalled
from kclrun.lifecycle.stopping import Stage, StopPlan, latest_fence, left_undone, next_force
from kclrun.manager.launcher import lease_environment
from kclrun.manager.manager import ReportWriter
from kclrun.manager.ring_reader import exit_code_of, exit_words
from kclrun.manager.sampling import fleet_failover_s
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol.status import LeaseStatus, WorkerState
from kclrun.sinks.durable_files import write_report
from tests.unit.leases.manager_life import OTHER, THIRD, ManagerLife, row


def position(number):
    return ExtendedSequenceNumber(str(number))


def status(**fields):
    base = {"pid": 1, "incarnation": 1, "state": WorkerState.PROCESSING, "at_tip": True}
    return LeaseStatus(**{**base, **fields})


# The fleet's failover [P7].


@pytest.mark.parametrize(
    ("claim", "rows", "failover_s"),
    [
        ("no row says one", [row(owner=OTHER)], 10.0),
        ("a live owner has a shorter one", [row(owner=OTHER, failover_s=4.0)], 4.0),
        ("a longer one bounds nothing", [row(owner=OTHER, failover_s=40.0)], 10.0),
        (
            "the shortest of several",
            [row("s0", OTHER, failover_s=4.0), row("s1", THIRD, failover_s=3.0)],
            3.0,
        ),
        ("a row without an owner", [row(owner=None, failover_s=4.0)], 10.0),
        (
            "an ended row",
            [row("s0", OTHER, failover_s=4.0, checkpoint=SHARD_END), row("s1", OTHER)],
            10.0,
        ),
    ],
)
def test_the_shortest_failover_of_a_live_owner_bounds_every_fence(claim, rows, failover_s):
    life = ManagerLife(*rows)

    assert fleet_failover_s(SimpleNamespace(core=life.core), 10.0) == failover_s


# Stopping.


def test_a_stop_is_not_whole_where_a_process_left_what_it_was_given_without_a_checkpoint():
    lost = status(state=WorkerState.LOST, has_undone=True)

    assert left_undone(lost)
    assert left_undone(status(state=WorkerState.PROCESSING, has_undone=True)), "it died"
    assert not left_undone(status(state=WorkerState.HALTED, has_undone=True)), "by decision"
    assert not left_undone(status(state=WorkerState.LOST))
    assert not left_undone(None)


def test_the_first_signal_begins_the_grace_and_the_second_leaves_two_seconds():
    plan = StopPlan(grace_s=60.0)

    assert plan.press(signal.SIGTERM, 100.0) is Stage.DRAINING
    assert plan.force_instant == 160.0
    assert plan.press(signal.SIGINT, 110.0) is Stage.HURRIED
    assert plan.force_instant == 112.0


def test_a_second_signal_never_lengthens_a_short_grace():
    plan = StopPlan(grace_s=1.0)
    plan.press(signal.SIGTERM, 100.0)

    plan.press(signal.SIGTERM, 100.5)

    assert plan.force_instant == 101.0


def test_a_stop_that_is_hurried_by_us_has_two_seconds_and_never_undoes_a_quit():
    plan = StopPlan(grace_s=60.0)
    plan.hurry(100.0)
    assert (plan.stage, plan.force_instant) == (Stage.HURRIED, 102.0)

    plan.press(signal.SIGQUIT, 101.0)
    plan.hurry(101.5)

    assert (plan.stage, plan.force_instant) == (Stage.QUITTING, 101.0)


def test_quit_ends_all_patience_from_any_stage():
    for presses in ([], [signal.SIGTERM], [signal.SIGTERM, signal.SIGTERM]):
        plan = StopPlan(grace_s=60.0)
        for number in presses:
            plan.press(number, 100.0)
        assert plan.press(signal.SIGQUIT, 101.0) is Stage.QUITTING
        assert plan.force_instant == 101.0


def test_a_drain_that_begins_during_a_stop_gets_what_is_left_of_the_grace():
    plan = StopPlan(grace_s=60.0)
    assert plan.force_instant_from(50.0) == 110.0
    plan.drain(100.0)

    assert plan.force_instant_from(150.0) == 160.0
    assert not plan.drain(150.0)


def test_a_machine_that_ends_soon_bounds_a_stop_and_never_lengthens_it():
    plan = StopPlan(grace_s=60.0)
    plan.drain(100.0)

    plan.finish_by(110.0)
    assert plan.force_instant == 110.0
    plan.finish_by(130.0)
    assert (plan.stage, plan.force_instant) == (Stage.DRAINING, 110.0)


def test_force_is_abrt_for_the_stacks_and_kill_a_second_later():
    assert next_force(None, []) == (None, None)
    assert next_force(10.0, []) == (signal.SIGABRT, 10.0)
    assert next_force(10.0, [signal.SIGABRT]) == (signal.SIGKILL, 11.0)
    assert next_force(10.0, [signal.SIGABRT, signal.SIGKILL]) == (None, None)


@pytest.mark.parametrize(
    ("last_send_instant", "fence_instant"),
    [
        (95.0, 105.0),
        # It has claimed nothing yet, and may until its start command expires.
        (0.0, 103.0),
        # What cannot be read may be the worst.
        (None, 110.0),
    ],
)
def test_the_latest_fence_is_a_failover_after_the_last_send(last_send_instant, fence_instant):
    latest = latest_fence(last_send_instant, expires_instant=103.0, failover_s=10.0, now=100.0)

    assert latest == fence_instant


# Stalls.


@pytest.mark.parametrize(
    ("seen", "what", "since"),
    [
        (None, "reading has not begun", 1.0),
        (status(state=WorkerState.CLAIMING), "reading has not begun", 1.0),
        (status(processing_since_instant=9.0), "user code has not returned", 9.0),
        (status(fetching_since_instant=8.0), "a request for records has not come back", 8.0),
        (status(published_instant=110.0), "the process says nothing", 110.0),
    ],
)
def test_what_a_restart_can_mend_is_a_stall(seen, what, since):
    stall = stalled(seen, began_instant=1.0, stall_s=120.0, failover_s=10.0, now=130.0)

    assert (stall.what, stall.since) == (what, since)


@pytest.mark.parametrize(
    "seen",
    [
        status(),
        status(state=WorkerState.HALTED),
        status(processing_since_instant=50.0, fetching_since_instant=50.0),
        # A shard without records, or a service that is away: nothing was fetched for ever.
        status(last_fetch_instant=2.0, last_batch_instant=2.0, published_instant=129.0),
        status(published_instant=111.0),
    ],
)
def test_what_only_waits_is_no_stall(seen):
    assert stalled(seen, began_instant=1.0, stall_s=120.0, failover_s=10.0, now=130.0) is None


def test_of_a_process_that_fell_silent_only_the_silence_is_told():
    # A request was under way when a call took the GIL: it is not the request that hangs.
    seen = status(fetching_since_instant=9.0, processing_since_instant=9.0, published_instant=10.0)
    at = {"began_instant": 1.0, "stall_s": 5.0, "failover_s": 10.0}

    assert stalled(seen, **at, now=14.5) is None
    assert stalled(seen, **at, now=15.0).what == "the process says nothing"


def test_a_silent_process_gets_two_failovers_and_never_more_than_stall():
    assert silence_max_s(failover_s=30.0, stall_s=120.0) == 60.0
    assert silence_max_s(failover_s=30.0, stall_s=40.0) == 40.0
    # Less would be no more than one answer of a service takes at the worst.
    assert silence_max_s(failover_s=3.0, stall_s=120.0) == 20.0


# Caught up.


def test_at_the_tip_means_everything_fetched_was_processed_and_no_user_code_runs():
    assert is_at_tip(status())
    assert is_at_tip(status(fetched=position(5), processed=position(5)))
    assert is_at_tip(status(fetched=None, processed=position(5)))
    assert not is_at_tip(None)
    assert not is_at_tip(status(at_tip=False))
    assert not is_at_tip(status(fetched=position(6), processed=position(5)))
    assert not is_at_tip(status(fetched=position(6)))
    assert not is_at_tip(status(state=WorkerState.STARTING))
    assert not is_at_tip(status(processing_since_instant=1.0))


def look(caught_up, now, **more):
    found = {"is_source_done": True, "blockers": (), "statuses": (status(),), **more}
    return caught_up.look(now, **found)


def test_caught_up_needs_two_looks_far_enough_apart():
    caught_up = CaughtUp()
    nearly, enough = LOOK_APART_S - 0.1, LOOK_APART_S

    assert [look(caught_up, now) for now in (0.0, nearly, enough)] == [False, False, True]


@pytest.mark.parametrize(
    "doubt",
    [
        {"is_source_done": False},
        {"blockers": ("shard-2 is starting",)},
        {"statuses": (status(), status(at_tip=False))},
        {"statuses": (status(records_total=1),)},
    ],
)
def test_any_doubt_between_two_looks_starts_the_wait_over(doubt):
    caught_up = CaughtUp()
    look(caught_up, 0.0)

    assert not look(caught_up, LOOK_APART_S - 0.1, **doubt)
    # The total goes back to what it was, which counts as movement too.
    assert not look(caught_up, LOOK_APART_S)
    assert not look(caught_up, 1.5 * LOOK_APART_S)
    assert look(caught_up, 2 * LOOK_APART_S)


# Report.


def counted(records, first, last, **more):
    return status(
        records_total=records,
        bytes_total=records * 10,
        batches_total=1,
        processing_s_total=0.5,
        first_delivered=position(first),
        processed=position(last),
        **more,
    )


def test_a_report_adds_the_dead_incarnations_to_the_living_one():
    report = ReportWriter()
    report.started("s")
    report.departed("s", counted(5, 1, 5))
    report.started("s")

    shard = report.shard("s", counted(3, 4, 7, checkpointed=position(7)))

    assert (shard.records, shard.bytes, shard.batches) == (8, 80, 2)
    assert (shard.first_position, shard.last_position, shard.checkpoint) == ("1", "7", "7")
    assert shard.restarts == 1


def test_a_process_that_never_said_anything_counts_as_a_restart_and_nothing_else():
    report = ReportWriter()
    report.started("s")
    report.departed("s", None)
    report.started("s")

    assert report.shard("s", None).records == 0
    assert report.shard("s", None).restarts == 1


def test_the_report_file_is_whole_and_has_totals(tmp_path):
    writer = ReportWriter()
    for key in ("a", "b"):
        writer.started(key)
        writer.departed(key, counted(2, 1, 2))
    writer.ended("b")
    report = writer.report(
        application="x", stream="y", owner="z", exit_reason="drained", seconds=1.0
    )

    write_report(tmp_path / "deep" / "report.json", report)

    read = msgspec.json.decode((tmp_path / "deep" / "report.json").read_bytes())
    assert read["totals"] == {
        "shards": 2,
        "ended": 1,
        "records": 4,
        "bytes": 40,
        "batches": 2,
        "processing_seconds": 1.0,
        "restarts": 0,
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.json"]


# Ends and environments.


def test_an_end_is_said_in_words():
    assert exit_words(0) == "exit code 0 (done)"
    assert exit_words(9 << 8) == "exit code 9"
    assert "SIGKILL" in exit_words(signal.SIGKILL)
    assert "memory" in exit_words(signal.SIGKILL)
    assert "nobody" in exit_words(None)
    assert (exit_code_of(3 << 8), exit_code_of(9), exit_code_of(None)) == (3, None, None)


ENVIRONMENT = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "https_proxy": "http://x",
    "AWS_CA_BUNDLE": "/ca.pem",
    "AWS_SECRET_ACCESS_KEY": "s",
    "AWS_REGION": "eu-west-1",
    "DATABASE_URL": "db://orders",
    "PGPASSWORD": "p",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "WATCHDOG_USEC": "30000000",
    "WATCHDOG_PID": "7",
}
OF_THE_SERVICE = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}


def test_lease_processes_get_the_whole_environment_but_the_words_to_the_service_manager():
    assert ENVIRONMENT.keys() - lease_environment(ENVIRONMENT).keys() == OF_THE_SERVICE
    assert lease_environment(ENVIRONMENT)["DATABASE_URL"] == "db://orders"


@pytest.mark.parametrize(
    ("only", "kept"),
    [
        ((), set()),
        (("DATABASE_URL",), {"DATABASE_URL"}),
        (("AWS_*",), {"AWS_SECRET_ACCESS_KEY", "AWS_REGION"}),
        (("DATABASE", "PG*", "NOTIFY_SOCKET"), {"PGPASSWORD"}),
    ],
)
def test_the_environment_is_narrowed_to_names_and_what_python_and_tls_need(only, kept):
    needed = {"PATH", "LC_ALL", "https_proxy", "AWS_CA_BUNDLE"}

    assert lease_environment(ENVIRONMENT, only).keys() == needed | kept


def test_the_records_of_a_shard_that_is_gone_stay_in_the_total():
    report = ReportWriter()
    report.departed("a", status(records_total=5))
    report.ended("a")
    report.departed("b", status(records_total=7))

    assert report.records_besides({"b"}) == 5
    assert report.records_besides(()) == 12
    assert report.records_besides({"a", "b"}) == 0


def test_the_totals_of_a_report_are_the_sums_over_restarts_and_shards(tmp_path):
    report = ReportWriter()
    for key, number in (("a", 1), ("a", 2), ("b", 4)):
        report.started(key)
        told = status(
            records_total=number,
            bytes_total=10 * number,
            batches_total=100 * number,
            processing_s_total=0.5 * number,
        )
        report.departed(key, told)
    report.ended("b")

    whole = report.report(
        application="app", stream="s", owner="o", exit_reason="drained", seconds=1.23456
    )

    totals = whole.totals
    assert (totals.shards, totals.ended, totals.restarts) == (2, 1, 1)
    assert (totals.records, totals.bytes, totals.batches) == (7, 70, 700)
    assert totals.processing_seconds == 3.5
    assert whole.shards["a"].records == 3
    assert whole.seconds == 1.235
