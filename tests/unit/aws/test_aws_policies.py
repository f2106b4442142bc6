"""The IAM policies allow what this room calls: no less, and nothing more."""

import ast
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.session import Session
from moto import mock_aws

from kclrun.aws.operations import (
    CREATE_STREAM,
    LIST_CHANGE_STREAMS,
    LIST_STREAMS,
    OPERATIONS,
    Grant,
)
from kclrun.aws.policies import (
    Policy,
    Sink,
    Site,
    caller_policy,
    consumers_policy,
    letters_policy,
    provision_policy,
    put_policy,
    replay_policy,
    run_policy,
)
from kclrun.model.lease import replay_tables
from tests.architecture.sources import files_of_the_package
from tests.support.build import settings
from tests.support.tables import over_rows

PACKAGE = Path(__file__).parents[3] / "kclrun"
ROOM = PACKAGE / "aws"
SERVICES = sorted({operation.service for operation in OPERATIONS})
# They make and reshape the streams of the embedded AWS, which asks nobody for permission.
OF_THE_EMBEDDED_AWS = {"local/filling.py"}
SITE = Site(partition="aws", region="eu-west-1", account="123456789012")
STREAM = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
TABLE = "arn:aws:dynamodb:eu-west-1:123456789012:table/shop"
FLEET = "application: shop\nstream: orders\nprocessor: m:C\n"
CHANGED = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"
CHANGES = f"application: shop\nstream: {CHANGED}\nprocessor: m:C\n"
SPARK = (
    "application: shop\nstream: orders\npipeline: m:f\nengine: spark\n"
    "spark: {checkpoint: s3a://b/c}\noutput: {format: console}\n"
)
# Checked for the parts of a transaction; there is no operation of this name (DynamoDB's page of
# the service authorization reference). S3 checks a listing of objects under this name.
WITHOUT_OPERATION = {"dynamodb:ConditionCheckItem", "s3:ListBucket"}


# A shard is subscribed to, as in SNS a topic is.
OUR_METHODS = {"Subscribe"}


def fleet(more: str = "") -> Policy:
    return run_policy(settings(FLEET + more), SITE)


HOOKS = "instance: {group: machines, launch_hook: up, termination_hook: down}\n"
ROLE = "arn:aws:iam::123456789012:role/orders"
ASSUMING = FLEET + HOOKS + f"aws: {{role_arn: '{ROLE}'}}\n"
FAN_OUT = "fetch: {mode: fan-out}\n"
LETTERS = {
    "s3": "s3: 's3://b-1/dead'",
    "sqs": "sqs: dead",
    "sqs by url": "sqs: 'https://sqs.eu-west-1.amazonaws.com/999999999999/dead', s3: 's3://b-1'",
    "stream": "stream: dead",
}


def lettered(place: str) -> str:
    return FLEET + f"on_error: {{then: dead-letter, dead_letter: {{{LETTERS[place]}}}}}\n"


