"""Messages: each arrives as it was sent; no representation shows a secret; options have a limit."""

import os

import msgspec
import pytest

from kclrun.ipc import exit_codes
from kclrun.ipc.board import SLOT_BYTES, StartSpec, StatusSlot
from kclrun.ipc.channel import FRAME_BYTES_MAX, Channel, PeerGone, Sent
from kclrun.ipc.messages import (
    Begin,
    Drain,
    DumpStacks,
    Exited,
    FailoverChanged,
    Fork,
    Forked,
    ForkFailed,
    Quit,
    Ready,
    RenewCredentials,
    channel_of_launcher,
    channel_of_worker,
    channel_to_launcher,
    channel_to_worker,
    decode_report,
    encode_report,
)
from kclrun.model.output import OutputDestination
from kclrun.model.policies import CheckpointPolicy, ErrorPolicy, FetchPolicy, LogPolicy
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState

CREDENTIALS = WireCredentials(
    access_key="AKIAHIDDEN", secret_key="hidden-key", token="hidden-token"
)
ENDPOINT = WireEndpoint(
    url="https://kinesis.eu-west-1.amazonaws.com",
    region="eu-west-1",
    signing_region="eu-west-1",
    ca_bundle="/etc/ca.pem",
    proxies={"https": "http://user:hidden-password@proxy:3128"},
    connect_timeout_s=3.0,
    read_timeout_s=5.0,
)


def begin(**options):
    return Begin(
        StartSpec(
            application="flights",
            stream_name="flights",
            lease_key="shardId-000000000003",
            shard_id="shardId-000000000003",
            owner="kclrun:a:host:5f2c",
            seen_counter=17,
            place=3,
            incarnation=2,
            expires_instant=1234.5,
            failover_s=10.0,
            start_timestamp=1.6e9,
            hash_range_start="0",
            hash_range_end=str(2**128 - 1),
            processor="processors.flights:DelayByCarrier",
            import_paths=("/srv/app",),
            options=options,
            fetch=FetchPolicy(idle_s=1.0, buffer_bytes=2**24, batch_max=10_000, kpl_range="keep"),
            checkpoint=CheckpointPolicy(mode="auto", every_s=10.0, uncheckpointed_max=100_000),
            on_error=ErrorPolicy(retries=5, backoff_s=1.0),
            outputs=(OutputDestination(name="output", path="out/"),),
            table_name="flights",
            kinesis=ENDPOINT,
            dynamodb=ENDPOINT,
            credentials=CREDENTIALS,
            lock_path="/run/kclrun/5f2c.lock",
            log=LogPolicy(level="info", json=True),
            nice=5,
        )
    )


PLAIN = {"window": "15m", "nested": {"list": [1, 2.5, None, True, "é"]}, "deep": [[["x"]]]}


@pytest.fixture
def sockets():
    ours, theirs = Channel.pair()
    yield ours, theirs.detach()
    ours.close()


@pytest.mark.parametrize(
    "message",
    [
        begin(**PLAIN),
        Drain("deploy", 60.0),
        RenewCredentials(CREDENTIALS),
        FailoverChanged(5.0),
        DumpStacks(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_lease_process_hears_what_the_manager_said(sockets, message):
    manager, worker = channel_to_worker(sockets[0]), channel_of_worker(sockets[1])
    assert manager.send(message) == Sent()
    assert worker.receive(1) == message
    worker.close()
    assert manager.receive(1) == PeerGone()


def test_the_launcher_and_the_manager_understand_each_other(sockets):
    manager, launcher = channel_to_launcher(sockets[0]), channel_of_launcher(sockets[1])
    for request in (Fork(1), Quit()):
        manager.send(request)
        assert launcher.receive(1) == request
    pidfd = os.pidfd_open(os.getpid())
    launcher.send(Forked(1, 4711), [pidfd])
    message, fds = manager.receive_with_fds(1)
    assert message == Forked(1, 4711)
    assert len(fds) == 1
    for answer in (Ready(1), ForkFailed(1, "out of memory"), Exited(4711, 9)):
        launcher.send(answer)
        assert manager.receive(1) == answer
    launcher.close()
    for fd in (pidfd, *fds):
        os.close(fd)


def test_no_representation_shows_a_secret_or_an_option():
    command = begin(password="hidden-option")
    for shown in (command, command.spec, CREDENTIALS, ENDPOINT, RenewCredentials(CREDENTIALS)):
        assert "idden-" not in repr(shown)
        assert "HIDDEN" not in repr(shown)
        assert "idden-" not in str(list(shown.__rich_repr__()))
    assert "shardId-000000000003" in repr(command)


def test_options_may_fill_the_frame_to_its_last_byte(sockets):
    manager, worker = channel_to_worker(sockets[0]), channel_of_worker(sockets[1])
    rest = FRAME_BYTES_MAX - len(msgspec.msgpack.encode(begin(table="x" * 40_000)))
    largest = begin(table="x" * (40_000 + rest))

    assert manager.send(largest) == Sent()
    assert worker.receive(1) == largest
    worker.close()


def test_a_start_command_that_says_no_more_than_it_must_is_of_a_lease_taken_in_peace():
    spec = begin().spec
    optional = ("has_waited", "others_in_sight", "options", "nice", "import_paths")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    bare = type(spec)(**{name: fields[name] for name in fields if name not in optional})

    assert [getattr(bare, name) for name in optional] == [False, False, {}, 0, ()]
    # Kinesis allows five reads a second.
    assert bare.fetch.floor_s == 0.2
    assert ForkFailed(1, "no").errno == 0


def test_the_exit_codes_of_a_lease_process_stay_as_operators_know_them():
    assert exit_codes.NAMES == {
        0: "done",
        3: "unclaimed",
        4: "lost",
        5: "failed",
        6: "replaced",
        70: "bug",
        71: "host",
    }


def test_every_field_of_the_start_command_arrives():
    sent = begin(**PLAIN)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Begin)
    assert msgspec.structs.asdict(arrived.spec) == msgspec.structs.asdict(sent.spec)


def test_each_counter_and_position_that_a_row_may_have_fits_every_message_and_the_status():
    counter, position = 2**62 + 10**6, ExtendedSequenceNumber("1" * 129, 2**63 - 1)
    spec = msgspec.structs.replace(begin().spec, seen_counter=counter)
    report = reports.LeaseClaimed(counter, position)
    slot = StatusSlot(memoryview(bytearray(SLOT_BYTES)), 0)
    status = LeaseStatus(pid=1, incarnation=1, state=WorkerState.PROCESSING, counter=counter)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Begin(spec)), type=Begin).spec == spec
    assert decode_report(encode_report(report)) == report
    slot.publish(status)
    assert slot.read() == status
