"""What `bin/chaos sessions` runs: keyed state under fire, and a comparison.

    bin/chaos sessions [--flights 336776] [--copies 1] [--rate 3000] [--seed 7]
                       [--spark] [--keep FOLDER]

Exit code 1 if a row or the state of an aircraft is not what the flights say; all files stay then.
"""

import argparse
import random
import sys
from pathlib import Path

from tests.chaos.command import judged
from tests.chaos.sessions.rig import Plan, SessionsRun

_SHARES = 20


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="bin/chaos sessions", description=__doc__.split("\n")[0])
    parser.add_argument("--flights", type=int, default=336_776)
    parser.add_argument("--copies", type=int, default=1, help="aircraft that fly each flight")
    parser.add_argument("--rate", type=int, default=3_000, help="records put a second")
    parser.add_argument("--seed", type=int, help="of who is killed")
    parser.add_argument("--spark", action="store_true", help="Spark reads between 60 and 80 %%")
    parser.add_argument("--keep", type=Path, help="write all files there, and keep them")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    plan = Plan(
        flights=given.flights,
        copies=given.copies,
        seed=seed,
        rate=given.rate,
        shards=4,
        reshards=(
            (0.15, "split", 2),
            (0.3, "merge", 0),
            (0.45, "split", 3),
            (0.6, "merge", 2),
            (0.75, "split", 0),
        ),
        lease_kills=tuple(number / _SHARES for number in range(1, _SHARES)),
        manager_kills=(0.35, 0.7),
        spark=(0.6, 0.8) if given.spark else (),
    )
    return judged(
        lambda folder: SessionsRun(folder, plan, say=lambda line: print(line, flush=True)).run(),
        given.keep,
        named="sessions",
        same=f"seed {seed}; the same run again: bin/chaos sessions --flights {given.flights}"
        f" --copies {given.copies} --seed {seed} --rate {given.rate}"
        f"{' --spark' if given.spark else ''}",
        kept="every session is there once, and the state is that of the flights",
    )


if __name__ == "__main__":
    sys.exit(main())
