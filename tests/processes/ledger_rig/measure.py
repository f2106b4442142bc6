"""Prints figures of this machine: how soon a lease is read again after a death.

    python tests/processes/ledger_rig/measure.py [--lease-kills 60] [--manager-kills 25] [--seed 7]

One embedded AWS, four shards, 1,000 records a second. Each run's ledger is judged as well.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.aws import Aws
from tests.processes.ledger_rig.deliveries import judge
from tests.processes.ledger_rig.producing import Producer
from tests.processes.ledger_rig.rounds import lease_kill_rounds, manager_kill_rounds, reported

CAP = 2000


def measured(aws, seed, measure):
    """Run `measure(app)` on a new stream with records flowing; its result and the verdict."""
    stream = aws.stream(shards=4)
    with tempfile.TemporaryDirectory() as folder:
        app = Application(Path(folder), aws, stream)
        source = Producer(aws.kinesis, stream, 10**7, seed=seed, rate=1000).start()
        try:
            killed, *figures = measure(app)
            source.stop()
            app.until_all_delivered(source)
            app.stop()
            return figures, judge(source.put, app.ledger.read(), killed=killed, cap=CAP)
        finally:
            source.stop()
            app.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lease-kills", type=int, default=60)
    parser.add_argument("--manager-kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    print(f"seed {given.seed}")
    aws = Aws()
    try:
        rng = random.Random(given.seed)
        (back_s,), verdict = measured(
            aws, given.seed, lambda app: lease_kill_rounds(app, given.lease_kills, rng)
        )
        print(reported("lease process killed: kill to new batch (target p99 1.5 s)", back_s))
        print(f"  {verdict} {verdict.faults or 'no fault'}")
        (ends_s, again_s), verdict = measured(
            aws, given.seed, lambda app: ((), *manager_kill_rounds(app, given.manager_kills))
        )
        print(reported("manager killed: its processes are gone", ends_s))
        print(reported("manager killed: exec to new batch (target p99 3 s)", again_s))
        print(f"  {verdict} {verdict.faults or 'no fault'}")
    finally:
        aws.close()


if __name__ == "__main__":
    main()
