"""What the reader makes of a Spark that does not say where the query stands (4.0 and 4.1)."""

import pytest

from kclrun.spark.offsets import Offset, StreamIs, encode_offset
from kclrun.spark.options import Reached, SourceSettings
from kclrun.spark.positions import after
from kclrun.spark.source import StreamReader


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
