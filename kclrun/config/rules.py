"""What one setting says about another, and bounds that types cannot hold.

Pure: `now` is an argument. Each rule yields its problems; `load.py` tells them all together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kclrun.config.embedded_schema import EmbeddedSettings
from kclrun.config.engine_rules import EMBEDDED, engine_rules
from kclrun.config.kclpy_rules import kclpy_rules
from kclrun.config.observe_rules import observe_rules
from kclrun.config.schema import Settings, StartAtLeases
from kclrun.config.settle import Problem
from kclrun.config.start_position import parse_start
from kclrun.config.stream_rules import stream_rules
from kclrun.errors import SettingsError
from kclrun.model.address import why_no_endpoint
from kclrun.model.lease import FAILOVER_MAX_S, FAILOVER_MIN_S
from kclrun.model.time import WallTime

__all__ = ["EMBEDDED", "broken_rules"]

# GetRecords may be called five times a second and shard: a shorter pause is throttled.
_IDLE_MIN_S: Final = 0.2


def broken_rules(settings: Settings, now: WallTime) -> Iterator[Problem]:
    """The problems of settings that each have the right type."""
    yield from stream_rules(settings, now)
    yield from _start(settings, now)
    yield from engine_rules(settings)
    yield from kclpy_rules(settings)
    yield from _addresses(settings)
    yield from _durations(settings)
    yield from _embedded(settings)
    yield from _summary(settings)
    yield from observe_rules(settings.observe)
    yield from _hooks(settings)


def _start(settings: Settings, now: WallTime) -> Iterator[Problem]:
    if isinstance(settings.start, StartAtLeases):
        return
    try:
        parse_start(settings.start, now)
    except SettingsError as error:
        yield Problem(("start",), str(error).removeprefix("start: "))


def _summary(settings: Settings) -> Iterator[Problem]:
    path = settings.output.path if settings.output is not None else None
    if settings.summary is not None and (path is None or "://" in path):
        yield Problem(("summary",), "needs output.path: it is called with that folder")


def _addresses(settings: Settings) -> Iterator[Problem]:
    endpoint = settings.aws.endpoint
    if endpoint is not None and endpoint != EMBEDDED:
        wrong = why_no_endpoint(endpoint)
        if wrong:
            yield Problem(("aws", "endpoint"), f"expected {EMBEDDED} or an https URL: {wrong}")
    for service, url in settings.aws.endpoints.items():
        wrong = why_no_endpoint(url)
        if wrong:
            yield Problem(("aws", "endpoints", service), f"expected an https URL: {wrong}")


def _durations(settings: Settings) -> Iterator[Problem]:
    failover = settings.leases.failover
    if not FAILOVER_MIN_S <= failover <= FAILOVER_MAX_S:
        yield Problem(("leases", "failover"), "expected 1s to 15m")
    if settings.fetch.idle < _IDLE_MIN_S:
        yield Problem(
            ("fetch", "idle"), "expected 200ms or more: the service allows 5 reads a second"
        )
    if settings.fetch.buffer <= 0:
        yield Problem(("fetch", "buffer"), "expected more than nothing, such as 16MiB")
    every = settings.checkpoint.every
    if not isinstance(every, str) and every <= 0:
        yield Problem(("checkpoint", "every"), "expected more than 0s; `batch` is after each batch")
    if settings.stall <= failover:
        yield Problem(("stall",), "expected more than leases.failover: a move takes that long")


def _hooks(settings: Settings) -> Iterator[Problem]:
    instance = settings.instance
    hooks = {instance.launch_hook, instance.termination_hook}
    if None not in hooks and len(hooks) == 1:
        yield Problem(
            ("instance", "termination_hook"), "is the launch hook: a hook is for one of the two"
        )


def _embedded(settings: Settings) -> Iterator[Problem]:
    embedded = settings.embedded
    if embedded is None:
        return
    if settings.aws.endpoint != EMBEDDED:
        yield Problem(("embedded",), "is for aws.endpoint: embedded; remove it, or set that")
    yield from _resharding(embedded)


def _resharding(embedded: EmbeddedSettings) -> Iterator[Problem]:
    path = ("embedded", "reshard")
    if embedded.reshard and embedded.fill is None:
        yield Problem(path, "needs embedded.fill: it happens after shares of the fill")
    after = [step.after for step in embedded.reshard]
    if after != sorted(after):
        yield Problem(path, "expected the steps in the order of `after`")
    for index, step in enumerate(embedded.reshard):
        chosen = [which for which in (step.split, step.merge) if which is not None]
        if len(chosen) != 1:
            yield Problem((*path, index), "expected one of split and merge")
        elif chosen[0] < 0:
            yield Problem((*path, index), "shards are counted from 0")
