"""Both ends of a batch read: what is asked of each shard, and where it ends."""

import pytest

from kclrun.errors import DataLoss, InvalidRequest, NotFound, SettingsError
from kclrun.model.reading import FetchedPage
from kclrun.model.record import Record
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.spark.offsets import Offset, StreamIs
from kclrun.spark.options import SourceSettings, Start, StartKind, StreamAddress
from kclrun.spark.planning.batch_bounds import RangeBounds
from kclrun.spark.planning.service_time import ServiceTime
from kclrun.spark.planning.shard_cursor import AskListing, Gone, Listed, Paged, Refused
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, at_timestamp, before

HALF = HASH_KEY_MAX // 2
LOW, HIGH = HashRange(0, HALF), HashRange(HALF + 1, HASH_KEY_MAX)
# a was split into b and c, and c ended, too: d follows; x is of another line.
GRAPH = ShardGraph(
    (
        Shard("a", LOW, "0", "9"),
        Shard("b", LOW, "0", None, "a"),
        Shard("c", LOW, "0", "9", "a"),
        Shard("d", LOW, "0", None, "c"),
        Shard("x", HIGH, "0"),
    )
)
LATEST = Start(StartKind.LATEST)
NOW = 100.0  # of all clocks; the service's has whole seconds, so it may be 101.0 there


def bounding(begins, end=LATEST, **settings):
    service = ServiceTime(0.0)
    service.add_sample(NOW, NOW, NOW)
    whole = SourceSettings(address=StreamAddress(stream="s"), end=end, **settings)
    start = Offset(streams={"": StreamIs("arn", 1)}, shards=begins)
    return RangeBounds(whole, start, GRAPH, service, NOW)


def answered(seeker, *stamps, behind_ms=0, now=NOW):
    """Answers the one request with records of these seconds. Returns: what was asked."""
    [ask] = seeker.asks(now)
    assert seeker.next_at(now) == float("inf"), "the answer is awaited"
    records = [Record(b"x" * 100, "k", f"{second * 10:g}", second) for second in stamps]
    page = FetchedPage(records, "next", behind_ms)
    seeker.take(ask, Paged("here", page, now, now), now, 0.5)
    opening = ask.read.opening
    return ask.read.token or opening.timestamp or opening.kind.value


def ends_of(seeker):
    assert seeker.is_over
    assert seeker.asks(NOW) == []
    assert seeker.next_at(NOW) == NOW
    return seeker.offsets()[1].shards


def at(**positions):
    others = {"*": positions.pop("others")} if "others" in positions else {}
    return Start(StartKind.POSITIONS, positions={**positions, **others})


def test_named_ends_are_those_of_their_shards_and_their_relatives():
    begins = {"a": after("1"), "b": before("5"), "x": after("8")}

    seeker = bounding(begins, at(c=after("9"), others=after("7")))

    assert ends_of(seeker) == {
        "a": SHARD_END,
        "b": after("7"),
        "c": after("9"),
        "d": TRIM_HORIZON,
        "x": after("8"),
    }
    assert seeker.offsets()[1].began == {**begins, "c": TRIM_HORIZON, "d": TRIM_HORIZON}
    assert seeker.offsets()[0].shards == begins
    with pytest.raises(SettingsError, match="where does b end"):
        bounding(begins, at(c=after("9")))


@pytest.mark.parametrize("end", [at(x=at_timestamp(50_000)), Start(StartKind.TIMESTAMP, 50_000)])
def test_a_time_ends_before_its_first_record(end):
    seeker = bounding({"x": TRIM_HORIZON}, end)

    assert not seeker.is_over
    assert answered(seeker, 30, 40, behind_ms=1_000) == "TRIM_HORIZON"
    assert not seeker.is_over
    assert answered(seeker, 60) == 50.0
    assert ends_of(seeker) == {"x": before("600")}


def test_a_time_to_come_ends_at_the_tip_and_is_not_looked_up():
    seeker = bounding({"x": after("10")}, Start(StartKind.TIMESTAMP, 150_000))

    assert answered(seeker, 1, 30) == "AT_SEQUENCE_NUMBER"
    assert ends_of(seeker) == {"x": after("300")}


def test_a_shard_that_is_open_ends_at_its_tip_and_one_that_was_closed_at_its_end():
    seeker = bounding({"a": TRIM_HORIZON, "x": SHARD_END, "gone": after("4")})
    for first in (True, False, False):
        asks = seeker.asks(NOW)
        assert len(asks) == 3 * first
        for each in asks:
            page = FetchedPage([Record(b"", "k", "4", 1.0)] * (each.shard_id == "gone"), "n", 0)
            seeker.take(each, Paged("t", page, NOW, NOW), NOW, 0.5)

    assert ends_of(seeker) == {
        "a": SHARD_END,
        "b": TRIM_HORIZON,
        "c": SHARD_END,
        "d": TRIM_HORIZON,
        "x": SHARD_END,
        "gone": after("4"),
    }


@pytest.mark.parametrize(
    ("begin", "reads", "is_raised"),
    [(TRIM_HORIZON, 0, True), (TRIM_HORIZON, 1, True), (at_timestamp(99_900), 0, False)],
)
def test_only_a_time_may_be_refused(begin, reads, is_raised):
    seeker = bounding({"x": begin})
    for _ in range(reads):
        answered(seeker, behind_ms=1_000)
    [ask] = seeker.asks(NOW)
    refused = Refused(InvalidRequest("no", operation="GetShardIterator"))
    if is_raised:
        with pytest.raises(InvalidRequest):
            seeker.take(ask, refused, NOW, 0.5)
        return
    seeker.take(ask, refused, NOW, 0.5)
    assert seeker.asks(NOW + 1.3) == [], "the service's clock is trusted less"
    assert seeker.asks(NOW + 2.3) != []


def _not_found(seeker, listed, now):
    """Each request is answered with NotFound, and the listing that follows with these."""
    for ask in seeker.asks(now):
        seeker.take(ask, Gone(NotFound("no such shard"), now), now, 0.5)
    [listing] = seeker.asks(now)
    assert listing == AskListing()
    seeker.take(listing, Listed(listed, now), now, 0.5)


@pytest.mark.parametrize("fails", [True, False])
def test_a_shard_that_a_lagging_listing_does_not_show_is_asked_for_again(fails):
    seeker = bounding({"b": TRIM_HORIZON, "c": SHARD_END}, fails_on_data_loss=fails)
    parents = (Shard("a", LOW, "0", "9"), Shard("c", LOW, "0", None, "a"))
    for seconds in range(0, 600, 6):
        _not_found(seeker, parents, NOW + seconds)

    assert not seeker.is_over


@pytest.mark.parametrize("fails", [True, False])
def test_a_shard_that_expires_meanwhile_is_a_loss(fails):
    seeker = bounding({"x": TRIM_HORIZON}, fails_on_data_loss=fails)
    heirs = (Shard("y", HIGH, "5", None, "x"),)
    _not_found(seeker, heirs, NOW)
    assert not seeker.is_over, "one answer proves nothing"
    if fails:
        with pytest.raises(DataLoss, match="x expired while the batch was planned"):
            _not_found(seeker, heirs, NOW + 6.0)
        return
    _not_found(seeker, heirs, NOW + 6.0)
    assert ends_of(seeker) == {"x": SHARD_END}
