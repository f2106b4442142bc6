"""Signals to managers, launchers and lease processes, lock files removed, descriptors denied and
shards trimmed, one strike after the other, from a seed.

It never waits: what ends later (a freeze, a machine without power) is on its agenda. Each signal
is kept with its time and its pid, for the verdict. The last manager is frozen and loses its
children, but is never ended: so one manager's memory is seen over the whole run.
"""

import contextlib
import heapq
import itertools
import os
import random
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.patience import HUNG_S

_PAUSE_S = (0.2, 1.8)
# Most end before the fence; after the longest somebody else has the lease for long.
_FREEZE_FAILOVERS = (0.05, 3.0)
_AWAY_S = (0.0, 6.0)
_ONE_AT_A_TIME_SHARE = 0.8
# The blows, and how often one falls beside the others.
WEIGHTS = {
    "kill_lease": 24,
    "stop_lease": 12,
    "kill_stopped_lease": 8,
    "kill_launcher": 5,
    "stop_launcher": 4,
    "kill_manager": 2,
    "kill_stopped_manager": 1,
    "end_manager": 2,
    "stop_manager": 5,
    "freeze_machine": 3,
    "lose_machine": 1,
    "remove_lock_file": 4,
    "deny_descriptors": 3,
    "trim_shard": 4,
}
# How a manager may end that was sent SIGKILL or SIGTERM: by it, drained, or cut short.
_ENDS = frozenset({0, os.EX_TEMPFAIL, -signal.SIGKILL, -signal.SIGTERM})


@dataclass(frozen=True)
class Signal:
    """`role` is lease, launcher or manager; `until` is when a stopped process went on."""

    at: float
    name: str
    role: str
    machine: str
    pid: int
    until: float


