"""`kclrun tail` against the embedded AWS: everything once, each key in order, ends as asked."""

import base64
import fcntl
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import defaultdict
from contextlib import ExitStack

import pytest

from kclrun.errors import Throttled
from kclrun.local.server import start_embedded
from kclrun.model.record import IteratorType, StartPoint
from kclrun.reading.readers import Arrived, StreamReaders
from kclrun.reading.starts import ShardStart
from tests.patience import HUNG_S
from tests.processes.cli_rig import Program, Site, ended

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
# Linux: what a pipe holds before its writer waits.
PIPE_BYTES = 65_536
# By fifty: so that each of many readers has to come twice.
PUT = 100


@pytest.fixture
def site_of(endpoint, tmp_path):
    return lambda shards: Site(tmp_path, endpoint, f"tail-{next(NUMBERS)}", shards)


@pytest.fixture
def tail():
    started = []

    def start(site, *arguments):
        started.append(Program("tail", "--config", site.config, *arguments))
        return started[-1]

    yield start
    for program in started:
        program.close()


def rows(first, last):
    """(key, text) pairs with growing numbers; the number tells the order within a key."""
    return [(f"key{number % 29}", str(number)) for number in range(first, last)]


def in_order_by_key(records):
    by_key = defaultdict(list)
    for record in records:
        by_key[record["partition_key"]].append(int(record["data"]))
    return all(numbers == sorted(numbers) for numbers in by_key.values())


def test_across_a_split_and_a_merge_every_record_comes_once_and_keys_keep_their_order(
    site_of, tail
):
    site = site_of(2)
    site.put(rows(0, 100))
    program = tail(site, "--from", "TRIM_HORIZON", "--json")
    program.until_lines(100)

    site.put(rows(100, 300), aggregate=True)
    lower, _ = site.open_shards()
    site.split(lower)
    site.put(rows(300, 500), aggregate=True)
    _, middle, upper = site.open_shards()
    site.merge(middle, upper)
    site.put(rows(500, 700))
    program.until_lines(700)

    assert program.end() == 0
    assert sorted(int(record["data"]) for record in program.records) == list(range(700))
    assert in_order_by_key(program.records)
    assert sum(record["aggregated"] for record in program.records) == 400
    assert len({record["shard"] for record in program.records}) == 5
    assert any(f"{lower.shard_id} has ended; shardId-" in line for line in program.reported)


def test_the_past_of_a_resharded_stream_is_read_parents_first(site_of):
    """All of it is there before the start: nothing but the lineage keeps the order."""
    site = site_of(1)
    site.put(rows(0, 200))
    for number in range(1, 4):
        site.split(site.open_shards()[-1])
        site.put(rows(number * 200, number * 200 + 200), aggregate=number % 2 == 0)
        first, second, *_ = site.open_shards()
        site.merge(first, second)

    code, out, _ = ended(
        "tail", "--config", site.config, "--from", "TRIM_HORIZON", "--json", "--max", 800
    )

    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert sorted(int(record["data"]) for record in records) == list(range(800))
    assert in_order_by_key(records)


def test_from_now_on_is_from_the_line_that_says_so(site_of, tail):
    site = site_of(3)
    site.put(rows(0, 50))
    program = tail(site, "--json")
    program.until_reported("Tailing")

    site.put(rows(50, 60))

    assert [int(record["data"]) for record in program.until_lines(10) and program.records]
    assert program.end(signal.SIGTERM) == 0
    assert sorted(int(record["data"]) for record in program.records) == list(range(50, 60))


def test_from_an_instant_shows_what_arrived_since(site_of):
    site = site_of(2)
    site.put(rows(0, 20))
    time.sleep(0.05)
    instant = time.time()
    site.put(rows(20, 40))
    shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(instant)) + f".{instant % 1:.3f}"[2:]

    code, out, _ = ended(
        "tail", "-c", site.config, "--from", f"{shown}Z", "--json", "--timeout", "3s"
    )

    assert code == 0
    assert sorted(int(json.loads(line)["data"]) for line in out.splitlines()) == list(range(20, 40))
    code, out, _ = ended("tail", "-c", site.config, "--from", "1h", "--json", "--max", "40")
    assert (code, len(out.splitlines())) == (0, 40)


def test_one_key_one_shard_one_position(site_of):
    site = site_of(2)
    site.put(rows(0, 290), aggregate=True)
    site.put(rows(290, 580))
    config = ("--config", site.config, "--from", "TRIM_HORIZON", "--json")

    code, out, _ = ended("tail", *config, "--key", "key7", "--max", 20)
    of_key = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [int(record["data"]) for record in of_key] == list(range(7, 580, 29))

    shard = of_key[0]["shard"]
    number = int(shard.removeprefix("shardId-"))
    last = of_key[-1]["sequence_number"]
    code, out, _ = ended(
        "tail", "-c", site.config, "--shard", number, "--from", last, "--max", 1, "--json"
    )
    assert code == 0
    assert json.loads(out) == of_key[-1]


