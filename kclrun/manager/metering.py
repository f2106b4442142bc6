"""Metrics and health of one manager: samples in the loop, served and published by other threads.

Holds: `Metering` and how it is put together from the settings. Rule: the loop makes a sample and
hands it over, and never waits for who looks at it. Measured: a sample of 100 leases costs 3 ms.
Look next: `sampling.py`, `observe/endpoint.py`, `observe/publishing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Final

import msgspec

from kclrun.config.listening import parse_listen
from kclrun.config.schema import Settings
from kclrun.manager.announcing import Announcer
from kclrun.manager.loop import Loop
from kclrun.manager.sampling import Sampler
from kclrun.model.time import Instant
from kclrun.observe.endpoint import Answer, HttpEndpoint
from kclrun.observe.health import HealthLimits, Verdict, health_body, judge
from kclrun.observe.logs import EventLog
from kclrun.observe.metric_window import MetricWindow
from kclrun.observe.metrics import FLEET_EVERY_S, LEASE_EVERY_S, ManagerSample
from kclrun.observe.publishing import Publisher
from kclrun.ports import MetricOutlet

__all__ = ["HealthBoard", "Metering", "open_metering"]

# A scrape or a health check sees nothing older.
_LOOK_EVERY_S: Final = 2.0
_LOOKS_PER_LEASE_VALUE: Final = round(LEASE_EVERY_S / _LOOK_EVERY_S)
_LOOKS_PER_FLEET_VALUE: Final = round(FLEET_EVERY_S / _LOOK_EVERY_S)
# CloudWatch keeps one value a minute.
_LOOKS_PER_PUBLICATION: Final = round(60.0 / _LOOK_EVERY_S)
# At the end, for the last minute's values: all leases are given up by then.
_LAST_WORDS_S: Final = 2.0
# A loop that stands still for a second or two is busy; after this long it renews nothing.
_LOOK_AGE_MIN_S: Final = 10.0
# After the grace, processes are forced and rows released: six seconds (`stopping.py`), and a look.
_AFTER_GRACE_S: Final = 10.0
_JSON: Final = "application/json"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


class HealthBoard:
    """The last sample, for other threads, and the verdict on it at the moment they ask."""

    def __init__(self, limits: HealthLimits, clock: Callable[[], Instant]) -> None:
        self._limits = limits
        self._clock = clock
        # Replaced as one, so that no reader sees a sample with another one's age.
        self._shown: tuple[ManagerSample | None, Instant] = (None, clock())

    def show(self, sample: ManagerSample, now: Instant) -> None:
        """Put up a sample taken `now`."""
        self._shown = (sample, now)

    def look(self) -> tuple[ManagerSample | None, Verdict]:
        """From any thread."""
        sample, instant = self._shown
        return sample, judge(sample, age_s=self._clock() - instant, limits=self._limits)

    def health(self) -> Answer:
        """What /health answers: 200 or 503, and why."""
        sample, verdict = self.look()
        body = msgspec.json.format(msgspec.json.encode(health_body(sample, verdict)), indent=2)
        return Answer(body + b"\n", _JSON, 200 if verdict.is_healthy else 503)


class Metering:
    """One manager's. `look` once, in the loop: it goes on by itself."""

    def __init__(
        self,
        sampler: Sampler,
        board: HealthBoard,
        *,
        loop: Loop,
        log: EventLog,
        endpoint: HttpEndpoint | None,
        publisher: Publisher | None,
        window: MetricWindow,
        announcer: Announcer | None = None,
    ) -> None:
        self._sampler = sampler
        self._board = board
        self._loop = loop
        self._log = log
        self._endpoint = endpoint
        self._publisher = publisher
        self._window = window
        self._announcer = announcer
        self._looks = 0

    def introduce(self) -> None:
        """Say where it listens; the port may have been chosen by the system."""
        if self._endpoint is not None:
            self._log.note("endpoint_listening", endpoint=self._endpoint.url)

    def look(self) -> None:
        """Take a sample now, and another one after a while."""
        sample = self._show()
        if self._publisher is not None:
            self._measure(sample)
        if self._announcer is not None:
            self._announcer.look(self._board.look()[1], sample.worker_leases)
        self._looks += 1
        self._loop.after(_LOOK_EVERY_S, self.look)

    def stop_begins(self) -> None:
        """A stop was asked for: who watches the service is told at once."""
        if self._announcer is not None:
            self._announcer.stop_begins()

    def close(self) -> None:
        """Serve no more; send what was measured since the last time, for two seconds at most."""
        if self._publisher is not None:
            self._add_leases(self._show())
            self._publish(self._publisher)
            self._publisher.close(_LAST_WORDS_S)
        if self._endpoint is not None:
            self._endpoint.close()
        if self._announcer is not None:
            self._announcer.close()

    def _show(self) -> ManagerSample:
        now = self._loop.now()
        sample = self._sampler.take(now)
        if self._publisher is not None:
            sample = msgspec.structs.replace(
                sample, unpublished_total=self._publisher.dropped_total
            )
        self._board.show(sample, now)
        return sample

    def _measure(self, sample: ManagerSample) -> None:
        assert self._publisher is not None, "measured is what is published"
        # From the second look on: by then the table has been scanned, as a rule.
        if self._looks % _LOOKS_PER_LEASE_VALUE == 1:
            self._add_leases(sample)
        if self._looks % _LOOKS_PER_FLEET_VALUE == 1:
            self._window.add_fleet(sample)
        if self._looks % _LOOKS_PER_PUBLICATION == _LOOKS_PER_PUBLICATION - 1:
            self._publish(self._publisher)

    def _add_leases(self, sample: ManagerSample) -> None:
        for shard, counts in self._sampler.take_departed(sample).items():
            self._window.add_counts(shard, counts)
        self._window.add_leases(sample.leases)

    def _publish(self, publisher: Publisher) -> None:
        measurements = self._window.close(self._sampler.wall_time())
        if measurements:
            publisher.offer(measurements)


