"""EmittedRows: what a crash, a retry, a full disk and a second process leave in the file."""

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kclrun.calling.delivery import host_fault
from kclrun.codec.row_lines import ROW_BYTES_MAX, encode_row_line
from kclrun.errors import InvariantViolation, LimitExceeded, SinkError
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.outputs import emitted_rows, marks
from kclrun.outputs.emitted_rows import EmittedRows
from tests.support.build import position as at
from tests.support.descriptors import open_descriptors
from tests.support.programs import run_to_end

SHARD = "shardId-000000000000"


def batch(rows: EmittedRows, *numbers: int, **more: str) -> None:
    """Process records with these numbers, one row each, as one batch that returns."""
    rows.begin_batch()
    for number in numbers:
        rows.emit({"n": number} | more)
    rows.end_batch(at(numbers[-1]))


def numbers_in(folder: Path) -> list[int]:
    content = (folder / f"{SHARD}.jsonl").read_bytes()
    assert content == b"" or content.endswith(b"\n")
    return [json.loads(line)["n"] for line in content.splitlines()]


def crash(rows: EmittedRows) -> None:
    """What the kernel does for a killed process: close the descriptors, and nothing else."""
    for owner in (rows, rows._marks):
        if owner._descriptor is not None and owner._descriptor >= 0:
            os.close(owner._descriptor)
            owner._descriptor = None
    rows._buffer.clear()
    rows._broken = "crashed"


def numbers_after_a_crash(rows: EmittedRows, acknowledged: ExtendedSequenceNumber) -> list[int]:
    """What the next process finds that begins at the acknowledged checkpoint."""
    crash(rows)
    with EmittedRows.open(rows.path.parent, SHARD, acknowledged):
        return numbers_in(rows.path.parent)


def test_rows_whose_checkpoint_was_acknowledged_survive_a_crash_and_no_others(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1, 2, 3)
    rows.make_durable(at(3))  # acknowledged
    batch(rows, 4, 5)
    rows.make_durable(at(5))  # never acknowledged
    batch(rows, 6)

    assert numbers_after_a_crash(rows, at(3)) == [1, 2, 3]


def test_a_crash_before_the_first_checkpoint_takes_everything_back(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1, 2)
    rows.make_durable(at(2))
    crash(rows)

    EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON).close()

    assert numbers_in(tmp_path) == []
    assert not list(tmp_path.glob("*.old-*"))


