"""A process that emits is killed again and again: the file must tell the truth every time."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.outputs.emitted_rows import EmittedRows
from tests.patience import HUNG_S, until
from tests.seeds import seed_of

PROGRAM = Path(__file__).with_name("emitting_process.py")
SHARD = "shardId-000000000000"
KILLS = 40
# A kill comes up to this long after the process runs: some dozens of batches and checkpoints.
LIFE_S_MAX = 0.08


def start(folder: Path, seed: int, last: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder), str(seed), str(last)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    return process


def assert_exact(folder: Path, last: int) -> None:
    """The rows of the records 1 to `last`, each once, in order, and nothing else."""
    position = ExtendedSequenceNumber(str(last)) if last else TRIM_HORIZON
    EmittedRows.open(folder, SHARD, position).close()
    content = (folder / f"{SHARD}.jsonl").read_bytes()
    assert content == b"" or content.endswith(b"\n")
    rows = [json.loads(line) for line in content.splitlines()]
    wanted = [(n, copy) for n in range(1, last + 1) for copy in range(n % 3)]
    assert [(row["n"], row["copy"]) for row in rows] == wanted


@pytest.mark.slow
def test_no_row_is_lost_or_doubled_however_often_the_process_is_killed(tmp_path):
    seed = seed_of()
    chance = random.Random(seed)
    acknowledged = tmp_path / "acknowledged"
    acknowledged.write_text("0")
    reached = [0]

    for number in range(KILLS):
        with start(tmp_path, chance.randrange(2**32), 0) as process:
            if number % 2:  # however slow the machine is, half of the lives get that far
                until(lambda: int(acknowledged.read_text()) > reached[-1], every_s=0.001)
            time.sleep(chance.uniform(0, LIFE_S_MAX))  # the instant of the kill, not a wait
            process.kill()
        reached.append(int(acknowledged.read_text()))
        assert_exact(tmp_path, reached[-1])

    last = reached[-1] + 200
    with start(tmp_path, chance.randrange(2**32), last) as process:
        assert process.wait(timeout=HUNG_S) == 0
    assert_exact(tmp_path, last)
    assert len(set(reached)) > KILLS / 2
    print(f"{KILLS} kills, {last} records")
