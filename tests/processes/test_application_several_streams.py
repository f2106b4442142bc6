"""One application of two streams: each has its own processor, priority and lease keys."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.patience import HUNG_S
from tests.processes.ledger_rig.deliveries import LedgerFile, judge

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


def nice_of(pid):
    """The niceness of each thread of a process: the kernel keeps it by thread. Empty once the
    process has ended, as the parents of a split do."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    # Field 19; the name in brackets, field 2, may hold spaces.
    return {int(stat.rpartition(")")[2].split()[16]) for stat in stats}


def key_of(aws, stream):
    summary = aws.kinesis.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]
    account = summary["StreamARN"].split(":")[4]
    return f"{account}:{stream}:{int(summary['StreamCreationTimestamp'].timestamp())}"


class TwoStreams:
    """`orders` has the application's processor; `audits` its own, and what CPU is left."""

    def __init__(self, aws, make, folder):
        self._make = make
        self.output = folder / "out"
        self.orders, self.audits = aws.stream(shards=2), aws.stream(shards=2)
        self.ledgers = {
            self.orders: LedgerFile(folder / "orders-ledger"),
            self.audits: LedgerFile(folder / "audits-ledger"),
        }
        self.app = self.machine("a")

    def machine(self, machine, **settings):
        return self._make(
            self.orders,
            machine=machine,
            stream=None,
            output={"path": str(self.output)},
            streams=[
                {"name": self.orders, "options": self._options(self.orders)},
                {
                    "name": self.audits,
                    "processor": "ledger_processor:SecondLedger",
                    "options": self._options(self.audits),
                    "priority": 7,
                },
            ],
            **settings,
        )

    def _options(self, stream):
        return {"ledger": str(self.ledgers[stream].path), "emits": True}

    def until_delivered(self, stream, count, timeout_s=60.0):
        self.app.until(lambda: len(self.ledgers[stream].read().delivered) >= count, timeout_s)


def nice_of_two_or_more(pids):
    found = [nice for pid in sorted(pids) if (nice := nice_of(pid))]
    return found if len(found) >= 2 else None


@pytest.fixture
def two_streams(embedded_aws, application, tmp_path):
    return TwoStreams(embedded_aws, application, tmp_path)


def test_each_stream_reaches_its_own_processor_once_and_in_order_across_a_split_and_a_merge(
    embedded_aws, producer, two_streams
):
    app, orders, audits = two_streams.app, two_streams.orders, two_streams.audits
    reshards = [(1_000, "split", 0), (2_500, "merge", 1)]
    sources = {
        orders: producer(orders, 4_000, seed=71, rate=500, reshards=reshards),
        audits: producer(audits, 2_000, seed=72, rate=300),
    }

    app.start()
    for source in sources.values():
        source.start()
    for stream in sources:
        two_streams.until_delivered(stream, 100)
    own = os.nice(0)
    for stream, nice in ((orders, own), (audits, min(own + 7, 19))):
        ledger = two_streams.ledgers[stream]
        found = app.until(
            lambda ledger=ledger: nice_of_two_or_more(ledger.read().pids & set(app.lease_pids()))
        )
        assert found == [{nice}] * len(found)
    for stream, source in sources.items():
        two_streams.until_delivered(stream, {orders: 4_000, audits: 2_000}[stream])
        app.until(lambda source=source: source.is_done)
    leases = embedded_aws.rows(app.table)
    assert app.stop() == 0

    for stream, processor in ((orders, "Ledger"), (audits, "SecondLedger")):
        ledger = two_streams.ledgers[stream].read()
        verdict = judge(sources[stream].put, ledger)
        print(verdict)
        assert verdict.faults == []
        assert verdict.duplicates == 0
        assert {mark["processor"] for mark in ledger.marks} == {processor}
        rows = (two_streams.output / stream).glob("shardId-*.jsonl")
        assert sum(len(file.read_text().splitlines()) for file in rows) == len(ledger.delivered)
    assert_rows_are_as_the_kcl_writes_them(
        leases, {stream: key_of(embedded_aws, stream) for stream in sources}
    )


def assert_rows_are_as_the_kcl_writes_them(rows, keys):
    for key, row in rows.items():
        stream_key, _, shard = key.rpartition(":")
        assert stream_key in keys.values()
        assert (row["streamName"], row["shardId"]) == (stream_key, shard)
        for parent in row.get("parentShardId", ()):
            assert re.fullmatch(r"shardId-\d{12}", parent)
    of = {name: [key for key in rows if key.startswith(keys[name])] for name in keys}
    merged = [key for key in rows if len(rows[key].get("parentShardId", ())) == 2]
    assert min(map(len, of.values())) == 2
    assert len(merged) == 1


