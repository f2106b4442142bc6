"""Keyed state of Spark's tasks, without Spark: what a batch reads, whoever wrote before [K21]."""

import json
import sys
import textwrap
from itertools import pairwise
from types import SimpleNamespace

import pytest

from kclrun.errors import KclrunError, ProcessorError, SettingsError
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.policies import ErrorPolicy
from kclrun.model.record import Record
from kclrun.model.sequence import SHARD_END as ENDED
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ALL_HASH_KEYS, HASH_KEY_MAX, HashRange, Shard, ShardGraph
from kclrun.model.state import StateDestination, Watermarks
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.spark.executor.reading import ReadPage
from kclrun.spark.keyed.names import QueryPlace
from kclrun.spark.keyed.query_state import BATCHES_KEPT, FleetState, QueryState, written
from kclrun.spark.offsets import Offset, ShardRange, StreamIs, decode_offset, encode_offset
from kclrun.spark.option_reading import Use, read_source_options
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after
from kclrun.spark.processors.hosting import ProcessorJob
from kclrun.spark.processors.range_progress import ProcessorCache
from kclrun.spark.processors.source import ProcessorReader
from kclrun.spark.processors.tasks import Keyed, ProcessorTask
from kclrun.state.kept import MemoryEntries
from kclrun.testing import run_processor
from tests.support.dated import LATE_WORDS, ROWS, TIMES
from tests.support.memory_versions import MemoryVersions, Versions

MARKS = """
from kclrun import RecordProcessor

class Marks(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            values = self.context.state[record]
            values["marks"] = values.get("marks", "") + self.context.options["code"]
            self.context.emit({"key": record.partition_key, "marks": values["marks"]})
            if record.data == b"bad":
                raise ValueError("a bad record")
            if record.data == b"release":
                self.context.release()

    def shard_ended(self, checkpointer):
        for key in self.context.state:
            self.context.emit({"ended": key, "marks": self.context.state[key]["marks"]})


class Visits(RecordProcessor):
    clock = "event"

    def initialize(self, context):
        self.context, self.seen = context, context.counter("seen")

    def process_records(self, batch, checkpointer):
        for record in batch:
            self.seen.add(record)
            at = record.approximate_arrival_timestamp + 5
            self.context.set_timer(record, at, clock=self.clock)

    def on_timer(self, timer, checkpointer):
        self.context.emit({"key": timer.key, "at": timer.at, "seen": self.seen[timer.key]})
        self.seen[timer.key] = 0
        if timer.key == "a" and self.context.options.get("wrong"):
            raise ValueError(self.context.options["wrong"].pop())


class Clocked(Visits):
    clock = "wall"


class Single(RecordProcessor):
    def process_record(self, record, context):
        pass

    def on_timer(self, timer, checkpointer):
        pass
"""
LINEAGE, OTHER = "a" * 32, "b" * 32
PARENT, LOW, HIGH, CHILD = "shardId-0", "shardId-1", "shardId-2", "shardId-3"
HALF = 2**127
WATERMARKS = Watermarks(lateness_s=2.0, every_s=1.0)
GRAPH = ShardGraph(
    [
        Shard(PARENT, ALL_HASH_KEYS, "0", "9"),
        Shard(LOW, HashRange(0, HALF - 1), "10", "19", PARENT),
        Shard(HIGH, HashRange(HALF, HASH_KEY_MAX), "10", "19", PARENT),
        Shard(CHILD, ALL_HASH_KEYS, "20", None, LOW, HIGH),
    ]
)
# By the MD5 of the key.
A, B = "a", "b"  # of LOW, of HIGH


