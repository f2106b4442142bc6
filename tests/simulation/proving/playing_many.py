"""Storms played one after the other, or by several processes, each as it comes to be finished."""

import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context

import msgspec

from kclrun.errors import InvariantViolation
from tests.simulation.mutants.planting import plant_named
from tests.support.storms.playing import Played
from tests.support.storms.profile import Profile
from tests.support.storms.states import play_any


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One storm: what was seen, or the violation that ended it."""

    profile: Profile
    cpu_s: float
    played: Played | None = None
    violation: str = ""


def play_one(profile: Profile, replay: str) -> Result:
    """Play it here. Whatever goes wrong in it is a violation: a crash of the cores as well."""
    began = time.process_time()
    played, violation = None, ""
    try:
        played = play_any(profile, replay)
    except InvariantViolation as error:
        violation = str(error)
    except Exception:
        violation = f"crash: {traceback.format_exc()}\nreplay: {replay}"
    return Result(
        profile=profile,
        cpu_s=time.process_time() - began,
        played=played,
        violation=violation,
    )


def play_many(
    profiles: Iterable[tuple[Profile, str]], *, processes: int, planted: str | None
) -> Iterator[Result]:
    """The results as they come, of profiles with their replay lines; only a few are under way at
    a time, so that it can stop early."""
    if processes == 1:
        yield from (play_one(profile, replay) for profile, replay in profiles)
        return
    waiting = iter(profiles)
    # spawn: each process plants the bug first, and imports the product after that.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), plant_named, (planted,))
    try:
        under_way: set[Future[Result]] = set()
        while True:
            for profile, replay in islice(waiting, 2 * processes - len(under_way)):
                under_way.add(pool.submit(play_one, profile, replay))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for each in done:
                yield each.result()
    finally:
        pool.shutdown(cancel_futures=True)


def rule_of(violation: str) -> str:
    """The id of the broken rule, which a violation begins with."""
    return violation.partition(":")[0]
