"""The marks beside a data file: what is found in them, and where the next one is written."""

from pathlib import Path

import msgspec
import pytest

from kclrun.errors import SettingsError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.durable_files import write_report
from kclrun.sinks.marks import Mark, MarksFile, parse_marks


class Report(msgspec.Struct):
    records: int


MARKS = [Mark(ExtendedSequenceNumber(str(number)), number * 10) for number in (1, 20, 300)]


def test_the_marks_found_are_as_long_as_their_lines_whatever_is_torn_behind_them():
    whole = b"".join(mark.line for mark in MARKS)

    for torn in (b"", b"0", b"0000"):
        assert parse_marks(whole + torn) == (MARKS, len(whole))


def test_a_mark_added_to_marks_that_were_there_stands_behind_them(tmp_path: Path):
    path = tmp_path / "s.marks"
    for mark in MARKS:
        file = MarksFile(path)
        file.append(mark)
        file.close()

    assert MarksFile(path).marks == MARKS


def test_a_report_that_cannot_be_put_in_its_place_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "report.json").mkdir()

    with pytest.raises(SettingsError, match=r"report .*report\.json: Is a directory"):
        write_report(tmp_path / "report.json", Report(1))

    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
