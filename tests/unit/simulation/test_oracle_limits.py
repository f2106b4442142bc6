"""Each oracle at its limits: what it allows after a story, and the nearest thing that it refuses.

A story is moves with commas between. A reader is one letter. `A 1-50`: these records are given to A
and its call returns; `A 1-50!`: the call has not returned.
"""

import copy

import pytest

from kclrun.model.lease import Lease
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.protocol.writes import (
    Checkpoint,
    Claim,
    CreateChildren,
    CreateLease,
    End,
    EndedParent,
    Renew,
    Take,
)
from kclrun.simulation.observer import WatchPolicy
from kclrun.simulation.stories import RuleBroken
from tests.support.oracles.cost import CostWatch
from tests.support.oracles.deliveries import Letters, ShardDeliveries
from tests.support.oracles.permissions import Permissions
from tests.support.tables import over_rows
from tests.unit.simulation.watched_world import Watched


class Reader:
    def __init__(self, name):
        self.key, self.who = "s0", f"{name}:h:1/1"


class Story:
    """Plays moves, and gives the last one's answer. A letter at the beginning is a reader."""

    def __init__(self):
        self.readers = {name: Reader(name) for name in "abcdefghijklmnopqr"}
        self.answer = None

    def play(self, moves):
        for move in filter(None, moves.split(", ")):
            self.answer = self.move(*move.split(" "))
        return self.answer

    def move(self, first, *words):
        if first.lower() in self.readers:
            return self.of_reader(self.readers[first.lower()], *words)
        return getattr(self, first)(*words)


class Delivered(Story):
    """The deliveries of one shard that 600 records have come to; 50 may come again."""

    def __init__(self):
        super().__init__()
        self.shard = ShardDeliveries("s0", 50)

    def of_reader(self, reader, what, *words):
        if what[0].isdigit():
            first, last = map(int, what.rstrip("!").split("-"))
            again = self.shard.begun(reader, first, last, arrived=600)
            if not what.endswith("!"):
                self.shard.done(last)
            return again
        if what == "fails":
            return self.shard.excuse(reader, "killed")
        return getattr(self.shard, what)(reader, *map(int, words))

    def ends(self, *_):
        self.shard.excuse_all("taken")

    def torn(self):
        self.shard.row_deleted()

    def anew(self):
        self.shard.begins_again()

    def covered(self, number):
        self.shard.covered(int(number))

    def late(self, number):
        self.shard.saved_late(int(number))

    def claimed(self, number):
        self.shard.claimed = int(number)

    def done(self, number):
        self.shard.done(int(number))

    def uncapped(self, name):
        self.shard.uncapped.add(self.readers[name])


