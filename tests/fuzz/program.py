"""Fuzz for a while: `python -m tests.fuzz.program [TARGET…] [--seconds N] [--seed S]`.

Exit code 1 and a file in `found/` for an input that broke something.
"""

import argparse
import hashlib
import random
import sys
import time
from pathlib import Path

from tests.fuzz.searching import Broken, Search, examine
from tests.fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"


def run(names, seconds, seed):
    """Each target in its turn, for the same time; how many broke."""
    broke = 0
    for name in names:
        search = None
        began = time.monotonic()
        try:
            search = Search(TARGETS[name], seed)
            while time.monotonic() < began + seconds / len(names):
                search.step()
        except Broken as broken:
            broke += 1
            keep(broken, seed)
        if search is not None:
            took = time.monotonic() - began
            reported = (
                f"{search.inputs} inputs, {search.inputs / took:.0f}/s, {len(search.corpus)} kept"
            )
            print(f"{name:<16} {reported}, {len(search.reached)} steps reached", flush=True)
    return broke


def keep(broken, seed):
    folder = FOUND / broken.target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(broken.data).hexdigest()[:16]
    path.write_bytes(broken.data)
    print(
        f"{broken}\n{broken.data[:200]!r}\nseed {seed}; replay: python -m tests.fuzz.program"
        f" {broken.target.name} --replay {path}"
    )


def main(arguments):
    parser = argparse.ArgumentParser(description="Fuzz the readers of hostile bytes.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(sorted(TARGETS)))
    parser.add_argument("--seconds", type=float, default=60.0, help="in all (default 60)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one input")
    given = parser.parse_args(arguments)
    names = given.targets or sorted(TARGETS)
    unknown = set(names) - set(TARGETS)
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if given.replay is not None:
        for name in names:
            examine(TARGETS[name], given.replay.read_bytes())
        print("holds")
        return 0
    print(f"seed {given.seed}")
    return 1 if run(names, given.seconds, given.seed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
