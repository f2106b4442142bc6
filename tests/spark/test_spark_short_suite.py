"""The least that must hold on every PySpark kclrun runs on; CI runs this file on 4.0, too."""

import pytest
from pyspark.errors import AnalysisException

from kclrun.errors import SettingsError
from kclrun.spark import register
from tests.patience import HUNG_S
from tests.spark.source_rig import as_put, in_order_of_each_key, until

# PySpark 4.0 leaves the sockets of collect() and foreachBatch to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.mark.slow
def test_a_stream_is_read_over_a_reshard_and_a_restart(collected, stream):
    stream.put(100)
    run = collected(stream, shardListInterval="1s")

    query = run.start()
    until(lambda: len(run.rows) >= 100, "the parent", query)
    stream.split(stream.open_shards()[0])
    stream.put(100)
    until(lambda: len(run.rows) >= 200, "its children", query)
    query.stop()
    stream.put(50)
    run.run_until(250)

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)


@pytest.mark.slow
def test_a_first_batch_that_failed_is_read_again_as_it_was(collected, stream):
    stream.put(30)
    run = collected(stream)

    def fail(number):
        raise RuntimeError("a sink that is down")

    run.before_commit = fail
    query = run.start()
    until(lambda: query.exception() is not None, "it failed")
    run.before_commit = lambda number: None
    stream.put(30)
    run.run_until(60)

    first, again = ([tuple(row) for row in rows] for number, rows in run.batches if number == 0)
    assert first == again
    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)


@pytest.mark.slow
def test_a_range_is_read_as_a_batch(spark, stream_of):
    stream = stream_of(2)
    stream.put(40)

    rows = spark.read.format("kclrun").options(**stream.options).load()

    assert rows.count() == 40
    assert as_put(rows.sort("sequenceNumber").collect()).keys() == {
        key for key, _ in stream.put_records
    }


@pytest.mark.slow
def test_options_that_are_wrong_are_reported_at_load(spark, stream):
    with pytest.raises(AnalysisException, match="did you mean startingOffsets"):
        spark.readStream.format("kclrun").options(**stream.options, startingOfsets="x").load()


def test_another_name_may_be_given_to_the_format(spark, stream):
    stream.put(3)
    register(spark, alias="kinesis")
    register(spark, alias="kinesis")

    assert spark.read.format("kinesis").options(**stream.options).load().count() == 3
    with pytest.raises(SettingsError, match="is not a name for a format"):
        register(spark, alias="two words")


def test_available_now_reads_all_there_is_in_every_run(collected, stream):
    # PySpark 4.0 and 4.1 ask such a source once a run; limits and generations must not cut it.
    run = collected(stream, maxRecordsPerTrigger="100")
    for _ in range(2):
        stream.put(300)
        stream.split(stream.open_shards()[0])
        stream.put(100)
        query = run.start(availableNow=True)
        assert query.awaitTermination(HUNG_S), "the query ends by itself"
        assert query.exception() is None

    assert as_put(run.rows) == in_order_of_each_key(stream.put_records)
