"""DynamoDB or Kinesis stand still for a while: the application waits, says so once, and goes on."""

import os
import re
import signal
import time

import pytest

from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.gate import Gate

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

FAILOVER_S = 3.0
# Where a lease is to survive, though the machine be busy.
LONG_FAILOVER_S = 10.0
CAP = 2000
# At 800 a second, so that everybody has read again after the outage.
MORE = 800


@pytest.fixture
def embedded_aws():
    """One of its own: what stands still here must not stand still for others."""
    aws = Aws()
    yield aws
    aws.close()


@pytest.fixture
def gate(embedded_aws):
    gate = Gate(embedded_aws.embedded.kinesis_endpoint)
    yield gate
    gate.shut()


@pytest.fixture
def table_gate(embedded_aws):
    gate = Gate(embedded_aws.embedded.dynamodb_endpoint)
    yield gate
    gate.shut()


def last_for(seconds, app):
    """Let an outage last, looking at the application meanwhile."""
    ends = time.monotonic() + seconds
    app.until(lambda: time.monotonic() >= ends, seconds + 5.0)


def reported_lengths(app):
    return [line["outage_s"] for line in app.of("service_back")]


def begin(application, producer, stream, seed, failover_s=FAILOVER_S, **endpoints):
    app = application(stream, leases={"failover": f"{failover_s:g}s"}, aws={"endpoints": endpoints})
    app.start()
    app.until(lambda: len(app.of("lease_claimed")) >= 2)
    source = producer(stream, 10**7, seed=seed, rate=800).start()
    app.until_delivered(300)
    return app, source


@pytest.mark.slow
def test_a_lease_table_away_for_less_than_failover_costs_nothing(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app, source = begin(application, producer, stream, 21, LONG_FAILOVER_S)
    pids = app.lease_pids()

    with embedded_aws.outage("dynamodb"):
        last_for(LONG_FAILOVER_S / 4, app)

    app.until_delivered(len(app.ledger.delivered) + MORE)
    assert app.lease_pids() == pids, "a lease process was replaced"
    app.finish(source)
    assert app.of("lease_lost") == []


@pytest.mark.slow
def test_a_lease_table_away_for_longer_than_failover_is_waited_for(
    embedded_aws, application, producer
):
    app, source = begin(application, producer, embedded_aws.stream(shards=2), seed=22)
    before = app.ledger.pids

    with embedded_aws.outage("dynamodb"):
        last_for(3 * FAILOVER_S, app)
        quiet_from = max(batch.at for batch in app.ledger.read().batches)
        last_for(1.0, app)
        assert max(batch.at for batch in app.ledger.read().batches) == quiet_from, (
            "batches were begun after the fence"
        )

    app.until_delivered(len(app.ledger.delivered) + MORE, 60.0)
    app.finish(source, killed=before, cap=CAP)
    print(reported_lengths(app))
    warnings = app.of("service_unreachable")
    assert len(warnings) == len(app.of("service_back")) <= 3, warnings
    # It hung from the start: the next scan after that is half a failover later.
    assert max(reported_lengths(app)) >= 2 * FAILOVER_S


@pytest.mark.slow
def test_a_stream_that_answers_nobody_costs_no_lease(embedded_aws, application, producer):
    app, source = begin(application, producer, embedded_aws.stream(shards=2), seed=23)
    pids = app.lease_pids()

    source.pause()
    with embedded_aws.outage("kinesis"):
        last_for(1.5 * FAILOVER_S, app)
    source.resume()

    app.until_delivered(len(app.ledger.delivered) + MORE)
    assert app.lease_pids() == pids, "a lease process was replaced"
    app.finish(source)


@pytest.mark.slow
def test_a_stream_that_refuses_connections_is_reported_once_a_shard_with_its_length(
    embedded_aws, application, producer, gate
):
    stream = embedded_aws.stream(shards=2)
    app, source = begin(application, producer, stream, seed=24, kinesis=gate.url)
    pids = app.lease_pids()

    with gate.outage():
        last_for(1.5 * FAILOVER_S, app)

    app.until_delivered(source.total_put)
    assert app.lease_pids() == pids, "a lease process was replaced"
    app.finish(source)
    said = [(line["shard"], line["detail"]) for line in app.warned()]
    for shard in source.put:
        began, ended = [detail for key, detail in said if key == shard]
        assert "reading the shard fails and is tried again" in began
        length = re.search(r"works again after (\d+\.\d) s", ended)
        # From the first try that failed to the first that worked; a busy machine tries late.
        assert float(length[1]) >= FAILOVER_S / 2, ended


def test_a_lease_table_that_refuses_connections_is_reported_with_its_length(
    embedded_aws, application, producer, table_gate
):
    stream = embedded_aws.stream(shards=2)
    app, source = begin(application, producer, stream, 25, LONG_FAILOVER_S, dynamodb=table_gate.url)
    pids = app.lease_pids()

    with table_gate.outage():
        # Tries come often enough that one falls between the end of this and the fence.
        last_for(LONG_FAILOVER_S / 2, app)

    app.until_delivered(source.total_put + MORE)
    assert app.lease_pids() == pids, "a lease process was replaced"
    # What failed is told to work again, each by itself, with its next try.
    app.until(lambda: len(reported_lengths(app)) == len(app.of("service_unreachable")) > 0)
    app.finish(source)
    print(reported_lengths(app))
    assert len(app.warned()) == 2, "one a shard"


@pytest.mark.long
def test_without_its_lease_table_a_shard_is_read_on_up_to_the_cap_and_no_further(
    embedded_aws, application, producer, table_gate
):
    cap = 400
    stream = embedded_aws.stream(shards=2)
    app = application(
        stream,
        # The fence is far away: only the cap can stop the deliveries.
        leases={"failover": "10s"},
        aws={"endpoints": {"dynamodb": table_gate.url}},
        checkpoint={"every": "500ms", "uncheckpointed_max": cap},
        fetch={"batch_max": 70},
    )
    source = producer(stream, 10**7, seed=26, rate=2000).start()
    app.start()
    app.until_delivered(1000)

    with table_gate.outage():
        app.until(lambda: time.monotonic() - app.ledger.batches[-1].at > 1.0, 8.0)
        killed = app.lease_pids()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    verdict = app.finish(source, killed=killed, cap=cap)
    assert verdict.duplicates_after_one_kill_max > cap / 2
