"""A terminal that is closed ends what runs on it as SIGTERM does, and leaves no lease owned."""

import itertools
import os
import signal

import pytest

from tests.patience import until
from tests.processes.cli_rig import Site
from tests.processes.cli_rig.terminal import OnTerminal

pytestmark = pytest.mark.slow
NUMBERS = itertools.count()
PROCESSOR = """
from kclrun import RecordProcessor

class Quiet(RecordProcessor):
    def process_records(self, records, context):
        context.checkpoint()
"""


@pytest.fixture
def site(endpoint, tmp_path):
    made = Site(tmp_path, endpoint, f"closed-{next(NUMBERS)}", 2)
    (tmp_path / "quiet.py").write_text(PROCESSOR)
    made.config.write_text(
        made.config.read_text().replace("kclrun.samples.hello:Hello", "quiet:Quiet")
    )
    return made


@pytest.fixture
def on_terminal(tmp_path):
    started = []

    def start(*arguments, **more):
        started.append(OnTerminal(*arguments, cwd=tmp_path, **more))
        return started[-1]

    yield start
    for program in started:
        program.close()


def owners(site):
    return [lease.owner for page in site.aws.table.scan() for lease in page.leases]


@pytest.mark.parametrize("log", ["auto", "json"])
def test_a_run_whose_terminal_is_closed_drains_and_releases_its_leases(site, on_terminal, log):
    program = on_terminal("--config", site.config, "--set", f"log.format={log}")
    program.until_shown({"auto": b"2 leases here", "json": b'"lease_claimed"'}[log])

    program.close_terminal()

    assert program.wait() == 0
    assert owners(site) == [None, None]


def test_a_run_that_began_with_hang_ups_ignored_outlives_its_terminal(site, on_terminal):
    program = on_terminal("--config", site.config, nohup=True)
    program.until_shown(b"2 leases here")
    held = owners(site)

    program.close_terminal()
    counters = {lease.key: lease.counter for page in site.aws.table.scan() for lease in page.leases}

    def are_renewed():
        leases = [lease for page in site.aws.table.scan() for lease in page.leases]
        return all(lease.counter > counters[lease.key] + 1 for lease in leases)

    until(are_renewed)
    assert owners(site) == held
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.wait() == 0


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        (("tail",), b"Ctrl-C ends it"),
        (("tail", "--json"), b"Ctrl-C ends it"),
        (("top", "--every", "5s"), b"no write"),
        (("page", "--port", "0"), b"Ctrl-C ends it"),
    ],
)
def test_a_verb_that_goes_on_ends_when_its_terminal_is_closed(site, on_terminal, verb, shown):
    program = on_terminal(*verb, "--config", site.config)
    program.until_shown(shown)

    program.close_terminal()

    assert program.wait() == 0


def test_an_embedded_aws_ends_when_its_terminal_is_closed(on_terminal):
    program = on_terminal("local", "--port", "0")
    program.until_shown(b"Ctrl-C ends them")

    program.close_terminal()

    assert program.wait() == 0
