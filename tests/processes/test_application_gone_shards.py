"""Shards that were trimmed, and a stream that was made again, under a real application."""

from unittest import mock

import pytest

from kclrun.local import server
from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws

FAILOVER = {"failover": "2s"}


@pytest.fixture(scope="module")
def forgetful_aws():
    """Its Kinesis trims a shard a second after it was closed."""
    with mock.patch.object(server, "_KINESIS", "tests.processes.fleet_rig.forgetful_kinesis"):
        aws = Aws()
    yield aws
    aws.close()


@pytest.fixture
def start(tmp_path, forgetful_aws):
    """Starts an application of a stream; `again=` one that was stopped."""
    made = []

    def begin(stream, again=None):
        app = again or Application(tmp_path, forgetful_aws, stream, leases=FAILOVER)
        if again is None:
            made.append(app)
        return app.start()

    yield begin
    for app in made:
        app.close()


def shards_of(aws, stream):
    return {shard["ShardId"] for shard in aws.kinesis.list_shards(StreamName=stream)["Shards"]}


def put(aws, stream, hash_key):
    aws.kinesis.put_record(
        StreamName=stream, Data=b"{}", PartitionKey="k", ExplicitHashKey=str(hash_key)
    )


@pytest.mark.slow
def test_children_are_read_though_their_parent_was_trimmed_while_the_fleet_was_down(
    forgetful_aws, start
):
    stream = forgetful_aws.stream(shards=1)
    (parent,) = shards_of(forgetful_aws, stream)
    app = start(stream)
    app.until(lambda: len(app.of("lease_claimed")) >= 1)
    assert app.stop() == 0
    forgetful_aws.kinesis.split_shard(
        StreamName=stream, ShardToSplit=parent, NewStartingHashKey=str(2**127)
    )
    children = until(lambda: shards_of(forgetful_aws, stream) - {parent})
    until(lambda: parent not in shards_of(forgetful_aws, stream))

    start(stream, again=app)
    app.until(lambda: {each["shard"] for each in app.of("lease_claimed")} >= children)

    (lost,) = app.of("records_expired")
    assert (lost["level"], lost["shard"]) == ("error", parent)
    assert "its children are read" in lost["detail"]
    assert parent in {each["shard"] for each in app.of("shard_ended")}
    assert app.stop() == 0


def make_again(aws, stream):
    aws.kinesis.delete_stream(StreamName=stream)
    aws.kinesis.get_waiter("stream_not_exists").wait(
        StreamName=stream, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
    )
    aws.kinesis.create_stream(StreamName=stream, ShardCount=2)


@pytest.mark.slow
def test_a_stream_that_is_made_again_stops_the_fleet_and_refuses_the_next_start(
    forgetful_aws, start
):
    stream = forgetful_aws.stream(shards=2)
    app = start(stream)
    app.until(lambda: len(app.of("lease_claimed")) >= 2)

    make_again(forgetful_aws, stream)

    assert app.process.wait(HUNG_S) == 78
    (refused,) = app.of("stream_recreated")
    assert "deleted and made again under its name" in refused["detail"]
    assert (
        app.of("manager_stopped")[-1]["reason"]
        == "the rows of the lease table are of another stream"
    )
    assert all("leaseOwner" not in row for row in forgetful_aws.rows(app.table).values())

    start(stream, again=app)
    assert app.process.wait(HUNG_S) == 78
    assert "To go on: stop every manager" in app.last_words()
    assert len(app.of("lease_claimed")) == 2
