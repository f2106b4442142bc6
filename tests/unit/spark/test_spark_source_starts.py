"""What the reader makes of a Spark that does not say where the query stands (4.0 and 4.1)."""

import pickle
import sys
from types import SimpleNamespace

import pytest

from kclrun.errors import InvariantViolation
from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.options import Reached, SourceSettings
from kclrun.spark.positions import after
from kclrun.spark.source import Narrowing, StreamReader, _packed


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

    def hints(self, start, end):
        return {}


@pytest.fixture
def reader():
    made = StreamReader(SourceSettings(reached=Reached(stream="s")))
    made._says_start = False
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
    reader = StreamReader(SourceSettings(reached=Reached(stream="s"), **limits))

    assert reader.getDefaultReadLimit() == named


@pytest.mark.parametrize("takes_all", [False, True])
def test_a_spark_that_says_where_it_stands_gets_the_start_itself_without_new_records(takes_all):
    reader = StreamReader(SourceSettings(reached=Reached(stream="s")))
    reader._says_start = True
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
    with pytest.raises(InvariantViolation, match="did not say where the query stands"):
        reader.latestOffset()


def test_a_commit_is_where_the_query_stands(reader):
    reader.commit(encode_offset(at(9)))
    reader.latestOffset()

    assert reader._planner.calls == [("everything", at(9))]


def test_ranges_become_tasks_of_at_most_so_many_shards():
    shards = {f"s{number}": after("9") for number in range(5)}
    start = Offset(streams={"": StreamIs("arn:x", 1)}, shards={each: after("1") for each in shards})
    end = Offset(streams=start.streams, shards=shards)
    settings = SourceSettings(reached=Reached(stream="s"), shards_per_task=2)

    tasks = _packed(start, end, {}, settings)
    assert sorted(len(each.ranges) for each in tasks) == [1, 2, 2]
    (task,) = _packed(start, end, {}, settings, Narrowing(shard_ids=frozenset({"s3"})))
    assert repr(task) == "ShardsPartition(s3 1 to 9)"
    assert _packed(start, end, {}, settings, Narrowing(streams=frozenset({"t"}))) == []
