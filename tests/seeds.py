"""Where a test takes chance from: the same seed every day, and another one when it is asked for."""

import os


def seed_of(default=1):
    """The seed of this run, printed: `default`, or the environment variable KCLRUN_SEED."""
    seed = int(os.environ.get("KCLRUN_SEED", default))
    print(f"seed {seed}; another one with KCLRUN_SEED=N, the same one with KCLRUN_SEED={seed}")
    return seed
