"""The IAM policies of an application, made from the operations that are called and its settings.

Pure. A statement allows exactly the operations that `operations.py` declares for it, on exactly
the resources that the settings name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.lease_table import OWNER_INDEX
from kclrun.aws.operations import OPERATIONS, Grant
from kclrun.config.kcl import kcl_application
from kclrun.config.outputs import output_places
from kclrun.config.schema import Settings, StartAtLeases
from kclrun.config.state import state_place
from kclrun.model.lease import coordinator_table, replay_tables
from kclrun.model.stream import ONLY_STREAM, is_change_stream
from kclrun.model.table import is_table_arn

Policy = dict[str, Any]
_Statement = dict[str, Any]
# The version of the policy language; the older one has no variables.
_LANGUAGE: Final = "2012-10-17"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """Where an application's resources are: `partition` is aws, aws-cn, aws-us-gov …"""

    partition: str
    region: str
    account: str

    def stream(self, named: str) -> str:
        """The ARN of a stream given by its name, or as an ARN."""
        return named if named.startswith("arn:") else self._arn("kinesis", f"stream/{named}")

    def consumer(self, stream: str, named: str) -> str:
        """The ARN of a consumer; `*` stands for its time of registration, unless it is given."""
        if named.startswith("arn:"):
            return named
        return f"{self.stream(stream)}/consumer/{named}:*"

    def table(self, name: str) -> str:
        """The ARN of a table of this account, or the table's own, if it is named by that."""
        return name if is_table_arn(name) else self._arn("dynamodb", f"table/{name}")

    def index(self, table: str, name: str) -> str:
        """The ARN of an index of a table."""
        return f"{self.table(table)}/index/{name}"

    def group(self, name: str | None) -> str:
        """The ARN of an autoscaling group; `*` stands for the part that only AWS knows.

        None stands for any group of the account, for when only the instance's tags name the group.
        """
        return self._arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{name or '*'}")

    def bucket(self, url: str) -> str:
        """The ARN of the bucket of `s3://bucket/prefix`."""
        return f"arn:{self.partition}:s3:::{url.removeprefix('s3://').partition('/')[0]}"

    def objects(self, url: str) -> str:
        """The ARN of all objects under `s3://bucket/prefix`."""
        place = url.removeprefix("s3://").rstrip("/")
        return f"arn:{self.partition}:s3:::{place}/*"

    def queue(self, named: str) -> str:
        """The ARN of a queue given by its name or its URL, which ends with account and name."""
        parts = named.split("/")
        account = parts[-2] if len(parts) > 1 else self.account
        return f"arn:{self.partition}:sqs:{self.region}:{account}:{parts[-1]}"

    def delivery_stream(self, name: str) -> str:
        """The ARN of a Firehose delivery stream."""
        return self._arn("firehose", f"deliverystream/{name}")

    def _arn(self, service: str, resource: str) -> str:
        return f"arn:{self.partition}:{service}:{self.region}:{self.account}:{resource}"


class Sink(msgspec.Struct, frozen=True):
    """The stream that `engine: spark` puts its rows into, and the role for it, if it is not the
    application's."""

    stream_arn: str
    role_arn: str | None = None


def run_policy(settings: Settings, site: Site, *, sink: Sink | None = None) -> Policy:
    """The policy of a machine that runs the application, or of the role it assumes
    (`aws.role_arn`); on Spark, of the driver and every executor.

    If the sink has a role of its own, this policy grants assuming it, and the right to write
    belongs to that role's policy.
    """
    statements = _fleet if settings.engine == "fleet" else _spark
    return _policy([*statements(settings, site), *_sunk(sink)])


def provision_policy(settings: Settings, site: Site) -> Policy:
    """To create the lease table and to add the owner index to an older one.

    Not for a machine's role: a machine's own policy expressly denies changes to the table.
    """
    table = [site.table(settings.table)]
    return _policy([_allow(Grant.CREATE, table), _allow(Grant.INDEX, table)])


def put_policy(settings: Settings, site: Site) -> Policy:
    """To put records into the application's streams."""
    return _policy([_allow(Grant.WRITE, _streams(settings, site))])


