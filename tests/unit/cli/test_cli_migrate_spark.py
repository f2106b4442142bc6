"""`kclrun migrate spark`: a checkpoint of Spark's, written to a real lease table."""

import json
import threading
import time
from pathlib import Path

import msgspec
import pytest

from kclrun.aws.operations import Operation
from kclrun.aws.put_records import batches, send_all
from kclrun.cli.migrate.spark import _perform
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.cli.startup import open_world
from kclrun.config.load import settings_of
from kclrun.errors import NotFound
from kclrun.local.filling import wait_until_active
from kclrun.model.lease import OFFERED, Lease, LeaseKey, OwnerId
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.protocol.writes import Applied, ConditionFailed, CreateLease, Renew, Take
from kclrun.spark.export import Move
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.positions import SHARD_END, Position, after, at_timestamp, before

pytestmark = pytest.mark.seconds
KEY, SECOND = LeaseKey("shardId-000000000000"), LeaseKey("shardId-000000000001")
OWNER = OwnerId("kclrun:az1:host:abc")


@pytest.fixture
def aws(config):
    settings = settings_of(config.read_text(), environment={}, now=WallTime(time.time()))
    made = Aws(settings)
    create = Operation("kinesis", "CreateStream", is_write=True)
    request = {"StreamName": settings.stream, "ShardCount": 2}
    made.kinesis_client.call(create, msgspec.json.encode(request))
    wait_until_active(made.stream)
    return made


