"""The marks beside a data file: what is found in them, and where the next one is written."""

from pathlib import Path

from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.marks import Mark, MarksFile, parse_marks

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
