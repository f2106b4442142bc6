"""The calm after a storm: faults are healed, and the liveness promises are demanded.

Each promise has a bound, and each bound has a derivation.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kclrun.lease.policy import ERROR_MAX_S, batch_records_max
from kclrun.leases.assignment import group_of
from kclrun.leases.capacity import RECOVERY_MAX_S
from kclrun.leases.load import GAIN_MIN, HEAVY_ABOVE, WATCHED_S
from kclrun.leases.table_view import STEADY_AFTER_S
from kclrun.local.shard_log import ShardLog
from kclrun.model.lease import ASK_STALE_AFTER_S, LOAD_MEAN_S, Lease, LeaseKey
from kclrun.protocol.writes import ResumeLease
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.network import CALM, LATE_MAX_S, PATIENCE_S
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.stories import RuleBroken, clock
from kclrun.simulation.user_code import UserCode
from tests.support.storms.pausing import end_pauses

# Failed starts of lease processes are repeated after half a minute at the latest.
_RESTART_PAUSE_MAX_S: Final = 30.0
# A stalled process is asked to leave, then forced: 2 s, 1 s, and the time to notice it.
_FORCED_S: Final = 5.0
# L4: six scan periods to share evenly, and ten without a move.
_SCANS_TO_BALANCE: Final = 6
_SCANS_AT_REST: Final = 10
# P13: each manager lists the shards in a random cycle, two of eight expected; in one of 30 million
# storms a manager does not list in so many cycles.
_SCANS_TO_REFUSE: Final = 60
# An exchange by load is watched for a minute, takes two handoffs, and its owners are steady again
# three minutes later. Ten such rounds are enough for all exchanges (tests/properties).
_ROUND_S: Final = WATCHED_S + 20.0 + STEADY_AFTER_S
_ROUNDS_TO_EVEN_LOADS: Final = 10
_ROUNDS_AT_REST: Final = 2
_LOAD_SLACK: Final = 0.05
_WORTH_BYTES_PER_S: Final = 2 * 64 * 1024
# A second for the writes at a shard's end, and for its children's first steps (L3).
_END_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.5
# A batch is 10,000 records at most; a checkpoint makes room for the next one within a few legs.
_BATCH_MAX: Final = 10_000
_BETWEEN_BATCHES_S: Final = 0.05


class Calm:
    """The calm of one fleet, from the end of its storm.

    L1: a readable shard is read within failover + 7 s. L3: a child is read soon after its parents'
    end. L4: the fleet shares evenly, and then no lease moves. And in the end all records are read.
    Lost hosts stay lost. Where the remaining hosts cannot hold all leases (`leases.max`), the
    result says so and no promise counts as broken.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        settings = fleet.world.settings
        self._scan_s = settings.failover_s / 2
        self._poll_s = settings.poll_s
        self._patience_s = settings.read_again_s
        self._pending_s = self._still_pending_s()
        self._began_s = fleet.scheduler.now
        self._generations = self._unended_generations()

    def begin(self) -> None:
        """The services work again, user code stops failing, an operator resumes halted leases."""
        fleet = self._fleet
        fleet.table.faults = CALM
        fleet.table.network.kinesis_failing = 0.0
        fleet.stream.faults = StreamFaults()
        kind = fleet.world.user_code
        self._deploy(
            msgspec.structs.replace(
                kind,
                raising=0.0,
                stalling=0.0,
                poison_every=0,
                never_checkpoints=False,
                checkpoints_by_hand=kind.is_manual,
            )
        )
        if not any(fleet.hosts_up()):
            fleet.add_host("a", "calm")

    def demand_all(self) -> bool:
        """Let time pass and demand every promise; False where the hosts cannot hold all leases.

        Raises: InvariantViolation.
        """
        if self._fleet.stream.is_made_again:
            self._demand_refusal()
            return True
        fleet = self._fleet
        self._pass(self._pending_s)
        self._resume()
        self._pass(self._patience_s)
        if self._is_short():
            return False
        fleet.judge(self._require_readers)
        self._read_up()
        if self._is_short():
            return False
        fleet.require_all_read(self._unread_max_s())
        self._pass_until(lambda: not self._are_hosts_short(), RECOVERY_MAX_S)
        # A handoff request of a manager that is gone blocks others until it is stale [P16]. Wait
        # all of the time: equal numbers may come before the groups have their shares.
        self._pass(ASK_STALE_AFTER_S + _SCANS_TO_BALANCE * self._scan_s)
        fleet.judge(self._require_balance)
        if fleet.stream.traffic.skew:
            self._demand_even_loads()
        fleet.judge(self._require_short_gaps)
        takes = fleet.observer.tally.takes
        self._pass(_SCANS_AT_REST * self._scan_s)
        fleet.judge(lambda: self._require_rest(takes))
        fleet.require_all_read(self._unread_max_s())
        return True

    def _demand_even_loads(self) -> None:
        """L4, by load: within ten rounds the exchanges come to an end, and none that is left would
        pay. The counts are even before and after."""
        fleet = self._fleet
        self._pass(LOAD_MEAN_S + STEADY_AFTER_S)
        end_s = fleet.scheduler.now + (_ROUNDS_TO_EVEN_LOADS + _ROUNDS_AT_REST) * _ROUND_S
        takes = -1
        while takes != fleet.observer.tally.takes and fleet.scheduler.now < end_s:
            takes = fleet.observer.tally.takes
            self._pass(_ROUNDS_AT_REST * _ROUND_S)
        fleet.judge(lambda: self._require_rest(takes))
        fleet.judge(self._require_balance)
        fleet.judge(self._require_even_loads)

    def _demand_refusal(self) -> None:
        """P13: every running manager stops by itself, and so does a manager that comes then. No
        lease is taken any more. Unread records of the former stream are lost with it."""
        fleet = self._fleet
        self._pass(self._pending_s)
        self._pass_until(self._is_left, _SCANS_TO_REFUSE * self._scan_s)
        fleet.judge(self._require_left)
        takes = fleet.observer.tally.takes
        fleet.add_host("a", "late")
        self._pass_until(self._is_left, _SCANS_TO_REFUSE * self._scan_s)
        fleet.judge(self._require_left)
        fleet.judge(lambda: self._require_rest(takes))

    def _is_left(self) -> bool:
        hosts = self._fleet.hosts
        return all(host.os.is_dead and not any(host.living()) for host in hosts)

    def _require_left(self) -> None:
        for host in self._fleet.hosts:
            if not host.os.is_dead or any(host.living()):
                raise RuleBroken("P13", "", f"{host.name} runs on, and its stream is another")

    def _read_up(self) -> None:
        """Read the storm's backlog: closed shards to their ends, then all shards to new records."""
        self._pass_until(self._is_drained, self._drained_after_s())
        self._pass_until(self._is_all_read, self._caught_up_after_s())

    # Time.

    def _pass(self, duration_s: float) -> None:
        self._fleet.run_for(duration_s)

    def _pass_until(self, is_so: Callable[[], bool], longest_s: float) -> None:
        end_s = self._fleet.scheduler.now + longest_s
        while self._fleet.scheduler.now < end_s and not is_so():
            self._fleet.run_for(_LOOK_EVERY_S)

    # Bounds.

    def _still_pending_s(self) -> float:
        """The longest time that effects of the storm may last: a request that arrives late, or
        whose answer is awaited; a batch, unless the watchdog ends it; a pause before the next
        start."""
        settings, user_code = self._fleet.world.settings, self._fleet.world.user_code
        stall_s = user_code.stall_s if user_code.stalling else 0.0
        batch_s = max(user_code.batch_s, min(stall_s, settings.stall_s + _FORCED_S))
        # A lease that a host could not start and no other host took is tried by such hosts, too,
        # once it is overdue for the second scan that sees it. So is work whose place is filled by a
        # waiting child.
        is_overdue = self._are_hosts_short() or self._are_places_waited_in()
        overdue_s = 4 * settings.failover_s if is_overdue else 0.0
        return LATE_MAX_S + PATIENCE_S + max(batch_s, _RESTART_PAUSE_MAX_S, overdue_s)

    def _are_hosts_short(self) -> bool:
        """Whether a host failed, and holds fewer leases than it may until it has proven itself."""
        return any(host.core.host_capacity.is_short for host in self._fleet.hosts_up())

    def _drained_after_s(self) -> float:
        """One generation after the other is read to its end and ended. A scan takes and starts its
        children, which read one page of their backlog after the other."""
        batch_s = self._fleet.world.user_code.batch_s
        per_generation_s = 2 * self._poll_s + 2 * batch_s + self._scan_s + _END_S + self._patience_s
        per_generation_s += self._proof_s()
        return self._generations * (per_generation_s + self._caught_up_after_s())

    def _proof_s(self) -> float:
        """Two listings, a failover apart, prove that a shard was trimmed; each follows a fetch that
        is tried again after a pause. Zero if no shard was trimmed."""
        fleet = self._fleet
        has_expired = any(fleet.stream.is_expired(log.shard_id) for log in fleet.stream.shards())
        return fleet.world.settings.failover_s + 2 * ERROR_MAX_S if has_expired else 0.0

    def _caught_up_after_s(self) -> float:
        """The time for the longest backlog of a shard, batch by batch, while new records come: at
        most half as fast as its batches can hold, in the storms that are drawn."""
        world = self._fleet.world
        batch_max = min(_BATCH_MAX, batch_records_max(world.settings.uncheckpointed_max))
        batches = max(map(self._backlog, world.stream.shards())) / batch_max
        return 2 * math.ceil(batches) * (world.user_code.batch_s + _BETWEEN_BATCHES_S)

    def _backlog(self, log: ShardLog) -> int:
        """The number of records that its row does not cover."""
        stream, row = self._fleet.stream, self._fleet.table.row(LeaseKey(log.shard_id))
        covered = stream.records.number_of(log.shard_id, row.checkpoint) if row is not None else 0
        return stream.records.arrived(log.shard_id, self._fleet.scheduler.now) - covered

    def _unread_max_s(self) -> float:
        """The longest time that a record waits, for a poll and for the batches before it."""
        return 2 * self._poll_s + 3 * self._fleet.world.user_code.batch_s + _END_S

    def _unended_generations(self) -> int:
        """The longest line of shards that are not read to their end, from parent to child."""
        depth: dict[str, int] = {}
        for log in self._fleet.stream.shards():
            above = max((depth[parent] for parent in log.parents), default=0)
            depth[log.shard_id] = above + (not self._fleet.observer.shards.is_over(log.shard_id))
        return max(depth.values())

    # State.

    def _deploy(self, kind: UserCode) -> None:
        self._fleet.world.user_code = kind
        for host in self._fleet.hosts:
            for process in host.living():
                process.user_code.improve(kind)

    def _resume(self) -> None:
        """`kclrun leases resume`, for every lease that an operator finds halted; and the end of all
        pauses."""
        end_pauses(self._fleet)
        for row in self._work():
            if row.halt is not None:
                resume = ResumeLease(row.key, forgets_outputs=row.may_forget_outputs)
                self._fleet.table.write("operator", resume, lambda _: None)

    def _work(self) -> Iterator[Lease]:
        rows = {str(row.key): row for row in self._fleet.table.leases()}
        unended = {key for key, row in rows.items() if not row.is_ended}
        return (
            row for key, row in rows.items() if key in unended and unended.isdisjoint(row.parents)
        )

    def _is_short(self) -> bool:
        """Whether the hosts may hold fewer leases than there are to read: the work, and leases that
        are still read although a parent's row was deleted and created again."""
        running = {process.key for host in self._fleet.hosts_up() for process in host.living()}
        return len(running.union(row.key for row in self._work())) > self._places()

    def _are_places_waited_in(self) -> bool:
        """Whether leases that only wait for their parents may keep work from its places."""
        owned = {row.key for row in self._fleet.table.leases() if row.owner and not row.is_ended}
        return len(owned.union(row.key for row in self._work())) > self._places()

    def _places(self) -> int:
        return sum(1 for _ in self._fleet.members_up()) * self._fleet.world.settings.leases_max

    def _is_drained(self) -> bool:
        return self._unended_generations() == 1

    def _is_all_read(self) -> bool:
        try:
            self._fleet.observer.require_all_read(self._unread_max_s())
        except RuleBroken:
            return False
        return True

    # Promises.

    def _require_readers(self) -> None:
        """L1: no readable shard has been without a reader for longer than the bound."""
        now = self._fleet.scheduler.now
        for key, since_s in sorted(self._fleet.observer.gaps.unread().items()):
            waited_s = now - max(since_s, self._began_s + self._pending_s)
            if waited_s >= self._patience_s:
                raise RuleBroken("L1", key, f"nobody reads it, {waited_s:.1f} s into the calm")

    def _require_short_gaps(self) -> None:
        """L3, and moves: every shard that became unread since was read soon, children first. An
        owner that gives a lease away finishes its batch first. Where an outside party deleted a
        parent's row, the parent's owner has a failover to write it again."""
        oracles, batch_s = self._fleet.observer, self._fleet.world.user_code.batch_s
        for gap in oracles.gaps.since(self._began_s + self._pending_s):
            longest_s = self._scan_s + batch_s + _END_S
            if oracles.lacks_a_parents_row(gap.key):
                longest_s = self._patience_s
            if gap.length_s > longest_s:
                at = clock(gap.began_s)
                raise RuleBroken("L3", gap.key, f"unread for {gap.length_s:.1f} s from {at} on")

    def _require_balance(self) -> None:
        if not self._fleet.is_balanced():
            counts = sorted(self._fleet.shards_by_owner().items())
            shown = ", ".join(f"{owner} {count}" for owner, count in counts)
            raise RuleBroken("L4", "", f"not balanced: {shown}")

    def _require_even_loads(self) -> None:
        """Tries every exchange of two open shards, from each owner above the bound. What is seen
        through polls and records of a quarter of a megabyte is not exact, so a gain that is hardly
        worth it may be left."""
        fleet, places = self._fleet, self._fleet.world.settings.leases_max
        loads, counts = fleet.loads_by_owner(), fleet.shards_by_owner()
        mean = sum(loads.values()) / len(loads)
        held: dict[str, list[float]] = {owner: [] for owner in loads}
        for row in self._work():
            if row.owner in held and not fleet.stream.is_closed(row.key):
                held[row.owner].append(fleet.stream.records.bytes_per_s(row.key))
        for heavy, load in loads.items():
            if load <= (HEAVY_ABOVE + _LOAD_SLACK) * mean or load - mean < _WORTH_BYTES_PER_S:
                continue
            for light in loads:
                if abs(counts[heavy] - counts[light]) > 1 or counts[light] >= places:
                    continue
                returns = held[light] if counts[heavy] < places else []
                if counts[heavy] > counts[light] and group_of(heavy) == group_of(light):
                    returns = [*returns, 0.0]
                for give, take in itertools.product(held[heavy], returns):
                    after = max(load - give + take, loads[light] + give - take)
                    if load - after > (GAIN_MIN + _LOAD_SLACK) * load:
                        shares = f"{load / mean:.2f} and {loads[light] / mean:.2f} of the mean"
                        words = f"{heavy} and {light} have {shares}: an exchange would pay"
                        raise RuleBroken("L4", "", words)

    def _require_rest(self, takes: int) -> None:
        moved = self._fleet.observer.tally.takes - takes
        if moved:
            raise RuleBroken("L4", "", f"{moved} takes after the fleet was balanced")


