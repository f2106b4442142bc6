"""The doorbell: one wake for many presses, and a press that never waits."""

import os

import pytest

from kclrun.ipc.channel import Doorbell


def test_a_bell_wakes_once_for_many_presses():
    bell = Doorbell.create()
    door = Doorbell.for_writer(os.dup(bell.write_fd))
    assert not bell.answer()
    for _ in range(3):
        door.press()
    assert bell.answer()
    assert not bell.answer()
    bell.close()
    door.close()


def test_pressing_never_waits_and_never_fails():
    bell = Doorbell.create()
    door = Doorbell.for_writer(os.dup(bell.write_fd))
    for _ in range(70_000):  # above the 64 KiB of a pipe
        door.press()
    assert bell.answer()
    bell.close()
    door.press()  # nobody is there any more
    door.close()


def test_both_ends_are_closed_once():
    bell = Doorbell.create()
    ends = (bell.fileno(), bell.write_fd)
    assert [os.get_inheritable(end) for end in ends] == [False, False]
    bell.close()
    bell.close()
    assert (bell.fileno(), bell.write_fd) == (-1, -1)
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
