"""`kclrun state rebuild` with real managers and lease processes, over a split and a merge: what was
lost is the fold of the records again, and the fleet goes on with it. The versions are items of a
table, which was deleted."""

import json
from collections import defaultdict

import pytest

from kclrun.aws.outputs.state_items import TABLE
from kclrun.cli.leases.views import scan_leases
from kclrun.local.server import start_embedded
from tests.processes.cli_rig import Site, ended

pytestmark = pytest.mark.seconds

PROCESSOR = """
from kclrun import RecordProcessor

class Folds(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            values = self.context.state[record]
            n = int(record.data)
            values["fold"] = (values.get("fold", 0) * 31 + n) % 1_000_003
            at = record.approximate_arrival_timestamp
            self.context.set_timer(record, at - 3600, f"event-{n}")
            self.context.set_timer(record, at - 3600, f"wall-{n}", clock="wall")
            self.context.set_timer(record, at + 3600, f"later-{n}", clock="wall")
            self.context.emit({"n": n})

    def on_timer(self, timer, checkpointer):
        values = self.context.state[timer.key]
        kind = timer.name.partition("-")[0]
        values[kind] = values.get(kind, 0) + 1

    def shard_ended(self, checkpointer):
        for key in self.context.state:
            values = self.context.state[key]
            values["ended"] = values.get("ended", 0) + 1
        checkpointer.checkpoint()
"""


class Folded:
    """An application with state, and the fold of each key's records."""

    def __init__(self, folder, endpoint):
        self.folder = folder
        self.site = Site(folder, endpoint, "folds", 2)
        self.dynamodb = self.site.aws.control.dynamodb_writes()
        self.dynamodb.create_table(TableName="kept", **TABLE)
        (folder / "folds.py").write_text(PROCESSOR)
        text = self.site.config.read_text().replace("kclrun.samples.hello:Hello", "folds:Folds")
        self.site.config.write_text(
            text
            + f"path: {folder}\nfetch: {{idle: 200ms}}\ncheckpoint: {{every: 200ms}}\n"
            + "start: TRIM_HORIZON\nstate: {store: dynamodb://kept}\n"
            + f"output: {{path: {folder}/rows}}\n"
        )
        self.count, self.folds = 0, defaultdict(int)

    def put(self, count, *, aggregate=False):
        numbers = range(self.count, self.count + count)
        rows = [(f"key-{n % 13}", str(n)) for n in numbers]
        self.site.put(rows, aggregate=aggregate)
        for key, n in rows:
            self.folds[key] = (self.folds[key] * 31 + int(n)) % 1_000_003
        self.count += count

    def run(self):
        return ended("run", "--config", self.site.config, "--until", "caught-up")

    def do(self, *verb):
        return ended(*verb, "--config", self.site.config)

    def lose_state(self):
        self.dynamodb.delete_table(TableName="kept")
        self.dynamodb.create_table(TableName="kept", **TABLE)

    def exported(self):
        """Values by key, of the open shards."""
        code, out, reported = self.do("state", "export")
        assert code == 0, reported
        open_shards = {shard.shard_id for shard in self.site.open_shards()}
        lines = [json.loads(line) for line in out.splitlines()]
        return {each["key"]: each["values"] for each in lines if each["shard"] in open_shards}


@pytest.fixture
def folded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with start_embedded() as running:
        yield Folded(tmp_path, running.endpoint)


def rows_of(folder):
    texts = [path.read_text() for path in folder.glob("*.jsonl")]
    return sorted(json.loads(line)["n"] for text in texts for line in text.splitlines())


@pytest.mark.long
def test_lost_state_halts_in_words_and_is_the_fold_of_the_records_after_a_rebuild(folded):
    folded.put(200)
    folded.site.split(folded.site.open_shards()[0])
    folded.put(200, aggregate=True)
    code, _, reported = folded.run()
    assert code == 0, reported
    folded.site.merge(*folded.site.open_shards()[:2])
    folded.put(100)
    code, _, reported = folded.run()
    assert code == 0, reported
    before = folded.exported()
    assert {key: each["fold"] for key, each in before.items()} == folded.folds

    folded.lose_state()
    folded.put(50)
    code, out, reported = folded.run()
    halted = [row for row in scan_leases(folded.site.aws) if row.halt is not None]
    assert (code, len(halted)) == (65, 2), (reported, out)
    assert all("is missing from state.store" in row.halt.reason for row in halted)
    rows = rows_of(folded.folder / "rows")

    rebuild = ("state", "rebuild")
    code, out, reported = folded.do(*rebuild)
    assert (code, "Nothing was changed" in out) == (0, True), reported
    code, out, reported = folded.do(*rebuild, "--yes")
    assert code == 0, (out, reported)
    assert folded.exported() == before
    assert rows_of(folded.folder / "rows") == rows

    names = [row.key for row in halted]
    assert folded.do("leases", "resume", *names, "--yes")[0] == 0
    code, _, reported = folded.run()
    assert code == 0, reported
    assert {key: each["fold"] for key, each in folded.exported().items()} == folded.folds
    assert rows_of(folded.folder / "rows") == list(range(550))
    assert "Nothing to do" in folded.do(*rebuild)[1]
