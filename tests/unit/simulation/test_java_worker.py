"""The Java twin among its own: what a fleet of KCL 2.x workers does, with its own weaknesses.

It has to be right about these, or its neighbourhood would prove nothing."""

import pytest

from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.protocol.writes import OutcomeUnknown
from tests.examples import seeds
from tests.unit.simulation.java_fleets import mixed_fleet, owners

# An idle poll after whatever it was, and a blocked parent's poll of 10 s.
PATIENCE_S = 30


@pytest.mark.parametrize("seed", seeds(0, 3))
def test_workers_fill_an_empty_table_and_share_it(seed):
    fleet = mixed_fleet(seed, java=3, shards=8)

    fleet.run_for(240)

    assert sorted(fleet.shards_by_owner().values()) == [2, 3, 3]
    assert {lease.checkpoint != TRIM_HORIZON for lease in fleet.table.leases()} == {True}
    fleet.require_all_read(PATIENCE_S)


def test_renewals_come_every_third_of_a_failover_and_move_the_counter_by_one():
    fleet = mixed_fleet(1, java=1, shards=1, checkpoint_every_s=1e9)
    fleet.run_for(60)
    [before] = fleet.table.leases()

    fleet.run_for(330.8)

    [after] = fleet.table.leases()
    # 3.308 s by a clock that runs up to half a percent off.
    assert 98 <= after.counter - before.counter <= 102
    assert (after.owner, after.checkpoint) == (before.owner, TRIM_HORIZON)


def test_what_a_dead_worker_had_is_taken_once_it_stood_still_for_a_failover():
    fleet = mixed_fleet(2, java=2, shards=4)
    fleet.run_for(120)
    dead, living = fleet.java_workers

    dead.kill()
    fleet.run_for(9)
    assert owners(fleet) == {dead.owner: 2, living.owner: 2}
    fleet.run_for(45)  # two rounds of the taker, of 20 s

    assert owners(fleet) == {living.owner: 4}
    fleet.require_all_read(PATIENCE_S)


def test_a_graceful_shutdown_checkpoints_and_leaves_its_rows_to_expire():
    fleet = mixed_fleet(3, java=2, shards=4)
    fleet.run_for(120)
    leaving, staying = fleet.java_workers
    duplicates = fleet.observer.tally.duplicates

    leaving.drain()
    fleet.run_for(9)
    assert leaving.is_finished
    assert owners(fleet) == {leaving.owner: 2, staying.owner: 2}
    fleet.run_for(45)

    assert owners(fleet) == {staying.owner: 4}
    assert fleet.observer.tally.duplicates == duplicates
    fleet.require_all_read(PATIENCE_S)


@pytest.mark.parametrize("count", [8, 2])
def test_parents_are_read_first_and_their_rows_go_once_the_children_have_begun(count):
    fleet = mixed_fleet(4, java=2, shards=4)
    fleet.run_for(120)

    fleet.reshard(count)
    fleet.run_for(120)
    fleet.require_all_read(PATIENCE_S)
    ended = [lease for lease in fleet.table.leases() if lease.checkpoint == SHARD_END]
    assert {lease.key for lease in ended} == {f"shardId-{n:012}" for n in range(4)}
    assert all(lease.children for lease in ended)

    fleet.run_for(700)  # two rounds of the cleanup, of five minutes
    assert sum(owners(fleet).values()) == count
    assert not [lease for lease in fleet.table.leases() if lease.is_ended]


def test_a_renewal_whose_reply_is_lost_is_found_on_the_row_and_the_lease_stays():
    fleet = mixed_fleet(5, java=1, shards=1, checkpoint_every_s=1e9)
    fleet.run_for(60)
    [reader] = fleet.java_workers[0].consumers.values()
    [before] = fleet.table.leases()
    lose_the_reply_of_one(fleet, "leaseCounter")

    fleet.run_for(30)

    # The SDK sent it again, which failed its condition; the KCL read the row and knew its write.
    assert "ConditionFailed UpdateItem" in fleet.stories.text_of(reader.key)
    [after] = fleet.table.leases()
    assert 8 <= after.counter - before.counter <= 10
    assert not reader.is_over


def test_a_take_whose_reply_is_lost_leaves_a_row_that_its_owner_does_not_renew():
    fleet = mixed_fleet(6, java=1, shards=1)
    fleet.run_for(60)
    fleet.java_workers[0].kill()
    taker = fleet.add_java_worker("b", "j1")
    lose_the_reply_of_one(fleet, "leaseOwner")
    for _ in range(600):
        if owners(fleet) == {taker.owner: 1}:
            break
        fleet.run_for(0.1)
    [taken] = fleet.table.leases()

    fleet.run_for(15)

    [row] = fleet.table.leases()
    assert (row.owner, row.counter) == (taker.owner, taken.counter)
    fleet.run_for(60)  # taken again, from itself, once it has expired
    [row] = fleet.table.leases()
    assert row.counter > taken.counter + 1
    fleet.require_all_read(PATIENCE_S)


def lose_the_reply_of_one(fleet, attribute):
    """Of the next write that sets it: it applies, and nobody is told."""
    send, lost = fleet.table.write, []

    def write(sender, change, reply):
        if lost or attribute not in getattr(change, "puts", ()):
            send(sender, change, reply)
            return
        lost.append(change)
        send(sender, change, lambda _: None)
        fleet.after(2.0, lambda: reply(OutcomeUnknown("timed out")))

    fleet.table.write = write


def test_a_worker_that_stood_still_reads_on_until_its_loop_looks_and_is_allowed_that_second():
    fleet = mixed_fleet(7, java=2, shards=4)
    fleet.run_for(120)
    frozen, other = fleet.java_workers
    readers = list(frozen.consumers.values())

    frozen.freeze()
    fleet.run_for(60)
    assert owners(fleet) == {other.owner: 4}
    assert not any(reader.is_over for reader in readers)
    frozen.thaw()
    fleet.run_for(2)

    assert all(reader.is_over for reader in readers)
    fleet.run_for(60)
    fleet.require_all_read(PATIENCE_S)


def test_a_hole_is_seen_three_times_by_the_leader_before_it_is_filled():
    fleet = mixed_fleet(8, java=2, shards=4)
    fleet.run_for(300)
    row = next(fleet.table.leases())
    fleet.table.delete_by_hand(row)

    fleet.run_for(200)
    assert fleet.table.row(row.key) is None
    fleet.run_for(240)

    assert fleet.table.row(row.key) is not None
    fleet.run_for(60)
    fleet.require_all_read(PATIENCE_S)
