"""`bin/prove storms`: plays them, tells what was reached and what broke, and shrinks what broke."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.simulation.mutants.mutant import ROOT
from tests.simulation.proving.beginnings import beginning
from tests.simulation.proving.playing_many import Result, play_many, play_one, rule_of
from tests.support.storms.coverage import SITUATIONS
from tests.support.storms.profile import Profile
from tests.support.storms.shrinking import shrink
from tests.support.storms.states import with_state
from tests.support.storms.swarm import draw_profile

REGRESSIONS = ROOT / "tests" / "simulation" / "regressions"
# After so many there is enough to look at.
_VIOLATIONS_MAX = 5
_PROGRESS_EVERY_S = 15.0
# A storm that takes two minutes to shrink by a play of a second each is small enough.
_SHRINKING_S_MAX = 300.0


class AskedStorms(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for: seeds, or the profile in a file."""

    seeds: range | None
    profile: Path | None
    processes: int = 2
    hours: float | None = None
    minutes: float | None = None
    lapse: float = 1.0
    planted: str | None = None
    has_state: bool = False
    into: Path | None = None


class Sums(msgspec.Struct):
    """What all storms were together."""

    seeds: int = 0
    hours: float = 0.0
    cpu_s: float = 0.0
    faults: int = 0
    strikes: int = 0
    records: int = 0
    duplicates: int = 0
    reached: set[str] = msgspec.field(default_factory=set)

    def add(self, result: Result) -> None:
        """One more storm; one that broke off counts as a seed and no more."""
        self.seeds += 1
        self.cpu_s += result.cpu_s
        played = result.played
        if played is not None:
            self.hours += played.virtual_s / 3600
            self.faults += played.faults
            self.strikes += played.strikes
            self.records += played.records
            self.duplicates += played.duplicates
            self.reached |= played.situations


def run_storms(asked: AskedStorms) -> int:
    """Play them. 1 if a promise broke, else 0."""
    sums, broken = Sums(), []
    said = time.monotonic()
    total = len(asked.seeds) if asked.seeds is not None else 1
    results = play_many(_profiles(asked), processes=asked.processes, planted=asked.planted)
    for result in results:
        sums.add(result)
        if result.violation:
            broken.append(result)
            _say(f"\n{result.violation}\n")
        if time.monotonic() - said > _PROGRESS_EVERY_S:
            said = time.monotonic()
            _say(f"{sums.seeds}/{total} storms, {sums.hours:.0f} fleet-hours, {len(broken)} broken")
        is_enough = asked.hours is not None and sums.hours >= asked.hours
        if is_enough or len(broken) >= _VIOLATIONS_MAX:
            break
    results.close()
    _tell(sums, len(broken))
    _keep(broken, asked)
    return int(bool(broken))


def keep_shrunk(result: Result, into: Path) -> Path:
    """Shrink a storm that broke a rule, as long as the same rule breaks; write it and say where."""
    rule = rule_of(result.violation)
    until = time.monotonic() + _SHRINKING_S_MAX

    def fails(profile: Profile) -> bool:
        if time.monotonic() > until:
            return False
        return rule_of(play_one(profile, "").violation) == rule

    smallest = shrink(result.profile, fails)
    path = into / f"{rule}-{result.profile.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_said(smallest)), indent=1) + b"\n")
    return path


def _profiles(asked: AskedStorms) -> Iterator[tuple[Profile, str]]:
    """Each with the command that plays it again."""
    command = "bin/prove storms"
    if asked.planted is not None:
        command += f" --planted {asked.planted}"
    if asked.profile is not None:
        profile = msgspec.json.decode(asked.profile.read_bytes(), type=Profile)
        yield profile, f"{command} --profile {asked.profile}"
        return
    if asked.minutes is not None:
        command += f" --minutes {asked.minutes:g}"
    if asked.has_state:
        command += " --state"
    if asked.lapse != 1:
        command += f" --lapse {asked.lapse:g}"
    for seed in asked.seeds or ():
        drawn = with_state(draw_profile(seed)) if asked.has_state else draw_profile(seed)
        storm_s = drawn.storm_s if asked.minutes is None else asked.minutes * 60
        yield beginning(drawn, storm_s, lapse=asked.lapse), f"{command} --seeds {seed}:{seed + 1}"


def _keep(broken: list[Result], asked: AskedStorms) -> None:
    """Shrink one storm for each rule, where there is a place for it; not one from a file."""
    into = asked.into if asked.into is not None or asked.planted else REGRESSIONS
    if into is None or asked.profile is not None:
        return
    for result in {rule_of(each.violation): each for each in reversed(broken)}.values():
        _say(f"shrinking seed {result.profile.seed}: {rule_of(result.violation)} …")
        path = keep_shrunk(result, into)
        _say(f"  bin/prove storms --profile {path}")


def _said(value: msgspec.Struct) -> dict[str, object]:
    """Only what is not as by default: a small storm is a short file."""
    said: dict[str, object] = {}
    for field in msgspec.structs.fields(type(value)):
        own = getattr(value, field.name)
        if own == field.default:
            continue
        said[field.name] = _plain(own)
    return said


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        return _said(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _tell(sums: Sums, broken: int) -> None:
    missed = sorted(SITUATIONS - sums.reached)
    speed = sums.hours / (sums.cpu_s / 60) if sums.cpu_s else 0.0
    for name, value in {
        "seeds": f"{sums.seeds:,}",
        "fleet-hours": f"{sums.hours:,.1f}",
        "speed": f"{speed:,.0f} fleet-hours/min/core",
        "faults": f"{sums.faults:,}",
        "strikes": f"{sums.strikes:,}",
        "records": f"{sums.records:,}",
        "duplicates": f"{sums.duplicates:,}",
        "situations": f"{len(SITUATIONS) - len(missed)} of {len(SITUATIONS)}",
        "not reached": ", ".join(missed) or "none",
        "violations": f"{broken}",
    }.items():
        print(f"{name:<12} {value}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
