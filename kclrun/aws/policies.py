"""The IAM policies of an application, made from the operations that are called and its settings.

Pure. Rule: a statement allows what `operations.py` calls for it and nothing else, on the resources
that the settings name and no other. Look next: `cli/iam.py`, which prints them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.operations import OPERATIONS, Grant
from kclrun.aws.owner_index import OWNER_INDEX
from kclrun.config.schema import Settings, StartAtLeases

__all__ = [
    "Policy",
    "Sink",
    "Site",
    "caller_policy",
    "provision_policy",
    "put_policy",
    "run_policy",
]

Policy = dict[str, Any]
_Statement = dict[str, Any]
# The version of the policy language; the older one knows no variables.
_LANGUAGE: Final = "2012-10-17"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application's resources are: `partition` is aws, aws-cn, aws-us-gov …"""

    partition: str
    region: str
    account: str

    def stream(self, named: str) -> str:
        """The ARN of a stream given by its name, or as an ARN."""
        return named if named.startswith("arn:") else self._arn("kinesis", f"stream/{named}")

    def table(self, name: str) -> str:
        """The ARN of a table of this account."""
        return self._arn("dynamodb", f"table/{name}")

    def index(self, table: str, name: str) -> str:
        """The ARN of an index of a table."""
        return f"{self.table(table)}/index/{name}"

    def group(self, name: str | None) -> str:
        """The ARN of an autoscaling group; it has a part that only AWS knows.

        None is any group of the account: where only the instance's tags say which.
        """
        return self._arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{name or '*'}")

    def _arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"


class Sink(msgspec.Struct, frozen=True):
    """The stream that the rows of `engine: spark` are put into, and the role that does it, if it
    is another than the application's."""

    stream_arn: str
    role_arn: str | None = None


def run_policy(settings: Settings, site: Site, *, sink: Sink | None = None) -> Policy:
    """What a machine needs to run the application, or the role it assumes (`aws.role_arn`); on
    Spark, the driver and every executor.

    A sink with a role of its own needs the right to assume it here, and to write there.
    """
    statements = _fleet if settings.engine == "fleet" else _spark
    return _policy([*statements(settings, site), *_sunk(sink)])


def provision_policy(settings: Settings, site: Site) -> Policy:
    """To create the lease table and to give an older one the owner index; for no machine's role.

    A machine's own policy denies changing the table expressly, so the two do not go together.
    """
    table = [site.table(settings.table)]
    return _policy([_allow(Grant.CREATE, table), _allow(Grant.INDEX, table)])


def put_policy(settings: Settings, site: Site) -> Policy:
    """To put records into the application's streams."""
    return _policy([_allow(Grant.WRITE, _streams(settings, site))])


def caller_policy(role_arn: str, settings: Settings, site: Site) -> Policy:
    """What a machine itself needs where `role_arn` has the rest: lifecycle hooks are the machine's
    own, and answered by it. `site` is the machine's."""
    hooks = _hooks(settings, site) if settings.engine == "fleet" else ()
    return _policy([_allow(Grant.ROLE, [role_arn]), *hooks])


def _fleet(settings: Settings, site: Site) -> Iterator[_Statement]:
    table = [site.table(settings.table)]
    yield _allow(Grant.READ, _streams(settings, site))
    yield _allow(Grant.LEASES, table)
    yield _allow(Grant.OFFERS, [site.index(settings.table, OWNER_INDEX)])
    yield _allow(Grant.KCL3, [site.table(f"{settings.application}-CoordinatorState")])
    if settings.leases.create:
        yield _allow(Grant.CREATE, table)
    cloudwatch = settings.observe.cloudwatch
    if cloudwatch is not None:
        # CloudWatch has no resources to name; the namespace is what can be bound.
        yield _allow(Grant.METRICS, ["*"]) | {
            "Condition": {"StringEquals": {"cloudwatch:namespace": cloudwatch.namespace}}
        }
    if settings.aws.role_arn is None:
        yield from _hooks(settings, site)
    yield {
        "Sid": "NeverDropTheTable",
        "Effect": "Deny",
        "Action": ["dynamodb:DeleteTable", "dynamodb:UpdateTable"],
        "Resource": table[0],
    }


def _hooks(settings: Settings, site: Site) -> Iterator[_Statement]:
    instance = settings.instance
    if instance.launch_hook is not None or instance.termination_hook is not None:
        yield _allow(Grant.LIFECYCLE, [site.group(instance.group)])


def _spark(settings: Settings, site: Site) -> Iterator[_Statement]:
    """The position is in Spark's checkpoint: no table, but for where it begins."""
    yield _allow(Grant.READ, _streams(settings, site))
    if isinstance(settings.start, StartAtLeases):
        yield _allow(Grant.START, [site.table(settings.start.leases)])


def _sunk(sink: Sink | None) -> Iterator[_Statement]:
    if sink is None:
        return
    if sink.role_arn is not None:
        yield _allow(Grant.ROLE, [sink.role_arn])
    else:
        yield _allow(Grant.WRITE, [sink.stream_arn])


def _streams(settings: Settings, site: Site) -> list[str]:
    return [site.stream(source.name) for source in settings.sources]


def _allow(grant: Grant, resources: Sequence[str]) -> _Statement:
    return {
        "Sid": grant.value,
        "Effect": "Allow",
        "Action": _actions(grant),
        "Resource": resources[0] if len(resources) == 1 else list(resources),
    }


def _actions(grant: Grant) -> list[str]:
    return sorted(
        {
            action
            for operation in OPERATIONS
            if grant in operation.grants
            for action in operation.iam_actions
        }
    )


def _policy(statements: Sequence[_Statement]) -> Policy:
    return {"Version": _LANGUAGE, "Statement": list(statements)}
