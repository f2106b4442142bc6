"""The verdict over a whole run: what was lost, twice, out of order, too early, or too large."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field

from tests.chaos.excuses import died_before_it_logged, excuses, lives_of
from tests.chaos.table_history import judge_history
from tests.chaos.trims import unnamed_shards, untrue_expiries
from tests.processes.ledger_rig.deliveries import judge

# A manager of a dozen leases fills its caches in a minute or two, and then should stay as it is.
# An hour's growth beyond this is a leak; a short run says little, and may grow by the rest.
RSS_KB_AN_HOUR_MAX = 8 * 1024
RSS_KB_AT_FIRST_MAX = 8 * 1024
DESCRIPTORS_AN_HOUR_MAX = 10.0
DESCRIPTORS_AT_FIRST_MAX = 30.0
# What a manager fills its caches with, and how many leases it has, says more in less time.
_GROWTH_MINUTES_MIN = 10.0
# A frozen process goes on and finds its successor reading: one batch was under way in it.
_SLACK_S = 0.2


@dataclass
class Report:
    """`violations` is empty if all that was promised was kept."""

    seed: int = 0
    storm_s: float = 0.0
    records: int = 0
    deliveries: int = 0
    lives: int = 0
    torn_lines: int = 0
    duplicates: int = 0
    duplicates_by_excuse: dict[str, int] = field(default_factory=dict)
    duplicates_in_one_life_max: int = 0
    batches_by_frozen: int = 0
    signals: dict[str, int] = field(default_factory=dict)
    strikes: dict[str, int] = field(default_factory=dict)
    http_faults: dict[str, int] = field(default_factory=dict)
    http_passed: int = 0
    reshards: int = 0
    shards_trimmed: int = 0
    shards_told_expired: int = 0
    records_expired: int = 0
    starts: dict[str, int] = field(default_factory=dict)
    lease_writes: int = 0
    writes_refused: int = 0
    takes: int = 0
    takes_by_expiry: int = 0
    lag_max: int = 0
    calm_s: float = 0.0
    seconds_in_all: float = 0.0
    refused_a_stream_made_again: bool = False
    growth: dict[str, str] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def as_json(self):
        return json.dumps(asdict(self), indent=1)

    def __str__(self):
        return "\n".join(
            f"{name.replace('_', ' ')}: {_shown(name, value)}"
            for name, value in asdict(self).items()
        )


def _shown(name, value):
    if isinstance(value, dict):
        parts = ", ".join(f"{key}: {each}" for key, each in sorted(value.items())) or "none"
        return f"{sum(value.values()):,} ({parts})" if name in _TOTALLED else parts
    if isinstance(value, list):
        return "".join(f"\n  {each}" for each in value) or "none"
    if isinstance(value, float):
        return f"{value:,.1f}"
    return value if name == "seed" else f"{value:,}"


_TOTALLED = ("signals", "strikes", "http_faults", "starts", "duplicates_by_excuse")


def judged(report, world, nemesis, sampler, failover_s, cap):
    """Fill in what the ledger, the table and the machines say; returns the report."""
    ledger = world.ledger.read()
    lives = lives_of(ledger)
    found = excuses(lives, nemesis.signals, world.proxy.read(), failover_s)
    reported = world.look_for_expired()
    report.shards_trimmed, report.records_expired = len(world.trims.shards), len(world.expired)
    report.shards_told_expired = len({each.shard for each in reported})
    report.violations += untrue_expiries(world.trims.shards, reported)
    verdict = judge(world.source.put, ledger, killed=set(found), cap=cap, expired=world.expired)
    report.records, report.deliveries = verdict.records, verdict.delivered
    report.lives, report.torn_lines = verdict.incarnations, verdict.torn
    report.duplicates = verdict.duplicates
    report.duplicates_in_one_life_max = verdict.duplicates_after_one_kill_max
    report.duplicates_by_excuse = duplicates_by_excuse(verdict.duplicates_of, found)
    report.violations += verdict.faults
    overlaps, faults = judge_overlaps(ledger, lives, nemesis.signals)
    report.batches_by_frozen = overlaps
    report.violations += faults
    report.violations += judge_lineage(ledger, world.parents, nemesis.signals, world.trims.shards)
    history = judge_history(world.aws.notes_path, world.table, failover_s, world.trims.shards)
    unnamed = unnamed_shards(world.trims.shards, reported, world.parents)
    unnamed -= _untold(history.ended, world.apps, nemesis.signals)
    report.violations += [
        f"{shard}: it had a lease and was trimmed, and no event names its loss [P13]"
        for shard in sorted(unnamed & history.keys)
        if world.expired.intersection(number for number, _, _ in world.source.put[shard])
    ]
    report.lease_writes, report.writes_refused = history.writes, history.refused
    report.takes, report.takes_by_expiry = history.takes, history.takes_by_expiry
    report.violations += history.faults
    report.violations += nemesis.surprises
    _judge_growth(report, world, sampler)
    return report


def _untold(ended, apps, signals):
    """Shards whose end was never logged, for the manager that was to log it was killed."""
    pids = {
        line["owner"]: line["pid"] for app in apps.values() for line in app.of("manager_started")
    }
    return {
        key
        for key, (at, owner) in ended.items()
        if owner in pids and died_before_it_logged(at, pids[owner], signals)
    }


def bugs_in(lines):
    """Lease processes that ended by a bug of kclrun, as their managers tell it."""
    return [
        f"{line.get('shard')}: {line['event']}: {line['reason']}"
        for line in lines
        if "exit code 70" in str(line.get("reason")) and line["event"] != "start_failed"
    ]


def duplicates_by_excuse(duplicates_of, found):
    """Counts by what happened to the process that had the record first."""
    counts = Counter()
    for pid, count in duplicates_of.items():
        counts[" and ".join(sorted(found.get(pid, {"nothing"})))] += count
    return dict(counts)


def judge_overlaps(ledger, lives, signals):
    """(batches that frozen processes finished beside their successor, faults) [I4]."""
    began_after = {}
    for several in lives.values():
        for former in several:
            began_after[former.shard, former.token, former.pid] = former.ended
    stops = defaultdict(list)
    for each in signals:
        if each.name == "STOP":
            stops[each.pid].append(each)
    beside, faults = Counter(), []
    for batch in ledger.batches:
        life = (batch.shard, batch.token, batch.pid)
        if batch.at > began_after[life] + _SLACK_S:
            beside[life] += 1
    for (shard, token, pid), count in beside.items():
        frozen = sum(each.until >= began_after[shard, token, pid] for each in stops[pid])
        if count > frozen:
            faults.append(
                f"{shard}: process {pid} with token {token} began {count} batches after its"
                f" successor had begun, and was frozen {frozen} times since [I4]"
            )
    return sum(beside.values()), faults


def judge_lineage(ledger, parents, signals, trimmed=frozenset()):
    """No child before each of its parents has ended; nothing of a parent after that [I3].

    A trimmed one that nobody held ends without a call of user code: its row is deleted.
    """
    ended, first, last = {}, {}, {}
    for mark in ledger.marks:
        if mark["what"] == "ended":
            ended.setdefault(mark["shard"], mark["at"])
    stopped = {each.pid for each in signals if each.name == "STOP"}
    for batch in ledger.batches:
        first.setdefault(batch.shard, batch.at)
        if batch.pid not in stopped:
            last[batch.shard] = batch.at
    faults = []
    for child, several in sorted(parents.items()):
        for parent in several:
            if child not in first or parent not in last:
                continue
            end = ended.get(parent, 0.0 if parent in trimmed else float("inf"))
            if first[child] < end:
                faults.append(f"{child} was read before its parent {parent} had ended [I3]")
            if last[parent] > first[child]:
                faults.append(f"{parent} was read after its child {child} had begun [I3]")
    return faults


def _judge_growth(report, world, sampler):
    for machine in world.apps:
        growth = sampler.growth(machine)
        if growth is not None:
            report.growth[machine] = str(growth)
    spared = list(world.apps)[-1]
    growth = sampler.growth(spared)
    if growth is None or growth.minutes < _GROWTH_MINUTES_MIN:
        return
    hours = growth.minutes / 60
    grown_kb = growth.rss_kb_an_hour * hours
    if grown_kb > RSS_KB_AT_FIRST_MAX + RSS_KB_AN_HOUR_MAX * hours:
        report.violations.append(f"the manager {spared} grows: {growth}")
    grown = growth.descriptors_an_hour * hours
    if grown > DESCRIPTORS_AT_FIRST_MAX + DESCRIPTORS_AN_HOUR_MAX * hours:
        report.violations.append(f"the manager {spared} keeps descriptors open: {growth}")
