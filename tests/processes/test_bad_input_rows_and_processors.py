"""What is wrong with one shard or one row is that shard's or row's trouble, and no other's."""

import signal

import pytest

from tests.patience import until
from tests.processes.bad_input_rig.program import Project

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

REASON = "the model for this shard is not there"
PICKY = f"""
from kclrun import RecordProcessor

class Picky(RecordProcessor):
    def initialize(self, context):
        if context.shard_id == "shardId-000000000000":
            raise RuntimeError({REASON!r})

    def process_records(self, batch, checkpointer):
        print("records", len(batch))
"""
SOUND = {
    "leaseCounter": {"N": "0"},
    "checkpoint": {"S": "TRIM_HORIZON"},
    "checkpointSubSequenceNumber": {"N": "0"},
    "ownerSwitchesSinceCheckpoint": {"N": "0"},
}
CORRUPT = {
    "an attribute is missing": {"checkpoint": {"S": "TRIM_HORIZON"}},
    "a counter is text": {**SOUND, "leaseCounter": {"S": "1"}},
    "a counter is negative": {**SOUND, "leaseCounter": {"N": "-1"}},
    "a sentinel nobody knows": {**SOUND, "checkpoint": {"S": "SOMEWHERE"}},
    "a number of 200 digits": {**SOUND, "checkpoint": {"S": "9" * 200}},
    "a checkpoint is a list": {**SOUND, "checkpoint": {"L": []}},
    "an owner is a map": {**SOUND, "leaseOwner": {"M": {}}},
    # The row of a shard that is there: its position is not guessed, and it is not read.
    "shardId-000000000000": {**SOUND, "checkpoint": {"S": "49abc"}},
    'forged\n{"event":"lease_taken"}': {"checkpoint": {"S": "TRIM_HORIZON"}},
}


@pytest.fixture
def application(application, tmp_path):
    """Of the rig, with a processor of this test's own."""
    project = Project(tmp_path)
    project.code(PICKY)

    def make(stream, processor="mine:Picky"):
        return application(
            stream,
            processor=processor,
            path=str(tmp_path),
            on_error={"retries": 1, "backoff": "100ms"},
            leases={"failover": "2s"},
        )

    return make


def test_a_processor_that_raises_at_its_start_halts_its_lease_and_no_other(
    embedded_aws, application
):
    stream = embedded_aws.stream(shards=3)
    app = application(stream).start()
    put_everywhere(embedded_aws, stream)

    app.until(lambda: app.of("lease_halted") and len({x["shard"] for x in app.of("printed")}) >= 2)

    (halted,) = app.of("lease_halted")
    (failed,) = app.of("processor_failed")
    assert halted["shard"] == failed["shard"] == "shardId-000000000000"
    assert failed["where"] == "initialize"
    (raised,) = app.of("processor_raised")
    assert REASON in raised["traceback"]
    assert "traceback" not in failed, "it was told when it was raised first"
    row = embedded_aws.rows(app.table)["shardId-000000000000"]
    reported = f"initialize failed 2 times: RuntimeError: {REASON} ({failed['raised_at']})"
    assert row["haltReason"] == reported
    assert failed["raised_at"].endswith(" in initialize")
    assert app.process.poll() is None
    # Still ours, still renewed: a poison shard does not wander through the fleet.
    before = int(row["leaseCounter"])
    app.until(
        lambda: int(embedded_aws.rows(app.table)["shardId-000000000000"]["leaseCounter"]) > before
    )
    assert app.stop(signal.SIGTERM) == 0


def put_everywhere(aws, stream):
    for shard in aws.kinesis.list_shards(StreamName=stream)["Shards"]:
        aws.kinesis.put_record(
            StreamName=stream,
            PartitionKey="any",
            Data=b"x",
            ExplicitHashKey=shard["HashKeyRange"]["StartingHashKey"],
        )


def test_corrupt_rows_are_reported_once_left_alone_and_stop_nobody(embedded_aws, application):
    stream = embedded_aws.stream(shards=2)
    app = application(stream)
    plant(embedded_aws, app.table, CORRUPT)
    plant(embedded_aws, app.table, {"a foreign row": {**SOUND, "entityType": {"S": "METRICS"}}})
    plant(embedded_aws, app.table, {"shardId-000000000001": SOUND})
    before = raw_rows(embedded_aws, app.table)

    app.start()
    put_everywhere(embedded_aws, stream)
    app.until(lambda: app.of("printed"))
    healthy = "shardId-000000000001"
    # Two renewals and a few more scans, all over the same broken rows.
    until(lambda: int(embedded_aws.rows(app.table)[healthy]["leaseCounter"]) > 6)

    assert app.process.poll() is None
    (reported,) = app.of("rows_broken")
    assert reported["what"] == len(CORRUPT)
    assert "a number of 200 digits" in reported["keys"]
    assert "shardId-000000000000" in reported["keys"]
    assert {line["shard"] for line in app.of("lease_claimed")} == {healthy}
    shown = app.cli("leases", "--config", str(app.config))
    assert shown.returncode == 0, shown.stderr
    assert app.stop() == 0
    after = raw_rows(embedded_aws, app.table)
    assert {key: after[key] for key in before if key != healthy} == {
        key: row for key, row in before.items() if key != healthy
    }


def plant(aws, table, rows):
    if table not in aws.dynamodb.list_tables()["TableNames"]:
        aws.dynamodb.create_table(
            TableName=table,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        )
    for key, row in rows.items():
        aws.dynamodb.put_item(TableName=table, Item={"leaseKey": {"S": key}, **row})


def raw_rows(aws, table):
    items = aws.dynamodb.scan(TableName=table, ConsistentRead=True)["Items"]
    return {item["leaseKey"]["S"]: item for item in items}
