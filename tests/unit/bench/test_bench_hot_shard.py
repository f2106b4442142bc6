"""The run of `bin/bench sink`, held to what the producer promises."""

import pytest
from bench import hot_shard

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_a_hot_shard_under_the_services_limits_loses_doubles_and_disorders_nothing():
    # Half as long as in the bench: what a shard refuses begins with its second second.
    outcome = hot_shard.run(alone_s=2.0, hot_s=3.0)

    # Its pace and its recovery depend on the machine: `bin/bench sink` shows them.
    assert outcome.sent > 0
    assert outcome.metrics.shards[outcome.hot_shard].refusals > 0
    assert (outcome.lost, outcome.twice, outcome.out_of_order) == (0, 0, 0)
