"""A stream that was deleted and made again under its name is noticed, and refused [P13]."""

import pytest

from kclrun.aws.rows import decode_row, encode_row
from kclrun.cli.exit_codes import CONFIGURATION, MEANINGS
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.auditing import why_another_stream
from kclrun.manager.world import ExitReason
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM
from kclrun.operating import story
from kclrun.protocol import writes as ch
from tests.unit.leases.manager_life import JAVA, ME, OTHER, ManagerLife, row

WHOLE = HashRange(0, HASH_KEY_MAX)
BORN, AGAIN = 1_700_000_000.123, 1_700_000_009.5
S0 = "s0"


def shard(start="100", end=None, key=S0, *parents):
    return Shard(key, WHOLE, start, end, *parents)


def manager(*rows, created_at=BORN, **policy):
    return ManagerLife(*rows, created={ONLY_STREAM: created_at}, **policy)


def listed(life, *shards):
    life.say(e.ShardsListed(shards, 1.0), after=1.0)
    return life.asked(c.DescribeStream)


def is_refused(life):
    return bool(life.asked(c.StopRefused)) and "stream_recreated" in life.notes()


def test_a_row_of_another_creation_time_stops_the_manager_before_it_takes_anything():
    life = manager(row(S0, None, 7, stream_created_at=AGAIN), row("s1", None, 7))

    assert is_refused(life)
    assert life.writes() == []
    note = next(note for note in life.asked(c.Note) if note.event == "stream_recreated")
    assert note.level == "error"
    assert "To go on: stop every manager" in note.fields["detail"]
    assert life.asked(c.StopRefused) == [
        c.StopRefused("the rows of the lease table are of another stream")
    ]
    life.say(e.DrainRequested("recreated"))
    assert life.asked(c.Finish)


@pytest.mark.parametrize("theirs", [None, BORN, BORN + 0.0004])
def test_rows_without_a_creation_time_or_with_the_same_millisecond_are_taken(theirs):
    life = manager(row(S0, None, 7, stream_created_at=theirs), row("s1", JAVA, 7))

    assert not is_refused(life)
    assert [take.key for take in life.writes(ch.Take)] == [S0]


def test_where_the_service_was_not_asked_nothing_is_compared():
    life = ManagerLife(row(S0, None, 7, stream_created_at=AGAIN))

    assert not life.asked(c.StopRefused)
    assert listed(life, shard()) == []


def test_a_take_publishes_the_creation_time_and_the_row_keeps_it():
    life = manager(row(S0, None, 7))

    (take,) = life.writes(ch.Take)

    assert take.stream_created_at == BORN
    kept = row(S0, ME, 8, stream_created_at=BORN)
    assert decode_row(encode_row(kept)) == kept
    assert encode_row(kept)["streamCreatedAt"] == {"N": "1700000000123"}


def test_a_row_that_is_created_carries_the_creation_time():
    life = manager(start=TRIM_HORIZON)
    life.scan(after=1.0)
    life.say(e.ShardsListed((shard(),), 1.0, (shard(),)))
    (created,) = life.writes(ch.CreateLease)
    assert created.lease.stream_created_at == BORN

    life = manager(row("p", OTHER, 7, checkpoint=SHARD_END))
    life.scan(after=1.0)
    life.say(e.ShardsListed((shard("100", None, S0, "p"),), 1.0))
    (healed,) = life.writes(ch.CreateChildren)
    assert healed.children[0].stream_created_at == BORN


def test_the_first_listing_asks_who_the_stream_is_and_the_same_answer_changes_nothing():
    life = manager(row(S0, OTHER, 7))

    assert listed(life, shard()) == [c.DescribeStream()]
    life.say(e.StreamDescribed(BORN))
    assert not life.asked(c.StopRefused)
    assert listed(life, shard()) == []


@pytest.mark.parametrize(
    "now",
    [
        pytest.param((shard("900"),), id="the same shard begins elsewhere"),
        pytest.param((shard("900", None, "s9"),), id="an open shard is gone"),
    ],
)
def test_a_listing_of_another_stream_has_the_service_asked_and_its_answer_stops_us(now):
    life = manager(row(S0, OTHER, 7))
    listed(life, shard())

    assert listed(life, *now) == [c.DescribeStream()]
    assert life.writes() == []
    life.say(e.StreamDescribed(AGAIN))
    assert is_refused(life)
    assert life.say(e.StreamDescribed(AGAIN)) == ()


