"""A processor that cannot go on halts its own shard, with the reason on the row, and no other."""

import pytest

from tests.processes.ledger_rig.deliveries import judge

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

BAD = ("key-7", 3)


def put_all(source):
    """Everything, before anybody reads; the shard that got the bad record, and its place there."""
    source.start().join()
    for shard, put in source.put.items():
        for place, (_, key, n) in enumerate(put):
            if (key, n) == BAD:
                return shard, place
    raise AssertionError("the producer did not put the bad record")


def others(source, shard):
    return {number for each, put in source.put.items() if each != shard for number, _, _ in put}


def test_a_poison_record_halts_its_shard_until_it_is_resumed_and_nothing_is_skipped(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    app = application(
        stream,
        options={"poison": f"{BAD[0]}:{BAD[1]}"},
        on_error={"retries": 2, "backoff": "100ms"},
        fetch={"batch_max": 50},
    )
    source = producer(stream, 8_000, seed=11)
    shard, place = put_all(source)

    app.start()
    app.until(lambda: app.of("lease_halted") and others(source, shard) <= app.ledger.delivered)

    (halted,) = app.of("lease_halted")
    assert halted["shard"] == shard
    first, again = app.of("processor_raised")
    assert first["raised_at"].startswith("ledger_processor.py:")
    number = source.put[shard][place][0]
    assert f" at {number}" in first["record"]
    assert "kclrun/worker" not in first["traceback"]
    assert "traceback" not in again
    assert halted["action"].endswith(f"kclrun leases --config {app.config} resume {shard} --yes")
    row = embedded_aws.rows(app.table)[shard]
    assert int(row["haltWaitingSince"]) < int(row["haltedAt"]), "they waited before it halted"
    assert "this record is poison" in row["haltReason"]
    assert "process_records failed 3 times" in row["haltReason"]
    before = {number for number, _, _ in source.put[shard][:place]}
    poisoned = {number for number, _, _ in source.put[shard]} & app.ledger.delivered
    assert poisoned <= before, "something was given beyond the record that failed"
    assert len(before - poisoned) < 50, "more than the failed batch was held back"

    listed = app.cli("leases", "--config", str(app.config)).stdout
    assert f"1 halted: {halted['action']}" in listed
    shown = app.cli("leases", "--config", str(app.config), "resume", shard)
    assert shown.returncode == 0
    assert "halted because" in shown.stdout
    assert "haltReason" in embedded_aws.rows(app.table)[shard], "it was only to show the plan"
    app.cure.touch()
    done = app.cli("leases", "--config", str(app.config), "resume", shard, "--yes")
    assert done.returncode == 0, done.stderr
    app.until_all_delivered(source)
    assert app.stop() == 0

    assert "haltReason" not in embedded_aws.rows(app.table)[shard]
    assert [line["shard"] for line in app.of("lease_resumed")] == [shard]
    app.judged(source)


@pytest.mark.slow
def test_a_job_that_runs_until_caught_up_ends_with_its_own_code_when_a_shard_is_halted(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(
        stream,
        options={"poison": f"{BAD[0]}:{BAD[1]}"},
        on_error={"retries": 1, "backoff": "100ms"},
    )
    source = producer(stream, 2_000, seed=12)
    shard, _ = put_all(source)

    app.start("--until", "caught-up")
    app.until(lambda: app.process.poll() is not None)

    assert app.process.returncode == 65
    assert others(source, shard) <= app.ledger.delivered
    (end,) = app.of("caught_up")
    assert end["halted"] == 1
    assert "haltReason" in embedded_aws.rows(app.table)[shard], "it stays halted for the next run"


@pytest.mark.slow
def test_a_halt_outlives_its_manager(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, options={"poison": f"{BAD[0]}:{BAD[1]}"}, on_error={"retries": 0})
    source = producer(stream, 4_000, seed=12)
    shard, _ = put_all(source)
    app.start()
    app.until(lambda: app.of("lease_halted"))
    assert app.stop() == 0

    app.start()

    app.until(lambda: app.of("lease_still_halted"))
    app.until(lambda: others(source, shard) <= app.ledger.delivered)
    assert len(app.of("processor_failed")) == 1, "the poison was given to user code again"
    assert app.stop() == 0
    verdict = judge(source.put, app.ledger.read())
    assert [fault for fault in verdict.faults if "never delivered" not in fault] == []


@pytest.mark.slow
def test_seven_deaths_at_one_record_halt_the_shard_where_no_other_host_can_try(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(
        stream, options={"crash": f"{BAD[0]}:{BAD[1]}"}, checkpoint={"every": "batch"}
    )
    source = producer(stream, 4_000, seed=13)
    shard, _ = put_all(source)

    app.start()
    app.until(
        lambda: app.of("lease_halted") and others(source, shard) <= app.ledger.delivered, 75.0
    )

    (halted,) = app.of("lease_halted")
    assert halted["shard"] == shard
    reason = embedded_aws.rows(app.table)[shard]["haltReason"]
    assert "died 7 times in a row" in reason
    assert "exit code 1" in reason
    # The checkpoint before the bad batch is a death with progress; seven without follow it.
    deaths = [line["deaths"] for line in app.of("process_died")]
    assert deaths[-7:] == [1, 2, 3, 4, 5, 6, 7]
    assert app.stop() == 0
    dead = {mark["pid"] for mark in app.ledger.read().marks if mark["shard"] == shard}
    verdict = judge(source.put, app.ledger, killed=dead, cap=2000)
    assert [fault for fault in verdict.faults if "never delivered" not in fault] == []