@pytest.mark.slow
def test_operators_name_a_lease_by_stream_and_shard_and_see_each_stream(
    embedded_aws, application, producer, two_streams
):
    app, orders, audits = two_streams.app, two_streams.orders, two_streams.audits
    source = producer(audits, 200, seed=73).start()
    app.start()
    two_streams.until_delivered(audits, 200)
    source.join()
    shard, config = "shardId-000000000001", ("--config", str(app.config))

    shown = app.cli("leases", *config)
    lag = app.cli("lag", *config, "--json")
    unclear = app.cli("leases", *config, "release", shard)
    clear = app.cli("leases", *config, "release", f"{orders}:{shard}")
    explained = app.cli(
        "leases", *config, "--explain", "--owner", "new", "--set", "leases.failover=1s"
    )
    which = app.cli("tail", *config)
    tailed = app.cli(
        "tail", *config, "--stream", audits, "--from", "TRIM_HORIZON", "--max", "200", "--json"
    )
    checked = app.cli("check", *config)

    assert shown.returncode == 0, shown.stderr
    assert f"{orders}:{shard}" in shown.stdout
    assert f"{audits}:{shard}" in shown.stdout
    lines = json.loads(lag.stdout)["shards"]
    assert len(lines) == 4
    assert {line["behind_s"] is not None for line in lines} == {True}
    assert unclear.returncode == 64
    assert f"{audits}:{shard}" in unclear.stderr
    assert clear.returncode == 0, clear.stderr
    assert key_of(embedded_aws, orders) in clear.stdout
    assert "Nothing was changed" in clear.stdout
    assert explained.returncode == 0, explained.stderr
    assert re.search(
        rf" for ({key_of(embedded_aws, orders)}|{key_of(embedded_aws, audits)}):shard",
        explained.stdout,
    )
    assert which.returncode == 64
    assert "--stream" in which.stderr
    assert tailed.returncode == 0, tailed.stderr
    assert len(tailed.stdout.splitlines()) == 200
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("stream     ok") == 2
    assert "SecondLedger" in checked.stdout
    assert app.stop() == 0


@pytest.mark.slow
def test_a_table_of_one_stream_is_not_used_for_several_nor_the_other_way_round(
    embedded_aws, application, two_streams
):
    several = two_streams.app.start()
    several.until(lambda: len(several.of("lease_claimed")) >= 4)
    assert several.stop() == 0
    before = embedded_aws.rows(several.table)

    single = application(two_streams.orders, machine="b").start()

    assert single.process.wait(HUNG_S) == 78
    assert "was begun with `streams:`" in single.last_words()
    assert embedded_aws.rows(several.table) == before

    alone = embedded_aws.stream(shards=1)
    first = application(alone, machine="c").start()
    first.until(lambda: len(first.of("lease_claimed")) >= 1)
    assert first.stop() == 0
    many = application(alone, machine="d", stream=None, streams=[{"name": alone}]).start()
    assert many.process.wait(HUNG_S) == 78
    assert "was begun with `stream:`" in many.last_words()


def test_every_stream_that_is_missing_is_named_at_the_start(application):
    streams = [{"name": "no-such-orders"}, {"name": "no-such-audits"}]

    app = application("none", stream=None, streams=streams).start()

    assert app.process.wait(HUNG_S) == 66
    assert "no-such-orders" in app.last_words()
    assert "no-such-audits" in app.last_words()


@pytest.mark.long
def test_a_stream_that_is_deleted_while_we_run_ends_no_lease_of_another(
    embedded_aws, producer, two_streams
):
    app, orders, audits = two_streams.app, two_streams.orders, two_streams.audits
    app.start()
    app.until(lambda: len(app.of("lease_claimed")) >= 4)

    embedded_aws.kinesis.delete_stream(StreamName=audits)
    app.until(lambda: audits in str(app.of("stream_missing")))
    source = producer(orders, 1_000, seed=74, rate=1_000, reshards=[(500, "split", 0)]).start()

    two_streams.until_delivered(orders, 1_000)
    app.until(lambda: source.is_done)
    assert app.stop() == 0
    verdict = judge(source.put, two_streams.ledgers[orders].read())
    print(verdict)
    assert verdict.faults == []
    assert verdict.duplicates == 0


