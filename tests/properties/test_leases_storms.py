"""Whole managers in a small, faulty world: safety under a storm, progress after it.

The world is a table in memory with the conditions of `protocol/writes.py`, a stream that was
resharded, lease processes as a few lines each, a Java worker, an operator who halts, resumes and
releases. The managers ask each other for leases and give them away. Every fault of the
table is drawn: throttled, refused, unreachable, outcome unknown (applied or not), and delayed
writes that land later. A failing case names its seed in the test id; run that id to replay it.
"""

from __future__ import annotations

import random

import msgspec
import pytest

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import ANYBODY, OFFERED, Halt, Handoff, Lease
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM, qualified_shards
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import (
    Applied,
    ConditionFailed,
    OutcomeUnknown,
    Refused,
    Throttled,
    Unavailable,
)
from tests.examples import seeds

replace = msgspec.structs.replace
QUARTER = (HASH_KEY_MAX + 1) // 4
JAVA = "java-worker-1"
ORDERS, AUDITS = "1:orders:10", "1:audits:10"
GIVEN = {"handoff": None, "offered_to": None, "offered_by": None}


def shard(number, first, last, parents=(), *, closed=False):
    return Shard(
        f"s{number}",
        HashRange(first * QUARTER, (last + 1) * QUARTER - 1),
        str(100 + number),
        str(900 + number) if closed else None,
        *[f"s{parent}" for parent in parents],
    )


# Three generations: a split, a merge of a grandchild with an old shard, and two that never moved.
SHARDS = (
    shard(0, 0, 1, closed=True),
    shard(1, 2, 2, closed=True),
    shard(2, 3, 3),
    shard(3, 0, 0, (0,)),
    shard(4, 1, 1, (0,), closed=True),
    shard(5, 1, 2, (4, 1)),
)

AT_TRIM = SHARDS[:3]


class Table:
    """The rows, under the conditions each change names. Counters and positions only grow."""

    def __init__(self):
        self.rows = {}

    def put(self, row):
        before = self.rows.get(row.key)
        if before is not None:
            assert row.counter >= before.counter, f"counter of {row.key} went back"
            assert row.checkpoint >= before.checkpoint, f"position of {row.key} went back"
        self.rows[row.key] = row
        return Applied(row)

    def apply(self, change):
        if isinstance(change, ch.CreateLease):
            if change.lease.key in self.rows:
                return ConditionFailed(self.rows[change.lease.key])
            self.rows[change.lease.key] = change.lease
            return Applied()
        if isinstance(change, ch.CreateChildren):
            return self._create_children(change)
        row = self.rows.get(change.key)
        if isinstance(change, ch.DeleteEnded):
            if row is None or not row.is_ended:
                return ConditionFailed(row)
            del self.rows[change.key]
            return Applied()
        if isinstance(change, ch.Ask):
            return self._ask(row, change)
        if isinstance(change, ch.Take):
            owner = change.seen_owner
        else:
            owner = change.owner
        if row is None or row.owner != owner or row.counter != change.seen_counter:
            return ConditionFailed(row)
        return self._write(row, change)

    def _ask(self, row, change):
        if row is None or row.owner != change.asked or row.handoff != change.seen:
            return ConditionFailed(row)
        return self.put(replace(row, handoff=Handoff(change.owner, change.asked_at)))

    def _write(self, row, change):
        row = replace(row, counter=row.counter + 1)
        match change:
            case ch.Take():
                if change.forced:
                    row = replace(row, taken_from=change.seen_owner)
                row = replace(row, owner=change.owner, failover_s=change.failover_s, **GIVEN)
            case ch.HaltLease():
                row = replace(row, halt=change.halt)
            case ch.Checkpoint() | ch.End() if row.checkpoint != change.last:
                return ConditionFailed(self.rows[change.key])
            case ch.Checkpoint():
                row = replace(row, checkpoint=change.position)
            case ch.End():
                row = replace(row, checkpoint=SHARD_END, **GIVEN)
            case ch.Release():
                if row.checkpoint != change.last:
                    return ConditionFailed(self.rows[change.key])
                row = replace(row, owner=None, checkpoint=change.position, **GIVEN)
            case ch.Offer():
                if row.checkpoint != change.last:
                    return ConditionFailed(self.rows[change.key])
                given = {**GIVEN, "offered_to": change.offered_to, "offered_by": change.owner}
                row = replace(row, owner=OFFERED, checkpoint=change.position, **given)
            case ch.Renew():
                row = replace(row, handoff=None if change.drops_ask else row.handoff)
            case ch.Claim():
                row = replace(row, taken_from=None if change.has_waited else row.taken_from)
            case _:
                raise AssertionError(f"nobody should write {change}")
        return self.put(row)

    def _create_children(self, change):
        for parent in change.parents:
            row = self.rows.get(parent.key)
            ended = not isinstance(parent, ch.EndedParent) or (row is not None and row.is_ended)
            if row is None or not ended:
                return ConditionFailed()
        for child in change.children:
            self.rows.setdefault(child.key, child)
        return Applied()


