"""Files that survive a crash at any instruction: the order of the system calls, and what they leave
behind when one of them fails. The lock of a file: who gets it, and who does not keep it."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kclrun.errors import OutputLocked, SettingsError
from kclrun.files import durable as durable_files
from kclrun.files.durable import (
    close_locked,
    open_locked,
    replace_file,
    write_at,
    write_report,
)


class Report(msgspec.Struct):
    records: int


def open_under(folder: Path) -> list[Path]:
    """What this process has open of a folder, the folder included."""
    numbers = os.listdir("/proc/self/fd")  # names, not paths
    links = [Path(f"/proc/self/fd/{number}") for number in numbers]
    paths = [link.readlink() for link in links if link.is_symlink()]
    return [path for path in paths if path.is_relative_to(folder)]


REPORT = b'{\n  "records": 7\n}\n'
WRITERS = {
    "replace_file": lambda path: replace_file(path, REPORT),
    "write_report": lambda path: write_report(path, Report(7)),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
CALLS = ("pwrite", "fsync", "replace", "fsync")


class Disk:
    """Notes the system calls that change the disk, with the name of their file. `fails` is the
    number of the one that fails; a write goes at most `bytes_max` at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, *, fails: int = 0, bytes_max: int = 99) -> None:
        self.calls: list[tuple[str, Path]] = []
        self._fails = fails
        self._bytes_max = bytes_max
        for name in ("pwrite", "fsync", "replace"):
            patch.setattr(os, name, self._noting(name, getattr(os, name)))

    def _noting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *rest: Any) -> Any:
            path = file if name == "replace" else Path(f"/proc/self/fd/{file}").readlink()
            self.calls.append((name, path))
            if len(self.calls) == self._fails:
                raise OSError(errno.ENOSPC, "No space left on device")
            if name == "pwrite":
                return real(file, rest[0][: self._bytes_max], rest[1])
            return real(file, *rest)

        return call


@pytest.mark.parametrize(("bytes_max", "calls"), [(3, 4), (5, 2), (9, 2), (10, 1)])
def test_a_write_that_the_kernel_takes_in_pieces_arrives_whole_at_its_offset(
    tmp_path, monkeypatch, bytes_max, calls
):
    path = tmp_path / "data"
    path.write_bytes(b"begin+end")
    disk = Disk(monkeypatch, bytes_max=bytes_max)
    with path.open("r+b") as file:
        write_at(file.fileno(), data := bytearray(b"0123456789"), 6)

    data.clear()  # no view of it is left
    assert path.read_bytes() == b"begin+0123456789"
    assert len(disk.calls) == calls


@writers
def test_a_file_is_whole_on_disk_before_it_has_its_name_and_then_the_folder_is_synced(
    tmp_path, monkeypatch, write
):
    path = tmp_path / "file"
    path.write_text("the one before")
    with monkeypatch.context() as patch:
        disk = Disk(patch, bytes_max=10)
        write(path)

    temporary = disk.calls[0][1]
    assert temporary.parent == tmp_path
    assert temporary != path
    assert disk.calls == [
        ("pwrite", temporary),
        ("pwrite", temporary),
        ("fsync", temporary),
        ("replace", temporary),
        ("fsync", tmp_path),
    ]
    assert path.read_bytes() == REPORT
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert stat.S_IMODE(path.stat().st_mode) & 0o111 == 0, "it is not executable"
    assert open_under(tmp_path) == []


