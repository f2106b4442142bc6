"""What stands still is noticed, ended, explained in one line and started again [L5]."""

import os
import signal
import time

import pytest

from tests.patience import HUNG_S
from tests.processes.ledger_rig.gate import Gate

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000
STALL_S = 4.0
PATIENCE_S = 4.0
QUICK = {"stall": f"{STALL_S:g}s", "leases": {"failover": "3s"}}
WAYS = ("sleep", "deadlock", "gil")


def wedged(app):
    return {mark["how"]: mark for mark in app.ledger.marks if mark["what"] == "wedged"}


def test_user_code_that_stands_still_is_ended_and_each_stall_is_one_story(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=3)
    source = producer(stream, 900, seed=61).start()
    source.join()
    middles = [records[len(records) // 2] for _, records in sorted(source.put.items())]
    wedges = {f"{key}:{n}": how for (_, key, n), how in zip(middles, WAYS, strict=True)}
    app = application(stream, **QUICK, options={"wedges": wedges}).start()
    app.until(lambda: len(wedged(app)) >= len(WAYS))
    app.cure.touch()
    victims = {mark["pid"] for mark in wedged(app).values()}

    app.until(lambda: len(app.of("process_stalled")) >= len(WAYS))

    stories = {line["process"]: line for line in app.of("process_stalled")}
    assert set(stories) == victims
    by_way = {how: stories[mark["pid"]] for how, mark in wedged(app).items()}
    for how in ("sleep", "deadlock"):
        assert by_way[how]["reason"] == "user code has not returned"
    assert "holds the GIL" in by_way["gil"]["reason"]
    for story in by_way.values():
        print(story)
        assert story["level"] == "error"
        assert story["waited_s"] >= STALL_S
        assert "SIGABRT" in story["action"]
        # The handler of Python looks at the frames of threads that run: rarely it ends so.
        assert story["status"] in {"killed by SIGABRT", "killed by SIGSEGV"}
    # The stacks that the stories speak of; of three processes at once, so in pieces.
    text = app.log_path.read_text(errors="replace")
    for function in ("sleep_for_ever", "lock_itself_out", "hold_the_gil"):
        assert function in text
    assert not app.of("process_killed")
    app.finish(source, killed=victims, cap=CAP)
    assert len(app.of("process_stalled")) == len(WAYS), "it was cured and stalled again"


@pytest.mark.slow
def test_a_stopped_process_is_ended_and_its_shard_is_read_again(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    source = producer(stream, 10**7, seed=62, rate=500).start()
    app = application(stream, **QUICK).start()
    app.until_delivered(500)
    victim = app.lease_pids()[0]
    shard = next(mark["shard"] for mark in app.ledger.marks if mark["pid"] == victim)
    stopped_at = time.monotonic()

    os.kill(victim, signal.SIGSTOP)

    again = app.until(
        lambda: [b for b in app.ledger.batches if b.shard == shard and b.at > stopped_at + 1]
    )
    (story,) = app.of("process_stalled")
    print(story)
    assert story["process"] == victim
    assert "SIGSTOP" in story["reason"]
    # ABRT waits for a process that is stopped; KILL does not.
    assert story["action"].endswith("SIGABRT, SIGKILL")
    assert story["status"] == "killed by SIGKILL"
    assert again[0].pid != victim
    app.finish(source, killed={victim}, cap=CAP)


@pytest.mark.slow
def test_a_request_that_never_comes_back_ends_in_good_order_and_nothing_comes_twice(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=1)
    source = producer(stream, 10**7, seed=63, rate=500).start()
    gate = Gate(embedded_aws.embedded.kinesis_endpoint)
    endpoints = {"kinesis": gate.url, "dynamodb": embedded_aws.embedded.dynamodb_endpoint}
    app = application(stream, **QUICK, aws={"endpoints": endpoints}).start()
    app.until_delivered(500)

    with gate.trickle():
        app.until(lambda: app.of("process_stalled"))

    (story,) = app.of("process_stalled")
    print(story)
    assert story["reason"] == "a request for records has not come back"
    # It could still hear: it checkpointed, released and left, so nobody had to kill it.
    assert story["action"].endswith("and to leave")
    gate.cut()
    app.finish(source)
    gate.shut()


def test_a_table_that_vanishes_stops_the_reading_with_66_and_one_word(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    source = producer(stream, 10**7, seed=64, rate=500).start()
    app = application(stream, leases={"failover": "6s"}).start()
    app.until_delivered(500)

    embedded_aws.dynamodb.delete_table(TableName=app.table)
    gone_at = time.monotonic()

    assert app.process.wait(HUNG_S) == 66
    source.stop()
    (reported,) = app.of("table_vanished")
    assert reported["level"] == "error"
    assert app.of("manager_stopped")[-1]["reason"] == "the lease table is gone"
    late = [b for b in app.ledger.read().batches if b.at > gone_at + 6.0]
    assert late == [], "a batch was begun after the fence"
    assert not app.lease_pids(with_orphans=True)
    after = app.lines()[app.lines().index(reported) + 1 :]
    worse = {line["event"] for line in after if line["level"] in ("warning", "error")}
    # A lease process may have come upon it by a write of its own, and says so once.
    assert worse <= {"lease_process_warned"}, "one word is enough"
    assert all("ResourceNotFoundException" in line["detail"] for line in app.warned())
    assert len(app.warned()) <= 2
