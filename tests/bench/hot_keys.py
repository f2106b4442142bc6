"""Row `hot-keys`: what measuring the keys of a shard adds to the reading of its records."""

import statistics
import time
from typing import Final

import msgspec

from bench.canned_pages import iterator_of
from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.lease_rig import LEASE_ENTRY, LeaseRig, wait_until
from bench.measuring import interleaved
from bench.record_path import our_reader
from bench.runtime import UNPACED
from bench.servers import CannedServer
from kclrun.codec.kpl import open_aggregates
from kclrun.model.shard import HASH_KEY_MAX, HashRange
from kclrun.model.time import Instant
from kclrun.traffic.hot_keys import KeyMeter

_LIMIT: Final = 10_000
_WHOLE: Final = HashRange(0, HASH_KEY_MAX)
_WINDOW_S: Final = 60.0
# The service allows five reads a second and shard: so fast the meter's clock goes.
_PAGE_S: Final = 0.2
# A hundred pages are 20 s of a shard, and have one report.
_PAGES: Final = 100
_WARM_UP_RECORDS: Final = 500_000
_SAMPLE_S: Final = 1.5
# The kernel counts CPU in 10 ms: 8 s of a lease process that reads a full shard take 40 ms.
_PACED_SAMPLE_S: Final = 8.0


def hot_keys(rounds: int) -> list[Figure]:
    """The CPU of measuring the keys of a shard, against the reading of it without.

    The keys of a page all differ, which is the worst case of the counts. Two runs differ by more
    than 1 % by themselves, so the meter's own CPU is timed around its calls, between the fetches of
    pages, with the caches as cold as they leave them. Its clock goes at the pace of the service
    (five reads a second), because it samples by time: a faster clock would show less. The target is
    on its CPU for a second of a full shard (1,000 records and 1 MB) against the CPU of a lease
    process that reads such a shard at that pace without it.

    Told beside it: its part of fetching and opening alone, and two whole lease processes that read
    without a pause, with it and without.
    """
    figures: list[Figure] = []
    with CannedServer() as server:
        for shape, label in (
            ("full", "a full shard, 200 x 1 kB a page"),
            ("large", "1k x 1 kB a page"),
            ("aggregated", "40 x 50 kB aggregates a page"),
        ):
            metered = _Metered(server, shape)
            samples = interleaved({"with": metered.run, "without": metered.run_bare}, rounds)
            figures += _figures(label, samples, metered.parts[-rounds:])
            if shape == "full":
                meter_s = [part / (_PAGES * _PAGE_S) for part in metered.parts[-rounds:]]
    return [_beside_a_process(meter_s, max(1, rounds // 5)), *figures, *_whole(max(1, rounds // 3))]


class _Metered:
    """One shape read with a meter, and without. `parts`: the meter's CPU seconds in each run."""

    def __init__(self, server: CannedServer, shape: str) -> None:
        self._reader = our_reader(server.url)
        self._shape = shape
        self._now = Instant(1_000.0)
        self._meter = KeyMeter(_WHOLE, _WINDOW_S, self._now)
        self.parts: list[float] = []

    def run(self) -> float:
        clock = time.thread_time
        measured_s = 0.0
        for number in range(_PAGES):
            page = self._reader.fetch(iterator_of(f"{self._shape}-1", number), _LIMIT)
            opened = open_aggregates(page.records)
            before = clock()
            self._now = Instant(self._now + _PAGE_S)
            self._meter.took(page.records, 0, self._now)
            if opened is not page.records:
                self._meter.opened(opened)
            self._meter.report(self._now)
            measured_s += clock() - before
        self.parts.append(measured_s)
        return float(_PAGES)

    def run_bare(self) -> float:
        for number in range(_PAGES):
            page = self._reader.fetch(iterator_of(f"{self._shape}-1", number), _LIMIT)
            open_aggregates(page.records)
        return float(_PAGES)


def _figures(label: str, samples: dict[str, list[Sample]], parts: list[float]) -> list[Figure]:
    bare_s = [sample.cpu_s for sample in samples["without"]]
    return [
        figure(
            *("hot-keys", f"{label}: the meter's CPU ÷ of fetching and opening", "%"),
            [100 * ratio for ratio in paired_ratios(parts, bare_s)],
        )
    ]


def _beside_a_process(meter_s: list[float], rounds: int) -> Figure:
    """The meter's CPU for a second of a full shard ÷ that of a lease process without a meter."""
    fetch = msgspec.structs.replace(UNPACED, floor_s=_PAGE_S, hot_window_s=0.0)
    spent: list[float] = []
    with CannedServer() as canned, LeaseRig(canned, {"fetch": fetch}) as rig:
        rig.prepare(LEASE_ENTRY)
        for number in range(rounds):
            with rig.running(LEASE_ENTRY, f"full-{number}") as process:
                wait_until(lambda process=process: process.records() > 0, "the first records")
                sample = process.sample(_PACED_SAMPLE_S)
                spent.append(sample.cpu_s / sample.wall_s)
    process_s = statistics.median(spent)
    return figure(
        *("hot-keys", "a full shard: the meter's CPU ÷ of a lease process without it", "%"),
        [100 * each / process_s for each in meter_s],
        target=Target(at_most=1.0),
    )


def _whole(rounds: int) -> list[Figure]:
    """Records a second of CPU of a whole lease process, with its keys measured ÷ without."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(rounds):
        for name, window_s in (("with", _WINDOW_S), ("without", 0.0)):
            fetch = msgspec.structs.replace(UNPACED, hot_window_s=window_s)
            with CannedServer() as canned, LeaseRig(canned, {"fetch": fetch}) as rig:
                rates[name].append(_rate(rig, f"small-{name}-{number}"))
    return [
        figure(
            *("hot-keys", "a lease process: records/CPU-s with ÷ without", "x"),
            paired_ratios(rates["with"], rates["without"]),
        )
    ]


def _rate(rig: LeaseRig, shard_id: str) -> float:
    rig.prepare(LEASE_ENTRY)
    with rig.running(LEASE_ENTRY, shard_id) as process:
        wait_until(lambda: process.records() >= _WARM_UP_RECORDS, "the first records")
        return process.sample(_SAMPLE_S).per_cpu_s