@writers
@pytest.mark.parametrize("failing", range(1, len(CALLS) + 1))
def test_whatever_call_fails_the_old_content_or_the_new_is_there_whole(
    tmp_path, monkeypatch, write, failing
):
    path = tmp_path / "file"
    path.write_text("the one before")
    with monkeypatch.context() as patch:
        disk = Disk(patch, fails=failing)
        with pytest.raises((OSError, SettingsError), match="No space left on device"):
            write(path)

    assert tuple(name for name, _ in disk.calls) == CALLS[:failing]
    assert path.read_bytes() == (b"the one before" if failing <= 3 else REPORT)
    assert open_under(tmp_path) == []
    write(path)
    assert path.read_bytes() == REPORT
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_report_makes_its_folders_and_leaves_nothing_beside_it_where_it_cannot_be_written(
    tmp_path, monkeypatch
):
    """S13: under a name that is another each time: a link there could not have been prepared."""
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        for day in (1, 2):
            write_report(tmp_path / "deep" / f"of day {day}" / "report.json", Report(7))
        names = {path.name for call, path in disk.calls if call == "replace"}
        assert len(names) == 2

        Disk(patch, fails=1)
        with pytest.raises(SettingsError, match=r"the report .*report\.json: No space left"):
            write_report(tmp_path / "full" / "report.json", Report(7))
    assert [*(tmp_path / "full").iterdir()] == []

    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    with pytest.raises(SettingsError, match=r"report .*report\.json: Is a directory"):
        write_report(tmp_path / "taken" / "report.json", Report(1))
    assert [each.name for each in (tmp_path / "taken").iterdir()] == ["report.json"]


class Clock:
    """Stands for the module `time`: only `sleep` moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []
        self.at_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        self.sleeps.append(pause_s)
        self.now += pause_s
        self.at_sleep()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(durable_files, "time", clock)
    return clock


@pytest.mark.parametrize(("wait_s", "sleeps"), [(0.0, 0), (0.01, 1), (0.99, 50)])
def test_a_lock_is_tried_fifty_times_a_second_until_the_wait_is_over(
    tmp_path, clock, wait_s, sleeps
):
    path = tmp_path / "data"
    holder = open_locked(path, 0.0)

    with pytest.raises(OutputLocked, match=rf"waited {wait_s:g} s\).*fuser {path}"):
        open_locked(path, wait_s)

    assert clock.sleeps == [0.02] * sleeps
    clock.at_sleep = lambda: close_locked(holder)
    close_locked(open_locked(path, 1.0))
    assert clock.sleeps == [0.02] * (sleeps + 1), "the first try after its holder let go"
    assert open_under(tmp_path) == []
    assert stat.S_IMODE(path.stat().st_mode) & 0o111 == 0, "it is not executable"


@pytest.mark.parametrize("in_its_place", [True, False], ids=["another file", "no file"])
def test_a_file_that_left_its_place_while_it_was_being_locked_is_not_the_one_that_is_opened(
    tmp_path, clock, monkeypatch, in_its_place
):
    path = tmp_path / "data"
    path.write_text("old")
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not clock.sleeps:  # its former holder sets it aside and lets it go
            path.rename(tmp_path / "aside")
            if in_its_place:
                path.write_text("new")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    descriptor = open_locked(path, 1.0)

    assert os.path.samestat(path.stat(), os.fstat(descriptor))
    assert (tmp_path / "aside").read_text() == "old"
    close_locked(descriptor)
    assert open_under(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks"), KeyboardInterrupt()])
def test_a_lock_that_cannot_be_tried_leaves_no_descriptor_open(tmp_path, monkeypatch, error):

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(fcntl, "flock", failing)
    with pytest.raises(type(error)):
        open_locked(tmp_path / "data", 9.0)

    assert open_under(tmp_path) == []


def in_a_child(claim: Callable[[], bool]) -> bool:
    """Whether the claim holds in a child that this process forks."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if claim() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_child_has_in_place_of_the_locked_file_one_that_accepts_no_bytes_and_only_there(tmp_path):
    locked = open_locked(tmp_path / "data", 0.0)

    def takes_no_bytes() -> bool:
        try:
            os.write(locked, b"x")
        except OSError as error:
            return error.errno == errno.EBADF and not os.get_inheritable(locked)
        return False

    def is_another_file_by_now() -> bool:
        """The child closes what it got, opens a file under that number, and has a child too."""
        with (tmp_path / "of the child").open("wb") as file:
            os.dup2(file.fileno(), locked)
        return in_a_child(lambda: os.write(locked, b"x") == 1)

    assert in_a_child(takes_no_bytes)
    assert in_a_child(is_another_file_by_now)
    close_locked(locked)
    later = os.open(tmp_path / "later", os.O_WRONLY | os.O_CREAT)
    os.dup2(later, locked)
    assert in_a_child(lambda: os.write(locked, b"x") == 1), "it is a file like any other now"
    for descriptor in {later, locked}:
        os.close(descriptor)
    assert (tmp_path / "data").read_bytes() == b""
