"""The story ring: transitions of leases on disk, within a limit, and in S3 if the settings name a
bucket.

One manager writes; `kclrun why` reads the files of many managers. It must not know what a
transition means (`operating/story.py`). The loop of a manager never waits here.

A file has a line for each entry: its CRC and JSON. A line that does not match is skipped: the last
one of a machine that lost power may be torn.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol
from zlib import crc32

import msgspec

from kclrun.model.lease import OwnerId
from kclrun.model.time import WallTime
from kclrun.observe.logs import RateLimit
from kclrun.operating.story import Entry, Value, recorded

# An entry has some 250 bytes. A deploy makes about ten a lease: 64 leases fill 160 KB. So the ring
# keeps some fifty deploys, or months of a quiet fleet; in an incident in which every lease makes as
# many entries as it may (below), it keeps three quarters of an hour.
FILE_BYTES_MAX: Final = 2**20
FOLDER_BYTES_MAX: Final = 8 * FILE_BYTES_MAX
# The beginning of an incident is kept whole, and then twelve entries a minute of each shard.
_BURST: Final = 100
_PER_S: Final = 0.2
# Entries that wait for a disk that does not answer: 2 MB.
_WAITING_MAX: Final = 8_192
# If a machine is lost with its disk, the entries of these seconds are lost. One PUT in ten seconds
# costs $0.08 a day and machine at the most, and nothing while nothing happens.
SEND_EVERY_S: Final = 10.0
# The entries that wait while S3 is away.
_UNSENT_BYTES_MAX: Final = FILE_BYTES_MAX
_CLOSE_WAIT_S: Final = 2.0
_DISK: Final = "disk"
_ELSEWHERE: Final = "elsewhere"
_SUFFIX: Final = ".story"
_NAME: Final = re.compile(r"\d{13}-[0-9A-Za-z]{1,32}-\d{6}\.story\Z")
_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Entry)


class StoryOutlet(Protocol):
    """A place for stories that outlives the machine."""

    def put(self, name: str, content: bytes) -> None:
        """Keep it under a name that is not taken. Raises: ServiceError."""
        ...


class StoryRing:
    """Records the transitions of one manager. `note` may be called from any thread, and neither
    waits nor raises; a thread of its own writes.

    `dropped` counts entries that could not be kept, because the disk is full or does not answer.
    `warn` gets the first failure of a place, and again the first one after it worked.
    """

    def __init__(
        self,
        folder: Path,
        owner: OwnerId,
        *,
        outlet: StoryOutlet | None = None,
        clock: Callable[[], float] = time.time,
        send_every_s: float = SEND_EVERY_S,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.dropped = 0
        self._warn = warn
        self._failing: set[str] = set()
        self._folder = folder
        self._owner = owner
        self._nonce = re.sub(r"[^0-9A-Za-z]", "", owner.rpartition(":")[2])[:32] or "0"
        self._outlet = outlet
        self._clock = clock
        self._send_every_s = send_every_s
        self._limit = RateLimit(_BURST, _PER_S)
        self._waiting: queue.Queue[Entry | None] = queue.Queue(_WAITING_MAX)
        self._file: int | None = None
        self._written = 0
        # The last line was written in part: the disk became full.
        self._is_torn = False
        self._numbers = 0
        self._unsent = bytearray()
        self._send_instant = 0.0
        self._thread = threading.Thread(target=self._write_all, name="kclrun-story", daemon=True)
        self._thread.start()

    def note(self, event: str, shard: str, fields: Mapping[str, Value]) -> None:
        """Record the event, if it is a transition and its shard has not had too many."""
        kept = recorded(event, fields)
        if kept is None:
            return
        now = self._clock()
        missed = self._limit.admit(shard, now)
        if missed is None:
            return
        entry = Entry(WallTime(round(now, 3)), self._owner, event, shard, kept, missed)
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the entries that wait, for a moment at the most."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_CLOSE_WAIT_S)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            entries: list[Entry] = []
            is_open = self._take(entries)
            if entries:
                lines = [_line(entry) for entry in entries]
                self._append(b"".join(lines), len(lines))
            self._send(is_last=not is_open)
        if self._file is not None:
            os.close(self._file)

    def _take(self, into: list[Entry]) -> bool:
        """Wait for entries, and take all there are; False at the end."""
        wait_s = None if not self._unsent else max(0.0, self._send_instant - time.monotonic())
        try:
            entry = self._waiting.get(timeout=wait_s)
            while entry is not None:
                into.append(entry)
                entry = self._waiting.get_nowait()
        except queue.Empty:
            return True
        return False

    def _append(self, lines: bytes, count: int) -> None:
        if self._outlet is not None:
            if not self._unsent:
                self._send_instant = time.monotonic() + self._send_every_s
            if len(self._unsent) + len(lines) <= _UNSENT_BYTES_MAX:
                self._unsent += lines
        try:
            if self._file is None or self._written + len(lines) > FILE_BYTES_MAX:
                self._begin_file()
            assert self._file is not None, "it was begun"
            data = b"\n" + lines if self._is_torn else lines
            written = os.write(self._file, data)
            self._written += written
            self._is_torn = written < len(data)
            if self._is_torn:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._failing.discard(_DISK)
        except OSError as error:
            self.dropped += count
            self._fail(_DISK, f"{self._folder}: {error.strerror}")

    def _fail(self, place: str, words: str) -> None:
        if place not in self._failing:
            self._failing.add(place)
            self._warn(words)

    def _begin_file(self) -> None:
        """Begin the next file, and remove the oldest ones beyond the limit: of any manager of this
        application on this machine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        prune(self._folder, FOLDER_BYTES_MAX - FILE_BYTES_MAX)
        path = self._folder / self._next_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file, self._written, self._is_torn = os.open(path, flags, 0o600), 0, False

    def _next_name(self) -> str:
        """Names sort by the time of their begin."""
        self._numbers += 1
        return f"{int(self._clock() * 1000):013d}-{self._nonce}-{self._numbers:06d}{_SUFFIX}"

    def _send(self, *, is_last: bool) -> None:
        """Keep in S3 the entries that it lacks, if it is time. After a failure they are sent with
        the next ones."""
        is_due = is_last or time.monotonic() >= self._send_instant
        if self._outlet is None or not self._unsent or not is_due:
            return
        self._send_instant = time.monotonic() + self._send_every_s
        try:
            self._outlet.put(self._next_name(), bytes(self._unsent))
            self._unsent.clear()
            self._failing.discard(_ELSEWHERE)
        except Exception as error:  # noqa: BLE001 - whatever it is, the story on disk goes on
            self._fail(_ELSEWHERE, str(error))


