"""What `bin/chaos outcomes` runs: outputs and dead letters under fire, and a comparison.

    bin/chaos outcomes [--flights 200000] [--poisons 500] [--seed 7] [--letters path|s3]
                       [--database postgresql|sqlite] [--keep FOLDER]

Exit code 1 if an output is not what the flights say; all files stay then.
"""

import argparse
import random
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.chaos.command import judged
from tests.chaos.outcomes.rig import OutcomesRun, Plan
from tests.support.databases import running_postgres

_SHARES = 20


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="bin/chaos outcomes", description=__doc__.split("\n")[0])
    parser.add_argument("--flights", type=int, default=200_000)
    parser.add_argument("--poisons", type=int, default=500, help="records that nobody can read")
    parser.add_argument("--rate", type=int, default=2_000, help="records put a second")
    parser.add_argument("--seed", type=int, help="of the poison and of who is killed")
    parser.add_argument("--letters", choices=["path", "s3"], default="path")
    parser.add_argument("--database", choices=["postgresql", "sqlite"], default="postgresql")
    parser.add_argument("--keep", type=Path, help="write all files there, and keep them")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    again = (
        f"bin/chaos outcomes --flights {given.flights} --poisons {given.poisons} --seed {seed}"
        f" --rate {given.rate} --letters {given.letters} --database {given.database}"
    )
    return judged(
        lambda folder: _run(folder, seed, given),
        given.keep,
        named="outcomes",
        same=f"seed {seed}; the same run again: {again}",
        kept="both outputs have every row once, and every letter was redriven once",
    )


def _run(folder, seed, given):
    plan = Plan(
        flights=given.flights,
        poisons=given.poisons,
        seed=seed,
        rate=given.rate,
        shards=6,
        reshards=(
            (0.15, "split", 2),
            (0.3, "merge", 0),
            (0.45, "split", 4),
            (0.6, "merge", 2),
            (0.75, "split", 0),
            (0.85, "merge", 3),
        ),
        lease_kills=tuple(number / _SHARES for number in range(1, _SHARES)),
        manager_kills=(0.35, 0.7),
        database_crashes=(0.22, 0.5, 0.8),
        letters=given.letters,
    )
    say = lambda line: print(line, flush=True)  # noqa: E731
    if given.database == "sqlite":
        database = SimpleNamespace(url=f"sqlite:///{folder / 'rows.db'}")
        return OutcomesRun(folder, plan, database, say=say).run()
    with running_postgres() as database:
        return OutcomesRun(folder, plan, database, say=say).run()


if __name__ == "__main__":
    sys.exit(main())
