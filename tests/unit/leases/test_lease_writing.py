"""The writer of rows in our hands refuses what its one rule forbids."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.events import WriteResolved
from kclrun.leases.held_lease import HeldLease, State
from kclrun.leases.held_leases import HeldLeases
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.table_view import Observation
from kclrun.protocol.writes import Applied, Renew

RENEW = Renew("s0", "me", 1)


def writer():
    return HeldLeases(ManagerPolicy(me="me"), lambda: 0.5, Observation(10.0))


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.DRAINING, State.EXITING])
def test_no_row_is_written_beside_its_process(state):
    with pytest.raises(InvariantViolation, match="a second writer"):
        writer()._write(HeldLease(key="s0", state=state), RENEW, 0.0)


def test_no_second_write_is_sent_while_one_is_unresolved_or_being_read_back():
    held_lease = HeldLease(key="s0", state=State.BACKING_OFF)
    writing = writer()
    writing._write(held_lease, RENEW, 0.0)

    with pytest.raises(InvariantViolation, match="a second writer"):
        writing._write(held_lease, RENEW, 0.0)
    with pytest.raises(InvariantViolation, match="a second writer"):
        writing._write(HeldLease(key="s0", state=State.BACKING_OFF, is_reading=True), RENEW, 0.0)


def test_an_outcome_needs_a_write_under_way():
    event = WriteResolved(RENEW, Applied(None))

    with pytest.raises(InvariantViolation, match="no write under way"):
        writer().on_write(event, HeldLease(key="s0", state=State.BACKING_OFF), 0.0)
