import io
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from kclrun.cli.run import live_table
from kclrun.cli.run.live_table import Bar, Bars, LiveDisplay, drawn_bars, render, wrapped
from kclrun.local.filling import Filling
from kclrun.observe.sample import LeaseSample, ManagerSample
from tests.patience import HUNG_S, until
from tests.support.tables import over_rows

SAMPLE = ManagerSample(
    application="flights",
    stream="flights-stream",
    owner="kclrun:eu-west-1a:host:1234",
    uptime_s=3725,
    leases=(
        LeaseSample(
            shard="shardId-000000000003",
            state="running",
            records_total=123_456,
            records_per_s=1_234.4,
            lag_ms=1_500,
            cpu_percent=87.2,
            memory_bytes=12 * 2**20,
            pid=4711,
            restarts=1,
        ),
        LeaseSample(
            shard="shardId-000000000001",
            state="halted",
            lag_ms=7_200_000,
            note="ValueError: bad \x1b[31mrow",
        ),
        LeaseSample(shard="shardId-000000000002", state="starting"),
    ),
    leases_elsewhere=5,
    leases_free=1,
    ended_total=2,
)


def drawn(sample: ManagerSample, width: int, height: int = 50) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(sample, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_wide_terminal_shows_every_column():
    lines = drawn(SAMPLE, 120).splitlines()

    assert lines[0].startswith("flights on flights-stream  1:02:05")
    titles = [
        "shard",
        "state",
        "records",
        "per",
        "s",
        "lag",
        "cpu",
        "memory",
        "pid",
        "restarts",
        "note",
    ]
    assert lines[2].split() == [*titles[:3], "per", "s", *titles[5:]]
    assert lines[5].split() == [
        "3",
        "running",
        "123,456",
        "1,234",
        "1.5s",
        "87%",
        "12M",
        "4711",
        "1",
    ]
    assert lines[-1] == (
        "3 leases here, 5 elsewhere, 1 free, 2 ended, 123,456 records, 1,234/s, lag 2.0h"
    )


def test_a_narrow_terminal_loses_columns_but_not_the_note():
    reported = drawn(SAMPLE, 80)

    assert all(len(line) <= 80 for line in reported.splitlines())
    assert "memory" not in reported
    assert "ValueError: bad" in reported


def test_trouble_comes_first_and_the_others_in_the_order_of_their_shards():
    leases = [
        LeaseSample(shard=f"shardId-{n:012}", state=state)
        for n, state in enumerate(["running", "failing", "starting", "halted", "running"])
    ]
    reported = drawn(msgspec.structs.replace(SAMPLE, leases=tuple(leases)), 120)

    assert [line.split()[0] for line in reported.splitlines()[3:8]] == ["3", "1", "0", "2", "4"]


def test_a_halted_shard_is_reported_with_its_reason_and_what_to_do():
    command = "kclrun leases --config app.yaml"
    reported = drawn(msgspec.structs.replace(SAMPLE, leases_command=command), 80)

    assert "1 halted. 1: ValueError: bad" in reported
    remedy = f"{command} resume shardId-000000000001 --yes"
    assert remedy in " ".join(reported.split())
    embedded = msgspec.structs.replace(SAMPLE, leases_command=None)
    assert "fix the cause, then run the application again" in drawn(embedded, 80)


def test_what_is_not_known_is_not_zero():
    starting = drawn(SAMPLE, 120).splitlines()[4]

    assert starting.split()[:7] == ["2", "starting", "0", "0", "-", "-", "-"]


def test_the_footer_counts_the_records_of_shards_that_are_gone():
    footer = drawn(msgspec.structs.replace(SAMPLE, records_departed=1_000), 140).splitlines()[-1]

    assert "2 ended, 124,456 records" in footer


def test_foreign_text_cannot_colour_the_table():
    assert "\x1b" not in drawn(SAMPLE, 80)


NOTE = (
    "process_records failed 6 times: KeyError: 'amount' (processors/orders.py:42 in price;"
    f" record 3 of 302, at {'49671' * 11}2/0)"
)


def many(*, halted: int = 0, failing: int = 0, running: int = 500) -> ManagerSample:
    states = ["running"] * (running - halted - failing) + ["failing"] * failing
    leases = [
        LeaseSample(
            shard=f"shardId-{n:012}",
            state=state,
            records_total=1_000_000,
            records_per_s=0.0 if state == "halted" else float(n),
            lag_ms=43_200_000,
            note="" if state == "running" else NOTE,
        )
        for n, state in enumerate([*states, *["halted"] * halted])
    ]
    return msgspec.structs.replace(SAMPLE, leases=tuple(leases), leases_elsewhere=9_500)


@pytest.mark.parametrize("size", [(80, 24), (80, 30), (200, 50), (60, 20)])
@pytest.mark.parametrize(
    "troubled", [{}, {"halted": 1}, {"halted": 12, "failing": 3}, {"halted": 400}, {"failing": 2}]
)
def test_500_shards_leave_trouble_and_totals_on_the_screen(size, troubled):
    width, height = size
    lines = drawn(many(**troubled), width, height).splitlines()
    reported = " ".join(" ".join(lines).split())

    assert len(lines) <= height, "the rest would be cut"
    assert max(map(len, lines)) <= width
    assert "500 leases here" in reported
    assert "lag 12.0h" in reported
    for state, count in troubled.items():
        assert f"{count} {state}" in reported
    rows = [line.split() for line in lines if line.split()[1:2] in (["running"], ["halted"])]
    shown_halted = sum(row[1] == "halted" for row in rows)
    assert shown_halted == min(len(rows), troubled.get("halted", 0)), "trouble comes first"
    (more,) = [line for line in lines if line.startswith("… and ")]
    hidden = int(more.split()[2])
    assert 500 - hidden >= 3
    if troubled.get("halted"):
        assert "--yes" in reported
        assert "record 3 of 302, at 49671…496712/0" in reported or width < 80


def test_the_lag_of_all_says_that_some_are_not_known():
    known = LeaseSample(shard="a", state="running", lag_ms=0, still_s=0.1)
    unknown = LeaseSample(shard="b", state="running", still_s=45.0)
    halted = LeaseSample(shard="c", state="halted")
    shown = drawn(msgspec.structs.replace(SAMPLE, leases=(known, unknown, halted)), 120, 30)

    assert "lag 0ms (1 not known)" in shown


def test_a_terminal_with_room_shows_all_and_counts_none_as_hidden():
    reported = drawn(many(halted=1, running=30), 80, 50)

    assert "more:" not in reported
    assert len([line for line in reported.splitlines() if " running " in line]) == 29


def test_lines_printed_below_the_display_come_out_above_the_table(monkeypatch, capfd):
    monkeypatch.setenv("TERM", "xterm")
    with LiveDisplay() as display:
        display.show(SAMPLE)
        os.write(1, b"from user code\n")
        os.write(2, b"from the log\n")
        until(lambda: display._drawn is not None)
    os.write(2, b"afterwards\n")

    reported = capfd.readouterr().err
    assert "from user code" in reported
    assert "from the log" in reported
    assert "flights on flights-stream" in reported
    assert reported.endswith("afterwards\n")


def test_on_spark_there_are_shards_and_neither_leases_nor_processes_of_theirs():
    text = drawn(msgspec.structs.replace(SAMPLE, has_leases=False), 120)

    assert text.splitlines()[2].split() == ["shard", "state", "records", "per", "s", "lag", "note"]
    assert "3 shards, 2 ended, " in text
    assert "leases" not in text


@pytest.mark.parametrize("columns", [80, 120])
def test_a_long_line_is_cut_between_its_words_and_indented(columns):
    line = (
        '12:00:00 warning lease_process_warned shard=1 warning="process_records raised'
        ' ValueError: no such order; again in 2 s" position=49680…123456 after_s=12.5'
    )

    rows = wrapped(line, columns)

    assert len(rows) >= 2
    assert all(len(row) <= columns for row in rows)
    assert all(row.startswith(" " * 17) for row in rows[1:])
    assert " ".join(row.strip() for row in rows) == line


def test_a_line_that_fits_is_left_as_it_is_and_a_word_that_does_not_is_cut():
    assert wrapped("  a   b\t", 80) == ["  a   b\t"]
    assert wrapped("", 80) == [""]
    # A word with hyphens is one: an option of a command can be copied.
    assert wrapped(f"{'x' * 35} to-be-copied", 40) == ["x" * 35, f"{' ' * 17}to-be-copied"]
    assert live_table._filled(f"{'x' * 35} to-be-copied", 40, 2) == ["x" * 35, "to-be-copied"]
    assert all(len(row) <= 80 for row in wrapped("x" * 1000, 80))
    assert "".join(row.strip() for row in wrapped("x" * 1000, 80)) == "x" * 1000


def test_what_is_waited_for_is_said_in_the_headline():
    waiting = msgspec.structs.replace(SAMPLE, doing="Spark is starting")

    assert drawn(waiting, 80).splitlines()[0].endswith("Spark is starting")


SCREENS = {
    "wide": (SAMPLE, 100, 30),
    "narrow": (SAMPLE, 99, 29),
    "very narrow": (SAMPLE, 44, 24),
    "too narrow": (many(halted=1, failing=1, running=40), 24, 24),
    "draining": (
        msgspec.structs.replace(SAMPLE, is_draining=True, doing="Spark is starting"),
        100,
        30,
    ),
    "spark": (
        msgspec.structs.replace(SAMPLE, has_leases=False, doing="Spark is starting"),
        100,
        30,
    ),
    "halted": (many(halted=2, failing=3, running=40), 100, 24),
    "failing": (many(failing=3, running=4), 100, 30),
    "healthy": (many(running=16), 80, 24),
    "as many as fit": (many(running=15), 80, 24),
    "a low one": (many(halted=5, running=40), 80, 12),
}


def test_screens_are_those_of_the_golden_file():
    """What rich would cut or wrap included. KCLRUN_GOLDEN=write writes it again."""
    golden = Path(__file__).parent / "golden" / "screens"
    parts = []
    for name, (sample, width, height) in SCREENS.items():
        console = Console(file=io.StringIO(), width=width, color_system=None)
        console.print(render(sample, width, height))
        lines = console.file.getvalue().splitlines()
        parts += [f"== {name}", *(line.rstrip() for line in lines)]
    text = "\n".join(parts) + "\n"
    if os.environ.get("KCLRUN_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


@over_rows(
    ("lag_ms", "text"),
    [
        (None, "-"),
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1.0s"),
        (119_999, "120.0s"),
        (120_000, "2m"),
        (7_199_999, "120m"),
        (7_200_000, "2.0h"),
    ],
)
def test_a_lag_is_spelled_in_the_unit_that_fits(lag_ms, text):
    assert live_table._lag(lag_ms) == text


def test_the_space_of_a_line_is_not_less_than_forty_columns():
    assert max(map(len, wrapped("word " * 30, 20))) > 35
    assert [len(row) for row in wrapped("x" * 100, 40)] == [40, 40, 40, 17 + 14]


# The terminal


class Shown:
    """A display over a pseudo terminal: what it has shown so far."""

    def __init__(self, display: LiveDisplay, capfd: pytest.CaptureFixture[str]) -> None:
        self.display = display
        self.capfd = capfd
        self.text = ""

    def until(self, holds: Callable[[str], bool]) -> str:
        def is_shown() -> bool:
            self.text += self.capfd.readouterr().err
            return holds(self.text)

        until(is_shown, every_s=0.005, why=lambda: self.text)
        return self.text


@pytest.fixture
def terminal(monkeypatch):
    for name, value in (("TERM", "xterm"), ("COLUMNS", "60"), ("LINES", "24")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(live_table, "_DRAW_EVERY_S", 0.01)


def test_a_line_is_shown_once_it_ends_or_is_too_long_and_the_rest_at_the_end(monkeypatch):
    waits: list[float] = []

    def ready(*watched: Any) -> Any:
        waits.append(watched[3])
        return select.select(*watched[:3], 0.0)

    monkeypatch.setattr(live_table, "select", SimpleNamespace(select=ready))
    display = LiveDisplay()
    display._read_fd, write_fd = os.pipe()

    def printed(arrives: bytes) -> list[str]:
        console = Console(file=io.StringIO(), width=60)
        os.write(write_fd, arrives)
        assert display._print_arrived(console)
        assert not display._print_arrived(console)
        return console.file.getvalue().splitlines()

    assert printed(b"half a ") == []
    long = f"and a word that is too long for it {'y' * 30}\n".encode()
    assert printed(b"line\r\n" + long) == [
        "half a line",
        "and a word that is too long for it",
        f"{' ' * 17}{'y' * 30}",
    ]
    assert set(waits) == {0.5}
    narrow = Console(file=io.StringIO(), width=20)
    os.write(write_fd, b"y" * 40 + b"\n")
    display._print_arrived(narrow)
    assert narrow.file.getvalue() == "y" * 40 + "\n"
    assert printed(b"x" * 8_192) == []
    assert "".join(line.strip() for line in printed(b"x")) == "x" * 8_193
    assert printed(b"\xff rest") == []
    display._is_ending.set()
    assert not display._print_arrived(Console(file=io.StringIO()))
    assert waits[-1] == 0.0
    os.close(write_fd)
    console = Console(file=io.StringIO(), width=60)
    assert not display._print_arrived(console)
    assert not display._print_arrived(console)
    assert console.file.getvalue() == "\ufffd rest\n"
    os.close(display._read_fd)


def test_a_sample_is_drawn_once():
    display, drawings = LiveDisplay(), []
    live: Any = SimpleNamespace(update=lambda table, *, refresh: drawings.append(refresh))
    for sample in (None, SAMPLE, SAMPLE):
        if sample is not None:
            display.show(sample)
        display._draw(live, Console(file=io.StringIO(), width=80, height=24))
    assert drawings == [True]


def test_a_terminal_without_columns_takes_the_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "0")
    display, drawings = LiveDisplay(), []
    live: Any = SimpleNamespace(update=lambda *_, **__: drawings.append("a table"))
    display.show(SAMPLE)
    display._draw(live, Console(file=io.StringIO(), force_terminal=True))
    assert drawings == ["a table"]


def test_only_a_new_sample_is_drawn_and_with_its_bars_in_the_room_that_is_left(
    terminal, capfd, monkeypatch
):
    drawn_with = []

    def drawing(sample: ManagerSample, width: int, height: int) -> Text:
        drawn_with.append((sample.owner, width, height))
        return Text(f"table of {sample.owner}")

    monkeypatch.setattr(live_table, "render", drawing)
    samples = [msgspec.structs.replace(SAMPLE, owner=f"owner-{n}") for n in range(2)]
    bars = Bars(lambda: Filling(50, 200), is_until=False)
    with LiveDisplay(bars) as display:
        shown = Shown(display, capfd)
        for sample in samples:
            display.show(sample)
            shown.until(lambda text, sample=sample: f"table of {sample.owner}" in text)
        assert "50 of 200 records" in shown.text
        display.show(msgspec.structs.replace(SAMPLE, owner="the last"))
    assert "table of the last" in shown.text + capfd.readouterr().err
    assert drawn_with == [(owner, 60, 23) for owner in ("owner-0", "owner-1", "the last")]

    with LiveDisplay() as display:
        display.show(samples[0])
    assert drawn_with[3:] == [("owner-0", 60, 24)]


def test_what_was_printed_before_comes_before_and_no_descriptor_is_left(
    terminal, capfd, monkeypatch
):
    with open(1, "w", closefd=False) as out, open(2, "w", closefd=False) as err:
        monkeypatch.setattr(live_table.sys, "stdout", out)
        monkeypatch.setattr(live_table.sys, "stderr", err)
        out.write("before ")
        err.write("before ")
        threads = set(threading.enumerate())
        with LiveDisplay() as display:
            mine = set(threading.enumerate()) - threads
            assert mine == {display._thread}  # rich has none of its own
            assert display._thread.daemon
            out.write("within, out\n")
            err.write("within, err\n")
        monkeypatch.undo()
        reported = capfd.readouterr()
    assert reported.out == "before "
    assert reported.err.startswith("before ")
    assert reported.err.count("within") == 2
    for descriptor in (*display._saved, display._read_fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


# A process whose terminal is closed: 1 MB is more than the pipe holds.
PRINTS = """
import os, sys
from kclrun.cli.run.live_table import LiveDisplay
sys.stdin.read()
with LiveDisplay():
    for _ in range(10_000):
        os.write(1, b"x" * 99 + b"\\n")
"""


def test_user_code_prints_on_after_its_terminal_is_lost():
    terminal, end_of_process = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS],
        stdin=subprocess.PIPE,
        stdout=end_of_process,
        stderr=end_of_process,
    )
    os.close(end_of_process)
    os.close(terminal)
    try:
        process.communicate(timeout=HUNG_S)
    finally:
        process.kill()

    assert process.wait() == 0


# The bars below it


class Fill:
    """How far a fill is, as the run asks it."""

    def __init__(self, *reported: Filling | None) -> None:
        self._reported = list(reported)

    def __call__(self) -> Filling | None:
        return self._reported.pop(0)


def lagging(lag_ms: int | None, records: int = 0) -> ManagerSample:
    lease = msgspec.structs.replace(SAMPLE.leases[0], lag_ms=lag_ms, records_total=records)
    return msgspec.structs.replace(SAMPLE, leases=(lease,), records_departed=0)


def test_a_fill_and_what_is_read_of_it_have_bars_until_it_is_filled():
    fill = Fill(Filling(0), Filling(50, 200), Filling(200, 200), Filling(200, 200))
    bars = Bars(fill, is_until=True)

    assert bars.at(lagging(None)) == ()
    assert bars.at(lagging(None, 20)) == (
        Bar("filled", 0.25, "50 of 200 records"),
        Bar("read", 0.1, "20 of 200 records"),
    )
    assert bars.at(lagging(None, 150)) == (Bar("read", 0.75, "150 of 200 records"),)
    # A record that was given again is counted again.
    assert bars.at(lagging(None, 250)) == (Bar("read", 1.0, "200 of 200 records"),)


def test_a_run_without_an_end_has_no_share_of_what_is_read():
    bars = Bars(Fill(Filling(50, 200), None), is_until=False)

    assert bars.at(lagging(5)) == (Bar("filled", 0.25, "50 of 200 records"),)
    assert bars.at(lagging(5)) == ()


def test_where_nothing_is_filled_the_share_is_of_what_was_behind():
    bars = Bars(lambda: None, is_until=True)

    reported = [bars.at(lagging(lag_ms)) for lag_ms in (None, 0, 60_000, 120_000, 30_000, 0)]

    assert reported[:2] == [(), ()]
    assert [each[0].share for each in reported[2:]] == [0.0, 0.0, 0.75, 1.0]
    assert reported[4][0].text == "of 120 s that were behind"


def test_a_bar_is_one_line_of_a_narrow_terminal():
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(drawn_bars((Bar("filled", 0.624, "208,801 of 336,776 records"),)))

    line = console.file.getvalue().rstrip("\n")
    assert len(line) <= 80
    assert line.startswith("filled ")
    assert line.endswith(" 62%  208,801 of 336,776 records")