def test_named_shards_are_read_to_their_end_and_then_the_tail_ends(site_of):
    site = site_of(2)
    site.put(rows(0, 100))
    (_, upper) = site.open_shards()
    site.split(upper)
    site.put(rows(100, 200))

    code, out, reported = ended(
        "tail", "-c", site.config, "--shard", upper.shard_id, "--from", "TRIM_HORIZON", "--json"
    )

    assert code == 0
    assert {json.loads(line)["shard"] for line in out.splitlines()} == {upper.shard_id}
    assert "came after it" in reported


def test_bytes_that_are_no_text_are_base64_and_a_person_sees_one_harmless_line(site_of):
    site = site_of(1)
    payload = b"\x1b[2J\xff\nforged\x00"
    site.call(
        "PutRecord",
        StreamName=site.aws.settings.stream,
        Data=base64.b64encode(payload).decode(),
        PartitionKey="k\x07ey",
    )
    arguments = ("tail", "-c", site.config, "--from", "TRIM_HORIZON", "--max", 1)

    _, out, _ = ended(*arguments, "--json")
    assert base64.b64decode(json.loads(out)["data"]) == payload
    assert json.loads(out)["encoding"] == "base64"
    _, out, _ = ended(*arguments)
    assert out.count("\n") == 1
    assert "k\\x07ey" in out
    assert out.endswith("\\x1b[2J\\xff\\nforged\\x00\n")


def test_a_reader_that_has_seen_enough_ends_it_quietly_also_on_a_silent_stream(site_of):
    site = site_of(1)
    site.put(rows(0, 5))
    command = [sys.executable, "-m", "kclrun", "tail", "-c", str(site.config)]
    process = subprocess.Popen(
        [*command, "--from", "TRIM_HORIZON"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    assert b"key0" in process.stdout.readline()
    process.stdout.close()

    reported = process.stderr.read()
    process.stderr.close()
    assert process.wait(HUNG_S) == 0
    assert b"Error" not in reported
    assert b"Traceback" not in reported


def test_a_pager_that_never_reads_on_does_not_keep_it_from_ending(site_of):
    """The first Ctrl-C waits for the line that is being written; the second one does not."""
    site = site_of(1)
    site.put([("key", "x" * 1_000)] * 2_000)
    command = [sys.executable, "-m", "kclrun", "tail", "-c", str(site.config)]
    process = subprocess.Popen(
        [*command, "--from", "TRIM_HORIZON"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        over = time.monotonic() + HUNG_S
        while unread_bytes(process.stdout) < PIPE_BYTES:
            assert time.monotonic() < over
            time.sleep(0.02)

        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(HUNG_S) == 130
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def unread_bytes(pipe):
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"    "))[0]


def test_more_readers_than_a_shard_allows_are_throttled_and_miss_nothing(tmp_path):
    """The service answers five reads a second and shard: six tails ask for more."""
    with start_embedded(limits=True) as embedded, ExitStack() as stack:
        site = Site(tmp_path, embedded.endpoint, "limited", 1)
        start = StartPoint(IteratorType.TRIM_HORIZON)
        shard = site.open_shards()[0].shard_id
        tails = [
            stack.enter_context(
                StreamReaders(
                    {shard: ShardStart((), start)},
                    Counting(site.aws.reader),
                    site.aws.stream,
                    follows=True,
                    patience_s=30,
                )
            )
            for _ in range(6)
        ]
        seen = [[] for _ in tails]
        put = 0
        # Back-offs are random: one of the six may come last for a long while.
        over = time.monotonic() + HUNG_S
        streams = [tail.events() for tail in tails]
        while any(len(each) < PUT for each in seen):
            assert time.monotonic() < over, [len(each) for each in seen]
            if put < PUT:
                site.put(rows(put, put + 50))
                put += 50
            for numbers, events in zip(seen, streams, strict=True):
                event = next(events)
                if isinstance(event, Arrived):
                    numbers += [int(record.data) for record in event.records]

    assert Counting.throttled > 0
    assert all(each == list(range(PUT)) for each in seen)


class Counting:
    """The reader, and how often the service refused for now."""

    throttled = 0

    def __init__(self, reader):
        self._reader = reader
        self.iterator = reader.iterator

    def fetch(self, iterator, limit):
        try:
            return self._reader.fetch(iterator, limit)
        except Throttled:
            Counting.throttled += 1
            raise


def test_a_service_that_stays_away_ends_the_tail_with_69(tmp_path, tail):
    with start_embedded() as embedded:
        site = Site(tmp_path, embedded.endpoint, "away", 2)
        program = tail(site)
        program.until_reported("Tailing")

    program.until_reported("fails and is tried again")
    assert program.wait() == 69
    assert any(
        "nothing was answered for 5 s (aws.start_timeout)" in line for line in program.reported
    )


def test_what_is_not_there_is_named(site_of, endpoint):
    site = site_of(1)
    code, _, reported = ended("tail", "-c", site.config, "--shard", "7")
    assert (code, "no shard shardId-000000000007" in reported) == (66, True)
    code, _, reported = ended(
        "tail", "--stream", "nowhere", "--endpoint", endpoint, "--region", "us-east-1"
    )
    assert (code, reported.startswith("Cannot tail: ")) == (66, True)
    code, _, reported = ended("tail", "-c", site.config, "--from", "4961")
    assert (code, "--shard" in reported) == (78, True)
    assert ended("tail")[0] == os.EX_USAGE
