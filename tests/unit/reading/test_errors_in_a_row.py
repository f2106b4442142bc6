"""A service that always gives the same error is asked at the pace of an outage, by every reader."""

from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from kclrun.errors import (
    AccessDenied,
    ExpiredIterator,
    InvalidRequest,
    MalformedBody,
    NotFound,
    ServiceError,
    Throttled,
    Unavailable,
)
from kclrun.lease.policy import Pacing
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.time import Instant
from kclrun.reading.readers import ShardPages
from kclrun.spark.options import SourceSettings, StreamAddress
from kclrun.spark.planning.bound_search import BatchTarget
from kclrun.spark.planning.read_budget import ReadBudget
from kclrun.spark.planning.shard_cursor import Delayed, Expired, Outcome, ShardCursor, Slowed
from kclrun.spark.planning.shard_search import AnswerTimes, ShardSearch
from kclrun.spark.positions import TRIM_HORIZON, after
from tests.unit.spark.reading_world import World
from tests.unit.worker.one_shard import FIRST, Fetching, Shard

BEGINNING = StartPoint(IteratorType.TRIM_HORIZON)
_TRIES = 30
# Thirty tries at five a second, the pace of a reader that works, take six seconds.
_LEAST_S = 20.0

ERRORS = [
    ExpiredIterator("expired", operation="GetRecords"),
    Throttled("slow down", operation="GetRecords"),
    Unavailable("503", operation="GetRecords"),
    AccessDenied("no", operation="GetRecords"),
    InvalidRequest("bad", operation="GetRecords"),
    NotFound("no shard", operation="GetRecords"),
    MalformedBody("cut off"),
]
NAMED = [pytest.param(error, id=type(error).__name__) for error in ERRORS]


class Failing(Shard):
    """Reader and admin. Iterators are made, also for a shard that is listed and not found."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def fetch(self, iterator: str, limit: int) -> FetchedPage:
        self.fetched_at.append(0.0)
        raise self.error


def asked_by_a_lease_process(error: Exception) -> tuple[float, list[str]]:
    now = [1000.0]
    shard = Failing(error)
    fetching = Fetching(shard, pacing=Pacing(1.0), now=lambda: now[0])

    def pause(pause_s: float) -> bool:
        now[0] += max(0.0, pause_s)
        return len(shard.fetched_at) < _TRIES

    fetching.queue.pause = pause  # type: ignore[method-assign]
    fetching.thread._read()
    return now[0] - 1000.0, fetching.warnings


@pytest.mark.parametrize("error", NAMED)
def test_a_lease_process_asks_at_the_pace_of_an_outage_and_warns(error):
    took_s, warnings = asked_by_a_lease_process(error)

    assert took_s >= _LEAST_S
    # Throttling is shared with other applications, and a lag of its own tells of it.
    assert bool(warnings) == (not isinstance(error, Throttled))
    assert all(str(error) in warning for warning in warnings)


@pytest.mark.parametrize("error", NAMED)
def test_a_reading_asks_at_the_pace_of_an_outage(error):
    pages = ShardPages(FIRST, BEGINNING, Failing(error))
    pauses = []
    for _ in range(_TRIES):
        with pytest.raises(type(error)) as raised:
            pages.fetch()
        pauses.append(pages.pause_after(raised.value))

    assert sum(pauses) >= _LEAST_S
    assert pauses.count(0.0) <= 1


@pytest.mark.parametrize(
    "error",
    [each for each in ERRORS if isinstance(each, ExpiredIterator | Throttled | Unavailable)],
)
def test_a_task_of_spark_asks_at_the_pace_of_an_outage_and_counts_its_tries(error):
    world = World()
    numbers = world.put(3)
    tries = []

    def fault(call: str) -> None:
        if call == "fetch":
            tries.append(world.now)
            raise error

    world.fault = fault
    begin, end = TRIM_HORIZON, after(numbers[-1])
    with pytest.raises(ServiceError, match=str(error)):
        world.read(world.range(begin, end), retry_attempts=_TRIES)

    assert len(tries) == _TRIES
    assert tries[-1] - tries[0] >= _LEAST_S


@pytest.mark.parametrize(
    "outcome",
    [
        Expired(ERRORS[0]),  # type: ignore[arg-type]
        Slowed(None, ERRORS[1]),  # type: ignore[arg-type]
        Delayed(None, ERRORS[2]),  # type: ignore[arg-type]
    ],
)
def test_the_planner_of_spark_asks_at_the_pace_of_an_outage_and_counts_its_tries(outcome: Outcome):
    settings = SourceSettings(address=StreamAddress(stream="s"), retry_attempts=_TRIES)
    search = ShardSearch(ShardCursor("s", TRIM_HORIZON, 10_000), ReadBudget(2.5, 0.0))
    search.begin(BatchTarget(1, 1_000, is_tip=True))
    times: list[float] = []

    def ask() -> Iterator[float]:
        now = 0.0
        while True:
            now = search.ready_at(now)
            asked = search.ask(now)
            assert asked is not None
            yield now
            search.take(asked.turn, outcome, AnswerTimes(now, 0, 0.5), settings)

    with pytest.raises(ServiceError):
        times += islice(_noting(ask(), times.append), 10 * _TRIES)
    assert _TRIES <= len(times) <= _TRIES + 1
    assert times[-1] >= _LEAST_S


def _noting(times: Iterator[float], note: Callable[[float], None]) -> Iterator[float]:
    for at in times:
        note(at)
    yield from ()


def test_one_expired_iterator_is_replaced_at_once_and_is_no_outage():
    pacing = Pacing(1.0)
    for _ in range(3):
        assert pacing.after_expired(0.5) == 0.0
        assert pacing.after_expired(0.5) > 0.0
        pacing.after_page(1, 0)
    assert Instant(pacing.after_expired(0.5)) == 0.0
