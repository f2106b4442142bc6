"""An application on an EC2 instance of an autoscaling group, from its launch hook to its end."""

import json
import signal
import socket
import time
from urllib.request import urlopen

import pytest

from tests.patience import HUNG_S, until
from tests.processes.fleet_rig.times import MEASURES
from tests.processes.instance_rig.group import LAUNCH_HOOK, TERMINATION_HOOK

pytest_plugins = (
    "tests.processes.ledger_rig.fixtures",
    "tests.processes.instance_rig.fixtures",
)

LAUNCHED = f"CompleteLifecycleAction {LAUNCH_HOOK}"
BEAT = f"RecordLifecycleActionHeartbeat {TERMINATION_HOOK}"
COMPLETED = f"CompleteLifecycleAction {TERMINATION_HOOK}"


@pytest.mark.long
def test_an_instance_lives_from_its_launch_hook_to_its_end_and_nothing_is_lost_or_doubled(
    embedded_aws, application, on_instance, metadata, group, producer
):
    """Machine a is a spot instance; b, elsewhere, has its leases afterwards."""
    stream = embedded_aws.stream(shards=4)
    a = on_instance(stream, machine="a", log={"level": "info"})
    b = application(stream, machine="b")
    source = producer(stream, 10**6, seed=31, rate=600).start()

    started = time.monotonic()
    a.start()
    until(lambda: group.state == "InService", why=a.last_words)
    b.start()
    a.until(lambda: a.lease_pids() and b.lease_pids())
    a.until_delivered(len(a.ledger.delivered) + 1_000)
    noticed = time.monotonic()
    metadata.notice_interruption(in_s=120.0)
    a.until(lambda: a.of("lifecycle_awaited"))
    drained = time.monotonic()
    assert a.process.poll() is None, "it stays for the group"
    assert a.lease_pids() == []
    group.end()
    ended = time.monotonic()
    assert a.process.wait(HUNG_S) == 0
    left = time.monotonic()
    a.until_delivered(len(a.ledger.delivered) + 1_000)
    source.stop()
    b.until_all_delivered(source)
    assert b.stop() == 0

    quiet_s = _seconds_between(a, "instance_notice", "lifecycle_awaited")
    print(
        f"\nlaunch: start to hook completed {group.instant_of(LAUNCHED) - started:.2f} s"
        f"\nspot: notice published to drained {drained - noticed:.2f} s"
        f" (of it, noticed to drained {quiet_s:.2f} s)"
        f"\nend: Terminating:Wait to hook completed {group.instant_of(COMPLETED) - ended:.2f} s,"
        f" to exit {left - ended:.2f} s"
    )
    assert group.state == "Terminated"
    assert [name for name, _ in group.history] == [
        *("Pending:Wait", LAUNCHED, "InService", "Terminating:Wait", COMPLETED, "Terminated")
    ]
    assert [line["hook"] for line in a.of("lifecycle_completed")] == [LAUNCH_HOOK, TERMINATION_HOOK]
    assert a.of("manager_stopped")[-1]["reason"] == "drained"
    a.judged(source)


def _seconds_between(app, first, last):
    """By the clock of the log."""
    at = [app.of(event)[0]["ts"] for event in (first, last)]
    minutes_and_seconds = [float(ts[14:16]) * 60 + float(ts[17:23]) for ts in at]
    return (minutes_and_seconds[1] - minutes_and_seconds[0]) % 3600


@pytest.mark.slow
def test_a_group_that_ends_the_instance_waits_for_the_batch_and_is_asked_for_time(
    embedded_aws, on_instance, group, producer
):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(stream, options={"batch_s": 6}, fetch={"batch_max": 400})
    source = producer(stream, 1_200, seed=32).start()
    source.join()
    app.start()
    until(lambda: group.state == "InService", why=app.last_words)
    # One batch is over, so the next one has begun.
    app.until_delivered(400)

    group.end()

    assert app.process.wait(HUNG_S) == 0
    assert group.state == "Terminated"
    assert group.instant_of("Terminating:Wait") < group.instant_of(BEAT)
    assert len(app.of("lifecycle_heartbeat")) >= 1
    batches = app.ledger.read().batches
    assert len(batches) >= 2
    assert group.instant_of(COMPLETED) > batches[-1].at + 6
    assert all("leaseOwner" not in row for row in embedded_aws.rows(app.table).values())


@pytest.mark.slow
def test_a_grace_shorter_than_a_batch_cuts_it_short_and_lets_the_instance_go(
    embedded_aws, on_instance, group, producer
):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(stream, options={"hang": "key-7:3"}, shutdown={"grace": "2s"})
    source = producer(stream, 2_000, seed=33).start()
    source.join()
    app.start()
    until(lambda: group.state == "InService", why=app.last_words)
    app.until(lambda: app.ledger.pids)

    group.end()

    assert app.process.wait(HUNG_S) == 75
    assert group.state == "Terminated"


