"""The two processes of the embedded AWS: started, watched and ended. The second is one of Kinesis,
too: it starts in a fifth of the time that moto takes."""

import json
import os
import signal
import socket
import time
from urllib.parse import urlsplit

import psutil
import pytest

from kclrun.errors import SettingsError, Unavailable
from kclrun.local import server
from kclrun.local.server import NewStreams, start_embedded
from tests.patience import HUNG_S, until
from tests.support.tables import over_rows
from tests.unit.local.conftest import KEY, SECRET
from tests.unit.local.serving import code_of, post


@pytest.fixture(autouse=True, scope="module")
def light():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(server, "MOTO", server._KINESIS)
        yield


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def guarded(light, port):
    with start_embedded(
        port=port, credentials=(KEY, SECRET), limits=True, settle_s=600.0, stored_bytes_max=1_000
    ) as running:
        yield running


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_settings_reach_the_process(guarded, client):
    kinesis = client("kinesis", guarded.endpoint)
    kinesis.create_stream(StreamName="s", ShardCount=1)

    summary = kinesis.describe_stream_summary(StreamName="s")["StreamDescriptionSummary"]

    assert summary["StreamStatus"] == "CREATING"
    refused = ("ResourceNotFoundException", 400)
    assert code_of(kinesis.put_record, StreamName="s", Data=b"", PartitionKey="k") == refused
    for endpoint in (guarded.kinesis_endpoint, guarded.dynamodb_endpoint):
        status, _, body = post(endpoint, "Kinesis_20131202.ListStreams", b"{}")
        assert (status, json.loads(body)["__type"]) == (400, "MissingAuthenticationTokenException")


@pytest.mark.seconds
def test_each_subscription_that_was_taken_is_recorded_with_its_caller(
    tmp_path, client, monkeypatch
):
    record = tmp_path / "subscribed"
    monkeypatch.setenv("KCLRUN_LOCAL_SUBSCRIBED", str(record))
    with start_embedded() as running:
        kinesis = client("kinesis", running.endpoint)
        kinesis.create_stream(StreamName="s", ShardCount=1)
        arn = kinesis.describe_stream_summary(StreamName="s")["StreamDescriptionSummary"][
            "StreamARN"
        ]
        made = kinesis.register_stream_consumer(StreamARN=arn, ConsumerName="c")["Consumer"]
        wanted = {"ConsumerARN": made["ConsumerARN"], "ShardId": "shardId-000000000000"}
        start = {"StartingPosition": {"Type": "LATEST"}}
        kinesis.subscribe_to_shard(**wanted, **start)["EventStream"].close()
        refused = code_of(kinesis.subscribe_to_shard, **wanted, **start)

    (taken,) = map(json.loads, record.read_text().splitlines())
    assert refused[0] == "ResourceInUseException"
    assert taken.pop("caller").startswith("Boto3/")
    assert taken == {"stream": "s", "shard": "shardId-000000000000"}


@pytest.mark.seconds
def test_a_stream_is_made_at_once_and_changed_one_change_after_the_other(client):
    with start_embedded() as running:
        kinesis = client("kinesis", running.endpoint)
        kinesis.create_stream(StreamName="s", ShardCount=1)
        split = {"StreamName": "s", "NewStartingHashKey": str(2**126)}
        kinesis.split_shard(ShardToSplit="shardId-000000000000", **split)
        again = {"ShardToSplit": "shardId-000000000001"} | split | {"NewStartingHashKey": "99"}

        assert code_of(kinesis.split_shard, **again) == ("ResourceInUseException", 400)
        kinesis.put_record(StreamName="s", Data=b"x", PartitionKey="k")
        until(lambda: status_of(kinesis) == "ACTIVE")
        kinesis.split_shard(**again)


def status_of(kinesis):
    summary = kinesis.describe_stream_summary(StreamName="s")
    return summary["StreamDescriptionSummary"]["StreamStatus"]


def test_each_process_has_a_session_of_its_own_and_both_run(guarded):
    assert guarded.ended() is None
    assert [os.getsid(pid) for pid in guarded.pids] == list(guarded.pids)
    assert len(set(guarded.pids)) == 2


@pytest.mark.seconds
def test_a_process_that_ends_by_itself_is_named():
    with start_embedded() as running:
        os.kill(running.pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, running.pids[1], os.WEXITED | os.WNOWAIT)

        assert running.ended() == server.MOTO
        running.close()
        running.close()
    assert all(gone(pid) for pid in running.pids)


@pytest.mark.seconds
def test_a_process_that_does_not_heed_its_end_is_killed(monkeypatch):
    monkeypatch.setattr(server, "_END_MAX_S", 0.1)
    running = start_embedded()
    for pid in running.pids:
        os.kill(pid, signal.SIGSTOP)

    running.close()

    assert all(gone(pid) for pid in running.pids)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("_KINESIS", "kclrun.local.absent", r"absent ended while starting \(exit code 1\)"),
        ("START_MAX_S", 0.0, "kinesis_process was not ready within 0 s"),
    ],
)
def test_what_does_not_start_leaves_nothing_behind(monkeypatch, name, value, said):
    monkeypatch.setattr(server, name, value)
    before = psutil.Process().children()

    with pytest.raises(Unavailable, match=said):
        start_embedded()

    assert psutil.Process().children() == before


