"""Run it with pytest; it needs no AWS."""

from kclrun.testing import run_processor
from processors.orders import Orders


def test_each_order_is_a_row() -> None:
    run = run_processor(Orders, [b'{"id": 7, "customer": "ada", "cents": 1250, "note": "blue"}'])

    assert list(run.rows) == [{"id": 7, "customer": "ada", "cents": 1250}]
