"""What the reader makes of a Spark that does not say where the query stands (4.0 and 4.1)."""

import pickle
import sys
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace

import pyspark.sql.streaming.datasource
import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from kclrun.errors import InvariantViolation, SettingsError
from kclrun.ports import StreamSummary
from kclrun.spark import offset_planner, requests, source
from kclrun.spark.engine.versions import installed
from kclrun.spark.executor.reading import ARROW_SCHEMA, SCHEMA
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.options import SourceSettings, StartKind, StreamAddress
from kclrun.spark.positions import after
from kclrun.spark.source import KclrunDataSource, Narrowing, StreamReader, _packed
from kclrun.spark.stream_set import StreamsAdmin


def at(number):
    return Offset(streams={"": StreamIs("arn:x", 1)}, shards={"s": after(str(number))})


class Asked:
    """The planner, as far as the reader asks it: each answer is ten further on."""

    def __init__(self):
        self.calls = []

    def initial_offset(self):
        return at(0)

    def everything(self, start):
        self.calls.append(("everything", start))
        return at(10)

    def latest_offset(self, start, **kind):
        self.calls.append(("latest", start))
        return at(20)

    def known(self, offset):
        return offset

    def prepare_available_now(self):
        self.calls.append("available now")

    def close(self):
        self.calls.append("close")

    def hints(self, start, end):
        return {}


@pytest.fixture
def reader():
    made = StreamReader(SourceSettings(address=StreamAddress(stream="s")))
    made._passes_start = False
    made._planner = Asked()
    return made


def test_the_first_answer_of_a_run_holds_all_there_is(reader):
    # Under AvailableNow there is no second question, and the query ends with success.
    assert reader.latestOffset() == encode_offset(at(10))
    reader.partitions(encode_offset(at(0)), encode_offset(at(10)))
    assert reader.latestOffset() == encode_offset(at(20))

    assert reader._planner.calls == [("everything", at(0)), ("latest", at(10))]


def test_so_does_the_first_answer_after_a_restart_from_where_the_query_stands(reader):
    # Measured on 4.0.1 and 4.1.1: Spark plans (last, last) before it asks, whatever the trigger.
    reader.partitions(encode_offset(at(7)), encode_offset(at(7)))

    reader.latestOffset()

    assert reader._planner.calls == [("everything", at(7))]


def test_a_reader_that_travels_leaves_the_planner_and_its_place_behind(reader):
    reader.partitions(encode_offset(at(7)), encode_offset(at(8)))
    there = pickle.loads(pickle.dumps(reader))

    assert (there._planner, there._stands_at, there._settings) == (None, None, reader._settings)
    there.stop()  # it has nothing to end


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({}, ("ReadMaxBytes", 64 * 2**20)),
        ({"bytes_per_trigger_max": 7}, ("ReadMaxBytes", 7)),
        ({"records_per_trigger_max": 5, "bytes_per_trigger_max": 7}, ("ReadMaxRows", 5)),
    ],
)
def test_the_limit_of_a_batch_is_one_of_spark_s(monkeypatch, limits, named):
    def limit(name):
        return lambda most: (name, most)

    monkeypatch.setitem(
        sys.modules,
        "pyspark.sql.streaming.datasource",
        SimpleNamespace(ReadMaxBytes=limit("ReadMaxBytes"), ReadMaxRows=limit("ReadMaxRows")),
    )
    reader = StreamReader(SourceSettings(address=StreamAddress(stream="s"), **limits))

    assert reader.getDefaultReadLimit() == named


@pytest.mark.parametrize("takes_all", [False, True])
def test_a_spark_that_says_where_it_stands_gets_the_start_itself_without_new_records(takes_all):
    reader = StreamReader(SourceSettings(address=StreamAddress(stream="s")))
    reader._passes_start = True
    asked = []

    class Planner(Asked):
        def latest_offset(self, start, *, takes_all):
            asked.append(takes_all)
            return max(start, at(20), key=lambda each: int(each.shards["s"].number))

    reader._planner = Planner()
    limit = type("ReadAllAvailable" if takes_all else "ReadMaxRows", (), {})()
    there = encode_offset(at(20))

    assert reader.latestOffset(encode_offset(at(7)), limit) == there
    assert reader.latestOffset(there, limit) is there
    assert reader.latestOffset(there) is there
    assert asked == [takes_all, takes_all, False]
    with pytest.raises(InvariantViolation, match="did not pass the query's position"):
        reader.latestOffset()


def test_what_spark_says_of_the_trigger_and_the_end_reaches_the_planner(reader):
    reader.prepareForTriggerAvailableNow()
    reader.stop()

    assert reader._planner.calls == ["available now", "close"]
    made = StreamReader(SourceSettings(address=StreamAddress(stream="s")))
    assert made._passes_start == installed().passes_start
    if hasattr(pyspark.sql.streaming.datasource, "SupportsTriggerAvailableNow"):
        assert isinstance(made, pyspark.sql.streaming.datasource.SupportsTriggerAvailableNow)


