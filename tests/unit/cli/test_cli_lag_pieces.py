import pytest

from kclrun.cli.lag import (
    further_behind,
    lag_of_lease,
    lag_report,
    measure,
    print_lag,
    remark_unread,
    unleased,
)
from kclrun.codec.aggregator import Aggregator
from kclrun.config.units import StartPosition
from kclrun.errors import AccessDenied, Throttled
from kclrun.local.service import Kinesis, KinesisSettings
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, PutEntry, StartPoint
from kclrun.model.retries import Retries
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import StreamKey
from kclrun.model.time import WallTime
from kclrun.operating.summaries import Lag, LagSummary, duration_text, lag_summary, waiting_for
from tests.support.stream_ports import ModelStream
from tests.support.tables import over_rows

KEY = LeaseKey("shardId-000000000000")
DAY_S = 86_400.0
HORIZON = StartPoint(IteratorType.TRIM_HORIZON)
BEGUN = 1_700_000_000.0


class World:
    """A stream of one shard on a clock of its own."""

    def __init__(self) -> None:
        self.at = BEGUN
        kinesis = Kinesis(KinesisSettings(), b"lag".ljust(32))
        kinesis.create_stream("s", 1, WallTime(self.at))
        self.stream = ModelStream(kinesis, "s", lambda: WallTime(self.at))

    def put_at(self, after_s: float, data: bytes = b"x") -> str:
        """One record that arrives so long after the beginning; its sequence number."""
        self.at = BEGUN + after_s
        (result,) = self.stream.put([PutEntry(data, "k")])
        assert result.sequence_number is not None
        return result.sequence_number

    def lag(self, checkpoint: ExtendedSequenceNumber, at_s: float, **row: object) -> Lag:
        self.at = BEGUN + at_s
        lease = Lease(key=KEY, checkpoint=checkpoint, **row)
        return lag_of_lease(lease, None, self.stream)


@pytest.fixture
def world():
    return World()


def test_the_lag_is_the_age_of_the_oldest_record_above_the_checkpoint(world):
    first, second, third = (world.put_at(after_s) for after_s in (10, 40, 70))

    found = [
        world.lag(ExtendedSequenceNumber(number), 100).behind_s for number in (first, second, third)
    ]

    assert found == pytest.approx([60.0, 30.0, 0.0])
    assert world.lag(ExtendedSequenceNumber(first), 100).oldest_at == pytest.approx(BEGUN + 40)


def test_a_single_unread_record_ages_though_the_service_calls_its_reader_up_to_date(world):
    """`MillisBehindLatest` of the answer that brings the last record is 0."""
    first = world.put_at(0)
    world.put_at(1)

    assert world.lag(ExtendedSequenceNumber(first), 3_601).behind_s == pytest.approx(3_600.0)


def test_leases_that_have_not_begun_are_measured_from_where_they_will(world):
    for after_s in (10, 40, 70):
        world.put_at(after_s)

    assert world.lag(TRIM_HORIZON, 100).behind_s == pytest.approx(90)
    pinned = world.lag(LATEST, 100, latest_pinned_at=WallTime(BEGUN + 30))
    assert pinned.behind_s == pytest.approx(60)
    at = world.lag(ExtendedSequenceNumber("AT_TIMESTAMP", int((BEGUN + 50) * 1000)), 100)
    assert at.behind_s == pytest.approx(30)
    assert world.lag(LATEST, 100) == Lag(
        None, note="not begun: it will begin at the tip of that moment"
    )
    assert "instant" in world.lag(AT_TIMESTAMP, 100).note


def test_inside_an_aggregate_the_rest_of_it_is_unread(world):
    aggregator = Aggregator()
    for n in range(3):
        aggregator.add("k", str(n).encode())
    packed = aggregator.finish()
    number = world.put_at(10, packed.data)
    world.put_at(50)

    assert world.lag(ExtendedSequenceNumber(number, 1), 100).behind_s == pytest.approx(90)
    assert world.lag(ExtendedSequenceNumber(number, 2), 100).behind_s == pytest.approx(50)


def test_an_empty_shard_is_not_behind(world):
    assert world.lag(TRIM_HORIZON, 5_000) == Lag(0.0)


def test_a_checkpoint_whose_record_is_past_retention_is_reported(world):
    number = world.put_at(0)
    world.put_at(100)
    world.put_at(DAY_S)

    lag = world.lag(ExtendedSequenceNumber(number), DAY_S + 60)

    assert lag.is_trimmed
    assert "records may be lost" in lag.note
    line = lag_summary(
        shard=KEY, state="owned", owner="o", checkpoint="1", lag=lag, retention_s=DAY_S, note=""
    )
    assert line.loss_in_s == 0.0