class Nemesis:
    """Call `turn` often, and `is_at_rest` at the end, until it is. `surprises` are managers that
    ended by themselves, or did not end when they were asked to."""

    def __init__(self, apps, seed, failover_s, *, trims, weights=None, now=time.monotonic):
        """`trims` has shards trimmed. `weights` replaces some of `WEIGHTS`."""
        self._apps = apps
        self._trims = trims
        self._spared = list(apps)[-1]
        self._rng = random.Random(f"nemesis {seed}")
        self._freeze_s = tuple(share * failover_s for share in _FREEZE_FAILOVERS)
        self._now = now
        self._next = now()
        self._agenda = []
        self._numbers = itertools.count()
        self._down = {}
        self._stopped = {}
        self._denied = set()
        self.signals = []
        self.strikes = Counter()
        self.surprises = []
        self._weights = WEIGHTS | (weights or {})

    def turn(self):
        """Do what is due, and strike if it is time."""
        now = self._now()
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        self._look_for_the_ended()
        if now >= self._next:
            self._next = now + self._rng.uniform(*_PAUSE_S)
            weights = list(self._weights.values())
            blow = self._rng.choices(list(self._weights), weights=weights)[0]
            getattr(self, f"_{blow}")()

    def is_at_rest(self):
        """Do what is due, but strike no more; whether nothing is left and all managers run."""
        while self._agenda and self._agenda[0][0] <= self._now():
            heapq.heappop(self._agenda)[2]()
        self._look_for_the_ended()
        return not self._agenda and not self._down

    def counts(self):
        """Signals by name and role."""
        return Counter(f"{each.name} {each.role}" for each in self.signals)

    # Strikes.

    def _kill_lease(self):
        machine, pid = self._some_lease()
        self._strike("kill a lease process", pid and self._send("KILL", "lease", machine, pid))

    def _stop_lease(self):
        machine, pid = self._some_lease()
        self._strike("stop a lease process", pid and self._freeze("lease", machine, pid))

    def _kill_stopped_lease(self):
        machine, pid = self._some_lease()
        hit = pid and self._freeze("lease", machine, pid)
        if hit:
            at = self._now() + self._a_while() / 2
            self._later(at, lambda: self._send("KILL", "lease", machine, pid))
        self._strike("kill a stopped lease process", hit)

    def _kill_launcher(self):
        machine, pid = self._some("launcher")
        self._strike("kill a launcher", pid and self._send("KILL", "launcher", machine, pid))

    def _stop_launcher(self):
        machine, pid = self._some("launcher")
        self._strike("stop a launcher", pid and self._freeze("launcher", machine, pid))

    def _kill_manager(self):
        machine, pid = self._some_mortal()
        if pid:
            self._send("KILL", "manager", machine, pid)
            self._is_down(machine)
        self._strike("kill a manager", pid)

    def _kill_stopped_manager(self):
        machine, pid = self._some_mortal()
        if pid and self._freeze("manager", machine, pid):
            at = self._now() + self._a_while() / 2
            self._later(at, lambda: self._kill_if_it_runs(machine, pid))
        self._strike("kill a stopped manager", pid)

    def _kill_if_it_runs(self, machine, pid):
        if machine not in self._down and self._apps[machine].process.pid == pid:
            self._send("KILL", "manager", machine, pid)
            self._is_down(machine)

    def _end_manager(self):
        machine, pid = self._some_mortal()
        if pid:
            self._send("TERM", "manager", machine, pid)
            self._is_down(machine)
        self._strike("end a manager", pid)

    def _stop_manager(self):
        machine = self._rng.choice(self._up())
        pid = self._apps[machine].process.pid
        self._strike("stop a manager", self._freeze("manager", machine, pid))

    def _freeze_machine(self):
        machine = self._rng.choice(self._up())
        until = self._now() + self._a_while()
        for role, pid in self._processes(machine):
            self._freeze(role, machine, pid, until)
        self._strike("freeze a machine", hit=True)

    def _lose_machine(self):
        machine, pid = self._some_mortal()
        if pid:
            app = self._apps[machine]
            everyone = {*self._processes(machine)}
            everyone |= {("lease", each) for each in app.lease_pids(with_orphans=True)}
            now = self._now()
            self.signals += [Signal(now, "KILL", role, machine, pid, now) for role, pid in everyone]
            app.lose_power()
            self._is_down(machine)
        self._strike("a machine loses its power", pid)

    def _remove_lock_file(self):
        """Of a running manager, by its name: a successor then waits for expiry [P3]."""
        machine = self._rng.choice(self._up())
        paths = _locks_of(self._apps[machine].process.pid)
        for path in paths:
            path.unlink(missing_ok=True)
        self._strike("remove a lock file", paths)

    def _deny_descriptors(self):
        """A manager keeps the descriptors that it has, and gets no other, for a while. One that is
        still starting is spared: a program that cannot open its own modules ends."""
        machine = self._rng.choice(self._up())
        pid = self._apps[machine].process.pid
        hit = False
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            has = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            former, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            hit = bool(self._apps[machine].lease_pids()) and pid not in self._denied
            if hit:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (has, hard))
                self._denied.add(pid)
                until = self._now() + self._a_while()
                self._later(until, lambda: self._grant(pid, (former, hard)))
        self._strike("deny a manager descriptors", hit)

    def _trim_shard(self):
        """The next shard that is closed loses what nobody has read of it [P13]."""
        self._strike("trim a held shard", self._trims.arm())

    def _grant(self, pid, limits):
        self._denied.discard(pid)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    # Who.

    def _up(self):
        return [each for each in self._apps if each not in self._down]

    def _some_mortal(self):
        """Mostly none while another one is down: one manager that reads everything is no fleet."""
        mortal = [each for each in self._up() if each != self._spared]
        if self._down and self._rng.random() < _ONE_AT_A_TIME_SHARE:
            mortal = []
        machine = self._rng.choice(mortal) if mortal else None
        return machine, machine and self._apps[machine].process.pid

    def _some_lease(self):
        return self._some("lease")

    def _some(self, role):
        machine = self._rng.choice(self._up())
        app = self._apps[machine]
        pids = app.lease_pids() if role == "lease" else app.launcher_pids()
        return machine, self._rng.choice(pids) if pids else None

    def _processes(self, machine):
        app = self._apps[machine]
        yield "manager", app.process.pid
        yield from (("launcher", pid) for pid in app.launcher_pids())
        yield from (("lease", pid) for pid in app.lease_pids())

    # How.

    def _strike(self, what, hit):
        self.strikes[what if hit else "nobody to hit"] += 1

    def _send(self, name, role, machine, pid, until=0.0):
        """Whether the process was there."""
        try:
            os.kill(pid, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            return False
        now = self._now()
        self.signals.append(Signal(now, name, role, machine, pid, max(now, until)))
        return True

    def _a_while(self):
        least, most = self._freeze_s
        return least + (most - least) * self._rng.random() ** 2

    def _freeze(self, role, machine, pid, until=None):
        """Two freezes of one process end with the later one."""
        until = until or self._now() + self._a_while()
        if not self._send("STOP", role, machine, pid, until):
            return False
        self._stopped[pid] = max(until, self._stopped.get(pid, 0.0))
        self._later(until, lambda: self._thaw(pid))
        return True

    def _thaw(self, pid):
        if self._stopped.get(pid, 0.0) <= self._now():
            self._stopped.pop(pid, None)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _is_down(self, machine):
        """Its manager ends now, or soon; it is started again a while after."""
        process = self._apps[machine].process
        self._down[machine] = self._now() + HUNG_S
        # One that is frozen goes on first, else it never heard the signal.
        self._later(
            self._now() + self._rng.uniform(*_AWAY_S), lambda: self._revive(machine, process)
        )

    def _revive(self, machine, process):
        if process.poll() is None:
            if self._now() > self._down[machine] and process.pid not in self._stopped:
                self._surprise(machine, process, f"did not end within {HUNG_S:g} s of SIGTERM")
                process.kill()
                process.wait()
            self._later(self._now() + 0.2, lambda: self._revive(machine, process))
            return
        if process.returncode not in _ENDS:
            self._surprise(machine, process, f"ended with exit code {process.returncode}")
        del self._down[machine]
        self._apps[machine].start()

    def _look_for_the_ended(self):
        for machine in self._up():
            app = self._apps[machine]
            if app.process.poll() is not None:
                code = app.process.returncode
                self._surprise(machine, app.process, f"ended by itself, with exit code {code}")
                app.start()

    def _surprise(self, machine, process, what):
        words = self._apps[machine].last_words_of(process.pid)
        self.surprises.append(f"{machine}: the manager {process.pid} {what}. It wrote:\n{words}")

    def _later(self, at, what):
        heapq.heappush(self._agenda, (at, next(self._numbers), what))


def _locks_of(pid):
    """The lock files that a process has open and that still have their names."""
    found = set()
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                path = each.readlink()
                if path.suffix == ".lock":
                    found.add(path)
    return found