EVERYTHING = FLEET + "observe: {cloudwatch: {namespace: shops}}\n" + HOOKS
OUTPUTS = """
output: {s3: 's3://b-1/rows'}
outputs:
  a: {dynamodb: items}
  b: {sqs: 'https://sqs.eu-west-1.amazonaws.com/999999999999/rows'}
  c: {kinesis: rows, key: [k]}
on_error: {then: dead-letter, dead_letter: {stream: dead}}
"""
MORE_OUTPUTS = """
outputs:
  a: {sns: 'arn:aws:sns:eu-west-1:123456789012:rows'}
  b: {firehose: rows}
  c: {s3: 's3://b-1/one'}
  d: {s3: 's3://b-1/two'}
"""
POLICIES: dict[str, Policy] = {
    "a machine": run_policy(settings(EVERYTHING), SITE),
    "a machine that creates no table": fleet("leases: {create: off}\n"),
    "several streams": run_policy(
        settings("application: shop\nprocessor: m:C\nstreams: [{name: orders}, {name: audits}]\n"),
        SITE,
    ),
    "the stream of a table": run_policy(settings(CHANGES), SITE),
    "who redrives changes": letters_policy(
        settings(CHANGES + "on_error: {then: dead-letter, dead_letter: {sqs: dead}}\n"), SITE
    ),
    "Spark": run_policy(settings(SPARK), SITE),
    "Spark that begins at leases": run_policy(settings(SPARK + "start: {leases: old}\n"), SITE),
    "Spark with a stream for its rows": run_policy(
        settings(SPARK), SITE, sink=Sink(SITE.stream("rows"))
    ),
    "Spark with a role for its rows": run_policy(
        settings(SPARK), SITE, sink=Sink(SITE.stream("rows"), ROLE)
    ),
    "who provisions": provision_policy(settings(FLEET), SITE),
    "by fan-out": fleet(FAN_OUT),
    "with a schema registry": fleet("decode: glue\n"),
    "Spark by fan-out": run_policy(settings(SPARK + FAN_OUT), SITE),
    "who manages consumers": consumers_policy(settings(FLEET), SITE),
    "who replays": replay_policy(settings(FLEET), SITE),
    "a machine with a story in S3": fleet("observe: {story: 's3://stories/a'}\n"),
    "who puts": put_policy(settings(FLEET), SITE),
    "a role that is assumed": run_policy(settings(ASSUMING), SITE),
    "who assumes the role": caller_policy(ROLE, settings(ASSUMING), SITE),
    **{
        f"{who} letters in {place}": make(settings(lettered(place)), SITE)
        for place in LETTERS
        for who, make in (("a machine with", run_policy), ("who redrives", letters_policy))
    },
    "a machine with state in items": fleet("state: {store: dynamodb://kept}\n"),
    "a machine with outputs": fleet(OUTPUTS),
    "a machine with more outputs": fleet(MORE_OUTPUTS),
    "who redrives into outputs": letters_policy(settings(FLEET + OUTPUTS), SITE),
    "who redrives into more outputs": letters_policy(settings(FLEET + MORE_OUTPUTS), SITE),
    "China": run_policy(
        settings(EVERYTHING),
        Site(partition="aws-cn", region="cn-north-1", account="123456789012"),
    ),
}


def by_sid(policy: Policy) -> dict[str, dict[str, Any]]:
    return {statement["Sid"]: statement for statement in policy["Statement"]}


def listed(named: str | list[str]) -> list[str]:
    return [named] if isinstance(named, str) else named


def allowed(policy: Policy) -> set[str]:
    return {
        action
        for statement in policy["Statement"]
        if statement["Effect"] == "Allow"
        for action in listed(statement["Action"])
    }


@over_rows("who", POLICIES)
def test_a_statement_allows_exactly_what_is_called_for_it(who):
    for sid, statement in by_sid(POLICIES[who]).items():
        if statement["Effect"] == "Deny":
            continue
        called = {
            action
            for operation in OPERATIONS
            if Grant(sid) in operation.grants
            for action in operation.iam_actions
        }
        assert set(statement["Action"]) == called


def test_every_operation_that_is_called_is_in_some_policy():
    everything = set().union(*(allowed(policy) for policy in POLICIES.values()))

    assert everything == {
        action
        for operation in OPERATIONS
        for action in operation.iam_actions
        if operation
        not in {CREATE_STREAM, LIST_STREAMS, LIST_CHANGE_STREAMS}  # see where they are declared
    }
    assert not everything & {"kinesis:CreateStream", "kinesis:ListStreams"}


def test_a_replay_may_change_and_delete_its_own_lease_tables_and_nothing_of_the_fleet():
    statements = by_sid(POLICIES["who replays"])
    tables = {
        name
        for sid, statement in statements.items()
        for name in listed(statement["Resource"])
        if sid not in {"ReadStream", "ListReplays"}
    }
    table = SITE.table(replay_tables(settings(FLEET).application))
    assert all(name.startswith(f"{table}*") for name in tables)


