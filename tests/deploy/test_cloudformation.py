"""The CloudFormation template: cfn-lint takes it, moto makes it, and it says what kclrun says."""

import base64
import re
import shlex
import sys
import warnings
from pathlib import Path

import boto3
import pytest
from moto import mock_aws

from kclrun.aws.policies import Site, run_policy
from kclrun.config.load import settings_of
from kclrun.model.time import WallTime
from kclrun.observe.alarms import alarms
from kclrun.observe.metrics import APPLICATION, METRICS
from tests.deploy.templates import TEMPLATE, Stack, read_template
from tests.support.programs import run_to_end

# In the environment for development, as moto's part that reads templates.
pytest.importorskip("cfnlint")

ROOT = Path(__file__).parents[2]
REGION = "eu-west-1"
ACCOUNT = "123456789012"
ZONES = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
# Types that moto's CloudFormation does not make: here they are made by the services' own calls.
UNKNOWN_TO_MOTO = {"AWS::AutoScaling::ScalingPolicy", "AWS::CloudWatch::Alarm"}
TABLE_STREAM = f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/orders/stream/2026-01-01T00:00:00.000"
APP = "application: other\nstream: other\nprocessor: m:C\n"


class Made:
    """The stack in moto, and the template as evaluated for it."""

    def __init__(self, name="orders", **more):
        self.name = name
        ec2 = boto3.client("ec2", REGION)
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnets = [
            ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=zone)
            for n, zone in enumerate(ZONES)
        ]
        parameters = {
            "Application": "shop",
            "Bundle": "deployments/shop.tar.gz",
            "VpcId": vpc,
            "Subnets": ",".join(each["Subnet"]["SubnetId"] for each in subnets),
        } | more
        template = read_template(TEMPLATE)
        self.resources = self._create(parameters)
        self.stack = Stack(template, parameters, self._names())

    def _create(self, parameters):
        formation = boto3.client("cloudformation", REGION)
        with warnings.catch_warnings():
            for kind in UNKNOWN_TO_MOTO:
                warnings.filterwarnings("ignore", f"Tried to parse {kind}", UserWarning)
            formation.create_stack(
                StackName=self.name,
                TemplateBody=TEMPLATE.read_text(),
                Capabilities=["CAPABILITY_IAM"],
                Parameters=[
                    {"ParameterKey": name, "ParameterValue": value}
                    for name, value in parameters.items()
                ],
            )
            resources = formation.describe_stack_resources(StackName=self.name)["StackResources"]
        # moto lists a resource of a type it does not know without its names.
        return {one["LogicalResourceId"]: one for one in resources if "LogicalResourceId" in one}

    def _names(self):
        stream = self.resources.get("Stream", {}).get("PhysicalResourceId")
        return {
            "AWS::Region": REGION,
            "AWS::AccountId": ACCOUNT,
            "AWS::Partition": "aws",
            "AWS::StackName": self.name,
            "LaunchTemplate.LatestVersionNumber": "1",
            "Stream.Arn": f"arn:aws:kinesis:{REGION}:{ACCOUNT}:stream/{stream}",
        } | {name: one["PhysicalResourceId"] for name, one in self.resources.items()}

    @property
    def group(self):
        groups = boto3.client("autoscaling", REGION).describe_auto_scaling_groups(
            AutoScalingGroupNames=[self.resources["Machines"]["PhysicalResourceId"]]
        )
        [group] = groups["AutoScalingGroups"]
        return group

    @property
    def policy(self):
        """What kclrun may do, from the template: moto keeps no JSON of it."""
        policies = self.stack.properties("Role")["Policies"]
        return next(one["PolicyDocument"] for one in policies if one["PolicyName"] == "kclrun")

    @property
    def launch(self):
        """What a machine is started with."""
        [version] = boto3.client("ec2", REGION).describe_launch_template_versions(
            LaunchTemplateId=self.resources["LaunchTemplate"]["PhysicalResourceId"],
            Versions=["$Latest"],
        )["LaunchTemplateVersions"]
        return version["LaunchTemplateData"]

    @property
    def user_data(self):
        return base64.b64decode(self.launch["UserData"]).decode()


@pytest.fixture(scope="module")
def moto():
    with mock_aws():
        yield


@pytest.fixture(scope="module")
def made(moto):
    return Made()