class World:
    """One store, drivers that start one after the other, and Python workers that keep instances."""

    def __init__(self, folder):
        self.folder = folder
        self.stored = {}
        self.worker = ProcessorCache()
        self.token = 0
        self.code = "x"
        self.wrong = []  # what the next timers of the key A raise
        self.fleet = None
        self.graph = GRAPH
        self.start()

    def start(self, code=None):
        """Another start of the query, with other code if it is given; its workers are new."""
        self.code = code or self.code
        self.worker = ProcessorCache()
        self.token += 1
        self.query = QueryState(
            self.store,
            lambda: self.graph,
            None if self.fleet is None else lambda: self.fleet,
            token=self.token << 32,
            retain_s=3600.0,  # what is in this store is a day old
            may_begin_empty=False,
        )
        return self.query

    def store(self, lineage):
        return MemoryVersions(self.stored.setdefault(lineage, Versions()))

    def begin(self, lineage=LINEAGE, **at):
        """The first batch of a lineage begins at these positions."""
        at = at or {PARENT: TRIM_HORIZON}
        self.query.begin(lineage, offset(**at), offset(**at))

    def task(self, shard, begin, end, *records, lineage=LINEAGE, query=None, worker=None, **job):
        """One attempt at a range: its rows."""
        self.token += 1
        settings = {"retries": 0, "then": "halt", "limit": 100, "processor": "Marks"} | job
        policy = ErrorPolicy(settings["retries"], 0.0, settings["then"], None, settings["limit"])
        processor = settings["processor"]
        task = ProcessorTask(
            ProcessorJob(
                application="app",
                stream="orders",
                processor=processor if ":" in processor else f"marks:{processor}",
                paths=(str(self.folder),),
                options={"code": self.code, "wrong": self.wrong},
                batch_max=100,
                uncheckpointed_max=1000,
                on_error=policy,
                state=QueryPlace(
                    StateDestination(path="unused", watermarks=WATERMARKS), "app", "orders"
                ),
                run="r",
            ),
            self.token,
            kept=self.worker if worker is None else worker,
            letters=lambda: LetterFolder(self.folder / "letters"),
            registry=bytes,
            keyed=Keyed(
                (query or self.query).batch(lineage, [shard]), 2**20, lambda: self.store(lineage)
            ),
            wait=lambda _: None,
        )
        first = int(begin.number or 0) + 1
        read = [
            Record(data, key, str(number), approximate_arrival_timestamp=float(sum(at)))
            for number, (key, data, *at) in enumerate(records, start=first)
        ]
        pages = [ReadPage(ShardRange(shard, begin, end), read, is_last=True)]
        lines = [line for batch in task.run(iter_closing(pages)) for line in batch.to_pylist()]
        return [tuple(json.loads(line["row"]).values()) for line in lines if line["kind"] == "row"]


def iter_closing(pages):
    yield from pages


def offset(**shards):
    return Offset(streams={"": StreamIs("arn", 0)}, shards=shards)


def some(*keys, data=b"1"):
    return [(key, data) for key in keys]


AT = [after(str(number * 10)) for number in range(10)]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "marks", raising=False)
    (tmp_path / "marks.py").write_text(textwrap.dedent(MARKS))
    monkeypatch.syspath_prepend(tmp_path)
    yield World(tmp_path)
    sys.modules.pop("marks", None)


def test_batches_of_any_worker_go_on_where_the_one_before_ended(world):
    world.begin()
    assert world.task(PARENT, TRIM_HORIZON, AT[1], *some(A, B)) == [(A, "x"), (B, "x")]
    assert world.task(PARENT, AT[1], AT[2], *some(A)) == [(A, "xx")]  # the instance goes on
    elsewhere = ProcessorCache()
    assert world.task(PARENT, AT[2], AT[3], *some(A, A), worker=elsewhere)[-1] == (A, "xxxx")
    assert world.task(PARENT, AT[3], AT[4]) == []  # no record: the same version at another end
    assert world.task(PARENT, AT[4], AT[5], *some(B)) == [(B, "xx")]


def test_an_attempt_that_is_repeated_reads_and_writes_the_same(world):
    world.begin()
    first = world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    # Its executor died after the claim; a copy of the task runs elsewhere.
    assert world.task(PARENT, TRIM_HORIZON, AT[1], *some(A), worker=ProcessorCache()) == first
    again = world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    assert again == first
    assert world.task(PARENT, AT[1], AT[2], *some(A)) == [(A, "xx")]


def test_what_another_attempt_has_claimed_counts_and_not_what_this_worker_remembers(world):
    world.begin()
    winner, loser = ProcessorCache(), ProcessorCache()
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A), worker=winner)
    world.code = "y"  # not deterministic: the copy would remember something else
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A), worker=loser)
    assert world.task(PARENT, AT[1], AT[2], *some(A), worker=loser) == [(A, "xy")]


