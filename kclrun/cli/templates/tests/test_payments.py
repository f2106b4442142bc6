"""Run it with pytest; it needs no AWS."""

from kclrun.testing import run_processor
from processors.payments import Payments


def test_an_amount_becomes_cents() -> None:
    run = run_processor(Payments, [b'{"id": 7, "amount": "12.50"}'])

    assert list(run.rows) == [{"id": 7, "cents": 1250}]


def test_a_record_that_cannot_be_read_is_given_up_and_the_others_are_not() -> None:
    records = [b'{"id": 1, "amount": "1.00"}', b'{"id": 2}', b'{"id": 3, "amount": "3.00"}']

    run = run_processor(Payments, records, settings={"on_error": {"then": "dead-letter"}})

    assert [row["id"] for row in run.rows] == [1, 3]
    assert [record.data for record in run.given_up] == [b'{"id": 2}']
