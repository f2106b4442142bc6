"""Bugs in the conditions and updates of the rows: as the table would keep them, weaker."""

from tests.simulation.mutants.mutant import Mutant

ROWS = "kclrun/protocol/conditions.py"
TABLES = "tests/contract/test_lease_table.py"
RESETS = "tests/contract/test_lease_table_reset.py"

# From the condition of a release to that of an offer.
_TO_OFFERS = """\
        (
            _COUNTED,
            *_without("owner"),
            *_WITHOUT_HANDOFF,
            _MOVED_IF_IT_MOVES,
            *_OUTPUTS_IF_GIVEN,
        ),
    ),
    writes.Offer: Write(
        "offer",
"""

OF_CONDITIONS = (
    Mutant(
        name="take-conditional-on-owner-only",
        file=ROWS,
        old='_AS_SEEN: Final = (Equals("counter", _SEEN), Equals("owner", _SEEN_OWNER))',
        new='_AS_SEEN: Final = (Equals("owner", _SEEN_OWNER),)',
        breaks="a lease that was renewed since the scan is taken",
        source="a4 (KCL assignLease), a6 (kcl-rust acquire)",
        found_at=8,
    ),
    Mutant(
        name="renewal-conditional-on-owner-only",
        file=ROWS,
        old='        "renew",\n        _HELD,',
        new='        "renew",\n        (Equals("owner", _ME),),',
        breaks="a renewal of a dead process lands in the life of its successor",
        source="a6",
        found_at=0,
    ),
    Mutant(
        name="renewal-unconditional",
        file=ROWS,
        old='        "renew",\n        _HELD,',
        new='        "renew",\n        (),',
        breaks="who lost a lease keeps renewing the row of its new owner",
        source="D.7: renew without condition",
        found_at=0,
    ),
    Mutant(
        name="checkpoint-unconditional",
        file=ROWS,
        old='        "checkpoint", _HELD_AT, ',
        new='        "checkpoint", (), ',
        breaks="who lost a lease moves the position of its new owner",
        source="a8: non-owners may checkpoint by design",
        found_at=2,
    ),
    Mutant(
        name="end-unconditional",
        file=ROWS,
        old='        "end",\n        _HELD_AT,',
        new='        "end",\n        (),',
        breaks="who lost a lease ends the shard that its new owner still reads",
        source="a8: SHARD_END is unconditional",
        layer="dense storms",
        found_at=2,
    ),
    Mutant(
        name="release-unconditional",
        file=ROWS,
        old=f'        "release",\n        _HELD_AT,\n{_TO_OFFERS}        _HELD_AT,',
        new=f'        "release",\n        (),\n{_TO_OFFERS}        (),',
        breaks="who lost a lease gives away what is its new owner's",
        source="a6 (kcl-rust release)",
        found_at=2,
    ),
    Mutant(
        name="position-not-in-the-condition",
        file=ROWS,
        old='_HELD_AT: Final = (*_HELD, Equals("checkpoint", _LAST))',
        new="_HELD_AT: Final = _HELD",
        breaks="a checkpoint moves a row back over a late one",
        source="trace H6",
        layer="rough storms",
        found_at=6,
    ),
    Mutant(
        name="late-checkpoint-without-upper-bound",
        file=ROWS,
        old='            Below("checkpoint", _POSITION),\n',
        new="",
        breaks="a late checkpoint moves the new owner's position back, or un-ends a shard",
        source="P19, trace H6b",
        found_at=0,
    ),
    Mutant(
        name="late-checkpoint-over-a-reset",
        file=ROWS,
        old='            Equals("generation", _GENERATION),\n            AtLeast(',
        new="            AtLeast(",
        breaks="an owner that wakes up after a reset undoes it, or skips what is to be read again",
        source="R1, K4",
        layer=f"{RESETS}::test_no_write_of_a_former_owner_undoes_a_reset",
    ),
    Mutant(
        name="reset-unconditional",
        file=ROWS,
        old='        (*_AS_SEEN, Equals("checkpoint", _LAST)),',
        new="        (),",
        breaks="a lease that a manager has taken meanwhile is moved under it",
        source="K4",
        layer=f"{RESETS}::test_a_row_that_is_not_as_seen_is_neither_reset_nor_deleted",
    ),
    Mutant(
        name="counter-reset-by-takes",
        file=ROWS,
        old='            _COUNTED,\n            Set("owner", _ME),',
        new='            Set("counter", _ONE),\n            Set("owner", _ME),',
        breaks="the counter is no version and no fencing token",
        source="a6: SET leaseCounter = 1",
        found_at=0,
    ),
    Mutant(
        name="checkpoints-keep-the-counter",
        file=ROWS,
        old='"checkpoint", _HELD_AT, (_COUNTED, *_MOVED, _LOAD_IF_GIVEN',
        new='"checkpoint", _HELD_AT, (*_MOVED, _LOAD_IF_GIVEN',
        breaks="a lease that checkpoints often stands still for everybody else, and is taken",
        source="P1",
        found_at=0,
    ),
    Mutant(
        name="take-keeps-the-ask",
        file=ROWS,
        old="            *_WITHOUT_HANDOFF,\n            When(",
        new="            When(",
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
        file="kclrun/aws/expressions.py",
        old='            test = f"{column.name} = {name}"',
        new='            test = f"{column.name} >= {name}"',
        breaks="DynamoDB is asked for weaker conditions than the memory table has",
        source="a6",
        layer=TABLES,
    ),
    Mutant(
        name="sub-sequence-not-advanced",
        file=ROWS,
        old='_POSITION: Final = _value(":position :sub", "position")',
        new=(
            '_POSITION: Final = _value(":position :sub",'
            " lambda c: ExtendedSequenceNumber(c.position.sequence_number))"
        ),
        breaks="a checkpoint inside an aggregate does not advance",
        source="a7",
        layer=TABLES,
    ),
    Mutant(
        name="children-of-a-parent-resumed-meanwhile",
        file="kclrun/protocol/conditions.py",
        old='            Equals("pause", _PARENTS_PAUSE),\n',
        new="",
        breaks="children stay paused after a resume of all, or are read in a pause of all",
        source="a pause, attacked",
        layer="tests/unit/lease/test_lease_life_pauses.py",
    ),
    Mutant(
        name="pause-over-another-operators",
        file="kclrun/protocol/conditions.py",
        old='(Equals("pause", _SEEN_PAUSE),)',
        new="()",
        breaks="the later of two operators undoes the other unseen",
        source="a pause, attacked",
        layer="tests/unit/cli/test_cli_pause.py",
    ),
)
