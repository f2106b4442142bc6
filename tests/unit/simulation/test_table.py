"""The table behind its network: each fault falls where its name says, and everything is counted."""

import copy

import pytest

from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import (
    Applied,
    ConditionFailed,
    CreateLease,
    OutcomeUnknown,
    Renew,
    Take,
    Throttled,
    Unavailable,
)
from kclrun.simulation.clocks import Scheduler
from kclrun.simulation.network import FaultRates
from kclrun.simulation.table import SimulatedTable
from tests.support.tables import over_rows

ME, OTHER = "kclrun:a:h:1", "kclrun:b:h:2"
TAKE = Take("s0", ME, None, 0, 10.0, "TRIM_HORIZON")


class Watcher:
    def __init__(self):
        self.written = []

    def row_written(self, _sender, change, before, after):
        self.written.append((type(change).__name__, before and before.owner, after.owner))

    def write_refused_in_silence(self, change):
        pass

    def row_deleted_from_outside(self, row):
        pass

    def write_answered(self, sender, change, outcome):
        pass


@pytest.fixture
def world():
    scheduler = Scheduler(1)
    watcher = Watcher()
    table = SimulatedTable(scheduler, watcher)
    table.write("me", CreateLease(Lease(key="s0", checkpoint=TRIM_HORIZON)), lambda _: None)
    scheduler.run_until(1)
    return scheduler, table, watcher


def answer_to(scheduler, table, change, *, wait_s=3.0):
    answers = []
    table.write("me", change, lambda outcome: answers.append((scheduler.now, outcome)))
    assert not answers, "a reply never comes in the same instant"
    began = scheduler.now
    scheduler.run_until(began + wait_s)
    [(at, outcome)] = answers
    return at - began, outcome


def test_a_write_is_applied_between_its_request_and_its_reply(world):
    scheduler, table, watcher = world

    took_s, outcome = answer_to(scheduler, table, TAKE)

    assert outcome == Applied(table.row("s0"))
    assert 0.003 <= took_s < 0.1
    assert watcher.written[-1] == ("Take", None, ME)


@pytest.mark.parametrize(
    ("faults", "kind"),
    [(FaultRates(throttled=1), Throttled), (FaultRates(unreachable=1), Unavailable)],
)
def test_a_write_that_is_throttled_or_never_arrives_changes_nothing(world, faults, kind):
    scheduler, table, _ = world
    table.faults = faults

    _, outcome = answer_to(scheduler, table, TAKE)

    assert isinstance(outcome, kind)
    assert table.row("s0").owner is None


def test_a_request_to_the_other_service_fails_after_its_patience_and_counts_once(world):
    scheduler, table, _ = world
    reported: list[object] = []
    before = copy.copy(table.costs)
    table.network.kinesis_failing = 1.0
    table.network.ask_kinesis(lambda: "listed", reported.append, reported.append)
    scheduler.run_until(1.9)
    assert reported == []
    scheduler.run_until(3.0)
    table.network.kinesis_failing = 0.0
    table.network.ask_kinesis(lambda: "listed", reported.append, reported.append)
    scheduler.run_until(4.0)

    assert reported == ["timed out", "listed"]
    assert (table.costs.requests - before.requests, table.costs.faults - before.faults) == (2, 1)


def test_a_write_whose_reply_is_lost_has_applied_and_its_sender_cannot_know(world):
    scheduler, table, _ = world
    table.faults = FaultRates(lost_reply=1)

    took_s, outcome = answer_to(scheduler, table, TAKE)

    assert isinstance(outcome, OutcomeUnknown)
    assert took_s == pytest.approx(2.0)
    assert table.row("s0").owner == ME


def test_a_write_that_arrives_late_meets_the_row_as_it_is_by_then(world):
    scheduler, table, _ = world
    table.faults = FaultRates(late=1)
    _, outcome = answer_to(scheduler, table, TAKE, wait_s=2.001)
    assert isinstance(outcome, OutcomeUnknown)
    assert table.row("s0").owner is None

    table.faults = FaultRates()
    taken = Take("s0", OTHER, None, 0, 10.0, "TRIM_HORIZON")
    table.write("other", taken, lambda _: None)
    scheduler.run_until(60)

    assert table.row("s0").owner == OTHER


def test_units_are_counted_as_dynamodb_does(world):
    scheduler, table, _ = world
    before = table.costs.write_units

    answer_to(scheduler, table, TAKE)  # a row, and an entry of the owner index
    assert table.costs.write_units == before + 2
    answer_to(scheduler, table, Renew("s0", ME, 1))
    assert table.costs.write_units == before + 3
    _, outcome = answer_to(scheduler, table, Renew("s0", ME, 1))
    assert isinstance(outcome, ConditionFailed)
    assert table.costs.write_units == before + 4  # a condition that fails costs as much

    reads = table.costs.read_units
    table.read("s0", lambda _: None, lambda _: None)
    table.offered(5, lambda _: None, lambda _: None)
    scheduler.run_until(scheduler.now + 1)
    assert table.costs.read_units == reads + 1.5


def test_a_scan_goes_on_behind_a_page_that_lost_rows_meanwhile():
    scheduler = Scheduler(1)
    table = SimulatedTable(scheduler, Watcher(), page_rows_max=2)
    for number in range(5):
        row = Lease(key=f"s{number}", checkpoint=TRIM_HORIZON)
        table.write("me", CreateLease(row), lambda _: None)
    scheduler.run_until(1)
    scans = []

    table.scan(scans.append, scans.append)
    while not table.costs.read_units:  # until the first page is read
        scheduler.run_until(scheduler.now + 0.0005)
    table.delete_by_hand(table.row("s2"))
    scheduler.run_until(scheduler.now + 2)

    assert {"s0", "s1", "s4"} <= {lease.key for lease in scans[0]}


@over_rows(("rows", "pages"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_scan_is_over_with_its_last_page_as_in_dynamodb(rows, pages):
    scheduler = Scheduler(1)
    table = SimulatedTable(scheduler, Watcher(), page_rows_max=2)
    for number in range(rows):
        row = Lease(key=f"s{number}", checkpoint=TRIM_HORIZON)
        table.write("me", CreateLease(row), lambda _: None)
    scheduler.run_until(1)
    scans, before = [], table.costs.requests

    table.scan(scans.append, scans.append)
    scheduler.run_until(2)

    assert [lease.key for lease in scans[0]] == [f"s{number}" for number in range(rows)]
    assert table.costs.requests - before == pages