def test_a_batch_that_a_later_start_repeats_counts_as_that_start_left_it(world):
    world.begin()
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    old = world.query
    world.task(PARENT, AT[1], AT[2], *some(A))
    world.start("y")  # the batch was not committed: new code repeats it
    assert world.task(PARENT, AT[1], AT[2], *some(A)) == [(A, "xy")]
    # A task of the former start, late.
    world.code = "z"
    assert world.task(PARENT, AT[1], AT[2], *some(A), query=old) == [(A, "xz")]
    world.code = "y"
    worker = ProcessorCache()
    assert world.task(PARENT, AT[2], AT[3], *some(A), worker=worker) == [(A, "xyy")]
    # That start planned the next batch to another end, and had written it.
    world.start("v")
    assert world.task(PARENT, AT[2], AT[4], *some(A, A))[-1] == (A, "xyvv")
    assert world.task(PARENT, AT[4], AT[5], *some(A)) == [(A, "xyvvv")]


def test_a_new_checkpoint_has_nothing_of_the_former_one(world):
    world.begin()
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    world.start()
    world.begin(OTHER)
    assert world.task(PARENT, TRIM_HORIZON, AT[1], *some(A), lineage=OTHER) == [(A, "x")]


def test_children_of_a_split_have_its_keys_and_the_child_of_a_merge_both(world):
    world.begin()
    ended = world.task(PARENT, TRIM_HORIZON, SHARD_END, *some(A, B))[2:]
    assert sorted(ended) == [(A, "x"), (B, "x")]
    assert world.task(LOW, TRIM_HORIZON, AT[5], *some(A)) == [(A, "xx")]
    assert world.task(LOW, AT[5], SHARD_END) == [(A, "xx")]
    assert world.task(HIGH, TRIM_HORIZON, SHARD_END) == [(B, "x")]  # not a record, and it is kept
    assert world.task(CHILD, TRIM_HORIZON, AT[9], *some(A, B)) == [(A, "xxx"), (B, "xx")]


def test_a_call_that_raised_leaves_no_change_and_its_record_no_trace(world):
    world.begin()
    with pytest.raises(ProcessorError):
        world.task(PARENT, TRIM_HORIZON, AT[1], (A, b"bad"))
    given_up = {"then": "skip"}
    rows = world.task(PARENT, TRIM_HORIZON, AT[1], (A, b"1"), (A, b"bad"), (A, b"1"), **given_up)
    assert rows == [(A, "x"), (A, "xx")]
    rows = world.task(PARENT, AT[1], AT[2], (A, b"release"), (A, b"1"))
    assert rows == [(A, "xxx"), (A, "xxxx")]
    assert world.task(PARENT, AT[2], AT[3], *some(A)) == [(A, "xxxxx")]


@pytest.mark.parametrize(
    ("shard", "begin", "words"),
    [
        (PARENT, AT[7], "no version of the state of shardId-0 at 70 is in state.store"),
        (LOW, TRIM_HORIZON, "no version of the state of shardId-0 at its end"),
    ],
)
def test_a_version_that_is_missing_is_an_error_and_never_an_empty_state(world, shard, begin, words):
    world.begin()
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    with pytest.raises(SettingsError, match=words):
        world.task(shard, begin, AT[9], *some(A))


def test_old_versions_go_once_no_batch_can_begin_with_them(world):
    world.begin()
    world.task(PARENT, TRIM_HORIZON, AT[1], *some(A))
    for number in range(1, 5):
        world.task(PARENT, AT[number], AT[number + 1], *some(A))
    before = len(world.stored[LINEAGE].content)
    for _ in range(BATCHES_KEPT - 1):
        world.query.committed(LINEAGE, offset(**{PARENT: AT[5]}))
    assert len(world.stored[LINEAGE].content) == before
    world.query.committed(LINEAGE, offset(**{PARENT: AT[5]}))
    # One claim, what it rests on, and the run.
    left = {name for of, name in world.stored[LINEAGE].content if of == PARENT}
    assert len(left) < before - 2
    assert world.task(PARENT, AT[5], SHARD_END, *some(A))[0] == (A, "xxxxxx")
    # The end of a shard stays until each child has a state of its own.
    for _ in range(2 * BATCHES_KEPT):
        world.query.committed(LINEAGE, offset(**{LOW: TRIM_HORIZON, HIGH: TRIM_HORIZON}))
    assert world.task(LOW, TRIM_HORIZON, AT[5], *some(A)) == [(A, "xxxxxxx")]
    world.task(HIGH, TRIM_HORIZON, AT[5])
    for _ in range(4):
        world.query.committed(LINEAGE, offset(**{LOW: AT[5], HIGH: AT[5]}))
    assert not any(of == PARENT for of, _ in world.stored[LINEAGE].content)
    assert world.task(LOW, AT[5], AT[6], *some(A)) == [(A, "x" * 8)]


