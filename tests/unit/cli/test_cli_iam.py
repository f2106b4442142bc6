"""`kclrun iam`: the policies by the settings of a file; nothing is asked of AWS."""

import json
from pathlib import Path

import pytest

from kclrun.cli.program import run_program

FLEET = "application: shop\nstream: orders\nprocessor: m:C\naws: {region: eu-west-1}\n"
ACCOUNT = ["--account", "123456789012"]


def iam(tmp_path, text, *arguments):
    file = tmp_path / "app.yaml"
    file.write_text(text)
    file.chmod(0o600)
    return run_program(["iam", "--config", str(file), *arguments])


def printed(capsys):
    policy = json.loads(capsys.readouterr().out)
    assert policy["Version"] == "2012-10-17"
    return {one["Sid"]: one for one in policy["Statement"]}


def test_a_machines_policy_names_the_stream_and_the_table_of_the_file(tmp_path, capsys):
    assert iam(tmp_path, FLEET, *ACCOUNT) == 0

    statements = printed(capsys)
    assert statements["ReadStream"]["Resource"] == (
        "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
    )
    assert statements["LeaseTable"]["Resource"] == (
        "arn:aws:dynamodb:eu-west-1:123456789012:table/shop"
    )
    assert statements["NeverDropTheTable"]["Effect"] == "Deny"


@pytest.mark.parametrize("store", ["s3://kept/some", "folder"])
def test_the_versions_of_the_state_are_kept_listed_and_removed_in_their_bucket(
    tmp_path, capsys, store
):
    assert iam(tmp_path, f"{FLEET}state: {{store: '{store}'}}\n", *ACCOUNT) == 0

    statements = printed(capsys)
    if store == "folder":
        assert not [sid for sid in statements if "State" in sid]
        return
    assert statements["KeepVersionsOfTheState"]["Action"] == [
        *("s3:DeleteObject", "s3:GetObject", "s3:PutObject"),
    ]
    assert statements["KeepVersionsOfTheState"]["Resource"] == "arn:aws:s3:::kept/some/*"
    assert statements["ListVersionsOfTheState"]["Resource"] == "arn:aws:s3:::kept"


def test_the_file_may_be_named_without_the_option(tmp_path, capsys):
    assert iam(tmp_path, FLEET, *ACCOUNT) == 0
    with_option = printed(capsys)

    assert run_program(["iam", str(tmp_path / "app.yaml"), *ACCOUNT]) == 0
    assert printed(capsys) == with_option


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ([], "Which configuration? There is no app.yaml"),
        (["a.yaml", "-c", "b.yaml"], "Two configurations: b.yaml and a.yaml"),
    ],
)
def test_no_file_and_two_files_are_usage_errors(arguments, reported, capsys):
    assert run_program(["iam", *arguments]) == 64
    assert reported in capsys.readouterr().err


def test_an_override_changes_the_policy_as_it_changes_the_application(tmp_path, capsys):
    assert iam(tmp_path, FLEET, "--set", "leases.table=old", *ACCOUNT) == 0

    assert printed(capsys)["LeaseTable"]["Resource"].endswith(":table/old")


@pytest.mark.parametrize(
    "named",
    [
        "stream: arn:aws:kinesis:eu-west-1:210987654321:stream/orders",
        "aws: {region: eu-west-1, role_arn: 'arn:aws:iam::210987654321:role/reader'}",
    ],
)
def test_the_account_is_found_in_the_arns_of_the_file(tmp_path, capsys, named):
    key = named.split(":")[0]
    others = [line for line in FLEET.splitlines() if not line.startswith(f"{key}:")]

    assert iam(tmp_path, "\n".join([*others, named])) == 0
    assert printed(capsys)["LeaseTable"]["Resource"] == (
        "arn:aws:dynamodb:eu-west-1:210987654321:table/shop"
    )


def test_without_an_account_it_is_asked_for(tmp_path, capsys):
    assert iam(tmp_path, FLEET) == 78
    assert "--account" in capsys.readouterr().err


def test_a_role_that_is_no_arn_says_no_account(tmp_path, capsys):
    assert iam(tmp_path, FLEET, "--set", "aws.role_arn=arn:reader") == 78
    assert "--account" in capsys.readouterr().err


def test_an_account_that_is_none_is_refused(tmp_path, capsys):
    assert iam(tmp_path, FLEET, "--account", "1234-5678-9012") == 78
    assert "12 digits" in capsys.readouterr().err


def test_streams_of_several_accounts_leave_open_whose_the_table_is(tmp_path, capsys):
    streams = ", ".join(
        f"{{name: 'arn:aws:kinesis:eu-west-1:{account}:stream/orders-{account[0]}'}}"
        for account in ("210987654321", "123456789012")
    )
    text = FLEET.replace("stream: orders", f"streams: [{streams}]")

    assert iam(tmp_path, text) == 78
    assert "the streams are of several" in capsys.readouterr().err
    assert iam(tmp_path, text, *ACCOUNT) == 0
    assert printed(capsys)["LeaseTable"]["Resource"].split(":")[4] == "123456789012"


