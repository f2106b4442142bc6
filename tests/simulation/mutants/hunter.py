"""One process with one planted bug, playing storms until one of them catches it.

    python -m tests.simulation.mutants.hunter NAME GROUND FIRST_SEED SEEDS_MAX SECONDS_MAX

Prints a `Catch` as one line of JSON. Nothing of the product is imported before the bug is planted.
NAME may be `sober`: nothing is planted, and nothing may be caught.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator

import msgspec

from tests.simulation.mutants.mutant import Ground, is_ground
from tests.simulation.mutants.planting import plant_named

SOBER = "sober"
# A storm takes a second or two; one that takes this long goes round in circles.
PLAY_S_MAX = 120


class Catch(msgspec.Struct, frozen=True, kw_only=True):
    """How a hunt went. `rule` and `words` are of the violation. If nothing was caught, `rule` is
    empty, and `words` say why the hunt was given up, if it was."""

    name: str
    is_caught: bool
    seeds: int
    seconds: float
    seed: int | None = None
    rule: str = ""
    words: str = ""


class GoesInCircles(Exception):
    """A storm that does not end."""


def main(name: str, ground: Ground, first: int, seeds_max: int, seconds_max: float) -> Catch:
    """Play the storms `first`, `first + 1` … of a ground until one fails, or a limit is reached."""
    plant_named(None if name == SOBER else name)
    from tests.simulation.mutants.grounds import storm_of
    from tests.support.storms.playing import play

    began = time.monotonic()
    played = 0
    while played < seeds_max and time.monotonic() - began < seconds_max:
        seed = first + played
        played += 1
        try:
            with _limited():
                play(storm_of(ground, seed))
        except Exception as error:
            return Catch(
                name=name,
                is_caught=True,
                seeds=played,
                seconds=time.monotonic() - began,
                seed=seed,
                rule=_rule_of(error),
                words=str(error).partition("\n")[0][:200],
            )
    return Catch(name=name, is_caught=False, seeds=played, seconds=time.monotonic() - began)


def _rule_of(error: Exception) -> str:
    """The rule that a violation names; of anything else, what it is."""
    head = str(error).partition(": ")[0]
    is_named = 2 <= len(head) <= 4 and head[0].isupper() and any(map(str.isdigit, head))
    return head if is_named else type(error).__name__


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def over(*_: object) -> None:
        raise GoesInCircles(f"a storm is not over after {PLAY_S_MAX} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(PLAY_S_MAX)
    try:
        yield
    finally:
        signal.alarm(0)


if __name__ == "__main__":
    _, asked, where, first_seed, most, limit = sys.argv
    assert is_ground(where), f"there is no ground {where}"
    caught = main(asked, where, int(first_seed), int(most), float(limit))
    print(msgspec.json.encode(caught).decode())
