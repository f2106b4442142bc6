"""The lease thread with a real inbox, queue, channel and ring, over a table in memory."""

import fcntl
import functools
import itertools
import os
import resource
import threading
import time
from types import SimpleNamespace

import pytest

from kclrun.errors import SinkError, Unavailable
from kclrun.ipc.board import Segment, boottime
from kclrun.ipc.channel import Channel, Doorbell
from kclrun.ipc.messages import (
    Drain,
    OthersInSight,
    channel_of_worker,
    channel_to_worker,
    decode_report,
)
from kclrun.lease import commands, events
from kclrun.lease.lease_writer import LeaseWriter
from kclrun.lease.policy import LeasePolicy
from kclrun.lease.state_machine import LeaseStateMachine
from kclrun.local.lease_rows import LeaseRows
from kclrun.model.lease import OFFERED, Lease
from kclrun.model.policies import CheckpointPolicy
from kclrun.model.shard import ChildShard, HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as changes
from kclrun.protocol.status import WorkerState
from kclrun.protocol.writes import Applied, Throttled
from kclrun.worker.delivery_queue import CheckpointCalls, DeliveryQueue, Inbox, QueueLimits
from kclrun.worker.fetching import LOOK_S_MAX, FetchView, FetchWatch
from kclrun.worker.lease_driver import LeaseDriver
from kclrun.worker.lease_thread import LeaseThread
from kclrun.worker.look_ups import LookUps
from kclrun.worker.manager_line import ManagerChannel, Reporter
from kclrun.worker.own_row import OwnRow
from kclrun.worker.sharing import daemon_thread, rest_together_s
from tests.patience import HUNG_S, until
from tests.support.build import position as p

ME = "kclrun::host:a"


class Table(LeaseRows):
    """`unreadable` reads fail; it counts its writes by kind, and what the slot says at each.

    So many writes as `throttled` are refused as the service does under load.
    """

    def __init__(self):
        super().__init__(lock=threading.Lock())
        self.unreadable = 0
        self.throttled = 0
        self.written = []
        self.slot = None
        self.sends = []

    def read(self, key):
        if self.unreadable:
            self.unreadable -= 1
            raise Unavailable("no route")
        return super().read(key)

    def write(self, change):
        self.written.append(type(change))
        if self.slot is not None:
            self.sends.append((self.slot.last_send_instant(), boottime()))
        if self.throttled:
            self.throttled -= 1
            return Throttled("slow down")
        return super().write(change)


class Admin:
    """`answers` is cleared while a listing does not come back."""

    def __init__(self):
        self.answers = threading.Event()
        self.answers.set()
        self.asked = threading.Event()

    def list_shards(self, shard_filter=None):
        """The other parent of s2 has expired."""
        self.asked.set()
        self.answers.wait(HUNG_S)
        closed = Shard("s0", HashRange(0, 9), "1", "99")
        return closed, Shard("s2", HashRange(0, 9), "100", None, "s0", "s1")


class Rows:
    def __init__(self, *, is_full):
        self.is_full = is_full
        self.durable = []
        self.asked = []

    def commit(self, asked):
        self.asked.append(asked)

    def confirm(self, state_version):
        """This lease has no state."""

    def commits_at_tip(self):
        return False

    def waiting_since(self):
        return 0.0

    def make_durable(self, position):
        if self.is_full:
            raise SinkError("the disk is full")
        self.durable.append(position)


