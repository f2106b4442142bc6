"""The core of a lease as one table: in each state, what each event leads to (`lease_life.yaml`).

The table is complete: an event that a state lacks fails. A state is reached by real events, with a
batch up to 20 processed and unsaved from `processing` on. `KCLRUN_GOLDEN=write` writes the table
again; read the difference.
"""

import functools
import os
from pathlib import Path

import pytest
import yaml

from kclrun.errors import InvariantViolation
from kclrun.lease import commands, events
from kclrun.lease.states import FINAL, State
from kclrun.lease.states import LATE as LATE_IN
from kclrun.protocol import reports, writes
from tests.support.tables import over_rows
from tests.unit.lease.lease_driver import KEY, ME, OTHER, Driver, child, p

TABLE = Path(__file__).with_name("lease_life.yaml")
LATE, BUG = "late", "a bug"


def _in_flight(driver, outcome):
    """The write in flight resolves; if there is none, a renewal of before."""
    change = driver.life.own.pending or writes.Renew(KEY, ME, 6)
    return events.WriteResolved(change, outcome(driver, change), driver.now)


EVENTS = {
    "Started": events.Started(),
    "Ticked": events.Ticked(),
    "WriteResolved, applied": lambda d: _in_flight(d, lambda d, change: d.table.write(change)),
    "WriteResolved, row stolen": lambda d: (
        d.steal() if d.stored.owner == ME else None,
        _in_flight(d, lambda d, _: writes.ConditionFailed(d.stored)),
    )[1],
    "WriteResolved, unknown": lambda d: _in_flight(d, lambda *_: writes.OutcomeUnknown("lost")),
    "WriteResolved, throttled": lambda d: _in_flight(d, lambda *_: writes.Throttled("slow")),
    "RowsNotKept": lambda d: events.RowsNotKept(_in_flight(d, lambda *_: None).change, "no room"),
    "OutputsBegan": events.OutputsBegan(p(30), {}),
    "OutputsCommitted": events.OutputsCommitted(p(30), {}),
    "OutputsNotCommitted": events.OutputsNotCommitted(p(30), "no room"),
    "OutputsRefused": events.OutputsRefused("other columns"),
    "OutputsSuperseded": events.OutputsSuperseded("another owner wrote"),
    "OwnRowRead": lambda d: events.OwnRowRead(d.stored),
    "OwnRowRead, gone": events.OwnRowRead(None),
    "ReadFailed": events.ReadFailed("no route"),
    "LookUpFailed": events.LookUpFailed("no route"),
    "RowsRead": events.RowsRead((("s2", None),)),
    "ShardsListed": events.ShardsListed(()),
    "BatchDelivered": events.BatchDelivered(p(30), 1, 100),
    "BatchProcessed": events.BatchProcessed(p(30)),
    "ShardExhausted": events.ShardExhausted((child("s1"),)),
    "ShardExhausted, expired": events.ShardExhausted((), is_expired=True),
    "CheckpointRequested": lambda d: events.CheckpointRequested(1, d.life.ledger.delivered),
    "CallReturned": events.CallReturned(),
    "ProcessorFailed": reports.ProcessorFailed("process_records", "E", 1),
    "ProcessorFailed, host": reports.ProcessorFailed("initialize", "E", 1, is_host_fault=True),
    "DeliveryStopped": events.DeliveryStopped(),
    "DrainRequested": events.DrainRequested("a deploy"),
    "RestartRequested": events.RestartRequested(),
    "ReleaseRequested": events.ReleaseRequested(),
    "ManagerGone": events.ManagerGone(),
    "FailoverChanged": events.FailoverChanged(3.0),
    "OthersInSight": events.OthersInSight(others=True),
    "ThreadStalled": events.ThreadStalled(2.0, in_user_code=True),
}


def _until(driver, state, *steps):
    """Hand in the events, and perform commands one by one until the state is reached."""
    for step in steps:
        driver.tell(step)
        while driver.state is not state and driver.queue:
            driver._perform(driver.queue.popleft())
    assert driver.state is state
    return driver


def _processing(**settings):
    driver = Driver(**settings).begin()
    driver.batch(20)
    return driver


def _waiting(state, *steps, user_returns=True):
    def reach():
        driver = _processing()
        driver.user_returns = user_returns
        return _until(driver, state, *steps)

    return reach


def _claiming():
    driver = Driver()
    driver.tell(events.Started())
    return driver


def _initializing():
    driver = Driver()
    driver.user_returns = False
    return _until(driver, State.INITIALIZING, events.Started())


def _losing(state, *, user_returns):
    def reach():
        driver = _processing()
        driver.user_returns = user_returns
        driver.now += 9.0  # past the fence
        driver.happen(events.Ticked())
        assert driver.state is state
        return driver

    return reach


