"""The states of a held lease: the table, its drawing, and what must hold in each."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases import transitions
from kclrun.leases.held_lease import HeldLease, ParentReads, RowRequests
from kclrun.leases.transitions import TRANSITIONS, WITH_PROCESS, State, Transition
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import Renew
from tests.support.tables import drawn_transitions, named_transitions, over_rows


def test_the_diagram_in_the_theory_of_operation_is_the_table():
    assert drawn_transitions(transitions) == named_transitions(TRANSITIONS)


def test_every_state_can_be_reached_and_every_one_leads_to_gone():
    def reachable(start):
        seen, todo = {start}, [start]
        while todo:
            for target in TRANSITIONS[todo.pop()].values():
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    assert reachable(State.TAKING) == set(State)
    assert all(State.GONE in reachable(state) for state in State)


def test_only_a_process_that_died_or_never_was_leads_back_to_writing():
    out_of_process = {
        step
        for state in WITH_PROCESS
        for step, target in TRANSITIONS[state].items()
        if target not in WITH_PROCESS
    }

    assert out_of_process == {Transition.DIED, Transition.NOT_STARTED, Transition.GIVEN_UP}


def test_a_step_that_the_table_does_not_name_is_our_bug():
    held_lease = HeldLease(key="s0", state=State.TAKING)

    with pytest.raises(InvariantViolation, match="s0 cannot be claimed: taking"):
        held_lease.step(Transition.CLAIMED)


def sent(change):
    requests = RowRequests()
    requests.begin(change, 0.0, None)
    return requests


def running(**changed):
    fields = {
        "row": Lease(key="s0", checkpoint=TRIM_HORIZON),
        "is_proven": True,
        "parents": ParentReads(are_over=True),
    }
    return HeldLease(key="s0", state=State.RUNNING, **{**fields, **changed})


@over_rows(
    ("changed", "complaint"),
    [
        ({"requests": sent(Renew("s0", "me", 1))}, "a write of ours under way"),
        ({"requests": RowRequests(is_reading=True)}, "a read of ours under way"),
        ({"row": None}, "without a row"),
        ({"is_proven": False}, "without a confirmed write"),
        ({"parents": ParentReads()}, "before its parents ended"),
    ],
)
def test_a_lease_with_a_process_that_breaks_a_rule_is_found_out(changed, complaint):
    running().check()

    with pytest.raises(InvariantViolation, match=complaint):
        running(**changed).check()


def test_a_write_of_another_lease_is_found_out():
    held_lease = HeldLease(key="s0", state=State.BACKING_OFF)
    held_lease.requests.in_flight.begin(Renew("s1", "me", 1))

    with pytest.raises(InvariantViolation, match="another lease's write"):
        held_lease.check()
