"""Rolls of rows as files of a folder, also of one that machines share.

It implements `outputs.rolls.Rolls` and knows neither rows nor their formats.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import LimitExceeded, SettingsError, SinkError
from kclrun.files.durable import check_folder, failing, make_folder, sync, sync_folder, write_at
from kclrun.model.output import (
    ROLL_VERSION,
    Cursor,
    OutputDestination,
    RollRecord,
    RowsOf,
    roll_begin,
    roll_folder,
    roll_name,
)
from kclrun.model.time import WallTime
from kclrun.outputs.roll_chains import Part, RollFile
from kclrun.outputs.rolls import RolledOutput
from kclrun.outputs.row_files import row_format

# Bytes of one write and one fsync. So the commit of a large roll has little left to sync.
_SYNC_BYTES: Final = 4 * 2**20
_RECORD: Final = ".end"
# `<begin>.<suffix>`, `.<begin>.end`, and the files of one attempt, `.<begin>.<commit>.end|rows`.
_FILE: Final = re.compile(
    r"(?P<dot>\.)?(?P<begin>[A-Z_0-9+-]+)\.(?:(?P<commit>[0-9a-f]{16})\.)?(?P<ending>[a-z]+)\Z"
)
# By whether the file is hidden, whether its name has a commit, and its ending.
_PARTS: Final = {
    (True, False, "end"): Part.RECORD,
    (True, True, "end"): Part.OWN_RECORD,
    (True, True, "rows"): Part.OWN_ROWS,
}
# Application, stream, its creation, shard and generation.
_NAMES_OF_FOLDER: Final = 5


def open_rolled_files(place: OutputDestination, of: RowsOf) -> RolledOutput:
    """The rolls of this shard in the folder `place.path`; makes nothing. Raises: SettingsError, as
    `row_format`."""
    assert place.path is not None, "the settings name a folder"
    form = row_format(place.format, place.schema)
    return RolledOutput(of, form, FileRolls(Path(place.path), of, form.suffix))


class FileRolls:
    """`<folder>/<application>/<stream>/<created>/<shard>/<generation>/<begin>.<suffix>`.

    The record of a roll is a hidden file beside it, `.<begin>.end`. It is created by link(), which
    fails if the name exists: the link decides which owner's roll it is. Rows and record are durable
    before that, under names of their own. After that the rows get their name: from their owner, or,
    if that one ends in between, from `find` of the next owner. The files of a roll that was not
    chosen stay hidden. Only their owner removes them, because no other process knows that its
    requests have ended.
    """

    def __init__(self, folder: Path, of: RowsOf, suffix: str) -> None:
        self._root = folder
        self.folder = folder / roll_folder(of)
        self._suffix = suffix

    def path(self, begin: Cursor) -> Path:
        """The file of the roll that begins there [K9]."""
        return self.folder / f"{roll_name(begin)}.{self._suffix}"

    def hidden(self, begin: Cursor, ending: str) -> Path:
        """A file of this roll that readers do not see."""
        return self.folder / f".{roll_name(begin)}{ending}"

    def where(self, begin: Cursor) -> str:
        """The path of the roll."""
        return str(self.path(begin))

    def find(self, begin: Cursor) -> RollRecord | None:
        """As `Rolls.find`; the rows are visible when it returns."""
        path = self.hidden(begin, _RECORD)
        with failing(path, "read"):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return None
        record = decode_record(path, content)
        self._publish(begin, record.commit)
        return record

    def _publish(self, begin: Cursor, commit: str) -> None:
        """Give the rows their name. Owner and next owner may do it at the same time."""
        path, rows = self.path(begin), self.hidden(begin, f".{commit}.rows")
        # If the hidden name is gone, the rows had their name already; a reader may have removed it.
        with failing(path, "publish"), contextlib.suppress(FileNotFoundError):
            try:
                path.hardlink_to(rows)
            except FileExistsError:
                if not path.samefile(rows):
                    raise SettingsError(
                        f"{path} is not a file of this output, and has the name of one"
                    ) from None
            sync_folder(self.folder)
            rows.unlink()

    def new(self, begin: Cursor, commit: str) -> FileUpload:
        return FileUpload(self, begin, commit)

    def check(self) -> str:
        """As `Output.check`. The folder is made by the first roll."""
        return check_folder(self._root)

    def close(self) -> None:
        """Nothing is held."""


class FileUpload:
    """Implements `RollUpload`."""

    def __init__(self, rolls: FileRolls, begin: Cursor, commit: str) -> None:
        self._rolls = rolls
        self._begin = begin
        self._commit = commit
        self._rows = rolls.hidden(begin, f".{commit}.rows")
        self._record = rolls.hidden(begin, f".{commit}{_RECORD}")
        self._bytes = bytearray()
        self._length = 0
        self._descriptor = -1
        # The record is durable and may have its name: from now on the rows must stay.
        self._is_recorded = False

    @property
    def unsent_bytes(self) -> int:
        return len(self._bytes)

    def send(self) -> None:
        if len(self._bytes) >= _SYNC_BYTES:
            self._write()

    def write(self, data: bytes) -> None:
        self._bytes += data

    def finish(self, record: RollRecord) -> bool:
        self._write()
        taken = self._rolls.hidden(self._begin, _RECORD)
        with failing(self._record, "write"):
            if not self._is_recorded:
                _write_new(self._record, msgspec.json.encode(record))
                sync_folder(self._rolls.folder)
                self._is_recorded = True
            # The name also exists if the answer of a file server to an earlier try was lost.
            with contextlib.suppress(FileExistsError):
                taken.hardlink_to(self._record)
            sync_folder(self._rolls.folder)
        found = self._rolls.find(self._begin)
        if found is None:
            raise SinkError(f"{taken} was removed as soon as it was there")
        self._is_recorded = False
        self.drop()  # removes the hidden names
        return found.commit == self._commit

    def drop(self) -> None:
        self._bytes.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if not self._is_recorded:
            with contextlib.suppress(OSError):
                self._record.unlink(missing_ok=True)
                self._rows.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write and sync the new bytes. After a failure, also of fsync, the same bytes are written
        again in the same place: no others can be lost."""
        with failing(self._rows, "write"):
            if self._descriptor < 0:
                make_folder(self._rolls.folder)
                self._descriptor = _create(self._rows)
            write_at(self._descriptor, self._bytes, self._length)
            sync(self._descriptor)
            self._length += len(self._bytes)
            self._bytes.clear()