@pytest.mark.long
def test_cfn_lint_has_nothing_to_say():
    linted = run_to_end(
        [Path(sys.executable).with_name("cfn-lint"), "--include-checks", "I", "--", TEMPLATE]
    )

    assert (linted.returncode, linted.stdout) == (0, "")


def test_moto_makes_everything_it_knows(made):
    known = {
        name
        for name, one in made.stack.template["Resources"].items()
        if one["Type"] not in UNKNOWN_TO_MOTO
    }

    assert known == made.resources.keys()
    assert {one["ResourceStatus"] for one in made.resources.values()} == {"CREATE_COMPLETE"}
    assert sorted(made.group["AvailabilityZones"]) == ZONES
    stream = boto3.client("kinesis", REGION).describe_stream_summary(
        StreamName=made.resources["Stream"]["PhysicalResourceId"]
    )["StreamDescriptionSummary"]
    assert (stream["OpenShardCount"], stream["RetentionPeriodHours"]) == (6, 24)


# What the machine runs.


def arguments(user_data):
    """kclrun's command line in the drop-in that a shell would write, as systemd would read it."""
    heredoc = re.search(r"<<UNIT\n.*?\nUNIT\n", user_data, re.DOTALL)[0]
    dropped_in = run_to_end(["bash", "-euc", f"zone={ZONES[0]}; cat {heredoc}"], check=True).stdout
    starts = re.findall(r"^ExecStart=(.*)$", dropped_in.replace("\\\n", " "), re.MULTILINE)
    # The empty one takes back that of the unit itself.
    assert starts[0] == ""
    assert len(starts) == 2
    return shlex.split(starts[1])


def overrides(user_data):
    words = arguments(user_data)
    return [words[n + 1] for n, word in enumerate(words) if word == "--set"]


def settings(made, *more):
    given = [*overrides(made.user_data), *more]
    return settings_of(APP, given, environment={}, now=WallTime(1_800_000_000.0))


def test_a_machine_runs_the_stacks_application_in_the_group_of_its_zone(made):
    found = settings(made)

    assert found.application == "shop"
    assert found.stream == made.stack.value({"Fn::GetAtt": "Stream.Arn"})
    assert found.leases.group == ZONES[0]
    assert found.leases.max == 64
    assert found.aws.region == REGION
    assert found.observe.cloudwatch.namespace == "kclrun"


def test_what_the_stack_made_is_used_whatever_the_file_says(made):
    """Its role and its alarms know nothing else."""
    text = (
        "application: other\nstreams: [{name: a}, {name: b}]\nprocessor: m:C\n"
        "leases: {table: old}\n"
        "observe: {cloudwatch: {namespace: mine, dimensions: {Environment: prod}}}\n"
    )

    found = settings_of(
        text, overrides(made.user_data), environment={}, now=WallTime(1_800_000_000.0)
    )

    assert [each.name for each in found.sources] == [settings(made).stream]
    assert found.table == "shop"
    assert found.observe.cloudwatch == settings(made).observe.cloudwatch


def test_no_parameter_can_end_a_word_of_the_script(made):
    parameters = made.stack.template["Parameters"]
    launch = made.stack.template["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    named = set(re.findall(r"\$\{(\w+)\}|'Ref': '(\w+)'", str(launch["UserData"])))
    # The stream's own ARN, or that of the parameter.
    named = {one or other for one, other in named} - {"Source"}

    assert {"Application", "Bundle", "Namespace", "TableStreamArn"} <= named
    for name in named:
        pattern = parameters[name].get("AllowedPattern", r"\d+")
        assert parameters[name]["Type"] == "Number" or "AllowedPattern" in parameters[name], name
        for sign in " '\"`$\\;%*\n":
            assert not re.fullmatch(pattern, f"shop/a{sign}b"), (name, sign)


def test_a_machine_completes_the_hooks_that_the_group_has(made):
    hooks = {
        one["LifecycleTransition"].rpartition("_")[2]: one["LifecycleHookName"]
        for one in made.stack.properties("Machines")["LifecycleHookSpecificationList"]
    }

    instance = settings(made).instance
    assert instance.launch_hook == hooks["LAUNCHING"]
    assert instance.termination_hook == hooks["TERMINATING"]
    # The group is found by its tag.
    assert instance.group is None
    assert made.launch["MetadataOptions"]["InstanceMetadataTags"] == "enabled"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("by-polling", {}),
        ("by-fan-out", {"FetchMode": "fan-out"}),
        ("of-a-table", {"TableStreamArn": TABLE_STREAM}),
    ],
)
def test_a_machine_may_do_what_kclrun_iam_prints_for_its_settings(moto, name, parameters):
    made = Made(name, **parameters)
    # Of the group's name, the template knows the beginning.
    known = settings(made, f"instance.group={name}-Machines-*")

    assert known.fetch.mode == parameters.get("FetchMode", "polling")
    assert made.policy == run_policy(known, Site(partition="aws", region=REGION, account=ACCOUNT))


