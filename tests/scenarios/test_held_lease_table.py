"""What every event does to a lease in every state: `held_lease.yaml`, complete.

Each state is reached through events; states in which the row is renewed also with a renewal under
way. A cell is the state after the event and the commands about the lease. A state, an event or a
step of the product's table without its cell fails.
"""

from pathlib import Path

import yaml

from kclrun.errors import InvariantViolation
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.held_lease import HeldLease
from kclrun.leases.transitions import TRANSITIONS, State
from kclrun.local.lease_rows import change_row
from kclrun.model.lease import Halt, Handoff, Pause
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from tests.support.tables import over_rows
from tests.unit.leases.manager_life import JAVA, ME, OTHER, ManagerLife, replace, row

TABLE = yaml.load(Path(__file__).with_name("held_lease.yaml").read_text(), Loader=yaml.CSafeLoader)
del TABLE["groups"]
HALT = Halt("it stood still", 1.0, 1.0)


def named(situations):
    """The situations of a cell, those of its groups one by one."""
    for each in situations:
        yield from named(each) if isinstance(each, list) else (each,)


CELLS = {
    (event, situation): cell
    for event, cells in TABLE.items()
    for cell, situations in cells.items()
    for situation in named(situations)
}


def written(life):
    """Answer the write of s0 that is under way."""
    life.apply(life.writes()[-1])
    return life


def taking():
    return ManagerLife(row())


def starting():
    return written(taking())


def running():
    life = starting()
    life.say(e.ProcessStarted("s0", 7))
    life.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    return life


def after(state, *events):
    life = state()
    for event in events:
        life.say(event)
    return life


def examining():
    return after(running, e.ProcessExited("s0", 7, "killed"))


def backing_off():
    return after(starting, e.StartFailed("s0", "fork"), e.StartFailed("s0", "fork"))


def renewing():
    life = examining()
    life.say(e.RowRead("s0", life.rows["s0"]))
    return life


def adopted(**fields):
    life = ManagerLife(row("s0", ME, 3, **fields), row("p", OTHER))
    life.say(e.RowRead("s0", life.rows["s0"]))
    return written(life)


def halting():
    life = after(
        running,
        e.ProcessReported("s0", reports.ProcessorFailed("process_records", "bad record", 1)),
        e.ProcessExited("s0", 7, "ended"),
    )
    life.say(e.RowRead("s0", life.rows["s0"]))
    return life


def renewed_late(state):
    """Its renewal is under way."""
    life = state()
    life.tick(4.0)
    assert life.writes(ch.Renew)
    return life


def waiting():
    return adopted(parents=frozenset({"p"}))


def quarantined():
    return adopted(taken_from=JAVA)


def outwaited():
    life = quarantined()
    life.tick(10.5)
    return life


def halted():
    return written(halting())


def paused(until=0.0):
    return adopted(pause=Pause(1.0, until))


def failing():
    """Three starts failed in a row, beside another owner, and the row is written."""
    life = written(ManagerLife(row(), row("p", OTHER)))
    for _ in range(2):
        life.say(e.StartFailed("s0", "fork"))
        life.tick(1.0)
    return life


def renewed_in_a_pause():
    """Its pause has become longer than the time to the next renewal."""
    life = backing_off()
    while life.state() != "backing off" or not life.writes(ch.Renew):
        life.tick(0.5)
        if life.asked(c.StartProcess):
            life.say(e.StartFailed("s0", "fork"))
        elif life.state() != "backing off" and life.writes(ch.Renew):
            written(life)
    return life


# By the value of the state, and what else is under way.
SITUATIONS = {
    "taking": taking,
    "examining": examining,
    "backing off": backing_off,
    "backing off (renewing)": renewed_in_a_pause,
    "waiting": waiting,
    "waiting (renewing)": lambda: renewed_late(waiting),
    "renewing before start": renewing,
    "quarantined": quarantined,
    "quarantined (renewing)": lambda: renewed_late(quarantined),
    "quarantined (reading)": outwaited,
    "starting": starting,
    "starting (two starts failed)": failing,
    "running": running,
    "draining": lambda: after(running, e.DrainRequested("SIGTERM")),
    "exiting": lambda: after(running, e.ProcessReported("s0", reports.LeaseLost("fence"))),
    "exiting (ended)": lambda: after(running, e.ProcessReported("s0", reports.ShardEnded(()))),
    "halting": halting,
    "halted": halted,
    "halted (renewing)": lambda: renewed_late(halted),
    "paused": paused,
    "paused (renewing)": lambda: renewed_late(paused),
    "paused (with an end)": lambda: paused(until=5110.0),
    "releasing": lambda: after(backing_off, e.DrainRequested("SIGTERM")),
}


def ours(life, **fields):
    """The row as ours, moved on since the write under way was decided."""
    before = life.rows["s0"]
    return replace(before, **{"owner": ME, "counter": before.counter + 5, **fields})


def resolved(outcome_of):
    """The write under way comes back; where there is none, a renewal does."""

    def event(life):
        change = life.core.held_lease("s0").requests.in_flight.change or ch.Renew("s0", ME, 99)
        return e.WriteResolved(change, outcome_of(life, change))

    return event


