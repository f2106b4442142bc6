"""Two managers of one application, as on two machines: each record goes to one of them."""

import random
import signal
import time

import pytest

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

CAP = 2000


def owners(aws, app):
    return {
        key: row["leaseOwner"] for key, row in aws.rows(app.table).items() if "leaseOwner" in row
    }


def two(application, stream):
    """Machine a takes two leases, machine b the other two, and more when there are more."""
    return (
        application(stream, machine="a", leases={"max": 2, "failover": "4s"}),
        application(stream, machine="b", leases={"max": 8, "failover": "4s"}),
    )


def start_both(first, second):
    first.start()
    first.until(lambda: len(first.of("lease_claimed")) >= 2)
    second.start()
    second.until(lambda: len(second.of("lease_claimed")) >= 2)


def test_two_managers_share_the_shards_and_one_takes_what_the_other_releases(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    first, second = two(application, stream)
    source = producer(stream, 10**7, seed=31, rate=1000).start()
    start_both(first, second)
    assert len(set(owners(embedded_aws, first).values())) == 2
    first.until_delivered(600)

    assert first.stop() == 0

    second.until(lambda: len(second.of("lease_claimed")) >= 4)
    second.finish(source)
    assert {batch.manager for batch in second.ledger.batches} == {"a", "b"}


@pytest.mark.slow
def test_the_leases_of_a_machine_that_is_gone_at_one_stroke_are_taken_after_failover(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    first, second = two(application, stream)
    source = producer(stream, 10**7, seed=32, rate=1000).start()
    start_both(first, second)
    first.until_delivered(600)
    victims = set(first.lease_pids())

    first.lose_power()

    second.until(lambda: len(second.of("lease_claimed")) >= 4)
    second.finish(source, killed=victims, cap=CAP)


@pytest.mark.slow
def test_two_managers_stopped_and_started_in_turn_give_no_record_twice(
    embedded_aws, application, producer
):
    seed = 33
    print(f"seed {seed}")
    rng = random.Random(seed)
    stream = embedded_aws.stream(shards=4)
    first = application(stream, machine="a", leases={"failover": "4s"})
    second = application(stream, machine="b", leases={"failover": "4s"})
    source = producer(
        stream,
        10**7,
        seed=seed,
        rate=1000,
        reshards=[(4_000, "split", 0), (8_000, "merge", 2), (12_000, "split", 1)],
    ).start()
    first.start()
    second.start()
    for _ in range(6):
        more = len(first.ledger.read().delivered) + rng.randrange(1500, 3000)
        first.until(lambda more=more: len(first.ledger.delivered) >= more)
        stopped = rng.choice([first, second])
        assert stopped.stop(rng.choice([signal.SIGTERM, signal.SIGINT])) == 0
        runs = len(stopped.of("manager_stopped"))
        stopped.start()
        stopped.until(lambda stopped=stopped, runs=runs: len(stopped.of("manager_started")) > runs)

    source.stop()
    first.until_all_delivered(source)
    assert first.stop() == 0
    assert second.stop() == 0
    first.judged(source)


@pytest.mark.slow
def test_a_machine_that_freezes_beyond_failover_wakes_up_and_touches_nothing(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    first, second = two(application, stream)
    source = producer(stream, 10**7, seed=34, rate=1000).start()
    start_both(first, second)
    first.until_delivered(600)
    frozen = set(first.lease_pids())

    with first.frozen():
        second.until(lambda: len(second.of("lease_claimed")) >= 4)
        asleep_until = time.monotonic()

    second.until(lambda: len(first.of("process_lost_lease")) >= 2)
    second.until_delivered(len(second.ledger.delivered) + CAP)
    late = [b for b in second.ledger.batches if b.pid in frozen and b.at > asleep_until]
    assert late == [], "a batch was begun after the fence [I4]"
    source.stop()
    second.until_all_delivered(source)
    assert first.stop() == 0
    assert second.stop() == 0
    second.judged(source, killed=frozen, cap=CAP)
