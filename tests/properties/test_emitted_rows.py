"""EmittedRows against a model that keeps everything: any order of calls, crashes anywhere."""

import json
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kclrun.model.sequence import TRIM_HORIZON
from kclrun.outputs.emitted_rows import EmittedRows
from tests.examples import examples
from tests.support.build import position as at

SHARD = "shardId-000000000000"


class Rows(RuleBasedStateMachine):
    """The model: all live rows; which checkpoint covers how many; what the lease table says."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.rows = EmittedRows.open(Path(self.folder.name), SHARD, TRIM_HORIZON)
        self.live: list[int] = []
        self.covers: list[tuple[int, int]] = []  # (position, rows covered)
        self.acknowledged, self.delivered, self.processed = 0, 0, 0
        self.batch_start: int | None = None
        self.serial = 0
        self.may_emit = False

    def teardown(self) -> None:
        if hasattr(self, "rows"):
            self.rows.close()
            self.folder.cleanup()

    def covered(self, position: int) -> int:
        return max((n for p, n in self.covers if p <= position), default=0)

    @precondition(lambda self: self.batch_start is None)
    @rule(size=st.integers(1, 3), emitted=st.integers(0, 2))
    def start_batch(self, size: int, emitted: int) -> None:
        self.rows.begin_batch()
        self.may_emit = True
        self.batch_start = len(self.live)
        self.delivered = max(self.delivered, self.processed) + size
        for _ in range(emitted):
            self.emit()

    # Not after the checkpoint of the whole batch: such rows are no part of any checkpoint.
    @precondition(lambda self: self.batch_start is not None and self.may_emit)
    @rule()
    def emit(self) -> None:
        self.serial += 1
        self.rows.emit({"n": self.serial})
        self.live.append(self.serial)

    @precondition(lambda self: self.batch_start is not None)
    @rule()
    def return_from_batch(self) -> None:
        self.rows.end_batch(at(self.delivered))
        self.covers.append((self.delivered, len(self.live)))
        self.processed, self.batch_start = self.delivered, None

    @precondition(lambda self: self.batch_start is not None)
    @rule()
    def raise_in_batch(self) -> None:
        self.rows.take_back_batch(at(self.acknowledged))
        kept = max(self.batch_start or 0, self.covered(self.acknowledged))
        del self.live[kept:]
        self.covers = [(p, n) for p, n in self.covers if n <= kept]
        self.batch_start, self.delivered = None, max(self.processed, self.acknowledged)

    @precondition(lambda self: self.batch_start is not None)
    @rule(choice=st.integers(0, 100), acknowledged=st.booleans())
    def users_checkpoint(self, choice: int, acknowledged: bool) -> None:
        position = self.acknowledged + choice % (self.delivered - self.acknowledged + 1)
        if position == 0:
            return
        self.rows.cover(at(position))
        self.rows.make_durable(at(position))
        if acknowledged or position == self.acknowledged:  # an equal one needs no write
            self.covers.append((position, len(self.live)))
            self.acknowledged = position
            self.may_emit = position < self.delivered
        else:  # refused: user code raises
            self.raise_in_batch()

    @precondition(lambda self: self.processed > self.acknowledged)
    @rule(acknowledged=st.booleans())
    def checkpoint_by_the_clock(self, acknowledged: bool) -> None:
        self.rows.make_durable(at(self.processed))
        if acknowledged:
            self.acknowledged = self.processed

    @rule(orderly=st.booleans())
    def end(self, orderly: bool) -> None:
        kept = self.covered(self.acknowledged)
        expected = self.live[:kept]
        if not orderly:
            self.rows._broken = "killed"  # so that close() only closes
        self.rows.close()
        self.rows = EmittedRows.open(Path(self.folder.name), SHARD, at(self.acknowledged))
        content = (Path(self.folder.name) / f"{SHARD}.jsonl").read_bytes()
        found = [json.loads(line)["n"] for line in content.splitlines()]
        assert found == expected
        self.live = list(found)
        self.covers = [(self.acknowledged, len(found))]
        self.batch_start = None
        self.delivered = self.processed = self.acknowledged

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if hasattr(self, "rows"):
            assert self.rows.length == sum(len(f'{{"n":{n}}}\n') for n in self.live)


TestRowsAgainstTheModel = Rows.TestCase
TestRowsAgainstTheModel.settings = settings(examples(200), stateful_step_count=30)