def test_a_machine_may_complete_the_hooks_of_its_own_group(made):
    [hooks] = [one for one in made.policy["Statement"] if one["Sid"] == "AnswerLifecycleHooks"]
    pattern = re.escape(hooks["Resource"]).replace(r"\*", ".*")

    assert re.fullmatch(pattern, made.group["AutoScalingGroupARN"])


def test_user_data_is_a_script_that_a_shell_can_read(made):
    checked = run_to_end(["bash", "-n"], input=made.user_data)

    assert made.user_data.startswith("#!/bin/bash\nset -euo pipefail\n")
    assert (checked.returncode, checked.stderr) == (0, "")
    # EC2 takes no more.
    assert len(made.user_data.encode()) < 16 * 1024


def test_the_machines_metadata_wants_a_token(made):
    assert made.launch["MetadataOptions"]["HttpTokens"] == "required"


def test_of_a_tables_stream_the_stack_makes_no_stream_and_its_machines_read_that_one(moto):
    made = Made("changes", TableStreamArn=TABLE_STREAM)

    assert "Stream" not in made.resources
    assert settings(made).stream == TABLE_STREAM
    assert made.stack.value(made.stack.template["Outputs"]["StreamArn"]["Value"]) == TABLE_STREAM


def test_what_a_tables_stream_does_not_have_is_refused_before_anything_is_made():
    rule = read_template(TEMPLATE)["Rules"]["ChangesOfATable"]
    holds = {
        name: all(Stack({"Parameters": {}}, given, {}).value(one["Assert"]) for one in rules)
        for rules in [rule["Assertions"]]
        for name, given in {
            "as it is": {"FetchMode": "polling", "RetentionHours": 24},
            "pushed": {"FetchMode": "fan-out", "RetentionHours": 24},
            "kept longer": {"FetchMode": "polling", "RetentionHours": 48},
        }.items()
    }

    assert holds == {"as it is": True, "pushed": False, "kept longer": False}


# Scaling.


@pytest.mark.parametrize("by", ["need", "bytes", "leases"])
def test_the_group_is_scaled_by_one_target_that_autoscaling_takes(moto, by):
    made = Made(f"scaled-by-{by}", ScaleBy=by)
    [name] = made.stack.of_type("AWS::AutoScaling::ScalingPolicy")
    policy = made.stack.properties(name)
    target = policy["TargetTrackingConfiguration"]

    # botocore checks the names and types of all that is sent.
    boto3.client("autoscaling", REGION).put_scaling_policy(
        PolicyName=name,
        **policy | {"TargetTrackingConfiguration": target | numbers(target, "TargetValue")},
    )

    metric = target["CustomizedMetricSpecification"]
    if by == "leases":
        assert (metric["MetricName"], metric["Statistic"]) == ("worker_leases", "Average")
    else:
        ids = {"bytes": ["bytes", "machines", "each"], "need": ["needed", "machines", "ratio"]}
        assert [each["Id"] for each in metric["Metrics"]] == ids[by]
        assert policy["AutoScalingGroupName"] == made.resources["Machines"]["PhysicalResourceId"]


def numbers(properties, *names):
    return {name: float(properties[name]) for name in names if name in properties}


# Alarms.


def test_the_alarms_are_those_of_the_catalogue(moto):
    """Each row: name, text, metric and statistic, condition, what missing data means."""
    made = Made("watched", AlarmTopicArn=f"arn:aws:sns:{REGION}:{ACCOUNT}:people")
    cloudwatch = boto3.client("cloudwatch", REGION)
    for name in made.stack.of_type("AWS::CloudWatch::Alarm"):
        alarm = made.stack.properties(name)
        # botocore checks the names and types of all that is sent.
        cloudwatch.put_metric_alarm(**alarm | numbers(alarm, "Threshold"))
    alarms = cloudwatch.describe_alarms(AlarmNamePrefix="watched ")["MetricAlarms"]

    assert sorted(map(alarm_row, alarms)) == sorted(rows_of_the_catalogue())
    for alarm in alarms:
        assert alarm["AlarmActions"] == [f"arn:aws:sns:{REGION}:{ACCOUNT}:people"]


