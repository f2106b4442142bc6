"""A healthy table has no error, at any stage of any reshard: the doctor alarms nobody in vain.

A stream splits, merges and expires at random; leases are made, read, ended and cleaned up by the
managers' own functions, a write at a time. Any two states, the later after the earlier, are looked
at. A failing case names its seed in the test id; run that id to replay it.
"""

import random

import pytest

from kclrun.leases.cleanup import TrimWatch, ended_rows
from kclrun.leases.shard_sync import (
    Listing,
    child_lease,
    children_to_create,
    sync_empty_table,
    sync_table,
)
from kclrun.leases.table_view import Observation, TableView, have_ended
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.sequence import AT_TIMESTAMP, LATEST, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM
from kclrun.operating.doctor.diagnosis import diagnose
from kclrun.operating.doctor.findings import Circumstances, Gravity, Kind, Look, StreamFacts
from kclrun.protocol.writes import (
    Applied,
    Checkpoint,
    CreateChildren,
    CreateLease,
    End,
    ExistingParent,
    HeldParent,
    NameChildren,
    Renew,
    Take,
)
from tests.examples import seeds

ME, DOCTOR = "kclrun:a:x:n", "kclrun:a:doctor:n"
STEPS = 300
STARTS = (TRIM_HORIZON, LATEST, AT_TIMESTAMP)


