"""The catalogue of writes: rules that hold for each of them, read off the data."""

from __future__ import annotations

import re

import pytest

from kclrun.aws.binding import bind, bind_parent
from kclrun.aws.expressions import CATALOGUE, CREATE, BoundWrite, Expression
from kclrun.errors import InvariantViolation
from kclrun.model.lease import OFFERED, DiedOn, Halt, Handoff, LeaseKey, OwnerId
from kclrun.model.sequence import SENTINELS, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HashRange
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Amend,
    Ask,
    Checkpoint,
    Claim,
    CreateChildren,
    Decline,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    ExistingParent,
    HaltLease,
    HandOver,
    HeldParent,
    LateCheckpoint,
    LeaseChange,
    NameChildren,
    Offer,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
)

LATE = {one.name for one in CATALOGUE if one.name.startswith("late checkpoint")}
# Not written as owner: the counter stays as it is.
OTHERS_WRITES = {"resume", "withdraw an ask", *LATE} | {
    one.name for one in CATALOGUE if one.name.startswith("ask")
}
by_name = pytest.mark.parametrize("expression", CATALOGUE, ids=lambda one: one.name)
updates = pytest.mark.parametrize(
    "expression", [one for one in CATALOGUE if one.update], ids=lambda one: one.name
)


@by_name
def test_only_a_creation_may_apply_where_there_is_no_row(expression: Expression) -> None:
    expected = "attribute_not_exists" if expression is CREATE else "attribute_exists"
    assert expression.condition.startswith(f"{expected}(leaseKey)")


@updates
def test_every_owners_update_adds_one_to_the_counter_it_names(expression: Expression) -> None:
    assert expression.update is not None
    if expression.name in OTHERS_WRITES:
        assert "leaseCounter" not in expression.update.code
        return
    assert "leaseCounter = :next" in expression.update.code
    assert "leaseCounter = :seen" in expression.condition


@updates
def test_a_position_is_written_only_against_the_position_last_seen(expression: Expression) -> None:
    assert expression.update is not None
    if "checkpoint = :position" in expression.update.code:
        assert "checkpointSubSequenceNumber = :sub" in expression.update.code
        if expression.name in LATE:
            assert "checkpoint > :last" in expression.condition
            assert "checkpoint < :position" in expression.condition
        else:
            assert "checkpoint = :last AND" in expression.condition
            assert ":lastSub" in expression.condition
        for pending in ("pendingCheckpoint", "pendingCheckpointState"):
            assert re.search(rf"REMOVE .*\b{pending}\b", expression.update.code)


@by_name
def test_only_the_late_checkpoint_compares_lengths(expression: Expression) -> None:
    """The fewer functions, the more emulators a fleet runs against."""
    assert ("size(" in expression.condition) == (expression.name in LATE)


@updates
def test_whatever_sets_a_new_owner_drops_every_ask(expression: Expression) -> None:
    assert expression.update is not None
    code = expression.update.code
    if "leaseOwner" in code or "checkpointOwner" in code:
        assert re.search(r"REMOVE .*\bhandoffTo, handoffAt\b", code)
        for name in ("offeredTo", "offeredBy"):
            assert len(re.findall(rf"\b{name}\b", code)) == 1


@updates
def test_no_attribute_is_changed_twice_in_one_write(expression: Expression) -> None:
    """DynamoDB refuses overlapping paths."""
    assert expression.update is not None
    code = re.sub(r"= if_not_exists\(\w+, :\w+\)|= :\w+|:\w+", "", expression.update.code)
    names = re.findall(r"\b[a-z]\w+", code)
    assert len(names) == len(set(names))


@by_name
def test_every_expression_has_its_english(expression: Expression) -> None:
    assert expression.english.startswith(f"{expression.name}: ")
    assert all(clause.english for clause in expression.conditions)


def test_the_names_are_distinct() -> None:
    assert len({expression.name for expression in CATALOGUE}) == len(CATALOGUE)


