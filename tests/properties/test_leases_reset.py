"""A reset over splits, merges and expired shards, cut anywhere, with a fleet that starts meanwhile.

Whatever the cut leaves, the fleet never reads a child before its parents have ended, and the reset
made again ends in the rows of a first sync: nothing halted, one generation, the doctor content.
"""

import json

import msgspec

from kclrun.errors import TableRefused
from kclrun.model.lease import Halt
from kclrun.model.sequence import LATEST, TRIM_HORIZON
from kclrun.operating.doctor.diagnosis import diagnose
from kclrun.operating.doctor.findings import Gravity
from kclrun.operating.positions import parse_kept, plan_positions
from kclrun.operating.reset import ResetStart, is_written, plan_reset, position_at
from kclrun.operating.summaries import lease_summary
from kclrun.protocol.writes import ConditionFailed
from tests.examples import seeds
from tests.properties.test_doctor_healthy import Fleet, circumstances_of
from tests.support.tables import over_rows

STEPS = 120
FOREVER = 10**9


class StoppedFleet(Fleet):
    """A fleet that honours halts, and its reset."""

    def process(self, row):
        return None if row.halt is not None else super().process(row)

    def at_start(self, at):
        """The shards that were there at a position, as ListShards filters them."""
        if at == TRIM_HORIZON:
            return [
                each for each in self.shards.values() if not set(each.parents) & set(self.shards)
            ]
        if at == LATEST:
            return [each for each in self.shards.values() if each.is_open]
        return [
            each
            for each in self.shards.values()
            if int(each.starting_sequence_number) <= at.sub_sequence_number
            and (each.is_open or int(each.ending_sequence_number) > at.sub_sequence_number)
        ]

    def plan(self, at, halted_at):
        start = ResetStart(at, float(self.clock), Halt(f"reset {halted_at}", halted_at, halted_at))
        return plan_reset(self.rows(), self.listing(), self.at_start(at), start)

    def reset(self, at, *, writes_max=FOREVER, between=lambda: None):
        """As the verb sends it; True if it was completed."""
        plan = self.plan(at, float(self.tick()))
        for number, write in enumerate((*plan.begin, *plan.halt, *plan.remove, *plan.finish)):
            if number == writes_max:
                return False
            outcome = self.table.write(write)
            if isinstance(outcome, ConditionFailed) and not is_written(write, outcome.row):
                return False
            between()
        return True

    def ancestors(self, key):
        """The listed ones, also those that have no row."""
        shard = self.shards.get(key)
        parents = set(shard.parents) if shard is not None else set()
        return parents.union(*(self.ancestors(parent) for parent in parents))

    def begun_early(self):
        """Shards that have begun although an ancestor has a row and has not ended."""
        waiting = {row.key for row in self.rows() if not row.is_ended}
        return {key for key in self.begun() if waiting & self.ancestors(key)}

    def begun(self):
        return {row.key for row in self.rows() if row.is_ended or not row.checkpoint.is_sentinel}


def fleet_of(seed):
    fleet = StoppedFleet(seed)
    for _ in range(STEPS):
        fleet.step()
    at = fleet.random.choice(
        [TRIM_HORIZON, LATEST, position_at(fleet.random.randint(1010, fleet.clock) / 1000)]
    )
    return fleet, at


def settled(fleet, at):
    """The reset, or None where the listing cannot show the start: then nothing is planned."""
    try:
        fleet.plan(at, 0.0)
    except TableRefused:
        return None
    return at


@over_rows("seed", seeds(0, 60))
def test_a_reset_leaves_the_rows_of_a_first_sync_one_generation_up(seed):
    fleet, at = fleet_of(seed)
    if settled(fleet, at) is None:
        return
    there = {shard.shard_id for shard in fleet.at_start(at)}

    for generation in (1, 2):
        assert fleet.reset(at)

        rows = fleet.rows()
        assert {row.key for row in rows} == there
        assert {row.checkpoint for row in rows} == {at}
        assert {(row.generation, row.halt, row.owner) for row in rows} == {(generation, None, None)}
        assert {row.latest_pinned_at is not None for row in rows} == {at == LATEST}
        errors = diagnose(fleet.look(), fleet.look(), circumstances_of(fleet))
        assert [f for f in errors if f.gravity == Gravity.ERROR] == []