@pytest.fixture
def stopped(aws, tmp_path):
    """Writes what Spark would: so many batches, the last one ending at these positions."""

    def write(begun: int = 0, **positions: Position) -> str:
        summary = aws.stream.summary()
        offset = Offset(
            streams={"": StreamIs(summary.arn, round(summary.created_at * 1000))}, shards=positions
        )
        folder = tmp_path / "checkpoint"
        last = 7
        for name, batches_of in (("offsets", last + begun), ("commits", last)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            text = f"v1\n{{}}\n{json.dumps(encode_offset(offset))}"
            (folder / name / str(batches_of)).write_text(text)
            (folder / name / str(last)).write_text(text)
        return str(folder)

    return write


def put(aws: Aws, count: int) -> list[str]:
    """Records into the first shard; their sequence numbers."""
    entries = [PutEntry(b"%d" % n, f"k{n}", explicit_hash_key="0") for n in range(count)]
    for batch in batches(entries):
        send_all(aws.kinesis_client, aws.settings.stream, batch)
    token = aws.reader.iterator(KEY, StartPoint(IteratorType.TRIM_HORIZON))
    return [each.sequence_number for each in aws.reader.fetch(token, 1000).records]


def rows(aws: Aws) -> dict[str, Lease]:
    return {lease.key: lease for page in aws.table.scan() for lease in page.leases}


def imported(config: Path, checkpoint: str, *more: str) -> int:
    return run_program(["migrate", "spark", checkpoint, "--config", str(config), *more])


def test_without_yes_nothing_is_made_and_with_it_the_table_and_its_rows_are(
    config, aws, stopped, capsys
):
    _, second, third = put(aws, 3)
    checkpoint = stopped(**{KEY: before(third), SECOND: at_timestamp(1_500)})

    assert imported(config, checkpoint) == 0
    shown = capsys.readouterr().out
    assert "Batch 7 is the last one committed" in shown
    assert f"Table {aws.settings.table} will be made" in shown
    assert "Nothing was changed" in shown
    with pytest.raises(NotFound):
        rows(aws)

    assert imported(config, checkpoint, "--yes") == 0

    assert "2 rows written" in capsys.readouterr().out
    written = rows(aws)
    assert written[KEY].checkpoint == ExtendedSequenceNumber(second)
    assert written[SECOND].latest_pinned_at == 1.5
    assert written[KEY].owner is None
    shards = {shard.shard_id: shard for shard in aws.stream.list_shards()}
    assert written[KEY].hash_range == shards[KEY].hash_range
    # What is written twice is the same.
    assert imported(config, checkpoint, "--yes") == 0
    assert "Nothing to do" in capsys.readouterr().out
    assert rows(aws) == written


def test_rows_go_forward_and_never_back(config, aws, stopped, capsys):
    _, second, _ = put(aws, 3)
    table = open_world(aws.settings).table
    for key, checkpoint in ((KEY, TRIM_HORIZON), (SECOND, ExtendedSequenceNumber("9" * 60))):
        lease = Lease(key=key, checkpoint=checkpoint, owner=OFFERED, counter=5)
        assert isinstance(table.write(CreateLease(lease)), Applied)

    assert imported(config, stopped(**{KEY: after(second), SECOND: after("1", 0)}), "--yes") == 0

    written = rows(aws)
    assert written[KEY].checkpoint == ExtendedSequenceNumber(second)
    assert (written[KEY].owner, written[KEY].counter) == (None, 7)
    assert written[SECOND].checkpoint == ExtendedSequenceNumber("9" * 60)
    assert written[SECOND].counter == 5
    assert "is further than the query" in capsys.readouterr().out


def test_an_ended_shard_gets_its_end_and_its_children_get_rows(config, aws, stopped):
    split = Operation("kinesis", "SplitShard", is_write=True)
    request = {
        "StreamName": aws.settings.stream,
        "ShardToSplit": KEY,
        "NewStartingHashKey": str(2**126),
    }
    aws.kinesis_client.call(split, msgspec.json.encode(request))
    wait_until_active(aws.stream)
    children = {"shardId-000000000002", "shardId-000000000003"}
    table = open_world(aws.settings).table
    begun = Lease(key=KEY, checkpoint=TRIM_HORIZON, owner=OFFERED, counter=5)
    assert isinstance(table.write(CreateLease(begun)), Applied)

    assert imported(config, stopped(**{KEY: SHARD_END, SECOND: at_timestamp(1)}), "--yes") == 0

    written = rows(aws)
    assert written[KEY].is_ended
    assert written[KEY].children == children
    assert {written[child].checkpoint for child in children} == {TRIM_HORIZON}
    assert {written[child].parents for child in children} == {frozenset({KEY})}


def test_while_somebody_renews_nothing_is_written(config, aws, stopped, capsys):
    put(aws, 1)
    table = open_world(aws.settings).table
    lease = Lease(key=KEY, checkpoint=TRIM_HORIZON, owner=OWNER, counter=5)
    assert isinstance(table.write(CreateLease(lease)), Applied)
    is_over = threading.Event()

    def renew() -> None:
        counter = 5
        while not is_over.wait(0.1):
            assert isinstance(table.write(Renew(KEY, OWNER, counter)), Applied)
            counter += 1

    owner = threading.Thread(target=renew)
    owner.start()
    try:
        checkpoint = stopped(**{KEY: at_timestamp(1), SECOND: at_timestamp(1)})
        assert imported(config, checkpoint, "--yes") == 78
    finally:
        is_over.set()
        owner.join()

    assert f"are being renewed, by {OWNER}" in capsys.readouterr().err
    assert rows(aws).keys() == {KEY}


def test_a_row_whose_owner_is_gone_is_moved(config, aws, stopped):
    [first] = put(aws, 1)
    table = open_world(aws.settings).table
    lease = Lease(key=KEY, checkpoint=TRIM_HORIZON, owner=OWNER, counter=5)
    assert isinstance(table.write(CreateLease(lease)), Applied)

    assert imported(config, stopped(**{KEY: after(first), SECOND: at_timestamp(1)}), "--yes") == 0

    assert rows(aws)[KEY].checkpoint == ExtendedSequenceNumber(first)
    assert rows(aws)[KEY].owner is None


def test_a_row_that_changes_under_the_import_is_left_to_who_changed_it(aws):
    table = open_world(aws.settings).table
    lease = Lease(key=KEY, checkpoint=TRIM_HORIZON, counter=5)
    assert isinstance(table.write(CreateLease(lease)), Applied)
    taken = table.write(Take(KEY, OWNER, None, 5, 10.0, "TRIM_HORIZON"))
    assert isinstance(taken, Applied)

    step = Move(lease, ExtendedSequenceNumber("7"))
    outcome = _perform(table, aws.settings, OwnerId("kclrun::import:x"), step)

    assert isinstance(outcome, ConditionFailed)
    assert rows(aws)[KEY] == taken.row


def test_a_batch_that_was_begun_is_reported_and_another_stream_is_refused(
    config, aws, stopped, capsys
):
    checkpoint = stopped(begun=1, **{KEY: at_timestamp(1), SECOND: at_timestamp(1)})
    assert imported(config, checkpoint) == 0
    assert "was begun and not committed" in capsys.readouterr().out

    offsets = Path(checkpoint) / "offsets" / "7"
    offsets.write_text(offsets.read_text().replace(aws.settings.stream, "another"))
    assert imported(config, checkpoint) == 78
    assert "the checkpoint is not of" in capsys.readouterr().err


def test_a_file_of_the_spark_engine_will_do(config, aws, stopped, capsys):
    config.write_text(
        f"{config.read_text()}engine: spark\nstart: {{leases: shop}}\nspark: {{checkpoint: /x}}\n"
    )

    assert imported(config, stopped(**{KEY: at_timestamp(1), SECOND: at_timestamp(1)})) == 0

    assert "new, at LATEST" in capsys.readouterr().out
