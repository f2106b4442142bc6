"""The canned pages are what the service sends: whole, ascending, and each its own."""

import pytest
from bench.canned_kinesis import CannedKinesis
from bench.canned_pages import SHAPES, Page, iterator_of

from kclrun.codec.get_records import decode_get_records
from kclrun.codec.kpl import open_aggregates

SMALL = "small-1"


@pytest.mark.parametrize("name", SHAPES)
def test_a_page_holds_what_its_shape_says(name):
    shape = SHAPES[name]

    page = decode_get_records(bytes(Page(shape).numbered(f"{name}-1", 12)))

    opened = open_aggregates(page.records)
    assert len(page.records) == shape.records
    assert len(opened) == shape.records_a_page
    assert {len(record.data) for record in opened} <= {shape.payload_bytes}
    assert not any(record.malformed for record in opened)
    assert page.next_iterator == iterator_of(f"{name}-1", 13)


def test_positions_ascend_from_page_to_page():
    page = Page(SHAPES["large"])

    numbers = [
        record.sequence_number
        for number in (0, 1, 9, 10, 99_999_999)
        for record in decode_get_records(bytes(page.numbered("large-1", number))).records
    ]

    assert numbers == sorted(set(numbers))
    assert {len(number) for number in numbers} == {56}


def test_a_page_at_the_tip_is_at_the_tip():
    assert decode_get_records(bytes(Page(SHAPES["empty"]).numbered("empty-1", 3))) == (
        decode_get_records(
            b'{"MillisBehindLatest":0,"NextShardIterator":"%s","Records":[]}'
            % iterator_of("empty-1", 4).encode()
        )
    )


@pytest.mark.seconds
def test_the_canned_service_goes_on_after_a_checkpoint():
    kinesis = CannedKinesis()
    first = kinesis.answer(
        "Kinesis_20131202.GetRecords", b'{"ShardIterator":"%s"}' % iterator_of(SMALL, 4).encode()
    )
    last = decode_get_records(bytes(first)).records[-1].sequence_number

    answer = kinesis.answer(
        "Kinesis_20131202.GetShardIterator",
        b'{"ShardId":"small-1","ShardIteratorType":"AFTER_SEQUENCE_NUMBER",'
        b'"StartingSequenceNumber":"%s"}' % last.encode(),
    )

    assert iterator_of(SMALL, 5).encode() in answer