class Stage:
    def __init__(self, failover_s=1.5, every_s=0.05, silence_max_s=HUNG_S):
        self.table = Table()
        self.admin = Admin()
        self.table.write(
            changes.CreateLease(Lease(key="s0", checkpoint=p(10), owner=ME, counter=5))
        )
        policy = LeasePolicy(
            key="s0",
            me=ME,
            seen_counter=5,
            expires_instant=boottime() + 5,
            failover_s=failover_s,
            checkpoint=CheckpointPolicy(every_s=every_s),
        )
        self.life = LeaseStateMachine(policy, lambda: 0.5)
        self.rows = Rows(is_full=False)
        self.inbox = Inbox()
        self.queue = DeliveryQueue(QueueLimits(1000, 10), boottime)
        self.checkpoints = CheckpointCalls(self.inbox.post, lambda position: None, lambda: False)
        self.segment, self.doorbell = Segment.create(1), Doorbell.create()
        self.ring = self.segment.ring(0)
        self.table.slot = self.segment.slot(0)
        mine, its = Channel.pair()
        self.manager = channel_to_worker(mine)
        self.channel = channel_of_worker(its.detach())
        reporter = Reporter(self.segment.slot(0), self.segment.ring(0), self.doorbell, 1, FetchView)
        self.over = threading.Event()
        self.fetch_view = FetchView()
        fetch_watch = FetchWatch(lambda: self.fetch_view, silence_max_s)
        self.own_row = OwnRow(
            self.table,
            self.life.own,
            make_durable=self.rows.make_durable,
            note_send=reporter.note_send,
            now=boottime,
        )
        self.look_ups = LookUps(
            *(self.table, self.admin, "s0"),
            post=self.inbox.post,
            broke=self.broke,
            fetch_watch=fetch_watch,
            now=boottime,
            make_thread=daemon_thread,
        )
        self.driver = LeaseDriver(
            self.life,
            own_row=self.own_row,
            look_ups=self.look_ups,
            queue=self.queue,
            rows=self.rows,
            checkpoints=self.checkpoints,
            reporter=reporter,
            now=boottime,
        )
        self.thread = LeaseThread(
            self.driver,
            self.inbox,
            ManagerChannel(self.channel, lambda credentials: None),
            self.queue,
            fetch_watch=fetch_watch,
            threads=SimpleNamespace(
                make_thread=daemon_thread, rest_s=functools.partial(rest_together_s, 0.0)
            ),
            now=boottime,
            on_over=self.over.set,
        )
        self.transitions = []
        self.thread.start()
        assert isinstance(self.queue.next_task(), commands.CallInitialize)
        self.inbox.post(events.CallReturned())

    def broke(self, error):
        self.thread.break_off(error)

    def batch(self, last):
        self.inbox.post(events.BatchDelivered(p(last), 1, 1))
        self.inbox.post(events.BatchProcessed(p(last)))

    def reported(self, kind):
        self.transitions += [decode_report(each) for each in self.ring.drain()]
        return [each for each in self.transitions if isinstance(each, kind)]

    def close(self):
        self.thread.break_off(RuntimeError("the test is over"))
        self.thread.join(HUNG_S)
        assert not self.thread.is_alive()
        # A look-up under way posts its answer to the inbox; in a process that outlives all threads.
        if (look_up := self.look_ups._thread) is not None:
            look_up.join(HUNG_S)
        self.manager.close()
        self.channel.close()
        self.inbox.close()
        self.doorbell.close()
        self.segment.close()


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def impatient_stage():
    stage = Stage(silence_max_s=0.2)
    yield stage
    stage.close()


@pytest.mark.seconds
def test_a_full_disk_holds_the_checkpoint_and_costs_no_lease(stage):
    stage.rows.is_full = True
    stage.batch(20)
    until(
        lambda: any("disk is full" in each.detail for each in stage.reported(reports.ProcessWarned))
    )
    until(lambda: stage.table.written.count(changes.Renew) >= 3)

    assert changes.Checkpoint not in stage.table.written
    stage.rows.is_full = False
    until(lambda: stage.reported(reports.Checkpointed))
    assert stage.rows.durable == [p(20)]
    assert stage.table.read("s0").checkpoint == p(20)


@pytest.mark.seconds
def test_each_send_of_the_owner_stands_in_the_slot_before_it_leaves(stage):
    until(lambda: len(stage.table.sends) >= 3)
    sends = list(stage.table.sends)

    assert sends[0][0] > 0.0
    assert [sent for sent, _ in sends] == sorted({sent for sent, _ in sends})
    for (_, before), (sent, written) in itertools.pairwise(sends):
        assert before <= sent <= written


@pytest.mark.seconds
def test_a_throttled_write_waits_for_its_time_before_it_is_sent_again(stage):
    waits = []
    perform = stage.own_row.perform

    def seen(command):
        waits.append((command.not_before, boottime()))
        return perform(command)

    stage.own_row.perform = seen
    sent_before = len(stage.table.written)
    stage.table.throttled = 1
    until(lambda: any(not_before is not None for not_before, _ in waits))
    until(lambda: len(stage.table.sends) >= sent_before + 2 and stage.table.throttled == 0)

    not_before = next(not_before for not_before, _ in waits if not_before is not None)
    assert not any(
        asked < sent < not_before
        for sent, _ in stage.table.sends
        for wait, asked in waits
        if wait == not_before
    )


