"""The catalogue of writes: rules that hold for each of them, read off the data."""

from __future__ import annotations

import re

import pytest

from kclrun.aws.expressions import (
    CATALOGUE,
    CREATE,
    BoundWrite,
    Expression,
    bind,
    bind_parent,
)
from kclrun.errors import InvariantViolation
from kclrun.model.changes import (
    Checkpoint,
    Claim,
    CreateChildren,
    DeleteEnded,
    DeleteTrimmed,
    End,
    EndedParent,
    ExistingParent,
    HaltLease,
    HeldParent,
    NameChildren,
    Release,
    Renew,
    ResumeLease,
    Take,
)
from kclrun.model.lease import Halt, LeaseKey, OwnerId
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime

OPERATORS_WRITES = {"resume"}
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
    if expression.name in OPERATORS_WRITES:
        assert "leaseCounter" not in expression.update.code
        return
    assert "leaseCounter = :next" in expression.update.code
    assert "leaseCounter = :seen" in expression.condition


@updates
def test_a_position_is_written_only_against_the_position_last_seen(expression: Expression) -> None:
    assert expression.update is not None
    if "checkpoint = :position" in expression.update.code:
        assert "checkpointSubSequenceNumber = :sub" in expression.update.code
        assert "checkpoint = :last AND" in expression.condition
        assert ":lastSub" in expression.condition
        for pending in ("pendingCheckpoint", "pendingCheckpointState"):
            assert re.search(rf"REMOVE .*\b{pending}\b", expression.update.code)


@by_name
def test_no_expression_uses_what_emulators_lack(expression: Expression) -> None:
    assert "size(" not in expression.condition


@by_name
def test_every_expression_has_its_english(expression: Expression) -> None:
    assert expression.english.startswith(f"{expression.name}: ")
    assert all(clause.english for clause in expression.conditions)


def test_the_names_are_distinct() -> None:
    assert len({expression.name for expression in CATALOGUE}) == len(CATALOGUE)


KEY, ME, OTHER = LeaseKey("k"), OwnerId("kclrun:a:h:1"), OwnerId("java")
WHOLE, INSIDE, NEXT = (
    ExtendedSequenceNumber("5"),
    ExtendedSequenceNumber("5", 1),
    ExtendedSequenceNumber("9"),
)
CHANGES = (
    *(Take(KEY, ME, seen, 4, 10.0, "LATEST") for seen in (None, OTHER, ME)),
    Claim(KEY, ME, 4),
    Renew(KEY, ME, 4),
    Renew(KEY, ME, 4, 1.5),
    NameChildren(KEY, ME, 4, frozenset({"c"})),
    HaltLease(KEY, ME, 4, Halt("why", WallTime(1.0))),
    ResumeLease(KEY),
    DeleteEnded(KEY),
    *(DeleteTrimmed(KEY, seen, 4) for seen in (None, OTHER)),
    *(Checkpoint(KEY, ME, 4, NEXT, last) for last in (WHOLE, INSIDE)),
    *(End(KEY, ME, 4, last) for last in (WHOLE, INSIDE)),
    *(Release(KEY, ME, 4, to, last) for last in (WHOLE, INSIDE) for to in (last, NEXT)),
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
