"""Managers of one application, each as on a machine of its own; who owns what, settled or not."""

import signal
import time
from collections import Counter

from tests.patience import HUNG_S, until
from tests.processes.fleet_rig.gaps import silences
from tests.processes.fleet_rig.notes import Notes
from tests.processes.ledger_rig.deliveries import judge

# The one DynamoDB of the rig answers a hundred writes a second, beside all else on two cores:
# fifty leases that checkpoint as often as in `ledger_rig` would be all it did.
_CHECKPOINT_EVERY = "5s"
# Renewals come each third of a failover: after so much of it the fence is close.
_SILENT_SHARE = 0.8
_STALLED_CAP = 10_000
# By then a fleet of the sizes here has shared evenly again.
_STALL_SETTLES_S = 30.0


class Fleet:
    """`application` is the fixture; `settings` go to each manager, `leases` among them."""

    def __init__(self, application, aws, stream, *, failover_s, **settings):
        self._application = application
        self._aws = aws
        self._stream = stream
        self._leases = {"failover": f"{failover_s:g}s", **settings.pop("leases", {})}
        self._settings = {"checkpoint": {"every": _CHECKPOINT_EVERY}, **settings}
        self.failover_s = failover_s
        self.machines = {}
        self.groups = {}
        self.notes = Notes(aws.notes_path, f"app-{stream}", stream)

    def add(self, name, group="", *, environment=()):
        """Start a manager on a new machine, with so much more in its environment."""
        machine = self._application(
            self._stream,
            machine=name,
            leases={**self._leases, "group": group},
            **self._settings,
        )
        self.machines[name] = machine
        self.groups[name] = group
        machine.more_environment.update(environment)
        machine.start()
        return machine

    def add_all(self, names, group=""):
        return [self.add(name, group) for name in names]

    @property
    def running(self):
        return {n: m for n, m in self.machines.items() if m.process.poll() is None}

    @property
    def ledger(self):
        """One file for all."""
        return next(iter(self.machines.values())).ledger

    def stop(self, *names, number=signal.SIGTERM, timeout_s=HUNG_S):
        """Stop them together; their exit codes."""
        for name in names:
            self.machines[name].process.send_signal(number)
        return [self.machines[name].process.wait(timeout_s) for name in names]

    def rows(self):
        try:
            rows = self._aws.rows(f"app-{self._stream}")
        except self._aws.dynamodb.exceptions.ResourceNotFoundException:
            return {}  # the first manager has not made the table yet
        return {key: row for key, row in rows.items() if row["checkpoint"] != "SHARD_END"}

    def owner_ids(self):
        """The owner of each running machine, of its latest start; None before its first line."""
        found = {}
        for name, machine in self.running.items():
            lines = machine.of("manager_started")
            starts = [line["owner"] for line in lines if line["pid"] == machine.process.pid]
            found[name] = starts[-1] if starts else None
        return found

    def counts(self):
        """How many unended leases each running machine owns; under None those of anybody else."""
        names = {owner: name for name, owner in self.owner_ids().items() if owner is not None}
        counts = Counter(dict.fromkeys(self.running, 0))
        counts.update(names.get(row.get("leaseOwner")) for row in self.rows().values())
        return counts

    def is_settled(self, leases):
        """All `leases` are owned by those that run: owners within one, groups within one of their
        share of the work."""
        counts = self.counts()
        if counts.pop(None, 0) or sum(counts.values()) != leases:
            return False
        if max(counts.values()) - min(counts.values()) > 1:
            return False
        members = Counter(self.groups[name] for name in counts)
        totals = Counter()
        for name, count in counts.items():
            totals[self.groups[name]] += count
        return all(
            abs(totals[group] - leases * members[group] / len(counts)) <= 1 for group in members
        )

    def until(self, condition, timeout_s=HUNG_S):
        def reported():
            moves = [(round(n.at, 1), n.kind, n.key) for n in self.notes.read().all[-20:]]
            return f"owned: {self.counts()}; last: {moves}"

        return until(condition, timeout_s, every_s=0.1, why=reported)

    def until_settled(self, leases, timeout_s=HUNG_S):
        """How long it took, in seconds, and the counts."""
        began = time.monotonic()
        self.until(lambda: self.is_settled(leases), timeout_s)
        return time.monotonic() - began, dict(self.counts())

    def until_at_rest(self, leases, timeout_s=HUNG_S):
        """Settled, and nothing has moved for three cycles; as `until_settled`."""
        began = time.monotonic()

        def is_at_rest():
            cycles_ago = time.monotonic() - 3 * self.failover_s / 2
            return self.is_settled(leases) and not self.notes.moves_since(cycles_ago)

        self.until(is_at_rest, timeout_s)
        return time.monotonic() - began, dict(self.counts())

    def finish(self, source, *, killed=(), cap=0, timeout_s=HUNG_S):
        """Once all that was put is delivered everybody leaves, in good order; without a fault.

        Whose lease process stood still for nearly a failover, for its machine had no time for it,
        is judged like one that was killed: its records may come again.
        """
        source.stop()
        names = tuple(self.running)
        self.machines[names[0]].until_all_delivered(source, timeout_s)
        assert self.stop(*names) == [0] * len(names)
        stalled = self.stalled_pids()
        if stalled:
            print(f"stood still for nearly a failover: {sorted(stalled)}")
        # A bound for the stalled is another test's matter: they stand still with the machine.
        cap = max(cap, _STALLED_CAP) if stalled else cap
        verdict = judge(source.put, self.ledger.read(), killed=stalled.union(killed), cap=cap)
        print(verdict)
        assert verdict.faults == []

    def silences(self, since=0.0):
        """As `gaps.silences`, of what was written from an instant on."""
        notes = self.notes.read().all
        found = silences(notes, _SILENT_SHARE * self.failover_s)
        later = {key: [at for at in ends if at >= since] for key, ends in found.items()}
        return {key: ends for key, ends in later.items() if ends}

    def stalled_pids(self):
        """The lease processes of the leases that were silent, of the time before."""
        ends = {key: max(ends) for key, ends in self.silences().items()}
        marks = self.ledger.read().marks
        return {m["pid"] for m in marks if m["at"] < ends.get(m["shard"], float("-inf"))}

    def moves_in_cycles(self, cycles):
        """What moves within so many of a manager's cycles from now on. An observation takes its
        time: this is no wait for anything. Where a lease was silent meanwhile or just before, for
        the machine had no time for it, it moved for that: the observation is made again."""
        hung_at = time.monotonic() + HUNG_S
        while True:
            began = time.monotonic()
            time.sleep(cycles * self.failover_s / 2)
            moves = self.notes.moves_since(began)
            has_stalled = self.silences(began - _STALL_SETTLES_S)
            if not (moves and has_stalled) or time.monotonic() > hung_at:
                return moves

    def lose(self, name):
        """The power of one machine; the instant, its owner and the leases that it had."""
        owner = self.owner_ids()[name]
        keys = {key for key, row in self.rows().items() if row.get("leaseOwner") == owner}
        self.machines[name].lose_power()
        return time.monotonic(), keys
