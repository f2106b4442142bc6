"""What the scripts noted, read back by the tests."""

import json

from tests.patience import HUNG_S, until


class Notes:
    """All calls of all processes of an application, in the order in which they were written."""

    def __init__(self, path):
        self.path = path
        self.path.touch()

    @property
    def calls(self):
        # The last line may be half written.
        whole, _, _ = self.path.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def of(self, call):
        return [each for each in self.calls if each["call"] == call]

    def delivered(self, shard_id):
        """The texts of the records of a shard, in order; repetitions included."""
        return [
            text
            for each in self.of("process_records")
            if each["shard"] == shard_id
            for _, _, text in each["records"]
        ]

    def until(self, condition, why, timeout_s=HUNG_S):
        return until(lambda: condition(self), timeout_s, why=why)
