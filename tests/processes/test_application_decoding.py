"""`decode: glue` and `output.schema`, whole: a registry that is away, and records at fault."""

import json
import uuid

import msgspec
import pytest

from kclrun.outputs.dead_letters import LetterFolder
from tests.processes.bad_input_rig.denying import DenyingEndpoint
from tests.processes.bad_input_rig.program import Project
from tests.processes.ledger_rig.aws import MOTO, Aws
from tests.support.clients import ONCE, client_of

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

ORDERS = """
from kclrun import RecordProcessor

class Orders(RecordProcessor):
    def initialize(self, context):
        self.emit = context.emit

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.emit(record.value)
"""


@pytest.fixture(scope="module")
def embedded_aws():
    """One with Glue."""
    aws = Aws(dynamodb=MOTO)
    yield aws
    aws.close()


@pytest.mark.slow
def test_a_registry_that_is_away_delays_and_records_at_fault_are_letters(
    embedded_aws, application, tmp_path
):
    url = embedded_aws.embedded.dynamodb_endpoint
    glue = client_of("glue", url, config=ONCE)
    version = glue.create_schema(
        SchemaName="orders", DataFormat="JSON", Compatibility="NONE", SchemaDefinition="{}"
    )["SchemaVersionId"]
    glue.close()
    header = b"\x03\x00" + uuid.UUID(version).bytes
    rows = [{"n": 1}, {"n": 2, "m": "x"}, {"n": "4111"}, {"n": 4}]
    stream = embedded_aws.stream(shards=1)
    for data in [*(header + json.dumps(row).encode() for row in rows), b"4111", header + b"7"]:
        embedded_aws.kinesis.put_record(StreamName=stream, PartitionKey="k", Data=data)
    away = DenyingEndpoint(url)
    away.throttle("GetSchemaVersion")
    Project(tmp_path).code(ORDERS)
    out, letters = tmp_path / "out", LetterFolder(tmp_path / "letters")
    app = application(
        stream,
        processor="mine:Orders",
        path=str(tmp_path),
        decode="glue",
        output={"path": str(out), "schema": "n long NOT NULL, m string"},
        on_error={
            "retries": 0,
            "then": "dead-letter",
            "dead_letter": {"path": str(tmp_path / "letters")},
        },
        aws={"endpoints": {"glue": away.url}},
    ).start()
    try:
        app.until(lambda: app.of("retry_later_began"))
        assert not app.of("record_dead_lettered")
        away.refused.clear()
        app.until(lambda: len([*letters.kept()]) == 3)
        assert app.stop() == 0
        misfit, garbled, number = [kept.letter for kept in letters.kept()]
        looks = away.calls.count("GetSchemaVersion")
        repaired = ("--set", "output.schema=n string")
        redriven = app.cli(
            "dead-letters", "redrive", "--config", str(app.config), "--yes", *repaired
        )
    finally:
        away.close()

    (raised,), (waited,) = app.of("retry_later_began"), app.of("retry_later_ended")
    assert waited["attempts"] >= 1
    assert "RetryLater: the Glue Schema Registry cannot be asked: " in raised["error"]
    (file,) = out.glob("shardId-*.jsonl")
    written = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    assert written == [{"n": 1, "m": None}, {"n": 2, "m": "x"}, {"n": 4, "m": None}]
    of_row = "RowMismatch: the row does not fit output.schema:"
    assert misfit.error == f"{of_row} column n: expected long, got str"
    assert garbled.data == b"4111"
    assert garbled.error == (
        f"UndecodableRecord: the record at {garbled.sequence_number} cannot be decoded:"
        " no header of the Glue Schema Registry"
    )
    assert garbled.raised_at.endswith("in process_records")
    assert number.error.startswith(f"{of_row} a row is a mapping")
    log = app.log_path.read_text()
    assert b"4111" not in log.encode()
    assert looks <= 2 * 4, "one look by each attempt, and one version in all"

    assert redriven.returncode == 65, redriven.stderr
    assert [kept.letter for kept in letters.kept()] == [garbled, number]
    (file,) = out.glob("redriven-*.jsonl")
    assert file.read_text() == '{"n":"4111"}\n'
