"""The catalogue of writes: rules that hold for each of them, read off the data."""

from __future__ import annotations

import re

import pytest

from kclrun.aws.expressions import CATALOGUE, CREATE, Expression, bind
from kclrun.errors import InvariantViolation
from kclrun.model.changes import CreateChildren, NameChildren
from kclrun.model.lease import LeaseKey, OwnerId

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


def test_what_is_no_update_of_a_row_has_no_expression() -> None:
    with pytest.raises(InvariantViolation):
        bind(CreateChildren((), ()))
    with pytest.raises(InvariantViolation):
        bind(NameChildren(LeaseKey("k"), OwnerId("o"), 1, frozenset()))