class Gaps:
    """A reader whose first pages are empty, or that always fails."""

    def __init__(self, empty: int, error: Exception | None = None) -> None:
        self.left = empty
        self.error = error

    def iterator(self, *_: object) -> str:
        return "i"

    def fetch(self, *_: object) -> FetchedPage:
        if self.error is not None:
            raise self.error
        self.left -= 1
        return FetchedPage([], "i", 7_000 if self.left >= 0 else 0)


def test_gaps_are_stepped_over_and_beyond_reason_the_services_word_is_taken(monkeypatch):
    monkeypatch.setattr("kclrun.cli.lag._PAGE_PAUSE_S", 0.0)

    assert measure(Gaps(2), KEY, HORIZON, TRIM_HORIZON) == Lag(0.0)
    far = measure(Gaps(1_000), KEY, HORIZON, TRIM_HORIZON)
    assert far.behind_s == 7.0
    assert "the service" in far.note


def test_a_page_without_a_lag_is_not_a_lag_of_zero():
    class Silent(Gaps):
        def fetch(self, *_: object) -> FetchedPage:
            return FetchedPage([], "i", None)

    lag = measure(Silent(0), KEY, HORIZON, TRIM_HORIZON)
    assert lag == Lag(None, note="not known: the service does not say how far the page is behind")


def test_what_cannot_be_measured_says_why_and_a_missing_permission_ends_it(monkeypatch):
    monkeypatch.setattr("kclrun.cli.lag._RETRIES", Retries(attempts_max=1))

    lag = measure(Gaps(0, Throttled("slow\ndown")), KEY, HORIZON, TRIM_HORIZON)
    assert lag == Lag(None, note="not known: slow")
    with pytest.raises(AccessDenied):
        measure(Gaps(0, AccessDenied("no")), KEY, HORIZON, TRIM_HORIZON)


# Shards without a lease


def shard(number: int, *parents: int) -> Shard:
    named = [f"shardId-{parent:012d}" for parent in parents]
    first, second = [*named, None, None][:2]
    whole = HashRange(0, HASH_KEY_MAX)
    return Shard(f"shardId-{number:012d}", whole, "1", None, first, second)


def rows(**leases: Lease) -> dict[str, Lease]:
    return {f"shardId-{int(name[1:]):012d}": lease for name, lease in leases.items()}


def lease(
    checkpoint: ExtendedSequenceNumber = TRIM_HORIZON,
    *parents: int,
) -> Lease:
    return Lease(
        key=KEY, checkpoint=checkpoint, parents=frozenset(f"shardId-{p:012d}" for p in parents)
    )


def test_a_shard_whose_descendant_has_a_lease_was_read_and_cleaned_up():
    shards = [shard(0), shard(1, 0), shard(2, 1), shard(3)]

    found = unleased(shards, rows(_2=lease(), _3=lease()), StartPosition(TRIM_HORIZON))

    assert found == ()


def test_a_child_that_waits_for_its_parents_end_is_named_with_it():
    shards = [shard(0), shard(1), shard(2, 0, 1), shard(3)]

    found = unleased(shards, rows(_0=lease(), _1=lease(SHARD_END)), StartPosition(LATEST))

    assert [each.shard_id[-1] for each in found] == ["2", "3"]
    assert found[0].note == (
        "no lease yet: it is made when shardId-000000000000 and shardId-000000000001 ended"
    )
    assert found[1].note.startswith("no lease: a running manager makes one")
    assert all(each.start == HORIZON for each in found)


@pytest.mark.parametrize(
    ("first", "start"),
    [
        (StartPosition(TRIM_HORIZON), HORIZON),
        (StartPosition(LATEST), None),
        (
            StartPosition(AT_TIMESTAMP, WallTime(5.0)),
            StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(5.0)),
        ),
    ],
)
def test_before_the_first_start_the_settings_say_from_where(first, start):
    assert [each.start for each in unleased([shard(0)], {}, first)] == [start]


def test_a_lease_waits_for_parents_that_have_not_ended():
    leases = rows(_0=lease(), _1=lease(SHARD_END))

    assert waiting_for(lease(TRIM_HORIZON, 0, 1, 7), leases) == ("shardId-000000000000",)


# What is shown