@pytest.mark.long
def test_a_second_machine_is_given_its_share_of_both_streams_without_a_record_doubled(
    embedded_aws, producer, two_streams
):
    first, second = two_streams.app, two_streams.machine("b")
    streams = (two_streams.orders, two_streams.audits)
    sources = {
        stream: producer(stream, 10**7, seed=75 + number, rate=300).start()
        for number, stream in enumerate(streams)
    }
    first.start()
    for stream in streams:
        two_streams.until_delivered(stream, 200)

    second.start()
    second.until(lambda: len(second.of("lease_claimed")) >= 2)
    owners = [row.get("leaseOwner") for row in embedded_aws.rows(first.table).values()]
    assert sorted(owners.count(owner) for owner in set(owners)) == [2, 2]
    assert first.stop() == 0
    second.until(lambda: len(second.of("lease_claimed")) >= 4)
    for stream, source in sources.items():
        source.stop()
        two_streams.until_delivered(stream, source.total_put)
    assert second.stop() == 0

    for stream, source in sources.items():
        verdict = judge(source.put, two_streams.ledgers[stream].read())
        print(verdict)
        assert verdict.faults == []
        assert verdict.duplicates == 0


def rename_rows(aws, app, number):
    """The rows as a KCL has them whose settings name the creation of the streams so; each at its
    20th record. Returns: their keys."""
    rows = aws.dynamodb.scan(TableName=app.table)["Items"]
    keys = []
    for item in rows:
        account, stream, _, shard = item["leaseKey"]["S"].split(":")
        aws.dynamodb.delete_item(TableName=app.table, Key={"leaseKey": item["leaseKey"]})
        iterator = aws.kinesis.get_shard_iterator(
            StreamName=stream, ShardId=shard, ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        records = aws.kinesis.get_records(ShardIterator=iterator)["Records"]
        keys.append(f"{account}:{stream}:{number}:{shard}")
        own = {
            "leaseKey": {"S": keys[-1]},
            "streamName": {"S": f"{account}:{stream}:{number}"},
            "checkpoint": {"S": records[19]["SequenceNumber"]},
        }
        kept = ("shardId", "leaseCounter", "startingHashKey", "endingHashKey")
        same = {name: item[name] for name in kept if name in item}
        fixed = {
            "checkpointSubSequenceNumber": {"N": "0"},
            "ownerSwitchesSinceCheckpoint": {"N": "0"},
            "entityType": {"S": "LEASE"},
        }
        aws.dynamodb.put_item(TableName=app.table, Item=same | fixed | own)
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("start", ["TRIM_HORIZON", "LATEST"])
def test_rows_of_a_kcl_that_names_the_creation_otherwise_are_read_on(
    embedded_aws, producer, two_streams, start
):
    app = two_streams.machine("a2", start=start)
    app.start()
    app.until(lambda: len(app.of("lease_claimed")) >= 4)
    assert app.stop() == 0
    sources = {
        stream: producer(stream, 200, seed=75).start()
        for stream in (two_streams.orders, two_streams.audits)
    }
    for source in sources.values():
        source.join()
    keys = rename_rows(embedded_aws, app, 12345)

    checked = app.cli("check", "--config", str(app.config))
    assert app.start("--until", "caught-up").process.wait(HUNG_S) == 0

    assert checked.stdout.count("12345: they are used as they are") == 2
    assert sorted(embedded_aws.rows(app.table)) == sorted(keys)
    assert len(app.of("leases_named_otherwise")) == 2
    for stream, source in sources.items():
        delivered = two_streams.ledgers[stream].read().delivered
        expected = {number for put in source.put.values() for number, _, _ in put[20:]}
        assert set(delivered) == expected


@pytest.mark.slow
def test_the_machines_start_and_read_the_other_stream_when_one_was_deleted(
    embedded_aws, producer, two_streams
):
    app, orders, audits = two_streams.app, two_streams.orders, two_streams.audits
    app.start()
    app.until(lambda: len(app.of("lease_claimed")) >= 4)
    assert app.stop() == 0
    embedded_aws.kinesis.delete_stream(StreamName=audits)
    source = producer(orders, 200, seed=76).start()

    app.start()

    two_streams.until_delivered(orders, 200)
    source.join()
    (missing,) = app.of("stream_missing")
    assert missing["stream"] == audits
    assert app.stop() == 0
