"""A whole application as Prometheus, CloudWatch and a load balancer see it."""

import http.client
import json
import socket
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

import pytest
from botocore.config import Config
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.aws import MOTO, REGION, Aws
from tests.support.clients import client_of

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

OBSERVED = {"listen": 0}


@pytest.fixture(scope="module")
def embedded_aws():
    """One with CloudWatch."""
    aws = Aws(dynamodb=MOTO)
    yield aws
    aws.close()


class Watcher:
    """Asks the endpoint that the application says it listens on."""

    def __init__(self, app):
        self._app = app
        self.app_line = until(lambda: app.of("endpoint_listening"), why=app.last_words)[-1]
        self._address = urlsplit(self.app_line["endpoint"])

    def _ask(self, path):
        connection = http.client.HTTPConnection(
            self._address.hostname, self._address.port, timeout=HUNG_S
        )
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def health(self):
        status, body = self._ask("/health")
        return status, json.loads(body)

    def until_health(self, condition, timeout_s=30.0):
        def held():
            status, body = self.health()
            return (status, body) if condition(status, body) else None

        return until(held, timeout_s, every_s=0.2, why=lambda: f"{self.health()}")

    def series(self):
        """Each series of /metrics: {(name, shard or state or ''): value}."""
        _, text = self._ask("/metrics")
        return {
            (one.name, one.labels.get("shard") or one.labels.get("state") or ""): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }

    def until_series(self, condition, timeout_s=30.0):
        def held():
            series = self.series()
            return series if condition(series) else None

        return until(held, timeout_s, every_s=0.2, why=lambda: f"{self.series()}")


def total(series, name):
    return sum(value for (each, _), value in series.items() if each == name)


def published(aws, namespace, name, application):
    client = client_of(
        "cloudwatch", aws.embedded.dynamodb_endpoint, REGION, config=Config(read_timeout=HUNG_S)
    )
    now = datetime.now(UTC)
    try:
        points = client.get_metric_statistics(
            Namespace=namespace,
            MetricName=name,
            Dimensions=[{"Name": "Application", "Value": application}],
            StartTime=now - timedelta(hours=1),
            EndTime=now + timedelta(hours=1),
            Period=7200,
            Statistics=["SampleCount", "Sum", "Minimum", "Maximum"],
        )["Datapoints"]
    finally:
        client.close()
    return {
        "Sum": sum(point["Sum"] for point in points),
        "SampleCount": sum(point["SampleCount"] for point in points),
    }


