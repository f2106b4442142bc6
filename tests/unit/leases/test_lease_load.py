"""How a manager exchanges heavy leases for light ones: from the scans to the asks."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.load import WATCHED_S
from kclrun.leases.table_view import STEADY_AFTER_S
from kclrun.model.lease import OFFERED, Handoff, Load
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied, ConditionFailed, OutcomeUnknown, Throttled, Unavailable
from tests.unit.leases.manager_life import (
    JAVA,
    ME,
    OTHER,
    THIRD,
    ManagerLife,
    replace,
    row,
    rows_of,
)

HEAVY, LIGHT = 900.0, 100.0


class LoadedLife(ManagerLife):
    """Runs `m0`, `m1` … beside the rows of the others. `loads` maps a row to its KiB/s."""

    def __init__(self, loads, *rows, **policy):
        ours = sum(key.startswith("m") for key in loads)
        super().__init__(*[row(f"m{number}") for number in range(ours)], *rows, **policy)
        for take in self.writes(ch.Take):
            self.apply(take)
            self.say(e.ProcessStarted(take.key, 7))
            claimed = reports.LeaseClaimed(2, self.rows[take.key].checkpoint)
            self.say(e.ProcessReported(take.key, claimed))
        self.measure(loads)

    def measure(self, loads):
        for key, kbps in loads.items():
            self.rows[key] = replace(self.rows[key], load=Load(kbps, kbps / 4096))

    def pass_scans(self, seconds):
        """Scans until so much time has passed, or the manager writes something."""
        end = self.now + seconds
        self.said = ()
        while self.now < end and not self.writes():
            self.scan()
            for key, lease in self.rows.items():
                if lease.owner == ME:
                    self.rows[key] = replace(lease, counter=lease.counter + 1)
        return self.writes()

    def exchange(self):
        """Until the first step of an exchange is written; returns its asks."""
        asks = self.pass_scans(STEADY_AFTER_S + WATCHED_S + 30.0)
        assert asks, "no exchange"
        return asks

    def give(self, ask):
        """Our process answers the ask of an exchange: the row is offered to the other owner."""
        self.rows[ask.key] = replace(
            self.rows[ask.key], owner=OFFERED, offered_by=ME, offered_to=ask.owner, handoff=None
        )
        self.say(e.ProcessReported(ask.key, reports.LeaseReleased(ask.owner)))
        self.say(e.ProcessExited(ask.key, 7, "exit code 0"))


def two_each(**policy):
    loads = {"m0": HEAVY, "m1": HEAVY, "o0": LIGHT, "o1": LIGHT}
    return LoadedLife(loads, *rows_of(OTHER, 2, "o"), **policy)


@pytest.fixture
def life():
    return two_each()


def test_a_heavy_owner_asks_its_own_process_for_a_lease_in_the_name_of_the_light_one(life):
    (ask,) = life.exchange()

    assert (ask.owner, ask.asked, ask.seen) == (OTHER, ME, None)
    assert ask.key in {"m0", "m1"}


def test_nothing_is_exchanged_before_leases_are_steady_and_the_exchange_was_watched_a_minute(life):
    began = life.now

    life.exchange()

    assert life.now - began >= STEADY_AFTER_S + WATCHED_S


def test_once_the_first_ask_applied_the_light_lease_is_asked_for_and_the_exchange_is_logged(life):
    (ask,) = life.exchange()

    life.apply(ask)

    (asked_back,) = life.writes()
    assert (asked_back.owner, asked_back.asked) == (ME, OTHER)
    assert asked_back.key in {"o0", "o1"}
    assert life.notes() == ["lease_given_for_load"]
    note = life.asked(c.Note)[0]
    assert note.fields["row_owner"] == OTHER
    assert note.fields["reason"] == "our load is 1.80 of an owner's mean, its load 0.20"


def test_an_unknown_outcome_counts_as_applied(life):
    (ask,) = life.exchange()

    life.resolve(ask, OutcomeUnknown("timed out"))

    assert [change.asked for change in life.writes(ch.Ask)] == [OTHER]


@pytest.mark.parametrize(
    "outcome", [ConditionFailed(None), Throttled("slow"), Unavailable("no route")]
)
def test_an_ask_that_did_not_apply_ends_the_exchange_without_another_write(life, outcome):
    (ask,) = life.exchange()

    life.resolve(ask, outcome)

    assert life.writes() == []
    assert life.pass_scans(STEADY_AFTER_S) == []


def test_while_the_exchange_is_under_way_the_counts_ask_for_nothing_and_no_other_one_begins(life):
    (ask,) = life.exchange()
    life.apply(ask)
    (asked_back,) = life.writes()
    life.apply(asked_back)

    assert life.pass_scans(25.0) == []


def test_after_the_exchange_nothing_moves_while_the_loads_are_even(life):
    (ask,) = life.exchange()
    life.apply(ask)
    (asked_back,) = life.writes()
    life.apply(asked_back)
    life.give(ask)
    life.scan()
    life.rows[ask.key] = replace(life.rows[ask.key], owner=OTHER, offered_to=None)
    life.rows[asked_back.key] = replace(
        life.rows[asked_back.key], owner=OFFERED, offered_by=OTHER, offered_to=ME, handoff=None
    )
    life.scan()
    life.take(asked_back.key)

    life.said = ()
    assert [x for x in life.pass_scans(900.0) if isinstance(x, ch.Ask)] == []


def test_a_lease_that_our_process_does_not_give_ends_the_exchange_and_each_pause_is_longer(life):
    tries = []
    for _ in range(3):
        (ask,) = life.pass_scans(7200.0)
        tries.append(life.now)
        life.apply(ask)
        (back,) = life.writes()
        life.apply(back)
        assert life.pass_scans(25.0) == []
        for key in (ask.key, back.key):  # dropped by the renewals of their processes
            life.rows[key] = replace(life.rows[key], handoff=None)

    assert tries[1] - tries[0] >= 300.0
    assert tries[2] - tries[1] >= 600.0


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("halted", {"halt": "x"}),
        ("asked for", {"handoff": Handoff(THIRD, 1.0)}),
        ("without a figure", {"load": None}),
    ],
)
def test_a_lease_that_must_not_move_is_neither_given_nor_asked_for(life, what, fields):
    if "halt" in fields:
        fields = {"halt": ch.Halt("poison", 1.0)}
    for key in ("o0", "o1"):
        life.rows[key] = replace(life.rows[key], **fields)

    changes = life.pass_scans(STEADY_AFTER_S + WATCHED_S + 30.0)

    assert not [x for x in changes if isinstance(x, ch.Ask) and x.asked == ME], what


def test_an_exchange_is_at_most_as_many_swaps_as_moves_per_cycle():
    loads = {f"m{n}": HEAVY for n in range(6)} | {f"o{n}": LIGHT for n in range(6)}

    asks = [
        len(LoadedLife(loads, *rows_of(OTHER, 6, "o"), **policy).exchange())
        for policy in ({}, {"moves_per_cycle": 2})
    ]

    assert asks == [3, 2]


def test_no_lease_is_in_two_swaps_of_an_exchange():
    loads = {f"m{n}": HEAVY for n in range(6)} | {f"o{n}": LIGHT for n in range(6)}
    life = LoadedLife(loads, *rows_of(OTHER, 6, "o"))
    given, taken = life.exchange(), []
    for ask in given:
        life.apply(ask)
        taken += [ask.key for ask in life.writes(ch.Ask) if ask.asked == OTHER]

    assert len({ask.key for ask in given}) == 3
    assert len(taken) == len(set(taken)) == 3


def test_counts_alone_decide_where_the_settings_say_so():
    life = two_each(balance="counts")

    assert life.pass_scans(900.0) == []


def test_a_draining_manager_asks_for_no_lease_after_the_first_step(life):
    (ask,) = life.exchange()

    life.say(e.DrainRequested("SIGTERM"))
    life.apply(ask)

    assert life.writes(ch.Ask) == []


def test_a_drain_waits_for_the_outcome_of_the_first_step(life):
    (ask,) = life.exchange()
    life.say(e.DrainRequested("SIGTERM"))
    for key in ("m0", "m1"):
        life.say(e.ProcessReported(key, reports.LeaseReleased(OTHER)))
        life.say(e.ProcessExited(key, 7, "exit code 0"))
    assert not life.core.is_finished

    life.resolve(ask, ConditionFailed(None))

    assert life.core.is_finished


def test_an_outcome_of_no_exchange_cannot_come(life):
    with pytest.raises(InvariantViolation, match="no exchange under way"):
        life.say(e.WriteResolved(ch.Ask("m0", OTHER, ME, 1.0), Applied(None)))


def test_an_exchange_that_stops_to_pay_while_it_is_watched_is_not_made(life):
    life.pass_scans(STEADY_AFTER_S + 20.0)

    life.measure({"m0": 500.0, "m1": 500.0, "o0": 500.0, "o1": 500.0})

    assert life.pass_scans(600.0) == []


def test_a_lucky_figure_in_one_scan_moves_nothing():
    """The scan that chose an exchange does not count among those that must confirm it."""
    even = {"m0": 500.0, "m1": 500.0, "o0": 500.0, "o1": 500.0}
    life = LoadedLife(even, *rows_of(OTHER, 2, "o"))
    life.pass_scans(STEADY_AFTER_S + 10.0)
    for _ in range(10):
        life.measure({"m0": HEAVY, "o0": LIGHT})
        assert life.pass_scans(0.1) == []
        life.measure(even)
        assert life.pass_scans(WATCHED_S + 10.0) == []


def test_java_workers_are_never_given_a_lease_however_light_they_are():
    loads = {"m0": HEAVY, "m1": HEAVY, "o0": LIGHT, "o1": LIGHT}
    life = LoadedLife(loads, *rows_of(JAVA, 2, "o"))

    assert life.pass_scans(900.0) == []
