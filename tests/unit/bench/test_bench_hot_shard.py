"""The run that `bin/bench sink` draws, held to what the producer promises."""

import pytest
from bench import hot_shard
from bench.sink import draw

pytestmark = pytest.mark.alone


@pytest.mark.slow
def test_a_hot_shard_under_the_services_limits_slows_down_only_itself(tmp_path):
    outcome = hot_shard.run()
    draw(outcome, tmp_path / "sink.png")

    assert outcome.sent >= 100_000
    assert (outcome.lost, outcome.twice, outcome.out_of_order) == (0, 0, 0)
    assert outcome.least_healthy_share >= 0.9
    hot = outcome.metrics.shards[outcome.hot_shard]
    assert hot.refusals > 0
    assert 0.1 <= hot.pause_max_s <= 10.0
    # It recovered, and had been slow for about as long as it was hot or had a backlog.
    assert (hot.batch_records, hot.pause_s) == (500, 0.0)
    assert outcome.recovered_after_s < hot_shard.COOL_S_MAX
    assert (tmp_path / "sink.png").read_bytes().startswith(b"\x89PNG")
