"""What SIGHUP means: a stop on a terminal, unless it was ignored at the start."""

import errno
import io
import signal

import pytest

from kclrun.cli import program
from kclrun.cli.program import run_program
from kclrun.cli.terminal import stop_signals
from tests.support.tables import over_rows

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@over_rows(
    ("terminals", "handler", "signals"),
    [
        ({0, 1, 2}, signal.SIG_DFL, (TERM, INT, HUP)),
        ({0}, signal.SIG_DFL, (TERM, INT, HUP)),
        ({1}, signal.SIG_DFL, (TERM, INT, HUP)),
        ({2}, signal.SIG_DFL, (TERM, INT, HUP)),
        (set(), signal.SIG_DFL, (TERM, INT)),
        ({0, 1, 2}, signal.SIG_IGN, (TERM, INT)),
        (set(), signal.SIG_IGN, (TERM, INT)),
        # A handler of ours, as that of a run that begins another one.
        ({1}, print, (TERM, INT, HUP)),
    ],
)
def test_a_closed_terminal_stops_what_runs_on_it(terminals, handler, signals):
    assert stop_signals(lambda number: number in terminals, lambda _: handler) == signals


@pytest.mark.parametrize(("is_lost", "code"), [(True, 0), (False, 70)])
def test_a_write_to_a_closed_terminal_is_not_a_bug(monkeypatch, is_lost, code):
    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(program.program, "main", fails)
    monkeypatch.setattr(program.messages, "has_lost_reader", lambda *_: is_lost)
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None if is_lost else io.StringIO())

    assert run_program(["version"]) == code
