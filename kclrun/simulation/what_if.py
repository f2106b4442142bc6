"""A user's what-if: a fleet, the events that hit it, and the resulting figures.

The events come one after the other, each with time to settle. The fleet starts cold; then, as
requested, a group of hosts is lost, every host is replaced, the stream is resharded. The module
does not know how figures are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, Literal

import msgspec

from kclrun.model.lease import OwnerId
from kclrun.simulation.arrivals import RECORD_BYTES, Traffic
from kclrun.simulation.fleet import BOOT_SPREAD_S, Fleet
from kclrun.simulation.record import FleetRecord
from kclrun.simulation.world import FleetSettings


# The state of a simulated fleet over time, look after look: for pictures and for programs that
# draw.
#
# Each look adds one value a column. An owner's shards are stored only where their number changed,
# so that a large fleet at rest stays small.
class OwnerSeries(msgspec.Struct):
    """One worker from its start on: `[seconds, shards]` wherever their number changed. `left_s` is
    the time when it was first seen to have left; None if it stayed to the end."""

    group: str
    shards: list[tuple[float, int]]
    left_s: float | None = None


class Series(msgspec.Struct, kw_only=True):
    """Columns of equal length, one value a look; and each worker by its owner id.

    `at_s` counts from the start. `unread` is the number of shards that have something to read and
    no reader; `unread_longest_s` is the longest time that one of them has been so. `moves` and
    DynamoDB's `write_units` and `read_units` are totals up to then. With skewed traffic
    `load_greatest` is the largest load of a worker, in the mean worker's. `load_least` is what even
    counts allow at best: the hottest shard and the lightest ones beside it. Otherwise both are
    empty.
    """

    at_s: list[float] = []
    unread: list[int] = []
    unread_longest_s: list[float] = []
    shards_even: list[float] = []
    moves: list[int] = []
    write_units: list[float] = []
    read_units: list[float] = []
    load_greatest: list[float] = []
    load_least: list[float] = []
    owners: dict[OwnerId, OwnerSeries] = {}


class Recorder:
    """Records the state of one fleet at each call of `look`."""

    def __init__(self, fleet: Fleet) -> None:
        self.series = Series()
        # With skewed traffic: the largest load when all shards were first read and counts even.
        self.load_by_counts: float | None = None
        self._fleet = fleet

    def look(self) -> None:
        """Record the current state."""
        fleet, series = self._fleet, self.series
        now = round(fleet.scheduler.now, 3)
        unread, costs = fleet.observer.gaps.unread(), fleet.table.costs
        counts = fleet.shards_by_owner()
        series.at_s.append(now)
        series.unread.append(len(unread))
        series.unread_longest_s.append(round(now - min(unread.values(), default=now), 3))
        even = fleet.stream.open_count() / len(counts) if counts else 0.0
        series.shards_even.append(round(even, 3))
        series.moves.append(fleet.observer.tally.moves)
        series.write_units.append(costs.write_units)
        series.read_units.append(round(costs.read_units, 1))
        if fleet.stream.traffic.skew:
            self._note_loads(is_even=not unread and fleet.is_balanced())
        self._note_owners(counts, now)

    def _note_loads(self, *, is_even: bool) -> None:
        stream, loads = self._fleet.stream, self._fleet.loads_by_owner()
        rates = sorted(stream.records.bytes_per_s(shard_id) for shard_id in stream.open_ids())
        mean = sum(rates) / max(1, len(loads))
        beside = max(0, len(rates) // max(1, len(loads)) - 1)
        least = max(mean, rates[-1] + sum(rates[:beside]))
        self.series.load_greatest.append(round(max(loads.values(), default=0.0) / mean, 3))
        self.series.load_least.append(round(least / mean, 3))
        if is_even and self.load_by_counts is None:
            self.load_by_counts = self.series.load_greatest[-1]

    def _note_owners(self, counts: dict[OwnerId, int], now: float) -> None:
        owners = self.series.owners
        groups = {host.owner: host.group for host in self._fleet.hosts if host.owner not in owners}
        for owner, count in counts.items():
            known = owners.get(owner)
            if known is None:
                owners[owner] = OwnerSeries(groups[owner], [(now, count)])
            elif known.shards[-1][1] != count:
                known.shards.append((now, count))
        for owner, known in owners.items():
            if owner not in counts and known.left_s is None:
                known.left_s = now


# Balance is looked at twice a second, which users call immediately.
_LOOK_EVERY_S: Final = 0.5
# The successor of a replaced host starts after this time, as with a service manager.
_RESTART_S: Final = 1.0
# By then the leases of a lost host have readers again (L1); this is the time to read its backlog.
_CATCH_UP_S: Final = 5.0

Deploy = Literal["rolling"]
Reshard = Literal["double", "halve"]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request. Groups are called a, b, c …; `group_sizes` has the number of workers of
    each; `records_per_s` is that of the whole stream, `skew` as in `Traffic`."""

    group_sizes: tuple[int, ...]
    shards: int
    lose_group: str | None = None
    deploy: Deploy | None = None
    reshard: Reshard | None = None
    minutes: float = 10.0
    seed: int = 1
    records_per_s: float = 0.0
    record_bytes: int = RECORD_BYTES
    skew: float = 0.0
    settings: FleetSettings = FleetSettings()

    @property
    def workers(self) -> int:
        return sum(self.group_sizes)


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The time from one event of the fleet to the next. Times in seconds.

    `balanced_after_s`: from this time on it stayed balanced; None if it did not. Gaps are times in
    which a shard had something to read and no reader.
    """

    name: str
    began_s: float
    balanced_after_s: float | None
    gaps: int
    gap_p50_s: float | None
    gap_p99_s: float | None
    gap_max_s: float | None
    moves: int
    duplicates: int
    write_units: float
    read_units: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer. Units are DynamoDB's, for the whole time; `series` is the course of it.
    `load_by_counts`: the largest load with even counts, before any exchange; None without skew."""

    phases: tuple[PhaseFigures, ...]
    workers: int
    shards: int
    shards_per_owner_min: int
    shards_per_owner_max: int
    shards_per_owner_even: float
    records: int
    duplicates: int
    moves: int
    write_units: float
    read_units: float
    virtual_s: float
    events: int
    load_by_counts: float | None
    series: Series


