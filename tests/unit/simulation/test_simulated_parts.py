"""The parts of a simulated fleet that only a story of their own shows at their limits."""

from types import SimpleNamespace

import pytest

from kclrun.leases.commands import StartProcess
from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import CreateLease
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.machine import NonceLocks
from kclrun.simulation.shards import ShardStream, StreamFaults
from kclrun.simulation.stories import ReadingGaps, RuleBroken, Stories, clock
from tests.support.oracles.watch import Oracles
from tests.support.tables import over_rows
from tests.unit.simulation.fleets import settled_fleet
from tests.unit.simulation.watched_world import Reader, Watched


def test_a_nonce_is_held_by_its_manager_and_its_processes_or_by_a_later_manager():
    locks = NonceLocks()
    locks.make("a", "manager a")
    assert locks.share("a", "process")
    assert not locks.share("b", "process")
    locks.make("b", "manager b")
    assert locks.are_others("b")
    assert locks.seize_former("b", "manager b") == frozenset()

    locks.release("manager a")
    assert locks.seize_former("b", "manager b") == frozenset()
    locks.release("process")
    assert locks.seize_former("b", "manager b") == {"a"}
    assert locks.seize_former("b", "manager b") == frozenset()
    assert not locks.share("a", "late process")
    assert (locks.seized_by("manager b"), locks.seized_by("manager c")) == ({"a"}, frozenset())
    assert not locks.are_others("b")

    locks.release("manager b")  # the kernel lets go of both
    locks.make("c", "manager c")
    assert locks.seize_former("c", "manager c") == {"a", "b"}
    locks.forget({"a"})
    assert locks.seized_by("manager c") == {"b"}
    assert not locks.share("a", "late process")


