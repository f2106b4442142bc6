"""The marks beside a data file: what is found in them, and where the next one is written."""

import errno
import os
import zlib
from pathlib import Path

import pytest

from kclrun.errors import SinkError
from kclrun.files.durable import close_locked, failure
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.outputs.marks import Mark, MarksFile, open_at, parse_marks
from tests.support.tables import over_rows

MARKS = [Mark(ExtendedSequenceNumber(str(number)), number * 10) for number in (1, 20, 300)]


def line_of(rest: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(rest), rest)


ONE, TWO, THREE = (mark.line for mark in MARKS)
BAD = {
    "no line": b"\n",
    "torn": b"0000\n",
    "another checksum": ONE.replace(b" 10 ", b" 11 "),
    "no number": line_of(b"x 1 0"),
    "no position": line_of(b"10 SHARD_AND 0"),
    "too much": line_of(b"10 1 0 "),
    "no ASCII": b"\xff" + ONE,
    "a number padded with zeros": line_of(b"10 01 0"),
    "twenty digits": line_of(b"10 1 99999999999999999999"),
}


def test_a_line_of_marks_is_a_checksum_a_length_and_a_position():
    assert ONE == b"e903f9ba 10 1 0\n"
    assert line_of(b"20 SHARD_END 0") == Mark(SHARD_END, 20).line
    assert line_of(b"20 7 3+2") == Mark(ExtendedSequenceNumber("7", 3, 2), 20).line
    small_checksum = next(n for n in range(1000) if zlib.crc32(b"%d 1 0" % n) < 2**28)
    assert Mark(MARKS[0].position, small_checksum).line[:1] == b"0", "eight digits always"


@over_rows("bad", BAD.values())
def test_a_bad_line_is_ignored_at_the_end_of_the_marks_and_damage_elsewhere(bad):
    for torn in (b"", b"0", bad[:-1], bad):
        assert parse_marks(ONE + TWO + THREE + torn) == (MARKS, len(ONE + TWO + THREE))
    for more in (THREE, b"\n", b"0"):
        with pytest.raises(SinkError, match="line 3 is damaged, and it is not the last"):
            parse_marks(ONE + TWO + bad + more)


def test_a_file_above_a_mebibyte_is_not_one_of_marks(tmp_path):
    path = tmp_path / "s.marks"
    path.write_bytes(ONE.ljust(2**20, b"x"))
    assert MarksFile(path).marks == MARKS[:1]

    path.write_bytes(ONE.ljust(2**20 + 1, b"x"))
    with pytest.raises(SinkError, match=r"s\.marks is over 1048576 bytes"):
        MarksFile(path)


def test_the_marks_are_written_anew_with_their_last_256_once_they_are_1024(tmp_path):
    path = tmp_path / "s.marks"
    marks = [Mark(ExtendedSequenceNumber(str(number)), number) for number in range(1, 1026)]
    path.write_bytes(b"".join(mark.line for mark in marks[:1023]))
    file = MarksFile(path)
    file.append(marks[1023])
    assert len(MarksFile(path).marks) == 1024

    file.append(marks[1024])
    file.close()

    assert MarksFile(path).marks == file.marks == marks[-257:]


def test_marks_that_stay_the_same_are_not_written_again_but_a_torn_line_is_cut(tmp_path):
    path = tmp_path / "s.marks"
    path.write_bytes(ONE + TWO)
    inode = path.stat().st_ino
    file = MarksFile(path)
    file.drop_all_but(MARKS[:2])
    assert path.stat().st_ino == inode

    path.write_bytes(ONE + TWO + b"0")
    file = MarksFile(path)
    file.drop_all_but(MARKS[:2])
    file.append(MARKS[2])
    file.close()
    assert path.read_bytes() == ONE + TWO + THREE


def test_a_mark_added_to_marks_that_were_there_stands_behind_them(tmp_path):
    path = tmp_path / "s.marks"
    for mark in MARKS:
        file = MarksFile(path)
        file.append(mark)
        file.close()

    assert MarksFile(path).marks == MARKS


def opened(folder: Path, at: ExtendedSequenceNumber) -> tuple[list[Mark], Mark]:
    descriptor, marks, base = open_at(folder, "s", at, 0.0)
    marks.close()
    close_locked(descriptor)
    return marks.marks, base


