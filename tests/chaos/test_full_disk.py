"""A disk that is full, of rows or of state: who notices, who does not, and that it heals.

The disk is a small tmpfs, so these need the right to mount one.
"""

import contextlib
import os
import signal
import subprocess
import time

import pytest

from tests.processes.ledger_rig.application import until
from tests.processes.ledger_rig.deliveries import judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

FAILOVER_S = 3.0
_PAGE_BYTES = 4096


class SmallDisk:
    """Mounted at `place`; `fill` leaves no room, `clear` gives it back."""

    def __init__(self, place):
        place.mkdir(parents=True, exist_ok=True)
        self._place = place
        self._filler = place / "filler"
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(place)]
        self.is_mounted = subprocess.run(mount, capture_output=True).returncode == 0

    def fill(self):
        """Also what others free meanwhile."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(_PAGE_BYTES))

    def clear(self):
        self._filler.unlink()

    def close(self):
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self._place)], check=True)


@pytest.fixture
def small_disk():
    made = []

    def make(place):
        made.append(SmallDisk(place))
        if not made[-1].is_mounted:
            pytest.skip("needs the right to mount a tmpfs")
        return made[-1]

    yield make
    for disk in made:
        disk.close()


def complaints(app):
    return {line["detail"] for line in app.of("lease_process_warned")}


def test_rows_wait_for_room_and_only_the_machine_of_that_disk_waits(
    embedded_aws, application, producer, small_disk
):
    stream = embedded_aws.stream(shards=4)
    full, other = (
        application(
            stream,
            machine=name,
            leases={"failover": f"{FAILOVER_S:g}s", "max": 2},
            checkpoint={"every": "500ms", "uncheckpointed_max": 500},
            output={"path": "rows"},
            options={"emits": True},
        )
        for name in "ab"
    )
    disk = small_disk(full.folder / "rows")
    full.start()
    other.start()
    source = producer(stream, 10**6, seed=5, rate=400).start()
    full.until(lambda: len(full.lease_pids()) == len(other.lease_pids()) == 2)
    former = {*full.lease_pids(), *other.lease_pids()}
    full.until_delivered(2_000)

    disk.fill()

    full.until(lambda: len(complaints(full)) == 2)
    disk.fill()
    rows = embedded_aws.rows(full.table)
    began, seen = time.monotonic(), len(full.ledger.batches)
    # Three failovers: long enough for a lease that is not renewed to be lost.
    full.until(lambda: time.monotonic() > began + 3 * FAILOVER_S)
    later = embedded_aws.rows(full.table)
    assert all("No space left on device" in each for each in complaints(full))
    assert complaints(other) == set()
    waiting = [batch for batch in full.ledger.batches[seen:] if batch.manager == "a"]
    # They read ahead of their checkpoint as far as they may, and then stand still.
    assert sum(len(batch.records) for batch in waiting) <= 2 * 500
    assert len([b for b in full.ledger.batches[seen:] if b.manager == "b"]) > len(waiting)
    assert {*full.lease_pids(), *other.lease_pids()} == former
    for key, row in rows.items():
        assert later[key]["leaseOwner"] == row["leaseOwner"], "nobody lost a lease for that"
        assert int(later[key]["leaseCounter"]) > int(row["leaseCounter"])

    disk.clear()

    source.stop()
    full.until_all_delivered(source)
    assert full.stop() == other.stop() == 0
    verdict = judge(source.put, full.ledger.read())
    assert (verdict.faults, verdict.duplicates) == ([], 0)
    paths = [path for app in (full, other) for path in app.folder.glob("rows/*.jsonl")]
    assert sum(len(path.read_text().splitlines()) for path in paths) == source.total_put
    assert [line for line in full.lines() if line["level"] == "error"] == []


def test_a_full_disk_of_state_stops_starts_and_nothing_that_runs(
    embedded_aws, application, producer, small_disk
):
    stream = embedded_aws.stream(shards=2)
    app = application(stream)
    disk = small_disk(app.state)
    app.start()
    source = producer(stream, 10**6, seed=6, rate=400).start()
    app.until_delivered(500)

    disk.fill()

    victim = app.lease_pids()[0]
    os.kill(victim, signal.SIGKILL)
    app.until(lambda: len(app.lease_pids()) == 2 and victim not in app.lease_pids())
    app.until_delivered(len(app.ledger.delivered) + 500)
    app.process.kill()
    app.process.wait()
    disk.fill()
    refused = app.start().process.wait(30)
    assert refused == 78, "the operator's to mend"
    assert "No space left on device" in app.last_words()
    assert "KCLRUN_STATE_DIR" in app.last_words()
    assert len(list(app.state.rglob("*.lock"))) == 1, "the one of the killed manager"

    disk.clear()

    app.start()
    until(lambda: len(app.lease_pids()) == 2)
    source.stop()
    app.until_all_delivered(source)
    assert app.stop() == 0
    verdict = judge(source.put, app.ledger.read(), killed={victim}, cap=2000)
    assert verdict.faults == []
