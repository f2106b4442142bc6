"""The doorbell: one wake for many presses, and a press that never waits."""

import os

from kclrun.ipc.channel import Doorbell


def test_a_bell_wakes_once_for_many_presses():
    bell = Doorbell.create()
    door = Doorbell.at_door(os.dup(bell.write_fd))
    assert not bell.answer()
    for _ in range(3):
        door.press()
    assert bell.answer()
    assert not bell.answer()
    bell.close()
    door.close()


def test_pressing_never_waits_and_never_fails():
    bell = Doorbell.create()
    door = Doorbell.at_door(os.dup(bell.write_fd))
    for _ in range(70_000):  # above the 64 KiB of a pipe
        door.press()
    assert bell.answer()
    bell.close()
    door.press()  # nobody is there any more
    door.close()
