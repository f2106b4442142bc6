"""Performs the strikes on a fleet: selects the host, process or shard, and applies the fault.

A strike selects its target among the possible ones at its time, in the order of their names;
without any target it does nothing. The module does not know how a storm ends.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from kclrun.model.lease import ANYBODY, Lease, Owner, OwnerId
from kclrun.model.time import WallTime
from kclrun.protocol.writes import Ask
from kclrun.simulation.clocks import WORLD_BEGAN_AT
from kclrun.simulation.host import Host
from kclrun.simulation.machine import OsProcess
from kclrun.simulation.process import LeaseProcess
from tests.support.java.fleet import MixedFleet
from tests.support.java.worker import JavaWorker
from tests.support.storms.profile import Strike, StrikeKind

Target = TypeVar("Target")

# A larger stream is another experiment: 16 shards find nearly everything, and twice as many leave
# room for a doubling.
_OPEN_SHARDS_MAX: Final = 32
# Two lags, so that a listing made just before shows the children, too.
_TRIMMED_AFTER_LAGS: Final = 2


class Strikes:
    """The strikes of one storm. `hits` counts those that found a target."""

    def __init__(self, fleet: MixedFleet) -> None:
        self.hits = 0
        self._fleet = fleet
        self._is_over = False
        self._strike_of: Mapping[StrikeKind, Callable[[Strike], bool]] = {
            "kill_process": self._kill_process,
            "freeze_process": self._freeze_process,
            "kill_manager": self._kill_manager,
            "freeze_manager": self._freeze_manager,
            "kill_host": self._kill_host,
            "freeze_host": self._freeze_host,
            "drain_host": self._drain_host,
            "add_host": self._add_host,
            "cut_host": self._cut_host,
            "fail_forks": self._fail_forks,
            "split_shard": self._split_shard,
            "merge_shards": self._merge_shards,
            "expire_shards": self._expire_shards,
            "release_lease": self._release_lease,
            "move_lease": self._move_lease,
            "delete_row": self._delete_row,
            "recreate_stream": self._recreate_stream,
        }

    def plan(self, strikes: Sequence[Strike]) -> None:
        """Schedule each strike at its time."""
        for strike in strikes:
            self._fleet.after(strike.at_s, partial(self._strike, strike))

    def end(self) -> None:
        """The storm is over: faults are healed where possible, and later returns are dropped."""
        self._is_over = True
        for worker in self._fleet.java_workers:
            worker.machine.repair()
        for host in self._fleet.hosts:
            host.machine.repair()
            if host.os.is_stopped:
                host.os.go_on()
            for process in host.living():
                if process.os.is_stopped:
                    process.os.go_on()

    def _strike(self, strike: Strike) -> None:
        if not self._is_over:
            self.hits += self._strike_of[strike.kind](strike)

    def _later(self, after_s: float, action: Callable[[], object]) -> None:
        """Run the action later, unless the storm is over by then."""

        def act() -> None:
            if not self._is_over:
                action()

        self._fleet.after(after_s, act)

    # Lease processes and managers.

    def _kill_process(self, strike: Strike) -> bool:
        process = _pick(strike, {each.who: each for each in self._processes()})
        if process is None:
            return False
        process.kill()
        return True

    def _freeze_process(self, strike: Strike) -> bool:
        return self._stop(_pick(strike, {each.who: each.os for each in self._processes()}), strike)

    def _freeze_manager(self, strike: Strike) -> bool:
        return self._stop(_pick(strike, {each.name: each.os for each in self._hosts()}), strike)

    def _stop(self, process: OsProcess | None, strike: Strike) -> bool:
        if process is None or process.is_stopped:
            return False
        process.stop()
        self._later(strike.lasts_s, process.go_on)
        return True

    def _kill_manager(self, strike: Strike) -> bool:
        host = _pick(strike, {each.name: each for each in self._hosts()})
        if host is None:
            return False
        host.kill_manager()
        self._later(strike.lasts_s, partial(self._start_again, host))
        return True

    def _start_again(self, member: Host | JavaWorker) -> None:
        """Its machine may have failed: then another one comes, elsewhere, and for a JVM always."""
        if member.machine.is_dead or isinstance(member, JavaWorker):
            self._replace(member)
        else:
            self._fleet.start_again(member)

    # Machines.

    def _kill_host(self, strike: Strike) -> bool:
        member = _pick(strike, {each.name: each for each in self._members()})
        if member is None:
            return False
        member.kill()
        self._later(strike.lasts_s, partial(self._replace, member))
        return True

    def _replace(self, member: Host | JavaWorker) -> None:
        if isinstance(member, JavaWorker):
            self._fleet.add_java_worker(member.group, member.slot)
        else:
            self._fleet.add_host(member.group, member.name.split(":")[1])

    def _drain_host(self, strike: Strike) -> bool:
        member = _pick(strike, {each.name: each for each in self._fleet.members_up()})
        if member is None:
            return False
        member.drain()
        self._later(strike.lasts_s, partial(self._start_again, member))
        return True

    def _add_host(self, strike: Strike) -> bool:
        groups = sorted({host.group for host in self._fleet.hosts})
        if not groups:
            return False
        group = groups[strike.target % len(groups)]
        self._fleet.add_host(group, f"added-{len(self._fleet.hosts)}")
        return True

    def _freeze_host(self, strike: Strike) -> bool:
        machine = _pick(strike, {each.name: each.machine for each in self._members()})
        if machine is None or machine.is_frozen:
            return False
        machine.freeze()
        self._later(strike.lasts_s, machine.thaw)
        return True

    def _cut_host(self, strike: Strike) -> bool:
        machine = _pick(strike, {each.name: each.machine for each in self._members()})
        if machine is None or machine.is_cut:
            return False
        machine.uplink.is_cut = True
        self._later(strike.lasts_s, machine.connect)
        return True

    def _fail_forks(self, strike: Strike) -> bool:
        machine = _pick(strike, {each.name: each.machine for each in self._hosts()})
        if machine is None or machine.refuses_forks:
            return False
        machine.refuses_forks = True
        self._later(strike.lasts_s, machine.allow_forks)
        return True

    # Operators.

    def _release_lease(self, strike: Strike) -> bool:
        return self._ask(strike, lambda _: ANYBODY)

    def _move_lease(self, strike: Strike) -> bool:
        """Move it to another owner, if there is one."""

        def another(lease: Lease) -> OwnerId | None:
            others = {row.owner for row in self._askable() if row.owner != lease.owner}
            names = sorted(owner for owner in others if owner is not None)
            return names[strike.target % len(names)] if names else None

        return self._ask(strike, another)

    def _ask(self, strike: Strike, target_of: Callable[[Lease], OwnerId | None]) -> bool:
        """As `kclrun leases release` and `move` write it, by the operator's own clock."""
        lease = _pick(strike, {str(row.key): row for row in self._askable()})
        target = target_of(lease) if lease is not None else None
        if lease is None or lease.owner is None or target is None:
            return False
        clock = WallTime(round(WORLD_BEGAN_AT + self._fleet.scheduler.now, 3))
        ask = Ask(lease.key, target, asked=lease.owner, asked_at=clock)
        self._fleet.table.write("operator", ask, lambda _: None)
        return True

    def _delete_row(self, strike: Strike) -> bool:
        """Deletes the row of a shard that is open, or ended. A parent whose row is deleted before
        its end counts as read, by protocol [P11], so no promise can cover that. Never the last row:
        a manager that sees its table emptied refuses to guess any position [L8]."""
        stream = self._fleet.stream
        rows = tuple(self._fleet.table.leases())
        if len(rows) == 1:
            return False
        whole = {str(row.key): row for row in rows if row.is_ended or not stream.is_closed(row.key)}
        row = _pick(strike, whole)
        if row is None:
            return False
        self._fleet.table.delete_by_hand(row)
        return True

    def _askable(self) -> Sequence[Lease]:
        return [
            lease
            for lease in self._fleet.table.leases()
            if lease.owner is not None
            and Owner.parse(lease.owner) is not None
            and lease.handoff is None
            and not lease.is_ended
        ]

    # Shards.

    def _split_shard(self, strike: Strike) -> bool:
        shards = self._open_shards()
        if not shards or len(shards) >= _OPEN_SHARDS_MAX:
            return False
        self._fleet.split(shards[strike.target % len(shards)])
        return True

    def _merge_shards(self, strike: Strike) -> bool:
        """Merges a shard and the next one above it."""
        shards = self._open_shards()
        if len(shards) < 2:
            return False
        low = strike.target % (len(shards) - 1)
        self._fleet.merge(shards[low], shards[low + 1])
        return True

    def _expire_shards(self, strike: Strike) -> bool:
        """Retention is at least a day, and listings lag by seconds: a shard is never trimmed before
        every listing shows its children. The Java KCL in these storms does not handle trimmed
        shards."""
        if self._fleet.java_workers or self._fleet.stream.is_made_again:
            return False
        lag_max_s = self._fleet.stream.faults.listing_lag_max_s
        return self._fleet.expire(max(strike.lasts_s, _TRIMMED_AFTER_LAGS * lag_max_s)) > 0

    def _recreate_stream(self, _: Strike) -> bool:
        """Only once: it is the end of the application, and every manager has to report it [P13].
        The Java KCL in these storms does not handle such a stream."""
        if self._fleet.java_workers or self._fleet.stream.is_made_again:
            return False
        self._fleet.make_stream_again()
        return True

    # Possible targets.

    def _open_shards(self) -> Sequence[str]:
        """The open shards of the stream that the fleet reads."""
        stream = self._fleet.stream
        return () if stream.is_made_again else stream.open_ids()

    def _hosts(self) -> Sequence[Host]:
        """All running hosts, those that drain included."""
        return [host for host in self._fleet.hosts if not host.os.is_dead]

    def _members(self) -> Sequence[Host | JavaWorker]:
        """The machines, those of Java workers too."""
        workers = self._fleet.java_workers
        return [*self._hosts(), *(worker for worker in workers if not worker.is_dead)]

    def _processes(self) -> Sequence[LeaseProcess]:
        """All living processes, those that outlive their manager included."""
        return [process for host in self._fleet.hosts for process in host.living()]


def _pick(strike: Strike, candidates: Mapping[str, Target]) -> Target | None:
    """Selects modulo their number, in the order of their names; None if there are none."""
    names = sorted(candidates)
    return candidates[names[strike.target % len(names)]] if names else None
