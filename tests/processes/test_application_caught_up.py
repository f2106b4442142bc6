"""`--until caught-up` beside another machine: exit 0 says that all was read, here or there.

The other machine is lost, or it is behind.
"""

import pytest

from tests.patience import HUNG_S

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)
pytestmark = pytest.mark.slow


def test_a_run_until_caught_up_takes_and_reads_what_a_lost_machine_held(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    leases = {"failover": "3s"}
    lost = application(stream, machine="a", leases=leases)
    lost.start()
    lost.until(lambda: len(lost.of("lease_claimed")) >= 2)
    lost.lose_power()
    source = producer(stream, 400, seed=41)
    source.start().join()

    last = application(stream, machine="b", leases=leases)

    assert last.start("--until", "caught-up").process.wait(HUNG_S) == 0
    last.judged(source)


def test_a_run_until_caught_up_waits_for_a_machine_that_is_behind(
    embedded_aws, application, producer
):
    stream = embedded_aws.stream(shards=2)
    source = producer(stream, 4_000, seed=42)
    source.start().join()
    first = application(stream, machine="a", options={"batch_s": 0.4}, fetch={"batch_max": 50})
    first.start()
    first.until(lambda: len(first.of("lease_claimed")) >= 2)
    last = application(stream, machine="b")

    assert last.start("--until", "caught-up").process.wait(HUNG_S) == 0

    last.judged(source)
    assert last.of("waiting_for_others")
    assert first.stop() == 0