def test_at_shard_end_all_that_was_made_durable_stays(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        for number in (1, 2):
            batch(rows, number)
            rows.make_durable(at(number))
        rows.begin_batch()
        rows.emit({"n": 3})  # from shard_ended
        rows.end_batch(SHARD_END)
        rows.make_durable(SHARD_END)

    EmittedRows.open(tmp_path, SHARD, SHARD_END).close()

    assert numbers_in(tmp_path) == [1, 2, 3]


def test_a_checkpoint_of_finished_batches_does_not_cover_the_running_one(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1, 2)
    rows.begin_batch()
    rows.emit({"n": 3})
    rows.make_durable(at(2))  # the lease thread, by the clock

    assert numbers_after_a_crash(rows, at(2)) == [1, 2]


def test_a_users_checkpoint_covers_what_was_emitted_until_the_call(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    rows.begin_batch()
    for number in (1, 2, 3):
        rows.emit({"n": number})
    rows.cover(at(2))
    rows.make_durable(at(2))
    rows.emit({"n": 4})

    assert numbers_after_a_crash(rows, at(2)) == [1, 2, 3]


def test_a_failed_batch_is_taken_back_even_when_it_was_written_already(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1)
        rows.begin_batch()
        rows.emit({"n": 2, "pad": "x" * emitted_rows.BUFFER_BYTES_MAX})
        rows.emit({"n": 3})
        assert (tmp_path / f"{SHARD}.jsonl").stat().st_size > emitted_rows.BUFFER_BYTES_MAX

        rows.take_back_batch()
        batch(rows, 2, 3)
        rows.make_durable(at(3))

    assert numbers_in(tmp_path) == [1, 2, 3]


def test_taking_back_leaves_what_the_acknowledged_checkpoint_covers(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        rows.begin_batch()
        rows.emit({"n": 1})
        rows.cover(at(1))
        rows.make_durable(at(1))  # acknowledged
        rows.emit({"n": 2})
        rows.cover(at(2))
        rows.make_durable(at(2))  # refused
        rows.emit({"n": 3})
        rows.take_back_batch(at(1))
        batch(rows, 2, 3)
        rows.make_durable(at(3))

    assert numbers_in(tmp_path) == [1, 2, 3]
    EmittedRows.open(tmp_path, SHARD, at(2)).close()  # the mark of the refused one is gone
    assert numbers_in(tmp_path) == [1]


def test_a_checkpoint_of_an_earlier_batch_covers_all_of_it_though_later_ones_have_ended(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    for number in (1, 2, 3):
        batch(rows, number)
        if number < 3:
            rows.make_durable(at(1))
    rows.make_durable(at(2))

    assert numbers_after_a_crash(rows, at(2)) == [1, 2]


def test_a_checkpoint_after_a_batch_was_taken_back_covers_the_batches_before_it(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1)
    rows.begin_batch()
    rows.emit({"n": 2})
    rows.take_back_batch()
    rows.make_durable(at(1))

    assert numbers_after_a_crash(rows, at(1)) == [1]


def test_a_checkpoint_at_the_end_of_the_batch_before_keeps_that_batch_when_its_own_is_taken_back(
    tmp_path,
):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1, 2)
    rows.begin_batch()
    rows.emit({"n": 3})
    rows.cover(at(2))
    rows.take_back_batch()
    rows.make_durable(at(2))

    assert numbers_after_a_crash(rows, at(2)) == [1, 2]


def test_a_retry_that_emits_less_is_covered_as_it_is_and_not_as_the_first_try_was(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    rows.begin_batch()
    rows.emit({"n": 1, "reason": "longer than what comes"})
    rows.cover(at(1))
    rows.take_back_batch()
    batch(rows, 2)
    rows.make_durable(at(2))

    assert numbers_after_a_crash(rows, at(2)) == [2]


def test_rows_emitted_after_the_checkpoint_of_their_batch_are_kept_by_an_orderly_end(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        rows.begin_batch()
        rows.emit({"n": 1})
        rows.cover(at(1))
        rows.make_durable(at(1))
        rows.emit({"n": 2})
        rows.end_batch(at(1))

    EmittedRows.open(tmp_path, SHARD, at(1)).close()
    assert numbers_in(tmp_path) == [1, 2]


def test_an_orderly_end_takes_back_what_no_checkpoint_covers(tmp_path, monkeypatch):
    monkeypatch.setattr(emitted_rows, "BUFFER_BYTES_MAX", 1)  # each row is written at once
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1)
        rows.make_durable(at(1))
        batch(rows, 2)

    assert numbers_in(tmp_path) == [1]


def test_a_checkpoint_without_new_rows_costs_no_sync(tmp_path, monkeypatch):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1)
        rows.make_durable(at(1))
        before = (tmp_path / f"{SHARD}.marks").read_bytes()
        monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("synced"))
        rows.begin_batch()
        rows.end_batch(at(2))
        rows.make_durable(at(2))

    assert (tmp_path / f"{SHARD}.marks").read_bytes() == before
    monkeypatch.undo()
    EmittedRows.open(tmp_path, SHARD, at(2)).close()
    assert numbers_in(tmp_path) == [1]


def test_the_bytes_are_synced_before_the_mark_that_speaks_of_them(tmp_path, monkeypatch):
    steps: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            file = Path(f"/proc/self/fd/{descriptor}").readlink().suffix
            steps.append(f"{name}{file}")
            return real(descriptor, *rest)

        return call

    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1)
        monkeypatch.setattr(os, "pwrite", noting("write", os.pwrite))
        monkeypatch.setattr(os, "fsync", noting("sync", os.fsync))
        rows.make_durable(at(1))
        monkeypatch.undo()

    assert steps == ["write.jsonl", "sync.jsonl", "write.marks", "sync.marks"]


def test_each_folder_that_is_made_for_the_rows_is_synced_into_the_one_above_it(
    tmp_path, monkeypatch
):
    synced: list[Path] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    EmittedRows.open(tmp_path / "day" / "app", SHARD, TRIM_HORIZON).close()

    assert [each for each in synced if each.is_relative_to(tmp_path) and each.is_dir()][:2] == [
        tmp_path,
        tmp_path / "day",
    ]


def test_no_file_of_the_rows_can_be_executed_whatever_was_written_anew(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    for number in (1, 2):
        batch(rows, number)
        rows.make_durable(at(number))
    crash(rows)
    EmittedRows.open(tmp_path, SHARD, at(1)).close()

    modes = {file.name: file.stat().st_mode & 0o111 for file in tmp_path.iterdir()}
    assert modes == {f"{SHARD}.jsonl": 0, f"{SHARD}.marks": 0}


def test_marks_that_are_written_anew_leave_no_descriptor_open(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "MARKS_MAX", 4)
    monkeypatch.setattr(marks, "MARKS_KEPT", 2)
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        before = open_descriptors()
        for number in range(1, 12):
            batch(rows, number)
            rows.make_durable(at(number))
        assert len(open_descriptors() - before) <= 1, "the marks' own, and none of each writing"


def test_positions_inside_an_aggregate_are_told_apart(tmp_path):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    for sub in (0, 1):
        rows.begin_batch()
        rows.emit({"n": sub})
        rows.end_batch(at(7, sub))
        rows.make_durable(at(7, sub))

    assert numbers_after_a_crash(rows, at(7, 0)) == [0]


def test_a_second_process_does_not_get_the_file(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON):
        code = (
            "import sys; from pathlib import Path\n"
            "from kclrun.outputs.emitted_rows import EmittedRows\n"
            "from kclrun import ExtendedSequenceNumber as E\n"
            "EmittedRows.open(Path(sys.argv[1]), sys.argv[2], E('TRIM_HORIZON'), lock_wait_s=0.1)"
        )
        second = run_to_end([sys.executable, "-c", code, str(tmp_path), SHARD])

    assert second.returncode == 1
    assert "OutputLocked" in second.stderr
    assert "locked by another process" in second.stderr


def test_a_child_that_user_code_forks_holds_no_lock_and_writes_nothing(tmp_path):
    go, done = os.pipe(), os.pipe()
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    rows.begin_batch()
    rows.emit({"n": 1})
    child = os.fork()
    if child == 0:
        try:
            rows.end_batch(at(1))
            rows.make_durable(at(1))
            os.write(done[1], b"written")
        except SinkError:
            os.write(done[1], b"refused")
        os.read(go[0], 1)
        os._exit(0)
    reported = os.read(done[0], 7)
    rows.close()

    EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON, lock_wait_s=0.0).close()

    os.write(go[1], b".")
    os.waitpid(child, 0)
    for fd in (*go, *done):
        os.close(fd)
    assert reported == b"refused"
    assert (tmp_path / f"{SHARD}.jsonl").read_bytes() == b""


@pytest.mark.parametrize("shard_id", ["", "..", "../x", "a/b", "a\n", "x" * 129])
def test_no_file_is_opened_outside_the_folder(tmp_path, shard_id):
    with pytest.raises(SinkError, match="not a shard id"):
        EmittedRows.open(tmp_path / "in", shard_id, TRIM_HORIZON)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_refused_outside_a_batch(tmp_path):
    with (
        EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows,
        pytest.raises(SinkError, match="process_records, on_timer and shard_ended, while they run"),
    ):
        rows.emit({})


def test_a_batch_inside_a_batch_is_our_bug(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        rows.begin_batch()
        with pytest.raises(InvariantViolation):
            rows.begin_batch()


def test_dates_and_decimals_are_rows():
    row = {"at": datetime(2013, 1, 1, tzinfo=UTC), "sum": Decimal("1.10"), "text": "a\nb"}
    assert encode_row_line(row) == b'{"at":"2013-01-01T00:00:00Z","sum":"1.10","text":"a\\nb"}\n'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"n": 1, "price": object()}, "row: 'price': Encoding objects of type object"),
        ({"n": 1, "at": {"deep": ["\ud800"]}}, "row: 'at': UnicodeEncodeError"),
        ({"n" * 500: object()}, "row: '" + "n" * 63 + ": "),
        ({("a", "b"): 1}, "row: Only dicts with"),
    ],
)
def test_a_row_that_json_cannot_hold_is_refused_with_the_name_of_the_value(row, words):
    with pytest.raises(TypeError) as caught:
        encode_row_line(row)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    "row", [{"n": ["canary", object()]}, {"n": "canary\ud800"}, ["canary"], "canary"]
)
def test_what_json_cannot_hold_is_a_type_error_that_shows_no_value(row):
    with pytest.raises(TypeError) as refused:
        encode_row_line(row)
    assert "canary" not in str(refused.value)
    assert "ud800" not in str(refused.value)