@over_rows(("story", "allowed", "again", "refused", "rule"), [
        # Order, and what there is.
        ("", "A 1-600", 0, "A 1-601", "I1: record 601"),
        ("", "A 1-5", 0, "A 2-5", "I6"),
        ("A 1-50", "A 51-60", 0, "A 52-60", "I6"),
        ("A 1-50", "A 51-60", 0, "A 50-60", "I6"),
        ("A 1-50!, done 50", "A 51-60", 0, "A 52-60", "I6"),
        ("A 1-50!, done 49", "done 50", None, "A 51-60", "I1: records 50 to 50 left out"),
        # Where a reader begins: not past the checkpoint, and where its claim found the row.
        ("A 1-80, covered 40, A fails", "B 41-80", 40, "B 42-80", "I6"),
        ("A 1-80, covered 40, A fails", "B 30-80", 40, "B 42-80", "I6"),
        ("A 1-80, covered 40, A fails, claimed 40", "B 41-80", 40, "B 40-80", "I6"),
        ("A 1-80, A fails, claimed 39, late 40", "B 40-80", 41, "B 41-80", "I6"),
        ("A 1-30, covered 10, B goes_on 31", "B 31-40", 0, "B 32-40", "I6"),
        # A call that raises, and a checkpoint inside of it.
        ("A 1-50!, A raised 1, done 30, covered 30", "A 31-50", 0, "A 32-50", "I6"),
        ("A 1-50!, A raised 1, done 30, covered 30", "A 1-50", 0, "A 32-50", "I6"),
        ("A 1-50!, A raised 1, done 30, covered 30", "A 2-50", 0, "A 32-50", "I6"),
        ("A 1-20, A 21-40!, A raised 21, A fails", "B 1-40", 20, "B 2-40", "I6"),
        ("A 1-20!, A raised 20, done 19, A fails", "B 1-20", 19, "B 2-20", "I6"),
        ("A 1-20!, A raised 1", "B 1-20", 0, "B 2-20", "I6"),
        ("A 1-40, A fails, covered 20, B 21-30!, B raised 21", "C 21-40", 10, "C 22-40", "I6"),
        ("A 1-40, A fails, covered 20, B 21-30!, A raised 31", "B 31-40", 0, "C 21-30", "I8"),
        ("A 1-20!, A raised 1, A left_out_before 11", "A 11-20", 0, "A 12-20", "I6"),
        ("A 1-20!, A raised 1, A left_out_before 11", "A 11-20", 0, "A 10-20", "I6"),
        # How many records come again: each pair of readers counts for itself.
        ("A 1-91, covered 40, A fails", "B 41-90", 50, "B 41-91", "I7: 51 records"),
        ("A 1-91, covered 40, A fails, B 41-80", "B 81-90", 10, "B 81-91", "I7: 51 records"),
        ("A 1-90, A fails, covered 40, B 41-90, B fails", "C 41-90", 50, "C 42-90", "I6"),
        ("A 1-99, covered 40, A fails, uncapped a", "B 41-99", 59, "B 42-99", "I6"),
        # An excuse, and when it is over.
        ("A 1-80, covered 80", "B 80-90", 0, "B 82-90", "I6"),
        ("A 1-80, covered 79", "A 81-90", 0, "B 80-90", "I8: 1 records again"),
        ("A 1-40, covered 39, A fails, A 41-60", "B 40-60", 21, "B 41-60", "I6"),
        ("A 1-40, A fails, covered 40, A 41-60", "A 61-70", 0, "B 41-60", "I8: 20 records"),
        ("A 1-40, covered 40, A fails, A 41-60", "A 61-70", 0, "B 41-60", "I8: 20 records"),
        ("A 1-40, A fails, B fails, covered 20, B 21-40", "B 41-50", 0, "C 21-40", "I8"),
        ("A 1-40, covered 20, ends all, B 21-30, B 31-40", "B 41-50", 0, "C 21-40", "I8"),
        ("A 1-40, covered 20, A fails, B 21-30, ends all", "C 21-40", 20, "C 22-40", "I6"),
        # Which of two former readers a record came from last.
        ("A 1-80, covered 40, A fails, B 41-60", "B 61-80", 20, "C 41-80", "I8: 20 .* to b"),
        ("A 1-80, covered 40, A fails, B 41-60, B fails", "C 41-80", 40, "C 42-80", "I6"),
        ("A 1-80, covered 40, A fails, B 41-60, covered 60", "C 60-80", 20, "C 62-80", "I6"),
        ("A 1-99, covered 40, A fails, B 41-60, B 61-70, B fails", "C 41-99", 59, "B 70-99", "I6"),
        ("A 1-80, A fails, late 40, B 41-80, B fails", "C 1-80", 80, "C 42-80", "I6"),
        ("A 1-80, covered 40, A fails, B 41-90, B fails", "C 41-90", 50, "C 42-90", "I6"),
        # The row was deleted from outside, or created anew.
        ("A 1-80, covered 40, torn", "B 41-80", 40, "B 42-80", "I6"),
        ("A 1-40, torn, B 1-40, A 41-50", "B 41-50", 10, "B 42-50", "I6"),
        ("A 1-80, torn, A 81-90, B 1-80", "A 91-95", 0, "B 81-90", "I7: 90 records"),
        ("A 1-20, torn, A 21-80", "B 1-50", 50, "B 1-51", "I7: 51 records"),
        ("A 1-80, torn, B 1-80, covered 80, A 81-90", "A 91-95", 0, "B 81-90", "I8"),
        ("A 1-80, torn, covered 80, A 81-90", "A 91-95", 0, "B 81-90", "I8"),
        ("A 1-80, anew, B 1-80, covered 80, B 81-90", "A 81-90", 10, "C 81-90", "I8"),
    ])  # fmt: skip
def test_deliveries_at_their_limits(story, allowed, again, refused, rule):
    good, bad = Delivered(), Delivered()
    good.play(story)
    bad.play(story)

    assert good.play(allowed) == again
    with pytest.raises(RuleBroken, match=rule):
        bad.play(refused)


