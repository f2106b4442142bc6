"""A buffer whose writer can be stopped after any byte, as a SIGKILL would."""

import pytest


class Killed(BaseException):
    """The writer is dead: what follows in its code is not run."""


class StoppableBuffer(bytearray):
    """Writes byte by byte; once `bytes_left` is used up, the next byte is never written."""

    bytes_left: int | None = None

    def __setitem__(self, where, data):
        if self.bytes_left is None or not isinstance(where, slice):
            super().__setitem__(where, data)
            return
        count = min(len(data), self.bytes_left)
        super().__setitem__(slice(where.start, where.start + count), data[:count])
        self.bytes_left -= count
        if count < len(data):
            raise Killed


def run_until_killed(buffer, after_bytes, action):
    """Run `action` and kill it after so many bytes written; whether it got to its end."""
    buffer.bytes_left = after_bytes
    try:
        action()
        return True
    except Killed:
        return False
    finally:
        buffer.bytes_left = None


@pytest.fixture
def stoppable():
    return StoppableBuffer


@pytest.fixture
def killed_after():
    return run_until_killed