def consumers_policy(settings: Settings, site: Site) -> Policy:
    """To list and to remove the consumers of the application's streams."""
    streams = _streams(settings, site)
    consumers = [f"{site.stream(source.name)}/consumer/*" for source in settings.sources]
    return _policy([_allow(Grant.MANAGE_CONSUMERS, [*streams, *consumers])])


def letters_policy(settings: Settings, site: Site) -> Policy:
    """To list, show, redrive and drop dead letters; so also to write rows to the outputs, and to
    read the positions of the leases."""
    place = settings.on_error.dead_letter
    # Letters of a table's changes are not put back into its stream.
    put_back = [stream for stream in _streams(settings, site) if not is_change_stream(stream)]
    written = [*put_back, *_row_streams(settings, site)]
    statements = [_allow(Grant.WRITE, written), *_outputs(settings, site), *_schemas(settings)]
    if settings.engine == "fleet":
        statements.append(_allow(Grant.SEE_LEASES, [site.table(settings.table)]))
    if place.s3 is not None:
        statements.append(_allow(Grant.SEE_BUCKET, [site.bucket(place.s3)]))
        statements.append(_allow(Grant.MANAGE_OBJECTS, [site.objects(place.s3)]))
    if place.sqs is not None:
        statements.append(_allow(Grant.MANAGE_MESSAGES, [site.queue(place.sqs)]))
    if place.stream is not None:
        of_letters = [site.stream(place.stream)]
        statements[0] = _allow(Grant.WRITE, [*written, *of_letters])
        statements.append(_allow(Grant.READ, of_letters))
    return _policy([statement for statement in statements if statement["Resource"]])


def replay_policy(settings: Settings, site: Site) -> Policy:
    """To run, to list and to remove replays: on the streams, and on their own lease tables. With
    `--outputs same` the statements for outputs of the machine's policy are needed besides."""
    tables = f"{replay_tables(settings.application)}*"
    return _policy(
        [
            _allow(Grant.READ, _streams(settings, site)),
            *_schemas(settings),
            _allow(Grant.LEASES, [site.table(tables)]),
            _allow(Grant.OFFERS, [site.index(tables, OWNER_INDEX)]),
            _allow(Grant.CREATE, [site.table(tables)]),
            # The tables of an account are listed as a whole.
            _allow(Grant.LIST_REPLAYS, ["*"]),
            _allow(Grant.REMOVE_REPLAYS, [site.table(tables)]),
        ]
    )


def caller_policy(role_arn: str, settings: Settings, site: Site) -> Policy:
    """The policy of the machine itself if `role_arn` has the rest. The machine answers its
    lifecycle hooks with its own role. `site` is the machine's."""
    hooks = _hooks(settings, site) if settings.engine == "fleet" else ()
    return _policy([_allow(Grant.ROLE, [role_arn]), *hooks])


def _reads(settings: Settings, site: Site) -> Iterator[_Statement]:
    streams = _streams(settings, site)
    of_changes = any(map(is_change_stream, streams))
    yield _allow(Grant.READ_CHANGES if of_changes else Grant.READ, streams)
    if settings.fetch.mode == "fan-out":
        consumer = settings.fetch.consumer or settings.application
        consumers = [site.consumer(source.name, consumer) for source in settings.sources]
        yield _allow(Grant.FAN_OUT, consumers)
        # A consumer is found by its name, before its ARN is known.
        yield _allow(Grant.CONSUMERS, _streams(settings, site))
    yield from _schemas(settings)


def _schemas(settings: Settings) -> Iterator[_Statement]:
    if any(source.decode == "glue" for source in settings.sources):
        # The header of a record has the id of a schema version, and no registry.
        yield _allow(Grant.SCHEMAS, ["*"])