def test_the_checkpoint_a_user_waits_for_is_noted_before_the_answer(stage):
    stage.batch(20)
    stage.inbox.post(events.BatchDelivered(p(30), 1, 1))

    stage.checkpoints.checkpointer.checkpoint("30")

    assert stage.checkpoints.durable == p(30)


@pytest.mark.seconds
def test_a_look_up_that_fails_at_the_end_of_a_shard_is_tried_again(stage):
    stage.table.unreadable = 1
    stage.inbox.post(events.ShardExhausted((ChildShard("s2", ("s0", "s1"), HashRange(0, 9)),)))

    until(lambda: stage.table.raw("s2"))


@pytest.mark.seconds
def test_a_listing_that_takes_longer_than_the_failover_loses_no_lease(stage):
    stage.admin.answers.clear()
    stage.batch(20)
    stage.inbox.post(events.ShardExhausted(()))
    assert stage.admin.asked.wait(HUNG_S)
    renewed, asked = stage.table.written.count(changes.Renew), boottime()
    until(lambda: stage.table.written.count(changes.Renew) >= renewed + 4)
    until(lambda: boottime() >= asked + 1.5)

    stage.admin.answers.set()

    until(lambda: stage.table.raw("s2"))
    assert stage.thread.failure is None
    assert not stage.reported(reports.LeaseLost)


def test_other_threads_make_all_requests_but_those_for_the_own_row(stage):
    made = []

    def noted(call, name):
        def note(*arguments):
            made.append((name, threading.current_thread().name))
            return call(*arguments)

        return note

    stage.table.read = noted(stage.table.read, "read")
    stage.admin.list_shards = noted(stage.admin.list_shards, "list_shards")
    child = ChildShard("s2", ("s0", "s1"), HashRange(0, 9))
    stage.inbox.post(events.ShardExhausted((child,)))
    until(lambda: stage.table.raw("s2"))

    assert set(made) == {("read", "look-up"), ("list_shards", "look-up")}


@pytest.mark.seconds
def test_where_the_host_has_no_thread_left_a_look_up_is_tried_again(stage):
    made = stage.look_ups._make_thread

    class NoThread(threading.Thread):
        def start(self):
            stage.look_ups._make_thread = made
            raise RuntimeError("can't start new thread")

    stage.look_ups._make_thread = lambda target, name: NoThread(target=target, name=name)
    stage.inbox.post(events.ShardExhausted(()))

    until(lambda: stage.table.raw("s2"))
    warned = [each.detail for each in stage.reported(reports.ProcessWarned)]
    assert any("can't start new thread" in words for words in warned)


def test_a_bug_in_a_look_up_ends_the_lease_thread(stage):
    def broken(shard_filter=None):
        raise ZeroDivisionError("a bug")

    stage.admin.list_shards = broken
    stage.inbox.post(events.ShardExhausted(()))

    assert stage.over.wait(HUNG_S)
    assert isinstance(stage.thread.failure, ZeroDivisionError)


def test_a_manager_that_drains_and_one_that_is_gone(stage):
    stage.batch(20)
    stage.manager.send(Drain("now", 5.0))
    until(stage.queue.next_task)
    stage.inbox.post(events.DeliveryStopped())
    assert isinstance(stage.queue.next_task(), commands.CallShutdownRequested)
    stage.manager.close()
    stage.inbox.post(events.CallReturned())

    assert stage.over.wait(HUNG_S)
    assert stage.thread.cause is commands.ExitCause.DONE
    assert stage.table.read("s0").checkpoint == p(20)
    assert stage.reported(reports.LeaseReleased)[0].position == p(20)
    assert stage.queue.is_closed
    assert stage.segment.slot(0).read().state is WorkerState.FINISHED


def test_a_thread_that_broke_ends_the_lease_thread_and_is_its_failure(stage):
    error = ZeroDivisionError("in the fetch thread")

    stage.thread.break_off(error)

    assert stage.over.wait(HUNG_S)
    assert stage.thread.failure is error
    assert stage.thread.cause is None


