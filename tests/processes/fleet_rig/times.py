"""Times are printed, and asserted only where somebody measures, on a machine left alone.

`KCLRUN_FLEET_TIMES=1` asserts them. A gate does not: how long a move takes says how busy its
machine is. `bin/bench fleet crash` measures them under load of its own, with the targets.
"""

import os

from tests.processes.ledger_rig.rounds import percentile

MEASURES = os.environ.get("KCLRUN_FLEET_TIMES") == "1"


def judge_times(seconds, *, p99_max_s, p50_max_s=float("inf")):
    if MEASURES:
        assert percentile(seconds, 50) <= p50_max_s
        assert percentile(seconds, 99) <= p99_max_s