def test_the_state_of_a_shard_that_has_left_the_listing_goes_once_its_children_have_theirs(world):
    world.begin()
    world.task(PARENT, TRIM_HORIZON, SHARD_END, *some(A))
    world.graph = ShardGraph(each for each in GRAPH if each.shard_id != PARENT)
    world.start()
    world.task(LOW, TRIM_HORIZON, AT[5], *some(A))
    for _ in range(2 * BATCHES_KEPT):
        world.query.committed(LINEAGE, offset(**{LOW: AT[5], HIGH: TRIM_HORIZON}))
    assert any(of == PARENT for of, _ in world.stored[LINEAGE].content), "HIGH begins with it"

    world.task(HIGH, TRIM_HORIZON, AT[5])
    for _ in range(4):
        world.query.committed(LINEAGE, offset(**{LOW: AT[5], HIGH: AT[5]}))
    assert not any(of == PARENT for of, _ in world.stored[LINEAGE].content)


@pytest.mark.parametrize("cuts", [(), (5,), (1, 2, 3), (7, 8, 40), range(1, 60, 3)], ids=str)
def test_timers_of_event_time_fire_alike_however_the_records_are_cut(world, cuts):
    # Of two keys, with gaps: the timers fire at the records that move the watermark far enough.
    times = [number + 9 * (number % 7 == 0) + 20 * (number // 20) for number in range(60)]
    records = [("ab"[number % 3 == 0], b"1", at) for number, at in enumerate(times)]
    world.begin()
    rows, begin = [], TRIM_HORIZON
    for first, last in pairwise([0, *cuts, len(records)]):
        end = after(str(last))
        for worker in (ProcessorCache(), world.worker):  # each range is read twice
            found = world.task(
                *(PARENT, begin, end, *records[first:last]), processor="Visits", worker=worker
            )
        rows += found
        begin = end

    import marks

    plain = [
        Record(data, key, str(number), approximate_arrival_timestamp=float(at))
        for number, (key, data, at) in enumerate(records, start=1)
    ]
    kept = WATERMARKS
    expected = run_processor(
        marks.Visits,
        plain,
        settings={"watermark": {"lateness": f"{kept.lateness_s}s", "every": f"{kept.every_s}s"}},
        end_of_shard=False,
    )
    assert rows == [tuple(row.values()) for row in expected.rows]
    assert len(rows) > 5


def test_windows_of_old_records_close_by_event_time_and_a_late_one_is_in_the_log(world, caplog):
    world.begin()
    records = [(A, str(at).encode(), 1.5e9 + number) for number, at in enumerate(TIMES)]

    rows = world.task(PARENT, TRIM_HORIZON, AT[1], *records, processor="tests.support.dated:Dated")

    assert rows == [tuple(row.values()) for row in ROWS]
    assert LATE_WORDS in caplog.text


def test_a_timer_that_raised_is_called_again_and_its_changes_count_once(world):
    world.begin()
    world.wrong += ["once"]
    records = [(A, b"1", 0), (B, b"1", 20), (A, b"1", 40)]
    visits = {"processor": "Visits", "retries": 1}
    rows = world.task(PARENT, TRIM_HORIZON, AT[1], *records, **visits)
    assert rows == [(A, 5.0, 1), (B, 25.0, 1)]
    assert world.wrong == []
    world.wrong += ["for good"]
    elsewhere = {"processor": "Visits", "worker": ProcessorCache()}
    with pytest.raises(ProcessorError, match="on_timer"):
        world.task(PARENT, AT[1], AT[2], (B, b"1", 60), **elsewhere)
    # The children have the pending timers of their keys.
    assert world.task(PARENT, AT[1], SHARD_END, processor="Visits") == []
    assert world.task(LOW, TRIM_HORIZON, AT[5], ("c", b"1", 60), **visits) == [(A, 45.0, 1)]


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ("Clocked", "timers of the wall clock are for engine: fleet"),
        ("Single", "on_timer"),
    ],
)
def test_a_timer_that_the_records_do_not_decide_is_refused(world, processor, words):
    world.begin()
    with pytest.raises(KclrunError, match=words):
        world.task(PARENT, TRIM_HORIZON, AT[1], *some(A), processor=processor)


