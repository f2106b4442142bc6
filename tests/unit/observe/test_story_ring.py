"""The story ring on disk: what is written is read, within limits; damage costs only itself."""

import os
import threading
from pathlib import Path
from zlib import crc32

import pytest

from kclrun.errors import Unavailable
from kclrun.model.lease import OwnerId
from kclrun.observe import story
from kclrun.observe.story import StoryRing, prune, read_story
from tests.patience import HUNG_S, until

OWNER = OwnerId("kclrun:az1:host-1:abc123")


def ring(folder, **more):
    clock = iter(range(1_000, 10**9))
    return StoryRing(folder, OWNER, clock=lambda: float(next(clock)), **more)


def numbers(found):
    return [entry.fields["deaths"] for entry in found.entries.values()]


def write(folder, count, shard="shardId-000000000001", **more):
    made = ring(folder, **more)
    for number in range(count):
        made.note("process_died", shard, {"deaths": number, "reason": "killed by SIGKILL"})
    made.close()
    return made


def test_what_was_noted_is_read_with_its_owner_and_without_what_is_no_transition(tmp_path):
    made = ring(tmp_path / "story")
    made.note("lease_claimed", "s1", {"position": "7", "counter": 12})
    made.note("logged", "s1", {"message": "of user code"})
    made.note("manager_stopped", "", {"reason": "drained"})
    made.close()

    (file,) = (tmp_path / "story").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    entries = list(read_story([tmp_path]).entries.values())
    assert [(each.owner, each.event, each.shard, each.fields) for each in entries] == [
        (OWNER, "lease_claimed", "s1", {"position": "7"}),
        (OWNER, "manager_stopped", "", {"reason": "drained"}),
    ]


def test_torn_and_damaged_lines_are_passed_over_and_counted(tmp_path):
    write(tmp_path, 10)
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"SIGKILL", b"SIGTERM")  # its CRC does not fit any more
    lines[5] = b"\x00" * 40 + b"\n"
    lines[6] = b"00000000 {}\n"
    deep = b'{"more":' + b"[" * 100_000  # its CRC fits
    lines[9:9] = [b"%08x %s\n" % (crc32(deep), deep)]
    file.write_bytes(b"".join(lines)[:-20])  # and the last one is torn

    found = read_story([tmp_path])

    assert numbers(found) == [0, 1, 2, 4, 7, 8]
    assert (found.damaged, found.unread) == (5, 0)


def test_the_folder_stays_within_its_limit_whoever_writes_and_keeps_the_newest(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(story, "FILE_BYTES_MAX", 2_000)
    monkeypatch.setattr(story, "FOLDER_BYTES_MAX", 8_000)
    monkeypatch.setattr(story, "_BURST", 10**6)
    made = ring(tmp_path)
    for number in range(500):
        made.note("process_died", "s1", {"deaths": number})
        if number % 5 == 0:  # written in portions, as in life
            until(made._waiting.empty)
    made.close()
    other = StoryRing(tmp_path, OwnerId("kclrun:az1:host-1:def456"), clock=lambda: 2e9)
    other.note("lease_resumed", "s1", {})
    other.close()

    files = list(tmp_path.iterdir())
    assert sum(file.stat().st_size for file in files) <= 8_000 + 200
    found = read_story([tmp_path])
    assert numbers_of_deaths(found)[-1] == 499
    assert len(numbers_of_deaths(found)) > 10
    assert found.damaged == 0


def numbers_of_deaths(found):
    return [each.fields["deaths"] for each in found.entries.values() if "deaths" in each.fields]


def test_files_of_others_in_the_folder_are_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "copy.story").write_text("mine")
    prune(tmp_path, 0)
    assert {each.name for each in tmp_path.iterdir()} == {"notes.txt", "copy.story"}
    assert read_story([tmp_path]).damaged == 0


def test_a_shard_that_makes_too_many_entries_is_cut_and_says_so(tmp_path):
    write(tmp_path, 400)  # one a second, and twelve a minute are kept after the first hundred
    entries = list(read_story([tmp_path]).entries.values())
    assert 150 <= len(entries) <= 200
    assert len(entries) + sum(each.missed for each in entries) >= 395


def test_a_disk_that_takes_nothing_costs_entries_and_nothing_else(tmp_path):
    (tmp_path / "story").write_text("a file, where the folder should be")
    warned = []
    made = write(tmp_path / "story", 5, warn=warned.append)
    assert made.dropped == 5
    assert warned == [f"{tmp_path}/story: File exists"]  # once, however often it fails
    assert read_story([tmp_path / "nowhere"]).entries == {}


def test_a_disk_that_becomes_full_within_a_line_costs_no_later_line(tmp_path, monkeypatch):
    real, cut, warned = os.write, [], []

    def write_a_part(fd, data):
        if b"process_died" in data and not cut:
            cut.append(data)
            return real(fd, data[: len(data) // 2])
        return real(fd, data)

    monkeypatch.setattr(os, "write", write_a_part)
    made = ring(tmp_path, warn=warned.append)
    made.note("process_died", "s1", {"deaths": 0})
    until(lambda: made.dropped == 1)
    made.note("process_died", "s1", {"deaths": 1})
    made.close()

    found = read_story([tmp_path])
    assert (numbers(found), found.damaged, made.dropped) == ([1], 1, 1)
    assert warned == [f"{tmp_path}: No space left on device"]


def test_a_file_that_cannot_be_read_is_counted(tmp_path):
    name = f"{1:013d}-abc-000001.story"
    (tmp_path / name).mkdir()
    assert read_story([tmp_path]).unread == 1


class Outlet:
    def __init__(self, failures=0):
        self.failures = failures
        self.objects = {}
        self.has_put = threading.Event()

    def put(self, name, content):
        if self.failures:
            self.failures -= 1
            raise Unavailable("S3 is away")
        assert name not in self.objects
        self.objects[name] = content
        self.has_put.set()


@pytest.mark.parametrize("failures", [0, 2])
def test_what_is_on_disk_is_kept_elsewhere_too_also_after_an_outage_there(tmp_path, failures):
    outlet = Outlet(failures)
    warned = []
    made = ring(tmp_path, outlet=outlet, send_every_s=0.01, warn=warned.append)
    made.note("process_died", "s1", {"deaths": 0})
    assert outlet.has_put.wait(HUNG_S)  # without a further event, and without the end
    made.note("process_died", "s1", {"deaths": 1})
    made.close()

    assert warned == ["S3 is away"] * bool(failures)
    on_disk, elsewhere = read_story([tmp_path]), story.ReadStory()
    for content in outlet.objects.values():
        elsewhere.take(content)
    assert numbers(elsewhere) == numbers(on_disk) == [0, 1]
    on_disk.take(b"".join(outlet.objects.values()))
    assert len(on_disk.entries) == 2  # the same entries, not twice


def test_one_entry_takes_some_hundred_bytes_as_its_limits_assume(tmp_path):
    write(tmp_path, 50)
    size = sum(file.stat().st_size for file in Path(tmp_path).iterdir())
    assert size / 50 <= 250
