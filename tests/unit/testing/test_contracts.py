"""The contracts in one line: what each accepts and what each finds."""

import pytest

from kclrun import RecordProcessor
from kclrun.testing import assert_idempotent, assert_order_independent
from tests.support.tables import over_rows

RECORDS = [(key, f"{key}{n}") for n, key in enumerate("abcabcabab")]
outside = []


class Echo(RecordProcessor):
    def process_record(self, record, context):
        context.emit({"text": record.data.decode()})


class CountInSelf(RecordProcessor):
    """A crash loses what was counted before the checkpoint."""

    def initialize(self, context):
        self.emit, self.seen = context.emit, 0

    def process_records(self, batch, checkpointer):
        self.seen += len(batch)

    def shard_ended(self, checkpointer):
        self.emit({"seen": self.seen})


class CountInState(RecordProcessor):
    def initialize(self, context):
        self.emit, self.state = context.emit, context.state

    def process_records(self, batch, checkpointer):
        for record in batch:
            seen = self.state[record].get("seen", 0) + 1
            self.state[record]["seen"] = seen
            self.emit({"key": record.partition_key, "text": record.data.decode(), "seen": seen})


class Former(RecordProcessor):
    """Each row depends on the record before it, of whatever key."""

    def initialize(self, context):
        self.former = None

    def process_record(self, record, context):
        context.emit({"text": record.data.decode(), "after": self.former})
        self.former = record.partition_key


class Append(RecordProcessor):
    def process_record(self, record, context):
        outside.append(record.data)


class Upsert(RecordProcessor):
    def process_record(self, record, context):
        if record.data not in outside:
            outside.append(record.data)


class OwnCheckpoints(RecordProcessor):
    """What leaves before the checkpoint that covers its record leaves again after a crash there."""

    def process_records(self, batch, checkpointer):
        outside.extend(record.data for record in batch)
        checkpointer.checkpoint()

    def shard_ended(self, checkpointer):
        checkpointer.checkpoint()


OUTSIDE = {"fresh": outside.clear, "result": lambda run: sorted(outside)}
MANUAL = OUTSIDE | {"settings": {"checkpoint": {"every": "manual"}}}


@over_rows(
    ("contract", "processor", "given"),
    [
        (assert_idempotent, Echo, {}),
        (assert_idempotent, CountInState, {}),
        (assert_idempotent, Upsert, OUTSIDE),
        (assert_idempotent, Echo, {"crashes": 3, "settings": {"checkpoint": {"every": "10s"}}}),
        (assert_order_independent, Echo, {}),
        (assert_order_independent, CountInState, {}),
        (assert_order_independent, Former, {"result": lambda run: len(run.rows)}),
    ],
)
def test_what_keeps_the_contract_passes(contract, processor, given):
    contract(processor, RECORDS, **given)


@over_rows(
    ("contract", "processor", "given", "where"),
    [
        (assert_idempotent, CountInSelf, {}, "crash_after=3"),
        (assert_idempotent, Append, OUTSIDE, "crash_after=1"),
        (assert_idempotent, OwnCheckpoints, MANUAL, "crash_at_checkpoint=1"),
        (assert_order_independent, Former, {}, "seed="),
        (assert_order_independent, CountInState, {"keep_key_order": False}, "seed="),
    ],
)
def test_what_breaks_it_is_found_with_the_place(contract, processor, given, where):
    with pytest.raises(AssertionError, match=where):
        contract(processor, RECORDS, **given)


def test_no_records_is_a_contract_that_is_kept():
    assert_idempotent(Echo, [])
    assert_order_independent(Echo, [])
