"""Makes a failing storm smaller, until a person can read the cause.

It leaves parts out of a profile, one after the other, and keeps every profile that still fails. It
does not know how a storm is played, or the meaning of a failure.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgspec

from tests.support.storms.profile import Profile, Strike

# Two dozen strikes shrink to a handful in some 60 plays, each of them shorter than the last; the
# simpler profiles after that are another 60, and a second round finds little.
PLAYS_MAX: Final = 300
# A storm of a few strikes that can fail does so for one seed in a few.
_SEEDS_TRIED: Final = 3
# A fleet that starts cold has settled by then: earlier strikes also hit a fleet at rest.
_SETTLED_S: Final = 60.0
# The calm after the last strike until its effect shows: three failovers.
_AFTERMATH_S: Final = 30.0
# A shorter storm than that does not read more easily.
_STORM_MIN_S: Final = 30.0
# Fields that are not simply set to their default: counts come down step by step, time by halves.
_COUNTED: Final = {"hosts": 1, "shards": 1, "java_workers": 0, "groups": 1}
_LEFT_ALONE: Final = frozenset({"seed", "storm_s", "strikes", "records_per_s", *_COUNTED})


def shrink(
    profile: Profile, fails: Callable[[Profile], bool], *, plays_max: int = PLAYS_MAX
) -> Profile:
    """The smallest profile found that still fails; the given one if no smaller one does.

    Time and strikes go first, because they cost most, then faults, user code, hosts and shards. A
    smaller storm draws other random events than the original. So each is tried under a few seeds,
    and the number of plays is limited.

    `fails` plays a profile and says whether it fails in the same way; it is called at most
    `plays_max` times. The seed of the result may differ from the given one.
    """
    shrinking = _Shrinking(profile, fails, plays_max)
    shrinking.run()
    return shrinking.smallest


class _Shrinking:
    """The smallest failing profile so far, and the plays that are left."""

    def __init__(self, profile: Profile, fails: Callable[[Profile], bool], plays_max: int) -> None:
        self.smallest = profile
        self._fails = fails
        self._plays_left = plays_max

    def run(self) -> None:
        """Round after round, until a round changes nothing."""
        before: Profile | None = None
        while before != self.smallest and self._plays_left > 0:
            before = self.smallest
            self._shorten()
            self._drop_strikes()
            self._move_forward()
            self._lower_counts()
            self._make_plain()

    def _shorten(self) -> None:
        """Half of the time, with the strikes in it, as long as that fails."""
        while self.smallest.storm_s / 2 >= _STORM_MIN_S:
            storm_s = self.smallest.storm_s / 2
            kept = tuple(each for each in self.smallest.strikes if each.at_s < storm_s)
            if not self._take(storm_s=storm_s, strikes=kept):
                return

    def _drop_strikes(self) -> None:
        """Leave out all strikes, halves, quarters … single ones: delta debugging."""
        size = len(self.smallest.strikes)
        while size > 0:
            start = 0
            while start < len(self.smallest.strikes):
                strikes = self.smallest.strikes
                if not self._take(strikes=strikes[:start] + strikes[start + size :]):
                    start += size
            size //= 2

    def _move_forward(self) -> None:
        """Strikes as early as a fleet at rest allows; the storm ends soon after the last one."""
        strikes = self.smallest.strikes
        if not strikes:
            return
        lead_s = max(0.0, min(each.at_s for each in strikes) - _SETTLED_S)
        moved = tuple(msgspec.structs.replace(each, at_s=each.at_s - lead_s) for each in strikes)
        self._take(strikes=moved, storm_s=self.smallest.storm_s - lead_s)
        over_s = _end_of(self.smallest.strikes) + _AFTERMATH_S
        if over_s < self.smallest.storm_s:
            self._take(storm_s=over_s)

    def _lower_counts(self) -> None:
        for name, least in _COUNTED.items():
            count = getattr(self.smallest, name)
            for fewer in _fewer(count, least):
                if self._take(**{name: fewer}):
                    break

    def _make_plain(self) -> None:
        """Set all other fields to their defaults: as a whole, else part by part."""
        for field in msgspec.structs.fields(Profile):
            if field.name in _LEFT_ALONE or field.default is msgspec.NODEFAULT:
                continue
            value = getattr(self.smallest, field.name)
            if value == field.default or self._take(**{field.name: field.default}):
                continue
            for part in _parts(value, field.default):
                plainer = msgspec.structs.replace(getattr(self.smallest, field.name), **part)
                self._take(**{field.name: plainer})

    def _take(self, **changes: Any) -> bool:
        """Keep the profile with these changes if it fails, under its seed or another."""
        candidate = msgspec.structs.replace(self.smallest, **changes)
        if candidate == self.smallest:
            return False
        for seed in range(candidate.seed, candidate.seed + _SEEDS_TRIED):
            if self._plays_left <= 0:
                return False
            self._plays_left -= 1
            seeded = msgspec.structs.replace(candidate, seed=seed)
            if self._fails(seeded):
                self.smallest = seeded
                return True
        return False


def _end_of(strikes: Iterable[Strike]) -> float:
    """The end of the last strike."""
    return max(each.at_s + each.lasts_s for each in strikes)


def _fewer(count: int, least: int) -> Iterator[int]:
    """The least, half as many, one less: each once, the boldest first."""
    if count > least:
        yield from dict.fromkeys((least, max(least, count // 2), count - 1))


def _parts(value: Any, default: Any) -> Iterator[dict[str, Any]]:
    """The fields of a struct that differ from the default, each set back."""
    if not isinstance(value, msgspec.Struct):
        return
    for field in msgspec.structs.fields(type(value)):
        plain = getattr(default, field.name)
        if getattr(value, field.name) != plain:
            yield {field.name: plain}
