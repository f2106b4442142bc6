"""One `LeaseStateMachine` over a lease table in memory. The table, or the test, answers commands.

`tell` hands in an event and queues the commands; `settle` performs what is queued, and what comes
of that, until nothing is left. Faults of writes are queued in `faults`, one a send.
"""

from collections import deque

import pytest

from kclrun.lease import commands, events
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.shard_end import ShardEnd
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.lease.states import State
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.shard import ChildShard, HashRange
from kclrun.model.time import Instant
from kclrun.protocol import writes as changes
from kclrun.protocol.writes import Applied, OutcomeUnknown, Refused, Throttled, Unavailable

ME = OwnerId("kclrun::host:a")
OTHER = OwnerId("kclrun::host:b")
KEY = LeaseKey("s0")
START = 1000.0
NOT_KEPT = "cannot write rows/s0.jsonl: No space left on device"
NOT_APPLIED = {
    "throttled": Throttled("slow down"),
    "unavailable": Unavailable("no route"),
    "refused": Refused("AccessDenied", "no permission"),
    "dropped": OutcomeUnknown("timed out"),
}


def p(number, sub=0):
    return ExtendedSequenceNumber(str(number), sub)


def child(shard_id, *parents):
    return ChildShard(shard_id, parents or ("s0",), HashRange(0, 9))


def shard_end(*children, key=KEY):
    """The end of a shard that was read to its end."""
    end = ShardEnd(
        LeasePolicy(key=key, me=ME, seen_counter=5, expires_instant=0.0, failover_s=10.0)
    )
    end.exhaust(children, is_expired=False)
    return end


# Whether user code asks for a checkpoint of the batch up to 20, and what is stored at its end.
by_mode = pytest.mark.parametrize(
    ("mode", "asked_for", "stored"),
    [
        ("auto", False, p(20)),
        ("batch", False, p(20)),
        ("manual", True, p(20)),
        ("manual", False, p(10)),
    ],
)