@pytest.mark.seconds
def test_an_idle_lease_thread_does_not_spin(stage):
    turns = []
    handle = stage.life.handle
    stage.life.handle = lambda event, now: turns.append(event) or handle(event, now)
    time_over = time.monotonic() + 1.0
    until(lambda: time.monotonic() > time_over)

    assert len(turns) < 20


def test_the_manager_says_that_others_are_in_sight_and_the_lease_is_offered(stage):
    stage.manager.send(OthersInSight(True))
    stage.batch(20)
    stage.manager.send(Drain("now", 5.0))
    until(stage.queue.next_task)
    stage.inbox.post(events.DeliveryStopped())
    assert isinstance(stage.queue.next_task(), commands.CallShutdownRequested)

    stage.inbox.post(events.CallReturned())

    assert stage.over.wait(HUNG_S)
    row = stage.table.read("s0")
    assert (row.owner, row.offered_by, row.checkpoint) == (OFFERED, ME, p(20))
    assert stage.rows.durable[-1] == p(20)
    assert stage.reported(reports.LeaseReleased)[0].how == "offered to any owner"


@pytest.mark.seconds
def test_a_late_checkpoint_keeps_the_rows_it_covers_first_and_is_no_owners_send(stage):
    stage.life._put_off_until = boottime() + 60.0
    stage.batch(20)
    row = stage.table.read("s0")
    taken = changes.Take("s0", "kclrun::host:b", ME, row.counter, 1.5, "LATEST")
    until(lambda: isinstance(stage.table.write(taken), Applied) or _newer(stage, taken))
    confirmed = until(stage.queue.next_task)
    sent = stage.segment.slot(0).last_send_instant()
    assert sent > 0.0, "the claim was a send"

    stage.inbox.post(events.DeliveryStopped())
    assert isinstance(stage.queue.next_task(), commands.CallLeaseLost)
    stage.inbox.post(events.CallReturned())

    assert stage.over.wait(HUNG_S)
    assert confirmed is not None
    assert stage.rows.durable == [p(20)]
    assert stage.table.read("s0").checkpoint == p(20)
    assert stage.segment.slot(0).last_send_instant() == sent
    assert stage.thread.cause is commands.ExitCause.LOST


def _newer(stage, taken):
    """The owner renewed in between: take again from the counter that stands there now."""
    counter = stage.table.read("s0").counter
    again = changes.Take("s0", taken.owner, ME, counter, 1.5, "LATEST")
    return isinstance(stage.table.write(again), Applied)


# A lease thread that stood still


class Stalls:
    """A lease thread that was not started: what it says of its lateness goes to its core."""

    def __init__(self):
        self.now = 100.0
        self.queue = DeliveryQueue(QueueLimits(1000, 10), self)
        self.posted = []
        self.driver = SimpleNamespace(
            post=self.posted.append,
            own_row=SimpleNamespace(asking_s=0.0),
            next_deadline=lambda now: now + HUNG_S,
        )
        self.thread = LeaseThread(
            *(self.driver, None, None, self.queue),
            fetch_watch=None,
            threads=SimpleNamespace(make_thread=daemon_thread, rest_s=lambda _, pause_s: pause_s),
            now=self,
            on_over=None,
        )
        self.thread._report_stall(0.0)

    def __call__(self):
        return self.now

    def late(self, stalled_s):
        self.now += stalled_s
        self.posted.clear()
        self.thread._report_stall(stalled_s)
        return list(self.posted)


class Waits(Stalls):
    """The same thread, its waits recorded: each takes as long as it may, and `late_s` more."""

    def __init__(self, monkeypatch, deadline):
        super().__init__()
        self.asked_s, self.late_s = [], 0.0
        self.driver.next_deadline = lambda _: deadline
        self.thread._inbox = Inbox()
        self.thread._line = SimpleNamespace(filenos=lambda: (), receive=list)
        monkeypatch.setattr("kclrun.worker.lease_thread.select.poll", lambda: self)

    def register(self, descriptor, _):
        assert descriptor == self.thread._inbox.fileno()

    def poll(self, timeout_ms):
        self.asked_s.append(timeout_ms / 1000)
        self.now += timeout_ms / 1000 + self.late_s

    def wait(self):
        self.thread._wait()
        return [each for each in self.posted if isinstance(each, events.ThreadStalled)]