def applied(**seen_too):
    def outcome(life, change):
        if change.key == "s0" and life.core.held_lease("s0").requests.in_flight.change is None:
            return ch.Applied(life.rows["s0"])
        return ch.Applied(replace(change_row(change, life.rows["s0"]), **seen_too))

    return resolved(outcome)


def read(**fields):
    return lambda life: e.RowRead("s0", ours(life, **fields))


EVENTS = {
    "process started": lambda _: e.ProcessStarted("s0", 7),
    "start failed": lambda _: e.StartFailed("s0", "fork"),
    "lease claimed": lambda _: e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)),
    "start unclaimed": lambda _: e.ProcessReported("s0", reports.StartUnclaimed("expired")),
    "checkpointed": lambda _: e.ProcessReported("s0", reports.Checkpointed(TRIM_HORIZON, 3)),
    "shard ended": lambda _: e.ProcessReported("s0", reports.ShardEnded(())),
    "lease released": lambda _: e.ProcessReported("s0", reports.LeaseReleased(TRIM_HORIZON)),
    "lease lost": lambda _: e.ProcessReported("s0", reports.LeaseLost("fence")),
    "process replaced": lambda _: e.ProcessReported("s0", reports.ProcessReplaced("rows")),
    "processor failed": lambda _: e.ProcessReported(
        "s0", reports.ProcessorFailed("process_records", "bad record", 1)
    ),
    "process broke": lambda _: e.ProcessReported("s0", reports.ProcessBroke("no memory")),
    "process broke at records": lambda _: e.ProcessReported(
        "s0", reports.ProcessorFailed("process_records", "no memory", 1, is_host_fault=True)
    ),
    "process exited": lambda _: e.ProcessExited("s0", 7, "killed"),
    "write applied": applied(),
    "write applied, asked for": applied(handoff=Handoff(OTHER, 1.0)),
    "write applied, halted": applied(halt=HALT),
    "write applied, resumed": applied(halt=None, pause=None),
    "write applied, paused": applied(pause=Pause(1.0)),
    "write applied, ended": applied(checkpoint=SHARD_END),
    "write failed, ours": resolved(lambda life, _: ch.ConditionFailed(ours(life))),
    "write failed, of another": resolved(lambda li, _: ch.ConditionFailed(ours(li, owner=OTHER))),
    "write failed, no row": resolved(lambda *_: ch.ConditionFailed(None)),
    "write unknown": resolved(lambda *_: ch.OutcomeUnknown("reset")),
    "write throttled": resolved(lambda *_: ch.Throttled("slow")),
    "write refused": resolved(lambda *_: ch.Refused("AccessDenied", "no")),
    "write refused, broken row": resolved(lambda *_: ch.Refused(ch.BROKEN_ROW, "no")),
    "row read, ours": read(),
    "row read, halted": read(halt=HALT),
    "row read, ended": read(checkpoint=SHARD_END),
    "row read, of another": read(owner=OTHER),
    "row read, gone": lambda _: e.RowRead("s0", None),
    "row unreadable": lambda _: e.RowUnreadable("s0", "no checkpoint"),
    "parents read, ended": lambda _: e.ParentsRead("s0", (row("p", checkpoint=SHARD_END),)),
    "parents read, not ended": lambda _: e.ParentsRead("s0", (row("p", OTHER),)),
    "a failover passed": lambda _: e.Ticked(),
    "drain requested": lambda _: e.DrainRequested("SIGTERM"),
}


def words(command):
    if isinstance(command, c.WriteRow):
        return type(command.change).__name__ + (" later" if command.not_before else "")
    return command.event if isinstance(command, c.Note) else type(command).__name__


def outcome(situation, event):
    life = SITUATIONS[situation]()
    before = life.state()
    assert before == situation.partition(" (")[0]
    of_others = c.ScanTable | c.FindOffers | c.ListShards | c.PublishOthersInSight
    happened = EVENTS[event](life)
    try:
        said = life.say(happened, after=10.5 if event == "a failover passed" else 0.0)
    except InvariantViolation:
        return "error"
    about = [words(command) for command in said if not isinstance(command, of_others)]
    now = life.state() or "gone"
    return " + ".join(["stays" if now == before else now, *about])


def test_every_state_and_every_event_has_its_cell():
    states = {situation.partition(" (")[0] for situation in SITUATIONS}

    assert states == {state.value for state in State if state is not State.GONE}
    assert sorted(CELLS) == sorted((event, each) for event in EVENTS for each in SITUATIONS)


@over_rows("event", EVENTS)
def test_every_event_in_every_state_has_the_effect_of_its_cell(event):
    found = {situation: outcome(situation, event) for situation in SITUATIONS}

    assert found == {situation: CELLS[event, situation] for situation in SITUATIONS}


def test_every_step_of_the_table_is_taken_on_the_way_to_some_cell(monkeypatch):
    taken, step = set(), HeldLease.step

    def noted(held_lease, to):
        before = held_lease.state
        step(held_lease, to)
        taken.add((before, to))

    monkeypatch.setattr(HeldLease, "step", noted)
    for situation in SITUATIONS:
        for event in EVENTS:
            outcome(situation, event)

    assert {(state, each) for state, steps in TRANSITIONS.items() for each in steps} == taken
