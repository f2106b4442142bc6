"""The tables of the lease: states and their diagram, expected and late events.

`tests/scenarios/lease_life.yaml` has what each event leads to in each state.
"""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.lease import events, states
from kclrun.lease.states import EXPECTED, FINAL, LATE, TRANSITIONS, State, Transition
from tests.support.tables import drawn_transitions, named_transitions, over_rows
from tests.unit.lease.lease_driver import Driver


def test_the_diagram_in_the_theory_of_operation_is_the_table():
    assert drawn_transitions(states) == named_transitions(TRANSITIONS)
    assert len(drawn_transitions(states)) == 31


def test_every_state_can_be_reached_and_left_unless_it_is_final():
    reached = {State.CLAIMING}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS.get(state, {}).values()}

    assert reached == set(State)
    assert set(State) - set(TRANSITIONS) == FINAL
    assert {step for row in TRANSITIONS.values() for step in row} == set(Transition)


@over_rows("state", sorted(set(State) - FINAL, key=lambda each: each.value))
def test_from_every_state_there_is_a_way_out(state):
    reached = {state}
    for _ in State:
        reached |= {after for each in reached for after in TRANSITIONS.get(each, {}).values()}

    assert reached & FINAL


def test_every_event_has_its_row_and_no_state_both_expects_and_ignores_it():
    assert set(EXPECTED) == set(events.Event.__args__)
    assert set(LATE) <= set(EXPECTED)
    for event, late in LATE.items():
        assert EXPECTED[event] & late == set()


def test_a_step_that_is_not_in_the_table_is_a_bug():
    with pytest.raises(InvariantViolation, match="lease s0: settled in state claiming"):
        Driver().life._move(Transition.SETTLED)


def test_a_state_without_a_claim_is_a_bug():
    life = Driver().life
    life.state = State.PROCESSING

    with pytest.raises(InvariantViolation, match="without a claim"):
        life.check()
