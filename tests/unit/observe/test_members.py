"""The live detail of a lease: its last errors, who may be asked for it, and which answers count."""

import ipaddress
import socket
import threading

import msgspec
import pytest

from kclrun.model.time import WallTime
from kclrun.observe.endpoint import Answer, HttpEndpoint
from kclrun.observe.members import (
    ErrorBody,
    LastErrors,
    LeaseDetail,
    ask_for_detail,
    detail_of,
    place_of,
)
from kclrun.observe.sample import LeaseSample, ManagerSample
from tests.patience import HUNG_S
from tests.support.tables import over_rows

OWNER = "kclrun:a:host-1:1a2b"
LEASE = LeaseSample(shard="s0", state="running", records_total=7, records_per_s=2.5, note="a\nb")
SAMPLE = ManagerSample(application="orders", stream="x", owner=OWNER, uptime_s=1.0, leases=(LEASE,))
DETAIL = LeaseDetail(application="orders", owner=OWNER, shard="s0", state="running")


@over_rows(
    ("text", "networks", "place"),
    [
        ("127.0.0.1:9464", (), ("127.0.0.1", 9464)),
        ("10.1.2.3:9464", (), ("10.1.2.3", 9464)),
        ("172.31.0.1:9464", (), ("172.31.0.1", 9464)),
        ("[::1]:9464", (), ("::1", 9464)),
        ("[fd12::7]:9464", (), ("fd12::7", 9464)),
        ("100.64.0.9:9464", ("100.64.0.0/10",), ("100.64.0.9", 9464)),
        # The services of a machine of AWS, and of containers, at which credentials are.
        ("169.254.169.254:8080", ("0.0.0.0/0",), None),
        ("169.254.170.2:8080", (), None),
        ("[fd00:ec2::254]:8080", (), None),
        ("[::ffff:a9fe:a9fe]:8080", ("::/0",), None),
        # Elsewhere, and what is no address.
        ("8.8.8.8:9464", (), None),
        ("172.32.0.1:9464", (), None),
        ("100.64.0.9:9464", (), None),
        ("0.0.0.0:9464", (), None),
        ("[::]:9464", ("::/0",), None),
        ("10.0.0.1:80", (), None),
        ("10.0.0.1:99999", (), None),
        ("010.0.0.1:9464", (), None),
        ("localhost:9464", (), None),
        ("internal.example:9464", (), None),
        ("http://10.0.0.1:9464", (), None),
        ("user@10.0.0.1:9464", (), None),
        ("10.0.0.1:9464/admin", (), None),
        ("10.0.0.1:9464\r\nX: y", (), None),
        ("10.0.0.1", (), None),
        ("", (), None),
        (None, (), None),
    ],
)
def test_only_addresses_of_private_and_named_networks_are_asked(text, networks, place):
    assert place_of(text, tuple(map(ipaddress.ip_network, networks))) == place


def test_the_last_errors_of_a_shard_are_kept_with_their_stacks_and_without_repetitions():
    errors = LastErrors()
    first = {"error": "ValueError: bad", "raised_at": "mine.py:7", "traceback": "Traceback:\n  x"}
    errors.note("processor_raised", "s0", first | {"attempts": 1})
    errors.note("processor_raised", "s0", {"error": "ValueError: bad", "attempts": 2})
    errors.note("lease_claimed", "s0", {})
    errors.note("process_died", "", {"reason": "of no shard"})
    errors.note("process_died", "s1", {"reason": "killed by SIGKILL"})

    (only,) = errors.of("s0")

    assert (only.attempts, only.stack, only.raised_at) == (2, "Traceback:\n  x", "mine.py:7")
    assert errors.of("s1")[0].error == "killed by SIGKILL"
    assert errors.of("s2") == ()

    for number in range(100):
        fields = {"error": f"E{number} " + "x" * 100_000, "traceback": "y" * 100_000}
        errors.note("record_skipped", "t", fields)
        errors.note("process_died", f"t{number}", {"reason": "x"})
    kept = errors.of("t")
    assert errors.of("s0") == ()
    assert [each.error[:3] for each in kept] == ["E99", "E98", "E97", "E96", "E95"]
    assert all(len(each.stack) <= 8_000 and len(each.error) <= 1_000 for each in kept)


def test_the_detail_of_a_lease_is_that_of_the_sample_and_of_no_other_lease():
    errors = (ErrorBody(WallTime(1.0), "process_died", "killed"),)

    detail = detail_of(SAMPLE, "s0", errors)

    assert detail is not None
    assert (detail.owner, detail.state, detail.records_per_s) == (OWNER, "running", 2.5)
    assert (detail.records_total, detail.errors, detail.note) == (7, errors, "a\\nb")
    assert detail_of(SAMPLE, "s1", ()) is None
    assert detail_of(None, "s0", ()) is None


@over_rows(
    ("answer", "counts"),
    [
        (Answer(msgspec.json.encode(DETAIL)), True),
        (Answer(msgspec.json.encode(msgspec.structs.replace(DETAIL, owner="another"))), False),
        (Answer(msgspec.json.encode(msgspec.structs.replace(DETAIL, application="x"))), False),
        (Answer(msgspec.json.encode(msgspec.structs.replace(DETAIL, shard="s1"))), False),
        (Answer(msgspec.json.encode(DETAIL), status=302), False),
        (Answer(msgspec.json.encode(DETAIL), status=500), False),
        (Answer(msgspec.json.encode(DETAIL) + b" " * 300_000), False),
        (Answer(b'{"secret": "of another program"}'), False),
        (Answer(b"\xff\xfe"), False),
        (Answer(msgspec.json.encode(msgspec.to_builtins(DETAIL) | {"lag_ms": 10**400})), False),
        (Answer(b'{"more":' + b"[" * 100_000), False),
    ],
)
def test_only_an_answer_of_the_owner_itself_counts(answer, counts):
    asked = []

    def lease(query):
        asked.append(dict(query))
        return answer

    server = HttpEndpoint("127.0.0.1", 0, {"/lease": lease})
    try:
        place = place_of(server.published)
        found = ask_for_detail(place, "s0", application="orders", owner=OWNER)
    finally:
        server.close()

    assert found == (DETAIL if counts else None)
    assert asked == [{"shard": "s0"}]


@pytest.mark.seconds
@pytest.mark.parametrize("begins", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_never_ends_its_answer_is_given_up(begins):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def drip():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(begins)
                while not over.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            place = ("127.0.0.1", listener.getsockname()[1])
            assert ask_for_detail(place, "s0", application="orders", owner=OWNER) is None
        finally:
            over.set()
            thread.join(HUNG_S)


def test_an_endpoint_of_every_address_publishes_the_one_of_its_route():
    every, one = HttpEndpoint("0.0.0.0", 0, {}), HttpEndpoint("127.0.0.1", 0, {})
    try:
        assert one.published == one.url.removeprefix("http://")
        assert every.published is None or not every.published.startswith("0.0.0.0")
    finally:
        every.close()
        one.close()
