"""The short form of `bin/chaos`: twenty seconds of everything, and a verdict.

What is asserted holds by guarantee on any machine, however busy. How much of everything happens,
and whom it strikes, is luck: a run that is to find something new is one of `bin/chaos`.
"""

import pytest

from tests.chaos.storm import Storm
from tests.patience import TEST_S
from tests.seeds import seed_of

STORM_S = 20.0
RATE = 600


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(2 * TEST_S)
def test_a_fleet_under_fire_keeps_every_promise(tmp_path):
    # The same each day: `bin/chaos` draws others.
    seed = seed_of(20265)

    report = Storm(tmp_path, seed=seed, storm_s=STORM_S, rate=RATE).run()

    print(report)
    assert report.violations == []
    assert report.refused_a_stream_made_again
    # A tenth of what a quiet machine does: a run that did less proves nothing.
    assert report.records >= 1_000
    assert sum(report.strikes.values()) >= 3
    assert sum(report.http_faults.values()) >= 5
    assert report.reshards >= 1
    assert report.takes >= 10
