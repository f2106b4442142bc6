"""A pause beyond the row that an operator wrote: rows that are created later, moves, its end."""

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.caught_up import blockers
from kclrun.model.lease import Pause, Scope
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.shard import Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import ME, ManagerLife, replace, row
from tests.unit.leases.test_lease_generations import HIGH, LOW, view_of

ONE, UNTIL = Pause(9.0), Pause(1.0, until=5.0)
STREAM, ALL = Pause(1.0, scope=Scope.STREAM), Pause(2.0, until=5.0, scope=Scope.ALL)


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


def test_a_job_that_runs_until_caught_up_waits_for_the_end_of_a_pause():
    life = paused_life(ONE)
    view = view_of(replace(life.rows["s0"], owner=ME))

    lines = blockers(view, {"s0": life.core.held_lease("s0")}, ME)

    assert lines == ("s0 is paused",)
