"""A lease process killed at each line of kclrun, once: between a fetch and the acknowledged
checkpoint, and from the last record of a shard to its end.

Real processes under a real manager; a line is met on whichever thread runs it first. In CI a share
of the lines, the same one each time; all of them with KCLRUN_SWEEP_SHARE=1/1.
"""

import contextlib
import json
import sqlite3
from collections import Counter

import msgspec
import pytest

from kclrun.destinations import open_letters
from kclrun.local.server import start_embedded
from kclrun.model.letter import LetterDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.processes.ledger_rig.aws import REGION
from tests.processes.ledger_rig.deliveries import judge
from tests.processes.ledger_rig.processor.ledger_processor import is_due
from tests.processes.ledger_rig.states import kept_values
from tests.processes.line_sweep.sweeping import SweptApplication
from tests.shares import asked_share, share_of
from tests.support.clients import ONCE, client_of

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000
# So that CI spends half a minute on both.
SHARES = 24
# Of the records of a key: each batch but a few has one.
POISON_EVERY = 20
# The share of the lines that must be met again. What runs by chance only (a late answer, a full
# queue) may not come again.
REACHED_MIN = 0.9
# In so many looks, 50 ms apart, without a line that is new, the usual ones have all come.
QUIET_LOOKS = 40


class Gathered:
    """Holds once lines were seen, and no new one for a while."""

    def __init__(self, sweep):
        self.sweep = sweep
        self.lines = []
        self.quiet = 0

    def __call__(self):
        lines = self.sweep.lines()
        self.quiet = self.quiet + 1 if lines == self.lines else 0
        self.lines = lines
        return bool(lines) and self.quiet > QUIET_LOOKS


@pytest.fixture
def swept(tmp_path, embedded_aws):
    made = []

    def make(stream, window, *, options=None, **settings):
        app = SweptApplication(
            tmp_path,
            embedded_aws,
            stream,
            window=window,
            checkpoint={"every": "200ms", "uncheckpointed_max": CAP},
            output={"path": "rows"},
            options={"emits": True} | (options or {}),
            **settings,
        )
        made.append(app)
        return app

    yield make
    for app in made:
        app.close()


def killed_at_each_line(app, source, is_poison=None, shares=SHARES):
    """Gather lines, kill at the share of them, and judge what was delivered in the end. With poison
    among the records the caller compares rows and letters."""
    app.start()
    source.start()
    gathered = Gathered(app.sweep)
    app.until(gathered, 60)
    chosen = share_of(gathered.lines, *asked_share("KCLRUN_SWEEP_SHARE", shares))
    app.sweep.queue(chosen)
    app.until(app.sweep.is_over, 600)
    source.stop()
    put = {
        shard: [each for each in records if is_poison is None or not is_poison(each[2])]
        for shard, records in source.put.items()
    }
    count = sum(map(len, put.values()))

    def rows():
        return sum(len(path.read_text().splitlines()) for path in app.folder.glob("rows/*.jsonl"))

    # Generation after generation, each by new processes. A row in the growing file may be that of
    # the last process killed, whose lease has no other process yet.
    app.until(lambda: source.is_done and rows() >= count and has_checkpoints(app, source), 240)
    assert app.stop() == 0

    killed = app.sweep.killed()
    print(f"{len(killed)} of {len(chosen)} lines, of {len(gathered.lines)} in all")
    print("not met again:", *app.sweep.missed())
    if is_poison is None:
        verdict = judge(source.put, app.ledger.read(), killed=set(killed.values()), cap=CAP)
        print(verdict)
        assert verdict.faults == []
    assert rows() == count
    return len(killed) / len(chosen)


def has_checkpoints(app, source):
    """Whether the row of each shard is behind the shard's last record; that of an ended one may be
    gone already."""
    rows = app.aws.rows(app.table)
    last = {shard: int(records[-1][0]) for shard, records in source.put.items() if records}
    at = {shard: rows[shard]["checkpoint"] for shard in last if shard in rows}
    return all(
        checkpoint == "SHARD_END" or (checkpoint.isdigit() and int(checkpoint) >= last[shard])
        for shard, checkpoint in at.items()
    )


def reshards_of_each_shard():
    """A shard's end is good for a few deaths, so it takes many: each of eight shards in its turn is
    split and put together again."""
    pairs = [("split", index) for index in range(8)], [("merge", index) for index in range(8)]
    turns = [each for pair in zip(*pairs, strict=True) for each in pair] * 600
    return [(50 * n, how, index) for n, (how, index) in enumerate(turns, start=1)]


