"""Two managers of one application, as on two machines: each record goes to one of them.

Fleets with machines that are lost or stand still: `test_fleet_faults.py`, `test_fleet_moves.py`.
"""

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)


def test_two_managers_share_the_shards_and_one_takes_what_the_other_releases(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=4)
    first = application(stream, machine="a", leases={"max": 2, "failover": "4s"})
    second = application(stream, machine="b", leases={"max": 8, "failover": "4s"})
    source = producer(stream, 10**7, seed=31, rate=1000).start()
    first.start()
    first.until(lambda: len(first.of("lease_claimed")) >= 2)
    second.start()
    second.until(lambda: len(second.of("lease_claimed")) >= 2)
    rows = embedded_aws.rows(first.table).values()
    assert len({row["leaseOwner"] for row in rows if "leaseOwner" in row}) == 2
    first.until_delivered(600)

    assert first.stop() == 0

    second.until(lambda: len(second.of("lease_claimed")) >= 4)
    second.finish(source)
    assert {batch.manager for batch in second.ledger.batches} == {"a", "b"}
