"""What lease processes and their manager share: rings, cells, slots and reports, whatever
bytes arrive and in whatever order."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kclrun.errors import MalformedFrame
from kclrun.ipc.messages import ERROR_BYTES_MAX, TRACEBACK_BYTES_MAX, decode_report, encode_report
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol import reports
from kclrun.protocol.status import LeaseStatus, WorkerState
from tests.examples import examples
from tests.unit.ipc.test_event_ring import HEADER, SMALL, ring
from tests.unit.ipc.test_event_ring import fresh as fresh_ring
from tests.unit.ipc.test_reports import EACH
from tests.unit.ipc.test_status_slot import new_slot
from tests.unit.ipc.test_twin_cell import SIZE, VALUES, cell
from tests.unit.ipc.test_twin_cell import fresh as fresh_cell

steps = st.lists(
    st.one_of(
        st.binary(max_size=120).map(lambda payload: ("put", payload)),
        st.integers(0, 4).map(lambda count: ("drain", count)),
        st.just(("gap", None)),
        st.sampled_from(["writer dies", "reader anew"]).map(lambda what: (what, None)),
    ),
    max_size=60,
)


@examples(200)
@given(steps)
def test_a_ring_is_a_queue_that_refuses_when_full(script):
    buffer = fresh_ring()
    writer, reader, queue, dropped = ring(buffer), ring(buffer), [], 0
    for what, value in script:
        match what:
            case "put" if writer.put(value):
                queue.append(value)
            case "put":
                dropped += 1
                taken = sum(-(-(HEADER + len(payload)) // 8) * 8 for payload in queue)
                assert taken + HEADER + len(value) > SMALL, "there was room"
            case "drain":
                assert reader.drain(value) == queue[:value]
                del queue[:value]
            case "gap":
                assert reader.gap() == dropped
                dropped = 0
            case "writer dies":
                writer = ring(buffer)
            case "reader anew":
                reported = reader._gap_reported
                reader = ring(buffer)
                reader._gap_reported = reported
    assert reader.drain() == queue


@given(arrived=st.lists(st.booleans(), min_size=8, max_size=64), earlier=st.integers(0, 9))
def test_a_put_whose_bytes_arrive_in_any_order_is_seen_whole_or_not_at_all(arrived, earlier):
    before = fresh_ring()
    writer, reader = ring(before), ring(before)
    for _ in range(earlier):
        writer.put(b"earlier" * 4)
        reader.drain()
    after = bytearray(before)
    ring(after).put(b"in flight" * 3)

    words = zip(before, after, itertools.cycle(arrived), strict=False)
    seen = bytearray(new if there else old for old, new, there in words)

    assert ring(seen).drain() in ([], [b"in flight" * 3])


@given(
    arrived=st.lists(st.booleans(), min_size=200, max_size=200),
    stores=st.integers(min_value=0, max_value=4),
)
def test_a_store_whose_bytes_arrive_in_any_order_is_seen_whole_or_not_at_all(arrived, stores):
    before = fresh_cell()
    writer = cell(before)
    for value in VALUES[:stores]:
        writer.store(value)
    after = bytearray(before)
    cell(after).store(VALUES[stores])

    seen = bytearray(
        new if there else old
        for old, new, there in zip(before, after, itertools.cycle(arrived), strict=False)
    )

    assert cell(seen).load() in (cell(before).load(), VALUES[stores])


@given(at=st.integers(0, 2 * (8 + SIZE + 12) - 1), bit=st.integers(0, 7))
def test_one_flipped_bit_is_never_taken_for_a_value(at, bit):
    buffer = fresh_cell()
    writer = cell(buffer)
    writer.store(VALUES[0])
    writer.store(VALUES[1])

    buffer[at] ^= 1 << bit

    assert cell(buffer).load() in (VALUES[0], VALUES[1])


numbers = st.integers(0, 10**129 - 1).map(str)


positions = st.none() | st.builds(
    ExtendedSequenceNumber,
    numbers | st.sampled_from(["SHARD_END", "LATEST"]),
    st.integers(0, 2**62),
)


whole = st.integers(-1, 2**63 - 1)


real = st.floats(0, 1e12)


statuses = st.builds(
    LeaseStatus,
    pid=whole,
    incarnation=whole,
    state=st.sampled_from(WorkerState),
    fence_instant=real,
    counter=whole,
    records_total=whole,
    bytes_total=whole,
    batches_total=whole,
    processing_s_total=real,
    millis_behind_latest=whole,
    fetched=positions,
    processed=positions,
    checkpointed=positions,
    first_delivered=positions,
    last_fetch_instant=real,
    last_batch_instant=real,
    processing_since_instant=real,
    at_tip=st.booleans(),
)


@given(statuses)
def test_every_status_is_read_as_it_was_published(status):
    slot = new_slot()
    slot.publish(status)
    assert slot.read() == status


@given(st.text(st.characters(), max_size=4000))
def test_any_text_of_user_code_travels_and_is_bounded(text):
    failed = decode_report(encode_report(reports.ProcessorFailed("w", text, 1, None, text * 3)))
    assert len(failed.error.encode()) <= ERROR_BYTES_MAX
    assert len(failed.traceback_text.encode()) <= TRACEBACK_BYTES_MAX


def is_one_or_malformed(payload):
    """A transition that travels on as it is, or a MalformedFrame. By its words: NaN is not NaN."""
    try:
        found = decode_report(payload)
    except MalformedFrame:
        return True
    return repr(decode_report(encode_report(found))) == repr(found)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_transition_or_a_malformed_frame(payload):
    assert is_one_or_malformed(payload)


@given(st.sampled_from(EACH), st.integers(0, 400), st.integers(0, 255))
def test_a_transition_with_one_byte_changed_is_another_one_or_a_malformed_frame(
    transition, at, byte
):
    payload = bytearray(encode_report(transition))
    payload[at % len(payload)] = byte

    assert is_one_or_malformed(bytes(payload))