# The calm after a storm of a fleet with Java members: everything is read, in Java's rhythm.
#
# Even shares are not demanded: a Java worker counts ended rows as load, its own and others', so
# what it holds of the work depends on what its cleanup, every five minutes, has left. Nor is rest.
# A dead owner's lease: one run of a taker sees its counter moved, the next that it has not since,
# each 2 x (failover + epsilon) after the other.
_FAILOVERS_TO_TAKE: Final = 4
# The parents' poll, the loop that starts a consumer, and half a second for the rest: four epsilons,
# the take, and the reads before the first batch.
_TO_BEGIN_S: Final = 10.0 + 1.0 + 0.5


class MixedCalm(Calm):
    """Of one fleet, from the end of its storm."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        failover_s = fleet.world.settings.failover_s
        self._patience_s = max(
            self._patience_s, _FAILOVERS_TO_TAKE * failover_s + _TO_BEGIN_S + self._poll_s
        )

    def demand_all(self) -> bool:
        """As `Calm.demand_all`, of what holds beside Java workers."""
        self._pass(self._pending_s)
        self._resume()
        self._pass(self._patience_s)
        if self._is_short():
            return False
        self._fleet.judge(self._require_readers)
        self._read_up()
        self._pass(self._patience_s)
        self._fleet.require_all_read(self._patience_s)
        return True