class Driver:
    def __init__(
        self,
        mode="auto",
        *,
        position=p(10),
        cap=100,
        every_s=10.0,
        failover_s=9.0,
        has_waited=False,
        others_in_sight=False,
        has_keyed_state=False,
        is_bounded=False,
        outputs=None,
        past_pause=None,
        **row,
    ):
        self.now = START
        self.table = LeaseRows()
        self.row = Lease(key=KEY, checkpoint=position, **({"owner": ME, "counter": 5} | row))
        self.table.write(changes.CreateLease(self.row))
        self.policy = LeasePolicy(
            key=KEY,
            me=ME,
            seen_counter=5,
            expires_instant=Instant(START + failover_s),
            failover_s=failover_s,
            checkpoint=CheckpointPolicy(mode=mode, every_s=every_s, uncheckpointed_max=cap),
            has_waited=has_waited,
            past_pause=past_pause,
            others_in_sight=others_in_sight,
            has_keyed_state=has_keyed_state,
            is_bounded=is_bounded,
            has_outputs=outputs is not None,
            has_storing_outputs=outputs == "storing",
        )
        self.life = LeaseStateMachine(self.policy, lambda: 0.5)
        self.log = []
        self.queue = deque()
        self.faults = deque()
        self.in_flight = []
        self.shards = ()
        self.user_returns = True

    # What the tests say

    def tell(self, event):
        follow = self.life.handle(event, Instant(self.now))
        self.log += follow
        self.queue += follow
        return list(follow)

    def settle(self):
        while self.queue:
            self._perform(self.queue.popleft())

    def happen(self, *reported):
        for event in reported:
            self.tell(event)
            self.settle()

    def tick(self, after_s=0.0):
        self.now += after_s
        self.happen(events.Ticked())

    def begin(self):
        """Claimed, initialized, processing."""
        self.happen(events.Started())
        assert self.state is State.PROCESSING
        return self

    def in_a_batch(self, *reported):
        """As `begin`, and user code is called with a batch up to 20."""
        self.begin().user_returns = False
        self.happen(events.BatchDelivered(p(20), 1, 1), *reported)
        return self

    def batch(self, last, records=1):
        self.happen(events.BatchDelivered(p(last), records, 100), events.BatchProcessed(p(last)))

    def exhaust(self, *children):
        self.happen(events.ShardExhausted(children))

    def steal(self):
        """Another owner takes the row, as by expiry."""
        row = self.stored
        take = changes.Take(KEY, OTHER, row.owner, row.counter, 10.0, "LATEST")
        self.table.write(take)

    def ask(self, to=None, asked_at=7.0):
        """Another owner would like the lease: notes it on the row."""
        owner = OTHER if to is None else to
        seen = self.stored.handoff
        outcome = self.table.write(changes.Ask(KEY, owner, ME, asked_at, seen))
        assert isinstance(outcome, Applied)

    def vanish(self):
        """Somebody deletes the row."""
        self.table._forget(KEY)

    def lead_away(self, next_owner="java-worker"):
        """A KCL 3 leader initiates a graceful hand-over: the counter stays."""
        self.move_row(self.stored.checkpoint, owner=next_owner, checkpoint_owner=ME)

    def move_row(self, position, **fields):
        """A late checkpoint by a former owner: owner and counter stay."""
        import msgspec

        self.table._rows[KEY] = msgspec.structs.replace(self.stored, checkpoint=position, **fields)

    def land(self):
        """The oldest write in flight arrives now; its outcome reaches nobody."""
        return self.table.write(self.in_flight.pop(0))

    # What they look at

    @property
    def state(self):
        return self.life.state

    @property
    def stored(self):
        return self.table.read(KEY)

    def of(self, kind):
        return [each for each in self.log if isinstance(each, kind)]

    def sent(self, kind):
        sends = self.of(commands.SendWrite | commands.SendLateCheckpoint)
        return [each.change for each in sends if isinstance(each.change, kind)]

    def reports(self, kind):
        return self.of(kind)

    def answers(self):
        return {each.request: each.answer for each in self.of(commands.AnswerCheckpoint)}

    # What the world does

    def _perform(self, command):
        match command:
            case commands.SendWrite(change, not_before) | commands.SendLateCheckpoint(
                change, not_before
            ):
                self.now = max(self.now, not_before or 0.0)
                self._write(change)
            case commands.ReadOwnRow(not_before):
                self.now = max(self.now, not_before or 0.0)
                if self.faults and self.faults[0] == "unreadable":
                    self.faults.popleft()
                    self.tell(events.ReadFailed("no route"))
                else:
                    self.tell(events.OwnRowRead(self.stored))
            case commands.ReadRows(keys):
                self.tell(events.RowsRead(tuple((key, self.table.read(key)) for key in keys)))
            case commands.ListShards():
                self.tell(events.ShardsListed(tuple(self.shards)))
            case commands.CallInitialize() | commands.CallShardEnded() if self.user_returns:
                self.tell(events.CallReturned())
            case commands.CallShutdownRequested() | commands.CallLeaseLost() if self.user_returns:
                self.tell(events.CallReturned())
            case commands.StopDelivery() if self.user_returns:
                self.tell(events.DeliveryStopped())
            case _:
                pass

    def _write(self, change):
        if self.faults and self.faults[0] == "not kept" and not hasattr(change, "position"):
            fault = None  # it has no rows
        else:
            fault = self.faults.popleft() if self.faults else None
        if fault == "not kept":
            self.tell(events.RowsNotKept(change, NOT_KEPT))
            return
        sent = Instant(self.now)
        if fault == "reply lost":
            self.table.write(change)
            outcome = OutcomeUnknown("timed out")
        elif fault == "in flight":
            self.in_flight.append(change)
            outcome = OutcomeUnknown("timed out")
        elif fault is not None:
            outcome = NOT_APPLIED[fault]
        else:
            outcome = self.table.write(change)
        self.tell(events.WriteResolved(change, outcome, sent))