class Process(msgspec.Struct):
    key: str
    counter: int
    expires: float
    has_waited: bool
    claimed: bool = False
    draining: bool = False
    leaving: bool = False


class Host:
    """One manager with its shell: runs commands in any order, checks each as it is issued."""

    def __init__(self, name, world, leases_max=64):
        self.name = f"kclrun:g:{name}:n"
        self.world = world
        policy = ManagerPolicy(me=self.name, leases_max=leases_max, streams=world.streams)
        self.core = LeaseManager(policy, world.random.random)
        self.todo = []
        self.processes = {}
        self.proven = set()
        self.finished = False
        self.others_in_sight = False
        self.ours_since = {}
        self.feed(e.Started())

    def feed(self, event):
        for command in self.core.handle(event, self.world.now):
            self.check(command)
            if not isinstance(command, c.Note):
                self.todo.append(command)
        self.core.check()

    def check(self, command):
        rows = self.world.table.rows
        match command:
            case c.WriteRow(change):
                for key in keys(change):
                    assert key not in self.processes, f"a write of {key} beside its process"
                    others = [w for w in self.todo if isinstance(w, c.WriteRow)]
                    assert all(key not in keys(w.change) for w in others), f"two writes of {key}"
            case c.TellOthersInSight(others):
                self.others_in_sight = others
            case c.StartProcess(key, counter, expires, has_waited):
                assert key not in self.processes
                assert key in self.proven, f"{key} starts without a new write of ours"
                row = rows.get(key)
                is_ours = row is not None and row.owner == self.name
                assert not is_ours or not row.is_ended, f"{key} starts, and is ended"
                assert not is_ours or row.counter == counter, (
                    f"{key} starts with another counter than its row"
                )
                waited = self.world.now - self.ours_since.get(key, self.world.now)
                if is_ours and row.taken_from is not None:
                    assert has_waited, f"{key} starts without the wait"
                    assert waited >= 10, f"{key} starts too early"
                assert expires <= self.world.now + 10
                for parent in rows[key].parents if key in rows else ():
                    assert parent not in rows or rows[parent].is_ended, f"{key} before {parent}"
            case c.Finish():
                self.finished = True
                assert not self.processes
                assert not any(isinstance(w, c.WriteRow) for w in self.todo), "writes under way"
                mine = [r.key for r in rows.values() if r.owner == self.name and not r.is_ended]
                assert not mine, f"finished with {mine} still ours"

    def run(self, command, fault):
        self.todo.remove(command)
        table = self.world.table
        match command:
            case c.ScanTable():
                self.feed(e.LeasesScanned(tuple(table.rows.values()), foreign=1))
            case c.ListShards(with_start, stream):
                at_start = qualified_shards(stream, AT_TRIM) if with_start else None
                listed = qualified_shards(stream, SHARDS)
                self.feed(e.ShardsListed(listed, 5000.0, at_start, stream))
            case c.ReadRow(key):
                self.feed(e.RowRead(key, table.rows.get(key)))
            case c.ReadParents(key, parents):
                self.feed(e.ParentsRead(key, tuple(table.rows.get(p) for p in parents)))
            case c.WriteRow(change):
                self.feed(e.WriteResolved(change, self.write(change, fault)))
            case c.FindOffers(rows_max):
                offers = [row for row in table.rows.values() if row.owner == OFFERED]
                failed = fault in ("unavailable", "refused")
                self.feed(e.OffersFound(None if failed else tuple(offers[:rows_max])))
            case c.StartProcess(key, counter, expires, has_waited):
                if fault == "refused":
                    self.feed(e.StartFailed(key, "no memory"))
                else:
                    self.processes[key] = Process(key, counter, expires, has_waited)
                    self.feed(e.ProcessStarted(key, 1))
            case c.DrainProcess(key):
                if key in self.processes:
                    self.processes[key].draining = True

    def write(self, change, fault):
        match fault:
            case "throttled":
                return Throttled("slow down")
            case "unavailable":
                return Unavailable("no route")
            case "refused":
                return Refused("AccessDenied", "no")
            case "unknown, not applied":
                return OutcomeUnknown("reset")
            case "unknown, applied":
                self.apply(change)
                return OutcomeUnknown("reset")
            case "unknown, delayed":
                self.world.in_flight.append(lambda: self.apply(change))
                return OutcomeUnknown("timed out")
        return self.apply(change)

    def apply(self, change):
        """A write of the manager itself reaches the table."""
        outcome = self.world.table.apply(change)
        if isinstance(outcome, Applied):
            self.proven.update(keys(change))
            if isinstance(change, ch.Take):
                self.ours_since[change.key] = self.world.now
        return outcome

    def kill(self, process, *, leave_write=False):
        if leave_write:
            zombie = self.last_write(process)
            self.world.in_flight.append(lambda: self.world.table.apply(zombie))
        del self.processes[process.key]
        self.proven.discard(process.key)
        self.feed(e.ProcessExited(process.key, 1, "exited"))

    def last_write(self, process):
        """What a process may have sent the moment before it died."""
        row = self.world.table.rows.get(process.key)
        named = (process.key, self.name, process.counter)
        if row is None or row.is_ended:
            return ch.Renew(*named)
        position = ExtendedSequenceNumber(str(self.world.tick()))
        writes = [ch.Renew(*named), ch.Checkpoint(*named, position, row.checkpoint)]
        if self.is_closed(process.key):
            writes.append(ch.End(*named, row.checkpoint))
        return self.world.random.choice(writes)

    def say(self, process, event):
        process.leaving = True
        self.feed(event)

    def act(self, process, *, badly):
        """One move of a lease process, as core 2 would make it."""
        key, chance = process.key, self.world.random.random()
        if process.leaving or (badly and chance < 0.08):
            return self.kill(process, leave_write=chance < 0.04)
        if not process.claimed:
            return self.claim(process)
        row = self.world.table.rows.get(key)
        if row is None or row.owner != self.name or row.counter != process.counter:
            return self.say(process, e.LeaseLost(key, "not ours"))
        if badly and chance < 0.12:
            return self.say(process, e.ProcessorFailed(key, "it raised"))
        if process.draining or (row.handoff is not None and chance < 0.5):
            self.give(process, row)
            return self.say(process, e.LeaseReleased(key, row.checkpoint))
        if chance < 0.5 and self.is_closed(key):
            return self.end(process, row)
        if chance < 0.7:
            position = ExtendedSequenceNumber(str(self.world.tick()))
            self.own(process, ch.Checkpoint, position, row.checkpoint)
            return self.feed(e.PositionMoved(key, position))
        return self.own(process, ch.Renew)

    def give(self, process, row):
        """To the asker, to whoever comes, or to nobody [P17]."""
        at = (row.checkpoint, row.checkpoint)
        if row.handoff is not None:
            to = row.handoff.to
            self.own(process, ch.Offer, *at, None if to == ANYBODY else to)
        elif self.others_in_sight:
            self.own(process, ch.Offer, *at)
        else:
            self.own(process, ch.Release, *at)

    def claim(self, process):
        key = process.key
        if process.draining or self.world.now > process.expires:
            return self.say(process, e.StartUnclaimed(key, "too late"))
        if not isinstance(self.own(process, ch.Claim, process.has_waited), Applied):
            return self.say(process, e.StartUnclaimed(key, "another owner"))
        process.claimed = True
        row = self.world.table.rows[key]
        return self.feed(e.LeaseClaimed(key, row.counter, row.checkpoint))

    def own(self, process, kind, *fields):
        change = kind(process.key, self.name, process.counter, *fields)
        outcome = self.world.table.apply(change)
        if isinstance(outcome, Applied):
            process.counter = outcome.row.counter
        return outcome

    def is_closed(self, key):
        return any(s.shard_id == key and not s.is_open for s in self.world.shards)

    def end(self, process, row):
        """P12: children first, but only if each parent has a row."""
        children = [s for s in self.world.shards if process.key in s.parents]
        rows = self.world.table.rows
        if any(parent not in rows for child in children for parent in child.parents):
            return self.own(process, ch.Renew)
        for child in children:
            lease = Lease(key=child.shard_id, checkpoint=TRIM_HORIZON, hash_range=child.hash_range)
            rows.setdefault(child.shard_id, replace(lease, parents=frozenset(child.parents)))
        self.own(process, ch.End, row.checkpoint)
        ids = tuple(child.shard_id for child in children)
        return self.say(process, e.ShardEnded(process.key, ids))


