"""The clock that fences are counted by."""

import time

from kclrun.worker.clock import boottime


def test_it_counts_through_suspend_and_knows_nothing_of_the_wall_clock():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    between = boottime()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)

    assert before <= between <= after
