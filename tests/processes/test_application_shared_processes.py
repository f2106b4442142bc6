"""Several leases in one process (`leases.per_process`): nothing is lost, only what the sharing
excuses comes twice, and what one shard does stays its own."""

import os
import signal

import pytest

from tests.processes.ledger_rig.deliveries import judge

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000
SHARED = {"per_process": 4}


def pids(app):
    """The process that began last on each shard."""
    return {shard: app.ledger.pid_of(shard) for shard in {m["shard"] for m in app.ledger.marks}}


def shared_pid(app, shards):
    """The one process of all shards, once all of them were begun in it."""
    app.until(lambda: len(pids(app)) == shards)
    (pid,) = set(pids(app).values())
    assert app.lease_pids() == [pid]
    return pid


def middle(source, shard):
    """A record in the middle of a shard: its key, and its number within the key."""
    records = source.put[shard]
    return records[len(records) // 2][1:]


def test_leases_share_a_process_through_reshards_and_their_lines_name_their_shards(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    app = application(stream, leases=SHARED, options={"says": True}).start()
    reshards = ((1500, "split", 0), (3000, "merge", 1))
    source = producer(stream, 5_000, seed=94001, rate=1500, reshards=reshards).start()

    shared_pid(app, 3)
    app.until_all_delivered(source)

    assert {m["shard"] for m in app.ledger.marks if m["what"] == "ended"}
    app.finish(source)
    assert app.lease_pids(with_orphans=True) == []
    assert not app.of("process_died")
    said = [line for line in app.of("printed") if line["text"].startswith("I am")]
    assert {line["shard"] for line in said} == set(source.put)
    for line in (*said, *app.of("logged")):
        assert line.get("text", line.get("message")) == f"I am {line['shard']}"


@pytest.mark.long
def test_a_killed_process_costs_its_leases_what_a_kill_costs_each_and_they_part(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    app = application(stream, leases=SHARED).start()
    source = producer(stream, 10**7, seed=94002, rate=1000).start()
    pid = shared_pid(app, 4)
    app.until_delivered(1000)

    os.kill(pid, signal.SIGKILL)

    app.until(lambda: len(set(pids(app).values()) - {pid}) == 4)
    app.finish(source, killed={pid}, cap=CAP)
    assert len(app.of("shared_process_died")) == 4
    assert not app.of("process_died"), "whose fault it was is not known"


@pytest.mark.slow
def test_a_record_that_kills_its_process_halts_its_shard_alone(embedded_aws, application, producer):
    stream = embedded_aws.stream(shards=3)
    source = producer(stream, 900, seed=94003).start()
    source.join()
    guilty = min(source.put)
    key, n = middle(source, guilty)
    app = application(stream, leases=SHARED, options={"crash": f"{key}:{n}"}).start()
    others = {number for shard, put in source.put.items() if shard != guilty for number, *_ in put}

    app.until(lambda: app.of("lease_halted"), timeout_s=60)
    app.until(lambda: others <= app.ledger.delivered)

    (halted,) = app.of("lease_halted")
    assert halted["shard"] == guilty
    assert {line["shard"] for line in app.of("process_died")} == {guilty}
    assert [line["deaths"] for line in app.of("process_died")] == [1, 2, 3, 4, 5, 6, 7]
    shared = {line["shard"] for line in app.of("shared_process_died")}
    assert shared == set(source.put), "they ran together, and were started apart"
    assert app.stop() == 0
    gone = {m["pid"] for m in app.ledger.marks if m["what"] == "began"}
    verdict = judge(source.put, app.ledger.read(), killed=gone, cap=CAP)
    assert all(fault.startswith(guilty) for fault in verdict.faults)


@pytest.mark.long
def test_a_shard_whose_code_raises_halts_and_its_neighbours_go_on_in_their_process(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    source = producer(stream, 900, seed=94004).start()
    source.join()
    guilty = min(source.put)
    key, n = middle(source, guilty)
    app = application(
        stream,
        leases=SHARED,
        options={"poison": f"{key}:{n}"},
        on_error={"retries": 2, "backoff": "100ms"},
    ).start()
    pid = shared_pid(app, 3)

    app.until(lambda: app.of("lease_halted"))

    assert [line["shard"] for line in app.of("lease_halted")] == [guilty]
    assert app.lease_pids() == [pid]
    app.cure.touch()
    done = app.cli("leases", "--config", str(app.config), "resume", guilty, "--yes")
    assert done.returncode == 0, done.stderr
    app.finish(source)


@pytest.mark.slow
def test_a_busy_shard_gets_a_process_of_its_own_at_a_commit_and_nothing_comes_twice(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    source = producer(stream, 10**7, seed=94005, rate=600).start()
    busy = "shardId-000000000001"
    app = application(stream, leases=SHARED, options={"slow": busy, "batch_s": 0.5}).start()
    pid = shared_pid(app, 3)

    app.until(lambda: pids(app)[busy] != pid, timeout_s=60)

    assert {line["shard"] for line in app.of("lease_too_busy")} == {busy}
    assert {p for shard, p in pids(app).items() if shard != busy} == {pid}
    assert len(app.lease_pids()) == 2
    app.finish(source)
    assert not app.of("lease_released")[:-3], "its row was never given away"


@pytest.mark.slow
def test_code_that_stands_still_ends_its_process_and_its_neighbours_are_not_fenced(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    app = application(
        stream,
        # The neighbours are given back within the failover: 2 s are too few on a busy machine.
        leases={**SHARED, "failover": "6s"},
        stall="15s",
        options={"wedges": {"key-0:0": "sleep"}},
    ).start()
    # Before there is a record: a lease that comes to a stalled process gets another one.
    pid = shared_pid(app, 3)
    source = producer(stream, 900, seed=94006).start()
    source.join()
    wedged = app.until(lambda: [mark for mark in app.ledger.marks if mark["what"] == "wedged"])
    app.cure.touch()
    guilty = wedged[0]["shard"]

    app.until(lambda: app.of("process_stalled"))

    (story,) = app.of("process_stalled")
    assert (story["shard"], story["process"]) == (guilty, pid)
    app.finish(source, killed={pid}, cap=CAP)
    assert len(app.of("process_stalled")) == 1
    reasons = [line["reason"] for line in app.of("process_exited")]
    assert len([each for each in reasons if f"its process with {guilty}" in each]) == 2
    assert not app.of("lease_lost")


@pytest.mark.long
def test_a_thread_that_an_ended_lease_leaves_running_ends_with_the_process_it_shared(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream, leases=SHARED, options={"thread": True}).start()
    source = producer(stream, 2_000, seed=94007, rate=1000, reshards=((800, "split", 0),)).start()
    pid = shared_pid(app, 2)

    app.until(lambda: app.of("shared_process_ended"))

    line = app.of("shared_process_ended")[0]
    assert line["process"] == pid
    assert "left-behind" in line["reason"]
    app.until(lambda: pid not in app.lease_pids())
    app.finish(source)
