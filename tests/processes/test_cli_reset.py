"""`kclrun reset` with real managers, over a split: each generation has every row once, at every
kind of output that a reset could lose rows of, or leave rows out at."""

import json
import math
import sqlite3
import time
from collections import Counter
from contextlib import closing
from datetime import UTC, datetime

import pytest

from kclrun.model.sequence import LATEST, TRIM_HORIZON
from tests.patience import until
from tests.processes.cli_rig import Program, Site, called, ended
from tests.support.clients import client_of

pytestmark = pytest.mark.slow

PROCESSOR = """
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            for name in ("output", "rolled", "sql", "objects"):
                self.context.emit({"n": int(record.data)}, to=name)
"""


class Rows:
    """An application with every kind of output that keeps rows, and what they hold."""

    def __init__(self, folder, endpoint, name):
        self.folder = folder
        self.name = name
        self.site = Site(folder, endpoint, name, 1)
        (folder / "mine.py").write_text(PROCESSOR)
        self.s3 = client_of("s3", endpoint)
        self.s3.create_bucket(Bucket=name)
        self.config = self.site.config
        text = self.config.read_text().replace("kclrun.samples.hello:Hello", "mine:Mine")
        self.config.write_text(
            text
            + f"path: {folder}\nfetch: {{idle: 200ms}}\ncheckpoint: {{every: 200ms}}\n"
            + f"output: {{path: {folder}/grown}}\n"
            + "outputs:\n"
            + f"  rolled: {{path: {folder}/rolled, roll: {{every: 1s}}}}\n"
            + f"  sql: {{sql: 'sqlite:///{folder}/rows.db', table: rows, create: true,"
            + " schema: 'n long'}\n"
            + f"  objects: {{s3: 's3://{name}/rows', roll: {{every: 1s}}}}\n"
        )
        self.numbers = 0
        self.generation = 0

    def put(self, count):
        """Records spread over the keys; the instant after them."""
        rows = [(f"key-{n % 7}", str(n)) for n in range(self.numbers, self.numbers + count)]
        self.site.put(rows)
        self.numbers += count
        # An arrival is rounded up to the next millisecond.
        after = math.ceil(time.time() * 1000) / 1000 + 0.001
        until(lambda: time.time() > after, every_s=0.0)
        return datetime.fromtimestamp(after, UTC).isoformat()

    def read(self):
        """The fleet reads all there is, and ends."""
        code, _, reported = ended("run", "--config", self.config, "--until", "caught-up")
        assert code == 0, reported

    def reset(self, to, *more):
        code, _, reported = called("reset", "--config", self.config, "--to", to, "--yes", *more)
        assert code == 0, reported
        self.generation += 1

    def leases(self):
        return [row for page in self.site.aws.table.scan() for row in page.leases]

    def seen(self):
        """The rows of this generation: at each output its numbers, each with how often."""
        number = self.generation
        grown = f"*.{number}.jsonl" if number else "shardId-????????????.jsonl"
        return {
            "output": _counted((self.folder / "grown").glob(grown)),
            "rolled": _counted((self.folder / "rolled").glob(f"*/*/*/*/{number}/[!.]*.jsonl")),
            "objects": self._objects(),
            "sql": self._sql(),
        }

    def _objects(self):
        listed = self.s3.list_objects_v2(Bucket=self.name, Prefix="rows/").get("Contents", ())
        keys = [each["Key"] for each in listed if f"/{self.generation}/" in each["Key"]]
        bodies = [self.s3.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys]
        return Counter(json.loads(line)["n"] for body in bodies for line in body.splitlines())

    def _sql(self):
        """A table has the rows of all generations: those since the last look."""
        with closing(sqlite3.connect(self.folder / "rows.db")) as database, database:
            counted = Counter(n for (n,) in database.execute("SELECT n FROM rows"))
            database.execute("DELETE FROM rows")
        return counted


def _counted(files):
    return Counter(
        json.loads(line)["n"] for file in files for line in file.read_text().splitlines()
    )


def once(first, end):
    each = Counter(range(first, end))
    return {"output": each, "rolled": each, "objects": each, "sql": each}


