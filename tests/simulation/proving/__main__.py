"""`bin/prove`: storms, planted bugs, tiny worlds; beside the real Java KCL."""

import argparse
import sys
from pathlib import Path

from tests.simulation.mutants.hunting import SEEDS_MAX

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """0 when everything held; 1 on a violation, or when a planted bug survived."""
    asked = _parser().parse_args(arguments)
    run = {"storms": _storms, "mutants": _mutants, "worlds": _worlds, "interop": _interop}[
        asked.what
    ]
    return run(asked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/prove", description="Puts the fleet, and what watches it, to the proof."
    )
    what = parser.add_subparsers(dest="what", required=True)

    storms = what.add_parser("storms", help="play storms; a violation is told, shrunk and kept")
    which = storms.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=_seeds, metavar="A:B", help="from A up to, not with, B")
    which.add_argument("--profile", type=Path, metavar="FILE", help="the storm in a JSON file")
    storms.add_argument("--processes", type=_positive, default=2, metavar="N")
    storms.add_argument("--hours", type=float, metavar="H", help="stop after so many fleet-hours")
    storms.add_argument("--minutes", type=float, metavar="M", help="only the first M of each storm")
    storms.add_argument("--lapse", type=float, default=1.0, help="strikes come this much faster")
    storms.add_argument(
        "--state", action="store_true", help="processes have keyed state, and get single records"
    )
    storms.add_argument("--planted", metavar="NAME", help="with this planted bug")
    storms.add_argument(
        "--into", type=Path, metavar="DIR", help="where shrunk profiles go; the regressions' place"
    )

    mutants = what.add_parser("mutants", help="plant bugs; each must be caught")
    mutants.add_argument(
        "names", nargs="*", metavar="NAME", help="all if none is named; packages with --random"
    )
    mutants.add_argument(
        "--random", type=_positive, metavar="N", help="N random one-spot bugs instead"
    )
    mutants.add_argument("--seed", type=int, default=0, metavar="S", help="draws the random ones")
    mutants.add_argument(
        "--wider", action="store_true", help="what unit tests let live meets slower tests too"
    )
    mutants.add_argument("--share", type=_share, metavar="K/N", help="every Nth, from the Kth on")
    mutants.add_argument("--seeds-max", type=_positive, default=SEEDS_MAX, metavar="N")
    mutants.add_argument("--first", type=int, default=0, metavar="SEED")
    mutants.add_argument("--minutes-max", type=float, default=60.0, help="of one mutant")
    mutants.add_argument("--processes", type=_positive, default=2, metavar="N")

    worlds = what.add_parser("worlds", help="every interleaving of tiny worlds")
    worlds.add_argument("--states", type=_positive, default=2_000_000, metavar="N")
    worlds.add_argument("--minutes-max", type=float, default=10.0)

    interop = what.add_parser("interop", help="beside the real Java KCL; needs a JDK and Maven")
    interop.add_argument(
        "names", nargs="*", metavar="SCENARIO", help="all of them if none is named"
    )
    interop.add_argument("--kcl", metavar="VERSION", help="with this one alone")
    return parser


def _storms(asked: argparse.Namespace) -> int:
    if asked.planted is not None:
        _plant(asked.planted)
    from tests.simulation.proving.storms import AskedStorms, run_storms

    return run_storms(
        AskedStorms(
            seeds=asked.seeds,
            profile=asked.profile,
            processes=asked.processes,
            hours=asked.hours,
            minutes=asked.minutes,
            lapse=asked.lapse,
            planted=asked.planted,
            has_state=asked.state,
            into=asked.into,
        )
    )


def _mutants(asked: argparse.Namespace) -> int:
    if asked.random is not None:
        return _random_mutants(asked)
    from tests.simulation.proving.mutants import AskedMutants, chosen, run_mutants

    return run_mutants(
        AskedMutants(
            mutants=chosen(asked.names, asked.share),
            first=asked.first,
            seeds_max=asked.seeds_max,
            seconds_max=asked.minutes_max * 60,
            processes=asked.processes,
        )
    )


def _random_mutants(asked: argparse.Namespace) -> int:
    from tests.simulation.mutants.at_random import PACKAGES, AskedRandom, run_random

    if unknown := set(asked.names) - set(PACKAGES):
        raise SystemExit(f"no package {', '.join(unknown)}; there are: {', '.join(PACKAGES)}")
    return run_random(
        AskedRandom(
            number=asked.random,
            seed=asked.seed,
            packages=tuple(asked.names) or PACKAGES,
            is_wider=asked.wider,
            processes=asked.processes,
        )
    )


def _worlds(asked: argparse.Namespace) -> int:
    from tests.simulation.tiny_worlds.program import run

    return run(asked.states, asked.minutes_max * 60)


def _interop(asked: argparse.Namespace) -> int:
    from tests.interop.program import run
    from tests.interop.scenarios import SCENARIOS

    if unknown := [name for name in asked.names if name not in SCENARIOS]:
        raise SystemExit(f"no scenario is called {unknown[0]}; there are: {', '.join(SCENARIOS)}")
    versions = {each for name in asked.names or SCENARIOS for each in SCENARIOS[name][1]}
    if asked.kcl is not None and asked.kcl not in versions:
        raise SystemExit(f"none of these runs with {asked.kcl}, but: {', '.join(sorted(versions))}")
    return run(asked.names, asked.kcl)


def _plant(name: str) -> None:
    """Before anything of the product is imported."""
    from tests.simulation.mutants.catalogue import MUTANTS
    from tests.simulation.mutants.planting import plant_named

    if name not in MUTANTS:
        raise SystemExit(f"no planted bug is called {name}; there are: {', '.join(MUTANTS)}")
    plant_named(name)


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    try:
        return range(int(first), int(end))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no A:B, as in 0:200") from None


def _share(text: str) -> tuple[int, int]:
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is no K/N, as in 3/12")
    return int(number), int(of)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
