"""The actions of the page in a real browser, without scripts; and a page of an attacker."""

import pytest

from kclrun.model.lease import Halt, Pause
from tests.processes.page_browser import needs_chromium
from tests.support.http_service import HttpService
from tests.unit.page.fleet import NOW, A, B, key, lease
from tests.unit.page.test_page_actions import TOKEN, Site

pytestmark = [pytest.mark.slow, needs_chromium]
HALT = Halt("ValueError: bad row\nin line 7", NOW)


@pytest.fixture
def site():
    made = Site(lease(0), lease(1, B, halt=HALT))
    yield made
    made.server.close()


def test_a_person_pauses_a_shard_and_resumes_a_halt_without_scripts(site, opened):
    tab = opened()
    tab.open(f"{site.server.url}/shard?key={key(0)}")

    tab.click('form:has(input[value="pause"]) button')
    assert "reads no more" in tab.html()
    tab.type('input[name="token"]', "a wrong one")
    tab.press_enter()
    assert "The token is wrong" in tab.html()
    assert (site.written, site.rows.read(key(0)).pause) == (0, None)

    tab.open(f"{site.server.url}/shard?key={key(0)}")
    tab.click('form:has(input[value="pause"]) button')
    tab.type('input[name="token"]', TOKEN)
    tab.click('form[method="post"] button')
    assert "written" in tab.html()
    assert site.rows.read(key(0)).pause == Pause(NOW, NOW + 1_800)
    tab.open(f"{site.server.url}/shard?key={key(0)}")
    assert "Paused since" in tab.html()

    tab.open(f"{site.server.url}/shard?key={key(1)}")
    tab.click('form:has(input[value="resume"]) button')
    assert "it was halted because: ValueError: bad row" in tab.html()
    tab.type('input[name="token"]', TOKEN)
    tab.press_enter()
    assert site.rows.read(key(1)).halt is None


def test_a_page_of_another_site_gets_nothing_even_with_the_token(site, opened):
    fields = site.fields(site.plan(do="release", key=key(0))[1]) | {"token": TOKEN}
    inputs = "".join(f'<input name="{n}" value="{v}">' for n, v in fields.items())
    page = f'<form method="post" action="{site.server.url}/act">{inputs}</form>'.encode()

    with HttpService(lambda *_: (200, {"Content-Type": "text/html"}, page)) as attacker:
        tab = opened(with_scripts=True)
        tab.open(attacker.url)
        tab.submit()
        assert "serves no page of another site" in tab.html()

    assert site.written == 0
    assert site.rows.read(key(0)).owner == A
    assert site.rows.read(key(0)).handoff is None