@pytest.mark.slow
def test_a_spot_instance_leaves_before_its_end_whatever_the_grace(
    embedded_aws, on_instance, metadata, group, producer
):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(
        stream,
        options={"hang": "key-7:3"},
        shutdown={"grace": "1h"},
        instance={"watch": True},
    )
    source = producer(stream, 2_000, seed=34).start()
    source.join()
    app.start()
    app.until(lambda: app.ledger.pids)

    metadata.notice_interruption(in_s=15.0)

    # The grace is an hour; what it was cut to is a unit test.
    assert app.process.wait(HUNG_S) == 75
    assert group.asked == [], "no hook was named"


@pytest.mark.slow
def test_throttled_calls_are_repeated_and_a_lost_answer_is_no_failure(
    embedded_aws, on_instance, group
):
    stream = embedded_aws.stream(shards=1)
    group.failures.extend([(400, "Throttling"), None])
    app = on_instance(stream).start()

    until(lambda: app.of("lifecycle_completed"), why=app.last_words)

    assert group.state == "InService"
    events = [line["event"] for line in app.lines()]
    assert events.count("service_unreachable") == events.count("service_back") == 1
    assert app.of("lifecycle_completed")[0]["attempts"] == 3
    assert app.stop() == 0


@pytest.mark.slow
def test_hooks_that_are_gone_hold_nothing_up(embedded_aws, on_instance, group):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(
        stream,
        instance={"group": "orders", "launch_hook": "none", "termination_hook": "none-either"},
    ).start()
    until(lambda: app.of("lifecycle_gone"), why=app.last_words)
    until(app.lease_pids, why=app.last_words)

    group.end()

    assert app.process.wait(HUNG_S) == 0
    assert [line["hook"] for line in app.of("lifecycle_gone")] == ["none", "none-either"]


@pytest.mark.slow
def test_whoever_stays_for_the_group_is_well_and_leaves_at_a_signal(
    embedded_aws, on_instance, metadata
):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(stream, observe={"listen": 0}).start()
    until(app.lease_pids, why=app.last_words)
    metadata.recommend_rebalance()
    until(lambda: app.of("lifecycle_awaited"), why=app.last_words)
    health = f"{app.of('endpoint_listening')[-1]['endpoint']}/health"
    until(lambda: _status(health) == "ok", why=lambda: _status(health))

    # It would wait for the group for ever.
    assert app.stop(signal.SIGTERM) == 0


def _status(url):
    with urlopen(url, timeout=HUNG_S) as answer:
        return json.load(answer)["status"]


@pytest.mark.slow
def test_metadata_that_hangs_is_reported_and_when_it_is_back_its_notice_counts(
    embedded_aws, on_instance, metadata, group
):
    stream = embedded_aws.stream(shards=1)
    app = on_instance(stream).start()
    until(lambda: group.state == "InService", why=app.last_words)

    metadata.hang()
    until(lambda: app.of("service_unreachable"), why=app.last_words)
    group.end()
    metadata.expire_sessions()
    metadata.go_on()

    assert app.process.wait(HUNG_S) == 0
    assert group.state == "Terminated"
    assert app.of("service_back")[0]["operation"] == "look at the instance metadata"


@pytest.mark.slow
def test_outside_ec2_the_watch_costs_nothing_at_the_start(embedded_aws, application):
    """The metadata address swallows everything: each question there waits until its time-out.
    `KCLRUN_FLEET_TIMES=1` asserts that the first claim waits for none; the rest is always so."""
    took = {}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for watch in (False, "auto") * (4 if MEASURES else 1):
            if len(took) == 2 and costs_nothing(took):
                break
            stream = embedded_aws.stream(shards=1)
            app = application(stream, machine=stream, instance={"watch": watch})
            app.more_environment = {
                "AWS_EC2_METADATA_DISABLED": "false",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            }
            began = time.monotonic()
            app.start()
            until(lambda app=app: app.of("lease_claimed"), why=app.last_words)
            took.setdefault(watch, []).append(time.monotonic() - began)
            assert app.stop() == 0
            assert app.of("instance_watched") == []
            assert app.of("service_unreachable") == []

    print(f"\nstart to first claim: {took}")
    assert not MEASURES or costs_nothing(took)


def costs_nothing(took):
    """One time-out of a second in the way would show in each round; what else the machine does, in
    some."""
    return min(took["auto"]) < min(took[False]) + 0.9


@pytest.mark.slow
def test_a_machine_that_must_be_watched_and_has_no_metadata_says_so_and_works(
    embedded_aws, on_instance, metadata
):
    stream = embedded_aws.stream(shards=1)
    metadata.status = 404
    app = on_instance(stream, instance={"watch": True}).start()

    until(lambda: app.of("service_unreachable"), why=app.last_words)
    until(lambda: app.of("lease_claimed"), why=app.last_words)

    assert app.of("service_unreachable")[0]["operation"] == "look at the instance metadata"
    assert app.stop() == 0
