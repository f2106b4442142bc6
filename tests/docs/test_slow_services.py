"""The processor and the test of "Calling slow services" run as they stand on the page."""

import sys

import pytest
import yaml

from kclrun.record_calls.fitting import require_fit
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
    settings, processor, test = [block.text for block in blocks_of(PAGE.read_text())]
    for name, text in (("prices", PRICES), ("priced", processor), ("test_priced", test)):
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