HOUR_S = 3_600.0
NOW = 1_700_000_000.0
OURS = from_arrow_schema(ARROW_SCHEMA)
OTHERS = StructType().add("data", "string")


@pytest.fixture
def planned(monkeypatch):
    """The planners of batch reads, of two streams with two shards; what `summary` says of each."""
    made = SimpleNamespace(settings=[], closed=[], created_h=(90, 90), kept_h=(24, 24), end=9)

    class Planner:
        def __init__(self, reader, admin, settings, *, table):
            made.settings.append(settings)

        def bounded(self):
            shards = [f"{name}:s{number}" for name in "ab" for number in (1, 2)]
            streams = {each: StreamIs(f"arn:{each}", 1) for each in "ab"}
            start = Offset(streams=streams, shards={each: after("1") for each in shards})
            return start, Offset(
                streams=streams, shards={each: after(str(made.end)) for each in shards}
            )

        def close(self):
            made.closed.append(True)

    def summary(at):
        created_at = NOW - made.created_h[at] * HOUR_S
        return StreamSummary("ab"[at], "arn", "ACTIVE", made.kept_h[at], 2, created_at)

    admins = {name: SimpleNamespace(summary=partial(summary, at)) for at, name in enumerate("ab")}
    connection = SimpleNamespace(admin=StreamsAdmin(admins), reader=None)
    monkeypatch.setattr(offset_planner, "OffsetPlanner", Planner)
    monkeypatch.setattr(requests, "connected", lambda *_: connection)
    monkeypatch.setattr(source.time, "time", lambda: NOW)
    return made


def batch_reader(monkeypatch, filters=()):
    if filters:
        monkeypatch.setitem(sys.modules, source._PUSHING, SimpleNamespace())
    options = {"streamName": "a,b", "region": "eu-west-1"}
    reader = KclrunDataSource(options).reader(OURS)
    assert type(reader) is (source._FilteredReader if filters else source.BatchReader)
    if filters:
        assert reader.pushFilters(filters) is filters
    return reader


def test_a_batch_read_has_a_task_although_there_is_nothing_to_read(monkeypatch, planned):
    def shards(filters=()):
        parts = batch_reader(monkeypatch, filters).partitions()
        return [sorted(each.shard_id for each in part.ranges) for part in parts]

    assert shards() == [["a:s1", "a:s2", "b:s1", "b:s2"]]
    planned.end = 1
    assert shards() == [[]]
    planned.end = 9
    assert shards([EqualTo(("shardId",), "s2")]) == [["a:s2", "b:s2"]]
    assert planned.closed == [True] * 3


@pytest.mark.parametrize(
    ("from_h", "created_h", "kept_h", "is_narrowed"),
    [
        (1, (2, 2), (24, 24), True),
        (3, (30, 2), (24, 24), False),
        (30, (90, 90), (24, 48), False),
    ],
)
def test_a_batch_read_is_narrowed_to_what_all_its_streams_hold(
    monkeypatch, planned, from_h, created_h, kept_h, is_narrowed
):
    planned.created_h, planned.kept_h = created_h, kept_h
    since = datetime.fromtimestamp(NOW - from_h * HOUR_S, UTC)
    reader = batch_reader(monkeypatch, [GreaterThan(("approximateArrivalTimestamp",), since)])
    reader.partitions()

    (settings,) = planned.settings
    assert (settings.start.kind is StartKind.TIMESTAMP) == is_narrowed


def test_only_our_columns_are_taken_and_each_stream_must_be_there(monkeypatch, planned):
    made, looked_for = KclrunDataSource({"streamName": "a,b", "region": "eu-west-1"}), []
    monkeypatch.setattr(requests, "require_stream", lambda _, each: looked_for.append(each.stream))

    assert made.schema() == SCHEMA
    assert looked_for == ["a", "b"]
    assert made.streamReader(OURS)._settings.address.stream == "a,b"
    for reads in (made.streamReader, made.reader):
        with pytest.raises(SettingsError, match="has columns of its own"):
            reads(OTHERS)


def test_a_commit_is_where_the_query_stands(reader):
    reader.commit(encode_offset(at(9)))
    reader.latestOffset()

    assert reader._planner.calls == [("everything", at(9))]


def test_ranges_become_tasks_of_at_most_so_many_shards():
    shards = {f"s{number}": after("9") for number in range(5)}
    start = Offset(streams={"": StreamIs("arn:x", 1)}, shards={each: after("1") for each in shards})
    end = Offset(streams=start.streams, shards=shards)
    settings = SourceSettings(address=StreamAddress(stream="s"), shards_per_task=2)

    tasks = _packed(start, end, {}, settings)
    assert sorted(len(each.ranges) for each in tasks) == [1, 2, 2]
    (task,) = _packed(start, end, {}, settings, Narrowing(shard_ids=frozenset({"s3"})))
    assert repr(task) == "ShardsPartition(s3 1 to 9)"
    assert _packed(start, end, {}, settings, Narrowing(streams=frozenset({"t"}))) == []