@pytest.mark.parametrize(("deadline", "wait_s"), [(1e9, 2.0), (100.25, 0.25), (99.0, 0.0)])
def test_a_wait_ends_at_the_next_deadline_and_after_two_seconds_at_the_latest(
    monkeypatch, deadline, wait_s
):
    waits = Waits(monkeypatch, deadline)

    waits.wait()
    waits.thread._inbox.close()

    assert waits.asked_s == [wait_s]


def test_a_lease_thread_waits_for_descriptors_that_select_cannot_take():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    inbox, stalls = Inbox(), Stalls()
    thread = stalls.thread
    descriptor = fcntl.fcntl(inbox.fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)
    thread._line = SimpleNamespace(filenos=lambda: (), receive=list)
    thread._inbox = SimpleNamespace(fileno=lambda: descriptor, take=inbox.take)
    inbox.post(events.CallReturned())
    try:
        thread._wait()
    finally:
        os.close(descriptor)
        inbox.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert stalls.posted == [events.CallReturned()]


@pytest.mark.parametrize(
    ("worked_s", "asking_s", "late_s", "stalled"),
    [
        (0.0, 0.0, 0.9, []),
        (0.0, 0.0, 1.5, [1.5]),
        (3.0, 0.0, 0.0, [3.0]),
        # A slow service is no stall.
        (3.0, 2.5, 0.0, []),
        (3.0, 1.0, 1.25, [2.0, 1.25]),
    ],
)
def test_work_that_is_not_a_request_and_a_late_wake_up_are_stalls(
    monkeypatch, worked_s, asking_s, late_s, stalled
):
    waits = Waits(monkeypatch, 1e9)
    waits.wait()
    waits.now += worked_s
    waits.driver.own_row.asking_s = asking_s
    waits.late_s = late_s

    told_of = waits.wait()
    waits.thread._inbox.close()

    assert [each.stalled_s for each in told_of] == stalled
    assert waits.driver.own_row.asking_s == 0.0


def test_a_thread_that_broke_wakes_the_lease_thread():
    thread = Stalls().thread
    thread._inbox = Inbox()

    thread.break_off(ZeroDivisionError())

    assert thread._inbox.take() == [events.Ticked()]
    thread._inbox.close()


# The requests for the own row


class Requests:
    """An `OwnRow` in virtual time. `sent` are its writes; each request takes `takes_s`."""

    def __init__(self, takes_s=0.0):
        self.now, self.takes_s, self.sent = 100.0, takes_s, []
        self.own = LeaseWriter("s0", ME, 5, 1.5, lambda: 0.5)
        self.row = OwnRow(
            self,
            self.own,
            make_durable=lambda _: None,
            note_send=lambda _: None,
            now=lambda: self.now,
        )

    def write(self, change):
        self.now += self.takes_s
        self.sent.append(change)
        return Applied(None)

    def read(self, _key):
        self.now += self.takes_s
        raise Unavailable("503")


def test_a_write_and_a_read_of_the_own_row_count_as_asking():
    requests = Requests(takes_s=2.0)
    renew = changes.Renew("s0", ME, 5)
    requests.own.in_flight.change = renew

    written = requests.row.perform(commands.SendWrite(renew))
    read = requests.row.perform(commands.ReadOwnRow())

    assert written == events.WriteResolved(renew, Applied(None), 100.0)
    assert read == events.ReadFailed("503")
    assert requests.row.asking_s == 4.0


def test_a_write_that_the_core_no_longer_wants_is_not_sent_and_a_late_checkpoint_always():
    requests = Requests()
    renew, late = changes.Renew("s0", ME, 5), changes.LateCheckpoint("s0", ME, p(10), p(20))

    assert requests.row.perform(commands.SendWrite(renew)) is None
    requests.row.perform(commands.SendLateCheckpoint(late))
    requests.own.in_flight.change = renew
    requests.row.perform(commands.SendWrite(renew))

    assert requests.sent == [late, renew]