def _fleet(settings: Settings, site: Site) -> Iterator[_Statement]:
    table = [site.table(settings.table)]
    yield from _reads(settings, site)
    yield _allow(Grant.LEASES, table)
    yield _allow(Grant.OFFERS, [site.index(settings.table, OWNER_INDEX)])
    coordinator = coordinator_table(kcl_application(settings), settings.table)
    yield _allow(Grant.KCL3, [site.table(coordinator)])
    if settings.leases.create:
        yield _allow(Grant.CREATE, table)
    cloudwatch = settings.observe.cloudwatch
    if cloudwatch is not None and cloudwatch.via == "api":
        # CloudWatch has no resource ARNs for this; a condition restricts the namespace.
        yield _allow(Grant.METRICS, ["*"]) | {
            "Condition": {"StringEquals": {"cloudwatch:namespace": cloudwatch.namespace}}
        }
    yield from _letters(settings, site)
    yield from _outputs(settings, site)
    yield from _versions(settings, site)
    if settings.observe.story.startswith("s3:"):
        yield _allow(Grant.KEEP_STORY, [site.objects(settings.observe.story)])
    if settings.aws.role_arn is None:
        yield from _hooks(settings, site)
    yield {
        "Sid": "NeverDropTheTable",
        "Effect": "Deny",
        "Action": ["dynamodb:DeleteTable", "dynamodb:UpdateTable"],
        "Resource": table[0],
    }


def _versions(settings: Settings, site: Site) -> Iterator[_Statement]:
    state = state_place(settings)
    if state is not None and state.s3 is not None:
        yield _allow(Grant.KEEP_VERSIONS, [site.objects(state.s3)])
        yield _allow(Grant.LIST_VERSIONS, [site.bucket(state.s3)])
    if state is not None and state.dynamodb is not None:
        yield _allow(Grant.KEEP_STATE_ITEMS, [site.table(state.dynamodb)])


def _letters(settings: Settings, site: Site) -> Iterator[_Statement]:
    """To keep dead letters, and to check at the start that their place exists."""
    place = settings.on_error.dead_letter
    if place.s3 is not None:
        yield _allow(Grant.KEEP_OBJECTS, [site.objects(place.s3)])
        yield _allow(Grant.SEE_BUCKET, [site.bucket(place.s3)])
    if place.sqs is not None:
        yield _allow(Grant.SEND_LETTERS, [site.queue(place.sqs)])
    of_letters = [] if place.stream is None else [site.stream(place.stream)]
    if written := [*of_letters, *_row_streams(settings, site)]:
        yield _allow(Grant.WRITE, written)


def _row_streams(settings: Settings, site: Site) -> list[str]:
    places = output_places(settings, ONLY_STREAM)
    return [site.stream(place.kinesis) for place in places if place.kinesis is not None]


def _outputs(settings: Settings, site: Site) -> Iterator[_Statement]:
    """To check that the destinations exist, and to write rows to them: one statement for all
    destinations of a kind. `_letters` has the statement for streams."""
    named: dict[Grant, list[str]] = {}
    for place in output_places(settings, ONLY_STREAM):
        if place.s3 is not None:
            named.setdefault(Grant.WRITE_OBJECTS, []).append(site.objects(place.s3))
            named.setdefault(Grant.FIND_OBJECTS, []).append(site.bucket(place.s3))
        elif place.dynamodb is not None:
            named.setdefault(Grant.WRITE_ITEMS, []).append(site.table(place.dynamodb))
        elif place.sqs is not None:
            named.setdefault(Grant.SEND_ROWS, []).append(site.queue(place.sqs))
        elif place.sns is not None:
            named.setdefault(Grant.PUBLISH_ROWS, []).append(place.sns)
        elif place.firehose is not None:
            arn = site.delivery_stream(place.firehose)
            named.setdefault(Grant.DELIVER_ROWS, []).append(arn)
    for grant, resources in named.items():
        yield _allow(grant, list(dict.fromkeys(resources)))


def _hooks(settings: Settings, site: Site) -> Iterator[_Statement]:
    instance = settings.instance
    if instance.launch_hook is not None or instance.termination_hook is not None:
        yield _allow(Grant.LIFECYCLE, [site.group(instance.group)])


def _spark(settings: Settings, site: Site) -> Iterator[_Statement]:
    """Spark's checkpoint has the position: of the lease table only the start position is read."""
    yield from _reads(settings, site)
    if isinstance(settings.start, StartAtLeases):
        yield _allow(Grant.START, [site.table(settings.start.leases)])
    yield from _versions(settings, site)


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
