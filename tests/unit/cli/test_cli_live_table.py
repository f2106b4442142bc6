import io
import os
import time

import msgspec
import pytest
from rich.console import Console

from kclrun.cli.live_display import LiveDisplay
from kclrun.cli.live_table import render
from kclrun.observe.snapshot import LeaseView, Snapshot

SNAPSHOT = Snapshot(
    application="flights",
    stream="flights-stream",
    owner="kclrun:eu-west-1a:host:1234",
    uptime_s=3725,
    leases=(
        LeaseView(
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
        LeaseView(
            shard="shardId-000000000001",
            state="halted",
            lag_ms=7_200_000,
            note="ValueError: bad \x1b[31mrow",
        ),
        LeaseView(shard="shardId-000000000002", state="starting"),
    ),
    leases_elsewhere=5,
    leases_free=1,
    ended_total=2,
)


def drawn(snapshot: Snapshot, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(render(snapshot, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_wide_terminal_shows_every_column() -> None:
    lines = drawn(SNAPSHOT, 120).splitlines()

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
    assert lines[6] == (
        "3 leases here, 5 elsewhere, 1 free, 2 ended, 123,456 records, 1,234/s, lag 2.0h"
    )


def test_a_narrow_terminal_loses_columns_but_not_the_note() -> None:
    told = drawn(SNAPSHOT, 80)

    assert all(len(line) <= 80 for line in told.splitlines())
    assert "memory" not in told
    assert "ValueError: bad" in told


def test_leases_are_in_the_order_of_their_shards() -> None:
    assert [line.split()[0] for line in drawn(SNAPSHOT, 120).splitlines()[3:6]] == ["1", "2", "3"]


def test_what_is_not_known_is_not_zero() -> None:
    starting = drawn(SNAPSHOT, 120).splitlines()[4]

    assert starting.split()[:7] == ["2", "starting", "0", "0", "-", "-", "-"]


def test_the_footer_counts_the_records_of_shards_that_are_gone() -> None:
    footer = drawn(msgspec.structs.replace(SNAPSHOT, records_departed=1_000), 140).splitlines()[-1]

    assert "2 ended, 124,456 records" in footer


def test_foreign_text_cannot_colour_the_table() -> None:
    assert "\x1b" not in drawn(SNAPSHOT, 80)


def test_many_leases_are_cut_but_those_with_a_note_stay() -> None:
    many = tuple(
        LeaseView(shard=f"shardId-{n:012}", state="running", records_per_s=float(n))
        for n in range(100)
    )
    noted = LeaseView(shard="shardId-000000000999", state="halted", note="poison")
    told = drawn(
        Snapshot(application="a", stream="s", owner="o", uptime_s=0, leases=(*many, noted)), 80
    )

    assert "poison" in told
    assert "61 leases not shown" in " ".join(told.split())


def test_lines_printed_below_the_display_come_out_above_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with LiveDisplay() as display:
        display.show(SNAPSHOT)
        os.write(1, b"from user code\n")
        os.write(2, b"from the log\n")
        deadline = time.monotonic() + 5
        while display._drawn is None and time.monotonic() < deadline:
            time.sleep(0.01)
    os.write(2, b"afterwards\n")

    told = capfd.readouterr().err
    assert "from user code" in told
    assert "from the log" in told
    assert "flights on flights-stream" in told
    assert told.endswith("afterwards\n")


def test_on_spark_there_are_shards_and_neither_leases_nor_processes_of_theirs() -> None:
    text = drawn(msgspec.structs.replace(SNAPSHOT, has_leases=False), 120)

    assert text.splitlines()[2].split() == ["shard", "state", "records", "per", "s", "lag", "note"]
    assert "3 shards, 2 ended, " in text
    assert "leases" not in text