def test_writes_are_sent_in_the_order_of_their_times_and_none_before():
    requests = Requests()
    lates = [changes.LateCheckpoint("s0", ME, p(10), p(20 + number)) for number in range(4)]
    for late, not_before in zip(lates, (102.0, 101.0, 100.0, None), strict=True):
        requests.row.perform(commands.SendLateCheckpoint(late, not_before))
    assert requests.sent == lates[2:]
    assert requests.row.next_instant == 101.0

    for now in (100.9, 101.0, 102.0):
        requests.now = now
        list(requests.row.perform_due())

    assert requests.sent == [*lates[2:], lates[1], lates[0]]
    assert requests.row.next_instant is None


@pytest.mark.parametrize(
    ("deadline", "later", "due"),
    [(105.0, None, 105.0), (105.0, 101.0, 101.0), (105.0, 109.0, 105.0)],
)
def test_the_core_and_a_request_that_waits_are_due_at_the_earlier_instant(deadline, later, due):
    machine = SimpleNamespace(next_deadline=lambda _: deadline)
    driver = LeaseDriver(
        machine,
        own_row=SimpleNamespace(next_instant=later),
        **dict.fromkeys(["look_ups", "queue", "rows", "checkpoints", "reporter", "now"]),
    )

    assert driver.next_deadline(100.0) == due


# Lateness


def test_a_second_late_is_reported_and_less_is_not():
    stalls = Stalls()

    assert stalls.late(0.75) == []
    assert stalls.late(1.0) == [events.ThreadStalled(1.0, False)]


def test_a_stall_is_user_codes_where_that_ran_meanwhile_also_if_it_has_returned():
    stalls = Stalls()
    stalls.queue.call(commands.CallShutdownRequested())
    stalls.queue.next_task()
    assert stalls.late(0.5) == []

    assert stalls.late(2.0) == [events.ThreadStalled(2.0, True)]
    stalls.now += 2.0
    stalls.queue.stop_delivery()
    stalls.queue.next_task()
    assert stalls.late(0.0) == []
    assert stalls.late(3.0) == [events.ThreadStalled(3.0, False)]


def test_user_code_that_returned_early_in_a_stall_did_not_cause_it():
    stalls = Stalls()
    stalls.queue.call(commands.CallShutdownRequested())
    stalls.queue.next_task()
    stalls.late(0.25)
    stalls.now += 0.25
    stalls.queue.stop_delivery()
    stalls.queue.next_task()

    assert stalls.late(3.0) == [events.ThreadStalled(3.0, False)]


# A fetch thread that hangs


@pytest.mark.seconds
def test_a_request_for_records_that_never_comes_back_ends_the_lease_thread_with_its_reason(
    impatient_stage,
):
    stage = impatient_stage
    stage.fetch_view = FetchView(asking_since_instant=boottime())

    assert stage.over.wait(HUNG_S)

    assert "has not come back" in str(stage.thread.failure)
    assert any("begins anew" in each.detail for each in stage.reported(reports.ProcessWarned))
    assert stage.table.read("s0").owner == ME


@pytest.mark.seconds
def test_a_listing_that_never_comes_back_ends_the_lease_thread_with_its_reason(impatient_stage):
    stage = impatient_stage
    stage.admin.answers.clear()
    stage.inbox.post(events.ShardExhausted(()))

    assert stage.over.wait(HUNG_S)

    stage.admin.answers.set()
    assert "a look-up at the end of the shard has not come back" in str(stage.thread.failure)
    assert stage.table.read("s0").owner == ME


def watched(silence_max_s=10.0):
    views = [FetchView()]
    watch = FetchWatch(lambda: views[0], silence_max_s)
    return watch, lambda since: views.__setitem__(0, FetchView(asking_since_instant=since))


def test_one_request_is_waited_for_as_long_as_its_time_outs_allow():
    watch, ask = watched()
    ask(1000.0)

    found = [watch.look(1000.0 + second) is not None for second in range(12)]

    assert found == [False] * 10 + [True] * 2


def test_a_lease_thread_that_stood_still_itself_does_not_count_that_time():
    watch, ask = watched(20.0)
    ask(1000.0)
    watch.look(1000.0)

    assert watch.look(1600.0) is None
    assert watch.look(1600.0 + LOOK_S_MAX) is None
    # Looks that are far apart count four seconds each.
    assert [watch.look(1700.0 + 100 * n) is None for n in range(3)] == [True, True, False]
