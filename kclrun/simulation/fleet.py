"""A whole fleet in virtual time: hosts, faults, and how evenly the hosts share the leases.

Every failure is reported with the seed, the time, the story of the lease and a line that replays
it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar

from kclrun.errors import InvariantViolation
from kclrun.leases.manager import LeaseManager
from kclrun.model.lease import Lease, LeaseKey, OwnerId
from kclrun.model.sequence import SHARD_END
from kclrun.simulation.arrivals import Traffic
from kclrun.simulation.clocks import HostClock, Scheduler
from kclrun.simulation.host import Host
from kclrun.simulation.machine import Machine
from kclrun.simulation.observer import ObserverKind, WatchPolicy
from kclrun.simulation.process import LeaseProcess
from kclrun.simulation.shards import ShardStream
from kclrun.simulation.stories import RuleBroken, Stories, clock
from kclrun.simulation.table import SimulatedTable
from kclrun.simulation.user_code import UserCode
from kclrun.simulation.world import FleetSettings, SimulatedWorld

# Hosts of a fleet that is switched on boot within this time of each other.
BOOT_SPREAD_S: Final = 2.0

# Clocks of hosts run up to 1 % apart (README, I4), up to a year after their boot. Wall clocks are
# wrong by up to an hour.
_RATE_OFF_MAX: Final = 0.005
_BOOTED_BEFORE_MAX_S: Final = 3e7
_WALL_OFF_MAX_S: Final = 3600.0

# The collector looks for cycles after so many new objects instead of 700. A fleet keeps most of
# what it makes, and of 200 owners and 2,000 shards it then looks through two million objects again
# and again: a fifth of the time. With these numbers, that fleet takes as much memory as before.
_COLLECT_AFTER: Final = (50_000, 20, 100)


class Member(Protocol):
    """A program that owns leases beside the managers, and comes from the caller of the fleet.
    `is_up`: it takes part; it has not ended and does not drain."""

    owner: OwnerId

    @property
    def is_up(self) -> bool: ...


MemberT = TypeVar("MemberT", bound=Member)


class Fleet:
    """`replay` is the command that repeats this run; `observer_kind` makes the observer of the run.
    For planted bugs, set `core_kind` and `process_kind` before the first host is added."""

    core_kind: type[LeaseManager] = LeaseManager
    process_kind: type[LeaseProcess] = LeaseProcess

    def __init__(
        self,
        seed: int,
        *,
        shards: int,
        traffic: Traffic,
        observer_kind: ObserverKind,
        settings: FleetSettings | None = None,
        user_code: UserCode | None = None,
        scan_page_rows: int = 1_000,
        replay: str = "",
    ) -> None:
        self.seed = seed
        self.scheduler = Scheduler(seed)
        self.stories = Stories()
        self.stream = ShardStream(shards, traffic, self.scheduler.chance("stream"))
        settings = settings if settings is not None else FleetSettings()
        user_code = user_code if user_code is not None else UserCode()
        self.observer = observer_kind(
            self.stream,
            self.stories,
            now=self.scheduler.clock,
            row_of=self._row,
            policy=WatchPolicy(
                failover_s=settings.failover_s,
                checkpoint_every_s=settings.checkpoint_every_s,
                uncheckpointed_max=settings.uncheckpointed_max,
                is_manual=user_code.is_manual,
                poison_every=user_code.poison_every,
            ),
        )
        self.table = SimulatedTable(self.scheduler, self.observer, page_rows_max=scan_page_rows)
        self.world = SimulatedWorld(
            self.scheduler, self.table, self.stream, self.observer, settings, user_code
        )
        self.hosts: list[Host] = []
        self.other_members: list[Member] = []
        self._replay = replay
        self._clocks = self.scheduler.chance("clocks")
        self._nonces = 0
        self._note_readable()

    # Events that happen to the fleet.

    def add_host(self, group: str, slot: str) -> Host:
        """A manager starts, on a machine with clocks of its own."""
        return self._start(group, slot, self._new_machine(f"machine-{self._nonces}"))

    def start_again(self, former: Host) -> Host:
        """A manager starts on the machine of another one, running or not, in the same slot [P3]."""
        group, slot, _ = former.name.split(":")
        return self._start(group, slot, former.machine)

    def _start(self, group: str, slot: str, machine: Machine) -> Host:
        self._nonces += 1
        host = Host(
            f"{group}:{slot}:{self._nonces:04d}",
            self.world,
            machine,
            core_kind=self.core_kind,
            process_kind=self.process_kind,
        )
        for other in self.hosts:
            if other.machine is machine:
                other.seize()
        self.hosts.append(host)
        host.start()
        return host

    def add_member(self, name: str, make: Callable[[str, Machine], MemberT]) -> MemberT:
        """Another member joins, on a machine with clocks of its own. `make` takes its name, `name`
        with a new nonce, and the machine. The caller starts it."""
        self._nonces += 1
        name = f"{name}-{self._nonces:04d}"
        member = make(name, self._new_machine(name))
        self.other_members.append(member)
        return member

    def reshard(self, count: int) -> None:
        """UpdateShardCount, in steps of at most double or half."""
        self.stream.reshard(count, self.scheduler.now)
        self._resharded()

    def split(self, shard_id: str) -> None:
        """SplitShard."""
        self.stream.split(shard_id, self.scheduler.now)
        self._resharded()

    def merge(self, shard_id: str, adjacent_id: str) -> None:
        """MergeShards."""
        self.stream.merge(shard_id, adjacent_id, self.scheduler.now)
        self._resharded()

    def expire(self, closed_for_s: float) -> int:
        """The retention passes over shards that have been closed for so long. Returns: how many."""
        return self.stream.expire(closed_for_s, self.scheduler.now)

    def make_stream_again(self) -> None:
        """The stream is deleted and created again, with as many shards as were open."""
        self.stream.make_again(self.stream.open_count(), self.scheduler.now)

    def _new_machine(self, name: str) -> Machine:
        drawn = HostClock(
            offset_s=self._clocks.uniform(0, _BOOTED_BEFORE_MAX_S),
            rate=1 + self._clocks.uniform(-_RATE_OFF_MAX, _RATE_OFF_MAX),
            wall_offset_s=self._clocks.uniform(-_WALL_OFF_MAX_S, _WALL_OFF_MAX_S),
        )
        return Machine(name, self.scheduler, drawn, self.table)

    def _resharded(self) -> None:
        self._note_readable()
        for host in self.hosts:
            for process in tuple(host.processes.values()):
                if self.stream.is_closed(process.key):
                    process.fetching.shard_closed()

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        """Schedule an event that happens to the fleet."""
        self.scheduler.after(delay_s, action)

    def run_for(self, duration_s: float) -> None:
        """Raises: InvariantViolation with the story and the command that replays it."""
        thresholds = gc.get_threshold()
        gc.set_threshold(*_COLLECT_AFTER)
        try:
            self.scheduler.run_until(self.scheduler.now + duration_s)
        except (RuleBroken, InvariantViolation, AssertionError) as error:
            raise self._with_story(error) from error
        finally:
            gc.set_threshold(*thresholds)

    def require_all_read(self, patience_s: float) -> None:
        """L1, as `Observer.require_all_read`; reported like every failure."""
        self.judge(lambda: self.observer.require_all_read(patience_s))

    def judge(self, require: Callable[[], None]) -> None:
        """Check a requirement now; a broken one is reported like every failure."""
        try:
            require()
        except RuleBroken as error:
            raise self._with_story(error) from error

    # State.

    def hosts_up(self) -> Iterator[Host]:
        return (host for host in self.hosts if host.is_up)

    def members_up(self) -> Iterator[Member]:
        """The hosts that are up, and the other members."""
        yield from self.hosts_up()
        yield from (member for member in self.other_members if member.is_up)

    def shards_by_owner(self) -> dict[OwnerId, int]:
        """The number of leases with work for each host that takes part; others are not counted."""
        counts = {member.owner: 0 for member in self.members_up()}
        for owner in self._owners_of_work():
            if owner in counts:
                counts[owner] += 1
        return counts

    def loads_by_owner(self) -> dict[OwnerId, float]:
        """The bytes a second that each host that takes part reads, by the leases it owns."""
        loads = {member.owner: 0.0 for member in self.members_up()}
        for lease in self.table.leases():
            is_open = self.stream.is_known(lease.key) and not self.stream.is_closed(lease.key)
            if is_open and lease.owner in loads:
                loads[lease.owner] += self.stream.records.bytes_per_s(lease.key)
        return loads

    def is_balanced(self) -> bool:
        """All work is with hosts that take part, and they are within one shard of each other."""
        counts = {member.owner: 0 for member in self.members_up()}
        for owner in self._owners_of_work():
            if owner not in counts:
                return False
            counts[owner] += 1
        return bool(counts) and max(counts.values()) - min(counts.values()) <= 1

    def _owners_of_work(self) -> Iterator[OwnerId | None]:
        """The owner of each lease that has not ended and whose parents have; None without a row."""
        rows: dict[str, Lease] = {lease.key: lease for lease in self.table.leases()}
        end = SHARD_END.sequence_number  # as `Lease.is_ended`, in half of the time
        unended = {key for key, lease in rows.items() if lease.checkpoint.sequence_number != end}
        for log in self.stream.shards():
            row = rows.get(log.shard_id)
            if row is None:
                # A closed shard has ended and its row was cleaned up. A child is not created yet.
                if not log.parents and log.closed_at is None:
                    yield None
            elif row.key in unended and (not row.parents or unended.isdisjoint(row.parents)):
                yield row.owner

    def _row(self, key: LeaseKey) -> Lease | None:
        return self.table.row(key)

    def _note_readable(self) -> None:
        for log in self.stream.shards():
            if not log.parents:
                self.observer.gaps.readable(log.shard_id, self.scheduler.now)

    def _with_story(self, error: Exception) -> InvariantViolation:
        """The error with seed, time, the lease's story, and the command that replays it."""
        key = error.key if isinstance(error, RuleBroken) else ""
        of = f" by {key}" if key else ""
        lines = [f"{error}", f"seed {self.seed}: at {clock(self.scheduler.now)}{of}"]
        lines += [self.stories.text_of(key)] if key else []
        lines += [f"replay: {self._replay}"] if self._replay else []
        return InvariantViolation("\n".join(lines))
