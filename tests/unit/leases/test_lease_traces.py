"""The shortest traces that the model checker found, as far as they concern the manager.

Each test is named after its trace: H, N, C, R ids of the protocol's model. What must not happen
any more is said in the assertion. C2, C4 and a part of R2 are played in the manager's tests.
"""

import msgspec
import pytest

from kclrun.lease.policy import first_start
from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.manager import LeaseManager
from kclrun.leases.policy import ManagerPolicy
from kclrun.local.lease_rows import change_row
from kclrun.model.lease import Lease
from kclrun.model.record import IteratorType, StartPoint
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.protocol import reports
from kclrun.protocol import writes as ch
from kclrun.protocol.writes import Applied, ConditionFailed, OutcomeUnknown

replace = msgspec.structs.replace
ME, OTHER, FORMER = "kclrun:a:h:new", "kclrun:b:h:n", "kclrun:a:h:old"
WHOLE = HashRange(0, HASH_KEY_MAX)


class Manager:
    def __init__(self, *rows, **policy):
        self.core = LeaseManager(ManagerPolicy(me=ME, **policy), lambda: 0.5)
        self.now = 0.0
        self.commands = ()
        self.say(e.Started())
        self.say(e.LeasesScanned(rows))

    def say(self, event, after=0.0):
        self.now += after
        self.commands = self.core.handle(event, self.now)
        self.core.check()
        return self.commands

    def asked(self, kind):
        return [command for command in self.commands if isinstance(command, kind)]

    def written(self):
        return [command.change for command in self.asked(c.WriteRow)]


def row(key="s0", counter=0, **fields):
    return Lease(**{"key": key, "checkpoint": TRIM_HORIZON, "counter": counter, **fields})


def died():
    """A manager whose process of s0 just died; the row stood at counter 2 then."""
    manager = Manager(row())
    manager.say(e.WriteResolved(manager.written()[0], Applied(row(counter=1, owner=ME))))
    manager.say(e.ProcessStarted("s0", 1))
    manager.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    manager.say(e.ProcessExited("s0", 1, "signal 9"))
    manager.say(e.RowRead("s0", row(counter=2, owner=ME)))
    return manager


def test_h1_a_dead_process_cannot_write_after_its_successor_was_started():
    manager = died()

    renewal = manager.written()[0]
    assert manager.asked(c.StartProcess) == []
    manager.say(e.WriteResolved(renewal, Applied(row(counter=3, owner=ME))))

    # All that the dead process may have sent expects counter 2 or less.
    assert manager.asked(c.StartProcess)[0].counter == 3


def test_h1_a_last_checkpoint_that_lands_in_between_is_what_the_successor_begins_from():
    manager = died()
    landed = row(counter=3, owner=ME, checkpoint=ExtendedSequenceNumber("2"))

    manager.say(e.WriteResolved(manager.written()[0], ConditionFailed(landed)))
    assert manager.asked(c.StartProcess) == []
    assert manager.written() == [ch.Renew("s0", ME, 3)]
    manager.say(e.WriteResolved(manager.written()[0], Applied(replace(landed, counter=4))))

    assert manager.asked(c.StartProcess)[0].counter == 4


@pytest.mark.parametrize("reply", ["condition failed", "unknown"])
def test_h1_a_last_shard_end_that_lands_in_between_is_not_undone(reply):
    manager = died()
    ended = row(counter=3, owner=ME, checkpoint=SHARD_END)

    if reply == "unknown":
        manager.say(e.WriteResolved(manager.written()[0], OutcomeUnknown("reset")))
        manager.say(e.RowRead("s0", ended))
    else:
        manager.say(e.WriteResolved(manager.written()[0], ConditionFailed(ended)))

    assert manager.commands == ()
    assert manager.core.held() == ()


def test_h1c_the_image_of_a_row_that_moved_is_no_proof_of_our_own_write():
    manager = died()
    manager.say(e.WriteResolved(manager.written()[0], OutcomeUnknown("reset")))

    manager.say(e.RowRead("s0", row(counter=3, owner=ME)))

    assert manager.asked(c.StartProcess) == []
    assert manager.written() == [ch.Renew("s0", ME, 3)]


def test_h2_no_second_process_while_the_death_of_the_first_is_not_proven():
    manager = Manager(row())
    manager.say(e.WriteResolved(manager.written()[0], Applied(row(counter=1, owner=ME))))
    manager.say(e.ProcessStarted("s0", 1))
    manager.say(e.ProcessReported("s0", reports.LeaseClaimed(2, TRIM_HORIZON)))
    manager.say(e.ProcessReported("s0", reports.LeaseLost("the fence passed")))

    for _ in range(100):
        manager.say(e.Ticked(), after=5.0)
        if manager.asked(c.ScanTable):
            manager.say(e.LeasesScanned((row(counter=2, owner=ME),)))
        assert not manager.asked(c.StartProcess)
        assert not manager.asked(c.WriteRow)


