"""What `bin/chaos refusals` runs: outputs that are away and refuse rows, and a comparison.

    bin/chaos refusals [--minutes 30] [--rate 200] [--seed 7] [--database postgresql|sqlite]
                       [--keep FOLDER]

The database is away for a third of the run. Exit code 1 if a record is not once in an output or
among the dead letters, or if a lease was lost meanwhile; all files stay then.
"""

import argparse
import random
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.command import judged
from tests.chaos.refusals.rig import Plan, RefusalsRun
from tests.support.databases import running_postgres


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="bin/chaos refusals", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long records are put")
    parser.add_argument("--rate", type=int, default=200, help="records put a second")
    parser.add_argument("--seed", type=int, help="of the bad rows and of who is killed")
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--keep", type=Path, help="write all files there, and keep them")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    again = (
        f"bin/chaos refusals --minutes {given.minutes:g} --rate {given.rate} --seed {seed}"
        f" --database {given.database}"
    )
    return judged(
        lambda folder: _run(folder, seed, given),
        given.keep,
        named="refusals",
        same=f"seed {seed}; the same run again: {again}",
        kept="every record is once in its output, or a dead letter that names its column",
    )


def _run(folder, seed, given):
    plan = Plan(
        flights=int(given.minutes * 60 * given.rate),
        seed=seed,
        rate=given.rate,
        # Two while the database is away: each has many calls whose rows wait.
        shards=2,
        reshards=((0.06, "split", 0), (0.12, "merge", 0), (0.8, "split", 1), (0.9, "merge", 1)),
        lease_kills=(0.04, 0.1, 0.16, 0.45, 0.62, *(share / 20 for share in range(14, 20))),
        manager_kills=(0.15, 0.85),
        away=(0.2, 0.2 + 1 / 3),
        index_at=0.58,
        poison_share=0.002,
        poison_items_share=1 / 40,
    )
    say = lambda line: print(line, flush=True)  # noqa: E731
    if given.database == "sqlite":
        database = SimpleNamespace(url=f"sqlite:///{folder / 'rows.db'}")
        return RefusalsRun(folder, plan, database, say=say).run()
    with running_postgres() as database:
        return RefusalsRun(folder, plan, database, say=say).run()


if __name__ == "__main__":
    sys.exit(main())
