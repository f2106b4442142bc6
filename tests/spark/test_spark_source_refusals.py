"""What cannot work is told before a row is read, in words that say what to do."""

import json
import socket
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException

from kclrun.spark.offsets import VERSION
from tests.patience import HUNG_S
from tests.spark.source_rig import ACCESS_KEY


def load(spark, options, how="readStream"):
    return getattr(spark, how).format("kclrun").options(**options).load()


def refused(spark, options):
    with pytest.raises(AnalysisException) as caught:
        load(spark, options)
    return str(caught.value)


def ended(query):
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(HUNG_S)
    return str(caught.value)


def closed_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_unknown_options_are_reported_at_load_all_together_with_a_suggestion(spark, stream):
    reported = refused(
        spark,
        {**stream.options, "startingOfsets": "latest", "pollInterval": "1ms", "awsSecretKey": "x9"},
    )

    assert "did you mean startingOffsets?" in reported
    assert "pollInterval: expected 200ms to 1m" in reported
    assert "awssecretkey: credentials are not options" in reported
    assert "x9" not in reported


def test_a_missing_stream_is_reported_at_load(spark, stream):
    reported = refused(spark, {**stream.options, "streamName": "no-such"})

    assert "there is no stream no-such" in reported
    assert "Check streamName, region and endpointUrl" in reported


@pytest.mark.slow  # it tries for ten seconds
def test_an_endpoint_that_nobody_answers_is_reported_at_load(spark):
    port = closed_port()
    reported = refused(
        spark,
        {
            "streamName": "flights",
            "region": "us-east-1",
            "endpointUrl": f"http://127.0.0.1:{port}",
        },
    )

    assert f"the stream flights cannot be reached at http://127.0.0.1:{port}" in reported


@pytest.mark.long
def test_a_checkpoint_of_another_stream_is_refused(collected, stream, stream_of):
    stream.put(5)
    run = collected(stream)
    run.run_until(5)

    run.stream = stream_of(1)
    reported = ended(run.start())

    assert "another stream" in reported
    assert stream.name in reported
    assert len(run.rows) == 5


@pytest.mark.long
def test_a_stream_that_was_created_again_is_refused(collected, stream):
    stream.put(5)
    run = collected(stream)
    run.run_until(5)

    stream.recreate(1)
    stream.put(5)
    reported = ended(run.start())

    assert "was deleted and re-created" in reported
    assert len(run.rows) == 5


@pytest.mark.long
def test_so_it_is_when_a_batch_is_left_to_be_read_again(collected, stream):
    stream.put(5)
    run = collected(stream)

    def fail(number):
        raise RuntimeError("a sink that is down")

    run.before_commit = fail
    assert "a sink that is down" in ended(run.start())
    stream.recreate(1)
    stream.put(5)
    run.batches.clear()
    reported = ended(run.start())

    assert "was deleted and re-created" in reported
    assert run.batches == []


@pytest.mark.long
def test_a_checkpoint_of_a_newer_version_is_refused(collected, stream):
    stream.put(5)
    run = collected(stream)
    run.run_until(5)
    for offsets in (Path(run.checkpoint) / "offsets").glob("[0-9]*"):
        *head, text = offsets.read_text().splitlines()
        offsets.write_text("\n".join([*head, json.dumps({**json.loads(text), "v": VERSION + 1})]))
        offsets.with_name(f".{offsets.name}.crc").unlink(missing_ok=True)

    reported = ended(run.start())

    assert f"the checkpoint is of version {VERSION + 1}, written by a newer kclrun" in reported


def test_columns_of_the_users_own_are_refused(spark, stream):
    with pytest.raises(PySparkException, match="the kclrun source has columns of its own"):
        spark.read.format("kclrun").options(**stream.options).schema("data binary").load().count()


def test_a_stream_has_no_end_and_a_batch_does_not_start_at_latest(collected, spark, stream):
    run = collected(stream, endingOffsets="latest")
    assert "a stream has no end; this is for spark.read" in ended(run.start())

    with pytest.raises(PySparkException, match="a batch read that starts at latest reads nothing"):
        load(spark, {**stream.options, "startingOffsets": "latest"}, "read").count()


def test_keys_in_an_endpoint_are_refused_and_not_repeated(spark):
    reported = refused(
        spark,
        {"streamName": "s", "region": "us-east-1", "endpointUrl": f"https://{ACCESS_KEY}:x@h"},
    )

    assert "endpointUrl: expected an https URL" in reported
    assert ACCESS_KEY not in reported