def test_a_row_that_is_too_large_leaves_no_byte_behind(tmp_path):
    largest = "x" * (ROW_BYTES_MAX - len(b'{"n":""}\n'))
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        rows.begin_batch()
        with pytest.raises(LimitExceeded, match="of 16777216 bytes; at most 16777216 are taken"):
            rows.emit({"n": largest + "x"})
        assert rows.length == 0
        rows.emit({"n": largest})
        assert rows.length == 16 * 2**20


def test_rows_are_written_a_mebibyte_at_a_time(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        rows.begin_batch()
        rows.emit({"n": "x" * (2**20 - len(b'{"n":""}\n') - len(b"{}\n") - 1)})
        rows.emit(MappingProxyType({}))
        assert (rows.length, rows.path.stat().st_size) == (2**20 - 1, 0)
        rows.take_back_batch()
        assert rows.length == 0

        rows.begin_batch()
        rows.emit({"n": "x" * (2**20 - len(b'{"n":""}\n') - len(b"{}\n"))})
        rows.emit({})
        assert (rows.length, rows.path.stat().st_size) == (2**20, 2**20)


def test_a_batch_is_taken_back_out_of_what_was_written_together_with_the_batch_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(emitted_rows, "BUFFER_BYTES_MAX", 32)  # four rows
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1, 2, 3)
        rows.begin_batch()
        for number in (4, 5, 6, 7):  # three were written with 4
            rows.emit({"n": number})
        rows.take_back_batch()
        assert rows.length == rows.path.stat().st_size == 24
        batch(rows, 8)
        rows.make_durable(at(8))

    assert numbers_in(tmp_path) == [1, 2, 3, 8]