def prune(folder: Path, bytes_max: int) -> None:
    """Remove the oldest files until the others have at most `bytes_max`."""
    total = 0
    for path in sorted(_files(folder), key=lambda path: path.name, reverse=True):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
            if total > bytes_max:
                path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob(f"*{_SUFFIX}") if _NAME.match(path.name))


def _line(entry: Entry) -> bytes:
    body = _encoder.encode(entry)
    return b"%08x %s\n" % (crc32(body), body)


class ReadStory(msgspec.Struct):
    """Entries that were read; `damaged` counts lines that are not entries, `unread` files."""

    entries: dict[bytes, Entry] = {}
    damaged: int = 0
    unread: int = 0

    def take(self, content: bytes) -> None:
        """The entries of one file. Those of a disk come again from S3, byte for byte."""
        for line in content.splitlines():
            entry = _entry(line)
            if entry is None:
                self.damaged += 1
            else:
                self.entries[line] = entry


def _entry(line: bytes) -> Entry | None:
    crc, space, body = line.partition(b" ")
    if len(crc) != 8 or not space or b"%08x" % crc32(body) != crc:
        return None
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_story(folders: Iterable[Path]) -> ReadStory:
    """The entries of all files below these folders. A file that cannot be read is counted."""
    story = ReadStory()
    for folder in folders:
        for path in sorted(_files(folder)):
            try:
                story.take(path.read_bytes())
            except OSError:
                story.unread += 1
    return story
