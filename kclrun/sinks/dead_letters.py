"""Dead letters: the records that were given up, kept with all that their repair needs.

A letter is one JSON line in a file of its own, `<folder>/<stream>/<shard>/<position>.json`. Its
name is a function of the record, so a record that is given up again after a crash, or by the next
owner, leaves one letter and not two. `cat` over the files is JSON Lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kclrun.errors import SettingsError, SinkError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.durable_files import publish_file, sync_folder

# The version of the format; readers refuse a higher one.
LETTER_VERSION: Final = 1


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One record that was given up. `data` is base64 in JSON; `arrived_at` and `given_up_at` are
    seconds since the epoch. `calls` counts the calls that raised with the record."""

    version: int = LETTER_VERSION
    application: str
    processor: str
    stream: str
    shard_id: str
    sequence_number: str
    sub_sequence_number: int
    partition_key: str
    explicit_hash_key: str | None
    arrived_at: float
    data: bytes
    error: str
    raised_at: str
    traceback: str
    calls: int
    given_up_at: float

    @property
    def position(self) -> str:
        """As logs and `kclrun dead-letters` write it."""
        return str(ExtendedSequenceNumber(self.sequence_number, self.sub_sequence_number))


class Kept(msgspec.Struct, frozen=True):
    """A letter, and its file."""

    path: Path
    letter: Letter


_DECODER: Final = msgspec.json.Decoder(Letter)


class LetterFolder:
    """Letters in a folder of this machine, or one that machines share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, letter: Letter) -> None:
        """Durable when this returns. The same letter may be kept twice, and is then there once.

        Raises: SinkError; the letter may or may not be there.
        """
        path = self._folder / letter.stream / letter.shard_id / _name(letter)
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                for parent in (path.parent.parent, self._folder):
                    sync_folder(parent)
            publish_file(path, msgspec.json.encode(letter) + b"\n")
        except OSError as error:
            raise SinkError(f"cannot keep the dead letter {path}: {error.strerror}") from error

    def kept(self) -> Iterator[Kept]:
        """Every letter, shard by shard in the order of the records.

        Raises: SettingsError, naming the file, for one that is not a letter or is of a newer
        version.
        """
        for shard in sorted(self._folder.glob("*/*/")):
            found = [Kept(path, _read(path)) for path in shard.glob("[!.]*.json")]
            yield from sorted(found, key=_order)


def _order(kept: Kept) -> tuple[int, int]:
    return int(kept.letter.sequence_number), kept.letter.sub_sequence_number


def _read(path: Path) -> Letter:
    try:
        letter = _DECODER.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a dead letter"
        raise SettingsError(f"{path}: {reason}") from None
    if letter.version > LETTER_VERSION:
        raise SettingsError(f"{path}: it was written by a newer version of kclrun")
    return letter


def _name(letter: Letter) -> str:
    return f"{letter.sequence_number}-{letter.sub_sequence_number}.json"
