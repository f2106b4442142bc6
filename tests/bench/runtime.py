"""Row `runtime`: what the whole runtime adds to the bare loop."""

import tempfile
import time
from pathlib import Path
from typing import Final

from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.lease_rig import LEASE_ENTRY, LeaseRig, wait_until
from bench.servers import CannedServer
from kclrun.model.lease import OwnerId
from kclrun.model.policies import FetchPolicy
from kclrun.model.reading import Replay
from kclrun.model.time import WallTime
from kclrun.observe.story import StoryRing

_BARE_ENTRY: Final = "bench.bare_loop:run"
# Some 150 pages of 10,000 records, of which one or two are under way as it begins and ends.
_WINDOW_S: Final = 1.5
# Behind it are the claim, the first pages and the growth of the heap.
_WARM_UP_RECORDS: Final = 500_000
# Of one manager by default, and what `observe.story` keeps of a shard.
_LEASES: Final = 64
_ENTRIES_PER_S: Final = 0.2
_NOTED: Final = 5_000
# No pause between two GetRecords: with the service's five a second both sides would only wait.
UNPACED: Final = FetchPolicy(
    idle_s=0.0,
    floor_s=0.0,
    buffer_bytes=16 * 2**20,
    batch_max=10_000,
    kpl_range="keep",
)


def runtime(rounds: int) -> list[Figure]:
    """One lease in a real lease process: fetch, open, deliver to a no-op processor, checkpoint.

    Started through the real launcher, channel and segment; all settings are the defaults (16 MiB
    ahead, a checkpoint each 10 s or 50,000 records) but for the pause between reads, which is
    none. Checkpoints and heartbeats go to moto in another process. Against the bare loop
    (`bare_loop.py`): fetch, decode and open over the same server, in a process made the same way.
    Fair because both are measured from outside in the same manner: records on the status slot,
    CPU of all threads of the process, both by the wall clock and by the second of CPU. A new
    process each round, in turn. The target is on records per wall second of one lease.
    """
    figures: list[Figure] = []
    with CannedServer() as canned, LeaseRig(canned, {"fetch": UNPACED}) as rig:
        for entry in (LEASE_ENTRY, _BARE_ENTRY):
            rig.prepare(entry)
        for shape, label, target in (
            ("small", "10k x 200 B", Target(at_least=0.8)),
            ("aggregated", "40 x 50 kB aggregates", None),
        ):
            ours: list[Sample] = []
            bare: list[Sample] = []
            for number in range(rounds):
                ours.append(_sample(rig, LEASE_ENTRY, f"{shape}-runtime-{number}"))
                bare.append(_sample(rig, _BARE_ENTRY, f"{shape}-bare-{number}"))
            figures += _figures(label, ours, bare, target)
    return figures


def replay(rounds: int) -> list[Figure]:
    """The lease of row `runtime`, read as `kclrun replay` reads, beside one of the fleet.

    The range does not end while it is measured, so that each record is compared with its end. The
    story: what a transition costs the loop of a manager, at the most that a shard may make (twelve
    a minute, for 64 leases), as a share of one core.
    """
    endless = Replay(until_at=WallTime(1e11))
    of_fleet: list[Sample] = []
    replayed: list[Sample] = []
    with (
        CannedServer() as canned,
        LeaseRig(canned, {"fetch": UNPACED}) as fleet,
        LeaseRig(canned, {"fetch": UNPACED, "replay": endless}) as replaying,
    ):
        for rig in (fleet, replaying):
            rig.prepare(LEASE_ENTRY)
        for number in range(rounds):
            of_fleet.append(_sample(fleet, LEASE_ENTRY, f"small-fleet-{number}"))
            replayed.append(_sample(replaying, LEASE_ENTRY, f"small-replay-{number}"))
    notes_s = [_noting_s() for _ in range(rounds)]
    return [
        figure(
            *("replay", "10k x 200 B: records/s ÷ those of the fleet's lease", "x"),
            paired_ratios(_per_wall_s(replayed), _per_wall_s(of_fleet)),
            target=Target(at_least=0.9),
        ),
        figure(
            *("replay", "10k x 200 B: records/CPU-s ÷ those of the fleet's lease", "x"),
            paired_ratios(_per_cpu_s(replayed), _per_cpu_s(of_fleet)),
        ),
        figure(
            *("replay", "recording the story of 64 leases in trouble", "% of a core"),
            [100 * each * _LEASES * _ENTRIES_PER_S for each in notes_s],
            target=Target(at_most=0.1),
        ),
    ]


def _noting_s() -> float:
    """CPU seconds of all threads for one entry, from the event to the file."""
    fields = {"position": "4" * 56, "former": "kclrun:az1:host-0123456789:0123456789abcdef"}
    with tempfile.TemporaryDirectory() as folder:
        ring = StoryRing(Path(folder), OwnerId("kclrun:az1:host-0123456789:0123456789abcdef"))
        began = time.process_time()
        for number in range(_NOTED):
            ring.note("lease_taken", f"shard-{number}", fields)  # each shard within its limit
        ring.close()
        return (time.process_time() - began) / _NOTED


def _sample(rig: LeaseRig, entry: str, shard_id: str) -> Sample:
    with rig.running(entry, shard_id) as process:
        wait_until(lambda: process.records() >= _WARM_UP_RECORDS, "the first records")
        return process.sample(_WINDOW_S)


def _figures(
    label: str, ours: list[Sample], bare: list[Sample], target: Target | None
) -> list[Figure]:
    return [
        figure(
            *("runtime", f"{label}: the runtime", "k records/s"),
            [sample.per_wall_s / 1000 for sample in ours],
        ),
        figure(
            *("runtime", f"{label}: the bare loop", "k records/s"),
            [sample.per_wall_s / 1000 for sample in bare],
        ),
        figure(
            *("runtime", f"{label}: records/s ÷ the bare loop's", "x"),
            paired_ratios(_per_wall_s(ours), _per_wall_s(bare)),
            target=target,
        ),
        figure(
            *("runtime", f"{label}: records/CPU-s ÷ the bare loop's", "x"),
            paired_ratios(_per_cpu_s(ours), _per_cpu_s(bare)),
        ),
    ]


def _per_wall_s(samples: list[Sample]) -> list[float]:
    return [sample.per_wall_s for sample in samples]


def _per_cpu_s(samples: list[Sample]) -> list[float]:
    return [sample.per_cpu_s for sample in samples]
