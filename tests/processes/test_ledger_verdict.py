"""The judge of the ledger runs can find each fault: otherwise its silence proves nothing."""

import pytest

from tests.processes.ledger_rig.deliveries import Batch, judge

PUT = {"shard-0": [(str(100 + n), "k", n) for n in range(6)]}


class Written:
    torn = 0

    def __init__(self, *lives):
        """Each life: (pid, checkpoint it began from, indices of the records it was given)."""
        self.marks, self.batches = [], []
        for token, (pid, position, given) in enumerate(lives):
            where = {"shard": "shard-0", "token": token, "pid": pid}
            self.marks.append({"what": "began", "position": position, **where})
            records = tuple(PUT["shard-0"][index] for index in given)
            self.batches.append(Batch(0.0, pid, "a", "shard-0", token, records))
        self.delivered = {number for batch in self.batches for number, _, _ in batch.records}


def test_a_run_without_a_fault_has_none():
    ledger = Written((1, "TRIM_HORIZON", [0, 1, 2]), (2, "102", [3, 4, 5]))

    verdict = judge(PUT, ledger)

    assert verdict.faults == []
    assert (verdict.records, verdict.delivered, verdict.duplicates) == (6, 6, 0)


def test_duplicates_of_a_killed_process_are_counted_and_allowed_up_to_the_cap():
    ledger = Written((1, "TRIM_HORIZON", [0, 1, 2]), (2, "100", [1, 2, 3, 4, 5]))

    assert judge(PUT, ledger, killed={1}, cap=2).faults == []
    assert judge(PUT, ledger, killed={1}, cap=2).duplicates == 2
    assert "[I7]" in judge(PUT, ledger, killed={1}, cap=1).faults[0]


def test_records_that_were_gone_before_anybody_could_read_them_are_no_loss_and_no_others():
    ledger = Written((1, "TRIM_HORIZON", [0, 1, 2]))

    assert judge(PUT, ledger, expired={"103", "104", "105"}).faults == []
    assert "1 records were never delivered" in judge(PUT, ledger, expired={"103", "104"}).faults[0]


def test_a_key_goes_on_in_a_child_behind_what_has_expired_of_its_parent_and_not_sooner():
    put = {"shard-0": PUT["shard-0"][:4], "shard-1": PUT["shard-0"][4:]}
    ledger = Written((1, "TRIM_HORIZON", [0, 1, 2]))
    ledger.marks.append({"what": "began", "position": "TRIM_HORIZON", **CHILD})
    ledger.batches.append(Batch(1.0, 2, "a", "shard-1", 9, tuple(put["shard-1"])))
    ledger.delivered |= {"104", "105"}

    assert judge(put, ledger, expired={"103"}).faults == []
    faults = judge(put, ledger).faults
    assert any("[I1]" in each for each in faults)
    assert any("[I3]" in each for each in faults)


CHILD = {"shard": "shard-1", "token": 9, "pid": 2}


@pytest.mark.parametrize(
    ("lives", "fault"),
    [
        pytest.param([(1, "TRIM_HORIZON", [0, 1, 2, 3, 4])], "never delivered [I1]", id="end"),
        pytest.param(
            [(1, "TRIM_HORIZON", [0, 1, 2]), (2, "103", [4, 5])],
            "begins above what was delivered before [I1]",
            id="a checkpoint above what was delivered",
        ),
        pytest.param([(1, "TRIM_HORIZON", [0, 2, 3, 4, 5])], "in order [I6]", id="gap"),
        pytest.param([(1, "TRIM_HORIZON", [0, 2, 1, 3, 4, 5])], "in order [I6]", id="order"),
        pytest.param([(1, "TRIM_HORIZON", [0, 1, 1, 2, 3, 4, 5])], "in order [I6]", id="twice"),
        pytest.param([(1, "TRIM_HORIZON", [0, 2, 1, 3, 4, 5])], "[I3]", id="order of a key"),
        pytest.param(
            [(1, "TRIM_HORIZON", [0, 1, 2, 3]), (2, "100", [1, 2, 3, 4, 5])],
            "nobody killed those [I8]",
            id="duplicates of a process in good order",
        ),
        pytest.param(
            [(1, "TRIM_HORIZON", [0, 1, 2]), (2, "102", [3]), (3, "101", [2, 3, 4, 5])],
            "moved back [I2]",
            id="a checkpoint that moved back",
        ),
        pytest.param(
            [(1, "77", [0, 1, 2, 3, 4, 5])], "where no record was put", id="unknown checkpoint"
        ),
    ],
)
def test_each_fault_is_found(lives, fault):
    verdict = judge(PUT, Written(*lives), killed=(), cap=10)

    assert any(fault in each for each in verdict.faults), verdict.faults
