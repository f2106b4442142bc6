"""The writer of rows in our hands refuses what its one rule forbids."""

from __future__ import annotations

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.held_lease import HeldLease, State
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.row_writer import RowWriter
from kclrun.protocol.writes import Applied, Renew

RENEW = Renew("s0", "me", 1)


def writer():
    return RowWriter(ManagerPolicy(me="me"), lambda: 0.5, [])


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.DRAINING, State.EXITING])
def test_no_row_is_written_beside_its_process(state):
    with pytest.raises(InvariantViolation, match="a second writer"):
        writer().send(HeldLease(key="s0", state=state), RENEW, 0.0)


def test_no_second_write_is_sent_while_one_is_unresolved_or_being_read_back():
    held_lease = HeldLease(key="s0", state=State.BACKING_OFF)
    writing = writer()
    writing.send(held_lease, RENEW, 0.0)

    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.send(held_lease, RENEW, 0.0)
    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.send(HeldLease(key="s0", state=State.BACKING_OFF, is_reading=True), RENEW, 0.0)


def test_an_outcome_needs_a_write_under_way():
    with pytest.raises(InvariantViolation, match="no write under way"):
        writer().resolve(HeldLease(key="s0", state=State.BACKING_OFF), Applied(None), 0.0)
