"""`kclrun leases add-index`: the index of owners, for a table that the Java KCL made."""

from typing import Any

import botocore.session
import pytest

from kclrun.aws.lease_table import OWNER_INDEX
from kclrun.cli.program import run_program


@pytest.fixture
def dynamodb(endpoint):
    session = botocore.session.get_session()
    client = session.create_client(
        "dynamodb",
        region_name="us-east-1",
        endpoint_url=endpoint,
        aws_access_key_id="a",
        aws_secret_access_key="b",
    )
    yield client
    client.close()


@pytest.fixture
def config(endpoint, tmp_path, monkeypatch, request):
    """The configuration of an application whose table nobody has made yet."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    file = tmp_path / "app.yaml"
    name = request.node.name.replace("_", "-")[-60:].strip("-")
    file.write_text(
        f"application: {name}\nstream: orders\naws: {{region: us-east-1, endpoint: '{endpoint}'}}\n"
    )
    file.chmod(0o600)
    return file


@pytest.fixture
def table(dynamodb, config):
    """A lease table as the Java KCL 2.x makes it."""
    name = str(config.read_text().split()[1])
    dynamodb.create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
    )
    return name


def indexes_of(dynamodb: Any, table: str) -> list[str]:
    described = dynamodb.describe_table(TableName=table)["Table"]
    return [index["IndexName"] for index in described.get("GlobalSecondaryIndexes", ())]


@pytest.mark.seconds
def test_adding_the_index_shows_its_plan_first(dynamodb, table, config, capsys):
    assert run_program(["leases", "add-index", "--config", str(config)]) == 0

    reported = capsys.readouterr().out
    assert f"{table}: add index {OWNER_INDEX}" in reported
    assert "15 to 20" in reported
    assert "To do it, add --yes" in reported
    assert indexes_of(dynamodb, table) == []


@pytest.mark.seconds
def test_the_index_is_added_with_yes_and_only_once(dynamodb, table, config, capsys):
    command = ["leases", "add-index", "--config", str(config), "--yes"]

    assert run_program(command) == 0
    assert f"{OWNER_INDEX} is ACTIVE" in capsys.readouterr().out
    assert indexes_of(dynamodb, table) == [OWNER_INDEX]

    assert run_program(command) == 0
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.seconds
def test_no_index_is_added_where_there_is_no_table(config, capsys):
    assert run_program(["leases", "add-index", "--config", str(config), "--yes"]) == 78
    assert "does not exist" in capsys.readouterr().err


def test_a_spark_application_has_no_lease_table(tmp_path, capsys):
    file = tmp_path / "app.yaml"
    file.write_text(
        "application: orders\nstream: orders\nengine: spark\naws: {region: us-east-1}\n"
        "spark: {checkpoint: /var/lib/orders}\n"
    )
    file.chmod(0o600)

    assert run_program(["leases", "add-index", "--config", str(file)]) == 78
    assert "keeps no leases" in capsys.readouterr().err
