"""`kclrun files verify` over folders that real outputs wrote."""

import os
import time
from pathlib import Path

from kclrun.cli.program import run_program
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.outputs.rolled_files import open_rolled_files
from tests.processes.cli_rig import called


def at(number: int) -> Cursor:
    return Cursor(ExtendedSequenceNumber(str(10**20 + number)))


def write(folder: Path, token: int, *cuts: int, unfinished: int = 0) -> None:
    """Rolls between the cuts, by one owner; then rows of a roll that it does not finish."""
    of = RowsOf(
        application="orders",
        stream="clicks",
        stream_created_at=WallTime(1_700_000_000.0),
        shard_id="shardId-000000000007",
        generation=0,
        token=token,
    )
    output = open_rolled_files(OutputDestination(name="output", path=str(folder), roll_s=60.0), of)
    assert output.begin(at(cuts[0])) == at(cuts[0])
    for end in cuts[1:]:
        output.add([output.encode({"n": end})[0]], at(end))
        output.commit()
    if unfinished:
        row = output.encode({"n": "x" * unfinished})[0]
        output.add([row], at(cuts[-1] + 1))
        output.add([row], at(cuts[-1] + 2))  # the first one is on the disk then


def test_rolls_of_two_hosts_are_compared_and_are_whole_after_the_advice(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a, 5, 1, 3, 6)
    write(b, 9, 1, 4, 8)  # the host of `a` was lost before the lease's row had moved

    code, out, _ = called("files", "verify", a, b)

    assert code == 1
    assert "4 files of 1 shards: 2 twice\n" in out
    assert out.startswith("twice: other files have each of its rows. Remove it once")
    named = [line.split(": ")[0].strip() for line in out.splitlines() if line.startswith("  ")]
    assert all(each.startswith(str(a)) for each in named)
    assert called("files", "verify", tmp_path)[:2] == (code, out)  # a folder above both
    assert called("files", "verify", a, a, b, a / "orders")[:2] == (code, out)
    for each in named:
        Path(each).unlink()
    assert called("files", "verify", a, b) == (0, "2 files of 1 shards: nothing is wrong\n", "")


def test_a_file_of_a_killed_owner_and_a_missing_roll_are_found_by_the_configuration(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("app.yaml").write_text(
        "application: orders\nstream: clicks\nprocessor: a:B\noutput: {path: rows, roll: {}}\n"
    )
    Path("app.yaml").chmod(0o600)
    write(tmp_path / "rows", 5, 1, 3, 6, 9, unfinished=5 * 2**20)
    assert called("files", "verify") == (0, "3 files of 1 shards: nothing is wrong\n", "")
    (own,) = Path("rows").glob("**/.*.rows")
    os.utime(own, times=(time.time() - 2 * 86_400,) * 2)
    for each in Path("rows").glob("**/*000003-000000.*"):  # a roll and its record
        each.unlink()

    code, out, _ = called("files", "verify", "--config", "app.yaml")

    assert (code, out.splitlines()[-1]) == (1, "2 files of 1 shards: 1 missing, 1 unfinished")
    assert f"  {own.absolute()}: it is 48 h old" in out
    assert "the file before it ends at 100000000000000000003" in out


def test_what_cannot_be_verified_is_refused_in_words(tmp_path):
    config = tmp_path / "app.yaml"
    config.write_text("application: orders\nstream: clicks\nprocessor: a:B\noutput: {path: rows}\n")
    config.chmod(0o600)

    code, _, said = called("files", "verify", "--config", config)
    assert code == 78
    assert "no output with `path` and `roll`" in said
    assert run_program(["files", "verify", str(tmp_path), "--config", str(config)]) == 64
    assert run_program(["files", "verify", str(tmp_path / "absent")]) == 64
