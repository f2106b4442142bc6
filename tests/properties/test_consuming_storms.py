"""One lease's life in a faulty world: safety under a storm, an end after it.

The world: a table in memory, a network that loses, delays and refuses, user code on a thread of
its own, an observer that takes the row as early as expiry allows and offered ones at once, a former
owner with late checkpoints, others that ask, somebody who deletes rows, a KCL 3 leader. A failing
case names its seed in the test id; run that id to replay it.
"""

from __future__ import annotations

import heapq
import itertools
import random

import msgspec
import pytest

from kclrun.consuming import commands as do
from kclrun.consuming import events as on
from kclrun.consuming.delivery import ConfirmEnd, ConfirmStop, Delivery, StartBatch
from kclrun.consuming.policy import LifePolicy
from kclrun.consuming.state_machine import LeaseStateMachine
from kclrun.consuming.states import State
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import ANYBODY, OFFERED, Handoff, Lease
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, HashRange, Shard
from kclrun.protocol import writes as changes
from kclrun.protocol.writes import Applied, OutcomeUnknown, Refused, Throttled, Unavailable
from tests.examples import seeds

ME, OTHER, KEY = "kclrun::host:a", "kclrun::host:b", "s0"
JAVA = "java-worker"
FAILOVER_S = 6.0
STORM_S = 40.0
CALM_S = 120.0
CHILDREN = (ChildShard("s2", ("s0", "s1"), HashRange(0, 9)),)
EVENTS_MAX = 20_000


def p(number):
    return ExtendedSequenceNumber(str(number))


