"""The writes as they are sent: rules that hold for each of them, read off the texts."""

import re
from collections.abc import Callable

import pytest

from kclrun.aws.expressions import CREATE, BoundWrite, bind
from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, LeaseKey, OwnerId
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SEQUENCE_DIGITS_MAX,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.protocol.conditions import WRITES, When
from kclrun.protocol.writes import (
    Ask,
    ChangePause,
    Checkpoint,
    CreateChildren,
    FinishReset,
    LateCheckpoint,
    NameChildren,
    NoteLetters,
    ResumeLease,
    Take,
    Withdraw,
)
from tests.support.lease_writes import ALL, CHANGES, KEY, ME
from tests.support.tables import over_rows

# Not written as owner: the counter stays as it is.
OTHERS_WRITES = (
    ResumeLease,
    ChangePause,
    NoteLetters,
    Withdraw,
    Ask,
    LateCheckpoint,
    FinishReset,
)
BOUND = [(type(change), bind(change)) for change in ALL]
UPDATES = [each for each in BOUND if each[1].expression.update]
Rule = Callable[[type, BoundWrite], None]


def for_each(forms: list[tuple[type, BoundWrite]]) -> Callable[[Rule], Callable[[], None]]:
    """A test of a rule over all forms: an item of pytest for each takes longer than the rule."""

    def over_all(rule: Rule) -> Callable[[], None]:
        def test() -> None:
            for kind, bound in forms:
                rule(kind, bound)

        test.__doc__ = rule.__doc__
        return test

    return over_all


by_form, updates = for_each(BOUND), for_each(UPDATES)


def test_only_a_creation_may_apply_where_there_is_no_row():
    assert CREATE == "attribute_not_exists(leaseKey)"
    for _, bound in BOUND:
        assert bound.expression.condition.startswith("attribute_exists(leaseKey)")


@updates
def test_every_owners_update_adds_one_to_the_counter_it_names(kind, bound):
    if kind in OTHERS_WRITES:
        assert "leaseCounter" not in bound.expression.update
        return
    assert "leaseCounter = :next" in bound.expression.update
    assert "leaseCounter = :seen" in bound.expression.condition
    assert int(bound.values[":next"]["N"]) == int(bound.values[":seen"]["N"]) + 1


@pytest.mark.parametrize(("sub", "may_be_absent"), [(0, True), (5, False)])
def test_only_a_position_of_a_whole_record_is_found_without_its_sub_sequence_number(
    sub, may_be_absent
):
    last = ExtendedSequenceNumber("20", sub)
    bound = bind(Checkpoint(KEY, ME, 3, ExtendedSequenceNumber("30"), last))

    absent = "attribute_not_exists(checkpointSubSequenceNumber)"
    assert (absent in bound.expression.condition) == may_be_absent


@updates
def test_a_position_is_written_only_against_the_position_last_seen(kind, bound):
    update, condition = bound.expression.update, bound.expression.condition
    if "checkpoint = :position" in update:
        assert "checkpointSubSequenceNumber = :sub" in update
        if kind is LateCheckpoint:
            assert "checkpoint > :last" in condition
            assert "checkpoint < :position" in condition
        else:
            assert "checkpoint = :last AND" in condition
            assert ":lastSub" in condition
        for pending in ("pendingCheckpoint", "pendingCheckpointState"):
            assert re.search(rf"REMOVE .*\b{pending}\b", update)


@by_form
def test_only_the_late_checkpoint_compares_lengths(kind, bound):
    """The fewer functions, the more emulators a fleet runs against."""
    assert ("size(" in bound.expression.condition) == (kind is LateCheckpoint)


@updates
def test_whatever_sets_a_new_owner_drops_every_ask(kind, bound):
    code = bound.expression.update
    if "leaseOwner" in code or "checkpointOwner" in code:
        assert re.search(r"REMOVE .*\bhandoffTo, handoffAt\b", code)
        for name in ("offeredTo", "offeredBy"):
            assert len(re.findall(rf"\b{name}\b", code)) == 1


@updates
def test_no_attribute_is_changed_twice_in_one_write(kind, bound):
    """DynamoDB refuses overlapping paths."""
    update = bound.expression.update
    code = re.sub(r"= if_not_exists\(\w+, :\w+\)|= :\w+|:\w+", "", update)
    names = re.findall(r"\b[a-z]\w+", code)
    assert len(names) == len(set(names))


@by_form
def test_a_bound_write_has_the_values_it_names_and_no_other(kind, bound):
    """DynamoDB refuses a value that no expression uses, and a name without its value."""
    spelled = f"{bound.expression.condition} {bound.expression.update}"
    assert set(re.findall(r":\w+", spelled)) == set(bound.values)