def rolls_below(folder: Path, now: WallTime) -> Iterator[tuple[str, list[RollFile]]]:
    """The files of rolls below a folder, folder by folder, each with what `roll_folder` named it.

    A file that disappears meanwhile is left out. Raises: SettingsError for what cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise SettingsError(f"cannot read {error.filename}: {error.strerror}") from None

    for path, _, names in os.walk(folder.absolute(), onerror=refuse):
        found = []
        for name in names:
            try:
                each = _roll_file(path, name, now)
            except FileNotFoundError:
                continue
            except OSError as error:
                refuse(error)
            else:
                found += [each] if each is not None else []
        if found:
            yield "/".join(Path(path).parts[-_NAMES_OF_FOLDER:]), found


def _roll_file(folder: str, name: str, now: WallTime) -> RollFile | None:
    """None for a file that is not one of a roll. Raises: OSError."""
    match = _FILE.match(name)
    begin = None if match is None else roll_begin(match["begin"])
    if match is None or begin is None:
        return None
    part = _PARTS.get((bool(match["dot"]), bool(match["commit"]), match["ending"]))
    if not (match["dot"] or match["commit"]):
        part = Part.ROWS
    if part is None:
        return None
    path = Path(folder, name)
    status = path.stat()
    return RollFile(
        folder=folder,
        name=name,
        part=part,
        begin=begin,
        age_s=now - status.st_mtime,
        inode=status.st_ino,
        commit=match["commit"] or "",
        record=_readable_record(path, begin) if part is Part.RECORD else None,
    )


def _readable_record(path: Path, begin: Cursor) -> RollRecord | None:
    """The record; None for a record that `RolledOutput.begin` refuses. Raises: OSError."""
    try:
        record = decode_record(path, path.read_bytes())
        is_whole = record.version <= ROLL_VERSION and Cursor.parse(record.end) > begin
    except (SettingsError, LimitExceeded):
        return None
    return record if is_whole else None


def decode_record(path: Path, content: bytes) -> RollRecord:
    """Raises: SettingsError for content that is not a record."""
    try:
        return msgspec.json.decode(content, type=RollRecord)
    except msgspec.MsgspecError:
        raise SettingsError(f"{path} is not the record of a file of rows: restore it") from None


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o666)


def _write_new(path: Path, content: bytes) -> None:
    descriptor = _create(path)
    try:
        write_at(descriptor, content, 0)
        sync(descriptor)
    finally:
        os.close(descriptor)
