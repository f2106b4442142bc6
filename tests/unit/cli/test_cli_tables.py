"""Tables: whole in a pipe, as wide as the terminal on one."""

import pytest

from kclrun.cli.tables import cut, table_lines
from kclrun.model.stream import short_name
from kclrun.operating.summaries import host_of, names_position, shortened, with_short_positions
from tests.support.tables import over_rows

POSITION = "49680653883806815850392782504185833013461375787204608018"
OWNER = "kclrun:az1:ip-10-0-1-17:a674129b28719f5f"
NOTE = f"ValueError: the amount of order 17 is not a number, at {POSITION}; " + "ask the shop " * 9
TITLES = ("shard", "state", "owner", "checkpoint", "note")
ROWS = (
    ("shardId-000000000002", "halted", OWNER, POSITION, NOTE.strip()),
    ("shardId-000000000010", "owned", OWNER, "TRIM_HORIZON", ""),
)
SHORTER = {
    "on_terminal": {"checkpoint": shortened},
    "if_narrow": {"owner": host_of, "shard": short_name},
}


def test_in_a_pipe_nothing_is_cut():
    lines = list(table_lines(TITLES, ROWS, None, **SHORTER))

    assert len(lines) == 3
    for row, line in zip(ROWS, lines[1:], strict=True):
        assert all(cell in line for cell in row)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_on_a_terminal_no_line_is_wider_and_every_note_is_whole(width):
    lines = list(table_lines(TITLES, ROWS, width, **SHORTER))

    assert all(len(line) <= width for line in lines)
    assert NOTE.strip() in " ".join(" ".join(lines).split())


def test_a_table_that_fits_has_its_ids_in_full_and_short_positions():
    lines = list(table_lines(TITLES[:-1], [row[:-1] for row in ROWS], 120, **SHORTER))

    assert lines[1].split() == ["shardId-000000000002", "halted", OWNER, "49680…608018"]


def test_a_table_without_a_note_cuts_its_widest_column_first():
    rows = [("2026-03-01T06:00:00Z", "1", "ValueError: " + "x" * 90)]

    _, line = table_lines(("given up", "shard", "error"), rows, 60)

    assert len(line) == 60
    assert line.startswith("2026-03-01T06:00:00Z  1      ValueError: xxx")
    assert line.endswith("…")


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("short", 5, "short"),
        ("kclrun:az1:host:1a2b", 9, "kclr…1a2b"),
        ("a sentence of words", 10, "a sentenc…"),
        ("\u987e\u5ba2\u987e\u5ba2", 5, "\u987e…\u5ba2"),
    ],
)
def test_a_sentence_keeps_its_beginning_and_an_id_both_ends(text, most, shown):
    assert cut(text, most) == shown


@over_rows(
    ("named", "is_named"),
    [
        (POSITION, True),
        (shortened(POSITION), True),
        ("49680...608018", True),
        ("4968065388380", True),
        ("04608018", True),
        ("49680…608019", False),
        ("9680653", False),
        (f"{POSITION}0", False),
    ],
)
def test_every_short_form_of_a_position_names_it(named, is_named):
    assert names_position(named, POSITION) is is_named


def test_a_position_within_an_aggregate_is_named_with_and_without_its_number():
    assert names_position("49680…608018/3", f"{POSITION}/3")
    assert names_position("49680…608018", f"{POSITION}/3")
    assert not names_position("49680…608018/4", f"{POSITION}/3")


def test_a_sentence_has_its_positions_in_short():
    assert with_short_positions(f"record 1, at {POSITION})") == "record 1, at 49680…608018)"
