"""The writer of the rows that we hold refuses what its one rule forbids."""

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.events import WriteResolved
from kclrun.leases.held_lease import HeldLease, RowRequests
from kclrun.leases.held_leases import RowWrites
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.transitions import State
from kclrun.protocol.writes import Applied, Renew

RENEW = Renew("s0", "me", 1)


def writer():
    return RowWrites(ManagerPolicy(me="me"), lambda: 0.5)


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.DRAINING, State.EXITING])
def test_no_row_is_written_beside_its_process(state):
    with pytest.raises(InvariantViolation, match="a second writer"):
        writer().begin(HeldLease(key="s0", state=state), RENEW, 0.0)


def test_no_second_write_is_sent_while_one_is_unresolved_or_being_read_back():
    held_lease = HeldLease(key="s0", state=State.BACKING_OFF)
    writing = writer()
    writing.begin(held_lease, RENEW, 0.0)

    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.begin(held_lease, RENEW, 0.0)
    is_read = RowRequests(is_reading=True)
    read_back = HeldLease(key="s0", state=State.BACKING_OFF, requests=is_read)
    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.begin(read_back, RENEW, 0.0)


def test_an_outcome_needs_a_write_under_way():
    event = WriteResolved(RENEW, Applied(None))

    with pytest.raises(InvariantViolation, match="no write under way"):
        writer().on_outcome(
            HeldLease(key="s0", state=State.BACKING_OFF), event, 0.0, is_draining=False
        )
