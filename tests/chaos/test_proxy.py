"""The fault proxy over real sockets: each fault does what its name says, and nothing else."""

import json
import socket
import threading
import time
import zlib
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from kclrun.local.server import start_embedded
from tests.chaos.faults import Fault
from tests.chaos.proxy import Door
from tests.chaos.proxy_process import ProxyProcess
from tests.patience import HUNG_S, until
from tests.support.clients import ONCE, client_of

KEYS = ("AKIAEXAMPLEEXAMPLE", "secret-of-the-test")
BODY = json.dumps({"Key": {"leaseKey": {"S": "shard-1"}}}).encode()


class CountingService:
    """Answers each request with its number and the body it was given."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, client.makefile("rwb") as file:
            while file.readline():
                length = 0
                while (line := file.readline()) != b"\r\n":
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = file.read(length)
                self.seen.append(body)
                answer = b"%d:" % len(self.seen) + body
                file.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
                file.flush()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def service():
    service = CountingService()
    yield service
    service.close()


@pytest.fixture
def proxied(tmp_path):
    """Makes a proxy of one door, "a", before a port."""
    made = []

    def make(port, *faults):
        proxy = ProxyProcess([Door("a", port)], seed=1, notes_path=tmp_path / "notes")
        made.append(proxy)
        proxy.begin()
        proxy.foresee(faults)
        return proxy

    yield make
    for proxy in made:
        proxy.close()


def ask(proxy, operation="UpdateItem", service="DynamoDB_20120810", body=BODY):
    """All that comes back on one connection, until it is closed or an answer is complete."""
    port = int(proxy.urls["a"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=HUNG_S) as client:
        head = f"POST / HTTP/1.1\r\nHost: x\r\nX-Amz-Target: {service}.{operation}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while True:
            try:
                piece = client.recv(1 << 16)
            except ConnectionResetError:
                return received
            received += piece
            if not piece or is_complete(received):
                return received


def is_complete(received):
    head, end, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end) and len(body) == int(lengths[0].partition(b":")[2])


def always(kind, **more):
    return Fault(kind=kind, duration_s=60.0, **more)


def test_what_no_fault_concerns_passes_unchanged(service, proxied):
    proxy = proxied(service.port, always("cut_before", operations=("Scan",)))

    assert ask(proxy).endswith(b"\r\n\r\n1:" + BODY)
    assert service.seen == [BODY]
    assert proxy.read() == []
    assert proxy.passed() == 1


ANSWERED = b"HTTP/1.1 200 OK"
# What comes back, and how often the service was asked.
DEEDS = {
    "cut_before": (lambda got: got == b"", 0),
    "stall": (lambda got: got == b"", 0),
    "cut_after": (lambda got: got == b"", 1),
    "cut_amid": (lambda got: got.startswith(ANSWERED) and not is_complete(got), 1),
    "repeat": (lambda got: b"\r\n\r\n2:" in got, 2),
    "fail": (lambda got: got.split()[1] in {b"500", b"503"}, 0),
    "fail_after": (lambda got: got.split()[1] in {b"500", b"503"}, 1),
}


@pytest.mark.parametrize("kind", DEEDS)
def test_a_fault_leaves_done_and_says_what_its_name_promises(service, proxied, kind):
    is_right, done = DEEDS[kind]
    seconds = {"seconds": 0.1} if kind == "stall" else {}

    assert is_right(ask(proxied(service.port, always(kind, **seconds))))
    assert service.seen == [BODY] * done


def test_an_echo_comes_after_the_answer(service, proxied):
    assert b"\r\n\r\n1:" in ask(proxied(service.port, always("echo", seconds=0.3)))
    assert service.seen == [BODY]
    until(lambda: service.seen == [BODY, BODY])


@pytest.mark.parametrize(
    ("service_name", "operation", "codes"),
    [
        ("DynamoDB_20120810", "UpdateItem", {"ProvisionedThroughputExceededException",
                                             "RequestLimitExceeded", "ThrottlingException"}),
        ("Kinesis_20131202", "GetRecords", {"ProvisionedThroughputExceededException",
                                            "KMSThrottlingException"}),
        ("Kinesis_20131202", "ListShards", {"LimitExceededException", "ThrottlingException"}),
    ],
)  # fmt: skip
def test_a_throttle_is_worded_as_its_service_words_it(
    service, proxied, service_name, operation, codes
):
    proxy = proxied(service.port, always("throttle"))

    heads, found = set(), set()
    for _ in range(30):
        head, _, body = ask(proxy, operation, service_name).partition(b"\r\n\r\n")
        assert f"x-amz-crc32: {zlib.crc32(body)}".encode() in head
        heads.add(head.split()[1])
        found.add(json.loads(body)["__type"].rpartition("#")[2])
    assert heads == {b"400"}
    assert found == codes
    assert service.seen == []


def test_only_get_records_finds_its_iterator_expired(service, proxied):
    proxy = proxied(service.port, always("expire"))

    assert b"ExpiredIteratorException" in ask(proxy, "GetRecords", "Kinesis_20131202")
    assert ask(proxy, "GetShardIterator", "Kinesis_20131202").endswith(b"1:" + BODY)


def test_a_delay_and_a_sliced_answer_take_their_time_and_arrive_whole(service, proxied):
    for kind in ("delay", "slice"):
        proxy = proxied(service.port, always(kind, seconds=0.4))
        began = time.monotonic()
        received = ask(proxy)
        assert time.monotonic() - began >= 0.3
        assert is_complete(received)
        assert received.endswith(BODY)


def test_listings_come_in_pages_of_two(service, proxied):
    received = ask(proxied(service.port, always("page")), "Scan", body=b'{"TableName": "t"}')

    assert json.loads(received.partition(b"\r\n\r\n1:")[2]) == {"TableName": "t", "Limit": 2}


def test_a_fault_has_its_time_its_door_and_its_share(service, proxied):
    proxy = proxied(
        service.port,
        Fault(kind="cut_before", start_s=60.0, duration_s=1.0),
        always("cut_before", doors=("b",)),
        always("throttle", share=0.5),
    )

    throttled = sum(b" 400 " in ask(proxy) for _ in range(100))
    assert 25 <= throttled <= 75
    proxy.read()
    assert proxy.counts == {"throttle": throttled}
    proxy.calm()
    assert b"200 OK" in ask(proxy)


def test_each_hit_is_noted_with_the_rows_it_concerned(service, proxied):
    proxy = proxied(service.port, always("fail"))
    transaction = {
        "TransactItems": [
            {"ConditionCheck": {"Key": {"leaseKey": {"S": "parent"}}}},
            {"Put": {"Item": {"leaseKey": {"S": "child"}}}},
        ]
    }

    ask(proxy)
    ask(proxy, "TransactWriteItems", body=json.dumps(transaction).encode())
    ask(proxy, "GetRecords", "Kinesis_20131202", body=b"{}")

    noted = [(hit["door"], hit["operation"], hit["kind"], hit["keys"]) for hit in proxy.read()]
    assert noted == [
        ("a", "UpdateItem", "fail", ["shard-1"]),
        ("a", "TransactWriteItems", "fail", ["parent", "child"]),
        ("a", "GetRecords", "fail", []),
    ]


def test_the_same_seed_hits_the_same_requests(service, proxied):
    drawn = []
    for _ in range(2):
        proxy = proxied(service.port, always("throttle", share=0.3))
        drawn.append([b" 400 " in ask(proxy) for _ in range(60)])

    assert drawn[0] == drawn[1]


def test_signed_requests_stay_valid_on_their_way(proxied):
    with start_embedded(credentials=KEYS) as embedded:
        proxy = proxied(int(embedded.endpoint.rpartition(":")[2]), always("slice", share=0.5))

        def client(secret):
            return client_of("kinesis", proxy.urls["a"], key=KEYS[0], secret=secret, config=ONCE)

        with pytest.raises(ClientError, match="InvalidSignature"):
            client("another").list_streams()
        for _ in range(4):
            assert client(KEYS[1]).list_streams()["StreamNames"] == []


def test_the_proxy_ends_with_its_parents_pipe(service, proxied):
    proxy = proxied(service.port)

    proxy.close()

    with pytest.raises(ConnectionError):
        ask(proxy)
    assert not Path(f"/proc/{proxy._process.pid}").exists()