def keys(change):
    if isinstance(change, ch.CreateLease):
        return (change.lease.key,)
    if isinstance(change, ch.CreateChildren):
        return tuple(child.key for child in change.children)
    return (change.key,)


FAULTS = (
    "throttled",
    "unavailable",
    "refused",
    "unknown, not applied",
    "unknown, applied",
    "unknown, delayed",
)


class World:
    def __init__(self, seed, hosts=2, streams=(ONLY_STREAM,)):
        self.streams = streams
        self.shards = [shard for stream in streams for shard in qualified_shards(stream, SHARDS)]
        self.random = random.Random(seed)
        self.now = 1000.0
        self.table = Table()
        self.in_flight = []
        self.clock = 1000
        self.paces = (0.05, 0.5, 3.0)  # often too fast for a process to renew in time
        self.hosts = [Host(f"h{n}", self) for n in range(hosts)]

    def tick(self):
        self.clock += 1
        return self.clock

    def step(self, *, storm):
        chance = self.random.random()
        if storm and chance < 0.05 and self.in_flight:
            self.in_flight.pop(self.random.randrange(len(self.in_flight)))()
        elif storm and chance < 0.08:
            self.java()
        elif storm and chance < 0.10:
            self.operator()
        elif chance < 0.25:
            self.pass_time(self.random.choice(self.paces))
        else:
            self.advance(self.random.choice(self.hosts), storm=storm)

    def pass_time(self, seconds):
        self.now += seconds
        for host in self.hosts:
            if not host.finished and host.core.next_deadline(self.now) <= self.now:
                host.feed(e.Ticked())

    def advance(self, host, *, storm):
        ready = [t for t in host.todo if (getattr(t, "not_before", None) or 0) <= self.now]
        doing = ready + list(host.processes.values())
        if not doing:
            return
        chosen = self.random.choice(doing)
        if isinstance(chosen, Process):
            host.act(chosen, badly=storm)
        else:
            faulty = storm and self.random.random() < 0.3
            host.run(chosen, self.random.choice(FAULTS) if faulty else None)

    def java(self):
        """A Java worker steals a row, renews its own, gives up, or ends without children."""
        if not self.table.rows:
            return
        row = self.random.choice(list(self.table.rows.values()))
        if row.owner == JAVA and any(s.shard_id == row.key and not s.is_open for s in self.shards):
            row = replace(row, checkpoint=self.random.choice((row.checkpoint, SHARD_END)))
        owner = self.random.choice((JAVA, JAVA, None)) if row.owner == JAVA else JAVA
        self.table.put(replace(row, owner=owner, counter=row.counter + 1))

    def operator(self):
        if self.table.rows:
            row = self.random.choice(list(self.table.rows.values()))
            asks = row.owner is not None and self.random.random() < 0.3
            handoff = Handoff(ANYBODY, 1.0) if asks else row.handoff
            self.table.put(replace(row, halt=None, handoff=handoff))

    def is_healthy(self):
        """Every shard was read to its end, or is being read; nothing is owned by two."""
        rows = self.table.rows
        running = [p.key for host in self.hosts for p in host.processes.values() if p.claimed]
        tips = {s.shard_id for s in self.shards if s.is_open}
        return set(running) == tips and {r.key for r in rows.values() if not r.is_ended} == tips

    def is_balanced(self):
        """Healthy; every host reads its share; nothing is asked for or offered."""
        held = [len(host.processes) for host in self.hosts if not host.finished]
        asked = any(row.handoff or row.owner == OFFERED for row in self.table.rows.values())
        return self.is_healthy() and max(held) - min(held) <= 1 and not asked

    def calm(self, steps, done):
        """No faults any more; in-flight writes are lost; halts are lifted."""
        self.in_flight.clear()
        for step in range(steps):
            if done():
                return
            if step % 50 == 0:
                self.now += 1
                for row in list(self.table.rows.values()):
                    self.table.put(replace(row, halt=None))
            self.step(storm=False)
        raise AssertionError(f"not healthy after {steps} calm steps: {self.table.rows}")


