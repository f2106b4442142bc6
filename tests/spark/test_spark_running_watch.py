"""A query is ended between two batches, and its progress is taken whole, by real queries."""

import signal
import time

import pytest

from kclrun.errors import ProcessorError
from kclrun.lifecycle.stopping import StopPlan
from kclrun.model.time import Instant
from kclrun.spark.running.runtime import Ending, Watch
from tests.patience import HUNG_S

pytestmark = pytest.mark.slow


class Seen:
    """A watch with a grace, and what it was given."""

    def __init__(self, grace_s=HUNG_S):
        self.stop = StopPlan(grace_s)
        self.progress = []
        self.watch = Watch(self.stop, take_progress=self.progress.append, looked=lambda: None)

    @property
    def batches(self):
        return [each["batchId"] for each in self.progress if "addBatch" in each["durationMs"]]


def slow_query(spark, folder, seconds, **trigger):
    """Batches of one record that take `seconds` each; a file says when one has begun."""
    begun = folder / "begun"

    def pass_on(batches):
        for batch in batches:
            begun.touch()
            time.sleep(seconds)
            yield batch

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    slow = rows.select("value").repartition(1).mapInArrow(pass_on, "value long")
    writer = slow.writeStream.format("noop").option("checkpointLocation", str(folder / "c"))
    return writer.trigger(**trigger).start() if trigger else writer.start()


def entries(folder, name):
    return {each.name for each in (folder / "c" / name).glob("[0-9]*")}


@pytest.mark.parametrize("trigger", [{}, {"processingTime": "1 hour"}], ids=["asap", "hourly"])
def test_a_stop_waits_for_the_running_batch_and_for_nothing_else(spark, tmp_path, trigger):
    query = slow_query(spark, tmp_path, 2, **trigger)
    seen = Seen()

    def press():
        if (tmp_path / "begun").exists() and not seen.stop.is_wanted:
            seen.stop.press(signal.SIGTERM, Instant(time.monotonic()))
        return False

    ending = seen.watch.until_ended(query, press)

    assert ending is Ending.AS_ASKED
    assert not query.isActive
    assert entries(tmp_path, "commits") == entries(tmp_path, "offsets")
    assert seen.batches == sorted(int(name) for name in entries(tmp_path, "commits"))


def test_the_end_of_the_grace_cuts_the_batch_short(spark, tmp_path):
    query = slow_query(spark, tmp_path, HUNG_S)
    seen = Seen(grace_s=0.5)

    def press():
        if (tmp_path / "begun").exists() and not seen.stop.is_wanted:
            seen.stop.press(signal.SIGTERM, Instant(time.monotonic()))
        return False

    assert seen.watch.until_ended(query, press) is Ending.CUT_SHORT
    assert len(entries(tmp_path, "offsets") - entries(tmp_path, "commits")) == 1


def test_no_batch_is_missed_and_none_is_taken_twice(spark, tmp_path):
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = rows.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c"))
    seen = Seen()

    ending = seen.watch.until_ended(writer.start(), lambda: len(seen.batches) >= 5)

    assert ending is Ending.AS_ASKED
    assert seen.batches == list(range(len(entries(tmp_path, "commits"))))


def test_a_query_that_fails_is_an_error_of_ours(spark, tmp_path):
    def fail(_batches):
        raise ValueError("odd")

    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    writer = rows.mapInArrow(fail, "value long").writeStream.format("noop")
    query = writer.option("checkpointLocation", str(tmp_path / "c")).start()

    with pytest.raises(ProcessorError, match="ValueError: odd"):
        Seen().watch.until_ended(query, lambda: False)
