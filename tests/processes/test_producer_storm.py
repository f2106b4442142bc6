"""`kclrun.Producer` in a storm: throttles, lost replies, an outage, reshards, four threads, and a
server whose front is killed.

What is delivered is in the stream as the Java KCL reads it, where its `Delivery` says, and each key
is in order; what failed has its reason.
"""

import collections
import random
import socket
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest

import kclrun
from kclrun.aws.kinesis import PollingReader, WireStreamAdmin
from kclrun.aws.wire import WireClient
from kclrun.codec.kpl import effective_hash_key, open_aggregates
from kclrun.errors import OutcomeUnknown, Unavailable
from kclrun.local.filling import make_stream, wait_until_active
from kclrun.local.server import start_embedded
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.patience import HUNG_S, until
from tests.support.clients import client_of

THREADS, RECORDS, KEYS = 4, 3_000, 40


@pytest.fixture(scope="module")
def kinesis():
    with start_embedded(limits=True) as embedded:
        yield WireEndpoint(embedded.kinesis_endpoint, "us-east-1", "us-east-1")


class Faults:
    """A putter that loses requests and replies, and is away for a while."""

    def __init__(self, putter, chance):
        self._putter = putter
        self._chance = chance
        self.is_away = False

    def put(self, entries):
        fate = self._chance.random()
        if self.is_away or fate < 0.05:
            raise Unavailable("PutRecords: away", operation="PutRecords")
        results = self._putter.put(entries)
        if fate > 0.95:
            raise OutcomeUnknown("PutRecords: no reply", operation="PutRecords")
        return results


class Front:
    """A process between the producer and the service, which `kill` ends by SIGKILL, in the middle
    of whatever requests and replies. The next one has the same address."""

    def __init__(self, url):
        self._port = urlsplit(url).port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start()

    def _start(self):
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "tests.processes.entries.forwarding"),
                *(str(self._listener.fileno()), str(self._port)),
            ],
            pass_fds=[self._listener.fileno()],
        )

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._start()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._listener.close()


def reshard(api, admin, stream, chance):
    """Split one shard in the middle, or merge two neighbours."""
    wait_until_active(admin)
    shards = sorted(
        (shard for shard in admin.list_shards() if shard.is_open),
        key=lambda shard: shard.hash_range.start,
    )
    if chance.random() < 0.6 or len(shards) < 2:
        shard = chance.choice(shards)
        middle = (shard.hash_range.start + shard.hash_range.end) // 2
        api.split_shard(
            StreamName=stream, ShardToSplit=shard.shard_id, NewStartingHashKey=str(middle)
        )
    else:
        number = chance.randrange(len(shards) - 1)
        api.merge_shards(
            StreamName=stream,
            ShardToMerge=shards[number].shard_id,
            AdjacentShardToMerge=shards[number + 1].shard_id,
        )


def read_as_the_kcl(client, stream):
    """Each shard's user records with their place, but those outside of its hash keys."""
    reader = PollingReader(client, stream)
    found = []
    for shard in WireStreamAdmin(client, stream).list_shards():
        iterator, raw = reader.iterator(shard.shard_id, StartPoint(IteratorType.TRIM_HORIZON)), []
        while iterator is not None:
            page = reader.fetch(iterator, 10_000)
            raw += page.records
            iterator = None if page.millis_behind_latest == 0 else page.next_iterator
        found += [
            (shard.shard_id, record)
            for record in open_aggregates(raw)
            if not record.aggregated
            or effective_hash_key(record.partition_key, record.explicit_hash_key)
            in shard.hash_range
        ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("aggregates", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_delivered_is_there_once_read_and_in_order(kinesis, aggregates, seed):
    chance = random.Random(seed)
    stream = f"storm-{aggregates}-{seed}"
    make_stream(kinesis, stream, 2)
    api = client_of("kinesis", kinesis.url)
    client = WireClient(kinesis, lambda: WireCredentials("key", "secret"), service="kinesis")
    admin = WireStreamAdmin(client, stream)
    front = Front(kinesis.url)
    producer = kclrun.Producer(
        stream, endpoint_url=front.url, aggregates=aggregates, buffer_records_max=2_000
    )
    engine = producer._sender._engine
    faults = engine._putter = Faults(engine._putter, random.Random(seed + 100))
    deliveries = {}

    def put_all(thread):
        for number in range(RECORDS):
            key = f"{thread}-{number % KEYS}"
            data = f"{thread} {number}"
            deliveries[data] = producer.put(data.ljust(300), key)

    threads = [threading.Thread(target=put_all, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    reshards = 0
    while any(thread.is_alive() for thread in threads):
        done = producer.metrics().user_records
        reshard(api, admin, stream, chance)
        reshards += 1
        front.kill()
        faults.is_away = reshards == 2
        until(
            lambda before=done: (
                producer.metrics().user_records >= before + 1_500
                or faults.is_away
                or not any(thread.is_alive() for thread in threads)
            )
        )
        faults.is_away = False
    producer.flush(HUNG_S)
    producer.close()
    front.close()

    assert len(deliveries) == THREADS * RECORDS
    assert reshards >= 3
    places = {data: delivery.result(0) for data, delivery in deliveries.items()}
    found = read_as_the_kcl(client, stream)
    client.close()
    api.close()
    there = collections.defaultdict(set)
    for shard_id, record in found:
        there[record.data.decode().rstrip()].add((shard_id, record.sequence_number))
    assert set(there) == set(places)
    for data, place in places.items():
        assert (place.shard_id, place.sequence_number) in there[data]
    by_key = collections.defaultdict(list)
    for _, record in found:  # a parent's shard comes before its children's
        by_key[record.partition_key].append(int(record.data.split()[1]))
    for numbers in by_key.values():
        firsts = list(dict.fromkeys(numbers))
        assert firsts == sorted(firsts)