@pytest.mark.parametrize(
    ("story", "number", "left_out", "processed"),
    [
        ("A 1-20!, A raised 1", 11, range(1, 11), 10),
        ("A 1-20!, done 5, A raised 1, covered 5", 11, range(6, 11), 10),
        ("A 1-20!, done 5, A raised 6", 6, range(6, 6), 5),
        ("A 1-20", 21, range(21, 21), 20),
    ],
)
def test_records_that_no_call_returned_for_are_left_out(story, number, left_out, processed):
    played = Delivered()
    played.play(story)

    assert played.shard.left_out_before(played.readers["a"], number) == left_out
    assert played.shard.processed == processed


@pytest.mark.parametrize(
    ("readers", "last", "forgotten"),
    [
        ("abcdefghijklmnop", "p", ""),
        ("abcdefghijklmnopq", "q", "a"),
        ("abcdefghijklmnopq", "a", ""),
    ],
)
def test_only_the_last_sixteen_readers_and_the_latest_one_are_known(readers, last, forgotten):
    played = Delivered()
    for number, name in enumerate((*readers, last), 1):
        played.play(f"{name} {number}-{number}")
        if number <= len(readers):
            played.shard.checkpointed = number
    assert all(not played.shard.is_new(played.readers[name]) for name in readers)

    played.play(f"covered {len(readers) + 1}")

    assert (
        "".join(name for name in readers if played.shard.is_new(played.readers[name])) == forgotten
    )


def test_a_shard_has_begun_with_its_first_batch_and_is_not_over_once_its_row_comes_anew():
    played = Delivered()
    assert (played.shard.has_begun, played.shard.is_over) == (False, False)

    played.play("A 1-2")
    played.shard.is_over = True
    played.play("B raised 1, anew")

    assert (played.shard.has_begun, played.shard.is_over) == (True, False)
    assert played.shard.is_new(played.readers["b"])


class Lettered(Story):
    """Every tenth record makes each call raise."""

    def __init__(self):
        super().__init__()
        self.letters = Letters(10)

    def wants(self, number):
        self.letters.wanted("s0", [int(number)])

    def kept(self, number):
        self.letters.kept("s0", int(number))

    def back(self, records):
        self.letters.processed("s0", *map(int, records.split("-")))

    def covered(self, number):
        self.letters.require_all("s0", int(number))


@over_rows(
    ("story", "allowed", "refused", "missing"),
    [
        ("", 9, 10, 10),
        ("kept 10", 19, 20, 20),
        ("kept 20", 9, 29, 10),
        ("kept 10, wants 15", 14, 15, 15),
        ("kept 10, wants 15, kept 15", 19, 20, 20),
        ("back 1-10", 19, 20, 20),
        ("back 10-19", 19, 20, 20),
        ("back 11-20, kept 10", 29, 30, 30),
        ("kept 10, wants 12, wants 15, back 12-14", 14, 15, 15),
        ("kept 10, wants 12, back 11-12", 19, 20, 20),
        ("kept 10, wants 12, back 13-19", 11, 12, 12),
        ("covered 9", 9, 10, 10),
        ("kept 10, covered 10", 19, 20, 20),
        ("kept 10, covered 15, covered 5", 19, 20, 20),
        ("kept 10, kept 20, covered 10", 29, 30, 30),
        ("kept 10, kept 20, covered 20", 29, 30, 30),
        ("kept 10, wants 15, kept 15, covered 15, covered 16", 19, 20, 20),
    ],
)
def test_letters_at_their_limits(story, allowed, refused, missing):
    good, bad = Lettered(), Lettered()
    good.play(story)
    bad.play(story)

    good.letters.require_all("s0", allowed)
    with pytest.raises(RuleBroken, match=f"I13: record {missing} failed"):
        bad.letters.require_all("s0", refused)


