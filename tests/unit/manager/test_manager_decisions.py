"""Small pure decisions of the parent: the fleet's failover, a report, what a child inherits."""

import signal
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.files.durable import write_report
from kclrun.manager import report_writer
from kclrun.manager.launcher import lease_environment
from kclrun.manager.report_writer import ReportWriter
from kclrun.manager.ring_reader import exit_code_of, exit_words
from kclrun.manager.watch import fleet_failover_s
from kclrun.manager.world import RunNames
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.support.tables import over_rows
from tests.unit.leases.manager_life import OTHER, THIRD, ManagerLife, row


def position(number):
    return ExtendedSequenceNumber(str(number))


def status(**fields):
    base = {"pid": 1, "incarnation": 1, "state": WorkerState.PROCESSING, "at_tip": True}
    return LeaseStatus(**{**base, **fields})


# The fleet's failover [P7].


@over_rows(
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
    report = writer.report(RunNames("x", "y", "z"), exit_reason="drained", seconds=1.0)

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
        "retries": 0,
        "dead_letters": 0,
        "skipped": 0,
    }
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.json"]


# Ends and environments.


def test_an_end_is_said_in_words():
    assert exit_words(0) == "exit code 0 (done)"
    assert exit_words(9 << 8) == "exit code 9"
    assert "SIGKILL" in exit_words(signal.SIGKILL)
    assert "memory" in exit_words(signal.SIGKILL)
    assert "status was lost" in exit_words(None)
    assert (exit_code_of(3 << 8), exit_code_of(9), exit_code_of(None)) == (3, None, None)
    assert exit_words(signal.SIGKILL, [signal.SIGKILL]) == "killed by SIGKILL", "by us"
    assert exit_words(signal.SIGTERM) == "killed by SIGTERM"
    assert exit_words(70) == "killed by 70", "a signal without a name"
    assert exit_words(3 << 8) == "exit code 3 (unclaimed)"
    assert exit_words(3 << 8, is_vouched=False) == "exit code 3", "user code may have chosen it"


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
    report.departed("a", status(records_total=5, dead_letters_total=2, skipped_total=1))
    report.departed("a", status(dead_letters_total=4))
    report.ended("a")
    report.departed("b", status(records_total=7, skipped_total=10))

    assert report.besides({"b"}) == (5, 7)
    assert report.besides(()) == (12, 17)
    assert report.besides({"a", "b"}) == (0, 0)


def test_a_report_names_the_last_shards_and_counts_all(monkeypatch):
    monkeypatch.setattr(report_writer, "_NAMED_MAX", 3)
    report = ReportWriter()
    report.started("lives")
    for key in "abcd":
        report.started(key)
        report.departed(key, status(records_total=5))
        report.ended(key)

    whole = report.report(RunNames("", "", ""), exit_reason="", seconds=1.0)

    assert list(whole.shards) == ["c", "d", "lives"]
    assert (whole.totals.shards, whole.totals.ended, whole.totals.records) == (5, 4, 20)
    assert report.besides({"d"}) == (15, 0)
    assert report.take_departed() == {"c", "d"}


def test_the_totals_of_a_report_are_the_sums_over_restarts_and_shards():
    report = ReportWriter()
    for key, number in (("a", 1), ("a", 2), ("b", 4)):
        report.started(key)
        reported = status(
            records_total=number,
            bytes_total=10 * number,
            batches_total=100 * number,
            processing_s_total=0.5 * number,
        )
        report.departed(key, reported)
    report.ended("b")

    whole = report.report(RunNames("app", "s", "o"), exit_reason="drained", seconds=1.23456)

    totals = whole.totals
    assert (totals.shards, totals.ended, totals.restarts) == (2, 1, 1)
    assert (totals.records, totals.bytes, totals.batches) == (7, 70, 700)
    assert totals.processing_seconds == 3.5
    assert whole.shards["a"].records == 3
    assert whole.seconds == 1.235
