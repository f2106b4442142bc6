"""A disk that is full, of rows or of state: who notices, who does not, and that it heals.

The disk is a small tmpfs, so these need the right to mount one.
"""

import contextlib
import os
import signal
import subprocess
import time

import pytest

from tests.patience import HUNG_S, until
from tests.processes.ledger_rig.deliveries import judge
from tests.support.programs import needs

pytestmark = pytest.mark.slow

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

FAILOVER_S = 3.0
SHARDS = {f"shardId-{number:012}" for number in range(4)}
_PAGE_BYTES = 4096
# The product waits half a minute for room before it gives a lease to another machine.
OUTPUT_WAIT_S = 6.0
HASTY = f"""
from kclrun.lease import shard_end
shard_end.OUTPUT_WAIT_S = {OUTPUT_WAIT_S}
"""


def hasty(app):
    """Its lease processes wait for room as long as this file says."""
    (app.folder / "sitecustomize.py").write_text(HASTY)
    app.more_environment = {"PYTHONPATH": f"{app.folder}:{app.environment['PYTHONPATH']}"}
    return app


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

    needs("mount", "umount")

    def make(place):
        made.append(SmallDisk(place))
        if not made[-1].is_mounted:
            pytest.skip("needs the right to mount a tmpfs")
        return made[-1]

    yield make
    for disk in made:
        disk.close()


def is_error(line):
    return line["level"] == "error"


def complaints(app):
    """The shards whose processes warned of a full disk."""
    return {x["shard"] for x in app.warned() if "No space left on device" in x["detail"]}


def test_what_a_full_disk_holds_up_is_read_by_another_machine_and_nothing_is_lost(
    embedded_aws, application, producer, small_disk
):
    stream = embedded_aws.stream(shards=4)
    full, other = (
        hasty(
            application(
                stream,
                machine=name,
                leases={"failover": f"{FAILOVER_S:g}s"},
                checkpoint={"every": "500ms", "uncheckpointed_max": 500},
                output={"path": "rows"},
                options={"emits": True},
            )
        )
        for name in "ab"
    )
    disk = small_disk(full.folder / "rows")
    full.start()
    other.start()
    source = producer(stream, 10**6, seed=5, rate=400).start()
    full.until(lambda: len(full.lease_pids()) == len(other.lease_pids()) == 2)
    full.until_delivered(2_000)
    former = set(full.lease_pids())

    disk.fill()

    full.until(lambda: len(complaints(full)) >= 2)
    disk.fill()
    seen = len(full.ledger.batches)
    full.until(lambda: {b.shard for b in full.ledger.batches[seen:] if b.manager == "b"} == SHARDS)
    waiting = [batch for batch in full.ledger.batches[seen:] if batch.pid in former]
    # They read ahead of their checkpoint as far as they may, and then stand still.
    assert sum(len(batch.records) for batch in waiting) <= 2 * 500
    assert complaints(other) == set()
    full.until(lambda: full.of("capacity_short"))
    source.stop()
    full.until_all_delivered(source)

    disk.clear()

    assert full.stop() == other.stop() == 0
    full.judged(source, killed=former, cap=500)
    paths = [path for app in (full, other) for path in app.folder.glob("rows/*.jsonl")]
    assert sum(len(path.read_text().splitlines()) for path in paths) == source.total_put
    errors = {line["event"] for app in (full, other) for line in app.lines() if is_error(line)}
    assert errors <= {"start_failed"}, "no lease is halted"


def test_rows_wait_for_room_where_no_other_machine_is_there(
    embedded_aws, application, producer, small_disk
):
    stream = embedded_aws.stream(shards=2)
    app = hasty(
        application(
            stream,
            leases={"failover": f"{FAILOVER_S:g}s"},
            checkpoint={"every": "500ms", "uncheckpointed_max": 500},
            output={"path": "rows"},
            options={"emits": True},
        )
    )
    disk = small_disk(app.folder / "rows")
    app.start()
    source = producer(stream, 10**6, seed=8, rate=400).start()
    app.until_delivered(1_000)
    former = set(app.lease_pids())
    disk.fill()
    app.until(lambda: len(complaints(app)) >= 2)
    disk.fill()
    rows = embedded_aws.rows(app.table)

    # Longer than where another machine could read them; and many failovers.
    began = time.monotonic()
    app.until(lambda: time.monotonic() > began + OUTPUT_WAIT_S + 2 * FAILOVER_S)

    assert set(app.lease_pids()) == former
    for key, row in embedded_aws.rows(app.table).items():
        assert row["leaseOwner"] == rows[key]["leaseOwner"]
        assert int(row["leaseCounter"]) > int(rows[key]["leaseCounter"])
    disk.clear()
    source.stop()
    app.until_all_delivered(source)
    assert app.stop() == 0
    verdict = judge(source.put, app.ledger.read())
    assert (verdict.faults, verdict.duplicates) == ([], 0)
    written = sum(len(path.read_text().splitlines()) for path in app.folder.glob("rows/*.jsonl"))
    assert written == source.total_put
    assert [line for line in app.lines() if is_error(line)] == []


def test_a_run_until_caught_up_whose_rows_found_no_room_does_not_end_with_0(
    embedded_aws, application, producer, small_disk
):
    stream = embedded_aws.stream(shards=1)
    app = application(
        stream,
        leases={"failover": f"{FAILOVER_S:g}s"},
        checkpoint={"every": "1h"},
        output={"path": "rows"},
        options={"emits": True},
    )
    disk = small_disk(app.folder / "rows")
    app.start("--until", "caught-up")
    app.until(lambda: app.of("lease_claimed"))
    disk.fill()
    source = producer(stream, 300, seed=7).start()
    source.join()

    app.until(lambda: app.process.poll() is not None)

    assert app.process.returncode == 75
    ((shard, row),) = embedded_aws.rows(app.table).items()
    assert row["checkpoint"] == "TRIM_HORIZON"
    (missed,) = app.of("checkpoint_missed")
    assert (missed["shard"], missed["checkpoint"]) == (shard, "TRIM_HORIZON")
    (lost,) = app.of("process_lost_lease")
    assert "No space left on device" in lost["reason"]
    assert app.of("manager_stopped")[0]["reason"] == "stopped before it was drained"


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
    refused = app.start().process.wait(HUNG_S)
    assert refused == 78, "the operator's to repair"
    assert "No space left on device" in app.last_words()
    assert "KCLRUN_STATE_DIR" in app.last_words()
    assert len(list(app.state.rglob("*.lock"))) == 1, "the one of the killed manager"

    disk.clear()

    app.start()
    until(lambda: len(app.lease_pids()) == 2)
    app.finish(source, killed={victim}, cap=2000)