def metrics_asked_for(properties):
    """Every metric in it, with its namespace and dimensions, however deep it stands."""
    if isinstance(properties, dict):
        if "MetricName" in properties:
            yield properties
        properties = properties.values()
    if not isinstance(properties, str | int | float):
        for each in properties:
            yield from metrics_asked_for(each)


@pytest.mark.parametrize("by", ["need", "bytes", "leases"])
def test_what_alarms_and_scaling_ask_for_is_what_machines_publish(moto, by):
    made = Made(f"asking-by-{by}", ScaleBy=by)
    cloudwatch = settings(made).observe.cloudwatch
    asked = [
        metric
        for kind in ("AWS::CloudWatch::Alarm", "AWS::AutoScaling::ScalingPolicy")
        for name in made.stack.of_type(kind)
        for metric in metrics_asked_for(made.stack.properties(name))
        if metric["Namespace"] != "AWS/AutoScaling"
    ]

    # Alarms ask for all but the number of machines.
    names = METRICS.keys() - (set() if by == "need" else {"needed_workers"})
    assert {metric["MetricName"] for metric in asked} == names
    for metric in asked:
        assert metric["Namespace"] == cloudwatch.namespace
        published = {APPLICATION: "shop"} | cloudwatch.dimensions
        assert {each["Name"]: each["Value"] for each in metric["Dimensions"]} == published


SIGNS = {"GreaterThanThreshold": ">", "LessThanOrEqualToThreshold": "<="}


def alarm_row(alarm):
    metrics = alarm.get("Metrics") or []
    asked = sorted(
        f"{one['MetricStat']['Metric']['MetricName']} {one['MetricStat']['Stat']}"
        for one in metrics
        if "MetricStat" in one
    ) or [f"{alarm['MetricName']} {alarm['Statistic']}"]
    # Half of the retention is part of an expression, for templates cannot multiply.
    beyond = [re.search(r"- (\d+) \* 1800000$", one.get("Expression", "")) for one in metrics]
    offset = sum(int(found[1]) * 1_800_000 for found in beyond if found)
    periods = {one["MetricStat"]["Period"] for one in metrics if "MetricStat" in one}
    assert periods or {alarm["Period"]} == {60}
    return (
        alarm["AlarmName"].removeprefix("watched "),
        alarm["AlarmDescription"],
        asked,
        f"{SIGNS[alarm['ComparisonOperator']]} {alarm['Threshold'] + offset:g}",
        f"{alarm['DatapointsToAlarm']} of {alarm['EvaluationPeriods']}",
        alarm["TreatMissingData"],
    )


def rows_of_the_catalogue():
    for alarm in alarms():
        if (watch := alarm.watch) is not None:
            sign, limit = watch.condition.split()
            yield (
                alarm.name,
                alarm.summary,
                sorted(f"{metric.name} {metric.statistic}" for metric in watch.metrics),
                f"{sign} {float(limit):g}",
                f"{watch.minutes} of {watch.minutes}",
                "breaching" if watch.is_breached_by_silence else "notBreaching",
            )


def test_a_deploy_leaves_as_many_machines_as_there_should_be(made):
    machines = made.stack.template["Resources"]["Machines"]
    rolling = made.stack.value(machines["UpdatePolicy"])["AutoScalingRollingUpdate"]

    # CloudFormation refuses an update that would need more machines than there may be.
    assert int(rolling["MinInstancesInService"]) == made.group["MinSize"] < made.group["MaxSize"]
    assert rolling["MaxBatchSize"] == 1
    assert not {"Launch", "Terminate"} & set(rolling["SuspendProcesses"])


def test_a_resource_that_holds_records_outlives_the_stack():
    stream = read_template(TEMPLATE)["Resources"]["Stream"]

    assert (stream["DeletionPolicy"], stream["UpdateReplacePolicy"]) == ("Retain", "Retain")


def test_the_page_shows_parameters_that_the_template_has():
    text = (ROOT / "docs" / "how-to" / "autoscaling-group.md").read_text()
    shown = re.findall(r"ParameterKey=(\w+)", text)
    needed = {
        name for name, one in read_template(TEMPLATE)["Parameters"].items() if "Default" not in one
    }

    assert needed <= set(shown)
    assert set(shown) <= read_template(TEMPLATE)["Parameters"].keys()
