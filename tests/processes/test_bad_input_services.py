"""What AWS refuses at the start: the code says whether to restart, the message what is missing."""

import json
import uuid

import pytest

from tests.patience import HUNG_S, until
from tests.processes.bad_input_rig.denying import DenyingEndpoint
from tests.processes.bad_input_rig.program import Project
from tests.processes.ledger_rig.gate import Gate

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def kinesis(embedded_aws):
    with DenyingEndpoint(embedded_aws.embedded.kinesis_endpoint) as endpoint:
        yield endpoint


@pytest.fixture
def dynamodb(embedded_aws):
    with DenyingEndpoint(embedded_aws.embedded.dynamodb_endpoint) as endpoint:
        yield endpoint


@pytest.fixture
def endpoints(kinesis, dynamodb):
    return {"kinesis": kinesis.url, "dynamodb": dynamodb.url}


@pytest.fixture(scope="module")
def stream(embedded_aws):
    return embedded_aws.stream(shards=1)


@pytest.fixture
def table():
    return f"orders-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def program(project, endpoints, stream, table):
    """The project once it has settings: of that stream and table, and `more`."""
    return lambda **more: project.settings(
        endpoint=endpoints, stream=stream, application=table, **more
    )


def make_table(aws, name, key="leaseKey"):
    aws.dynamodb.create_table(
        TableName=name,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"}],
        KeySchema=[{"AttributeName": key, "KeyType": "HASH"}],
    )


def test_a_missing_stream_is_66(project, endpoints):
    ended = project.settings(endpoint=endpoints, stream="nobodys").run()

    assert ended.code == 66
    assert ended.has_reported("Stream nobodys", "not found", "kclrun local --stream nobodys")


@pytest.mark.parametrize(
    "operation",
    [
        "GetItem",
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in ("DescribeTable", "CreateTable", "Scan")
        ),
    ],
)
def test_a_missing_permission_on_the_table_is_77_and_named(program, dynamodb, table, operation):
    dynamodb.deny(operation)

    ended = program().run()

    assert ended.code == 77
    assert ended.has_reported(f"dynamodb:{operation}", f"table/{table}")
    assert "UpdateItem" not in dynamodb.calls, "a lease was taken before the refusal was seen"


@pytest.mark.long
@pytest.mark.parametrize(
    "operation", [pytest.param("DescribeStreamSummary", marks=pytest.mark.slow), "ListShards"]
)
def test_a_missing_permission_on_the_stream_is_77_and_named(
    program, kinesis, dynamodb, stream, operation
):
    kinesis.deny(operation)

    ended = program().run()

    assert ended.code == 77
    assert ended.has_reported(f"kinesis:{operation}", stream)
    assert "UpdateItem" not in dynamodb.calls


def test_a_missing_permission_to_create_rows_is_reported_once_and_not_asked_for_in_haste(
    program, dynamodb
):
    dynamodb.deny("PutItem")
    process = program(leases={"failover": "2s"}, log={"level": "debug"}).start()

    until(lambda: dynamodb.calls.count("PutItem") >= 3)
    scans, puts = dynamodb.calls.count("Scan"), dynamodb.calls.count("PutItem")
    process.terminate()
    reported = process.communicate(timeout=HUNG_S)[1]

    assert process.returncode == 0
    assert reported.count('"audit_refused"') == 1
    assert "dynamodb:PutItem" in reported
    assert '"lease_created"' not in reported, "nothing was created"
    # One scan a try (failover / 2), the start's own, and the random first.
    assert scans <= puts + 3


def test_a_table_with_another_key_is_78(program, embedded_aws, table):
    make_table(embedded_aws, table, key="id")

    ended = program().run()

    assert ended.code == 78
    assert ended.has_reported(f"table {table} is not a lease table", "id (HASH)", "leases.table")


@pytest.mark.long
def test_a_table_of_the_kcl_3_in_its_own_mode_is_78(program, embedded_aws, table, dynamodb):
    make_table(embedded_aws, table)
    embedded_aws.dynamodb.put_item(
        TableName=table,
        Item={
            "leaseKey": {"S": "Migration3.0"},
            "entityType": {"S": "MIGRATION"},
            "cv": {"S": "CLIENT_VERSION_3X"},
        },
    )

    ended = program().run()

    assert ended.code == 78
    assert ended.has_reported(
        "KCL 3", "CLIENT_VERSION_3X", "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"
    )
    assert not {"UpdateItem", "PutItem"} & set(dynamodb.calls)


@pytest.mark.long
def test_an_absent_table_that_must_not_be_made_is_78(program, table, dynamodb):
    ended = program(leases={"create": False}).run()

    assert ended.code == 78
    assert ended.has_reported(f"lease table {table} does not exist", "leases.create: on")
    assert "CreateTable" not in dynamodb.calls


@pytest.mark.long
def test_a_table_that_is_throttled_longer_than_start_timeout_is_69(program, dynamodb):
    dynamodb.throttle("Scan")

    ended = program(aws={"start_timeout": "1s"}).run()

    assert ended.code == 69
    assert ended.has_reported("Scan", "ProvisionedThroughputExceededException")


def test_aws_that_comes_back_within_start_timeout_is_waited_for(
    project, embedded_aws, stream, table
):
    gate = Gate(embedded_aws.embedded.kinesis_endpoint)
    project.settings(
        endpoint={"kinesis": gate.url, "dynamodb": embedded_aws.embedded.dynamodb_endpoint},
        stream=stream,
        application=table,
        aws={"start_timeout": f"{HUNG_S:g}s"},
    )
    try:
        with gate.hang_up():
            process = project.start()
            waiting = line_with(process, '"error"')
        line_with(process, '"manager_started"')
        process.terminate()
        reported = process.communicate(timeout=HUNG_S)[1]
    finally:
        process.kill()
        process.wait()
        gate.shut()

    said = json.loads(waiting)
    assert (said["event"], said["level"]) == ("start_waiting", "warning")
    assert said["what"] == f"the stream {stream}, Kinesis at {gate.url}"
    assert "DescribeStreamSummary: no answer" in said["error"]
    assert 0 < said["left_s"] <= HUNG_S
    assert process.returncode == 0
    assert "Traceback" not in reported


def line_with(process, part):
    """The next line on standard error that has this part."""
    lines = iter(process.stderr.readline, "")
    found = next((line for line in lines if part in line), None)
    assert found is not None, "it has ended"
    return found


def test_aws_on_this_machine_that_is_not_there_ends_a_start_at_once(
    project, embedded_aws, stream, table
):
    gate = Gate(embedded_aws.embedded.kinesis_endpoint)
    gate.shut()
    project.settings(
        endpoint={"kinesis": gate.url, "dynamodb": embedded_aws.embedded.dynamodb_endpoint},
        stream=stream,
        application=table,
        aws={"start_timeout": f"{HUNG_S:g}s"},
    )

    ended = project.run()

    assert ended.code == 69
    assert ended.has_reported("nothing listens at 127.0.0.1:", "kclrun local --port")


def test_a_stop_sent_at_the_first_word_is_one_in_good_order(project, embedded_aws, stream, table):
    """A script that waits for the line may stop it from then on."""
    process = project.settings(
        endpoint=embedded_aws.embedded.endpoint, stream=stream, application=table
    ).start()
    try:
        line_with(process, '"manager_started"')
        process.terminate()
        rest = process.communicate(timeout=HUNG_S)[1]
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 0
    assert '"manager_stopped"' in rest