class Fleet:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.start = self.random.choice(STARTS)
        self.clock = 1000
        self.made = 0
        self.shards = {}
        self.table = LeaseRows()
        self.trims = TrimWatch(10.0)
        half = (HASH_KEY_MAX + 1) // 2
        self.open(HashRange(0, half - 1))
        self.open(HashRange(half, HASH_KEY_MAX))
        for _ in range(self.random.randrange(4)):  # it was resharded before we came
            self.reshard()
        self.first_sync()

    def tick(self):
        self.clock += 1
        return str(self.clock)

    def open(self, hash_range, *parents):
        shard = Shard(f"s{self.made:03}", hash_range, self.tick(), None, *parents)
        self.made += 1
        self.shards[shard.shard_id] = shard

    def close(self, shard):
        self.shards[shard.shard_id] = Shard(
            shard.shard_id,
            shard.hash_range,
            shard.starting_sequence_number,
            self.tick(),
            *shard.parents,
        )

    def reshard(self):
        tips = sorted(
            (shard for shard in self.shards.values() if shard.is_open),
            key=lambda shard: shard.hash_range.start,
        )
        place = self.random.randrange(len(tips))
        first = tips[place]
        self.close(first)
        if len(tips) > 3 and place + 1 < len(tips):
            second = tips[place + 1]
            self.close(second)
            joined = HashRange(first.hash_range.start, second.hash_range.end)
            self.open(joined, first.shard_id, second.shard_id)
            return
        low, high = first.hash_range.start, first.hash_range.end
        self.open(HashRange(low, (low + high) // 2), first.shard_id)
        self.open(HashRange((low + high) // 2 + 1, high), first.shard_id)

    def first_sync(self):
        if self.start == TRIM_HORIZON:
            at_start = [shard for shard in self.shards.values() if not shard.parents]
        else:
            at_start = [shard for shard in self.shards.values() if shard.is_open]
        for lease in sync_empty_table(at_start, self.start, 5.0).leases:
            self.write(CreateLease(lease))

    def write(self, change):
        return isinstance(self.table.write(change), Applied)

    def rows(self):
        return tuple(lease for page in self.table.scan() for lease in page.leases)

    def view(self):
        observation = Observation(10.0)
        observation.update(self.rows(), 0.0)
        return TableView(self.rows(), (), observation, me=ME, gone=frozenset(), now=0.0)

    def listing(self):
        return Listing(self.shards.values(), 5.0, float(self.clock))

    def look(self):
        return Look(self.rows(), {ONLY_STREAM: self.listing()})

    def step(self):
        self.tick()
        chance = self.random.random()
        if chance < 0.04:
            self.reshard()
        elif chance < 0.08:
            self.expire()
        elif chance < 0.28:
            self.audit()
        else:
            self.process(self.random.choice([row for row in self.rows() if not row.is_ended]))

    def expire(self):
        """The oldest shard goes, if it was read to its end, or lies before where we began."""
        for shard in list(self.shards.values())[:1]:
            row = self.table.read(shard.shard_id)
            if not shard.is_open and (row is None or row.is_ended):
                del self.shards[shard.shard_id]

    def audit(self):
        """One of the writes that a manager's scan and listing call for."""
        view, listing = self.view(), self.listing()
        self.trims.update(view, listing)
        trimmed = self.trims.trimmed_rows(view, listing, two_periods_s=3, held=())
        planned = [
            *map(CreateLease, sync_table(listing, view.has_row, self.start).leases),
            *children_to_create(view, listing),
            *ended_rows(view, listing),
            *trimmed,
        ]
        if planned:
            self.write(self.random.choice(planned))

    def process(self, row):
        """What the owner of a row does next: take it, read on, or one write of its end [P12]."""
        key, counter = row.key, row.counter
        shard = self.shards.get(key)
        if row.is_ended or shard is None:
            return None
        if not have_ended([self.table.read(parent) for parent in row.parents]):
            return None
        if row.owner is None:
            return self.write(Take(key, ME, None, counter, 10.0, self.start.sequence_number))
        if self.random.random() < 0.3:
            return self.write(Renew(key, ME, counter))
        if shard.is_open or row.checkpoint.is_sentinel:
            upper = int(shard.ending_sequence_number or self.clock)
            here = self.random.randint(int(shard.starting_sequence_number), upper)
            position = max(row.checkpoint, ExtendedSequenceNumber(str(here)))
            return self.write(Checkpoint(key, ME, counter, position, row.checkpoint))
        return self.end(row)

    def end(self, row):
        children = [shard for shard in self.shards.values() if row.key in shard.parents]
        named = frozenset(child.shard_id for child in children)
        if any(self.table.read(child) is None for child in named):
            others = {parent for child in children for parent in child.parents} - {row.key}
            conditions = [HeldParent(row.key, ME, row.counter)]
            conditions += [ExistingParent(parent) for parent in sorted(others & set(self.shards))]
            made = [child_lease(c.shard_id, c.parents, c.hash_range) for c in children]
            return self.write(CreateChildren(tuple(made), tuple(conditions)))
        if row.children != named:
            return self.write(NameChildren(row.key, ME, row.counter, named))
        return self.write(End(row.key, ME, row.counter, last=row.checkpoint))


def circumstances_of(fleet):
    facts = StreamFacts(fleet.start, fleet.start.sequence_number, 86_400.0)
    return Circumstances(
        me=DOCTOR, failover_s=10.0, watched_s=10.0, now=100.0, streams={ONLY_STREAM: facts}
    )


def line_of(key, listing):
    """A shard and its listed ancestors."""
    parents = listing.graph.parents_of(key)
    return {key}.union(*(line_of(parent, listing) for parent in parents))


@pytest.mark.parametrize("seed", seeds(0, 40))
def test_a_healthy_table_shows_no_error_at_any_stage_of_a_reshard(seed):
    fleet = Fleet(seed)
    looks = [fleet.look()]
    ended = 0
    for _ in range(STEPS):
        fleet.step()
        looks.append(fleet.look())
        ended = max(ended, sum(row.is_ended for row in looks[-1].leases))
        earlier = fleet.random.choice(looks[-12:])
        findings = diagnose(earlier, looks[-1], circumstances_of(fleet))

        assert [f for f in findings if f.gravity == Gravity.ERROR] == [], f"seed {seed}"
    assert ended > 0


def test_the_same_tables_do_show_an_error_once_a_row_is_taken_out():
    """The property above can fail: each row of an open shard that vanishes is missed.

    Its own lease is missed, or that of an ancestor with which its branch begins. But not one whose
    parent has not ended: that one's end creates it again.
    """
    missed = 0
    for seed in range(12):
        fleet = Fleet(seed)
        for _ in range(STEPS):
            fleet.step()
        listing = fleet.listing()
        for gone in fleet.rows():
            parents = [fleet.table.read(key) for key in gone.parents]
            if gone.key not in listing or not listing.graph[gone.key].is_open:
                continue
            if not have_ended(parents):
                continue
            rows = tuple(row for row in fleet.rows() if row.key != gone.key)
            look = Look(rows, {ONLY_STREAM: listing})
            found = diagnose(look, look, circumstances_of(fleet))
            missing = {Kind.HOLE, Kind.CHILD_MISSING}
            keys = {key for finding in found if finding.kind in missing for key in finding.keys}
            assert keys & line_of(gone.key, listing) or not rows, f"seed {seed}: {gone.key}"
            missed += 1
    assert missed >= 12