def test_rows_are_written_to_the_destinations_of_the_outputs_and_to_nothing_else():
    one, two = by_sid(POLICIES["a machine with outputs"]), by_sid(fleet(MORE_OUTPUTS))

    assert {sid: one[sid]["Resource"] for sid in one.keys() - by_sid(fleet()).keys()} == {
        "WriteRowsAsObjects": "arn:aws:s3:::b-1/rows/*",
        "SeeWhichObjectsAreThere": "arn:aws:s3:::b-1",
        "WriteRowsAsItems": "arn:aws:dynamodb:eu-west-1:123456789012:table/items",
        "SendRowsToQueues": "arn:aws:sqs:eu-west-1:999999999999:rows",
        "PutIntoStream": [STREAM.replace("orders", "dead"), STREAM.replace("orders", "rows")],
    }
    assert {sid: two[sid]["Resource"] for sid in two.keys() - by_sid(fleet()).keys()} == {
        "PublishRowsToTopics": "arn:aws:sns:eu-west-1:123456789012:rows",
        "PutRowsIntoDeliveryStreams": "arn:aws:firehose:eu-west-1:123456789012:deliverystream/rows",
        "WriteRowsAsObjects": ["arn:aws:s3:::b-1/one/*", "arn:aws:s3:::b-1/two/*"],
        "SeeWhichObjectsAreThere": "arn:aws:s3:::b-1",
    }


@over_rows("who", POLICIES)
def test_each_statement_has_a_name_of_its_own(who):
    assert len(by_sid(POLICIES[who])) == len(POLICIES[who]["Statement"])


@pytest.mark.parametrize(
    ("more", "consumer"),
    [
        (FAN_OUT, f"{STREAM}/consumer/shop:*"),
        ("fetch: {mode: fan-out, consumer: mine}\n", f"{STREAM}/consumer/mine:*"),
        (
            f"fetch: {{mode: fan-out, consumer: '{STREAM}/consumer/a:1'}}\n",
            f"{STREAM}/consumer/a:1",
        ),
    ],
)
def test_a_machine_subscribes_by_its_consumer_and_finds_it_by_its_stream(more, consumer):
    statements = by_sid(fleet(more))

    assert statements["SubscribeToShards"]["Resource"] == consumer
    assert statements["FindOrRegisterTheConsumer"]["Resource"] == STREAM
    assert "kinesis:DeregisterStreamConsumer" not in allowed(fleet(more))
    assert "SubscribeToShards" not in by_sid(fleet())


@pytest.mark.parametrize(
    ("place", "kept", "managed"),
    [
        (
            "s3",
            {
                "KeepDeadLettersInTheBucket": "s3:::b-1/dead/*",
                "SeeTheBucketOfDeadLetters": "s3:::b-1",
            },
            {
                "ReadAndRemoveDeadLetters": "s3:::b-1/dead/*",
                "SeeTheBucketOfDeadLetters": "s3:::b-1",
            },
        ),
        (
            "sqs",
            {"SendDeadLetters": "sqs:eu-west-1:123456789012:dead"},
            {"ReceiveAndRemoveDeadLetters": "sqs:eu-west-1:123456789012:dead"},
        ),
        (
            "sqs by url",
            {
                "SendDeadLetters": "sqs:eu-west-1:999999999999:dead",
                "KeepDeadLettersInTheBucket": "s3:::b-1/*",
            },
            {
                "ReceiveAndRemoveDeadLetters": "sqs:eu-west-1:999999999999:dead",
                "ReadAndRemoveDeadLetters": "s3:::b-1/*",
            },
        ),
        (
            "stream",
            {"PutIntoStream": "kinesis:eu-west-1:123456789012:stream/dead"},
            {"ReadStream": "kinesis:eu-west-1:123456789012:stream/dead"},
        ),
    ],
)
def test_a_machine_keeps_letters_at_their_place_and_only_an_operator_reads_and_removes_them(
    place, kept, managed
):
    machine, operator = (
        by_sid(POLICIES[f"{who} letters in {place}"]) for who in ("a machine with", "who redrives")
    )

    assert {sid: machine[sid]["Resource"] for sid in kept} == {
        sid: f"arn:aws:{resource}" for sid, resource in kept.items()
    }
    assert {sid: operator[sid]["Resource"] for sid in managed} == {
        sid: f"arn:aws:{resource}" for sid, resource in managed.items()
    }
    assert not {"ReadAndRemoveDeadLetters", "ReceiveAndRemoveDeadLetters"} & set(machine)
    assert STREAM in listed(operator["PutIntoStream"]["Resource"])


