"""The arguments of `kclrun.read`: where it begins, where it ends, which shards; pure."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

import kclrun
from kclrun.errors import ConfigError, KclrunError, NotFound
from kclrun.model.reading import FetchedPage
from kclrun.model.record import IteratorType, Record, StartPoint
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import short_name, spelled_out
from kclrun.model.time import Instant, WallTime
from kclrun.reading import stream
from kclrun.reading.ends import FOR_EVER, SETTLED_S, ReadingEnd
from kclrun.reading.starts import ShardStart, parse_position, position_starts
from tests.support.build import shard
from tests.support.tables import over_rows

NOW = WallTime(1_800_000_000.0)
BEGAN = Instant(1_000.0)
CHANGES = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"
ALL = HashRange(0, HASH_KEY_MAX)
OLDEST = StartPoint(IteratorType.TRIM_HORIZON)
AT_NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def at(moment: float) -> StartPoint:
    return StartPoint(IteratorType.AT_TIMESTAMP, timestamp=WallTime(moment))


@over_rows(
    ("start", "begin"),
    [
        ("TRIM_HORIZON", OLDEST),
        ("LATEST", StartPoint(IteratorType.LATEST)),
        ("10m", at(NOW - 600)),
        (AT_NOON, at(AT_NOON.timestamp())),
        (AT_NOON.isoformat(), at(AT_NOON.timestamp())),
        ({"7": "495"}, {spelled_out("7"): ExtendedSequenceNumber("495")}),
        (
            {"7": ExtendedSequenceNumber("495", 3), "8": "SHARD_END"},
            {spelled_out("7"): ExtendedSequenceNumber("495", 3), spelled_out("8"): SHARD_END},
        ),
        ({"7": "LATEST"}, {spelled_out("7"): StartPoint(IteratorType.LATEST)}),
    ],
)
def test_a_start_is_a_word_a_time_or_positions(start, begin):
    assert stream._begin(start, NOW) == begin


@pytest.mark.parametrize("sub", [0, 3])
def test_a_position_is_read_as_it_is_written(sub):
    position = ExtendedSequenceNumber("495", sub)
    assert parse_position(str(position), NOW, "start") == position


@over_rows(
    ("until", "end"),
    [
        (None, FOR_EVER),
        ("caught-up", ReadingEnd(began_instant=BEGAN)),
        ("10m", ReadingEnd(until_at=WallTime(NOW - 600))),
        ("2999-01-01T00:00:00Z", ReadingEnd(until_at=WallTime(32_472_144_000.0))),
        (AT_NOON, ReadingEnd(until_at=WallTime(AT_NOON.timestamp()))),
    ],
)
def test_an_end_is_the_tip_an_instant_or_none(until, end):
    assert stream._end(until, OLDEST, BEGAN, NOW) == end


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"start": "yesterday"}, "start: expected TRIM_HORIZON, LATEST, 2026-"),
        ({"start": 5}, "start: expected a text or a datetime with a zone, or positions"),
        ({"start": AT_NOON.replace(tzinfo=None)}, "start: 2026-03-01T12:00:00 has no time zone"),
        ({"start": "2999-01-01T00:00:00Z"}, "is in the future"),
        (
            {"start": {"7": 495}},
            r"start\['7'\]: expected a text or a datetime with a zone, got int",
        ),
        ({"start": {"7": "0495"}}, r"start\['7'\]: '0495' is not a sequence number"),
        ({"start": "LATEST"}, "until: from LATEST there is nothing up to the tip"),
        ({"until": "tip"}, "until: expected caught-up, None for ever, an instant such as"),
        ({"until": AT_NOON.replace(tzinfo=None)}, "until: 2026-03-01T12:00:00 has no time zone"),
        ({"start": "10m", "until": "11m"}, "until: is not after start"),
        ({"decode": "jsn"}, "decode: expected json, msgpack, text or a type, got 'jsn'"),
        ({"decode": "orders:Order"}, "decode: expected json"),
        ({"decode": object}, "decode is the class object"),
        ({"endpoint": "embedded"}, "embedded is an AWS that lives only while"),
        ({"endpoint": "nowhere"}, "aws.endpoint: expected embedded or a URL"),
        ({"start_timeout": "soon"}, "aws.start_timeout: expected a duration"),
        ({"stream": "a b"}, "stream: expected a text that is a stream's name"),
        (
            {"stream": "arn:aws:kinesis:eu-west-1:123456789012:stream/s", "region": "us-east-1"},
            "region: the stream .* is in eu-west-1, not in us-east-1",
        ),
        (
            {
                "stream": CHANGES,
                "region": "eu-west-1",
                "start": "10m",
            },
            "read from or until a time is for streams of Kinesis",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name_before_anything_is_sent(monkeypatch, wrong, says):
    monkeypatch.setattr(stream, "open_stream_client", None)
    with pytest.raises(ConfigError, match=says):
        kclrun.read(**{"stream": "orders", "region": "us-east-1", **wrong})


# Positions


def started(*begins: tuple[int, str], shards: tuple[Shard, ...]) -> dict[str, str]:
    """The shards to begin with, each with where."""
    given = {spelled_out(str(n)): parse_position(text, NOW, "start") for n, text in begins}
    return {
        short_name(name): (
            start.start.kind.value if start.after is None else f"after {start.after}"
        )
        for name, start in position_starts(shards, given).items()
    }


SPLIT = (shard(1), shard(2, 1), shard(3, 1), shard(4))


@over_rows(("begins", "expected"), [
        ((), {"1": "TRIM_HORIZON", "2": "TRIM_HORIZON", "3": "TRIM_HORIZON", "4": "TRIM_HORIZON"}),
        (
            ((1, "7"), (4, "8/2")),
            {"1": "after 7", "2": "TRIM_HORIZON", "3": "TRIM_HORIZON", "4": "after 8/2"},
        ),
        # A child with a position: the parent was read to its end.
        (((2, "9"), (4, "8")), {"2": "after 9", "3": "TRIM_HORIZON", "4": "after 8"}),
        (((1, "SHARD_END"), (4, "8")), {"2": "TRIM_HORIZON", "3": "TRIM_HORIZON", "4": "after 8"}),
        (((1, "7"), (2, "9"), (3, "9"), (4, "LATEST")), {
            "1": "after 7", "2": "after 9", "3": "after 9", "4": "LATEST",
        }),
    ])  # fmt: skip
def test_each_shard_goes_on_after_its_position_and_the_others_begin_at_their_oldest_record(
    begins, expected
):
    assert started(*begins, shards=SPLIT) == expected


def test_a_position_of_a_shard_that_is_gone_is_refused_unless_its_child_was_read():
    left = SPLIT[1:]
    with pytest.raises(NotFound, match="no shard shardId-000000000001"):
        started((1, "7"), shards=left)
    assert started((1, "7"), (2, "9"), shards=left)["2"] == "after 9"
    assert started((1, "SHARD_END"), shards=left)["2"] == "TRIM_HORIZON"


def test_a_position_begins_at_its_record_which_may_be_an_aggregate():
    starts = position_starts((shard(1),), {spelled_out("1"): ExtendedSequenceNumber("7", 2)})
    assert starts == {
        spelled_out("1"): ShardStart(
            (), StartPoint(IteratorType.AT_SEQUENCE_NUMBER, "7"), ExtendedSequenceNumber("7", 2)
        )
    }


# The end


@over_rows(
    ("records", "behind_ms", "asked_s", "is_past"),
    [
        (0, 0, SETTLED_S, True),
        (0, 0, SETTLED_S - 0.1, False),
        (5, 0, SETTLED_S, True),
        (5, 10_000, SETTLED_S + 9.0, False),
        (5, 10_000, SETTLED_S + 10.0, True),
        (0, 10_000, SETTLED_S + 9.0, False),
        # Without a lag (the stream of a table), only an empty page is one at the tip.
        (0, None, SETTLED_S, True),
        (5, None, SETTLED_S, False),
    ],
)
def test_the_tip_is_reached_where_reading_stands_behind_the_beginning(
    records, behind_ms, asked_s, is_past
):
    page = FetchedPage([Record(b"x", "k", "1", 1.0)] * records, "i", behind_ms)
    end = ReadingEnd(began_instant=BEGAN)
    assert end.is_past(page, Instant(BEGAN + asked_s)) == is_past
    assert not FOR_EVER.is_past(page, Instant(BEGAN + asked_s))


def test_an_instant_is_passed_by_the_time_of_the_service():
    end = ReadingEnd(until_at=NOW)
    page = FetchedPage([], "i", 0, served_at=WallTime(NOW + 3.0))
    assert end.is_past(page, BEGAN)
    assert not end.is_past(FetchedPage([], "i", 1_000, served_at=WallTime(NOW + 3.0)), BEGAN)


# The import


@pytest.mark.seconds
def test_import_kclrun_loads_neither_botocore_nor_click_and_read_needs_no_extra():
    code = (
        "import sys, kclrun\n"
        "heavy = {'botocore', 'click', 'yaml', 'urllib3', 'kclrun.reading', 'kclrun.cli'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "for extra in ('moto', 'uvicorn', 'httptools', 'h2', 'cbor2', 'pyarrow', 'sqlalchemy',"
        " 'pyspark', 'fastavro', 'opentelemetry'):\n"
        "    sys.modules[extra] = None\n"
        "kclrun.read, kclrun.Reading, kclrun.ShardRecord, kclrun.run, kclrun.RunResult\n"
        "assert 'kclrun.reading.stream' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_record_of_a_reading_is_a_record_with_its_shard():
    record = kclrun.ShardRecord(b"x", "k", "7", 1.0, shard_id="s")
    assert isinstance(record, kclrun.Record)
    assert (record.shard_id, str(record.position)) == ("s", "7")
    assert record.arrived_at == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=1)
    assert issubclass(kclrun.errors.DataLoss, KclrunError)
