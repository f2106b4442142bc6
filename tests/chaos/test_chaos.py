"""The short form of `bin/chaos`: two minutes of everything, and a verdict.

What it did is asserted too: a run that did little proves little.
"""

import os
import random

import pytest

from tests.chaos.storm import Storm

STORM_S = 110.0
RATE = 1000


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(420)
def test_a_fleet_under_fire_keeps_every_promise(tmp_path):
    seed = int(os.environ.get("KCLRUN_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"seed {seed}; replay with KCLRUN_CHAOS_SEED={seed}")

    report = Storm(tmp_path, seed=seed, storm_s=STORM_S, rate=RATE).run()

    print(report)
    assert report.violations == []
    assert report.records >= 100_000
    assert sum(report.signals.values()) >= 60
    assert sum(report.http_faults.values()) >= 300
    assert report.reshards >= 4
    # Nobody had it all: leases moved, and by expiry too or after a death.
    assert report.takes >= 20
    # Managers died and came back: one start each, one more for the last reading, and these.
    assert sum(report.starts.values()) > len(report.starts) + 1