def line(shard: str, behind_s: float | None, **more: object) -> LagSummary:
    fields = {
        "shard": shard,
        "state": "owned",
        "owner": OwnerId("kclrun:a:b:c"),
        "checkpoint": "TRIM_HORIZON",
        "behind_s": behind_s,
        "oldest_at": None,
        "loss_in_s": None if behind_s is None else DAY_S - behind_s,
        "is_trimmed": False,
        "note": "",
    }
    return LagSummary(**(fields | more))


@over_rows(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.04, "0.0s"),
        (9.96, "10.0s"),
        (10.0, "10s"),
        (59.7, "1m"),
        (250, "4m 10s"),
        (3_600, "1h"),
        (3_780, "1h 3m"),
        (187_300, "2d 4h"),
        (97_200, "1d 3h"),
        (86_399.4, "23h 59m"),
    ],
)
def test_durations_are_spelled_in_two_units(seconds, text):
    assert duration_text(seconds) == text


def test_a_check_that_cannot_tell_does_not_say_yes():
    lines = [line("a", 1.0), line("b", None), line("c", 301.0), line("d", 300.0)]

    assert [each.shard for each in further_behind(lines, 300.0)] == ["b", "c"]


def test_the_time_to_loss_is_known_where_a_lag_and_its_record_are():
    def loss(lag: Lag) -> tuple[float | None, float | None]:
        shown = lag_summary(
            shard=KEY, state="owned", owner="o", checkpoint="1", lag=lag, retention_s=DAY_S, note=""
        )
        return shown.behind_s, shown.loss_in_s

    at = WallTime(BEGUN)
    assert loss(Lag(1.23456, at)) == (1.235, DAY_S - 1.235)
    assert loss(Lag(DAY_S + 5, at)) == (DAY_S + 5, 0.0)
    assert loss(Lag(1.0, at, is_trimmed=True)) == (1.0, 0.0)
    assert loss(Lag(1.0)) == (1.0, None)
    assert loss(Lag(None, at)) == (None, None)


def report_of(lines):
    return lag_report(lines, application="app", stream="s", retention_s=DAY_S)


def test_nothing_behind_is_less_than_half_a_second_and_no_time_left_the_soonest():
    lines = [line("a", 0.0, loss_in_s=0.5), line("b", 0.5, loss_in_s=0.0)]

    report = report_of(lines)
    assert (report.behind_s_max, report.loss_in_s_min) == (0.5, 0.0)


def test_totals_name_the_worst_and_what_is_not_known():
    lines = [line("a", 1.0), line("b", None, note="not known: throttled"), line("c", 301.0)]

    report = report_of(lines)

    assert (report.behind_s_max, report.loss_in_s_min) == (301.0, DAY_S - 301)
    assert report.unknown == 1
    assert [line.shard for line in report.shards] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "Nothing is left to read"),
        ([line("a", 0.0, loss_in_s=None)], "1 shard; at most 0.0s behind; nothing unread"),
        (
            [line("a", 5.0), line("b", None, state="unowned", owner="")],
            "2 shards; 1 without an owner; 1 not known; at most 5.0s behind (a); first loss in 23h",
        ),
        (
            [line("a", None)],
            "1 shard; 1 not known; when records are lost is not known (retention is 1d)",
        ),
        (
            [line("a", None), line("b", 0.0, loss_in_s=None)],
            "2 shards; 1 not known; at most 0.0s behind; when records are lost is not known",
        ),
        (
            [line("a", 7.0, loss_in_s=None)],
            "1 shard; at most 7.0s behind (a); when records are lost is not known",
        ),
        ([line("a", 5.0, is_trimmed=True, loss_in_s=0.0)], "records may be lost already (a)"),
    ],
)
def test_the_last_line_says_what_matters(lines, said, capsys):
    print_lag(report_of(lines))

    assert said in capsys.readouterr().out.splitlines()[-1]


def test_leases_of_a_stream_that_is_not_read_are_named_and_not_measured(capsys):
    returns = "123456789012:returns:1700000000"
    leases = [
        Lease(key=LeaseKey(f"{returns}:shardId-000000000000"), checkpoint=TRIM_HORIZON),
        Lease(key=LeaseKey(f"{returns}:shardId-000000000001"), checkpoint=SHARD_END),
    ]

    remark_unread(leases, {StreamKey("123456789012:orders:1700000000")})
    reported = capsys.readouterr().err
    assert "returns:shardId-000000000000" in reported
    assert "shardId-000000000001" not in reported

    remark_unread(leases, {StreamKey(returns)})
    assert capsys.readouterr().err == ""