class Planner:
    """Answers with these ends, one after the other."""

    def __init__(self, *ends):
        self.ends = list(ends)

    def initial_offset(self):
        return offset(**{PARENT: TRIM_HORIZON})

    def latest_offset(self, start, *, takes_all):
        del takes_all
        return self.ends.pop(0) or start


def reader_of(tmp_path, *ends, may_begin_empty=False):
    place = StateDestination(path=str(tmp_path), may_begin_empty=may_begin_empty)
    job = SimpleNamespace(state=QueryPlace(place, "app", "orders"))
    settings = read_source_options({"streamName": "orders", "region": "eu-west-1"}, Use.STREAM)
    reader = ProcessorReader(settings, job)
    reader._planner = Planner(*ends)
    return reader


def test_every_offset_after_the_first_carries_the_lineage_of_the_query(tmp_path):
    reader = reader_of(tmp_path, None, offset(**{PARENT: AT[1]}), None)
    first = reader.initialOffset()
    assert reader.latestOffset(first) is first  # no news: the same text for Spark
    end = reader.latestOffset(first)
    assert len(end["lineage"]) == 32
    assert list(end) == sorted(end)
    assert decode_offset(end) == offset(**{PARENT: AT[1]})
    assert reader.latestOffset(end) is end
    # After a restart the checkpoint's lineage goes on; a new query has another.
    again = reader_of(tmp_path, offset(**{PARENT: AT[2]}), offset(**{PARENT: AT[1]}))
    assert again.latestOffset(end)["lineage"] == end["lineage"]
    assert again.latestOffset(again.initialOffset())["lineage"] != end["lineage"]


def test_a_checkpoint_of_a_query_without_state_is_refused_unless_it_may_begin_empty(tmp_path):
    without = encode_offset(offset(**{PARENT: AT[1]}))
    with pytest.raises(SettingsError, match="the checkpoint is of a query without state"):
        reader_of(tmp_path, offset(**{PARENT: AT[2]})).latestOffset(without)
    reader = reader_of(tmp_path, offset(**{PARENT: AT[2]}), may_begin_empty=True)
    assert reader.latestOffset(without)["lineage"]


class TestFromTheFleet:
    """A query that begins with the state that a lease table names."""

    @pytest.fixture
    def rows(self, world):
        """The rows of a fleet that has processed two records of each key before the split."""
        store = MemoryVersions(Versions())
        kept = MemoryEntries()
        kept.apply([(key, "marks", b"\xa2ff") for key in (A, B)])
        chain = written(kept, store, PARENT, 7, Cursor(ENDED))
        rows = {
            PARENT: self.row(PARENT, ENDED, chain.newest, children={LOW, HIGH}),
            LOW: self.row(LOW, "TRIM_HORIZON", "parents", parents={PARENT}),
            HIGH: self.row(HIGH, "TRIM_HORIZON", "parents", parents={PARENT}),
        }
        world.fleet = FleetState(rows, store)
        world.start()
        return rows

    def row(self, shard, at, version, parents=(), children=()):
        position = at if at is ENDED else ExtendedSequenceNumber(at)
        return Lease(
            key=LeaseKey(shard),
            checkpoint=position,
            counter=7,
            parents=frozenset(parents),
            children=frozenset(children),
            hash_range=GRAPH[shard].hash_range,
            state_version=version,
            outputs=StoredCursors(position, ()),
        )

    def test_its_shards_begin_with_what_their_leases_would(self, world, rows):
        del rows
        world.begin(**{LOW: TRIM_HORIZON, HIGH: TRIM_HORIZON})
        assert world.task(LOW, TRIM_HORIZON, AT[5], *some(A)) == [(A, "ffx")]
        world.start()  # the batch is planned, and repeated: nothing is copied again
        world.fleet = None
        world.begin(**{LOW: TRIM_HORIZON, HIGH: TRIM_HORIZON})
        assert world.task(HIGH, TRIM_HORIZON, AT[5], *some(B)) == [(B, "ffx")]

    def test_a_lease_that_went_on_is_refused(self, world, rows):
        rows[LOW] = self.row(LOW, "12", rows[PARENT].state_version)
        with pytest.raises(SettingsError, match="its fleet has gone on meanwhile"):
            world.begin(**{LOW: TRIM_HORIZON, HIGH: TRIM_HORIZON})

    def test_a_shard_that_ended_without_state_is_refused(self, world, rows):
        rows[PARENT] = self.row(PARENT, ENDED, None)
        with pytest.raises(SettingsError, match="without state"):
            world.begin(**{PARENT: SHARD_END})
