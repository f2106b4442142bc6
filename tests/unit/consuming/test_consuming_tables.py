"""The tables of the lease: states and their diagram, expected and late events."""

import re

import pytest

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming import states
from kclrun.consuming.states import EXPECTED, FINAL, LATE, TRANSITIONS, State, Step
from kclrun.errors import InvariantViolation
from kclrun.protocol import writes as changes
from kclrun.protocol.writes import Applied
from tests.unit.consuming.lease_driver import KEY, ME, Driver, p

EVENTS = on.Event.__args__
A_CHANGE = changes.Renew(KEY, ME, 6)
SAMPLES = {
    on.Started: on.Started(),
    on.Ticked: on.Ticked(),
    on.WriteResolved: on.WriteResolved(A_CHANGE, Applied(None), 1000.0),
    on.RowsNotKept: on.RowsNotKept(A_CHANGE, "no room"),
    on.OwnRowRead: on.OwnRowRead(None),
    on.ReadFailed: on.ReadFailed("x"),
    on.LookUpFailed: on.LookUpFailed("x"),
    on.RowsRead: on.RowsRead(()),
    on.ShardsListed: on.ShardsListed(()),
    on.BatchDelivered: on.BatchDelivered(p(20), 1, 1),
    on.BatchProcessed: on.BatchProcessed(p(20)),
    on.ShardExhausted: on.ShardExhausted(()),
    on.CheckpointRequested: on.CheckpointRequested(1, None),
    on.CallReturned: on.CallReturned(),
    on.ProcessorFailed: on.ProcessorFailed("process_records", "E", 1),
    on.DeliveryStopped: on.DeliveryStopped(),
    on.DrainRequested: on.DrainRequested("x"),
    on.ReleaseRequested: on.ReleaseRequested(),
    on.ManagerGone: on.ManagerGone(),
    on.FailoverChanged: on.FailoverChanged(9.0),
    on.OthersInSight: on.OthersInSight(True),
    on.ThreadStalled: on.ThreadStalled(2.0, in_user_code=True),
}


def diagram():
    """The docstring's lines as (state, step, state)."""
    found = set()
    state = None
    for line in states.__doc__.splitlines():
        if not line.startswith("    "):
            continue
        if match := re.match(r"    (\w+)\s", line):
            state = match[1]
        found |= {(state, step, after) for step, after in re.findall(r"(\w+) → (\w+)", line)}
    return found


def test_the_diagram_in_the_docstring_is_the_table():
    table = {
        (state.value, step.value, after.value)
        for state, row in TRANSITIONS.items()
        for step, after in row.items()
    }

    assert diagram() == table
    assert len(table) == 28


def test_every_state_can_be_reached_and_left_unless_it_is_final():
    reached = {State.CLAIMING}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS.get(state, {}).values()}

    assert reached == set(State)
    assert set(State) - set(TRANSITIONS) == FINAL
    assert {step for row in TRANSITIONS.values() for step in row} == set(Step)


@pytest.mark.parametrize("state", sorted(set(State) - FINAL, key=lambda each: each.value))
def test_from_every_state_there_is_a_way_out(state):
    reached = {state}
    for _ in State:
        reached |= {after for each in reached for after in TRANSITIONS.get(each, {}).values()}

    assert reached & FINAL


def test_every_event_has_its_row_and_no_state_both_expects_and_ignores_it():
    assert set(EXPECTED) == set(EVENTS) == set(SAMPLES)
    assert set(LATE) <= set(EVENTS)
    for event, late in LATE.items():
        assert EXPECTED[event] & late == set()


@pytest.mark.parametrize("state", list(State), ids=lambda each: each.value)
@pytest.mark.parametrize("event", EVENTS, ids=lambda each: each.__name__)
def test_an_event_is_expected_late_or_a_bug(event, state):
    driver = Driver().begin()
    driver.life.state = state
    driver.life._failure = SAMPLES[on.ProcessorFailed]
    sample = SAMPLES[event]

    if state in EXPECTED[event]:
        return  # tests/scenarios/consuming.yaml says what follows
    elif state in LATE.get(event, ()):
        before = len(driver.of(do.SendWrite))
        driver.tell(sample)
        assert driver.life.ledger.processed == p(10)
        assert state not in FINAL or len(driver.of(do.SendWrite)) == before
    else:
        with pytest.raises(InvariantViolation, match=f"{event.__name__} in state {state.value}"):
            driver.tell(sample)


def test_final_states_say_nothing_more():
    driver = Driver().begin()
    driver.happen(on.DrainRequested("x"))
    assert driver.life.is_finished

    for event in (on.Ticked(), on.DeliveryStopped(), on.ManagerGone(), on.DrainRequested("x")):
        assert driver.tell(event) == []


def test_a_step_that_is_not_in_the_table_is_a_bug():
    with pytest.raises(InvariantViolation, match="lease s0: settled in state claiming"):
        Driver().life._move(Step.SETTLED)


def test_a_state_without_a_claim_is_a_bug():
    life = Driver().life
    life.state = State.PROCESSING

    with pytest.raises(InvariantViolation, match="without a claim"):
        life.check()
