"""Row `runtime`: what the whole runtime adds to the bare loop."""

from __future__ import annotations

from typing import Final

from bench.figures import Figure, Sample, Target, figure, paired_ratios
from bench.lease_rig import LEASE_ENTRY, LeaseRig, wait_until
from bench.servers import CannedServer
from kclrun.ipc.board import FetchSpec

_BARE_ENTRY: Final = "bench.bare_loop:run"
# Some 150 pages of 10,000 records, of which one or two are under way as it begins and ends.
_WINDOW_S: Final = 1.5
# Behind it are the claim, the first pages and the growth of the heap.
_WARM_UP_RECORDS: Final = 500_000
# No pause between two GetRecords: with the service's five a second both sides would only wait.
UNPACED: Final = FetchSpec(
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