def test_h3_the_start_expires_counted_from_the_earliest_attempt_that_may_have_applied():
    manager = Manager(row())
    take = manager.written()[0]
    manager.say(e.WriteResolved(take, OutcomeUnknown("timed out")), after=1.0)
    manager.say(e.RowRead("s0", row()))

    manager.say(e.WriteResolved(take, Applied(row(counter=1, owner=ME))), after=1.0)

    assert manager.asked(c.StartProcess)[0].expires_instant == 10.0


def test_n5_a_scan_that_began_before_the_proof_may_not_be_acted_on():
    manager = Manager(row(owner=FORMER))
    manager.say(e.Ticked(), after=10.0)
    assert manager.asked(c.ScanTable)
    manager.say(e.FormerOwnersProvenGone(frozenset({FORMER})))

    manager.say(e.LeasesScanned((row(owner=FORMER, counter=1),)), after=0.1)
    assert manager.written() == []
    manager.say(e.Ticked(), after=0.2)
    manager.say(e.LeasesScanned((row(owner=FORMER, counter=1),)))

    assert manager.written() == [ch.Take("s0", ME, FORMER, 1, 10.0, "TRIM_HORIZON")]


def test_n8_a_take_that_lands_during_a_drain_does_not_leave_a_row_with_a_dead_owner():
    manager = Manager(row())
    take = manager.written()[0]
    manager.say(e.DrainRequested("SIGTERM"))
    assert not manager.asked(c.Finish)

    manager.say(e.WriteResolved(take, OutcomeUnknown("timed out")))
    assert not manager.asked(c.Finish)
    manager.say(e.RowRead("s0", row(counter=1, owner=ME)))
    release = manager.written()[0]
    assert not manager.asked(c.Finish)
    manager.say(e.WriteResolved(release, Applied(row(counter=2))))

    assert manager.asked(c.Finish)


def shard(key, *parents, closed=False):
    return Shard(key, WHOLE, "1", "2" if closed else None, *parents)


def test_c1_a_merge_does_not_come_before_the_split_that_one_of_its_parents_came_from():
    shards = (
        shard("s0", closed=True),
        shard("s1", closed=True),
        shard("s2", "s0"),
        shard("s3", "s0", closed=True),
        shard("s4", "s3", "s1"),
    )
    manager = Manager(row(owner=OTHER), row("s1", checkpoint=SHARD_END))

    manager.say(e.ShardsListed(shards, 1.0))

    assert manager.written() == []


def test_r2_a_latest_without_its_instant_is_pinned_by_the_take_and_every_start_reads_from_it():
    java_made = row(checkpoint=LATEST, owner=None, counter=3)
    manager = Manager(row(owner="java", counter=3, checkpoint=LATEST))
    manager.say(e.ShardsListed((shard("s0"),), 5000.0), after=1.0)
    manager.say(e.Ticked(), after=30.0)
    manager.say(e.LeasesScanned((java_made,)))

    take = manager.written()[-1]
    taken = change_row(take, java_made)
    later = change_row(ch.Take("s0", OTHER, ME, taken.counter, 10.0, "LATEST"), taken)

    assert take.latest_pinned_at == 5030.0
    for claimed in (taken, later):  # the first start, and one after a crash 100 s later
        begins = first_start(claimed, None, now_at=5130.0)
        assert begins == StartPoint(IteratorType.AT_TIMESTAMP, timestamp=5030.0)


@pytest.mark.parametrize(
    "unpinned",
    [
        row(checkpoint=LATEST, latest_pinned_at=77.0),
        row(checkpoint=TRIM_HORIZON),
        row(checkpoint=ExtendedSequenceNumber("55")),
    ],
    ids=lambda lease: str(lease.checkpoint),
)
def test_r2_a_take_notes_no_instant_where_one_stands_or_none_is_read_from(unpinned):
    manager = Manager(unpinned)

    assert [take.latest_pinned_at for take in manager.written()] == [None]


def test_r12_deleting_names_the_counter_that_was_seen():
    manager = Manager(row("p", counter=7, owner="java"), row("a", owner=OTHER))
    manager.say(e.ShardsListed((shard("a"),), 1.0))
    manager.say(e.Ticked(), after=20.0)
    manager.say(e.LeasesScanned((row("p", counter=9, owner="java"), row("a", owner=OTHER))))
    manager.say(e.ShardsListed((shard("a"),), 1.0))

    assert ch.DeleteTrimmed("p", "java", 9) in manager.written()
