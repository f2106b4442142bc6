"""A pause beyond the row that an operator wrote: rows that are created later, moves, its end."""

import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.manager import blockers
from kclrun.leases.shard_sync import Listing, children_to_create
from kclrun.model.lease import Handoff, Lease, Pause, Scope, inherited_pause, pause_of_stream
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from tests.support.tables import over_rows
from tests.unit.leases.manager_life import ME, OTHER, ManagerLife, replace, row
from tests.unit.leases.test_lease_generations import HIGH, LOW, view_of

ONE, UNTIL = Pause(9.0), Pause(1.0, until=5.0)
STREAM, ALL = Pause(1.0, scope=Scope.STREAM), Pause(2.0, until=5.0, scope=Scope.ALL)


@over_rows(
    ("pauses", "inherited", "of_stream"),
    [
        ((), None, None),
        ((None, None), None, None),
        ((None, ONE), ONE, None),
        ((UNTIL, ONE), ONE, None),
        ((UNTIL, Pause(1.0, until=6.0)), Pause(1.0, until=6.0), None),
        ((ONE, STREAM), STREAM, STREAM),
        ((ALL, STREAM), ALL, ALL),
    ],
)
def test_a_new_row_has_the_widest_pause_and_of_those_the_one_that_ends_last(
    pauses, inherited, of_stream
):
    rows = [Lease(key=f"s{n}", checkpoint=TRIM_HORIZON, pause=p) for n, p in enumerate(pauses)]

    assert inherited_pause(rows) == inherited_pause(reversed(rows)) == inherited
    assert pause_of_stream(rows) == of_stream


@pytest.mark.parametrize(
    ("parents", "beside", "created"),
    [((ONE, None), None, ONE), ((None, None), ALL, ALL), ((None, None), ONE, None)],
    ids=["one of its parents", "its stream", "another shard alone"],
)
def test_a_child_that_a_manager_creates_has_the_pause_of_its_parents_or_its_stream(
    parents, beside, created
):
    rows = (
        Lease(key="s0", checkpoint=SHARD_END, hash_range=LOW, pause=parents[0]),
        Lease(key="s1", checkpoint=SHARD_END, hash_range=HIGH, pause=parents[1]),
        Lease(key="s9", checkpoint=TRIM_HORIZON, pause=beside),
    )
    shards = [
        Shard("s0", LOW, "1", "5"),
        Shard("s1", HIGH, "1", "5"),
        Shard("s2", HashRange(0, HASH_KEY_MAX), "6", None, "s0", "s1"),
    ]

    (creation,) = children_to_create(view_of(*rows), Listing(shards, 0.0, 0.0))

    assert [each.pause for each in creation.children] == [created]


def test_a_shard_that_is_found_without_parents_has_the_pause_of_all():
    life = ManagerLife(row("s0", ME, 3, hash_range=LOW, pause=ALL))
    shards = (Shard("s0", LOW, "1", None), Shard("s1", HIGH, "1", None))

    life.say(e.ShardsListed(shards, 5200.0))

    (created,) = life.writes(ch.CreateLease)
    assert (created.lease.key, created.lease.pause) == ("s1", ALL)


def paused_life(pause, **policy):
    life = ManagerLife(row("s0", pause=pause), **policy)
    life.apply(life.writes()[-1])
    assert life.state() == "paused"
    return life


def test_a_paused_lease_is_renewed_and_started_at_the_end_of_the_pause_and_not_before():
    life = paused_life(Pause(5000.0, until=5110.0))  # the life begins at 5100

    for _ in range(3):
        life.tick(3.0)
        assert life.asked(c.StartProcess) == []
        for change in life.writes(ch.Renew):
            life.apply(change)
    assert life.state() == "paused"
    assert life.core.next_deadline(life.now) <= 110.0
    life.tick(1.1)
    for change in life.writes(ch.Renew):
        life.apply(change)

    (start,) = life.asked(c.StartProcess)
    assert start.past_pause == Pause(5000.0, until=5110.0)
    assert not start.is_alone


def test_a_process_that_ended_for_a_pause_is_not_alone_afterwards():
    """A lease that was asked to leave a shared process gets one of its own; a paused one not."""
    life = ManagerLife(row("s0"))
    life.apply(life.writes()[-1])
    life.say(e.ProcessStarted("s0", 7))
    life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    life.say(e.ProcessReported("s0", reports.LeaseKept(is_paused=True)))
    life.say(e.ProcessExited("s0", 7, "ended"))

    life.say(e.RowRead("s0", replace(life.rows["s0"], pause=ONE)))
    life.rows["s0"] = replace(life.rows["s0"], pause=ONE)
    life.apply(life.writes(ch.Renew)[-1])

    assert life.state() == "paused"
    assert not life.core.held_lease("s0").needs_own_process
    assert life.core.held_lease("s0").restarts.deaths == 0


def test_a_paused_lease_is_given_to_another_owner_that_asks_for_it():
    life = paused_life(ONE)
    asked = replace(life.rows["s0"], handoff=Handoff(OTHER, 1.0))
    life.rows["s0"] = asked

    life.tick(4.0)
    life.apply(life.writes(ch.Renew)[-1])

    (offer,) = life.writes(ch.Offer)
    assert offer.offered_to == OTHER


def test_a_job_that_runs_until_caught_up_waits_for_the_end_of_a_pause():
    life = paused_life(ONE)
    view = view_of(replace(life.rows["s0"], owner=ME))

    lines = blockers(view, {"s0": life.core.held_lease("s0")}, ME)

    assert lines == ("s0 is paused",)
