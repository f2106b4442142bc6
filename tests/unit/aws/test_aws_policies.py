"""The IAM policies allow what this room calls: no less, and nothing more."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session

from kclrun.aws.operations import OPERATIONS, Grant

ROOT = Path(__file__).parents[3]
ROOM = ROOT / "kclrun" / "aws"
POLICIES = [Grant.RUN, Grant.PROVISION, Grant.PRODUCE, Grant.METRICS, Grant.LIFECYCLE]
# CloudWatch has no resources to name: its policy names the namespace instead.
# An autoscaling group's ARN has a part that only AWS knows: its policy names the group by the rest.
WITH_RESOURCES = [grant for grant in POLICIES if grant not in {Grant.METRICS, Grant.LIFECYCLE}]
SERVICES = ("kinesis", "dynamodb", "cloudwatch", "sts", "autoscaling")


def statements(grant: Grant) -> list[dict[str, Any]]:
    policy = json.loads((ROOT / grant.value).read_text())
    assert policy["Version"] == "2012-10-17"
    return list(policy["Statement"])


def allowed(grant: Grant) -> set[str]:
    actions: set[str] = set()
    for statement in statements(grant):
        if statement["Effect"] == "Allow":
            named = statement["Action"]
            actions |= {named} if isinstance(named, str) else set(named)
    return actions


@pytest.mark.parametrize("grant", POLICIES)
def test_a_policy_allows_exactly_what_is_called(grant: Grant) -> None:
    called = {
        action
        for operation in OPERATIONS
        if grant in operation.grants
        for action in operation.iam_actions
    }

    assert allowed(grant) == called


@pytest.mark.parametrize("grant", WITH_RESOURCES)
def test_no_policy_uses_a_wildcard_or_another_placeholder(grant: Grant) -> None:
    for statement in statements(grant):
        assert "*" not in json.dumps(statement)
        assert re.fullmatch(
            r"arn:aws:(kinesis|dynamodb):REGION:ACCOUNT:"
            r"(stream/STREAM|table/APPLICATION(-CoordinatorState|/index/LeaseOwnerToLeaseKeyIndex)?)",
            statement["Resource"],
        )


def test_the_policy_of_metrics_is_bound_to_one_namespace() -> None:
    [statement] = statements(Grant.METRICS)

    assert statement["Condition"] == {"StringEquals": {"cloudwatch:namespace": "NAMESPACE"}}


def test_the_policy_of_hooks_is_bound_to_one_group() -> None:
    [statement] = statements(Grant.LIFECYCLE)

    assert statement["Resource"].endswith(":autoScalingGroup:*:autoScalingGroupName/GROUP")


def test_the_running_policy_forbids_dropping_the_table() -> None:
    denied = [one["Action"] for one in statements(Grant.RUN) if one["Effect"] == "Deny"]
    assert denied == [["dynamodb:DeleteTable", "dynamodb:UpdateTable"]]


def _model_operations() -> dict[str, str]:
    """Every operation of the services, by its wire name and by its method name."""
    session = Session()
    names: dict[str, str] = {}
    for service in SERVICES:
        for name in session.get_service_model(service).operation_names:
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            names[name] = names[snake] = name
    return names


def _strings_and_methods(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)):
                yield name
            case ast.Constant(value=str(text)):
                yield text


def test_no_module_names_an_operation_that_is_not_declared() -> None:
    declared = {operation.name for operation in OPERATIONS}
    known = _model_operations()
    used = {
        (path.name, known[name])
        for path in ROOM.glob("*.py")
        for name in _strings_and_methods(ast.parse(path.read_text()))
        if name in known
    }

    # `Scan` as a plain word is also a method of ours; both stand for the declared operation.
    assert {name for _, name in used} <= declared
    assert {("control.py", "ListShards"), ("table_setup.py", "CreateTable")} <= used


def test_every_declared_operation_exists_and_is_used() -> None:
    known = _model_operations()
    sources = {path.name: path.read_text() for path in ROOM.glob("*.py")}
    for operation in OPERATIONS:
        assert operation.name in known
        constant = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation.name).upper()
        users = [
            name
            for name, text in sources.items()
            if name != "operations.py" and re.search(rf"\b{constant}\b", text)
        ]
        assert users, f"{constant} is granted and never called"