def test_a_reshard_and_a_trimmed_shard_are_no_reason_to_ask():
    life = manager(row(S0, OTHER, 7))
    listed(life, shard())
    closed = shard("100", "199")
    child = shard("200", None, "s1", S0)

    assert listed(life, closed, child) == []
    assert listed(life, child) == []


def test_a_listing_that_lags_has_the_service_asked_and_nothing_comes_of_it():
    life = manager(row(S0, OTHER, 7))
    closed, child = shard("100", "199"), shard("200", None, "s1", S0)
    listed(life, closed, child)

    assert listed(life, shard()) == [c.DescribeStream()]
    life.say(e.StreamDescribed(BORN))
    assert not life.asked(c.StopRefused)
    # It is the stream, so the same listing is believed, and the next one that contradicts is not.
    assert listed(life, shard()) == []
    assert listed(life, shard("900")) == [c.DescribeStream()]


def suspicions(life):
    notes = [note for note in life.asked(c.Note) if note.event == "stream_recreation_suspected"]
    return [(note.level, note.fields["what"]) for note in notes]


def test_a_checkpoint_before_its_shard_begins_is_reported_as_an_error_once():
    life = manager(row(S0, JAVA, 7, checkpoint=ExtendedSequenceNumber("99")))

    listed(life, shard("100"))
    assert suspicions(life) == [("error", "s0 is at a checkpoint before its shard begins")]
    listed(life, shard("100"))
    assert suspicions(life) == []


@pytest.mark.parametrize("checkpoint", [ExtendedSequenceNumber("100"), TRIM_HORIZON, LATEST])
def test_a_checkpoint_in_its_shard_is_not_suspected(checkpoint):
    life = manager(row(S0, JAVA, 7, checkpoint=checkpoint))

    listed(life, shard("100"))

    assert suspicions(life) == []


def test_shard_end_on_a_shard_is_suspected_once_no_listing_can_lag_that_far():
    life = manager(row(S0, JAVA, 7, checkpoint=SHARD_END))

    listed(life, shard("100"))
    assert suspicions(life) == []
    life.now += 299.0
    listed(life, shard("100"))

    assert suspicions(life) == [("error", "s0 is at SHARD_END, and its shard is open")]


def test_the_words_name_both_times_the_table_and_the_way_out():
    words = why_another_stream([row(S0, stream_created_at=BORN)], AGAIN, table="orders-leases")

    assert "2023-11-14T22:13:20.123Z" in words
    assert "the lease table orders-leases has rows" in words
    assert "delete-table" in words


def test_a_creation_time_beyond_the_year_9999_stops_the_manager_in_words_as_any_other():
    life = manager(row(S0, None, 7, stream_created_at=1e35), row("s1", None, 7))

    assert is_refused(life)
    note = next(note for note in life.asked(c.Note) if note.event == "stream_recreated")
    assert "created at an unknown time" in note.fields["detail"]


def test_the_first_listing_with_a_shard_has_the_service_asked_and_not_an_empty_one():
    life = manager(row(S0, OTHER, 7, stream_created_at=BORN))

    assert listed(life) == []
    assert listed(life, shard("900")) == [c.DescribeStream()]


@pytest.mark.parametrize(("ago_s", "asked"), [(1.0, []), (30.0, [c.DescribeStream()])])
def test_a_stream_that_was_described_seconds_ago_is_not_described_again(ago_s, asked):
    life = manager(row(S0, OTHER, 7), described_instant=101.0 - ago_s)

    assert listed(life, shard()) == asked
    assert listed(life, shard("900")) == [c.DescribeStream()]


def test_an_empty_listing_in_between_does_not_hide_another_stream():
    life = manager(row(S0, OTHER, 7, stream_created_at=BORN), described_instant=100.0)
    listed(life, shard())

    assert listed(life) == []
    assert listed(life, shard("900", None, "s9")) == [c.DescribeStream()]
    assert life.writes() == []


@pytest.mark.parametrize("now_created_at", [AGAIN, BORN - 1.0])
def test_no_word_of_an_exit_says_that_a_stream_was_made_again_which_rows_alone_do_not_show(
    now_created_at,
):
    """The application name of another stream gives such rows, too."""
    life = manager(row(S0, None, 7, stream_created_at=BORN), created_at=now_created_at)
    (stop,) = life.asked(c.StopRefused)

    said = [stop.reason, ExitReason.ANOTHER_STREAM.value, MEANINGS[CONFIGURATION]]
    said.append(story._SENTENCES["stream_recreated"])

    assert not [text for text in said if "made again" in text or "deleted" in text]
