"""The processor and the test of "Calling slow services" run as they stand on the page."""

import sys

import pytest
import yaml

from kclrun.calling.method_checks import require_fit
from kclrun.testing import assert_any_order_gives_the_same, make_record, run_processor
from tests.docs import pages
from tests.docs.blocks import blocks_of

PAGE = pages.DOCS / "how-to" / "call-slow-services.md"

# The client that the page imports: it answers after a while, and is busy at times.
PRICES = """
import asyncio


class Busy(Exception):
    retry_after_s = 30.0


class Prices:
    asked = 0

    async def of(self, sku):
        Prices.asked += 1
        if Prices.asked % 7 == 0:
            raise Busy
        await asyncio.sleep(0.02)
        return 2
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The Python blocks of the page as modules; and its settings."""
    settings, processor, windows, test = [block.text for block in blocks_of(PAGE.read_text())]
    modules = {"prices": PRICES, "priced": processor, "turnover": windows, "test_priced": test}
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return yaml.safe_load(settings)


def test_the_processor_of_the_page_gives_the_same_in_any_order_and_fits_its_settings(page):
    import priced
    import test_priced

    test_priced.test_any_order_of_answers_gives_the_same_rows()
    module, _, name = page["processor"].partition(":")
    assert (module, name) == ("priced", "Priced")
    assert require_fit(priced.Priced, "Priced", None, is_manual=False)


def test_the_windows_of_the_page_are_the_same_in_any_order(page):
    from turnover import Turnover

    records = [
        make_record(
            b'{"sku": "a", "quantity": %d}' % n, key=f"shop-{n % 5}", ordinal=n, arrived_at_s=n * 9
        )
        for n in range(50)
    ]
    given = {"settings": {"decode": "json", "on_error": {"retries": 99}}}
    assert_any_order_gives_the_same(Turnover, records, **given)
    run = run_processor(Turnover, records, **given)
    assert [row["sum"] for row in run.rows if row["from"] == 60] == [20, 22, 14 + 24, 16 + 26, 18]