KEY, ME, OTHER = LeaseKey("k"), OwnerId("kclrun:a:h:1"), OwnerId("java")
WHOLE, INSIDE, NEXT, NEXT_INSIDE = (
    ExtendedSequenceNumber("5"),
    ExtendedSequenceNumber("5", 1),
    ExtendedSequenceNumber("9"),
    ExtendedSequenceNumber("9", 3),
)
CHANGES = (
    *(Take(KEY, ME, seen, 4, 10.0, "LATEST") for seen in (None, OTHER, ME)),
    Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True),
    *(
        Take(KEY, ME, seen, 4, 10.0, "LATEST", latest_pinned_at=WallTime(9.0))
        for seen in (None, OTHER, ME)
    ),
    Take(KEY, ME, OTHER, 4, 10.0, "LATEST", forced=True, latest_pinned_at=WallTime(9.0)),
    Ask(KEY, ME, OTHER, WallTime(9.0)),
    *(
        Ask(KEY, ME, OTHER, WallTime(9.0), seen=Handoff(OTHER, WallTime(seen_at)))
        for seen_at in (0.0, 2.0)
    ),
    Withdraw(KEY, ME),
    Decline(KEY, ME, 4),
    *(Claim(KEY, ME, 4, has_waited=waited) for waited in (False, True)),
    *(
        Renew(KEY, ME, 4, measured, drops_ask=drops)
        for measured in (None, 1.5)
        for drops in (False, True)
    ),
    NameChildren(KEY, ME, 4, frozenset({"c"})),
    *(
        Amend(KEY, ME, 4, parents, HashRange(0, 5), pinned_at)
        for parents in (frozenset({"p"}), frozenset[str]())
        for pinned_at in (None, WallTime(9.0))
    ),
    HaltLease(KEY, ME, 4, Halt("why", WallTime(1.0))),
    ResumeLease(KEY),
    DeleteEnded(KEY),
    *(DeleteTrimmed(KEY, seen, 4) for seen in (None, OTHER)),
    *(Checkpoint(KEY, ME, 4, NEXT, last) for last in (WHOLE, INSIDE)),
    *(End(KEY, ME, 4, last) for last in (WHOLE, INSIDE)),
    *(Release(KEY, ME, 4, to, last) for last in (WHOLE, INSIDE) for to in (last, NEXT)),
    *(
        Offer(KEY, ME, 4, to, last, asker)
        for last in (WHOLE, INSIDE)
        for to in (last, NEXT)
        for asker in (None, OTHER)
    ),
    *(Offer(KEY, ME, 4, last, last, None, DiedOn("h", last)) for last in (WHOLE, INSIDE)),
    *(HandOver(KEY, ME, OTHER, 4, to, last) for last in (WHOLE, INSIDE) for to in (last, NEXT)),
    *(LateCheckpoint(KEY, ME, last, to) for last in (WHOLE, INSIDE) for to in (NEXT, NEXT_INSIDE)),
)
BOUND = (
    *(bind(change) for change in CHANGES),
    *map(bind_parent, (HeldParent(KEY, ME, 4), EndedParent(KEY), ExistingParent(KEY))),
)


@pytest.mark.parametrize("bound", BOUND, ids=lambda one: one.expression.name)
def test_a_bound_write_has_the_values_it_names_and_no_other(bound: BoundWrite) -> None:
    """DynamoDB refuses a value that no expression uses, and a name without its value."""
    update = bound.expression.update
    spelled = f"{bound.expression.condition} {update.code if update else ''}"
    assert set(re.findall(r":\w+", spelled)) == set(bound.values)


def test_every_expression_of_the_catalogue_is_reached() -> None:
    assert {bound.expression for bound in BOUND} | {CREATE} == set(CATALOGUE)


def test_what_is_no_update_of_a_row_has_no_expression() -> None:
    with pytest.raises(InvariantViolation):
        bind(CreateChildren((), ()))
    with pytest.raises(InvariantViolation):
        bind(NameChildren(LeaseKey("k"), OwnerId("o"), 1, frozenset()))


@pytest.mark.parametrize(
    "seen", [None, OwnerId("kclrun:b:h:2"), OFFERED], ids=["nobody", "one of ours", "offered"]
)
def test_nobody_but_a_java_owner_is_taken_from_by_force(seen: OwnerId | None) -> None:
    """A lease that a kclrun owner renews is never taken by force [P16]."""
    with pytest.raises(InvariantViolation, match="by force"):
        bind(Take(KEY, ME, seen, 4, 10.0, "LATEST", forced=True))


@pytest.mark.parametrize("position", SENTINELS, ids=str)
def test_a_late_checkpoint_never_writes_a_sentinel(position: ExtendedSequenceNumber) -> None:
    """With SHARD_END the children could start before the parent is read [P19]."""
    with pytest.raises(InvariantViolation, match="late checkpoint"):
        bind(LateCheckpoint(KEY, ME, TRIM_HORIZON, position))


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: type(one).__name__)
def test_lengths_and_times_go_as_numbers_and_names_as_text(change: LeaseChange) -> None:
    for name, value in bind(change).values.items():
        is_number = name in {
            ":seen", ":next", ":failoverMs", ":one", ":askedAt", ":seenAt", ":throughput",
            ":haltedAt", ":waitingSince", ":pinnedAt", ":createdAt", ":lastSub", ":sub", ":zero",
            ":digits", ":lastDigits",
        }  # fmt: skip
        is_set = name in {":children", ":parents"}
        assert list(value) == ["N" if is_number else "SS" if is_set else "S"], name