class Permitted(Story):
    """Who may read the lease, by times in seconds."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.permissions = Permissions(lambda: self.now)

    def of_reader(self, reader, what, *words):
        if what == "may":
            return self.permissions.opened(reader, float(words[0]))
        return getattr(self.permissions, what)(reader)

    def at(self, now):
        self.now = float(now)

    def taken(self, by):
        owner = by if by.startswith("java") else f"kclrun:{by}:h:1"
        self.permissions.row_taken(Lease(key="s0", checkpoint=TRIM_HORIZON, owner=owner))

    def deleted(self):
        self.permissions.row_deleted("s0")

    def settled(self, by):
        self.permissions.row_settled("s0", f"kclrun:{by}:h:1")

    def waits(self, row, *taken_from):
        lease = Lease(
            key="s0", checkpoint=TRIM_HORIZON, taken_from=taken_from[0] if taken_from else None
        )
        self.permissions.require_waited(self.readers["a"], lease if row == "row" else None)


@over_rows(("story", "allowed", "refused"), [
        # The fence, to a microsecond that rounding may take.
        ("A may 10", "at 10.0000009, A begins", "at 10.0000011, A begins"),
        ("A may 10", "A begins", "B begins"),
        ("A may 10, at 9", "A may 20, at 19, A begins", "at 11, A begins"),
        ("A may 10", "A may 20, A shut, B may 30", "A shut, A begins"),
        # One reader at a time.
        ("A may 10", "at 9.9999991, B may 20", "at 9.9999989, B may 20"),
        ("A may 10", "A shut, B may 20", "B may 20"),
        ("A may 10", "at 9.9999991, taken b", "at 9.9999989, taken b"),
        ("A may 10", "taken java", "taken b"),
        # Beside the victim of a Java worker, or of a deletion, to its fence.
        ("A may 10, taken java", "at 9, B may 20, A begins, B begins", "at 11, A begins"),
        ("A may 10, taken java", "taken b, B may 20", "A shut, A may 10, B may 20"),
        ("A may 10, deleted", "taken b, B may 20, A may 15, A begins", "at 11, A begins"),
        ("A may 10, deleted", "B may 20", "settled a, B may 20"),
        ("A may 10, deleted", "settled b, B may 20", "settled a, taken b"),
        ("A may 10, deleted, B may 20, deleted, settled b", "B begins", "settled a, B begins"),
        ("A may 10, deleted, B may 20, settled a", "at 11, B begins", "A begins"),
        ("A may 10, deleted, B may 20, settled a, at 11", "B may 30", "C may 30"),
        ("A may 5, deleted, B may 20, deleted, at 5", "settled a, C may 30", "settled b, C may 30"),
        # A row that was taken by force is waited for.
        ("", "waits row", "waits row java"),
        ("", "waits nothing", "waits row java"),
    ])  # fmt: skip
def test_permissions_at_their_limits(story, allowed, refused):
    good, bad = Permitted(), Permitted()
    good.play(story)
    bad.play(story)

    good.play(allowed)
    *before, last = refused.split(", ")
    bad.play(", ".join(before))
    with pytest.raises(RuleBroken, match="I4"):
        bad.play(last)


# I12: how often, at once and over time.

ME = "kclrun:a:h:1"
ROW = Lease(key="s0", checkpoint=TRIM_HORIZON)
TAKE = Take("s0", ME, None, 0, 10.0, "TRIM_HORIZON")
RENEW = Renew("s0", ME, 1)
CHECKPOINT = Checkpoint("s0", ME, 1, TRIM_HORIZON, TRIM_HORIZON)
CHILDREN = CreateChildren((ROW,), (EndedParent("s9"),))
RENEWED, CHECKPOINTED, SCANNED, LISTED, QUERIED = ACTS = (
    lambda cost, now: cost.written(RENEW, "s0", now),
    lambda cost, now: cost.written(CHECKPOINT, "s0", now),
    lambda cost, now: cost.scanned("a:h:1", now),
    lambda cost, now: cost.listed("a:h:1", now),
    lambda cost, now: cost.queried("a:h:1", now),
)


def watched(**policy):
    cost = CostWatch(WatchPolicy(**policy))
    cost.written(TAKE, "s0", 0.0)
    return cost


def at_once(cost, act, now):
    """How often it may happen now, in a copy: -1 means without a limit."""
    cost = copy.deepcopy(cost)
    for count in range(1000):
        try:
            act(cost, now)
        except RuleBroken:
            return count
    return -1


def spent(cost, act):
    for _ in range(at_once(cost, act, 0.0)):
        act(cost, 0.0)
    return cost


@over_rows(
    ("act", "words", "policy", "most", "per_s"),
    [
        (RENEWED, "renewed", {}, 4, 1.005 / (10 / 3 - 0.025)),
        (RENEWED, "renewed", {"failover_s": 0.12}, 4, 1.005 / 0.02),
        (CHECKPOINTED, "checkpointed", {}, 2, 1.005 / 10),
        (CHECKPOINTED, "checkpointed", {"checkpoint_every_s": 60.0}, 2, 1.005 / 60),
        (SCANNED, "a:h:1 scans the table", {}, 16, 1.005 / 5),
        (LISTED, "a:h:1 lists the shards", {"failover_s": 20.0}, 16, 1.005 / 10),
        (QUERIED, "a:h:1 looks for offers", {}, 10, 1.005 * 2),
    ],
)
def test_each_pace_is_met_to_a_thousandth_and_saved_up(act, words, policy, most, per_s):
    cost = watched(**policy)
    act(cost, 0.0)  # the first one of a manager makes its budget

    assert at_once(cost, act, 0.0) == most - 1
    cost = spent(cost, act)
    assert [at_once(cost, act, n * 0.999 / per_s) for n in (1, 2, most)] == [0, 1, most - 1]
    assert [at_once(cost, act, n * 1.001 / per_s) for n in (1, 2, most)] == [1, 2, most]
    assert at_once(cost, act, 1e6) == most
    act(cost, 1.001 / per_s)
    assert at_once(cost, act, 1.998 / per_s) == 0
    assert at_once(cost, act, 2.001 / per_s) == 1
    with pytest.raises(RuleBroken, match=f"I12: {words} more often"):
        act(cost, 1.001 / per_s)


@over_rows(
    ("policy", "happens", "more"),
    [
        ({}, lambda cost: cost.written(TAKE, "s0", 0.0), (4, 2, 2, 2, 0)),
        ({}, lambda cost: cost.written(Claim("s0", ME, 1), "s0", 0.0), (4, 2, 0, 0, 0)),
        ({}, lambda cost: cost.written(CreateLease(ROW), "s0", 0.0), (0, 0, 2, 2, 0)),
        ({}, lambda cost: cost.written(CHILDREN, "s0", 0.0), (0, 0, 2, 2, 0)),
        ({}, lambda cost: cost.written(End("s0", ME, 1, TRIM_HORIZON), "s0", 0.0), (0, 0, 2, 2, 0)),
        ({}, lambda cost: cost.answered(TAKE), (0, 0, 2, 2, 0)),
        ({}, lambda cost: cost.answered(RENEW), (0, 0, 0, 0, 0)),
        ({}, lambda cost: cost.proven_gone(), (0, 0, 2, 2, 0)),
        ({}, lambda cost: cost.asked_to_checkpoint("s0"), (0, 1, 0, 0, 0)),
        ({}, lambda cost: cost.asked_to_checkpoint("s1"), (0, 0, 0, 0, 0)),
        ({}, lambda cost: cost.delivered("s1", 100_000), (0, 0, 0, 0, 0)),
        # Records against a cap of a hundred, of which half call for an early checkpoint.
        ({"uncheckpointed_max": 100}, lambda cost: cost.delivered("s0", 10), (0, 0, 0, 0, 0)),
        ({"uncheckpointed_max": 100}, lambda cost: cost.delivered("s0", 17), (0, 1, 0, 0, 0)),
        ({"uncheckpointed_max": 100}, lambda cost: cost.delivered("s0", 24), (0, 1, 0, 0, 0)),
        ({"uncheckpointed_max": 100}, lambda cost: cost.delivered("s0", 25), (0, 2, 0, 0, 0)),
        ({"uncheckpointed_max": 100}, lambda cost: cost.delivered("s0", 60), (0, 2, 0, 0, 0)),
        ({"uncheckpointed_max": 2}, lambda cost: cost.delivered("s0", 1), (0, 2, 0, 0, 0)),
    ],
)
def test_what_happens_gives_reason_for_so_many_more_and_no_more(policy, happens, more):
    cost = watched(**policy)
    for act in ACTS:
        act(cost, 0.0)
        spent(cost, act)

    happens(cost)

    assert tuple(at_once(cost, act, 0.0) for act in ACTS) == more


def test_with_manual_checkpoints_none_comes_without_being_asked_for():
    cost = watched(is_manual=True)

    assert at_once(spent(cost, CHECKPOINTED), CHECKPOINTED, 1e6) == 0


def test_each_manager_and_each_lease_has_a_budget_of_its_own_from_its_first_request_on():
    cost = watched()
    for now in range(100):
        cost.written(RENEW, "s1", 0.0)  # a lease that no take is known of
        cost.written(CHECKPOINT, "s1", 0.0)
        cost.written(CreateLease(ROW), "s0", float(now))

    spent(cost, SCANNED)

    assert at_once(cost, SCANNED, 0.0) == 0
    assert at_once(cost, lambda cost, now: cost.scanned("b:h:2", now), 0.0) == 16


def test_a_checkpoint_passes_a_record_that_failed_once_a_call_returned_with_it():
    world = Watched(1, poison_every=10)
    reader = world.begin(world.keys[0], "a:h:1")
    world.read(reader, 1, 12)
    world.checkpoint(reader, 12)
