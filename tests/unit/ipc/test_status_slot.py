"""The status slot: what is published is what is read; what is damaged is nothing."""

import math
import struct
import time

import msgspec
import pytest

from kclrun.ipc.board import SLOT_BYTES, StatusSlot, boottime
from kclrun.ipc.seqlock import NoValue, SeqlockCell
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import Instant
from kclrun.protocol.status import LeaseStatus, WorkerState

STATUS = LeaseStatus(pid=4711, incarnation=3, state=WorkerState.PROCESSING)


def new_slot():
    return StatusSlot(memoryview(bytearray(SLOT_BYTES)), 0)


def test_a_new_slot_is_empty_and_has_sent_nothing():
    slot = new_slot()
    assert slot.read() is NoValue.EMPTY
    assert slot.last_send_instant() == 0


def test_the_strategy_fills_every_field():
    # A field added to the status and forgotten in the layout would come back as its default.
    values = [
        *[1, 2, WorkerState.LOST, 4.0, 5, 6, 7, 8, 9.0, 10],
        *[ExtendedSequenceNumber(str(n), n) for n in range(11, 15)],
        *[15.0, 16.0, 17.0, True, 19.0, 20.0, True, 22.0, 23, 24, 25, 26.0, 27, 28.0, 29.0],
    ]
    filled = LeaseStatus(**dict(zip(LeaseStatus.__struct_fields__, values, strict=True)))
    slot = new_slot()
    slot.publish(filled)
    assert msgspec.structs.astuple(slot.read()) == msgspec.structs.astuple(filled)


def test_sentinels_and_sub_sequences_beyond_a_machine_word_are_shown():
    slot = new_slot()
    huge = ExtendedSequenceNumber("1" * 129, 10**30)
    slot.publish(
        msgspec.structs.replace(
            STATUS, fetched=huge, processed=SHARD_END, checkpointed=TRIM_HORIZON
        )
    )
    status = slot.read()
    assert status.fetched == ExtendedSequenceNumber("1" * 129, 2**63 - 1)
    assert (status.processed, status.checkpointed) == (SHARD_END, TRIM_HORIZON)


def test_a_send_is_noted_beside_the_status_and_touches_nothing_of_it():
    slot = new_slot()
    slot.publish(STATUS)
    slot.note_send(Instant(123.456))
    assert slot.last_send_instant() == 123.456
    assert slot.read() == STATUS


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0])
def test_a_send_that_is_no_instant_is_not_passed_on(garbage):
    slot = new_slot()
    slot.note_send(garbage)
    assert slot.last_send_instant() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda payload: struct.pack_into("<q", payload, 16, 99),  # no such state
        lambda payload: struct.pack_into(
            "<d", payload, 24, math.nan
        ),  # a fence that compares with nothing
        lambda payload: payload.__setitem__(slice(80, 84), b"\xff\xfe12"),  # not ASCII
        lambda payload: payload.__setitem__(slice(80, 84), b"0012"),  # no sequence number
    ],
)
def test_bytes_that_are_whole_and_no_status_are_unreadable(change):
    buffer = memoryview(bytearray(SLOT_BYTES))
    slot = StatusSlot(buffer, 0)
    slot.publish(STATUS)
    cell = slot._cell
    payload = bytearray(cell.load())
    change(payload)
    SeqlockCell(buffer, 64, len(payload)).store(bytes(payload))
    assert slot.read() is NoValue.UNREADABLE


def test_a_cleared_slot_tells_nothing_of_the_former_lease():
    slot = new_slot()
    slot.publish(STATUS)
    slot.note_send(Instant(5.0))
    slot.clear()
    assert slot.read() is NoValue.EMPTY
    assert slot.last_send_instant() == 0


def test_its_clock_counts_through_suspend_and_knows_nothing_of_the_wall_clock():
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    between = boottime()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)

    assert before <= between <= after


@pytest.mark.parametrize(("now", "lag_ms"), [(102.5, 2500), (100.0, 0), (99.0, 0)])
def test_the_lag_of_outputs_is_in_milliseconds_and_never_below_zero(now, lag_ms):
    waiting = msgspec.structs.replace(STATUS, output_waiting_since_instant=Instant(100.0))

    assert waiting.output_lag_ms(Instant(now)) == lag_ms
    assert STATUS.output_lag_ms(Instant(now)) is None