def open_metering(
    settings: Settings,
    sampler: Sampler,
    *,
    failover_s: float,
    outlet: MetricOutlet | None,
    announcer: Announcer | None = None,
    loop: Loop,
    log: EventLog,
) -> Metering | None:
    """What `observe:` asks for, its server listening, and what `announcer` needs; None for neither.

    Raises: SettingsError if the server cannot listen where it should.
    """
    observe = settings.observe
    if observe.listen is None and outlet is None and announcer is None:
        return None
    limits = HealthLimits(
        # An idle shard is looked at each `fetch.idle`, which may be long: that is no standstill.
        stall_s=float(settings.stall) + float(settings.fetch.idle),
        look_age_max_s=max(failover_s, _LOOK_AGE_MIN_S),
        drain_max_s=float(settings.shutdown.grace) + _AFTER_GRACE_S,
    )
    board = HealthBoard(limits, loop.now)
    cloudwatch = observe.cloudwatch
    return Metering(
        sampler,
        board,
        loop=loop,
        log=log,
        endpoint=_endpoint(observe.listen, board) if observe.listen is not None else None,
        publisher=Publisher(outlet, log) if outlet is not None else None,
        window=MetricWindow(
            settings.application,
            cloudwatch.dimensions if cloudwatch is not None else {},
            by_shard=cloudwatch is not None and cloudwatch.detail == "shard",
        ),
        announcer=announcer,
    )


def _endpoint(listen: str | int, board: HealthBoard) -> HttpEndpoint:
    # Some 50 ms of imports, for those who want it only.
    from kclrun.observe.prometheus import Exposition

    exposition = Exposition(board.look, metadata.version("kclrun"))
    host, port = parse_listen(listen)
    routes = {
        "/health": board.health,
        "/metrics": lambda: Answer(exposition.text(), _PROMETHEUS),
    }
    return HttpEndpoint(host, port, routes)
