"""The writer of rows in our hands refuses what its one rule forbids."""

from __future__ import annotations

import pytest

from kclrun.errors import InvariantViolation
from kclrun.leases.custody import Custody, State
from kclrun.leases.policy import ManagerPolicy
from kclrun.leases.writing import RowWriter
from kclrun.protocol.writes import Applied, Renew

RENEW = Renew("s0", "me", 1)


def writer():
    return RowWriter(ManagerPolicy(me="me"), lambda: 0.5, [])


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.DRAINING, State.LEAVING])
def test_no_row_is_written_beside_its_process(state):
    with pytest.raises(InvariantViolation, match="a second writer"):
        writer().send(Custody(key="s0", state=state), RENEW, 0.0)


def test_no_second_write_is_sent_while_one_is_unresolved_or_being_read_back():
    custody = Custody(key="s0", state=State.RESTING)
    writing = writer()
    writing.send(custody, RENEW, 0.0)

    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.send(custody, RENEW, 0.0)
    with pytest.raises(InvariantViolation, match="a second writer"):
        writing.send(Custody(key="s0", state=State.RESTING, is_reading=True), RENEW, 0.0)


def test_an_outcome_needs_a_write_under_way():
    with pytest.raises(InvariantViolation, match="no write under way"):
        writer().resolve(Custody(key="s0", state=State.RESTING), Applied(None), 0.0)
