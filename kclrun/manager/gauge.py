"""CPU and memory of processes, for the samples of a manager."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Final

import psutil

# A process's own memory is read from `smaps_rollup`, up to 1 ms each: at most so many a sample,
# in turn.
_MEMORY_READS_MAX: Final = 8


class Gauge:
    """CPU and memory of processes, kept between samples: a share of CPU needs two readings."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._memory: dict[int, int] = {}

    def look(self, pids: Iterable[int]) -> dict[int, tuple[float | None, int | None]]:
        """CPU percent and own bytes by pid; None for a value that could not be read. A pid comes
        once for each lease of its process: of a shared one each shows an equal part.

        It never fails: a process that exits between two system calls has neither value.
        """
        leases = collections.Counter(pids)
        for pid in self._processes.keys() - leases.keys():
            del self._processes[pid]
            self._memory.pop(pid, None)
        # First those never read, then those read the longest ago: a reading moves to the end.
        in_turn = [*(leases.keys() - self._memory.keys()), *self._memory]
        for pid in in_turn[:_MEMORY_READS_MAX]:
            self._memory.pop(pid, None)
            memory = self._own_bytes(pid)
            if memory is not None:
                self._memory[pid] = memory
        found = {pid: (self._cpu_percent(pid), self._memory.get(pid)) for pid in leases}
        return {
            pid: (cpu and cpu / leases[pid], memory and memory // leases[pid])
            for pid, (cpu, memory) in found.items()
        }

    def _process(self, pid: int) -> psutil.Process:
        return self._processes.setdefault(pid, psutil.Process(pid))

    def _cpu_percent(self, pid: int) -> float | None:
        try:
            is_first = pid not in self._processes
            percent = self._process(pid).cpu_percent(None)
        except (psutil.Error, OSError):
            return None
        return None if is_first else percent

    def _own_bytes(self, pid: int) -> int | None:
        try:
            return int(psutil.Process(pid).memory_full_info().uss)
        except (psutil.Error, OSError):
            return None
