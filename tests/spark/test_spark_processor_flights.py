"""`DelayByCarrier` on Spark gives what it gives in the test kit.

All flights of the year on Spark: `tests/packaging/test_spark_fresh_install.py`.
"""

import itertools
import json
import threading
from pathlib import Path

import pytest

from kclrun.config.schema import Settings
from kclrun.local.filling import Filler, FillOrder, Reshard
from kclrun.model.wire import WireEndpoint
from kclrun.samples import flights
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.processors.source import processor_stream
from kclrun.testing import run_processor
from tests.patience import TEST_S
from tests.spark.source_rig import REGION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RESHARDS = (Reshard(0.3, split=0), Reshard(0.6, merge=1))


@pytest.fixture
def merged_on_spark(spark, stream_of, tmp_path):
    """Runs the processor over records that are put, and resharded, while the query runs; then once
    more until everything is read. Returns: the merged rows, and the shards they came from."""

    def run(records, aggregate):
        stream = stream_of(4)
        settings = Settings(
            application="flights",
            stream=stream.name,
            processor="kclrun.samples.flights:DelayByCarrier",
            options={"window": "15m"},
        )
        source = {
            **stream.options,
            "startingOffsets": "earliest",
            "pollInterval": "500ms",
            "shardListInterval": "1s",
        }
        endpoint = WireEndpoint(stream.endpoint, REGION, REGION)
        order = FillOrder(endpoint, stream.name, "", (), aggregate, reshard=RESHARDS)
        filler = threading.Thread(target=Filler(order).fill, args=(lambda: iter(records),))

        def start(trigger):
            rows = processor_stream(
                spark, settings, read_source_options(source, Use.STREAM), [ROOT]
            )
            writer = rows.writeStream.format("parquet").trigger(**trigger)
            writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
            return writer.start(str(tmp_path / "rows"))

        query = start({"processingTime": "500 milliseconds"})
        filler.start()
        filler.join()
        query.stop()  # in the middle of a batch, as often as not: it is read again
        query = start({"availableNow": True})
        assert query.awaitTermination(TEST_S)
        parquet = spark.read.parquet(str(tmp_path / "rows"))
        merged = flights.merge(json.loads(row["row"]) for row in parquet.select("row").collect())
        shards = {row["shardId"] for row in parquet.select("shardId").distinct().collect()}
        return merged, shards

    return run


def test_some_flights_give_the_same_on_spark_as_in_the_test_kit(merged_on_spark):
    records = list(itertools.islice(flights.demo_records(), 6_000))
    expected = flights.merge(
        run_processor(flights.DelayByCarrier, [data.decode() for _, data in records]).rows
    )

    merged, shards = merged_on_spark(records, aggregate=0.3)

    assert merged == expected
    assert len(shards) == 7  # four, two of a split, one of a merge