def test_what_a_durable_checkpoint_covers_needs_no_cut_any_more(tmp_path):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        for number in range(1, 20):
            batch(rows, number)
            if number > 3:  # by the clock, some batches behind
                rows.make_durable(at(number - 3))
            assert len(rows._ledger) <= 5


@pytest.mark.parametrize("end", ["closed", "unknown until it is opened again"])
def test_at_its_end_it_takes_nothing_and_changes_nothing(tmp_path, monkeypatch, end):
    rows = EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)
    batch(rows, 1)
    rows.make_durable(at(1))
    batch(rows, 2)
    rows.begin_batch()
    if end == "closed":
        rows.close()
    else:
        monkeypatch.setattr(os, "fsync", Fault(1).wrap("fsync", os.fsync))
        with pytest.raises(SinkError, match=r"cannot sync .*ENOSPC"):
            rows.make_durable(at(2))
        monkeypatch.undo()
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    for use in (
        lambda: rows.emit({}),
        rows.take_back_batch,
        lambda: rows.make_durable(at(2)),
    ):
        with pytest.raises(SinkError, match=f"takes no rows: .*{end}"):
            use()
    rows.close()
    rows.close()

    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with EmittedRows.open(tmp_path, SHARD, at(1), lock_wait_s=0.0):
        assert numbers_in(tmp_path) == [1]