# What the last run left; the checkpoint that is begun from; what is kept of it, or set aside.
@pytest.mark.parametrize(
    ("marked", "begun", "kept"),
    [
        ("", "TRIM_HORIZON", None),
        ("", "5", None),
        ("TRIM_HORIZON:0", "TRIM_HORIZON", 0),
        ("TRIM_HORIZON:0 5:8", "TRIM_HORIZON", 0),
        ("TRIM_HORIZON:0 5:8 7:16", "TRIM_HORIZON", None),
        ("TRIM_HORIZON:0 5:8 7:16", "LATEST", None),
        ("TRIM_HORIZON:0 5:8 7:16", "5", 8),
        ("TRIM_HORIZON:0 5:8 7:16", "6", 8),
        ("TRIM_HORIZON:0 5:8 7:16", "SHARD_END", 16),
        ("TRIM_HORIZON:0 5:8 4:16", "4", 16),
        ("5:8 7:16", "4", None),
    ],
)
def test_rows_are_cut_back_to_the_longest_mark_at_or_below_the_checkpoint_or_set_aside(
    tmp_path, marked, begun, kept
):
    marks = [
        Mark(ExtendedSequenceNumber(position), int(length))
        for position, _, length in (each.partition(":") for each in marked.split())
    ]
    (tmp_path / "s.jsonl").write_bytes(rows := b'{"n":1}\n' * 3)
    (tmp_path / "s.marks").write_bytes(b"".join(mark.line for mark in marks))
    begin = ExtendedSequenceNumber(begun)

    found, base = opened(tmp_path, begin)

    assert base == Mark(begin, kept or 0)
    assert (tmp_path / "s.jsonl").read_bytes() == rows[: kept or 0]
    if kept is None:
        assert found == [Mark(begin, 0)]
        assert (tmp_path / "s.jsonl.old-1").read_bytes() == rows
    else:
        assert found == [mark for mark in marks if mark.position <= begin]
        assert not (tmp_path / "s.jsonl.old-1").exists()
    assert MarksFile(tmp_path / "s.marks").marks == found


def test_the_marks_of_a_file_that_was_moved_away_are_void(tmp_path):
    (tmp_path / "s.marks").write_bytes(ONE + TWO)

    assert opened(tmp_path, MARKS[2].position) == ([base := Mark(MARKS[2].position, 0)], base)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (b'{"n":1}\n', "has 8 bytes and its marks say 10: it was cut or replaced from outside"),
        (b'{"n":1}\n{"n":2}\n', "has no line end at 10, where its marks say one is"),
    ],
)
def test_rows_that_are_not_those_of_the_marks_are_refused_and_left_as_they_are(
    tmp_path, rows, words
):
    (tmp_path / "s.jsonl").write_bytes(rows[:10])
    (tmp_path / "s.marks").write_bytes(ONE)

    with pytest.raises(SinkError, match=words):
        opened(tmp_path, MARKS[0].position)

    assert (tmp_path / "s.jsonl").read_bytes() == rows[:10]


def test_a_thousand_times_rows_are_set_aside_and_durably_and_then_an_operator_must_look(
    tmp_path, monkeypatch
):
    (tmp_path / "s.jsonl").write_bytes(b"{}\n")
    for number in range(1, 1000):
        (tmp_path / f"s.jsonl.old-{number}").touch()
    found_at_sync = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            found_at_sync.append((tmp_path / "s.jsonl").exists())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    opened(tmp_path, TRIM_HORIZON)
    assert (tmp_path / "s.jsonl.old-1000").read_bytes() == b"{}\n"
    assert found_at_sync[0] is False, "the name is gone durably, and then it is used again"

    (tmp_path / "s.jsonl").write_bytes(b"{}\n")
    (tmp_path / "s.marks").unlink()
    with pytest.raises(SinkError, match="was set aside 1000 times"):
        opened(tmp_path, TRIM_HORIZON)
    assert (tmp_path / "s.jsonl").read_bytes() == b"{}\n"


def test_a_start_proves_room_for_64_kib_and_frees_it(tmp_path, monkeypatch):
    written = []
    pwrite = os.pwrite

    def noting(descriptor: int, data: memoryview, offset: int) -> int:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        written.append((name, offset, len(data), len(set(data)) > 100))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", noting)
    opened(tmp_path, TRIM_HORIZON)

    assert written[-1] == ("s.jsonl.room", 0, 65_536, True)
    assert {file.name for file in tmp_path.iterdir()} == {"s.jsonl", "s.marks"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "Full"), "cannot write f: Full (ENOSPC): make room on the disk"),
        (OSError(errno.EDQUOT, "Quota"), "cannot write f: Quota (EDQUOT): make room on the disk"),
        (OSError(errno.EIO, "Broken"), "cannot write f: Broken (EIO)"),
        (OSError("odd"), "cannot write f: odd (OSError)"),
    ],
)
def test_a_failure_names_the_file_the_attempt_and_the_remedy(error, words):
    assert str(failure(Path("f"), "write", error)) == words
