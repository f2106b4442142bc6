"""How large the managers are, as the run goes on: memory and descriptors, and their slopes."""

import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    at: float
    pid: int
    rss_kb: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """Of one manager that lived from `minutes` ago on. Slopes are per hour."""

    minutes: float
    rss_kb: int
    rss_kb_an_hour: float
    descriptors: int
    descriptors_an_hour: float

    def __str__(self):
        return (
            f"in {self.minutes:.0f} min: RSS {self.rss_kb / 1024:.1f} MB"
            f" ({self.rss_kb_an_hour / 1024:+.2f} MB/h), {self.descriptors} descriptors"
            f" ({self.descriptors_an_hour:+.1f}/h)"
        )


class Sampler:
    """Takes samples of a manager, and keeps them as lines of JSON in `path`; `growth` leaves out
    how it filled its caches at first."""

    def __init__(self, path):
        self.samples = {}
        self._path = path

    def take(self, machine, pid):
        """Nothing for a process that is gone."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            return
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" in fields:
            rss_kb = int(fields["VmRSS"].split()[0])
            sample = Sample(time.monotonic(), pid, rss_kb, descriptors)
            self.samples.setdefault(machine, []).append(sample)
            with self._path.open("a") as file:
                file.write(json.dumps({"machine": machine, **asdict(sample)}) + "\n")

    def growth(self, machine, *, skip_share=1 / 3):
        """Over the last life of the machine's manager; None below three samples."""
        taken = self.samples.get(machine, [])
        alive = [each for each in taken if each.pid == taken[-1].pid]
        kept = alive[int(len(alive) * skip_share) :]
        if len(kept) < 3:
            return None
        at = [each.at for each in kept]
        return Growth(
            minutes=(at[-1] - at[0]) / 60,
            rss_kb=kept[-1].rss_kb,
            rss_kb_an_hour=slope_an_hour(at, [each.rss_kb for each in kept]),
            # Each lease process has its own: what is left over should not grow.
            descriptors=kept[-1].descriptors,
            descriptors_an_hour=slope_an_hour(at, [each.descriptors for each in kept]),
        )


def slope_an_hour(at, values):
    return statistics.linear_regression(at, values).slope * 3600
