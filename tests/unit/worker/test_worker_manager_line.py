"""The manager's messages at the lease process: each is an event, or is done at once."""

from pathlib import Path

import pytest

from kclrun.ipc.channel import Channel
from kclrun.ipc.messages import (
    Drain,
    DumpStacks,
    FailoverChanged,
    OthersInSight,
    RenewCredentials,
    channel_of_worker,
    channel_to_worker,
)
from kclrun.lease import events
from kclrun.model.wire import WireCredentials
from kclrun.worker import manager_line
from kclrun.worker.manager_line import ManagerChannel


class Line:
    def __init__(self):
        mine, its = Channel.pair()
        self.manager = channel_to_worker(mine)
        self.channel = channel_of_worker(its.detach())
        self.renewed = []
        self.line = ManagerChannel(self.channel, self.renewed.append)

    def close(self):
        self.manager.close()
        self.channel.close()


@pytest.fixture
def line():
    line = Line()
    yield line
    line.close()


def test_all_that_has_come_is_reported_in_its_order(line):
    line.manager.send(OthersInSight(True))
    line.manager.send(FailoverChanged(5.0))
    line.manager.send(Drain("a deploy", 3.0))

    assert line.line.receive() == [
        events.OthersInSight(True),
        events.FailoverChanged(5.0),
        events.DrainRequested("a deploy"),
    ]
    assert line.line.receive() == []


def test_new_credentials_are_handed_on_and_are_no_event(line):
    credentials = WireCredentials("AKIAEXAMPLEEXAMPLE", "s")
    line.manager.send(RenewCredentials(credentials))

    assert line.line.receive() == []
    assert line.renewed == [credentials]


def test_a_manager_that_is_gone_is_reported_once_and_no_longer_waited_for(line):
    assert line.line.filenos() == (line.channel.fileno(),)
    line.manager.send(OthersInSight(False))
    line.manager.close()

    assert line.line.receive() == [events.OthersInSight(False), events.ManagerGone()]
    assert line.line.receive() == []
    assert line.line.filenos() == ()


def test_stacks_are_written_to_standard_error_at_once(line, capfd):
    line.manager.send(DumpStacks())

    assert line.line.receive() == []
    assert "most recent call first" in capfd.readouterr().err


def test_a_full_disk_below_standard_error_does_not_keep_the_drain_from_the_lease(line, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(manager_line, "STDERR_FD", full.fileno())
        line.line._write_coroutines = lambda file: file.write("Coroutine of process_record\n")
        line.manager.send(DumpStacks())
        line.manager.send(Drain("a stall", 3.0))

        assert line.line.receive() == [events.DrainRequested("a stall")]
