"""`kclrun pause` and `resume` over a whole application: nothing is read meanwhile, none lost."""

import json
import urllib.request

import pytest

from tests.patience import HUNG_S

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)
pytestmark = pytest.mark.seconds


def paused(app):
    return {line["shard"] for line in app.of("lease_paused")}


def rows(embedded_aws, app):
    return embedded_aws.rows(app.table)


@pytest.mark.slow
def test_a_paused_application_keeps_its_leases_over_a_restart_and_reads_nothing_until_resumed(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, observe={"listen": 0})
    first = producer(stream, 2_000, seed=21)
    first.start().join()
    app.start()
    app.until_all_delivered(first)

    done = app.cli("pause", "--config", str(app.config), "--all", "--yes")
    assert done.returncode == 0, done.stderr
    app.until(lambda: len(paused(app)) == 2 and not app.lease_pids())
    before = app.ledger.delivered
    second = producer(stream, 2_000, seed=22)
    second.start().join()
    counters = {key: int(row["leaseCounter"]) for key, row in rows(embedded_aws, app).items()}
    app.until(
        lambda: all(
            int(row["leaseCounter"]) > counters[key] + 1
            for key, row in rows(embedded_aws, app).items()
        )
    )
    listed = json.loads(app.cli("leases", "--config", str(app.config), "--json").stdout)
    assert {line["state"] for line in listed} == {"paused"}
    endpoint = app.of("endpoint_listening")[-1]["endpoint"]
    with urllib.request.urlopen(f"{endpoint}/health", timeout=HUNG_S) as answer:
        health = json.load(answer)
    assert health["status"] == "degraded"
    assert {lease["state"] for lease in health["leases"]} == {"paused"}
    assert all("paused since" in reason["text"] for reason in health["reasons"])

    assert app.stop() == 0
    reported = len(app.of("lease_paused"))
    app.start()
    app.until(lambda: len(app.of("lease_paused")) == reported + 2)
    assert app.ledger.delivered == before, "records were read while the application was paused"

    done = app.cli("resume", "--config", str(app.config), "--all", "--yes")
    assert done.returncode == 0, done.stderr
    put = {number for each in second.put.values() for number, *_ in each}
    app.until(lambda: put <= app.ledger.delivered)
    assert app.stop() == 0
    assert len(app.of("lease_resumed")) == 2, app.last_words()
    assert not any("pausedAt" in row for row in rows(embedded_aws, app).values())


@pytest.mark.long
def test_a_pause_with_an_end_ends_by_itself(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=1)
    app = application(stream)
    app.start()
    app.until(lambda: app.of("lease_claimed"))

    app.cli("pause", "--config", str(app.config), "0", "--for", "6s", "--yes")
    app.until(lambda: len(paused(app)) == 1 and not app.lease_pids())
    source = producer(stream, 500, seed=23)
    source.start().join()

    app.until_all_delivered(source)
    assert len(app.of("lease_resumed")) == 1
    assert len(app.of("lease_claimed")) == 2
    assert app.stop() == 0
    app.judged(source)
