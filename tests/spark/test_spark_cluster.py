"""On a cluster, executors have what was shipped: the wheel, to Pythons that have no kclrun.

The wheel is copied to a name that ends in .zip: Spark puts nothing else on the path of workers.
"""

import json
import os
import shutil
import time

import pyarrow.parquet as pq
import pyspark
import pytest

from kclrun.spark.engine.java import provide_java
from tests.packaging.wheel_rig import Environment, build_wheel, plain_environment
from tests.patience import HUNG_S, TEST_S
from tests.spark.sink_rig import Kinesis
from tests.spark.source_rig import REGION, credentials_in, in_order_of_each_key
from tests.support.programs import end_family, run_to_end, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * TEST_S), pytest.mark.alone]

MASTER = "local-cluster[2,1,1024]"
# Executors start twice in a job.
RUN_MAX_S = 2 * HUNG_S

# Shipped too. What it returns says where a task has its code from.
PIPELINE = """
import os, sys
import pyarrow as pa
from kclrun import RecordProcessor
from pyspark.sql import functions as F

def whereabouts():
    import kclrun.spark.executor.reading
    files = (kclrun.spark.executor.reading.__file__, __file__, sys.executable)
    return dict(zip(("kclrun", "module", "python"), map(os.path.abspath, files)))

def located(records):
    def add(batches):
        for batch in batches:
            columns = {name: [text] * len(batch) for name, text in whereabouts().items()}
            yield pa.RecordBatch.from_pydict({**batch.to_pydict(), **columns})
    schema = "partitionKey string, data string, kclrun string, module string, python string"
    text = F.col("data").cast("string").alias("data")
    return records.select("partitionKey", text).mapInArrow(add, schema)

class Located(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            row = {"partitionKey": record.partition_key, "data": record.data.decode()}
            self.context.emit(row | whereabouts())
"""

# A job for spark-submit. kclrun is not installed on this side either: so it is registered.
JOB = """
import sys, time
from pathlib import Path
from pyspark.sql import SparkSession
import kclrun.spark
import shipped_pipeline

stream, copy, endpoint, region, out = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
kclrun.spark.register(spark)
at = {"endpointUrl": endpoint, "region": region}
records = spark.readStream.format("kclrun").options(**at).options(
    streamName=stream, startingOffsets="earliest", pollInterval="200ms", shardsPerTask=1
).load()

def start(writer, name, **trigger):
    writer = writer.option("checkpointLocation", f"{out}/{name}-checkpoint")
    return writer.trigger(**trigger).start()

rows = shipped_pipeline.located(records).writeStream.format("parquet")
rows = rows.option("path", f"{out}/rows")
query = start(rows, "rows", processingTime="200 milliseconds")
deadline = time.monotonic() + 600
while not Path(out, "all-is-put").exists():
    assert time.monotonic() < deadline
    query.awaitTermination(0.2)
query.stop()
start(rows, "rows", availableNow=True).awaitTermination()

copies = kclrun.spark.write(
    records, copy, key="partitionKey", data="data", keys_are_together=True, options=at
)
start(copies, "copy", availableNow=True).awaitTermination()
spark.stop()
"""


class Cluster:
    """What is where: the wheel as it is shipped, a Python for executors, one for a driver."""

    def __init__(self, folder):
        wheel = build_wheel(folder)
        self.shipped = folder / "kclrun.zip"
        shutil.copy(wheel, self.shipped)
        self.pipeline = folder / "shipped_pipeline.py"
        self.pipeline.write_text(PIPELINE)
        self.bare = Environment(folder / "bare")
        self.installed = Environment(folder / "installed")
        self.installed.install(wheel)
        shutil.copy(self.pipeline, self.installed.packages)

    def environment(self, side):
        """The variables of a driver that runs in this one of the two Pythons."""
        java = provide_java(os.environ, pyspark.__version__)
        return (
            plain_environment()
            | credentials_in(self.shipped.parent)
            | {
                "JAVA_HOME": str(java),
                "SPARK_HOME": str(side.spark_home),
            }
        )

    def assert_executors_ran_what_was_shipped(self, rows, driver):
        work = driver.spark_home / "work"
        for row in rows:
            of_kclrun, of_user = row["kclrun"], row["module"]
            application, executor, *inside = of_kclrun.removeprefix(f"{work}/").split("/")
            folder = f"{work}/{application}/{executor}"
            assert inside == ["kclrun.zip", "kclrun", "spark", "executor", "reading.py"]
            assert of_user == f"{folder}/{self.pipeline.name}"
            assert row["python"] == str(self.bare.python)


