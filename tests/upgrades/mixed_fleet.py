"""A fleet whose machines run one version or the other, and may change it between two starts."""

import time

from tests.processes.fleet_rig.fleet import Fleet


class MixedFleet(Fleet):
    """`run` instead of `add`; `runs` holds each start: when, on which machine, which version."""

    def __init__(self, *given, **settings):
        super().__init__(*given, **settings)
        self.runs = []

    def run(self, name, version, group=""):
        """Start a manager of this version, on a new machine or on one whose manager has ended."""
        self.runs.append((time.monotonic(), name, version))
        if name in self.machines:
            self.machines[name].more_environment.update(version.environment)
            self.machines[name].start()
        else:
            self.add(name, group, environment=version.environment)

    def read_by(self, version):
        """The shards that lease processes of this version began on; from where, in order."""
        return [
            (mark["shard"], mark["position"])
            for mark in self.ledger.read().marks
            if mark["what"] == "began" and mark["code"] == version.code
        ]

    def misplaced(self):
        """The lease processes that ran another version than their manager was started with."""
        return [
            mark
            for mark in self.ledger.read().marks
            if mark["what"] == "began" and mark["code"] != self._meant(mark).code
        ]

    def _meant(self, mark):
        return [v for at, name, v in self.runs if name == mark["manager"] and at < mark["at"]][-1]