def test_a_stream_is_read_again_over_a_split_skipped_and_read_from_a_time(endpoint, tmp_path):
    app = Rows(tmp_path, endpoint, "again")
    app.put(30)
    app.site.split(app.site.open_shards()[0])
    app.put(30)
    app.read()
    assert app.seen() == once(0, 60)
    assert any(row.parents for row in app.leases()), "over a split"

    app.reset("TRIM_HORIZON")
    assert {(row.checkpoint, row.halt) for row in app.leases()} == {(TRIM_HORIZON, None)}
    app.read()
    assert app.seen() == once(0, 60)
    assert {row.generation for row in app.leases()} == {1}, "the children have their parent's"

    between = app.put(20)
    app.reset("LATEST")
    assert {row.checkpoint for row in app.leases()} == {LATEST}
    app.put(10)
    app.read()
    skipped = app.seen()
    # LATEST stands for the second of the service's clock in which the shards were listed.
    assert {name: counted - once(60, 80)[name] for name, counted in skipped.items()} == once(80, 90)
    assert all(set(counted.values()) == {1} for counted in skipped.values())

    app.reset(between)
    app.read()
    assert app.seen() == once(80, 90)


def test_kept_positions_bring_every_row_after_them_once_more_over_a_split(endpoint, tmp_path):
    app = Rows(tmp_path, endpoint, "kept")
    app.put(30)
    app.read()
    assert app.seen() == once(0, 30)
    kept = tmp_path / "kept.json"
    kept.write_text(called("leases", "--config", app.config, "--json")[1])
    app.put(20)
    app.site.split(app.site.open_shards()[0])
    app.put(10)
    app.read()
    assert app.leases()[0].is_ended
    assert app.seen()["sql"] == Counter(range(30, 60))

    app.reset(str(kept))
    assert len(app.leases()) == 1, "the children come again when their parent ends"
    app.read()

    assert app.seen() == once(30, 60)


COUNTING = """
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        count = self.context.counter("seen")
        for record in batch:
            count[record] += 1
            self.context.emit({"n": int(record.data), "seen": count[record]})
"""


def test_dropped_state_is_built_again_over_a_split(endpoint, tmp_path):
    app = Rows(tmp_path, endpoint, "dropped")
    (tmp_path / "mine.py").write_text(COUNTING)
    lines = app.config.read_text().partition("outputs:")[0]
    app.config.write_text(f"{lines}state: {{store: {tmp_path}/kept}}\n")

    def counted(generation):
        """The rows of one generation, in the order of the records."""
        name = f".{generation}" if generation else ""
        files = (tmp_path / "grown").glob(f"shardId-????????????{name}.jsonl")
        return sorted(line for file in files for line in file.read_text().splitlines())

    app.put(30)
    app.read()
    app.site.split(app.site.open_shards()[0])
    app.put(30)
    app.read()
    assert {row.state_version is None for row in app.leases()} == {False}

    app.reset("TRIM_HORIZON", "--state", "drop")
    assert {row.state_version for row in app.leases()} == {None}
    app.read()

    assert len(counted(1)) == 60
    assert counted(1) == counted(0)


def test_a_reset_is_refused_while_a_manager_runs(endpoint, tmp_path):
    site = Site(tmp_path, endpoint, "alive", 2)
    with Manager(site) as program:
        program.until_reported("lease_claimed")
        code, _, reported = called("reset", "--config", site.config, "--to", "LATEST", "--yes")

    assert code == 78
    assert "are being renewed" in reported
    assert {row.generation for page in site.aws.table.scan() for row in page.leases} == {0}


class Manager(Program):
    """A manager whose log is read, and which is ended with the block."""

    def __init__(self, site):
        text = site.config.read_text()
        site.config.write_text(
            text.replace("kclrun.samples.hello:Hello", "mine:Mine")
            + f"path: {site.config.parent}\nlog: {{level: debug, format: json}}\n"
        )
        (site.config.parent / "mine.py").write_text(PROCESSOR)
        super().__init__("run", "--config", site.config)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
