"""Bugs in the conditions and updates of the rows: as the table would keep them, weaker."""

from __future__ import annotations

from tests.simulation.mutants.mutant import Mutant

ROWS = "kclrun/local/lease_rows.py"
TABLES = "tests/contract/test_lease_table.py"

OF_CONDITIONS = (
    Mutant(
        name="take-conditional-on-owner-only",
        file=ROWS,
        old=(
            "            return row.counter == change.seen_counter and row.owner =="
            " change.seen_owner"
        ),
        new="            return row.owner == change.seen_owner",
        breaks="a lease that was renewed since the scan is taken",
        source="a4 (KCL assignLease), a6 (kcl-rust acquire)",
        found_at=7,
    ),
    Mutant(
        name="renewal-conditional-on-owner-only",
        file=ROWS,
        old="        case Renew() | Claim():\n            return _is_held(change, row)",
        new=(
            "        case Renew():\n            return row.owner == change.owner\n"
            "        case Claim():\n            return _is_held(change, row)"
        ),
        breaks="a renewal of a dead process lands in the life of its successor",
        source="a6",
        found_at=0,
    ),
    Mutant(
        name="renewal-unconditional",
        file=ROWS,
        old="        case Renew() | Claim():\n            return _is_held(change, row)",
        new=(
            "        case Renew():\n            return True\n"
            "        case Claim():\n            return _is_held(change, row)"
        ),
        breaks="who lost a lease keeps renewing the row of its new owner",
        source="D.7: renew without condition",
        found_at=0,
    ),
    Mutant(
        name="checkpoint-unconditional",
        file=ROWS,
        old="        case ResumeLease():\n            return True",
        new="        case Checkpoint() | ResumeLease():\n            return True",
        breaks="who lost a lease moves the position of its new owner",
        source="a8: non-owners may checkpoint by design",
        found_at=2,
    ),
    Mutant(
        name="end-unconditional",
        file=ROWS,
        old="        case ResumeLease():\n            return True",
        new="        case End() | ResumeLease():\n            return True",
        breaks="who lost a lease ends the shard that its new owner still reads",
        source="a8: SHARD_END is unconditional",
        layer="dense storms",
        found_at=2,
    ),
    Mutant(
        name="release-unconditional",
        file=ROWS,
        old="        case ResumeLease():\n            return True",
        new="        case Release() | Offer() | ResumeLease():\n            return True",
        breaks="who lost a lease gives away what is its new owner's",
        source="a6 (kcl-rust release)",
        found_at=2,
    ),
    Mutant(
        name="position-not-in-the-condition",
        file=ROWS,
        old="            return _is_held(change, row) and row.checkpoint == last",
        new="            return _is_held(change, row)",
        breaks="a checkpoint moves a row back over a late one",
        source="trace H6",
        layer="rough storms",
        found_at=4,
    ),
    Mutant(
        name="late-checkpoint-without-upper-bound",
        file=ROWS,
        old=(
            "            return _is_ours_now(change, row) and change.last <= row.checkpoint"
            " < change.position"
        ),
        new="            return _is_ours_now(change, row) and change.last <= row.checkpoint",
        breaks="a late checkpoint moves the new owner's position back, or un-ends a shard",
        source="P19, trace H6b",
        found_at=0,
    ),
    Mutant(
        name="counter-reset-by-takes",
        file=ROWS,
        old="        owner=change.owner,\n        checkpoint_owner=None,",
        new="        owner=change.owner,\n        counter=1,\n        checkpoint_owner=None,",
        breaks="the counter is no version and no fencing token",
        source="a6: SET leaseCounter = 1",
        found_at=0,
    ),
    Mutant(
        name="checkpoints-keep-the-counter",
        file=ROWS,
        old="_WITHOUT_COUNTER: Final = (Ask, Withdraw, LateCheckpoint, ResumeLease)",
        new="_WITHOUT_COUNTER: Final = (Ask, Withdraw, LateCheckpoint, ResumeLease, Checkpoint)",
        breaks="a lease that checkpoints often stands still for everybody else, and is taken",
        source="P1",
        found_at=0,
    ),
    Mutant(
        name="take-keeps-the-ask",
        file=ROWS,
        old="    return msgspec.structs.replace(\n        _without_handoff(row),",
        new="    return msgspec.structs.replace(\n        row,",
        breaks="the next owner obeys an ask that was made to its predecessor",
        source="trace H8",
        # By contract: the new owner drops the ask as stale, so a storm sees a delay at most.
        layer="tests/contract/test_lease_table_handoffs.py",
    ),
    Mutant(
        name="children-created-whatever-their-parents",
        file="kclrun/local/lease_rows.py",
        old="        if not all(self._parent_holds(parent) for parent in change.parents):",
        new="        if not change.parents:",
        breaks="a lost owner's late creation resurrects children that were cleaned up",
        source="trace C3",
        # In a fleet the rows of ended shards stay for a minute, longer than anything is late.
        layer=f"{TABLES}::test_no_child_is_created_when_the_parent_is_not_held",
    ),
    Mutant(
        name="sent-take-conditional-on-owner-only",
        file="kclrun/aws/clauses.py",
        old='SEEN_COUNTER: Final = Clause("leaseCounter = :seen", "its counter is the one seen")',
        new='SEEN_COUNTER: Final = Clause("leaseCounter >= :seen", "its counter is the one seen")',
        breaks="DynamoDB is asked for weaker conditions than the memory table has",
        source="a6",
        layer=TABLES,
    ),
    Mutant(
        name="sub-sequence-not-advanced",
        file="kclrun/aws/clauses.py",
        old='    "checkpoint = :position, checkpointSubSequenceNumber = :sub,"',
        new='    "checkpoint = :position, checkpointSubSequenceNumber = :zero,"',
        breaks="a checkpoint inside an aggregate does not advance",
        source="a7",
        layer=TABLES,
    ),
)