class World:
    def __init__(self, seed, mode):
        self.chance = random.Random(seed)
        self.now = 1000.0
        self.storm_ends = self.now + STORM_S
        self.table = LeaseRows()
        self.table.write(
            changes.CreateLease(Lease(key=KEY, checkpoint=p(100), counter=5, owner=ME))
        )
        self.table.write(changes.CreateLease(Lease(key="s1", checkpoint=p(1))))
        self.cap = self.chance.choice((5, 20, 1000))
        asked = self.chance.random() < 0.05
        if asked:
            row = msgspec.structs.replace(self.row, handoff=Handoff(OTHER, 7.0))
            self.table._rows[KEY] = row
        policy = LifePolicy(
            key=KEY,
            me=ME,
            seen_counter=5,
            expires_instant=self.now + FAILOVER_S,
            failover_s=FAILOVER_S,
            checkpoint_mode=mode,
            checkpoint_every_s=2.0,
            uncheckpointed_max=self.cap,
            others_in_sight=self.chance.random() < 0.5,
        )
        self.mode = mode
        self.life = LeaseStateMachine(policy, self.chance.random)
        self.scheduler = []
        self.order = itertools.count()
        self.exited = None
        self.writes_out = 0
        self.takes_away = self.chance.random() < 0.5
        self.lates = self.chance.random() < 0.4
        self.fails = self.chance.random() < 0.2
        self.is_slow = self.chance.random() < 0.3
        self.asks = self.chance.random() < 0.3
        self.deletes = self.chance.random() < 0.3
        self.leads_away = self.chance.random() < 0.1
        # What has happened at least once
        self.seen = set()
        # User code
        self.delivery = Delivery(batch_max=8)
        self.stop_asked = False
        self.busy = False
        self.begun = False
        self.shard_ended_returned = False
        self.delivered = 100
        self.processed = 100
        self.in_batch = False
        self.told = p(100)
        self.batches = []
        self.end = 100 + self.chance.randrange(50, 400)
        self.requests = itertools.count(1)
        self.waiting = {}
        self.waits_for = None
        # What may stand on the row
        self.allowed = p(100)
        self.seen_checkpoint = p(100)
        self.counter_moved = (5, self.now)
        self.taken = None
        self.given_away = False
        self.is_deleted = False
        self.dark_until = 0.0

    # Time

    def at(self, instant, action, *arguments):
        heapq.heappush(
            self.scheduler, (max(instant, self.now), next(self.order), action, arguments)
        )

    def soon(self, most_s=1.5):
        spread = most_s if self.is_storm else 0.05
        return self.now + self.chance.random() ** 3 * spread

    @property
    def is_storm(self):
        return self.now < self.storm_ends

    def run(self):
        self.tell(on.Started())
        self.at(self.now + self.chance.uniform(0, STORM_S * 1.5), self.withdraw)
        self.at(self.now, self.tick)
        self.at(self.now, self.meddle)
        for _ in range(EVENTS_MAX):
            if self.exited is not None:
                return
            self.now, _, action, arguments = heapq.heappop(self.scheduler)
            assert self.now < self.storm_ends + CALM_S, f"no end: {self.life.state}"
            action(*arguments)
            self.look()
        raise AssertionError(f"no end after {EVENTS_MAX} events: {self.life.state}")

    def tick(self):
        if self.exited is None:
            self.tell(on.Ticked())
            due = self.life.next_deadline(self.now)
            assert due >= self.now
            self.at(max(due, self.now + 0.01), self.tick)

    def withdraw(self):
        if self.chance.random() < 0.3:
            self.tell(on.OthersInSight(self.chance.random() < 0.5))
        kind = self.chance.randrange(4)
        if kind == 3:
            return self.at(self.storm_ends, self.tell, on.DrainRequested("late"))
        self.tell((on.DrainRequested("x"), on.ManagerGone(), on.ReleaseRequested())[kind])
        return None

    # The core

    def tell(self, event):
        for command in self.life.handle(event, self.now):
            self.perform(command)

    def perform(self, command):
        assert self.exited is None, f"{command} after Exit"
        match command:
            case do.SendWrite(change, not_before):
                self.writes_out += 1
                assert self.writes_out == 1, "two unresolved writes of the row [P5]"
                self.at(not_before or self.now, self.send, change)
            case do.SendLateCheckpoint(change, not_before):
                assert not self.in_batch, "a late checkpoint before the batch had ended [P19]"
                assert change.position <= p(self.processed), "late, above what was processed"
                self.at(not_before or self.now, self.send_late, change)
            case do.ReadOwnRow(not_before):
                self.at(max(self.soon(), not_before or 0.0), self.read)
            case do.ReadRows(keys):
                self.at(self.soon(), self.look_up, keys)
            case do.ListShards():
                self.at(self.soon(), self.look_up, None)
            case do.AllowDelivery():
                assert not self.stop_asked
                covered = sum(n for last, n in self.batches if p(last) <= self.told)
                assert command.delivered_max <= covered + self.cap, "beyond the cap [I7]"
                self.delivery.allow(command)
                self.at(self.now, self.work)
            case do.StopDelivery():
                self.delivery.stop()
                self.stop_asked = True
                self.at(self.now, self.work)
            case do.AnswerCheckpoint(request, answer):
                position = self.waiting.pop(request)
                if answer is do.CheckpointAnswer.DURABLE and not self.is_deleted:
                    assert self.row.checkpoint >= position or self.taken
                if self.waits_for == request:
                    self.waits_for = None
            case do.Exit(cause):
                self.exited = cause
            case do.Report(kind, position):
                if kind is do.ReportKind.CHECKPOINTED:
                    self.told = position
            case call:
                self.delivery.call(call)
                if isinstance(call, do.CallInitialize):  # reading begins at the claimed row
                    self.delivered = int(call.row.checkpoint.sequence_number)
                    self.processed = self.delivered
                self.at(self.now, self.work)

    # The table

    @property
    def row(self):
        return self.table.read(KEY)

    def send(self, change):
        if self.exited is not None or self.life.own.pending != change:
            self.writes_out -= 1
            return
        assert self.life.own.fence is None or self.now < self.life.own.fence + 1.0
        fault = self.chance.random() if self.is_storm else 1.0
        if self.now < self.dark_until:  # the table is out of reach; what was sent may still land
            fault *= 0.33
        elif fault > 0.9 and self.is_storm:
            self.dark_until = self.now + self.chance.uniform(0, 1.5 * FAILOVER_S)
        sent = self.now
        if fault < 0.05:
            outcome = Throttled("slow down")
        elif fault < 0.10:
            outcome = Unavailable("no route")
        elif fault < 0.12:
            outcome = Refused("AccessDenied", "no")
        elif fault < 0.17:
            outcome = OutcomeUnknown("timed out")
        elif fault < 0.25:
            self.apply(change)
            outcome = OutcomeUnknown("timed out")
            if self.deletes and self.row is not None and self.chance.random() < 0.6:
                self.delete()
        elif fault < 0.33:
            self.at(self.now + self.chance.uniform(0, 5), self.apply, change)
            outcome = OutcomeUnknown("timed out")
        else:
            outcome = self.apply(change)
        self.at(self.soon(), self.answer, change, outcome, sent)

    def send_late(self, change):
        fault = self.chance.random() if self.is_storm else 1.0
        sent = self.now
        if fault < 0.1:
            outcome = Throttled("slow down")
        elif fault < 0.2:
            outcome = OutcomeUnknown("timed out")
            if fault < 0.15:
                self.at(self.now + self.chance.uniform(0, 5), self.apply, change)
        else:
            outcome = self.apply(change)
        self.at(self.soon(), self.answer_late, change, outcome, sent)

    def answer_late(self, change, outcome, sent):
        if self.exited is None:
            self.tell(on.WriteResolved(change, outcome, sent))

    def apply(self, change):
        outcome = self.table.write(change)
        if isinstance(outcome, Applied):
            self.seen.add(type(change))
            if isinstance(change, changes.CreateLease):
                assert self.is_deleted
                assert self.taken is None
                assert not self.given_away, "written again though it was given away"
                self.is_deleted = False
            self.given_away |= isinstance(
                change, changes.Offer | changes.Release | changes.HandOver
            )
        if isinstance(outcome, Applied) and isinstance(change, changes.End):
            assert self.shard_ended_returned
            assert self.table.read("s2") is not None
        self.look()
        return outcome

    def answer(self, change, outcome, sent):
        self.writes_out -= 1
        if self.exited is None:
            self.tell(on.WriteResolved(change, outcome, sent))

    def read(self):
        if self.exited is None:
            fails = self.is_storm and self.chance.random() < 0.2
            self.tell(on.ReadFailed("no route") if fails else on.OwnRowRead(self.row))

    def look_up(self, keys):
        if self.exited is not None:
            return
        if self.is_storm and self.chance.random() < 0.3:
            self.tell(on.LookUpFailed("no route"))
        elif keys is None:
            self.tell(on.ShardsListed((Shard("s0", HashRange(0, 9), "1"),)))
        else:
            self.tell(on.RowsRead(tuple((key, self.table.read(key)) for key in keys)))

    def look(self):
        """The row's invariants, after everything that happens."""
        row = self.row
        if row is None:
            return
        assert row.checkpoint >= self.seen_checkpoint, "the checkpoint moved back [I2]"
        self.seen_checkpoint = row.checkpoint
        if not row.is_ended:
            assert row.checkpoint <= self.allowed, "beyond what was processed [I2b]"
        if row.counter != self.counter_moved[0]:
            self.counter_moved = (row.counter, self.now)

    def meddle(self):
        """An observer takes the row as early as expiry allows; a former owner is late."""
        if self.exited is None:
            self.at(self.now + 0.1, self.meddle)
        row = self.row
        if row is None:
            return
        if row.owner == OFFERED and self.chance.random() < 0.5:
            self.table.write(changes.Take(KEY, OTHER, OFFERED, row.counter, FAILOVER_S, "LATEST"))
            self.taken = self.taken or self.now
        elif self.is_storm and row.owner == ME and not row.is_ended:
            self.disturb(row)
        self.expire(self.row)

    def disturb(self, row):
        """Somebody asks, deletes the row, or leads it away."""
        if self.asks and self.chance.random() < 0.02:
            asker = self.chance.choice((OTHER, ANYBODY, ME))
            self.table.write(changes.Ask(KEY, asker, ME, self.now, row.handoff))
        if self.deletes and self.chance.random() < 0.02:
            self.delete()
        elif self.leads_away and self.chance.random() < 0.02:
            self.table._rows[KEY] = msgspec.structs.replace(row, owner=JAVA, checkpoint_owner=ME)
            self.at(self.now + self.chance.uniform(0, 20), self.force)

    def delete(self):
        self.table._forget(KEY)
        self.is_deleted = True
        self.seen_checkpoint = self.told  # what nobody was told may have to be done again

    def force(self):
        """The leader has waited long enough."""
        row = self.row
        if row is not None and row.checkpoint_owner == ME:
            # It would wait out our fence: 30 s and a failover on top.
            if self.now < self.counter_moved[1] + FAILOVER_S:
                self.at(self.counter_moved[1] + FAILOVER_S, self.force)
                return
            self.table._rows[KEY] = msgspec.structs.replace(
                row, checkpoint_owner=None, counter=row.counter + 1
            )
            self.taken = self.taken or self.now

    def expire(self, row):
        if row is None:
            return
        expired = self.now >= self.counter_moved[1] + FAILOVER_S
        if self.takes_away and expired and row.owner == ME and not row.is_ended:
            self.table.write(changes.Take(KEY, OTHER, ME, row.counter, FAILOVER_S, "LATEST"))
            self.taken = self.taken or self.now
        if self.lates and self.is_storm and not row.is_ended and self.chance.random() < 0.05:
            late = p(int(row.checkpoint.sequence_number) + self.chance.randrange(1, 30))
            self.allowed = max(self.allowed, late)
            self.table._rows[KEY] = msgspec.structs.replace(row, checkpoint=late)

    # User code

    def work(self):
        """The main thread: idle, it takes its next task, as the product decides."""
        if self.busy or self.exited is not None:
            return
        waiting = self.chance.randrange(1, 9) if self.delivered < self.end else None
        if waiting is None:
            self.delivery.end()
        elif self.chance.random() < 0.1:
            waiting = 0  # a page without user records
        match self.delivery.next_start(waiting, self.now):
            case None:
                pass
            case StartBatch(size):
                self.deliver(size)
            case ConfirmEnd():
                self.tell(on.ShardExhausted(CHILDREN))
            case ConfirmStop():
                self.stop_asked = False
                self.tell(on.DeliveryStopped())
                self.at(self.now, self.work)
            case call:
                self.busy = True
                self.at(self.soon(), self.return_from, call)

    def deliver(self, size):
        assert not self.stop_asked, "a batch began after delivery was stopped [P17]"
        assert self.taken is None, "a batch began after another had taken the row [I4]"
        expires = self.counter_moved[1] + FAILOVER_S
        assert self.now < expires, "a batch began when another might have taken the row [I4]"
        self.delivered += max(size, 1)
        if size:
            self.batches.append((self.delivered, size))
        self.busy = self.in_batch = True
        self.tell(on.BatchDelivered(p(self.delivered), size, size * 10))
        self.at(self.soon(), self.middle, self.delivered, size)

    def middle(self, last, size):
        if self.exited is not None:
            return
        asks = self.mode == "manual" or self.chance.random() < 0.2
        if asks:
            inside = last - self.chance.randrange(0, size + 1) if self.mode != "manual" else last
            self.ask(None if self.chance.random() < 0.3 else inside, last)
        takes_long = self.is_slow and self.chance.random() < 0.1
        at = self.now + self.chance.uniform(0, 10.0) if takes_long else self.soon()
        self.at(at, self.return_batch, last)

    def ask(self, position, last):
        request = next(self.requests)
        wanted = p(last if position is None else position)
        self.allowed = max(self.allowed, wanted)
        self.waiting[request] = wanted
        self.waits_for = request
        self.tell(on.CheckpointRequested(request, None if position is None else p(position)))

    def return_batch(self, last):
        if self.exited is not None:
            return
        if self.waits_for is not None:
            self.at(self.now + 0.02, self.return_batch, last)
            return
        self.busy = self.in_batch = False
        if self.fails and self.chance.random() < 0.02:
            self.delivery.halt()
            self.tell(on.ProcessorFailed("process_records", "E", 1, p(last)))
        else:
            if self.mode != "manual":
                self.allowed = max(self.allowed, p(last))
            self.processed = last
            self.tell(on.BatchProcessed(p(last)))
        self.at(self.now, self.work)

    def return_from(self, call):
        if self.exited is not None:
            return
        if self.waits_for is not None:
            self.at(self.now + 0.02, self.return_from, call)
            return
        if isinstance(call, do.CallShardEnded) and self.mode == "manual" and not self.begun:
            self.begun = True
            self.ask(None, self.delivered)
            self.at(self.now + 0.02, self.return_from, call)
            return
        self.shard_ended_returned |= isinstance(call, do.CallShardEnded)
        self.busy = False
        self.tell(on.CallReturned())
        self.at(self.now, self.work)