@pytest.mark.parametrize("seed", seeds(0, 120))
def test_no_storm_breaks_a_rule_and_every_shard_is_read_after_it(seed):
    world = World(seed)

    for _ in range(600):
        world.step(storm=True)

    world.calm(30_000, world.is_balanced)


@pytest.mark.parametrize("seed", seeds(500, 540))
def test_no_storm_over_two_streams_breaks_a_rule_and_every_shard_of_both_is_read(seed):
    world = World(seed, streams=(ORDERS, AUDITS))

    for _ in range(900):
        world.step(storm=True)

    world.calm(60_000, world.is_balanced)


@pytest.mark.parametrize("seed", seeds(1000, 1040))
def test_a_drain_in_the_middle_of_a_storm_ends_with_no_row_ours(seed):
    world = World(seed)
    for _ in range(300):
        world.step(storm=True)

    for host in world.hosts:
        host.feed(e.DrainRequested("SIGTERM"))
    for _ in range(20_000):
        world.step(storm=not all(host.finished for host in world.hosts))

    for delayed in world.in_flight:
        delayed()
    owners = {row.owner for row in world.table.rows.values() if not row.is_ended}
    assert all(host.finished for host in world.hosts)
    assert owners.isdisjoint(host.name for host in world.hosts)


@pytest.mark.parametrize("seed", seeds(2000, 2015))
def test_a_manager_that_dies_without_a_word_is_replaced_after_its_leases_expired(seed):
    world = World(seed)
    world.calm(20_000, world.is_healthy)

    world.hosts.pop(0)

    world.calm(30_000, world.is_balanced)


