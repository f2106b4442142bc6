"""`kclrun replay` with real managers and lease processes, over a split and a merge."""

import json
import math
import signal
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kclrun.cli.leases.views import scan_leases
from kclrun.local.server import start_embedded
from tests.patience import until
from tests.processes.cli_rig import Program, Site, called, ended

pytestmark = pytest.mark.seconds

PROCESSOR = """
import time
from pathlib import Path
from kclrun import RecordProcessor

class Mine(RecordProcessor):
    def initialize(self, context):
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            n = int(record.data)
            if n == 250:
                self.hold()
            if n == 300 and Path("FOLDER/bad").exists():
                raise ValueError(n)
            self.context.emit({"n": n, "key": record.partition_key})
            if n % 10 == 0:
                self.context.emit({"tens": n}, to="tens")

    def hold(self):
        while Path("FOLDER/hold").exists():
            Path("FOLDER/held").touch()
            time.sleep(0.05)

class Doubled(Mine):
    def process_records(self, batch, checkpointer):
        for record in batch:
            n = int(record.data)
            self.context.emit({"n": n * (2 if n % 5 == 0 else 1), "key": record.partition_key})
            if n % 10 == 0:
                self.context.emit({"tens": n}, to="tens")
"""


class Orders:
    """An application whose stream is written, split and merged; the instants between."""

    def __init__(self, folder, endpoint):
        self.folder = folder
        self.site = Site(folder, endpoint, "orders", 2)
        (folder / "mine.py").write_text(PROCESSOR.replace("FOLDER", str(folder)))
        text = self.site.config.read_text().replace("kclrun.samples.hello:Hello", "mine:Mine")
        self.site.config.write_text(
            text
            + f"path: {folder}\nfetch: {{idle: 200ms}}\ncheckpoint: {{every: 200ms}}\n"
            + f"output: {{path: {folder}/live}}\n"
            + f"outputs: {{tens: {{path: {folder}/tens, roll: {{every: 1s}}}}}}\n"
        )
        self.count = 0

    def put(self, count):
        """Records spread over the keys; an instant between them and all that come later."""
        numbers = range(self.count, self.count + count)
        self.site.put([(f"key-{n % 7}", str(n)) for n in numbers])
        self.count += count
        after = math.ceil(time.time() * 1000) / 1000 + 0.001
        until(lambda: time.time() > after, every_s=0.0)
        return datetime.fromtimestamp(after, UTC).isoformat(timespec="milliseconds")

    def written(self):
        """Two instants with records 100 to 399 between them, over a split; a merge follows."""
        begin = self.put(100)
        self.put(100)
        self.site.split(self.site.open_shards()[0])
        end = self.put(200)
        self.site.merge(*self.site.open_shards()[:2])
        self.put(100)
        return begin, end

    def replay(self, *more):
        return ended("replay", "--config", self.site.config, *more)


@pytest.fixture(scope="module")
def embedded():
    with start_embedded() as running:
        yield running


@pytest.fixture
def orders(embedded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Orders(tmp_path, embedded.endpoint)
    yield made
    made.site.call("DeleteStream", StreamName="orders")


def rows_in(folder):
    files = sorted(path for path in folder.rglob("*.jsonl") if path.is_file())
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


@pytest.mark.long
def test_a_replay_has_each_row_of_its_range_once_over_reshards_and_touches_nothing_else(orders):
    begin, end = orders.written()
    code, _, reported = ended("run", "--config", orders.site.config, "--until", "caught-up")
    assert code == 0, reported
    live, tens = scan_leases(orders.site.aws), rows_in(orders.folder / "tens")
    said = ("--from", begin, "--to", end, "--as", "audit", "--folder", "again")

    code, _, reported = orders.replay(*said)

    assert code == 0, reported
    assert "leases: of its own" in reported
    assert "The replay is complete" in reported
    again = orders.folder / "again"
    rows = rows_in(again / "output")
    assert sorted(row["n"] for row in rows) == list(range(100, 400))
    assert sorted(row["tens"] for row in rows_in(again / "tens")) == list(range(100, 400, 10))
    assert scan_leases(orders.site.aws) == live
    assert rows_in(orders.folder / "tens") == tens

    code, _, reported = orders.replay(*said)  # the same command, when all is done
    assert (code, rows_in(again / "output")) == (0, rows)
    assert "This replay is complete already" in reported

    _, out, _ = called("replay", "--config", orders.site.config, "--list")
    (line,) = (line for line in out.splitlines() if line.startswith("audit"))
    name, _, state = line.partition("  ")
    assert (name.startswith("audit-2"), state) == (True, "complete: 5 of 5 shards have ended")
    remove = ("replay", "--config", orders.site.config, "--remove", name)
    assert "Would delete" in called(*remove)[1]
    assert "Deleted lease table" in called(*remove, "--yes")[1]
    assert "audit" not in called("replay", "--config", orders.site.config, "--list")[1]
    # The folder has the rows of the replay that was: a new one would take them for its own.
    code, _, reported = called("replay", "--config", orders.site.config, *said)
    assert (code, "has files already" in reported) == (78, True)


@pytest.mark.slow
def test_a_replay_that_is_killed_or_halted_goes_on_with_the_same_command(orders):
    begin, end = orders.written()
    (orders.folder / "bad").touch()  # user code cannot process record 300
    (orders.folder / "hold").touch()  # the processor stops at record 250
    said = ("replay", "--config", orders.site.config, "--from", begin, "--to", end)
    said += ("--folder", "again", "--set", "fetch.batch_max=20")
    program = Program(*said)
    try:
        until((orders.folder / "held").exists)
        program.end(signal.SIGKILL)
    finally:
        program.close()
    (orders.folder / "hold").unlink()

    code, _, reported = ended(*said, "--set", "on_error.retries=0")
    assert (code, "The replay is not complete: 1 shards are left" in reported) == (65, True), (
        reported
    )
    (orders.folder / "bad").unlink()
    code, _, reported = ended(*said)

    assert code == 0, reported
    rows = rows_in(orders.folder / "again" / "output")
    assert sorted(row["n"] for row in rows) == list(range(100, 400))
    tens = rows_in(orders.folder / "again" / "tens")
    assert sorted(row["tens"] for row in tens) == list(range(100, 400, 10))


@pytest.mark.slow
def test_a_comparison_shows_how_the_rows_of_two_versions_differ(orders):
    begin, end = orders.written()
    said = ("--from", begin, "--to", end, "--folder", "compared")

    code, out, reported = orders.replay(*said, "--compare", "mine:Doubled", "--key", "key-3")

    numbers = [n for n in range(100, 400) if n % 7 == 3]
    doubled = [n for n in numbers if n % 5 == 0]
    assert code == 1, reported
    assert f"{len(doubled)} changed, 0 only in A, 0 only in B." in out
    lines = Path("compared/differences.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert sorted((each["a"]["n"], each["b"]["n"]) for each in found) == [
        (n, 2 * n) for n in doubled
    ]
    assert all(each["changed"] == ["n"] and each["at"].isdecimal() for each in found)

    # It begins anew each time: edited code is what is compared.
    code, out, reported = orders.replay(*said, "--compare", "mine:Mine", "--key", "key-3")
    assert (code, "0 changed, 0 only in A, 0 only in B" in out) == (0, True), reported
    assert "-A " not in called("replay", "--config", orders.site.config, "--list")[1]
