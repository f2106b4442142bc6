"""The folder through which a test and the processes that it has killed speak. Not a test."""

import contextlib
from collections import Counter
from pathlib import Path

import psutil

from tests.processes.ledger_rig.application import Application

# A line that came while lines were gathered and in none of so many tries came by chance. With three
# tries, six of 59 lines counted as such at a load of 17.
_TRIES_MAX = 6
_TRACED = Path(__file__).parent / "traced"


class Sweep:
    """`lines` as gathered, file by file; `queue` them, and see what becomes of it."""

    def __init__(self, folder):
        self.folder = folder
        self._tries = Counter()
        for name in ("queue", "taken", "killed", "missed"):
            (folder / name).mkdir(parents=True)
        (folder / "lines").touch()

    def lines(self):
        found = {line for line in (self.folder / "lines").read_text().split("\n") if ":" in line}
        return sorted(found, key=lambda line: (line.split(":")[0], int(line.split(":")[1])))

    def queue(self, lines):
        for number, line in enumerate(lines):
            self._queue(f"{number:05d}", line)

    def _queue(self, name, line):
        # Written aside and moved: whoever lists the queue sees whole files only.
        aside = self.folder / name
        aside.write_text(line)
        aside.rename(self.folder / "queue" / name)

    def is_over(self):
        """Whether each line was met, or missed often enough; a missed one is queued again."""
        self._note_ends()
        for path in self._files("missed"):
            name, line = path.name.split("-")[0], path.read_text()
            self._tries[line] += 1
            if self._tries[line] < _TRIES_MAX:
                path.unlink()
                self._queue(name, line)
        return not self._files("queue") and not self._files("taken")

    def killed(self):
        """The pid that died at each line."""
        return {path.read_text(): _pid_of(path) for path in self._files("killed")}

    def missed(self):
        return sorted(path.read_text() for path in self._files("missed"))

    def _note_ends(self):
        """Who ended by itself has missed its line."""
        for path in self._files("taken"):
            if not psutil.pid_exists(_pid_of(path)):
                # Not there any more: it was met after all, a moment ago.
                with contextlib.suppress(FileNotFoundError):
                    path.rename(self.folder / "missed" / path.name)

    def _files(self, name):
        return tuple((self.folder / name).iterdir())


def _pid_of(path):
    return int(path.name.split("-")[1])


class SweptApplication(Application):
    """Its lease processes trace themselves, as `traced/sitecustomize.py` says."""

    def __init__(self, folder, where, stream, /, *, window, **settings):
        super().__init__(folder, where, stream, **settings)
        self.sweep = Sweep(folder / "sweep")
        self._swept = {
            "KCLRUN_RIG_SWEEP": str(self.sweep.folder),
            "KCLRUN_RIG_WINDOW": window,
            "PYTHONPATH": str(_TRACED),
        }

    @property
    def environment(self):
        return super().environment | self._swept
