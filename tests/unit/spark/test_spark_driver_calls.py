"""How many calls the driver has under way at once: a service that takes its time must not make a
hundred shards wait for each other. Seen from the service, over real connections."""

import json
import queue
import socketserver
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.aws.endpoints import resolve_endpoint
from kclrun.aws.http.pool import CONNECTIONS_MAX
from kclrun.spark.offset_planner import CALLS_AT_ONCE, OffsetPlanner
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.planning.shard_cursor import AskListing
from kclrun.spark.requests import connected
from kclrun.spark.source import StreamReader
from tests.patience import HUNG_S

SHARDS = 100
ARN = "arn:aws:kinesis:us-east-1:123456789012:stream/slow"


class SlowKinesis(socketserver.ThreadingTCPServer):
    """Empty shards; a call for records takes 15 ms, as at AWS, and until `gathered` of them are
    under way at once, if they come within a minute. So does a call for an iterator at LATEST
    once records were asked for: the first one is for the service's time."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, gathered):
        super().__init__(("127.0.0.1", 0), Handler)
        self.gathered = gathered
        self.changed = threading.Condition()
        self.under_way = self.at_once_max = 0
        self.asked = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, operation, request):
        match operation:
            case "DescribeStreamSummary":
                return {"StreamDescriptionSummary": summary()}
            case "ListShards":
                return {"Shards": [shard(number) for number in range(SHARDS)]}
            case "GetShardIterator":
                if request["ShardIteratorType"] == "LATEST" and self.asked:
                    self.gathered = CALLS_AT_ONCE
                    self.be_slow(request["ShardId"])
                return {"ShardIterator": request["ShardId"]}
            case "GetRecords":
                self.be_slow(request["ShardIterator"])
                token = request["ShardIterator"]
                return {"Records": [], "NextShardIterator": token, "MillisBehindLatest": 0}
        raise AssertionError(operation)

    def be_slow(self, shard_id):
        with self.changed:
            self.under_way += 1
            self.at_once_max = max(self.at_once_max, self.under_way)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.at_once_max >= self.gathered, timeout=60):
                self.gathered = 0  # they will not come: the test fails, and need not take long
        time.sleep(0.015)
        with self.changed:
            self.under_way -= 1
            self.asked.add(shard_id)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        operation = self.headers["x-amz-target"].rpartition(".")[2]
        body = json.dumps(self.server.answer(operation, request)).encode()
        head = f"HTTP/1.1 200 OK\r\nDate: {formatdate(usegmt=True)}\r\n"
        self.wfile.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def summary():
    return {
        "StreamName": "slow",
        "StreamARN": ARN,
        "StreamStatus": "ACTIVE",
        "RetentionPeriodHours": 24,
        "StreamCreationTimestamp": 1_700_000_000.0,
        "EnhancedMonitoring": [],
        "OpenShardCount": SHARDS,
    }


def shard(number):
    width = 2**128 // SHARDS
    end = 2**128 - 1 if number == SHARDS - 1 else (number + 1) * width - 1
    return {
        "ShardId": f"shardId-{number:012d}",
        "HashKeyRange": {"StartingHashKey": str(number * width), "EndingHashKey": str(end)},
        "SequenceNumberRange": {"StartingSequenceNumber": str(10**20 + number)},
    }


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    # A call that is given up on a busy machine, and made again, would be counted twice.
    monkeypatch.setattr("kclrun.spark.requests.resolve_endpoint", patient_endpoint)
    servers = []

    def start(gathered):
        servers.append(SlowKinesis(gathered))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def patient_endpoint(*where):
    endpoint = resolve_endpoint(*where)
    return msgspec.structs.replace(endpoint, connect_timeout_s=HUNG_S, read_timeout_s=HUNG_S)


def settings_of(server, start=StartKind.EARLIEST):
    reached = StreamAddress(stream="slow", region="us-east-1", endpoint_url=server.url)
    return SourceSettings(address=reached, start=Start(start))


def test_the_source_asks_a_hundred_shards_in_two_rounds(slow):
    server = slow(CALLS_AT_ONCE)
    reader = StreamReader(settings_of(server))
    start = reader.initialOffset()

    while len(server.asked) < SHARDS:
        reader.latestOffset(start)
    reader.stop()

    assert server.at_once_max == CALLS_AT_ONCE
    assert 2 * CALLS_AT_ONCE >= SHARDS


def test_a_start_at_latest_makes_the_iterators_of_a_hundred_shards_in_two_rounds(slow):
    server = slow(0)
    reader = StreamReader(settings_of(server, StartKind.LATEST))
    reader.initialOffset()
    reader.stop()

    assert server.at_once_max == CALLS_AT_ONCE


def test_connections_bound_the_calls_whoever_asks(slow):
    server = slow(CONNECTIONS_MAX)
    connection = connected(settings_of(server).address)
    planner = OffsetPlanner(connection.reader, connection.admin, settings_of(server))
    start = planner.initial_offset()

    while len(server.asked) < SHARDS:
        planner.latest_offset(start)
    planner.close()

    assert server.at_once_max == CONNECTIONS_MAX


def test_a_planner_that_is_closed_waits_for_nothing_and_begins_no_further_call():
    began, ended, release = queue.SimpleQueue(), [], threading.Event()

    def list_shards():
        began.put(True)
        release.wait(5)
        ended.append(True)
        return ()

    settings = SourceSettings(address=StreamAddress(stream="s"), start=Start(StartKind.EARLIEST))
    admin = SimpleNamespace(list_shards=list_shards)
    planner = OffsetPlanner(None, admin, settings, calls_at_once=1)
    planner._asking.send([AskListing()] * 3)
    began.get()
    planner.close()

    assert ended == []
    release.set()
    planner._asking._pool.shutdown(wait=True)
    assert ended == [True]


def test_the_driver_and_an_executor_of_one_process_have_connections_of_their_own():
    reached = StreamAddress(stream="slow", region="us-east-1", endpoint_url="http://127.0.0.1:1")

    assert connected(reached) is connected(reached, CONNECTIONS_MAX)
    assert connected(reached, CALLS_AT_ONCE) is not connected(reached)