def test_a_start_on_a_full_disk_fails_before_the_first_record(tmp_path, monkeypatch):
    """Else records would be processed, again and again, of which no row can be kept."""
    EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON).close()
    before = {path.name for path in tmp_path.iterdir()}

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(SinkError, match="No space left on device") as raised:
            EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON)

    assert host_fault(raised.value) is not None
    assert {path.name for path in tmp_path.iterdir()} == before
    EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON, lock_wait_s=0.0).close()


def test_a_full_disk_can_be_waited_for(tmp_path):
    """A real limit of the kernel: files above 1.5 MiB are refused in the middle of a write."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    pad = "x" * (emitted_rows.BUFFER_BYTES_MAX // 2)
    try:
        with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (3 * emitted_rows.BUFFER_BYTES_MAX // 2, hard)
            )
            for _ in range(2):
                with pytest.raises(SinkError, match=r"cannot write .*EFBIG"):
                    batch(rows, *range(10), pad=pad)
                rows.take_back_batch()
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            batch(rows, *range(5), pad=pad)
            rows.make_durable(at(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert numbers_in(tmp_path) == list(range(5))


def test_of_a_row_that_failed_half_way_and_that_user_code_does_without_no_byte_is_left(
    tmp_path, monkeypatch
):
    with EmittedRows.open(tmp_path, SHARD, TRIM_HORIZON) as rows:
        batch(rows, 1)
        rows.make_durable(at(1))
        rows.begin_batch()
        rows.emit({"n": 2})
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Fault(1).wrap("pwrite", os.pwrite))
            with pytest.raises(SinkError, match="pwrite"):
                rows.emit({"n": 3, "pad": "x" * emitted_rows.BUFFER_BYTES_MAX})
        rows.end_batch(at(3))
        rows.make_durable(at(3))

        assert numbers_in(tmp_path) == [1, 2]


class Fault:
    """Fails the n-th call among the system calls that change the disk; a write fails half-way."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "pwrite":
                    descriptor, data, offset = args
                    real(descriptor, bytes(data)[: len(data) // 2], offset)
                raise OSError(errno.ENOSPC, f"No space left on device in {name}")
            return real(*args, **named)

        return call


def life(folder: Path, acknowledged: int, last: int) -> Iterator[int]:
    """Process from the checkpoint to `last`, one checkpoint every two records; yields the acks."""
    start = at(acknowledged) if acknowledged else TRIM_HORIZON
    rows = EmittedRows.open(folder, SHARD, start)
    try:
        for number in range(acknowledged + 1, last + 1, 2):
            batch(rows, number)
            rows.begin_batch()
            rows.emit({"n": -1})
            rows.take_back_batch(at(number - 1) if number > 1 else TRIM_HORIZON)
            batch(rows, number + 1)
            rows.make_durable(at(number + 1))
            yield number + 1
    finally:
        crash(rows)


@pytest.mark.seconds
def test_whatever_single_system_call_fails_each_row_is_there_once(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "MARKS_MAX", 4)  # so that the rewrite of the marks is among them
    monkeypatch.setattr(marks, "MARKS_KEPT", 2)
    failed = 0
    for nth in range(1, 1000):
        folder = tmp_path / str(nth)
        fault, acknowledged = Fault(nth), 0
        with monkeypatch.context() as patch:
            for name in ("pwrite", "fsync", "ftruncate", "replace"):
                patch.setattr(os, name, fault.wrap(name, getattr(os, name)))
            try:
                for checkpoint in life(folder, 0, 12):
                    acknowledged = checkpoint
            except SinkError:
                failed += 1
        if fault.left > 0:
            break
        assert list(life(folder, acknowledged, 12))[-1:] in ([12], [])
        EmittedRows.open(folder, SHARD, at(12)).close()
        assert numbers_in(folder) == list(range(1, 13)), f"after the failure of call {nth}"

    assert failed > 30