def rows_in_database(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return [tuple(row) for row in database.execute("SELECT key, n FROM rows")]


def rows_in_rolls(folder):
    lines = [line for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [(row["key"], row["n"]) for row in map(json.loads, lines)]


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_a_lease_process_killed_at_any_line_before_its_checkpoint_loses_nothing(
    embedded_aws, swept, producer
):
    stream = embedded_aws.stream(shards=8)

    source = producer(stream, 10**6, seed=1, rate=400)
    assert killed_at_each_line(swept(stream, "checkpoint"), source) > REACHED_MIN


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_a_lease_process_killed_at_any_line_of_its_shards_end_loses_nothing(
    embedded_aws, swept, producer
):
    stream = embedded_aws.stream(shards=8)
    source = producer(stream, 10**6, seed=1, rate=200, reshards=reshards_of_each_shard())

    assert killed_at_each_line(swept(stream, "end"), source) > REACHED_MIN


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_a_lease_process_killed_at_any_line_leaves_each_row_once_in_a_table_and_in_rolls(
    embedded_aws, swept, producer, tmp_path
):
    stream = embedded_aws.stream(shards=8)
    source = producer(stream, 10**6, seed=1, rate=400)
    table, rolls = tmp_path / "rows.db", tmp_path / "rolls"
    outputs = {
        "table": {
            "sql": f"sqlite:///{table}",
            "table": "rows",
            "create": True,
            "schema": "sequence_number string, key string, n bigint",
        },
        "rolls": {"path": str(rolls), "roll": {"every": "300ms"}},
    }

    app = swept(stream, "checkpoint", options={"emits_to": [*outputs]}, outputs=outputs)

    assert killed_at_each_line(app, source) > REACHED_MIN
    for rows in (rows_in_database(table), rows_in_rolls(rolls)):
        assert len(rows) == len(set(rows)) == source.total_put


# With splits and merges each shard has the state of its parents; a process killed there begins with
# it again.
@pytest.mark.slow
@pytest.mark.timeout(720)
@pytest.mark.parametrize("window", ["checkpoint", "end"])
def test_a_lease_process_killed_at_any_line_leaves_each_record_counted_once_in_the_state(
    embedded_aws, swept, producer, tmp_path, window
):
    stream = embedded_aws.stream(shards=8)
    reshards = reshards_of_each_shard() if window == "end" else []
    source = producer(stream, 10**6, seed=1, rate=200, reshards=reshards)
    state = {"store": str(tmp_path / "kept")}
    app = swept(stream, window, options={"counts": True}, state=state)

    # The first version of a process runs lines that come once in its life.
    assert killed_at_each_line(app, source, shares=2 * SHARES) > 0.7
    rows = [
        json.loads(line)
        for path in app.folder.glob("rows/*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert [row for row in rows if row["count"] != row["n"] + 1] == []
    kept = kept_values(tmp_path / "kept", app.table, stream, embedded_aws.rows(app.table))
    counted = {key: msgspec.msgpack.decode(values["n"]) for key, values in kept.items()}
    assert counted == Counter(row["key"] for row in rows)


@pytest.fixture
def objects():
    """S3: the rig's own DynamoDB has none."""
    with start_embedded() as embedded:
        s3 = client_of("s3", embedded.endpoint, config=ONCE)
        s3.create_bucket(Bucket="swept")
        yield embedded.endpoint, s3
        s3.close()


def rows_in_objects(s3):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="swept", Prefix="rows/")
    keys = [each["Key"] for page in pages for each in page.get("Contents", ())]
    for key in keys:
        if "/_kclrun/" not in key:
            for line in s3.get_object(Bucket="swept", Key=key)["Body"].read().splitlines():
                row = json.loads(line)
                yield row["key"], row["n"]


@pytest.mark.slow
@pytest.mark.timeout(720)
def test_a_lease_process_killed_at_any_line_leaves_each_row_once_in_s3_and_each_poison_in_a_letter(
    embedded_aws, swept, producer, objects
):
    endpoint, s3 = objects
    stream = embedded_aws.stream(shards=8)
    source = producer(stream, 10**6, seed=1, rate=400)
    app = swept(
        stream,
        "checkpoint",
        options={"emits_to": ["objects"], "poison_every": POISON_EVERY},
        outputs={"objects": {"s3": "s3://swept/rows", "roll": {"every": "300ms"}}},
        aws={"endpoints": {"s3": endpoint}},
        on_error={
            "retries": 0,
            "then": "dead-letter",
            "dead_letter": {"s3": "s3://swept/letters"},
            "limit": 10**6,
        },
    )

    # The first letter and the first object of a process run lines that come once in its life.
    assert killed_at_each_line(app, source, lambda n: is_due(n, POISON_EVERY), 2 * SHARES) > 0.7
    put = [each for records in source.put.values() for each in records]
    rows = sorted(rows_in_objects(s3))
    assert rows == sorted((key, n) for _, key, n in put if not is_due(n, POISON_EVERY))
    kinesis = WireEndpoint(embedded_aws.embedded.kinesis_endpoint, REGION, REGION)
    place = LetterDestination(s3="s3://swept/letters", s3_url=endpoint)
    kept = open_letters(place, kinesis, lambda: WireCredentials("key", "secret")).kept()
    poisoned = sorted(number for number, _, n in put if is_due(n, POISON_EVERY))
    counting = [each.letter for each in kept if not each.is_uncommitted]
    assert sorted(letter.sequence_number for letter in counting) == poisoned