class Running:
    """A driver process. What it says is shown where it fails, but for Spark's own progress."""

    def __init__(self, command, environment, folder):
        self._log = folder / "driver.log"
        self._process = started(command, self._log, cwd=folder, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end_family(self._process)

    def until(self, condition):
        deadline = time.monotonic() + RUN_MAX_S
        while not condition():
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.2)

    def until_done(self):
        assert self._process.wait(RUN_MAX_S) == 0, self._said()

    def _said(self):
        lines = self._log.read_text(errors="replace").splitlines()
        reported = [line[:500] for line in lines if " INFO " not in line and " WARN " not in line]
        return "\n".join(reported[:150])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    return Cluster(tmp_path_factory.mktemp("cluster"))


def parquet_rows(folder):
    """Of a folder that Spark wrote, when it is done."""
    return [
        row for file in folder.glob("*.parquet") for row in pq.ParquetFile(file).read().to_pylist()
    ]


def pairs(rows):
    return sorted((row["partitionKey"], row["data"].encode()) for row in rows)


def reshard(stream):
    stream.split(stream.open_shards()[0])
    stream.put(300)
    stream.merge(*stream.open_shards()[1:3])
    stream.put(300)


def test_the_python_of_the_executors_has_the_dependencies_and_not_kclrun(cluster, tmp_path):
    said = run_to_end(
        [cluster.bare.python, "-c", "import boto3, msgspec, pyarrow; import kclrun"],
        cwd=tmp_path,
        env=plain_environment(),
    )

    assert said.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'kclrun'"


def test_spark_submit_ships_the_wheel_to_a_source_and_a_sink(
    cluster, stream_of, embedded, tmp_path
):
    stream, copy = stream_of(3), stream_of(2)
    stream.put(300)
    out = tmp_path / "out"
    out.mkdir()
    job = tmp_path / "job.py"
    job.write_text(JOB)
    home = cluster.bare.spark_home
    command = [
        home / "bin" / "spark-submit",
        *("--master", MASTER, "--name", "shipped"),
        *("--py-files", f"{cluster.shipped},{cluster.pipeline}"),
        *("--conf", f"spark.pyspark.python={cluster.bare.python}"),
        *("--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=2"),
        *(job, stream.name, copy.name, embedded.kinesis_endpoint, REGION, out),
    ]
    with Running(command, cluster.environment(cluster.bare), tmp_path) as running:
        running.until((out / "rows" / "_spark_metadata" / "0").exists)
        reshard(stream)
        (out / "all-is-put").touch()
        running.until_done()

    rows = parquet_rows(out / "rows")
    assert pairs(rows) == sorted(stream.put_records)
    cluster.assert_executors_ran_what_was_shipped(rows, cluster.bare)
    stored = Kinesis(embedded.kinesis_endpoint).stored(copy.name).values()
    assert in_order_of_each_key(pair for shard in stored for pair in shard) == (
        in_order_of_each_key(stream.put_records)
    )


CONFIGURATION = """
application: located
stream: {stream}
engine: spark
processor: shipped_pipeline:Located
until: caught-up
output: {{path: {out}, format: parquet, schema: "{schema}"}}
spark:
  master: {master}
  checkpoint: {checkpoint}
  conf:
    spark.submit.pyFiles: {shipped},{pipeline}
    spark.pyspark.python: {python}
    spark.ui.enabled: false
aws: {{endpoint: "{endpoint}", region: {region}}}
"""
EMITTED = "partitionKey string, data string, kclrun string, module string, python string"


def test_a_processor_runs_on_executors_that_were_given_the_wheel(
    cluster, stream_of, embedded, tmp_path
):
    stream = stream_of(3)
    stream.put(300)
    reshard(stream)
    app = tmp_path / "app.yaml"
    app.write_text(
        CONFIGURATION.format(
            stream=stream.name,
            out=tmp_path / "out",
            schema=EMITTED,
            master=MASTER,
            checkpoint=tmp_path / "checkpoint",
            shipped=cluster.shipped,
            pipeline=cluster.pipeline,
            python=cluster.bare.python,
            endpoint=embedded.kinesis_endpoint,
            region=REGION,
        )
    )
    app.chmod(0o600)
    driver = cluster.installed
    report = tmp_path / "report.json"
    command = [driver.python, "-m", "kclrun", "--config", app, "--report", report]
    with Running(command, cluster.environment(driver), tmp_path) as running:
        running.until_done()

    rows = parquet_rows(tmp_path / "out")
    assert pairs(rows) == sorted(stream.put_records)
    cluster.assert_executors_ran_what_was_shipped(rows, driver)
    reported = json.loads(report.read_text())
    assert reported["totals"]["records"] == len(stream.put_records)
    assert reported["exit_reason"] == "caught up"
