"""`top`: the fleet in a terminal, from a table and a stream in memory; and live on a real one."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest
from rich.console import Console

from kclrun.cli.page.top import render_fleet
from kclrun.errors import AccessDenied
from kclrun.local.server import start_embedded
from kclrun.model.lease import Halt, Pause
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import WallTime
from tests.patience import HUNG_S
from tests.unit.cli.memory_site import A, B, key, site_for
from tests.unit.page.fleet import NOW, behind, lease, snapshot_of


@pytest.fixture
def site(monkeypatch, tmp_path):
    made = site_for(monkeypatch, tmp_path)
    aws = made.aws
    credentials = type("Known", (), {"current": lambda _: None})()
    monkeypatch.setattr(
        "kclrun.cli.startup.Aws",
        lambda settings: vars(world := aws(settings)).update(credentials=credentials) or world,
    )
    return made


def lines_of(snapshot, site, *, width=100, **options):
    console = Console(width=width, record=True, file=io.StringIO())
    options = {"sort": "urgency", "every_s": 10.0, "width": width} | options
    console.print(render_fleet(site.settings(), snapshot, **options))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_one_snapshot_without_a_terminal_has_every_lease_its_lag_and_its_cost(site, call):
    site.plant(0, A, halt=Halt("ValueError: bad row\nline 7", WallTime(site.clock.now)))
    site.plant(1, B, pause=Pause(WallTime(site.clock.now)))
    site.put(0, after_s=5.0)
    site.clock.sleep(60.0)

    code, said, reported = call("top")

    assert (code, reported) == (0, [])
    assert said[0] == "orders on orders, table orders"
    assert said[1].startswith("2 owners; 1 halted, 1 paused; at most 1m behind, 23h 59m to the")
    assert said[2] == "table read at 22:15:25, lag read at 22:15:25 UTC"
    assert said[3].split() == [
        "shard",
        "state",
        "behind",
        "loss",
        "in",
        "KiB/s",
        "CPU",
        "owner",
        "note",
    ]
    assert said[4].split()[:5] == ["0", "halted", "1m", "23h", "59m"]
    assert said[4].rstrip().endswith("ValueError: bad row line 7")
    assert said[5].split()[:2] == ["1", "paused"]
    assert "paused since" in said[5]
    assert said[6] == "cost: one scan, about 0.5 read units; a read of 2 shards"


def test_a_table_that_cannot_be_read_is_reported_with_its_own_code(site, call, monkeypatch):
    def refuse(_, *, consistent=True):
        raise AccessDenied("no Scan for you", operation="Scan")

    monkeypatch.setattr(type(site.rows), "items", refuse)

    code, said, reported = call("top --once")

    assert (code, reported[0]) == (77, "Cannot show the fleet: no Scan for you")
    assert any("The lease table cannot be read: " in line for line in said)


def test_a_fleet_that_does_not_fit_is_counted_and_the_urgent_rows_are_shown(site):
    leases = [lease(number) for number in range(1_000)]
    leases[777] = lease(777, halt=Halt("bad row\x1b[2J", NOW))
    leases[778] = lease(778, checkpoint=SHARD_END)
    lags = {each.key: behind(number, float(number)) for number, each in enumerate(leases)}

    lines = lines_of(snapshot_of(*leases, lags=lags), site, height=20)

    assert len(lines) == 20
    assert lines[4].split()[:2] == ["777", "halted"]
    assert lines[5].split()[:2] == ["999", "owned"]
    assert lines[-2] == "… and 985 more: 985 owned"
    assert lines[-1] == (
        "cost: about 4.9 read units a second; a read of 999 shards every 150 s; no write."
        " Ctrl-C ends it"
    )
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("sort", "first"), [("shard", "0"), ("lag", "1"), ("owner", "2"), ("urgency", "1")]
)
def test_rows_are_sorted_as_asked(site, sort, first):
    leases = (lease(0, B), lease(1, B), lease(2, A))
    lags = {key(number): behind(number, seconds) for number, seconds in enumerate((1.0, 9.0, 2.0))}

    lines = lines_of(snapshot_of(*leases, lags=lags), site, sort=sort)

    assert lines[4].split()[0] == first


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (200, ["shard", "state", "behind", "loss", "in", "KiB/s", "CPU", "owner", "note"]),
        (80, ["shard", "state", "behind", "loss", "in", "KiB/s", "CPU", "owner", "note"]),
        (60, ["shard", "state", "behind", "loss", "in", "owner", "note"]),
        (40, ["shard", "state", "behind", "loss", "in"]),
        (24, ["shard", "state", "behind"]),
    ],
)
def test_in_a_narrow_terminal_whole_columns_are_left_out_and_no_figure_is_cut(site, width, titles):
    halted = lease(5, halt=Halt("ValueError: column 'amount' is not a number", NOW))
    shown = snapshot_of(halted, lease(7), lags={key(n): behind(n, 3_700.0) for n in (5, 7)})

    lines = lines_of(shown, site, width=width)

    at = next(at for at, line in enumerate(lines) if line.startswith("shard"))
    assert lines[at].split() == titles
    assert lines[at + 1].split()[:4] == ["5", "halted", "1h", "1m"]
    assert lines[at + 2].split()[:4] == ["7", "owned", "1h", "1m"]
    assert all(len(line) <= width for line in lines)
    # Whole once: beside its row, or below the table.
    words = " ".join(" ".join(lines).split())
    assert words.count("ValueError: column 'amount' is not a number") == 1


@pytest.mark.parametrize(("no_color", "has_color"), [("1", False), ("", True)])
def test_colours_are_left_out_where_a_person_wants_none(site, monkeypatch, no_color, has_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard")
    shown = snapshot_of(lease(5, halt=Halt("bad row", NOW)))

    console.print(render_fleet(site.settings(), shown, sort="urgency", every_s=None, width=80))

    written = console.file.getvalue()
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", written)) == has_color
    assert "halted" in written


@pytest.mark.slow
def test_on_a_terminal_it_goes_on_until_it_is_interrupted(tmp_path):
    config = tmp_path / "app.yaml"
    with start_embedded() as embedded:
        config.write_text(
            "application: orders\nstream: orders\n"
            f"aws: {{region: us-east-1, endpoint: '{embedded.endpoint}'}}\n"
        )
        config.chmod(0o600)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "kclrun", "top", "--config", config],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ
            | {"TERM": "xterm", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
            | {"PYTHONFAULTHANDLER": "1"},
        )
        os.close(theirs)

        def read():
            return os.read(ours, 65_536) if select.select([ours], [], [], 1.0)[0] else b""

        def until_drawn():
            shown, over = b"", time.monotonic() + HUNG_S
            while b"there is no lease table orders" not in shown:
                if time.monotonic() > over:
                    status = psutil.Process(process.pid).status()
                    process.send_signal(signal.SIGABRT)
                    pytest.fail(f"{status}, after {shown}: {read() + read()}")
                shown += read()

        try:
            until_drawn()
            termios.tcsetwinsize(ours, (40, 132))
            until_drawn()  # again what is new, such as the size of the terminal
            process.send_signal(signal.SIGINT)
            assert process.wait(HUNG_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