@pytest.mark.parametrize("outputs", ["outputs", "more outputs"])
def test_who_redrives_writes_rows_as_a_machine_does_and_sees_the_leases(outputs):
    machine = by_sid(POLICIES[f"a machine with {outputs}"])
    operator = by_sid(POLICIES[f"who redrives into {outputs}"])

    of_rows = [sid for sid in machine if "Rows" in sid or "Objects" in sid]
    assert of_rows
    assert {sid: operator[sid] for sid in of_rows} == {sid: machine[sid] for sid in of_rows}
    leases = operator["SeeHowFarLeasesAre"]
    assert (leases["Action"], leases["Resource"]) == (["dynamodb:Scan"], TABLE)
    written = listed(machine.get("PutIntoStream", {"Resource": []})["Resource"])
    assert {*written, STREAM} == {*listed(operator["PutIntoStream"]["Resource"])}


def test_spark_by_fan_out_may_do_what_a_machine_by_fan_out_does_with_its_consumer():
    for statement in ("SubscribeToShards", "FindOrRegisterTheConsumer"):
        assert by_sid(POLICIES["Spark by fan-out"])[statement] == by_sid(fleet(FAN_OUT))[statement]
        assert statement not in by_sid(POLICIES["Spark"])


def test_consumers_are_managed_on_the_applications_streams_alone():
    [statement] = POLICIES["who manages consumers"]["Statement"]

    assert statement["Resource"] == [STREAM, f"{STREAM}/consumer/*"]
    assert "kinesis:RegisterStreamConsumer" not in statement["Action"]


@pytest.fixture(scope="module")
def iam():
    """Its checks of a policy's grammar are those of the service; a mistake is refused."""
    with mock_aws():
        yield boto3.client("iam", region_name="us-east-1")


@over_rows("who", POLICIES)
def test_a_policy_has_the_shape_that_iam_takes(who, iam):
    policy = POLICIES[who]

    assert set(policy) == {"Version", "Statement"}
    assert len(by_sid(policy)) == len(policy["Statement"])
    for statement in policy["Statement"]:
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        assert re.fullmatch(r"[A-Za-z0-9]+", statement["Sid"])
        assert statement["Action"] == sorted(set(statement["Action"]))
    # An inline policy of a role may have 10,240 characters, a managed one 6,144.
    assert len(json.dumps(policy)) < 6_144
    name = re.sub(r"\W", "-", who)
    iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(policy))


@functools.cache
def actions_of_botocore() -> set[str]:
    session = Session()
    return {
        f"{service.removesuffix('streams')}:{name}"  # DynamoDB's streams have its actions
        for service in SERVICES
        for name in session.get_service_model(service).operation_names
    }


@over_rows("who", POLICIES)
def test_every_action_is_one_that_botocore_knows(who):
    named = {
        action for statement in POLICIES[who]["Statement"] for action in listed(statement["Action"])
    }
    assert named - WITHOUT_OPERATION <= actions_of_botocore()


# A namespace is no resource; AWS adds a part to the names of groups and consumers; objects are
# those under a prefix.
NAMED_IN_PART = {
    *(Grant.METRICS, Grant.LIFECYCLE, Grant.FAN_OUT, Grant.MANAGE_CONSUMERS),
    *(Grant.KEEP_OBJECTS, Grant.MANAGE_OBJECTS, Grant.WRITE_OBJECTS, Grant.SCHEMAS),
    Grant.KEEP_STORY,
    Grant.LIST_REPLAYS,
}


def test_schemas_are_read_by_the_id_of_their_version_in_any_registry():
    schemas = by_sid(POLICIES["with a schema registry"])[Grant.SCHEMAS.value]
    assert (schemas["Action"], schemas["Resource"]) == (["glue:GetSchemaVersion"], "*")
    of_one = "application: shop\nprocessor: m:C\nstreams: [{name: a}, {name: b, decode: glue}]\n"
    assert Grant.SCHEMAS.value in by_sid(run_policy(settings(of_one), SITE))
    assert Grant.SCHEMAS.value not in by_sid(fleet("decode: json\n"))


@over_rows("who", POLICIES)
def test_every_resource_is_named_whole(who):
    for sid, statement in by_sid(POLICIES[who]).items():
        if sid in {each.value for each in NAMED_IN_PART}:
            continue  # other tests: what can be named of them is
        for named in listed(statement["Resource"]):
            # Each replay has a table, named by its range.
            resource = named.replace("-replay-*", "") if who == "who replays" else named
            assert "*" not in resource
            assert re.fullmatch(
                r"arn:aws(-cn)?:(kinesis|dynamodb|iam):[a-z0-9-]*:123456789012:"
                r"(stream/\w+|table/orders/stream/[-0-9T:.]+|table/\w+(-CoordinatorState|/index/LeaseOwnerToLeaseKeyIndex)?"
                r"|role/\w+)"
                r"|arn:aws:(sqs|sns):eu-west-1:\d{12}:(dead|rows)|arn:aws:s3:::b-1"
                r"|arn:aws:firehose:eu-west-1:123456789012:deliverystream/rows",
                resource,
            )