@by_form
def test_no_parentheses_are_redundant(kind, bound):
    """DynamoDB refuses them."""
    assert not re.search(r"\(\([^()]*(\([^()]*\)[^()]*)*\)\)", bound.expression.condition)


def test_the_names_of_the_writes_are_distinct():
    assert len({write.name for write in WRITES.values()}) == len(WRITES)


def test_the_examples_have_every_write_with_and_without_every_part():
    for kind, write in WRITES.items():
        of_kind = [change for change in ALL if type(change) is kind]
        assert of_kind, kind
        for part in write.effects:
            if isinstance(part, When):
                assert {part.test(change) for change in of_kind} == {True, False}, part.words


def test_writes_with_the_same_form_share_their_texts():
    one, other = (bind(Take(KEY, ME, None, seen, 10.0, "LATEST")) for seen in (4, 5))

    assert one.expression is other.expression
    assert one.values != other.values


def test_what_is_no_update_of_a_row_has_no_expression():
    with pytest.raises(InvariantViolation):
        bind(CreateChildren((), ()))
    with pytest.raises(InvariantViolation):
        bind(NameChildren(LeaseKey("k"), OwnerId("o"), 1, frozenset()))


@pytest.mark.parametrize(
    "seen", [None, OwnerId("kclrun:b:h:2"), OFFERED], ids=["nobody", "one of ours", "offered"]
)
def test_nobody_but_a_java_owner_is_taken_from_by_force(seen):
    """A lease that a kclrun owner renews is never taken by force [P16]."""
    with pytest.raises(InvariantViolation, match="by force"):
        bind(Take(KEY, ME, seen, 4, 10.0, "LATEST", forced=True))


@pytest.mark.parametrize("last_sub", [0, 2])
@pytest.mark.parametrize("sub", [0, 3])
def test_a_late_checkpoint_compares_the_parts_of_records_only_where_there_are_some(last_sub, sub):
    last, position = ExtendedSequenceNumber("5", last_sub), ExtendedSequenceNumber("9", sub)

    condition = bind(LateCheckpoint(KEY, ME, last, position)).expression.condition

    assert ("checkpointSubSequenceNumber >=" in condition) == (last_sub > 0)
    lower = "checkpointSubSequenceNumber < "
    absent = "attribute_not_exists(checkpointSubSequenceNumber)"
    assert (lower in condition, absent in condition) == (sub > 0, sub > 0)


@pytest.mark.parametrize("position", SENTINELS, ids=str)
def test_a_late_checkpoint_never_writes_a_sentinel(position):
    """With SHARD_END the children could start before the parent is read [P19]."""
    with pytest.raises(InvariantViolation, match="late checkpoint"):
        bind(LateCheckpoint(KEY, ME, TRIM_HORIZON, position))


@over_rows(
    ("last", "above", "digits"),
    [
        (AT_TIMESTAMP, (TRIM_HORIZON, LATEST), 0),
        (TRIM_HORIZON, (LATEST, SHARD_END), 0),
        (LATEST, (SHARD_END, SHARD_END), 0),
        (ExtendedSequenceNumber("907"), (SHARD_END, SHARD_END), 3),
        (SHARD_END, (SHARD_END, SHARD_END), SEQUENCE_DIGITS_MAX),
    ],
)
def test_a_late_checkpoint_is_below_what_is_above_the_position_last_seen(last, above, digits):
    """Sentinels by their names, numbers by their digits first."""
    values = bind(LateCheckpoint(KEY, ME, last, ExtendedSequenceNumber("9"))).values

    named = (values[":after"]["S"], values[":afterThat"]["S"])
    assert named == tuple(each.sequence_number for each in above)
    assert values[":lastDigits"] == {"N": str(digits)}


def test_lengths_and_times_go_as_numbers_and_names_as_text():
    values = [(change, each) for change in CHANGES for each in bind(change).values.items()]
    for change, (name, value) in values:
        is_number = name in {
            ":seen", ":next", ":failoverMs", ":one", ":askedAt", ":seenAt", ":throughput",
            ":haltedAt", ":waitingSince", ":pinnedAt", ":createdAt", ":lastSub", ":sub", ":zero",
            ":digits", ":lastDigits", ":loadKBps", ":loadCpu", ":generation", ":pausedAt",
                ":pausedUntil", ":seenPausedAt", ":seenPausedUntil",
        }  # fmt: skip
        others = {":children": "SS", ":parents": "SS", ":outputCursors": "M"}
        kind = "N" if is_number else others.get(name, "S")
        assert list(value) == [kind], (change, name)