@pytest.mark.parametrize("mode", ["auto", "batch", "manual"])
@pytest.mark.parametrize("seed", seeds(0, 60))
def test_a_storm_breaks_no_promise_and_the_lease_comes_to_an_end(seed, mode):
    world = World(f"{seed}-{mode}", mode)

    world.run()

    causes = {
        State.ENDED: do.ExitCause.DONE,
        State.RELEASED: do.ExitCause.DONE,
        State.FAILED: do.ExitCause.FAILED,
        State.LOST: do.ExitCause.LOST,
        State.UNCLAIMED: do.ExitCause.UNCLAIMED,
    }
    assert causes[world.life.state] is world.exited
    if world.life.state is State.ENDED:
        assert world.row.checkpoint == SHARD_END


def test_the_storms_reach_every_end():
    ends, seen = set(), set()
    for seed in range(60):
        for mode in ("auto", "batch", "manual"):
            world = World(f"{seed}-{mode}", mode)
            world.run()
            ends.add(world.life.state)
            seen |= world.seen

    assert seen >= {
        changes.Offer,
        changes.Release,
        changes.HandOver,
        changes.LateCheckpoint,
        changes.CreateLease,
    }
    assert ends >= {State.ENDED, State.RELEASED, State.FAILED, State.LOST}
