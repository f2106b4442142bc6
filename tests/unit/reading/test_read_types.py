"""What a type checker says of a program that reads and runs."""

import os
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.support.programs import run_to_end

PROGRAM = """
import itertools
from typing import assert_type
import kclrun

for record in kclrun.read("orders", start="10m"):
    plain: kclrun.Record = record
    assert_type(record.data, bytes)
    assert_type(record.shard_id, str)
    assert_type(record.position, kclrun.ExtendedSequenceNumber)
with kclrun.read("orders", start={"1": record.position}, until=None) as records:
    assert_type(records, kclrun.Reading)
    first: list[kclrun.Record] = list(itertools.islice(records, 3))

class Orders(kclrun.RecordProcessor):
    pass

result = kclrun.run(Orders, stream="orders", application="orders")
assert_type(result, kclrun.RunResult)
assert_type(result.records, int | None)
"""
WRONG = """
import kclrun
kclrun.read("orders", begin="10m")
kclrun.read("orders", start=10)
kclrun.run(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "errors"), [(PROGRAM, 0), (WRONG, 3)])
def test_a_program_is_checked_strictly(tmp_path, text, errors):
    program = tmp_path / "program.py"
    program.write_text(text)
    done = run_to_end(
        [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.11", str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT), "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")},
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    assert len([line for line in found if ": error:" in line]) == errors, done.stdout + done.stderr
