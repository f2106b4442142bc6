"""An incident on a real fleet, found and repaired through the page alone; and by commands alone.

KCLRUN_PICTURES=docs/pictures .venv/bin/python -m pytest tests/processes/test_page_incident.py

writes the pictures of the how-to page again, of a fleet in /tmp/orders, and prints the times.
"""

import os
import re
import shutil
from pathlib import Path

import pytest

from kclrun.local.server import start_embedded
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import Program, called
from tests.processes.incident_rig import Clock, Incident
from tests.processes.page_browser import needs_chromium

pytestmark = [pytest.mark.slow, pytest.mark.alone]
LOST = "which had not renewed it|offered the expired lease"
TOKEN = "not-a-secret-of-anyone"
TEXT = "document.querySelector('main').innerText"


@pytest.fixture
def incident(tmp_path):
    folder = Path("/tmp/orders") if os.environ.get("KCLRUN_PICTURES") else tmp_path / "orders"
    folder.mkdir()
    with start_embedded() as embedded:
        made = Incident(folder, embedded.endpoint)
        try:
            made.begin()
            yield made
        finally:
            made.close()
            shutil.rmtree(folder)


class Person:
    """Looks at the page and uses its forms, and nothing else."""

    def __init__(self, tab, url, clock):
        self._tab, self._url, self._clock = tab, url, clock

    def see(self, path, *parts, words=""):
        """Open a page, and wait until it shows all these; it changes by itself."""
        self._tab.open(f"{self._url}{path}")
        for part in parts:
            self._tab.until(f"new RegExp({part!r}, 's').test({TEXT})")
        if words:
            self._clock.note(words)

    def text(self):
        return self._tab.value(TEXT)

    def open_details(self):
        self._tab.value("document.querySelectorAll('details').forEach(d => d.open = true)")

    def do(self, action, words, **chosen):
        """Choose in the form, look at its plan, give the token."""
        form = f'form:has(input[value="{action}"])'
        for name, value in chosen.items():
            field = f"document.querySelector('{form} select[name={name}]')"
            self._tab.value(f"{field}.value = {value!r}")
        self._tab.click(f"{form} button")
        self.picture(f"plan-{action}")
        self._tab.type('input[name="token"]', TOKEN)
        self._tab.press_enter()
        assert "Done" in self.text(), self.text()
        self._clock.note(words)

    def picture(self, name, at=None):
        if at is not None:
            self._tab.value(f"document.querySelector({at!r}).scrollIntoView()")
        folder = os.environ.get("KCLRUN_PICTURES")
        if folder:
            self._tab.picture(Path(folder) / f"incident-{name}.png", 1100, 700)


@needs_chromium
@pytest.mark.skipif(
    "CI" in os.environ, reason="a minute and a half: the gate plays it by commands alone"
)
def test_an_incident_is_found_and_repaired_through_the_page_alone(
    incident, opened, tmp_path, monkeypatch
):
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path / "laptop"))
    monkeypatch.setenv("KCLRUN_PAGE_TOKEN", TOKEN)
    config = incident.site.config
    page = Program("page", "--config", config, "--port", "0", "--every", "5s", "--actions")
    try:
        (line,) = page.until_lines(1)
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        hit, clock = incident.strike(), Clock()
        repaired = _repaired(Person(opened(with_scripts=True), url, clock), incident, hit)
    finally:
        page.end()
    for at, words in clock.lines:
        print(f"{at:6.1f} s  {words}")
    assert repaired


def _repaired(person, incident, hit):
    """Each trouble is found on the page and repaired on it, in the order of a person."""
    stuck, poison, hot, lost = (
        f"/shard?key={hit[name]}" for name in ("stuck", "poison", "hot", "lost")
    )

    person.see(lost, LOST, words="The lost machine is found")
    person.picture("lost", at="#story")

    person.see(stuck, "without progress for", words="The stuck shard is found")
    person.see(stuck, "stood still")
    person.picture("stuck", at="#live")
    person.do("move", "It is asked to move to machine-a", to=incident.owner_of("machine-a"))
    owner = f"owner\\s+{incident.owner_of('machine-a')}"
    person.see(stuck, owner, "read\\s+[0-9.]+ records/s", words="machine-a reads it")

    person.see(poison, "kept as a dead letter", words="The poison record is found")
    person.see("/outputs", "1 dead letters?", words="and its stack")
    person.open_details()
    person.picture("letters")
    incident.repair()
    person.do("redrive", "It is redriven by the fixed processor", to="processor")
    person.see("/outputs", "There are none")

    person.see(hot, "Hot: ", "share of the traffic", words="The hot key is found, by its hash key")
    person.picture("hot", at="#live")
    incident.cool()
    person.see(hot, "is not hot any more", words="Its producers spread it: it is not hot any more")
    person.see("/", "shards to read", "^(?!.*with a silent owner)", "^(?!.*is halted since)")
    person.picture("over")
    return True


class Terminal:
    """Runs commands, and nothing else."""

    def __init__(self, config, clock):
        self._config, self._clock = config, clock

    def run(self, *verb, words=""):
        code, said, reported = called(*verb, "--config", self._config)
        if words:
            self._clock.note(f"{words}: kclrun {' '.join(verb)}")
        return code, said + reported

    def see(self, *verb, part, words=""):
        """Until the command says it."""
        until(lambda: re.search(part, self.run(*verb)[1]), HUNG_S, every_s=0.5)
        self.run(*verb, words=words)


def test_the_same_incident_is_found_and_repaired_by_commands_alone(incident, tmp_path, monkeypatch):
    monkeypatch.setenv("KCLRUN_STATE_DIR", str(tmp_path / "laptop"))
    hit, clock = incident.strike(), Clock()
    terminal = Terminal(incident.site.config, clock)
    stuck, poison, hot, lost = (hit[name] for name in ("stuck", "poison", "hot", "lost"))
    machine_a = incident.owner_of("machine-a")

    terminal.see("why", lost, part=LOST, words="The lost machine is found")
    terminal.see("why", stuck, part="It stood still", words="The stuck shard is found")
    code, _ = terminal.run(
        "leases", "move", stuck, "--to", machine_a, "--wait", "2m", "--yes", words="It is moved"
    )
    assert code == 0
    terminal.see("why", poison, part="kept as a dead letter", words="The poison record is found")
    incident.repair()
    code, said = terminal.run("dead-letters", "redrive", "--yes", words="It is redriven")
    assert (code, "Processed 1 of 1 dead letters" in said) == (0, True)

    owner = incident.leases()[hot].owner
    machine = next(name for name in ("machine-a", "machine-b") if incident.owner_of(name) == owner)
    (listening,) = incident.machines[machine].events("endpoint_listening")
    asked = ("leases", "--hot", "--endpoint", listening["endpoint"])
    terminal.see(*asked, part="HOT", words="The hot key is found")
    incident.cool()
    terminal.see("why", hot, part="is not hot any more", words="Its producers spread it")
    for at, words in clock.lines:
        print(f"{at:6.1f} s  {words}")