@pytest.mark.parametrize(
    ("is_named", "is_held", "is_left"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_a_manager_that_ends_leaves_its_nonce_where_a_row_or_a_process_has_it(
    is_named, is_held, is_left
):
    locks = NonceLocks()
    locks.make("a", "manager")
    if is_held:
        locks.share("a", "process")

    locks.retire("a", "manager", is_named=is_named)

    assert locks.are_others("b") is is_left
    assert locks.seize_former("b", "manager b") == ({"a"} if is_named else frozenset())


@over_rows(
    ("moves", "gaps", "unread"),
    [
        ("readable 1", [], {"s": 1.0}),
        ("readable 1, readable 2", [], {"s": 1.0}),
        ("readable 1, begins a 3", [(1.0, 2.0)], {}),
        ("readable 1, begins a 3, begins a 4, begins b 5", [(1.0, 2.0)], {}),
        ("readable 1, begins a 3, ends a 5, begins b 6", [(1.0, 2.0), (5.0, 1.0)], {}),
        ("readable 1, begins a 3, begins b 4, ends a 5", [(1.0, 2.0)], {}),
        ("readable 1, begins a 3, ends a 5, readable 6", [(1.0, 2.0)], {"s": 5.0}),
        ("begins a 1, readable 2", [], {}),
        # A child whose parent is read again is not missing meanwhile.
        ("readable 1, unreadable", [], {}),
        ("readable 1, unreadable, readable 4", [], {"s": 4.0}),
        ("readable 1, begins a 2, ends a 3, unreadable, readable 6", [(1.0, 1.0)], {"s": 6.0}),
        ("begins a 2, unreadable, readable 6", [], {}),
        ("begins a 2, unreadable, readable 6, ends a 7, readable 8", [], {"s": 7.0}),
        ("unreadable, readable 6", [], {"s": 6.0}),
        # Nothing is left of a shard that is over.
        ("readable 1, over", [], {}),
        ("readable 1, over, begins a 3, ends a 4, readable 5", [], {}),
        ("readable 1, begins a 3, over, ends a 4", [(1.0, 2.0)], {}),
    ],
)
def test_a_gap_is_a_time_in_which_a_readable_shard_has_no_reader(moves, gaps, unread):
    watched = ReadingGaps()
    for move in moves.split(", "):
        name, *words = move.split(" ")
        arguments = [float(each) if each.isdigit() else each for each in words]
        getattr(watched, name)("s", *arguments)

    assert [(gap.began_s, gap.length_s) for gap in watched.ended] == gaps
    assert watched.unread() == unread
    assert [gap.key for gap in watched.since(1.0, until_s=5.0)] == ["s"] * sum(
        1 <= began_s < 5 for began_s, _ in gaps
    )


def test_a_story_keeps_its_last_sixty_events_and_tells_what_has_content():
    stories = Stories()
    for number in range(70):
        stories.note("s", float(number), "a:h:1", "applied", frozenset({"y", "x"}))
    row = Lease(key="s0", checkpoint=TRIM_HORIZON, counter=7)
    stories.note("t", 3723.5, "a:h:1/1", "made", CreateLease(row))
    stories.note("t", 3724.0, "a:h:1/1", "exits:")
    stories.note("v", 1.0, "a:h:1", "does", StartProcess("s0", 1, 2.0, has_waited=True))

    reported = stories.text_of("s").splitlines()
    assert len(reported) == 60
    assert reported[0] == "  00:00:10.000000  a:h:1                    applied {x, y}"
    first, second = stories.text_of("t").splitlines()
    assert "CreateLease(lease=Lease(checkpoint=TRIM_HORIZON, counter=7" in first
    assert "key=" not in first
    assert "owner=" not in first
    assert second == "  01:02:04.000000  a:h:1/1                  exits:"
    assert "StartProcess(counter=1, expires_instant=2.0, has_waited=True)" in stories.text_of("v")
    parts = (f"{key}\n{stories.text_of(key)}" for key in "stv")
    assert stories.whole_text() == "\n".join(parts)
    assert stories.text_of("u") == ""
    assert clock(86_399.5) == "23:59:59.500000"


def test_a_manager_that_starts_a_second_process_for_a_lease_breaks_a_promise():
    host = settled_fleet(1, hosts=1, shards=2).hosts[0]
    key, process = next(iter(host.processes.items()))
    again = StartProcess(key, 1, process.machine.instant() + 10)
    with pytest.raises(RuleBroken, match=r"P5: .* starts a second process"):
        host._children.start(again)

    other = StartProcess("shardId-000000000077", 1, process.machine.instant() + 10)
    host._children.start(other)
    with pytest.raises(RuleBroken, match=r"P5: .* starts a second process"):
        host._children.start(other)


def test_children_of_a_child_that_was_trimmed_without_a_row_are_readable_with_its_parent_over():
    world = Watched(shards=1)
    reader = world.begin(world.keys[0], "a:h:1", for_s=1000)
    children = world.split(reader.key)
    world.now += 10
    grandchildren = world.split(children[0])
    world.stream.expire(0.0, world.now + 1)
    assert world.stream.is_expired(children[0])

    world.read_out(reader)

    assert set(world.observer.gaps.unread()) == {children[1], *grandchildren}


def all_read(world, patience_s):
    try:
        world.observer.require_all_read(patience_s)
    except RuleBroken as error:
        return str(error)
    return None


def test_all_is_read_up_to_the_last_record_that_patience_excuses():
    world = Watched(shards=1)
    reader = world.begin(world.keys[0], "a:h:1", for_s=1000)
    world.read(reader, 1, 590)
    assert [all_read(world, each) for each in (1.0, 0.95, 0.8)] == [
        None,
        None,
        "L1: 2 records unread for 0.8 s",
    ]

    world.split(reader.key)
    world.read(reader, 591, 600)
    assert all_read(world, 0.0) is None  # it was closed in this instant
    world.now += 2.0
    assert all_read(world, 1.0) == "L1: closed and not ended for 1 s"
    assert all_read(world, 2.0) is None
    world.observer.shard_exhausted(reader)
    assert all_read(world, 2.0) is None


def test_each_batch_counts_with_its_records(monkeypatch):
    world, counted = Watched(shards=1), []
    monkeypatch.setattr(world.observer.cost, "delivered", lambda *batch: counted.append(batch))
    reader = world.begin(world.keys[0], "a:h:1", for_s=1000)

    world.read(reader, 1, 50)
    world.read(reader, 51, 60)

    assert counted == [(reader.key, 50), (reader.key, 10)]
    tally = world.observer.tally
    assert (tally.records, tally.batches, tally.duplicates) == (60, 2, 0)


def test_only_a_report_before_its_fence_has_passed_opens_a_reader():
    world = Watched(shards=1)
    world.take(world.keys[0], "a:h:1")
    reader = Reader(world.keys[0], "a:h:1", 1)
    assert isinstance(world.observer, Oracles)

    world.observer.delivery_allowed(reader, world.now)
    with pytest.raises(RuleBroken, match="I4"):
        world.observer.batch_begun(reader, 1, 2)
    world.observer.delivery_allowed(reader, world.now + 0.001)
    world.observer.batch_begun(reader, 1, 2)


def test_a_listing_that_lags_shows_the_stream_as_it_was():
    stream = ShardStream(1, Traffic(records_per_s=1.0))
    [parent] = stream.open_ids()
    stream.split(parent, 100.0)
    stream.faults = StreamFaults(listing_lag_max_s=20.0)

    def shown(now):
        return {each.shard_id: each.ending_sequence_number is None for each in stream.listing(now)}

    assert shown(100.0) == {parent: True}
    assert shown(121.0) == {parent: False, **dict.fromkeys(stream.open_ids(), True)}
    assert [shard.shard_id for shard in stream.at_trim_horizon(121.0)] == [parent]


def test_what_became_of_a_shard_is_the_same_for_each_question_before_and_after_the_stream_is_new():
    stream = ShardStream(2, Traffic(records_per_s=2.0))
    trimmed, opened = stream.open_ids()
    stream.split(trimmed, 100.0)

    def answers(shard_id, now):
        known, expired = stream.is_known(shard_id), stream.is_expired(shard_id)
        return known, expired, stream.finds(shard_id), stream.holds(shard_id, now)

    assert answers(trimmed, 110.0) == (True, False, True, True)
    assert [stream.expire(20.0, 119.0), stream.expire(20.0, 121.0)] == [0, 1]
    assert answers(trimmed, 122.0) == (True, True, False, False)
    assert answers(opened, 122.0) == (True, False, True, True)
    assert not stream.is_made_again
    stream.make_again(2, 130.0)
    assert stream.is_made_again
    assert answers(trimmed, 131.0) == (True, True, False, False)
    assert answers(opened, 131.0) == (True, False, False, True)  # of the former stream
    assert not stream.holds("shardId-000000000009", 131.0)


@over_rows(
    ("drawn", "fate"),
    [
        (0.0, "throttled"),
        (0.12, "throttled"),
        (0.125, "unreachable"),
        (0.37, "unreachable"),
        (0.375, "expired_iterator"),
        (0.62, "expired_iterator"),
        (0.625, None),
    ],
)
def test_each_fault_of_a_read_has_its_share(drawn, fate):
    stream = ShardStream(1, Traffic(records_per_s=1.0), SimpleNamespace(random=lambda: drawn))
    stream.faults = StreamFaults(throttled=0.125, unreachable=0.25, expired_iterator=0.25)

    assert stream.fetch_fate() == fate
    stream.faults = StreamFaults(not_found=0.5)
    assert stream.fetch_fate() == ("not_found" if drawn < 0.5 else None)
    stream.faults = StreamFaults()
    assert stream.fetch_fate() is None