def test_a_halted_lease_stays_halted_until_an_operator_resumes_it():
    world = World(1, hosts=1)
    world.calm(20_000, world.is_healthy)
    host = world.hosts[0]
    row = world.table.rows["s2"]
    world.table.put(replace(row, owner=None, counter=row.counter + 1, halt=Halt("poison", 1.0)))

    for _ in range(2000):
        world.step(storm=False)

    assert host.core.held_lease("s2").state.value == "halted"
    assert "s2" not in host.processes
    world.calm(5_000, world.is_healthy)


@pytest.mark.parametrize("seed", seeds(3000, 3010))
def test_a_balanced_fleet_is_a_fixed_point_of_all_planners(seed):
    world = World(seed, hosts=3)
    world.calm(30_000, world.is_balanced)
    world.paces = (0.05,)
    for _ in range(2_000):
        world.step(storm=False)  # what was set going before
    owners = {row.key: row.owner for row in world.table.rows.values() if not row.is_ended}
    changes = []
    write = world.table.apply
    world.table.apply = lambda change: (changes.append(change), write(change))[1]

    for _ in range(5_000):
        world.step(storm=False)

    moved = [x for x in changes if not isinstance(x, ch.Renew | ch.Checkpoint | ch.DeleteEnded)]
    assert not any(host.core.is_draining for host in world.hosts)
    assert moved == []
    assert owners == {row.key: row.owner for row in world.table.rows.values() if not row.is_ended}