class _Mark(msgspec.Struct, frozen=True):
    """The counts at the beginning of a phase."""

    name: str
    began_s: float
    moves: int
    duplicates: int
    write_units: float
    read_units: float


def run_what_if(asked: WhatIf, replay: str) -> Figures:
    """Run it. Raises: InvariantViolation where a promise broke, with `replay` in it."""
    return _Run(asked, replay).run()


class _Run:
    def __init__(self, asked: WhatIf, replay: str) -> None:
        self._asked = asked
        self._fleet = Fleet(
            asked.seed,
            shards=asked.shards,
            traffic=Traffic(
                records_per_s=asked.records_per_s,
                record_bytes=asked.record_bytes,
                skew=asked.skew,
            ),
            observer_kind=FleetRecord,
            settings=asked.settings,
            replay=replay,
        )
        self._unbalanced_until: list[float] = []
        self._recorder = Recorder(self._fleet)

    def run(self) -> Figures:
        phases = self._phases()
        self._recorder.look()
        length_s = self._asked.minutes * 60 / len(phases)
        marks = [self._begin(name, befalls, length_s) for name, befalls in phases]
        settings = self._asked.settings
        self._fleet.require_all_read(settings.read_again_s + _CATCH_UP_S + settings.poll_s)
        return self._figures(marks)

    def _phases(self) -> list[tuple[str, Callable[[float], None]]]:
        asked = self._asked
        phases: list[tuple[str, Callable[[float], None]]] = [("cold start", self._start)]
        if asked.lose_group is not None:
            phases.append((f"group {asked.lose_group} lost", self._lose_group))
        if asked.deploy is not None:
            phases.append((f"{asked.deploy} deploy", self._deploy))
        if asked.reshard is not None:
            phases.append((f"shards: {asked.reshard}", self._reshard))
        return phases

    def _begin(self, name: str, befalls: Callable[[float], None], length_s: float) -> _Mark:
        """Start a phase, and look at the balance until the next one begins."""
        fleet = self._fleet
        costs, tally, began_s = fleet.table.costs, fleet.observer.tally, fleet.scheduler.now
        mark = _Mark(
            name, began_s, tally.moves, tally.duplicates, costs.write_units, costs.read_units
        )
        befalls(length_s)
        unbalanced_until = began_s
        while fleet.scheduler.now < began_s + length_s:
            fleet.run_for(min(_LOOK_EVERY_S, began_s + length_s - fleet.scheduler.now))
            self._recorder.look()
            if not fleet.is_balanced():
                unbalanced_until = fleet.scheduler.now
        self._unbalanced_until.append(unbalanced_until)
        return mark

    # The events.

    def _start(self, _: float) -> None:
        chance = self._fleet.scheduler.chance("boots")
        for number, group in enumerate(_dealt_out(self._asked.group_sizes)):
            self._fleet.after(
                chance.uniform(0, BOOT_SPREAD_S),
                partial(self._fleet.add_host, group, f"host-{number}"),
            )

    def _lose_group(self, _: float) -> None:
        for host in self._fleet.hosts:
            if host.group == self._asked.lose_group:
                host.kill()

    def _deploy(self, length_s: float) -> None:
        """Replaces one host after the other, so that all are replaced in half of the time."""
        hosts = list(self._fleet.hosts_up())
        for number, host in enumerate(hosts):
            slot = host.name.split(":")[1]
            at_s = number * length_s / 2 / len(hosts)
            self._fleet.after(at_s, host.drain)
            self._fleet.after(
                at_s + _RESTART_S,
                partial(self._fleet.add_host, host.group, slot),
            )

    def _reshard(self, _: float) -> None:
        count = self._fleet.stream.open_count()
        self._fleet.reshard(count * 2 if self._asked.reshard == "double" else (count + 1) // 2)

    # The results.

    def _figures(self, marks: Sequence[_Mark]) -> Figures:
        fleet, now = self._fleet, self._fleet.scheduler.now
        tally, costs = fleet.observer.tally, fleet.table.costs
        end = _Mark("", now, tally.moves, tally.duplicates, costs.write_units, costs.read_units)
        held = sorted(fleet.shards_by_owner().values())
        return Figures(
            phases=tuple(
                self._phase(mark, following, unbalanced_until)
                for mark, following, unbalanced_until in zip(
                    marks, [*marks[1:], end], self._unbalanced_until, strict=True
                )
            ),
            workers=len(held),
            shards=fleet.stream.open_count(),
            shards_per_owner_min=held[0],
            shards_per_owner_max=held[-1],
            shards_per_owner_even=round(fleet.stream.open_count() / len(held), 2),
            records=tally.records,
            duplicates=tally.duplicates,
            moves=tally.moves,
            write_units=costs.write_units,
            read_units=round(costs.read_units, 1),
            virtual_s=now,
            events=fleet.scheduler.events_total,
            load_by_counts=self._recorder.load_by_counts,
            series=self._recorder.series,
        )

    def _phase(self, mark: _Mark, following: _Mark, unbalanced_until: float) -> PhaseFigures:
        gaps = self._fleet.observer.gaps.since(mark.began_s, until_s=following.began_s)
        lengths = sorted(gap.length_s for gap in gaps)
        is_settled = unbalanced_until < following.began_s
        return PhaseFigures(
            name=mark.name,
            began_s=mark.began_s,
            balanced_after_s=unbalanced_until - mark.began_s if is_settled else None,
            gaps=len(lengths),
            gap_p50_s=_share(lengths, 0.5),
            gap_p99_s=_share(lengths, 0.99),
            gap_max_s=_share(lengths, 1.0),
            moves=following.moves - mark.moves,
            duplicates=following.duplicates - mark.duplicates,
            write_units=following.write_units - mark.write_units,
            read_units=round(following.read_units - mark.read_units, 1),
        )


def group_names(count: int) -> tuple[str, ...]:
    """The groups of a fleet: a, b, c …"""
    return tuple(chr(ord("a") + number) for number in range(count))


def _dealt_out(sizes: Sequence[int]) -> Iterator[str]:
    """The group of each worker, one of each group in turn until all are full."""
    for number in range(max(sizes)):
        for group, size in zip(group_names(len(sizes)), sizes, strict=True):
            if number < size:
                yield group


def _share(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value for which so large a share of the values is at or below it."""
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