def test_the_right_to_publish_metrics_is_bound_to_the_namespace():
    metrics = by_sid(POLICIES["a machine"])[Grant.METRICS.value]

    assert metrics["Condition"] == {"StringEquals": {"cloudwatch:namespace": "shops"}}
    assert Grant.METRICS.value not in by_sid(fleet())


def test_metrics_in_the_log_need_no_right_to_publish():
    assert Grant.METRICS.value not in by_sid(fleet("observe: {cloudwatch: {via: log}}"))


def test_the_right_to_answer_hooks_is_bound_to_the_group():
    """Its ARN has a part that only AWS knows."""
    hooks = by_sid(POLICIES["a machine"])[Grant.LIFECYCLE.value]

    assert hooks["Resource"] == (
        "arn:aws:autoscaling:eu-west-1:123456789012:"
        "autoScalingGroup:*:autoScalingGroupName/machines"
    )
    assert Grant.LIFECYCLE.value not in by_sid(fleet())


def test_hooks_are_answered_by_the_machine_and_not_by_the_role_that_it_assumes():
    assert set(by_sid(POLICIES["who assumes the role"])) == {"AssumeRole", "AnswerLifecycleHooks"}
    assert Grant.LIFECYCLE.value not in by_sid(POLICIES["a role that is assumed"])


def test_a_group_that_only_its_instances_know_is_any_of_the_account():
    hooks = by_sid(fleet("instance: {launch_hook: up}\n"))[Grant.LIFECYCLE.value]

    assert hooks["Resource"].endswith(":autoScalingGroup:*:autoScalingGroupName/*")


def test_a_machine_may_never_drop_or_change_the_table():
    denied = [one for one in fleet()["Statement"] if one["Effect"] == "Deny"]

    assert [(one["Action"], one["Resource"]) for one in denied] == [
        (["dynamodb:DeleteTable", "dynamodb:UpdateTable"], TABLE)
    ]


def test_the_table_may_be_created_only_where_the_settings_say_so():
    assert by_sid(fleet())[Grant.CREATE.value]["Resource"] == TABLE
    assert Grant.CREATE.value not in by_sid(fleet("leases: {create: off}\n"))


def test_a_table_of_another_name_and_the_applications_coordinator_table_are_told_apart():
    statements = by_sid(fleet("leases: {table: old}\n"))

    assert statements[Grant.LEASES.value]["Resource"].endswith(":table/old")
    assert statements[Grant.OFFERS.value]["Resource"].endswith(":table/old/index/" + INDEX)
    assert statements[Grant.KCL3.value]["Resource"].endswith(":table/shop-CoordinatorState")

    of_java = by_sid(fleet("leases: {table: old, kcl_application: java}\n"))
    assert of_java[Grant.KCL3.value]["Resource"].endswith(":table/java-CoordinatorState")


INDEX = "LeaseOwnerToLeaseKeyIndex"


def test_a_stream_given_as_an_arn_stays_where_it_is():
    elsewhere = "arn:aws:kinesis:eu-west-1:999999999999:stream/orders"
    policy = run_policy(settings(FLEET.replace("stream: orders", f"stream: {elsewhere}")), SITE)

    assert by_sid(policy)[Grant.READ.value]["Resource"] == elsewhere
    assert by_sid(policy)[Grant.LEASES.value]["Resource"] == TABLE


def test_on_spark_no_table_is_needed_but_for_the_leases_it_begins_at():
    assert allowed(POLICIES["Spark"]) == {
        "kinesis:DescribeStreamSummary",
        "kinesis:GetRecords",
        "kinesis:GetShardIterator",
        "kinesis:ListShards",
    }
    begins = by_sid(POLICIES["Spark that begins at leases"])[Grant.START.value]
    assert begins["Action"] == ["dynamodb:Scan"]
    assert begins["Resource"].endswith(":table/old")


