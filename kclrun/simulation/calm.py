"""The calm after a storm: what can be healed is, and the liveness promises are demanded.

L1: what may be read is read within failover + 7 s. L3: a child is read soon after its parents'
end. L4: the fleet shares evenly, and then nothing moves. And in the end everything is read. Dead
hosts stay dead; where those that are left cannot hold all leases (`leases.max`), that is said, not
held against anybody. Rule: each promise has its bound, and each bound its derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kclrun.consuming.policy import batch_records_max
from kclrun.local.shards import ShardLog
from kclrun.model.changes import ResumeLease
from kclrun.model.lease import ASK_STALE_AFTER_S, Lease, LeaseKey
from kclrun.simulation.fleet import Fleet
from kclrun.simulation.shards import StreamFaults
from kclrun.simulation.story import RuleBroken, clock
from kclrun.simulation.table import CALM, LATE_MAX_S, PATIENCE_S
from kclrun.simulation.user_code import UserCode

__all__ = ["Calm"]

# Lease processes that cannot be started are tried again after half a minute, at the latest.
_RESTART_PAUSE_MAX_S: Final = 30.0
# A stalled process is asked to leave, then forced: 2 s, 1 s, and what it takes to notice.
_FORCED_S: Final = 5.0
# L4: six scan periods to share evenly, and ten without a move.
_SCANS_TO_BALANCE: Final = 6
_SCANS_AT_REST: Final = 10
# A second for what is written at a shard's end, and for its children's first steps (L3).
_END_S: Final = 1.0
_LOOK_EVERY_S: Final = 0.5
# A batch is 10,000 records at most; a checkpoint makes room for the next one, within a few legs.
_BATCH_MAX: Final = 10_000
_BETWEEN_BATCHES_S: Final = 0.05


class Calm:
    """Of one fleet, from the end of its storm."""

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
        """The services work again, user code holds, somebody resumes what stands still."""
        fleet = self._fleet
        fleet.table.faults = CALM
        fleet.table.kinesis_failing = 0.0
        fleet.stream.faults = StreamFaults()
        kind = fleet.world.user_code
        self._deploy(
            msgspec.structs.replace(
                kind,
                raising=0.0,
                stalling=0.0,
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
        # An ask of somebody who is gone stands in the way of others until it is stale [P16]. All of
        # the time: equal numbers may come before the groups have their shares.
        self._pass(ASK_STALE_AFTER_S + _SCANS_TO_BALANCE * self._scan_s)
        fleet.judge(self._require_balance)
        fleet.judge(self._require_short_gaps)
        takes = fleet.oracles.tally.takes
        self._pass(_SCANS_AT_REST * self._scan_s)
        fleet.judge(lambda: self._require_rest(takes))
        fleet.require_all_read(self._unread_max_s())
        return True

    def _read_up(self) -> None:
        """What the storm left behind: closed shards to their ends, then all to what arrives now."""
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
        """What began in the storm may last so long: a request that arrives late, or whose answer
        is waited for; a batch, unless the watchdog ends it; a pause before the next start."""
        settings, user_code = self._fleet.world.settings, self._fleet.world.user_code
        stall_s = user_code.stall_s if user_code.stalling else 0.0
        batch_s = max(user_code.batch_s, min(stall_s, settings.stall_s + _FORCED_S))
        return LATE_MAX_S + PATIENCE_S + max(batch_s, _RESTART_PAUSE_MAX_S)

    def _drained_after_s(self) -> float:
        """Generation after generation: read to the end, ended, its children taken by a scan and
        started, one page of what waits for them after the other."""
        batch_s = self._fleet.world.user_code.batch_s
        per_generation_s = 2 * self._poll_s + 2 * batch_s + self._scan_s + _END_S + self._patience_s
        return self._generations * (per_generation_s + self._caught_up_after_s())

    def _caught_up_after_s(self) -> float:
        """The longest backlog of a shard, batch by batch, while new records come: no faster than
        half of what its batches hold, as storms are drawn."""
        world = self._fleet.world
        batch_max = min(_BATCH_MAX, batch_records_max(world.settings.uncheckpointed_max))
        batches = max(map(self._backlog, world.stream.shards())) / batch_max
        return 2 * math.ceil(batches) * (world.user_code.batch_s + _BETWEEN_BATCHES_S)

    def _backlog(self, log: ShardLog) -> int:
        """How many records its row does not cover."""
        stream, row = self._fleet.stream, self._fleet.table.row(LeaseKey(log.shard_id))
        covered = stream.number_of(log.shard_id, row.checkpoint) if row is not None else 0
        return stream.arrived(log.shard_id, self._fleet.scheduler.now) - covered

    def _unread_max_s(self) -> float:
        """A record waits for a poll and for the batches before it."""
        return 2 * self._poll_s + 3 * self._fleet.world.user_code.batch_s + _END_S

    def _unended_generations(self) -> int:
        """The longest line of shards that are not read to their end, from parent to child."""
        depth: dict[str, int] = {}
        for log in self._fleet.stream.shards():
            above = max((depth[parent] for parent in log.parents), default=0)
            depth[log.shard_id] = above + (not self._fleet.oracles.is_over(log.shard_id))
        return max(depth.values())

    # What is so.

    def _deploy(self, kind: UserCode) -> None:
        self._fleet.world.user_code = kind
        for host in self._fleet.hosts:
            for process in host.living():
                process.user_code.improve(kind)

    def _resume(self) -> None:
        """`kclrun leases resume`, for whatever an operator finds halted."""
        for row in self._work():
            if row.halt is not None:
                self._fleet.table.write("operator", ResumeLease(row.key), lambda _: None)

    def _work(self) -> Iterator[Lease]:
        rows = {str(row.key): row for row in self._fleet.table.leases()}
        unended = {key for key, row in rows.items() if not row.is_ended}
        return (
            row for key, row in rows.items() if key in unended and unended.isdisjoint(row.parents)
        )

    def _is_short(self) -> bool:
        """More work than the hosts may hold."""
        places = sum(1 for _ in self._fleet.members_up()) * self._fleet.world.settings.leases_max
        return sum(1 for _ in self._work()) > places

    def _is_drained(self) -> bool:
        return self._unended_generations() == 1

    def _is_all_read(self) -> bool:
        try:
            self._fleet.oracles.require_all_read(self._unread_max_s())
        except RuleBroken:
            return False
        return True

    # Promises.

    def _require_readers(self) -> None:
        """L1: nothing that may be read has been without a reader for longer than that."""
        now = self._fleet.scheduler.now
        for key, since_s in sorted(self._fleet.oracles.gaps.unread().items()):
            waited_s = now - max(since_s, self._began_s + self._pending_s)
            if waited_s >= self._patience_s:
                raise RuleBroken("L1", key, f"nobody reads it, {waited_s:.1f} s into the calm")

    def _require_short_gaps(self) -> None:
        """L3, and what moves: whatever came to be unread since was read soon, children first. Who
        gives a lease away finishes its batch; where somebody deleted a parent's row, its owner has
        a failover to write it again."""
        oracles, batch_s = self._fleet.oracles, self._fleet.world.user_code.batch_s
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

    def _require_rest(self, takes: int) -> None:
        moved = self._fleet.oracles.tally.takes - takes
        if moved:
            raise RuleBroken("L4", "", f"{moved} takes after the fleet was balanced")