def _unclaimed():
    driver = Driver(owner=OTHER)
    driver.happen(events.Started())
    return driver


DRAIN, FAIL, EXHAUST = EVENTS["DrainRequested"], EVENTS["ProcessorFailed"], EVENTS["ShardExhausted"]
REACHED = {
    State.CLAIMING: _claiming,
    State.INITIALIZING: _initializing,
    State.PROCESSING: _processing,
    State.CREATING: _waiting(State.CREATING, events.ShardExhausted((child("s1", "s0", "s2"),))),
    State.NAMING: _waiting(State.NAMING, EXHAUST),
    State.CLOSING: _waiting(State.CLOSING, EXHAUST, user_returns=False),
    State.ENDING: _waiting(State.ENDING, EXHAUST),
    State.STOPPING: _waiting(State.STOPPING, DRAIN, user_returns=False),
    State.RELEASING: _waiting(State.RELEASING, DRAIN),
    State.FAILING: _waiting(State.FAILING, FAIL),
    State.LOSING: _losing(State.LOSING, user_returns=False),
    State.ENDED: _waiting(State.ENDED, EXHAUST),
    State.RELEASED: _waiting(State.RELEASED, DRAIN),
    State.FAILED: _waiting(State.FAILED, FAIL),
    State.LOST: _losing(State.LOST, user_returns=True),
    State.UNCLAIMED: _unclaimed,
}


def _said(command):
    """A command by its name, and what tells it from others of the name."""
    match command:
        case commands.SendWrite(change) | commands.SendLateCheckpoint(change):
            place = getattr(change, "position", None)
            return f"{type(change).__name__}{'' if place is None else f' at {place}'}"
        case reports.Report():
            return f"report {type(command).__name__}"
        case commands.AnswerCheckpoint(_, answer):
            return f"answer {answer.name.lower()}"
        case commands.Exit(cause):
            return f"exit {cause.value}"
        case _:
            return type(command).__name__


def cell(state, event):
    """What the event leads to: the state after it and the commands; late; or a bug."""
    driver = REACHED[state]()
    assert driver.state is state
    posted = EVENTS[event]
    posted = posted(driver) if callable(posted) else posted
    processed = driver.life.ledger.processed
    try:
        follow = driver.life.handle(posted, driver.now)
    except InvariantViolation as error:
        is_unexpected = str(error) == f"{type(posted).__name__} in state {state.value}"
        return BUG if is_unexpected else f"{BUG}: {error}"
    if state in LATE_IN.get(type(posted), ()):
        assert driver.life.ledger.processed == processed
        return " ".join([LATE, *map(_said, follow)])
    return f"{driver.state.value}: {', '.join(map(_said, follow)) or '-'}"


@functools.cache
def _table():
    return yaml.load(TABLE.read_text(), Loader=yaml.CSafeLoader)


def write_table():
    """Every cell, as the code is now."""
    table = {state.value: {event: cell(state, event) for event in EVENTS} for state in State}
    header = (
        "# State, event: the state after it, and the commands. Read by test_lease_life_table.py.\n"
    )
    TABLE.write_text(header + yaml.safe_dump(table, sort_keys=False, width=1000))


if os.environ.get("KCLRUN_GOLDEN") == "write":
    write_table()


def test_the_table_has_a_cell_for_each_state_and_event_and_no_other():
    assert set(REACHED) == set(State)
    names = {name.partition(",")[0] for name in EVENTS}
    assert names == {kind.__name__ for kind in events.Event.__args__}
    assert {state: list(row) for state, row in _table().items()} == {
        state.value: list(EVENTS) for state in State
    }


# After how many seconds the next tick is due. `failover` is 9 s: the claim expires with it, and
# renewals go out every 2.975 s. A loss waits 30 s for the batch under way.
TICKS_AFTER_S = {State.CLAIMING: 9.0, State.LOSING: 30.0}
# Where user code has got no records, or a checkpoint covers them all.
HAS_NOTHING_UNDONE = {
    *(State.CLAIMING, State.INITIALIZING, State.UNCLAIMED),
    *(State.ENDED, State.RELEASED, State.FAILED),
}


@over_rows("state", State)
def test_a_state_says_when_it_ticks_and_whether_records_come_again(state):
    driver = REACHED[state]()
    life, now = driver.life, driver.now

    assert life.has_undone == (state not in HAS_NOTHING_UNDONE)
    assert life.is_finished == (state in FINAL)
    if state not in FINAL:
        assert life.next_deadline(now) - now == pytest.approx(TICKS_AFTER_S.get(state, 2.975))


@over_rows("state", State)
def test_each_event_leads_to_the_state_and_commands_of_the_table(state):
    assert {event: cell(state, event) for event in EVENTS} == _table()[state.value]
