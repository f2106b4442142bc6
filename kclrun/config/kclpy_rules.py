"""What `processor: kclpy:…` asks of the other settings. Pure; `rules.py` tells it with the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kclrun.config.schema import Settings
from kclrun.config.settle import Problem

__all__ = ["kclpy_rules"]

_KCLPY: Final = "kclpy:"


def kclpy_rules(settings: Settings) -> Iterator[Problem]:
    """Such a processor checkpoints by itself, and may hold records back until it does: a runtime
    that checkpointed beside it would lose those in a crash."""
    named = (settings.processor, *(stream.processor for stream in settings.streams))
    if not any(each is not None and each.startswith(_KCLPY) for each in named):
        return
    if settings.engine == "spark":
        yield Problem(
            ("processor",),
            "kclpy: is for engine: fleet: a processor of amazon_kclpy checkpoints by itself, and"
            " Spark commits whole batches",
        )
    elif settings.checkpoint.every != "manual":
        yield Problem(
            ("checkpoint", "every"),
            "is manual for a processor of amazon_kclpy, which checkpoints by itself; write"
            " checkpoint: {every: manual, uncheckpointed_max: 10000000}",
        )
