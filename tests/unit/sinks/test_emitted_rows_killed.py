"""A process that emits is killed again and again: the file must tell the truth every time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.sinks.emitted_rows import EmittedRows

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
def test_no_row_is_lost_or_doubled_however_often_the_process_is_killed(tmp_path: Path):
    seed = int(os.environ.get("KCLRUN_SEED") or random.randrange(2**32))
    print(f"seed {seed}; to replay: KCLRUN_SEED={seed} pytest {__file__}")
    chance = random.Random(seed)
    acknowledged = tmp_path / "acknowledged"
    acknowledged.write_text("0")
    reached: list[int] = []

    for _ in range(KILLS):
        with start(tmp_path, chance.randrange(2**32), 0) as process:
            time.sleep(chance.uniform(0, LIFE_S_MAX))  # the instant of the kill, not a wait
            process.kill()
        reached.append(int(acknowledged.read_text()))
        assert_exact(tmp_path, reached[-1])

    last = reached[-1] + 200
    with start(tmp_path, chance.randrange(2**32), last) as process:
        assert process.wait(timeout=60) == 0
    assert_exact(tmp_path, last)
    assert len(set(reached)) > KILLS / 4, "too few lives got as far as a checkpoint"
    print(f"{KILLS} kills, {last} records")