@over_rows("seed", seeds(0, 60))
def test_a_reset_that_was_cut_is_completed_by_the_next_one(seed):
    fleet, at = fleet_of(seed)
    if settled(fleet, at) is None:
        return
    plan = fleet.plan(at, 0.0)
    halted = len(plan.begin) + len(plan.halt) + len(plan.remove)
    cut = fleet.random.randrange(halted + len(plan.finish))
    unread = {row.key for row in fleet.rows() if not row.is_ended}
    begun = fleet.begun()

    assert not fleet.reset(at, writes_max=cut)
    if 0 < cut <= halted:
        assert any(row.halt is not None for row in fleet.rows()), "the cut is seen"
    for _ in range(40):  # a fleet is started over what the cut has left
        rows = [row for row in fleet.rows() if not row.is_ended]
        fleet.audit()
        fleet.process(fleet.random.choice(rows))
        unread -= {row.key for row in fleet.rows() if row.is_ended}
        early = {key for key in fleet.begun() - begun if fleet.ancestors(key) & unread}
        assert early == set(), "records of a parent were left out before it"

    if settled(fleet, at) is not None:
        assert fleet.reset(at)
        assert {(row.halt, row.checkpoint) for row in fleet.rows()} == {(None, at)}


@over_rows("seed", seeds(0, 60))
def test_a_fleet_that_starts_while_it_is_reset_reads_nothing_out_of_order(seed):
    fleet, at = fleet_of(seed)
    if settled(fleet, at) is None:
        return

    def live():
        for _ in range(4):
            fleet.audit()
            rows = [row for row in fleet.rows() if not row.is_ended]
            fleet.process(fleet.random.choice(rows))

    if fleet.reset(at, between=live):
        assert fleet.begun_early() == set()
    else:
        assert any(row.halt is not None for row in fleet.rows()), "it is seen"
        assert settled(fleet, at) is None or fleet.reset(at)


def kept_of(fleet):
    """The positions of the fleet now, through the text that `kclrun leases --json` prints."""
    lines = msgspec.to_builtins([lease_summary(row, float(fleet.clock)) for row in fleet.rows()])
    return parse_kept(json.dumps(lines).encode(), "kept.json")


def unended(fleet):
    return {row.key: row.checkpoint for row in fleet.rows() if not row.is_ended}


@over_rows("seed", seeds(0, 60))
def test_kept_positions_come_back_and_go_forward_again_over_every_reshard(seed):
    fleet = StoppedFleet(seed)
    for _ in range(fleet.random.randrange(STEPS)):
        fleet.step()
    early, at_early = kept_of(fleet), unended(fleet)
    for _ in range(fleet.random.randrange(STEPS)):
        fleet.step()
    late, at_late = kept_of(fleet), unended(fleet)

    for kept, there in ((early, at_early), (late, at_late), (early, at_early)):
        try:
            if fleet.random.randrange(2):
                unread = unended(fleet).keys()
                put(fleet, kept, fleet.random.randrange(8))
                lived(fleet, unread)
            put(fleet, kept)
        except TableRefused as refusal:
            if "not listed any more" in str(refusal) or "changing" in str(refusal):
                return
            raise
        assert unended(fleet) == there
        assert {row.halt for row in fleet.rows()} == {None}
        errors = diagnose(fleet.look(), fleet.look(), circumstances_of(fleet))
        assert [f for f in errors if f.gravity == Gravity.ERROR] == []
        if kept is early and fleet.random.randrange(2):
            lived(fleet, there.keys())


def put(fleet, kept, writes_max=FOREVER):
    """A reset to kept positions, cut after so many writes."""
    start = ResetStart(TRIM_HORIZON, float(fleet.clock), Halt(f"reset {fleet.tick()}", 1.0, 1.0))
    plan = plan_positions(fleet.rows(), fleet.listing(), kept, start)
    every = (*plan.begin, *plan.halt, *plan.end, *plan.remove, *plan.finish)
    for write in every[:writes_max]:
        assert not isinstance(fleet.table.write(write), ConditionFailed)


def lived(fleet, unread):
    """A fleet is started over what is there. It begins no shard before those of `unread` have ended
    that it comes of."""
    begun, unread = fleet.begun(), set(unread)
    for _ in range(40):
        fleet.audit()
        rows = [row for row in fleet.rows() if not row.is_ended]
        fleet.process(fleet.random.choice(rows))
        unread -= {row.key for row in fleet.rows() if row.is_ended}
        assert {key for key in fleet.begun() - begun if fleet.ancestors(key) & unread} == set()
