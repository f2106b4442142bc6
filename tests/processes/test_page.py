"""`kclrun page` as a program, beside a fleet on the embedded AWS; and the page in a browser."""

import contextlib
import http.client
import itertools
import re
import signal
import threading
import time
from urllib.parse import urlsplit

import msgspec
import pytest

from kclrun.local.server import start_embedded
from kclrun.model.lease import Halt
from kclrun.model.time import WallTime
from kclrun.observe.members import ErrorBody, LeaseDetail
from kclrun.page.detail_view import AskedOwner
from kclrun.page.server import serve_pages
from tests.patience import HUNG_S
from tests.processes.cli_rig import Program, Site
from tests.processes.page_browser import browser, needs_chromium
from tests.support.programs import run_to_end
from tests.unit.page.fleet import ABOUT, NOW, A, behind, key, lease, snapshot_of
from tests.unit.page.test_page_details import Given


@pytest.fixture
def programs():
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            program = Program(*arguments)
            stack.callback(program.close)
            return program

        yield start


@pytest.fixture
def site(tmp_path):
    with start_embedded() as embedded:
        yield Site(tmp_path, embedded.endpoint, "page", 2)


def fetched(url, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=HUNG_S)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def until_shown(url, path, *parts):
    over = time.monotonic() + HUNG_S
    while True:
        _, page = fetched(url, path)
        if all(re.search(part, page) for part in parts):
            return page
        assert time.monotonic() < over, page
        time.sleep(0.2)


def url_of(program):
    (line,) = program.until_lines(1)
    return re.search(r"http://127\.0\.0\.1:\d+", line)[0]


def rendered(profile, url):
    """The document that the browser has made of the page, after it was loaded."""
    done = run_to_end(browser(profile, "--dump-dom", url), check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_begins_before_the_first_start_and_shows_the_fleet_and_a_split_as_they_come(
    site, programs, number
):
    page = programs("page", "--config", site.config, "--port", "0", "--every", "5s")
    url = url_of(page)
    until_shown(url, "/", "there is no lease table page", ">2</b><a[^>]*>without an owner")

    site.put([(f"key{n}", "x") for n in range(100)])
    output = site.config.with_name("rows")
    fleet = programs("run", "--config", site.config, "--set", f"output.path={output}")
    until_shown(url, "/", r"1 owner\.", "renewing", ">2</b><a[^>]*>owned", "table is healthy")
    until_shown(url, "/shards", "<svg", r"2 shards, the most urgent first")

    site.split(site.open_shards()[0])
    until_shown(url, "/lineage", "shardId-000000000002", "split of ")
    assert "kclrun.samples.hello:Hello" in fetched(url, "/settings")[1]
    assert fetched(url, "/", Host="evil.example")[0] == 403

    assert page.end(number) == 0
    assert fleet.end() == 0


def test_a_manager_serves_the_page_while_it_runs(site, programs):
    site.put([(f"key{n}", "x") for n in range(10)])
    settings = [f"output.path={site.config.with_name('rows')}", "observe.page=0", "log.format=text"]
    fleet = programs("run", "--config", site.config, *(f"--set={each}" for each in settings))
    fleet.until_reported("The page of the fleet: ")
    found = re.search(r"page of the fleet: (http://127\.0\.0\.1:\d+)/", " ".join(fleet.reported))

    page = until_shown(found[1], "/", r"1 owner\.", ">2</b><a[^>]*>owned")

    assert "This page only reads" in page
    assert fetched(found[1], "/act?do=pause")[0] == 404
    assert fleet.end() == 0


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(site, programs):
    first = programs("page", "--config", site.config, "--port", "0")
    port = urlsplit(url_of(first)).port

    second = programs("page", "--config", site.config, "--port", str(port))

    assert second.wait() == 78
    assert any(f"cannot listen on 127.0.0.1:{port}" in line for line in second.reported)


@pytest.mark.slow
@needs_chromium
def test_in_a_browser_a_thousand_shards_are_shown_with_their_strips(tmp_path):
    leases = [lease(number) for number in range(1_000)]
    lags = {each.key: behind(number, 1.0) for number, each in enumerate(leases)}
    history = {each.key: bytes([1, 2, 1]) for each in leases}
    fleet = snapshot_of(*leases, lags=lags, history=history)
    server = serve_pages("127.0.0.1", 0, ABOUT, lambda: fleet)
    try:
        document = rendered(tmp_path, f"{server.url}/shards?live=off")
    finally:
        server.close()

    assert document.count('<th scope="row"') == 1_000
    # Two levels a strip, which are siblings; and six of the legend.
    assert document.count("</path><path") == 1_000
    assert document.count("<path") == 2_006
    assert f"key={key(999)}" in document


@pytest.mark.slow
@needs_chromium
def test_in_a_browser_without_scripts_the_page_loads_itself_again(opened):
    numbers, shown_twice = itertools.count(1), threading.Event()
    about = msgspec.structs.replace(ABOUT, refresh_s=1)

    def look():
        if next(numbers) == 3:
            shown_twice.set()
        return snapshot_of(lease(0))

    server = serve_pages("127.0.0.1", 0, about, look)
    try:
        opened().open(f"{server.url}/")
        assert shown_twice.wait(HUNG_S)
    finally:
        server.close()


@pytest.mark.slow
@needs_chromium
def test_in_a_browser_news_change_the_page_and_are_said_and_keep_the_focus_and_open_details(opened):
    errors = (ErrorBody(NOW, "processor_raised", "ValueError: bad", "mine.py:7", "9", 3, "Trace"),)
    detail = LeaseDetail(
        application="orders", owner=A, shard=key(0), state="running", errors=errors
    )
    fleet = [snapshot_of(lease(0), table_at=NOW)]
    given = Given(asked=AskedOwner(detail=detail, read_at=NOW))
    about = msgspec.structs.replace(ABOUT, has_actions=True)
    server = serve_pages("127.0.0.1", 0, about, lambda: fleet[0], details=given)
    tab = opened(with_scripts=True)
    try:
        tab.open(f"{server.url}/shard?key={key(0)}")
        tab.value("window.mark = 1; document.querySelector('summary').focus()")
        tab.value("document.querySelector('details').open = true")
        assert "Halted since" not in tab.value("document.body.innerText")

        halted = lease(0, halt=Halt("ValueError: bad row", NOW))
        fleet[0] = snapshot_of(halted, table_at=WallTime(NOW + 10))

        tab.until("document.querySelector('main').innerText.includes('Halted since')")
        assert tab.value("document.querySelector('#news').innerText") == "Shards: 1 halted."
        assert tab.value("document.querySelector('#news').ariaLive") == "polite"
        assert tab.value("document.activeElement.tagName") == "SUMMARY"
        assert tab.value("document.querySelector('details').open")
        assert tab.value("window.mark") == 1, "the page was loaded anew"
    finally:
        server.close()
    # The server has ended, and with it the events; the page stays as it was.
    assert tab.value("document.querySelectorAll('main').length") == 1
