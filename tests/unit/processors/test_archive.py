"""JsonLines: whatever happens, each record is in exactly one finished file, once."""

import base64
import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kclrun.testing import Claim, Faults, Run, make_aggregate, make_record, replay, run_processor
from processors.archive import JsonLines

RECORDS = [
    *make_aggregate(["a", b"\xff\xfe", "c"], ordinal=0),
    *(
        make_record(f"text {n}", f"key {n}", ordinal=n, arrived_at_s=1_356_998_400.0 + n)
        for n in range(1, 20)
    ),
]


def archive(
    folder: Path,
    *,
    uncheckpointed_max: int = 100_000,
    batch_max: int = 10_000,
    retries: int = 0,
    crash_after: int | None = None,
    end_of_shard: bool = True,
    **options: Any,
) -> Run:
    settings = {
        "options": {"folder": str(folder), **options},
        "checkpoint": {"every": "manual", "uncheckpointed_max": uncheckpointed_max},
        "fetch": {"batch_max": batch_max},
        "on_error": {"retries": retries},
    }
    if crash_after is None:
        return run_processor(JsonLines, RECORDS, settings=settings, end_of_shard=end_of_shard)
    faults = Faults(crash_after=crash_after)
    return replay(JsonLines, RECORDS, settings=settings, faults=faults)


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl.gz"))
    texts = [gzip.decompress(file.read_bytes()).decode() for file in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def places(folder: Path) -> list[tuple[str, int]]:
    return sorted((row["sequence_number"], row["sub_sequence_number"]) for row in lines(folder))


ALL = sorted((record.sequence_number, record.sub_sequence_number) for record in RECORDS)


def test_a_line_has_everything_of_its_record(tmp_path):
    archive(tmp_path)

    rows = lines(tmp_path)
    assert rows[-1] == {
        "sequence_number": RECORDS[-1].sequence_number,
        "sub_sequence_number": 0,
        "partition_key": "key 19",
        "arrived_at": "2013-01-01T00:00:19Z",
        "data": "text 19",
    }
    assert base64.b64decode(rows[1]["data_base64"]) == b"\xff\xfe"
    assert "data" not in rows[1]


def test_files_are_named_by_shard_and_first_position_and_checkpointed_at_their_last(tmp_path):
    run = archive(tmp_path, rotate_records=8)

    firsts = [RECORDS[n] for n in (0, 8, 16)]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        f"shardId-000000000000-{r.sequence_number}-{r.sub_sequence_number}.jsonl.gz" for r in firsts
    ]
    assert run.checkpoints[:2] == [RECORDS[7].position, RECORDS[15].position]
    assert places(tmp_path) == ALL


def test_a_file_is_finished_before_the_cap_stops_the_shard(tmp_path):
    archive(tmp_path, uncheckpointed_max=10, batch_max=5)

    assert places(tmp_path) == ALL


@pytest.mark.parametrize("crash_after", range(len(RECORDS) + 1))
def test_a_crash_between_batches_leaves_each_line_once(tmp_path, crash_after):
    archive(tmp_path, crash_after=crash_after, batch_max=3, rotate_records=4)

    assert places(tmp_path) == ALL
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_crash_between_rename_and_checkpoint_leaves_each_line_once(tmp_path, nth):
    options = {"folder": str(tmp_path), "rotate_bytes": 900}
    first = run_processor(
        JsonLines,
        RECORDS,
        settings={"options": options, "checkpoint": {"every": "manual"}},
        faults=Faults(crash_at_checkpoint=nth),
    )
    assert first.crashed
    finished = len(list(tmp_path.glob("*.gz")))

    run_processor(
        JsonLines,
        RECORDS,
        settings={"options": {**options, "rotate_bytes": 5000}, "checkpoint": {"every": "manual"}},
        claim=Claim(position=first.position),
    )

    assert finished == nth
    assert places(tmp_path) == ALL


def test_the_open_file_is_finished_when_the_lease_moves(tmp_path):
    run = archive(tmp_path, end_of_shard=False)

    assert run.position == RECORDS[-1].position
    assert places(tmp_path) == ALL


@pytest.mark.parametrize("call", ["pwrite", "ftruncate"])
def test_a_disk_full_for_a_moment_costs_and_doubles_nothing(tmp_path, monkeypatch, call):
    real, calls = getattr(os, call), iter(range(1000))

    def full_at_second(descriptor: int, *rest: Any) -> Any:
        if next(calls) == 1:
            if call == "pwrite":
                real(descriptor, bytes(rest[0])[:10], rest[1])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, *rest)

    monkeypatch.setattr(os, call, full_at_second)
    archive(tmp_path, rotate_records=4, batch_max=6, retries=1)

    assert places(tmp_path) == ALL


def test_without_a_free_descriptor_for_a_moment_a_file_is_finished_the_second_time(
    tmp_path, monkeypatch
):
    real, calls = os.open, iter(range(1000))

    def full_at_first(path: Path, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECTORY and next(calls) == 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", full_at_first)
    archive(tmp_path, rotate_records=4, batch_max=6, retries=1)

    assert places(tmp_path) == ALL


def test_a_failed_sync_is_not_taken_for_a_success_the_second_time(tmp_path, monkeypatch):
    real, calls = os.fsync, iter(range(1000))

    def failing_once(descriptor: int) -> None:
        if next(calls) == 0:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", failing_once)
    with pytest.raises(OSError, match="an fsync failed before"):
        archive(tmp_path, retries=1)

    assert not list(tmp_path.glob("*.gz"))


def test_a_lost_lease_leaves_no_unfinished_file(tmp_path):
    processor = JsonLines()
    run_processor(
        processor,
        RECORDS,
        settings={"options": {"folder": str(tmp_path)}, "checkpoint": {"every": "manual"}},
        faults=Faults(crash_after=5),
    )
    assert list(tmp_path.glob(".*.tmp"))

    processor.lease_lost()

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options", [{}, {"folder": "x", "rotate_bytes": "a lot"}, {"folder": "x", "rotate_records": 0}]
)
def test_wrong_options_are_refused(options, tmp_path):
    if "folder" in options:
        options = {**options, "folder": str(tmp_path)}
    with pytest.raises(ValueError, match=r"options\."):
        run_processor(
            JsonLines, [], settings={"options": options, "checkpoint": {"every": "manual"}}
        )
