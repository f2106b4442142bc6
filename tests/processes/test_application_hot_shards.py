"""A whole application names its hot shards in log, metrics and verb; and the split helps."""

import hashlib
import json
import random
import re
import shlex
import threading
from collections import Counter
from urllib.request import urlopen

import pytest

from tests.patience import until

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

# 1.5 MB a second, half as much again as a shard takes: a busy machine may be late.
RECORD_BYTES = 50_000
RECORDS_A_PUT = 3
PUT_EVERY_S = 0.1
# A window has 240 samples; two reads a second are enough for them, so a busy machine has them too.
OBSERVED = {"listen": 0, "hot_window": "20s"}
PROCESSOR = """
from kclrun import RecordProcessor

class Quiet(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass
"""


def md5(key):
    return int.from_bytes(hashlib.md5(key.encode()).digest(), "big")


class Source:
    """Puts records of keys with these weights until it is stopped; `put` counts bytes by shard."""

    def __init__(self, kinesis, stream, weights, seed=1):
        self._kinesis, self._stream = kinesis, stream
        self._weights = weights
        self._random = random.Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure = None
        self.put = Counter()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self):
        try:
            while not self._is_over.wait(PUT_EVERY_S):
                self._put()
        except Exception as error:
            self._failure = error

    def _put(self):
        keys = self._random.choices([*self._weights], [*self._weights.values()], k=RECORDS_A_PUT)
        records = [{"PartitionKey": key, "Data": b"x" * RECORD_BYTES} for key in keys]
        answer = self._kinesis.put_records(StreamName=self._stream, Records=records)
        assert answer["FailedRecordCount"] == 0
        for result in answer["Records"]:
            self.put[result["ShardId"]] += RECORD_BYTES


@pytest.fixture
def started(application, embedded_aws, tmp_path):
    def start(shards=1):
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "quiet_processor.py").write_text(PROCESSOR)
        stream = embedded_aws.stream(shards)
        app = application(
            stream,
            processor="quiet_processor:Quiet",
            path=str(tmp_path / "code"),
            options={},
            observe=OBSERVED,
        )
        return stream, app.start()

    return start


def got(app, path):
    with urlopen(endpoint_of(app) + path) as answer:
        return answer.read().decode()


def endpoint_of(app):
    return until(lambda: app.of("endpoint_listening"), why=app.last_words)[-1]["endpoint"]


@pytest.mark.slow
def test_a_shard_that_one_key_carries_is_named_and_its_key_only_where_it_is_asked_for(
    started, embedded_aws
):
    stream, app = started()
    hot = "customer-4711"
    weights = {hot: 80} | {f"customer-{n}": 0.2 for n in range(100)}

    with Source(embedded_aws.kinesis, stream, weights):
        (line,) = until(lambda: app.of("shard_hot"), 60.0, why=app.last_words)
        # The next sample shows it, too.
        until(lambda: "splitting cannot help" in got(app, "/health"), why=app.last_words)
        reported = app.cli(
            "leases", "--config", app.config, "--hot", "--endpoint", endpoint_of(app)
        )
        named = app.cli(
            *("leases", "--config", app.config, "--hot", "--endpoint", endpoint_of(app)),
            *("--show-keys", "--json"),
        )
        metrics, health = got(app, "/metrics"), got(app, "/health")
    (cooled,) = until(lambda: app.of("shard_cooled"), 90.0, why=app.last_words)
    assert app.stop() == 0

    assert line["level"] == "warning"
    assert line["shard"] == cooled["shard"] == "shardId-000000000000"
    assert f"the partition key with hash key {md5(hot)} carries" in line["advice"]
    assert "splitting cannot help" in line["advice"]
    share = int(re.search(r"carries (\d+)%", line["advice"])[1])
    assert 68 <= share <= 92
    assert reported.returncode == 0, reported.stderr
    assert "HOT" in reported.stdout
    assert line["advice"].split(":")[1].strip() in reported.stdout
    assert f'kclrun_hot{{application="{app.table}",shard="{line["shard"]}"}} 1.0' in metrics
    assert str(md5(hot)) in health
    (lease,) = json.loads(named.stdout)
    assert lease["traffic"]["keys"][0]["partition_key"] == hot
    assert lease["traffic"]["load"] > 0.6
    # No key in any place that was not asked for it.
    everything = [app.log_path.read_text(), reported.stdout, metrics, health]
    everything.append(json.dumps(embedded_aws.rows(app.table)))
    assert not [text for text in everything if "customer" in text]
    assert len(app.of("shard_hot")) == 1, "the beginning is said once"


@pytest.mark.slow
def test_the_split_that_is_advised_halves_the_load_of_many_uneven_keys(started, embedded_aws):
    stream, app = started()
    # Zipf, of 200 keys: the heaviest carries 17 %.
    weights = {f"key-{n}": 1 / n for n in range(1, 201)}

    with Source(embedded_aws.kinesis, stream, weights) as source:
        (line,) = until(lambda: app.of("shard_hot"), 60.0, why=app.last_words)
        # As an operator would, from the line to the shell.
        assert "aws kinesis split-shard" in line["advice"], app.last_words()
        words = shlex.split(line["advice"][line["advice"].index("aws kinesis split-shard") :])
        assert words[:3] == ["aws", "kinesis", "split-shard"]
        options = dict(zip(words[3::2], words[4::2], strict=True))
        assert options.keys() == {"--stream-name", "--shard-to-split", "--new-starting-hash-key"}
        embedded_aws.kinesis.split_shard(
            StreamName=options["--stream-name"],
            ShardToSplit=options["--shard-to-split"],
            NewStartingHashKey=options["--new-starting-hash-key"],
        )
        children = {"shardId-000000000001", "shardId-000000000002"}
        until(lambda: children <= {each["shard"] for each in app.of("lease_claimed")})
        before = Counter(source.put)
        until(lambda: sum((source.put - before).values()) > 12_000_000, timeout_s=60.0)
        after = source.put - before
    assert app.stop() == 0

    assert after.keys() == children, "the parent gets nothing any more"
    at, total = int(options["--new-starting-hash-key"]), sum(weights.values())
    true = sum(weight for key, weight in weights.items() if md5(key) < at) / total
    # The advice rests on 240 samples: their standard error is 3.2 % of the bytes.
    assert 0.35 <= true <= 0.65
    measured = after["shardId-000000000001"] / sum(after.values())
    assert measured == pytest.approx(true, abs=0.15)
