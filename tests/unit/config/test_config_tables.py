"""Every setting that names a DynamoDB table takes its name or its ARN."""

import pytest

from kclrun.aws.policies import Site, run_policy
from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.config.outputs import output_places
from kclrun.config.state import state_place
from kclrun.config.tables import named_tables
from kclrun.errors import SettingsError
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.table import beside, is_table_arn, may_be_same, table_name_of
from kclrun.model.time import WallTime
from kclrun.spark.option_reading import Use, read_source_options

ARN = "arn:aws:dynamodb:eu-west-1:123456789012:table/items"
ELSEWHERE = "arn:aws:dynamodb:us-east-1:123456789012:table/items"
OTHER_ACCOUNT = "arn:aws:dynamodb:eu-west-1:999999999999:table/items"
HERE = "aws: {region: eu-west-1}\n"
SPARK = "engine: spark\nspark: {checkpoint: /c}\n"

# Each setting, its name in messages, and what it is once the settings are resolved.
SETTINGS = {
    "leases.table": ("leases: {table: '%s'}", lambda settings: settings.table),
    "state.store": (
        "state: {store: 'dynamodb://%s'}",
        lambda settings: state_place(settings).dynamodb,
    ),
    "state.store without a scheme": (
        "state: {store: '%s'}",
        lambda settings: state_place(settings).dynamodb,
    ),
    "output.dynamodb": (
        "output: {dynamodb: '%s'}",
        lambda settings: output_places(settings, ONLY_STREAM)[0].dynamodb,
    ),
    "outputs.rows.dynamodb": (
        "outputs: {rows: {dynamodb: '%s'}}",
        lambda settings: output_places(settings, ONLY_STREAM)[0].dynamodb,
    ),
    "start.leases": (SPARK + "start: {leases: '%s'}", lambda settings: settings.start.leases),
}


def loaded(more, *, least="application: app\nstream: orders\n"):
    return settings_of(least + more, environment={}, now=WallTime(1_780_000_000.0))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("table", [ARN, OTHER_ACCOUNT])
def test_a_table_may_be_named_by_its_arn(name, table):
    text, resolved = SETTINGS[name]
    settings = loaded(f"{text % table}\n{HERE}")

    assert resolved(settings) == table
    assert table in dict(named_tables(settings)).values()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_table_of_another_region_is_refused(name):
    text, _ = SETTINGS[name]
    with pytest.raises(SettingsError) as raised:
        loaded(f"{text % ELSEWHERE}\n{HERE}")

    said = str(raised.value)
    assert f"{name.partition(' ')[0]}: is a table of us-east-1, and the region of the" in said
    assert "expected a table of eu-west-1, by its name or ARN" in said


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "start.leases"])
def test_so_it_is_where_the_environment_says_the_region(name, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    text, _ = SETTINGS[name]
    Aws(loaded(text % ARN))

    with pytest.raises(SettingsError, match=r"is a table of us-east-1, and the region of the"):
        Aws(loaded(text % ELSEWHERE))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("leases: {table: '%s/index/i'}", "the ARN of a table ends with the table's name"),
        ("output: {dynamodb: '%s/stream/x'}", "the ARN of a table ends with the table's name"),
        ("state: {store: '%s/index/i'}", "dynamodb://table, or the ARN of a table"),
        ("state: {store: 'arn:aws:dynamodb:table/x'}", "dynamodb://table, or the ARN of a table"),
        ("leases: {kcl_application: '%s'}", "the ARN of a lease table belongs in leases.table"),
    ],
)
def test_an_arn_that_is_not_a_tables_says_what_to_write(text, said):
    with pytest.raises(SettingsError, match=said):
        loaded(text.replace("%s", ARN))


@pytest.mark.parametrize(
    ("least", "said"),
    [
        (f"application: '{ARN}'\nstream: orders\n", "application: .* belongs in leases.table"),
        (f"application: app\nstream: '{ARN}'\n", "stream: .* its stream is read, by the ARN"),
    ],
)
def test_an_arn_where_no_table_is_named_says_where_it_belongs(least, said):
    with pytest.raises(SettingsError, match=said):
        loaded("", least=least)


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("leases: {table: X}\nstate: {store: 'dynamodb://Y'}", "state.store", "scan the lease"),
        ("leases: {table: X}\noutput: {dynamodb: Y}", "output.dynamodb", "scan the lease table"),
        (
            "state: {store: 'dynamodb://X'}\noutput: {dynamodb: Y}",
            "output.dynamodb",
            "is the table of state.store already",
        ),
        (
            "output: {dynamodb: X}\noutputs: {a: {dynamodb: Y}}",
            "outputs.a.dynamodb",
            "is the table of output.dynamodb already",
        ),
    ],
)
def test_one_table_by_its_name_and_by_its_arn_is_one_table(text, at, said):
    for first, second in (("items", ARN), (ARN, "items")):
        with pytest.raises(SettingsError, match=f"{at}: .*{said}"):
            loaded(text.replace("X", first).replace("Y", second))
    loaded(text.replace("X", ARN).replace("Y", OTHER_ACCOUNT))


def test_a_policy_names_the_tables_and_their_indexes_by_their_arns():
    settings = loaded(f"leases: {{table: '{OTHER_ACCOUNT}'}}\n")
    policy = run_policy(settings, Site(partition="aws", region="eu-west-1", account="123456789012"))
    named = str(policy)

    assert f"'{OTHER_ACCOUNT}'" in named
    assert f"'{OTHER_ACCOUNT}/index/LeaseOwnerToLeaseKeyIndex'" in named
    assert "arn:aws:dynamodb:eu-west-1:999999999999:table/app-CoordinatorState" in named
    assert "table/arn:" not in named


def test_a_query_begins_at_the_leases_of_a_table_that_is_named_by_its_arn():
    options = {"streamName": "orders", "startingLeases": ARN}

    assert read_source_options(options, Use.STREAM).start.leases.table == ARN


def test_names_are_derived_from_the_name_in_an_arn():
    assert [table_name_of(table) for table in ("items", ARN)] == ["items", "items"]
    assert beside("items", "other") == "other"
    assert beside(ARN, "other") == ARN.replace("items", "other")
    assert not is_table_arn(f"{ARN}/stream/2026-01-01T00:00:00.000")
    assert not may_be_same(ARN, OTHER_ACCOUNT)
