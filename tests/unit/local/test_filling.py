"""The filler on the embedded AWS: what a source gives arrives, and arrives when it says."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import msgspec
import pytest

from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.wire import WireClient
from kclrun.errors import SettingsError, Unavailable
from kclrun.local.filling import (
    LOCAL_CREDENTIALS,
    Filler,
    Filling,
    FillOrder,
    FillReport,
    Reshard,
    make_stream,
    middle,
)
from kclrun.local.http_server import HttpServer
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.wire import WireEndpoint
from tests.patience import HUNG_S
from tests.unit.local.serving import served

PAUSE = timedelta(milliseconds=50)


@pytest.fixture
def stream():
    face = HttpServer(Kinesis(KinesisSettings(settle_s=0.02), b"s" * 32), None)
    with served(face) as url:
        endpoint = WireEndpoint(url, "eu-west-1", "eu-west-1")
        client = WireClient(endpoint, lambda: LOCAL_CREDENTIALS, service="kinesis")
        assert make_stream(endpoint, "flights", 1)
        yield endpoint, client
        client.close()


# Fewer records than a packer holds back for a shard, and than a request waits for.
def test_what_comes_before_a_pause_of_the_source_arrives_before_it(stream):
    endpoint, client = stream
    filler = Filler(FillOrder(endpoint, "flights", "module:function", ()))

    report = filler.fill(lambda: [("k", b"1"), ("k", b"2"), PAUSE, ("k", b"3")])

    assert report == FillReport(user_records=3, records=3, reshards=0)
    before, also_before, after = _records(client)
    assert [before.data, also_before.data, after.data] == [b"1", b"2", b"3"]
    # Arrivals are told in milliseconds.
    assert after.arrived_at - also_before.arrived_at >= PAUSE - timedelta(milliseconds=1)


def test_what_is_neither_a_record_nor_a_pause_is_refused(stream):
    filler = Filler(FillOrder(stream[0], "flights", "module:function", ()))

    with pytest.raises(
        SettingsError, match=r"item 2 is not a \(key: str, data: bytes\) pair but a float"
    ):
        filler.fill(lambda: [PAUSE, 0.3])


def _records(client: WireClient, shard_id: str = "shardId-000000000000") -> Sequence[Record]:
    reader = PollingReader(client, "flights")
    iterator = reader.iterator(shard_id, StartPoint(IteratorType.TRIM_HORIZON))
    return reader.fetch(iterator, 100).records


def test_a_fill_tells_how_far_it_is_and_its_total_where_its_source_was_counted(stream, monkeypatch):
    monkeypatch.setattr("kclrun.local.filling._REPORT_EVERY_S", 0.0)
    records = [("k", b"x")] * 1_200
    counted: list[Filling] = []
    uncounted: list[Filling] = []
    order = FillOrder(stream[0], "flights", "module:function", ())
    resharding = msgspec.structs.replace(order, reshard=(Reshard(1.0, split=0),))

    Filler(order, uncounted.append).fill(lambda: [*records, PAUSE / 100])
    Filler(resharding, counted.append).fill(lambda: [*records, PAUSE / 100])

    for reported in (counted, uncounted):
        assert list(dict.fromkeys(each.done for each in reported)) == [500, 1_000, 1_200]
    assert {each.total for each in counted} == {1_200}
    assert {each.total for each in uncounted} == {None}


def open_ranges(client: WireClient) -> list[HashRange]:
    shards = WireStreamAdmin(client, "flights").list_shards()
    return sorted((each.hash_range for each in shards if each.is_open), key=lambda each: each.start)


def test_a_stream_is_made_once_and_active_when_the_call_returns(stream):
    assert WireStreamAdmin(stream[1], "flights").summary().status == "ACTIVE"
    assert not make_stream(stream[0], "flights", 1)
    assert len(open_ranges(stream[1])) == 1


def test_a_stream_that_never_becomes_active_ends_the_wait(monkeypatch):
    monkeypatch.setattr("kclrun.local.filling._ACTIVE_MAX_S", 0.0)

    with served(HttpServer(Kinesis(KinesisSettings(settle_s=3600.0), b"s" * 32), None)) as url:
        endpoint = WireEndpoint(url, "eu-west-1", "eu-west-1")
        with pytest.raises(Unavailable, match="stream slow is still CREATING"):
            make_stream(endpoint, "slow", 1)


def test_the_stream_is_resharded_after_the_named_shares_of_the_source(stream):
    """A pause counts as an item of the source, and is not a record."""
    endpoint, client = stream
    steps = (
        Reshard(0.2, split=0),
        Reshard(0.6, split=1),
        Reshard(0.6, merge=0),
        Reshard(1.0, merge=0),
    )
    order = FillOrder(endpoint, "flights", "module:function", (), reshard=steps)
    source = [("k", b"%d" % number) for number in range(4)]
    source.insert(1, PAUSE / 10)

    report = Filler(order).fill(lambda: source)

    assert report == FillReport(user_records=4, records=4, reshards=4)
    assert open_ranges(client) == [HashRange(0, HASH_KEY_MAX)]
    shards = WireStreamAdmin(client, "flights").list_shards()
    counts = {each.shard_id[-1]: len(_records(client, each.shard_id)) for each in shards}
    assert {number: count for number, count in counts.items() if count} == {"0": 1, "2": 1, "5": 2}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (Reshard(0.0, split=1), "cannot split open shard 1: there are 1"),
        (Reshard(0.0, merge=0), "cannot merge open shard 0: there are 1"),
    ],
)
def test_a_shard_that_is_not_there_cannot_be_resharded(stream, step, said):
    order = FillOrder(stream[0], "flights", "module:function", (), reshard=(step,))

    with pytest.raises(SettingsError, match=said):
        Filler(order).fill(lambda: [("k", b"x")])


@pytest.mark.parametrize(
    ("whole", "at"),
    [(HashRange(0, HASH_KEY_MAX), 2**127), (HashRange(4, 7), 6), (HashRange(4, 8), 6)],
)
def test_a_range_is_cut_in_its_middle(whole, at):
    assert middle(whole) == at


def test_records_leave_at_their_rate_and_not_later(stream):
    endpoint, client = stream
    order = FillOrder(endpoint, "flights", "module:function", (), rate=100)
    began = time.monotonic()
    sent_before = []

    def source() -> Iterator[tuple[str, bytes]]:
        for number in range(20):
            sent_before.append(len(_records(client)))
            yield "k", b"%d" % number

    Filler(order).fill(source)

    assert time.monotonic() - began >= 0.2
    assert sent_before[0] == 0
    assert sent_before[-1] > 0, "a tenth of a second is not waited for a whole request"
    assert [record.data for record in _records(client)] == [b"%d" % n for n in range(20)]


def test_user_records_travel_in_aggregates_where_that_is_asked_for(stream):
    order = FillOrder(stream[0], "flights", "module:function", (), aggregate=1.0)

    report = Filler(order).fill(lambda: [("k", b"x")] * 100)

    assert (report.user_records, report.reshards) == (100, 0)
    assert report.records < 10


GOOD, BAD = "def good():\n    return [('k', b'x')]\n", "def bad():\n    raise OSError('planted')\n"


@pytest.mark.parametrize(
    ("source", "endpoint", "code", "said"),
    [
        ("own:good", None, 0, ""),
        ("own:bad", None, 78, "OSError: planted\nThe fill stopped: own:bad raised\n"),
        ("own:none", None, 78, "The fill stopped: "),
        ("own:good", "http://127.0.0.1:1", 69, "The fill stopped: "),
    ],
)
def test_a_fill_is_a_process_that_says_how_it_ended(stream, tmp_path, source, endpoint, code, said):
    (tmp_path / "own.py").write_text(GOOD + BAD)
    target = stream[0] if endpoint is None else WireEndpoint(endpoint, "eu-west-1", "eu-west-1")
    order = msgspec.json.encode(FillOrder(target, "flights", source, (str(tmp_path),)))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "kclrun.local.filling"], **pipes) as filling:
        filling.stdin.write(order + b"\n")
        filling.stdin.flush()  # and stays open: its end would be the end of the run

        assert filling.wait(HUNG_S) == code
        lines = filling.stdout.read().splitlines()
        errors = filling.stderr.read().decode()

    assert said in errors
    report = {"type": "report", "user_records": 1, "records": 1, "reshards": 0}
    # On a busy machine the one record takes long enough for a report of the progress.
    reported = [each for each in map(json.loads, lines) if each["type"] != "filling"]
    assert reported == ([report] if code == 0 else [])


def test_a_fill_ends_when_its_run_does(tmp_path):
    (tmp_path / "own.py").write_text("import time\ndef endless():\n    time.sleep(600)\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # It takes connections and answers nothing, so that only the end of the run ends the fill.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        subprocess.Popen([sys.executable, "-m", "kclrun.local.filling"], **pipes) as filling,
    ):
        endpoint = WireEndpoint(f"http://127.0.0.1:{silent.getsockname()[1]}", "r", "r")
        order = FillOrder(endpoint, "s", "own:endless", (str(tmp_path),))
        filling.stdin.write(msgspec.json.encode(order) + b"\n")
        filling.stdin.close()

        assert filling.wait(HUNG_S) == 75
