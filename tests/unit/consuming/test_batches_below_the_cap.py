"""A processor that checkpoints inside its batches always makes room, whatever the cap is."""

import pytest

from kclrun.consuming.checkpoints import CheckpointLedger
from kclrun.consuming.policy import batch_records_max
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber


def position(number):
    return ExtendedSequenceNumber(str(number))


@pytest.mark.parametrize("cap", [2, 3, 40, 101])
def test_checkpoints_in_the_middle_of_every_batch_never_fill_the_cap(cap):
    ledger = CheckpointLedger(TRIM_HORIZON, cap)
    size = batch_records_max(cap)

    for batch in range(1, 20):
        room = ledger.delivered_max - ledger.delivered_total
        assert room >= size
        last = batch * size
        ledger.deliver(position(last), size)
        if size > 1:
            ledger.confirm(position(last - 1))
        else:
            ledger.confirm(position(last))
        ledger.process(position(last))
        assert not ledger.is_full


def test_a_batch_is_never_empty():
    assert batch_records_max(1) == 1
