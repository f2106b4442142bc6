"""A processor over one stream, run by queries with one checkpoint."""

import json
import textwrap
import uuid

from kclrun.config.schema import FetchSettings, OnErrorSettings, Settings
from kclrun.config.units import Duration
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.processors.source import OBSERVED, processor_stream
from tests.spark.source_rig import until


class ProcessorRig:
    """`code` defines the class `name`."""

    code = name = ""

    def __init__(self, spark, stream, folder):
        self.spark, self.stream, self.folder = spark, stream, folder
        # A module of its own for each test: workers keep what they imported.
        self.module = f"{self.name.lower()}_{uuid.uuid4().hex[:8]}"
        (folder / f"{self.module}.py").write_text(textwrap.dedent(self.code))
        self.queries = []

    def frame(self, *, processor=None, source=None, **settings):
        settings = Settings(
            **{
                "application": f"app-{self.module}",
                "stream": self.stream.name,
                "processor": processor or f"{self.module}:{self.name}",
                "fetch": FetchSettings(batch_max=7),
                "on_error": OnErrorSettings(retries=0, backoff=Duration(0)),
                **settings,
            }
        )
        options = {
            **self.stream.options,
            "pollInterval": "200ms",
            **(source or {"startingOffsets": "earliest"}),
        }
        return processor_stream(
            self.spark, settings, read_source_options(options, Use.STREAM), [self.folder]
        )

    def start(self, *, trigger=None, **application):
        rows = self.frame(**application)
        writer = rows.writeStream.format("parquet").option("path", str(self.folder / "rows"))
        query = (
            writer.option("checkpointLocation", str(self.folder / "checkpoint"))
            .trigger(**(trigger or {"processingTime": "100 milliseconds"}))
            .start()
        )
        self.queries.append(query)
        return query

    def accounts(self, query):
        """What tasks said of their ranges, in the progress of the query."""
        metrics = [progress.observedMetrics.get(OBSERVED) for progress in query.recentProgress]
        return [each for each in metrics if each is not None and each["records"]]

    def until_committed(self, query, records):
        """Until progress tells of so many records, whose batches are committed then."""
        until(
            lambda: sum(each["records"] for each in self.accounts(query)) >= records,
            f"{records} records are committed",
            query,
        )

    def rows(self):
        return self.spark.read.parquet(str(self.folder / "rows")).collect()

    def emitted(self):
        return [json.loads(row["row"]) for row in self.rows()]