def test_the_partition_is_the_regions(tmp_path, capsys):
    assert iam(tmp_path, FLEET, "--set", "aws.region=us-gov-west-1", *ACCOUNT) == 0

    assert printed(capsys)["ReadStream"]["Resource"].startswith("arn:aws-us-gov:kinesis:")


def test_without_a_region_there_is_no_resource_to_name(tmp_path, capsys, monkeypatch):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    assert iam(tmp_path, FLEET.replace("aws: {region: eu-west-1}\n", ""), *ACCOUNT) == 78
    assert "no AWS region" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("purpose", "sids"),
    [
        ("provision", {"CreateLeaseTable", "AddTheOwnerIndex"}),
        ("put", {"PutIntoStream"}),
        (
            "replay",
            {"ReadStream", "LeaseTable", "FindOfferedLeases", "CreateLeaseTable", "ListReplays"}
            | {"RemoveReplays"},
        ),
    ],
)
def test_others_than_machines_have_policies_of_their_own(tmp_path, capsys, purpose, sids):
    assert iam(tmp_path, FLEET, "--for", purpose, *ACCOUNT) == 0

    assert set(printed(capsys)) == sids


def test_the_caller_of_a_role_may_assume_it_and_nothing_else(tmp_path, capsys):
    role = "arn:aws:iam::210987654321:role/reader"

    assert iam(tmp_path, FLEET, "--for", "caller", "--set", f"aws.role_arn={role}") == 0
    assert printed(capsys)["AssumeRole"]["Resource"] == role


def test_the_machine_that_assumes_a_role_answers_its_hooks_itself(tmp_path, capsys):
    role = "arn:aws:iam::210987654321:role/reader"
    text = FLEET + "instance: {group: machines, termination_hook: down}\n"
    assumed = ("--set", f"aws.role_arn={role}")

    assert iam(tmp_path, text, "--for", "caller", *assumed, *ACCOUNT) == 0
    assert printed(capsys)["AnswerLifecycleHooks"]["Resource"] == (
        "arn:aws:autoscaling:eu-west-1:123456789012:autoScalingGroup:*:autoScalingGroupName/machines"
    )
    assert iam(tmp_path, text, *assumed) == 0
    assert "AnswerLifecycleHooks" not in printed(capsys)


def test_a_caller_without_a_role_is_reported_so(tmp_path, capsys):
    assert iam(tmp_path, FLEET, "--for", "caller", *ACCOUNT) == 78
    assert "aws.role_arn" in capsys.readouterr().err


SPARK = (
    "application: shop\nstream: orders\npipeline: m:f\nengine: spark\naws: {region: eu-west-1}\n"
    "spark: {checkpoint: s3a://b/c}\noutput: {format: kclrun, options: {streamName: rows}}\n"
)


def test_on_spark_the_sinks_stream_is_the_one_that_may_be_written(tmp_path, capsys):
    assert iam(tmp_path, SPARK, *ACCOUNT) == 0

    statements = printed(capsys)
    assert set(statements) == {"ReadStream", "PutIntoStream"}
    assert statements["PutIntoStream"]["Resource"].endswith(":stream/rows")


def test_a_sink_elsewhere_is_named_where_it_is(tmp_path, capsys):
    text = SPARK.replace("streamName: rows", "streamName: rows, region: us-west-2")

    assert iam(tmp_path, text, *ACCOUNT) == 0
    statements = printed(capsys)
    assert statements["PutIntoStream"]["Resource"].split(":")[3] == "us-west-2"
    assert statements["ReadStream"]["Resource"].split(":")[3] == "eu-west-1"


def test_on_spark_the_leases_to_begin_at_are_in_the_region_of_the_streams_arn(tmp_path, capsys):
    arn = "arn:aws:kinesis:us-west-2:123456789012:stream/orders"
    text = SPARK.replace("stream: orders", f"stream: {arn}") + "start: {leases: orders}\n"

    assert iam(tmp_path, text) == 0
    assert printed(capsys)["BeginAtLeases"]["Resource"] == (
        "arn:aws:dynamodb:us-west-2:123456789012:table/orders"
    )


def test_on_spark_there_is_no_table_to_provision(tmp_path, capsys):
    assert iam(tmp_path, SPARK, "--for", "provision", *ACCOUNT) == 78
    assert "no lease table" in capsys.readouterr().err


def test_the_embedded_aws_needs_no_permission(capsys):
    demo = Path(__file__).parents[3] / "config" / "demo.yaml"

    assert run_program(["iam", "--config", str(demo), *ACCOUNT]) == 78
    assert "embedded" in capsys.readouterr().err
