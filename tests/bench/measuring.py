"""Runs variants round-robin (A B A B …) in this process and times each run."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Final

from bench.figures import Sample

# Does some work and says how much; figures are per unit of it.
Variant = Callable[[], float]

# The first run of each pays for connections, caches and lazy imports.
_WARM_UPS: Final = 2


def interleaved(variants: Mapping[str, Variant], rounds: int) -> dict[str, list[Sample]]:
    """`rounds` samples of each variant, every round one run of each, in turn."""
    for _ in range(_WARM_UPS):
        for variant in variants.values():
            variant()
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            samples[name].append(timed(variant))
    return samples


def timed(variant: Variant) -> Sample:
    """One run. The garbage of the one before is collected first, outside of the time."""
    gc.collect()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    work = variant()
    return Sample(work, time.process_time() - cpu_s, time.perf_counter() - wall_s)