def test_a_process_finds_this_installation_before_all_others(monkeypatch):
    here = str(server.Path(server.__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert server._python_path() == f"{here}{os.pathsep}/elsewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert server._python_path() == here


def test_a_named_port_is_taken(guarded, port):
    assert guarded.endpoint == f"http://127.0.0.1:{port}"


def test_a_port_that_is_taken_is_a_settings_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(SettingsError) as refusal:
            start_embedded(port=port)

    assert f"127.0.0.1:{port}" in str(refusal.value)


@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "Cannot assign requested address"), ("unknown", "no such name"), (".x", "")],
)
def test_a_host_that_is_not_this_machine_is_a_settings_error(monkeypatch, host, reason):
    real = socket.getaddrinfo

    def found(name, *given, **named):
        if name == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return real(name, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(SettingsError, match=rf"cannot listen on {host}:0") as refusal:
        start_embedded(hosts=[host])

    assert reason in str(refusal.value)
    assert str(refusal.value).endswith("give an address or a name of this machine")


@pytest.mark.seconds
def test_it_listens_at_the_first_host_and_may_be_called_by_each():
    with start_embedded(hosts=["127.0.0.2", "kinesis"]) as running:
        assert running.endpoint.startswith("http://127.0.0.2:")
        assert running.is_on_loopback
        for host, status in (("127.0.0.2", 200), ("kinesis:4567", 200), ("evil.example", 403)):
            target = "Kinesis_20131202.ListStreams"
            assert post(running.endpoint, target, b"{}", {"Host": host})[0] == status


@over_rows(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("192.0.2.1", "http://192.0.2.1:1"),
        ("::", "http://[::1]:1"),
        ("::1", "http://[::1]:1"),
    ],
)
def test_the_endpoint_is_one_that_this_machine_can_call(address, url):
    assert server._url(address, 1) == url


def test_without_the_extra_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(server, "_NEEDED", ("a_package_that_is_not_there",))

    with pytest.raises(SettingsError) as refusal:
        start_embedded()

    assert str(refusal.value) == (
        "aws.endpoint: embedded needs the extra: pip install 'kclrun[local]'"
    )


@pytest.mark.seconds
def test_closing_ends_both_at_once_though_connections_are_open():
    with start_embedded() as running:
        parts = [urlsplit(running.endpoint), urlsplit(running.dynamodb_endpoint)]
        connections = [socket.create_connection((part.hostname, part.port)) for part in parts]
        pids = running.pids
        began = time.monotonic()
        running.close()
        took_s = time.monotonic() - began
    for connection in connections:
        connection.close()

    assert took_s < HUNG_S, "it waited for the connections"
    assert all(gone(pid) for pid in pids)


def test_credentials_are_in_no_command_line_and_no_environment(guarded):
    for pid in guarded.pids:
        process = psutil.Process(pid)
        assert SECRET not in " ".join(process.cmdline())
        assert SECRET not in " ".join(process.environ().values())


def test_it_listens_on_loopback_only(guarded):
    for pid in guarded.pids:
        listening = [
            each.laddr.ip
            for each in psutil.Process(pid).net_connections()
            if each.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]


@pytest.fixture
def in_the_foreground(monkeypatch):
    """`run_local` in this process; `once_started` is called between its start and its wait."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    pids = []

    def run(once_started, **given):
        def start(**settings):
            running = start_embedded(**settings)
            pids.extend(running.pids)
            once_started(running)
            return running

        monkeypatch.setattr(server, "start_embedded", start)
        return server.run_local(0, limits=False, credentials=None, **given)

    yield run
    for number, handler in former.items():
        signal.signal(number, handler)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


@pytest.mark.seconds
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_it_says_what_is_ready_and_ends_with_zero(
    in_the_foreground, number, capsys
):
    streams = NewStreams({"orders": 2, "returns": 1} if number == signal.SIGTERM else {})

    assert in_the_foreground(lambda _: os.kill(os.getpid(), number), streams=streams) == 0

    ready, *more = capsys.readouterr().out.splitlines()
    assert ready.startswith(
        "Kinesis, DynamoDB with its streams, CloudWatch, S3, SQS, SNS and Firehose at http://127.0.0.1:"
    )
    assert more == (
        ["Streams in us-east-1: orders (shards: 2), returns (shards: 1)"] if streams.shards else []
    )


@pytest.mark.seconds
def test_what_other_machines_reach_is_said_to_be_open(in_the_foreground, capsys):
    def stop(running):
        running.is_on_loopback = False
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_the_foreground(stop) == 0
    assert "--credentials KEY:SECRET" in capsys.readouterr().err


@pytest.mark.seconds
def test_in_the_foreground_it_ends_when_one_of_its_processes_does(in_the_foreground, capsys):
    def kill(running):
        os.kill(running.pids[1], signal.SIGKILL)
        os.waitid(os.P_PID, running.pids[1], os.WEXITED | os.WNOWAIT)

    assert in_the_foreground(kill) == 69
    assert capsys.readouterr().err == (
        "kclrun.local.kinesis_process has ended; its messages are above.\n"
    )
