"""Metrics on their way out: sent once, never waited for, dropped with a count and one warning."""

import os
import threading
from pathlib import Path

import msgspec
import pytest

from kclrun.errors import AccessDenied, OutcomeUnknown, Throttled, Unavailable
from kclrun.model.record import Measurement, Statistics
from kclrun.model.retries import Retries
from kclrun.observe import publishing
from kclrun.observe.logs import EventLog, LineSink
from kclrun.observe.publishing import Publisher
from tests.patience import HUNG_S


def measurement(name="records"):
    return Measurement(
        name=name, unit="Count", dimensions=(), measured_at=0.0, statistics=Statistics.of(1)
    )


class Outlet:
    """Fails as told, one outcome a request; then takes everything."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.asked = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def batches(self, measurements):
        yield from ([one] for one in measurements)

    def put(self, batch):
        self.entered.set()
        assert self.gate.wait(HUNG_S)
        self.asked.append([one.name for one in batch])
        if self.outcomes and (error := self.outcomes.pop(0)) is not None:
            raise error


class Rig:
    def __init__(self, tmp_path):
        self.path = Path(tmp_path) / "log"
        self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._sink = LineSink(self._fd)
        self.log = EventLog(self._sink, app="orders", owner="me")

    def publish(self, outlet, *names):
        """Each as a publication of its own, to the end; the measurements that were dropped."""
        publisher = Publisher(outlet, self.log)
        for name in names:
            publisher.offer([measurement(name)])
        publisher.close(10.0)
        return publisher.dropped_total

    def events(self):
        lines = self.path.read_bytes().splitlines()
        return [(line["event"], line) for line in map(msgspec.json.decode, lines)]

    def close(self):
        self._sink.close()
        os.close(self._fd)


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.close()


def test_what_is_offered_is_sent_before_the_close(rig):
    outlet = Outlet()

    assert rig.publish(outlet, "a", "b") == 0
    assert outlet.asked == [["a"], ["b"]]
    assert rig.events() == []


@pytest.mark.seconds
@pytest.mark.parametrize("error", [Throttled("slow"), Unavailable("away")])
def test_a_request_that_had_no_effect_is_sent_again(rig, error):
    outlet = Outlet(error)

    assert rig.publish(outlet, "a") == 0
    assert outlet.asked == [["a"], ["a"]]


@pytest.mark.parametrize(("failures", "requests", "dropped"), [(2, 3, 0), (3, 3, 1)])
def test_a_batch_is_tried_three_times_with_a_pause_of_a_second_and_then_two(
    rig, monkeypatch, failures, requests, dropped
):
    paused = []

    class Paused(Retries, frozen=True):
        def pause_s(self, error, attempt, chance, elapsed_s=0.0):
            pause_s = super().pause_s(error, attempt, chance, elapsed_s)
            paused.append(pause_s)
            return None if pause_s is None else 0.0

    limits = msgspec.structs.asdict(publishing._RETRIES)
    monkeypatch.setattr(publishing, "_RETRIES", Paused(**limits))
    monkeypatch.setattr(publishing.random, "random", lambda: 1.0)
    outlet = Outlet(*[Throttled("slow")] * failures)

    assert rig.publish(outlet, "a") == dropped
    assert outlet.asked == [["a"]] * requests
    assert paused[:2] == [1.0, 2.0]  # at most


@pytest.mark.parametrize("error", [OutcomeUnknown("?"), AccessDenied("no"), ValueError("bug")])
def test_a_request_that_may_have_counted_or_never_will_is_not_sent_again(rig, error):
    outlet = Outlet(error)

    assert rig.publish(outlet, "a") == 1
    assert outlet.asked == [["a"]]


def test_an_outage_is_one_warning_and_its_end_says_what_it_cost(rig):
    denied = AccessDenied("PutMetricData: no", operation="PutMetricData", code="AccessDenied")
    outlet = Outlet(denied, denied, None)

    assert rig.publish(outlet, "a", "b", "c") == 2
    (first, warned), (second, reported) = rig.events()
    assert (first, warned["level"], warned["code"]) == (
        "metrics_not_published",
        "warning",
        "AccessDenied",
    )
    assert (second, reported["dropped"]) == ("metrics_published_again", 2)
    assert 0.0 <= reported["outage_s"] < HUNG_S


def test_each_outage_has_its_own_warning_and_counts_its_own_losses(rig):
    outlet = Outlet(ValueError("a bug"), None, AccessDenied("no"), AccessDenied("no"), None)
    publisher = Publisher(outlet, rig.log)
    publisher.offer([measurement(name) for name in "abcde"])
    publisher.close(HUNG_S)

    assert publisher.dropped_total == 3
    assert [(event, line.get("dropped")) for event, line in rig.events()] == [
        ("metrics_not_published", None),
        ("metrics_published_again", 1),
        ("metrics_not_published", None),
        ("metrics_published_again", 2),
    ]


def test_an_error_that_is_ours_is_reported_by_its_kind(rig):
    assert rig.publish(Outlet(ValueError("with a value")), "a") == 1

    [(_, warned)] = rig.events()
    assert (warned["error"], warned["code"]) == ("unexpected: ValueError", "")


def test_a_close_does_not_wait_for_the_pause_of_a_service_that_is_away(rig, monkeypatch):
    monkeypatch.setattr(publishing, "_RETRIES", Retries(base_s=HUNG_S * 2, max_s=HUNG_S * 2))
    outlet = Outlet(Throttled("slow"))
    publisher = Publisher(outlet, rig.log)
    publisher.offer([measurement()])
    assert outlet.entered.wait(HUNG_S)

    publisher.close(0.0)

    publisher._thread.join(HUNG_S / 2)
    assert not publisher._thread.is_alive()


def test_who_offers_never_waits_and_what_finds_no_room_is_dropped(rig):
    outlet = Outlet()
    outlet.gate.clear()
    publisher = Publisher(outlet, rig.log)
    publisher.offer([measurement("first")])
    assert outlet.entered.wait(HUNG_S)

    for number in range(5):
        publisher.offer([measurement(f"n{number}")])

    assert publisher.dropped_total == 2
    outlet.gate.set()
    publisher.close(10.0)
    assert outlet.asked == [["first"], ["n0"], ["n1"], ["n2"]]


def test_a_service_that_hangs_holds_up_the_close_no_longer_than_it_is_given(rig):
    outlet = Outlet()
    outlet.gate.clear()
    publisher = Publisher(outlet, rig.log)
    publisher.offer([measurement()])
    assert outlet.entered.wait(HUNG_S)

    publisher.close(0.05)

    assert outlet.asked == []
    outlet.gate.set()