def test_what_was_processed_is_what_prometheus_and_cloudwatch_are_reported(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    app = application(
        stream,
        aws={"endpoints": {"cloudwatch": embedded_aws.embedded.dynamodb_endpoint}},
        observe=OBSERVED | {"cloudwatch": {"namespace": stream}},
    ).start()
    source = producer(stream, 3_000, seed=21, reshards=[(1_000, "split", 0)]).start()
    watcher = Watcher(app)

    app.until_all_delivered(source)

    def shards_of(series):
        return {shard for name, shard in series if name == "kclrun_records_total"}

    # The ended parent's row stays for a minute, and nobody is missing for it.
    series = watcher.until_series(
        lambda series: (
            series.get(("kclrun_total_shards", "")) == 5
            and series[("kclrun_total_leases", "")] == 5
            and series[("kclrun_worker_leases", "")] == 4
            and total(series, "kclrun_records_total")
            == sum(len(put) for shard, put in source.put.items() if shard in shards_of(series))
        )
    )
    status, body = watcher.until_health(
        lambda status, body: (
            body["status"] == "ok" and {lease["state"] for lease in body["leases"]} == {"running"}
        )
    )
    shards = shards_of(series)
    assert app.stop() == 0

    assert status == 200
    assert {lease["shard"] for lease in body["leases"]} == shards
    assert series["kclrun_unclaimed_leases", ""] == 0
    assert series["kclrun_healthy", ""] == 1
    parent = sum(1 for shard in source.put if shard not in shards)
    assert parent == 1
    # A lag of 0 is what an application that is done has.
    assert {value for (name, _), value in series.items() if name == "kclrun_lag_seconds"} == {0.0}
    for name in ("records", "bytes", "millis_behind_latest", "worker_leases", "total_leases"):
        assert published(embedded_aws, stream, name, app.table)["SampleCount"] > 0, name
    assert published(embedded_aws, stream, "records", app.table)["Sum"] == 3_000
    assert app.of("metrics_not_published") == []


def test_lines_of_the_log_add_up_to_what_was_processed(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, observe={"cloudwatch": {"namespace": "shop", "via": "log"}}).start()
    source = producer(stream, 1_000, seed=23).start()
    app.until_all_delivered(source)
    assert app.stop() == 0

    written = [
        json.loads(line)
        for line in app.log_path.read_text().splitlines()
        if line.startswith('{"_aws":')
    ]
    assert {one["Application"] for one in written} == {app.table}
    assert sum(sum(one["records"]) for one in written if "records" in one) == 1_000
    assert app.of("metrics_not_published") == []


@pytest.mark.slow
def test_a_halted_shard_is_seen_and_no_reason_to_replace_the_machine(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(
        stream,
        observe=OBSERVED,
        options={"poison": "key-7:3"},
        on_error={"retries": 0},
    )
    source = producer(stream, 2_000, seed=22)
    source.start().join()
    app.start()
    watcher = Watcher(app)

    status, body = watcher.until_health(lambda status, body: body["status"] == "degraded")
    series = watcher.until_series(lambda series: ("kclrun_leases", "halted") in series)

    assert status == 200
    (halted,) = app.of("lease_halted")
    (reason,) = body["reasons"]
    assert reason["shard"] == halted["shard"]
    assert "halted: process_records failed once" in reason["text"]
    assert reason["text"].endswith(f" resume {halted['shard']} --yes")
    lags = {shard: lag for (name, shard), lag in series.items() if name == "kclrun_lag_seconds"}
    assert lags[halted["shard"]] > 0, "it counts on though nobody reads"
    later = watcher.until_series(
        lambda now: now[("kclrun_lag_seconds", halted["shard"])] > lags[halted["shard"]]
    )
    assert later["kclrun_leases", "halted"] == 1
    given = sum(len(put) for shard, put in source.put.items() if shard != halted["shard"])
    assert series["kclrun_records_total", halted["shard"]] < 1_000
    assert later["kclrun_records_total", next(s for s in lags if s != halted["shard"])] <= given
    assert series["kclrun_leases", "halted"] == 1
    assert series["kclrun_leases", "running"] == 1
    assert app.stop() == 0


@pytest.mark.slow
def test_a_machine_that_cannot_reach_its_table_is_unwell_until_it_can(embedded_aws, application):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, observe=OBSERVED, leases={"failover": "2s"}, stall="4s").start()
    watcher = Watcher(app)
    watcher.until_health(lambda status, body: body["status"] == "ok")

    with embedded_aws.outage("dynamodb"):
        status, body = watcher.until_health(lambda status, body: body["status"] == "failing")
    watcher.until_health(lambda status, body: body["status"] == "ok")

    assert status == 503
    failing = [reason["text"] for reason in body["reasons"]]
    assert any("scan the lease table: failing for" in text for text in failing), failing
    assert app.stop() == 0


@pytest.mark.long
def test_a_drain_is_seen_as_one_and_as_healthy(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=1)
    app = application(
        stream, observe=OBSERVED, options={"hang": "key-7:3"}, shutdown={"grace": "60s"}
    ).start()
    source = producer(stream, 1_000, seed=23).start()
    source.join()
    watcher = Watcher(app)
    app.until(lambda: app.ledger.delivered)

    app.process.terminate()
    status, body = watcher.until_health(lambda status, body: body["status"] == "draining")

    assert status == 200
    assert "a stop has been under way for" in body["reasons"][0]["text"]
    app.process.terminate()
    app.process.wait(HUNG_S)


@pytest.mark.long
def test_an_address_that_is_taken_ends_the_start_before_any_lease_is_taken(
    embedded_aws, application
):
    stream = embedded_aws.stream(shards=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = application(stream, observe={"listen": port}, log={"level": "debug"}).start()

        assert app.process.wait(HUNG_S) == 78

    assert f"observe.listen: cannot listen on 127.0.0.1:{port}" in app.log_path.read_text()
    assert app.of("lease_taken") == []
    assert app.lease_pids(with_orphans=True) == []


@pytest.mark.slow
def test_metrics_that_nobody_takes_hold_up_no_record_and_no_stop(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=1)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        # It accepts connections and never answers.
        port = silent.getsockname()[1]
        app = application(
            stream,
            aws={"endpoints": {"cloudwatch": f"http://127.0.0.1:{port}"}},
            observe={"cloudwatch": {}},
        ).start()
        source = producer(stream, 500, seed=24).start()
        app.until_all_delivered(source)
        # The last minute's metrics are given two seconds; it prints how long that was.
        began = time.monotonic()
        assert app.stop() == 0
        print(f"stopped after {time.monotonic() - began:.1f} s")