def test_on_spark_the_state_of_a_processor_may_be_kept_below_the_checkpoint():
    text = (
        "application: shop\nstream: orders\nprocessor: m:f\nengine: spark\nstate: {}\n"
        "spark: {checkpoint: s3a://b/c}\noutput: {format: console}\n"
    )
    statements = by_sid(run_policy(settings(text), SITE))
    assert statements[Grant.KEEP_VERSIONS.value]["Resource"] == "arn:aws:s3:::b/c/kclrun-state/*"
    assert statements[Grant.LIST_VERSIONS.value]["Resource"] == "arn:aws:s3:::b"


def test_only_who_puts_may_write_to_a_stream():
    assert by_sid(POLICIES["who puts"])[Grant.WRITE.value]["Resource"] == STREAM
    sunk = by_sid(POLICIES["Spark with a stream for its rows"])[Grant.WRITE.value]
    assert sunk["Resource"].endswith(":stream/rows")
    assert "kinesis:PutRecords" not in allowed(POLICIES["a machine"])


def test_a_sink_with_a_role_of_its_own_is_reached_through_it():
    statements = by_sid(POLICIES["Spark with a role for its rows"])

    assert statements[Grant.ROLE.value]["Resource"] == ROLE
    assert Grant.WRITE.value not in statements


def _model_operations() -> dict[str, str]:
    """Every operation of the services, by its wire name and by its method name."""
    session = Session()
    names: dict[str, str] = {}
    for service in SERVICES:
        for name in session.get_service_model(service).operation_names:
            snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
            names[name] = names[snake] = name
    return names


def _strings_and_methods(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr=name)):
                yield name
            case ast.Constant(value=str(text)):
                yield text


def test_no_module_names_an_operation_that_is_not_declared():
    declared = {operation.name for operation in OPERATIONS}
    known = _model_operations()
    used = {
        (Path(source.name).name, known[name])
        for source in files_of_the_package()
        if source.name.startswith("kclrun/aws/")
        for name in _strings_and_methods(source.nodes)
        if name in known
    }

    # `Scan` as a plain word is also a method of ours; both stand for the declared operation.
    assert {name for _, name in used} <= declared | OUR_METHODS
    assert {("cloudwatch.py", "PutMetricData"), ("table_setup.py", "CreateTable")} <= used


def _calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    """All calls of something of these names in the package, with the file that they stand in."""
    for source in files_of_the_package():
        for node in source.nodes:
            match node:
                case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
                    if called in names:
                        yield source.name.removeprefix("kclrun/"), node


def test_a_client_is_made_of_no_service_but_those_of_the_declared_operations():
    """The names of others' operations would not be looked for."""
    made = list(_calls("create_client", "_client", "client"))
    named = {
        call.args[0].value
        for _, call in made
        if call.args and isinstance(call.args[0], ast.Constant)
    }

    assert named <= set(SERVICES)
    assert {"cloudwatch", "dynamodb", "sts"} <= named
    # By a variable: what `_client` is given by its own methods, and what endpoints are probed for.
    assert sorted(
        file
        for file, call in made
        if file.startswith("aws/") and call.args and isinstance(call.args[0], ast.Name)
    ) == ["aws/control.py", "aws/endpoints.py"]


def test_operations_are_declared_nowhere_else():
    """A wire client sends what it is given."""
    declaring = {file for file, _ in _calls("Operation")}

    assert declaring == {"aws/operations.py", *OF_THE_EMBEDDED_AWS}


def test_every_declared_operation_exists_and_is_used():
    known = _model_operations()
    sources = {path.name: path.read_text() for path in ROOM.rglob("*.py")}
    for operation in OPERATIONS:
        assert operation.name in known
        constant = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation.name).upper()
        users = [
            name
            for name, text in sources.items()
            if name != "operations.py" and re.search(rf"\b{constant}\b", text)
        ]
        assert users, f"{constant} is granted and never called"


def test_a_table_that_is_named_by_its_arn_is_the_resource():
    arn = "arn:aws:dynamodb:eu-west-1:999999999999:table/items"
    policy = fleet(f"output: {{dynamodb: '{arn}'}}\n")

    assert [statement["Resource"] for statement in policy["Statement"]].count(arn) == 1
