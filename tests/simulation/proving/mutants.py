"""`bin/prove mutants`: plants one bug after the other, and tells who caught it and how soon."""

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from tests.shares import share_of
from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.hunter import Catch
from tests.simulation.mutants.hunting import hunt
from tests.simulation.mutants.mutant import Mutant, is_ground


class AskedMutants(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for. `seconds_max` is for one mutant."""

    mutants: tuple[Mutant, ...]
    first: int
    seeds_max: int
    seconds_max: float
    processes: int


def chosen(names: Sequence[str], share: tuple[int, int] | None) -> tuple[Mutant, ...]:
    """Those named, or all; of them the share. Exits with the names there are for a wrong one."""
    unknown = sorted(set(names) - MUTANTS.keys())
    if unknown:
        there = ", ".join(MUTANTS)
        raise SystemExit(f"no planted bug is called {', '.join(unknown)}; there are: {there}")
    mutants = [MUTANTS[name] for name in names or MUTANTS]
    return share_of(mutants, *(share or (1, 1)))


def run_mutants(asked: AskedMutants) -> int:
    """Hunt them all. 1 if one survived, else 0."""

    def hunted(mutant: Mutant) -> Catch:
        caught = hunt(
            mutant,
            first=asked.first,
            seeds_max=asked.seeds_max,
            seconds_max=asked.seconds_max,
        )
        print(_line(mutant, caught), file=sys.stderr, flush=True)
        return caught

    with ThreadPoolExecutor(asked.processes) as threads:
        catches = list(threads.map(hunted, asked.mutants))
    print()
    for mutant, caught in zip(asked.mutants, catches, strict=True):
        print(_line(mutant, caught))
    return _tell(catches)


def _line(mutant: Mutant, caught: Catch) -> str:
    layer = mutant.layer.partition(":")[0]
    if layer != "worlds" and not is_ground(layer):
        layer = "test"
    how = (
        f"{caught.rule:<4} {caught.words[:90]}"
        if caught.is_caught
        else f"SURVIVED: {caught.words or mutant.breaks}"
    )
    seeds = f"{caught.seeds} seeds" if caught.seeds else ""
    return f"{mutant.name:<42} {layer:<12} {seeds:>10} {caught.seconds:>6.0f} s  {how}"


def _tell(catches: Sequence[Catch]) -> int:
    survivors = [caught.name for caught in catches if not caught.is_caught]
    seeds = [caught.seeds for caught in catches if caught.is_caught and caught.seeds]
    print(f"\n{len(catches) - len(survivors)} of {len(catches)} planted bugs caught")
    if seeds:
        median = statistics.median(seeds)
        print(f"seeds needed by storms: median {median:g}, most {max(seeds)}")
    if survivors:
        print(f"SURVIVED: {', '.join(survivors)}")
    return int(bool(survivors))
