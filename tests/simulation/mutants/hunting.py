"""Hunting planted bugs, each in a process of its own, by the layer that must catch it."""

import functools
import os
import re
import subprocess
import sys
import time

import msgspec

from tests.simulation.mutants.hunter import SOBER, Catch
from tests.simulation.mutants.mutant import ROOT, WORLDS, Ground, Mutant, is_ground
from tests.simulation.mutants.planting import PLANTED
from tests.support.programs import run_to_end

# The limit that the simulator is graded by.
SEEDS_MAX = 2_000
# Beyond its own limit of time a hunter gets this long for the storm under way.
_LAST_STORM_S = 180.0
# A search counts its CPU time; on a machine that is shared it may take this much longer.
_CPU_SHARE_MIN = 10
# pytest's exit code for failed tests; others say that it could not run them.
_TESTS_FAILED = 1
# How the lines begin in which pytest tells a failure, and the tiny worlds a broken rule.
_A_FAILURE = re.compile(r"E  |FAILED |[ILP][0-9]+[a-z]?: ")


def hunt(
    mutant: Mutant, *, first: int = 0, seeds_max: int = SEEDS_MAX, seconds_max: float = 3_600.0
) -> Catch:
    """Hunt one mutant in its layer. A layer that does not end in time has not caught it. Raises:
    RuntimeError if the hunt itself goes wrong."""
    try:
        match mutant.layer:
            case ground if is_ground(ground):
                return _in_storms(mutant, ground, first, seeds_max, seconds_max)
            case world if world.startswith(WORLDS):
                return _in_tiny_worlds(mutant, world.removeprefix(WORLDS), seconds_max)
            case test:
                return _by_test(mutant, test, seconds_max)
    except subprocess.TimeoutExpired as late:
        words = f"{mutant.layer} is not over after {late.timeout:g} s"
        return Catch(name=mutant.name, is_caught=False, seeds=0, seconds=late.timeout, words=words)


def replay_line(mutant: Mutant, caught: Catch) -> str:
    """The command that shows the same catch again."""
    if caught.seed is None:
        return f"bin/prove mutants {mutant.name}"
    return f"bin/prove mutants {mutant.name} --first {caught.seed} --seeds-max 1"


def _in_storms(
    mutant: Mutant, ground: Ground, first: int, seeds_max: int, seconds_max: float
) -> Catch:
    """A storm that breaks a promise without the bug too has caught nothing: the hunt goes on."""
    began = time.monotonic()
    played = 0
    while True:
        left_s = seconds_max - (time.monotonic() - began)
        caught = _hunter(mutant.name, ground, first + played, seeds_max - played, left_s)
        played += caught.seeds
        seconds = time.monotonic() - began
        if caught.seed is None or _is_clean(ground, caught.seed):
            return msgspec.structs.replace(caught, seeds=played, seconds=seconds)


@functools.cache
def _is_clean(ground: Ground, seed: int) -> bool:
    """Whether the product as it is passes this storm."""
    return not _hunter(SOBER, ground, seed, 1, _LAST_STORM_S).is_caught


def _hunter(name: str, ground: Ground, first: int, seeds_max: int, seconds_max: float) -> Catch:
    numbers = (str(first), str(seeds_max), str(max(0.0, seconds_max)))
    command = ["-m", "tests.simulation.mutants.hunter", name, ground, *numbers]
    done = _run(command, max(0.0, seconds_max) + _LAST_STORM_S)
    if done.returncode != 0:
        raise RuntimeError(f"the hunt for {name} failed:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout, type=Catch)


def _in_tiny_worlds(mutant: Mutant, world: str, seconds_max: float) -> Catch:
    command = ["-m", "tests.simulation.mutants.exploring", mutant.name, world, str(seconds_max)]
    began = time.monotonic()
    done = _run(command, seconds_max * _CPU_SHARE_MIN)
    if "Traceback" in done.stderr:
        raise RuntimeError(f"the worlds broke under {mutant.name}:\n{done.stderr[-2000:]}")
    return _judged(mutant, done, began, is_caught=done.returncode != 0)


def _by_test(mutant: Mutant, test: str, seconds_max: float) -> Catch:
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    command[2:2] = ["-p", "tests.simulation.mutants.planting"]
    began = time.monotonic()
    done = _run(command, seconds_max + _LAST_STORM_S, planted=mutant.name)
    if done.returncode not in {0, _TESTS_FAILED}:
        raise RuntimeError(f"{test} did not run under {mutant.name}:\n{done.stdout[-2000:]}")
    return _judged(mutant, done, began, is_caught=done.returncode == _TESTS_FAILED)


def _judged(
    mutant: Mutant, done: subprocess.CompletedProcess[str], began: float, *, is_caught: bool
) -> Catch:
    said = [line for line in done.stdout.splitlines() if _A_FAILURE.match(line)]
    return Catch(
        name=mutant.name,
        is_caught=is_caught,
        seeds=0,
        seconds=time.monotonic() - began,
        words=said[0].removeprefix("E").strip()[:200] if is_caught and said else "",
    )


def _run(
    arguments: list[str], seconds_max: float, *, planted: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python of its own, with the checkout first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if planted is not None:
        environment[PLANTED] = planted
    return run_to_end(
        [sys.executable, *arguments], cwd=ROOT, env=environment, timeout_s=seconds_max
    )
