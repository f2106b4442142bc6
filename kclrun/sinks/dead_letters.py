"""Dead letters in a folder: each is one JSON line in a file of its own, named by its record.

`cat` over the files is JSON Lines. Implements `ports.LetterStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kclrun.errors import SettingsError, SinkError
from kclrun.model.letter import KeptLetter, Letter, LetterPlace, decode_letter
from kclrun.ports import LetterStore
from kclrun.sinks.durable_files import check_folder, publish_file, sync_folder


def letter_store(place: LetterPlace, elsewhere: Callable[[], LetterStore]) -> LetterStore:
    """The letters at this place; `elsewhere` opens those that are not in a folder."""
    return elsewhere() if place.path is None else LetterFolder(Path(place.path))


class LetterFolder:
    """Letters in a folder of this machine, or one that machines share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, letter: Letter) -> None:
        """As `LetterStore.keep`. The same letter may be kept twice, and is then there once."""
        path = self._folder / letter.name
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                for parent in (path.parent.parent, self._folder):
                    sync_folder(parent)
            publish_file(path, msgspec.json.encode(letter) + b"\n")
        except OSError as error:
            raise SinkError(f"cannot keep the dead letter {path}: {error.strerror}") from error

    def kept(self) -> Iterator[KeptLetter]:
        """As `LetterStore.kept`."""
        for shard in sorted(self._folder.glob("*/*/")):
            found = [KeptLetter(_read(path), str(path), path) for path in shard.glob("[!.]*.json")]
            yield from sorted(found, key=lambda each: each.letter.order)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        """As `LetterStore.remove`."""
        for each in kept:
            each.handle.unlink(missing_ok=True)

    def check(self) -> str:
        """As `LetterStore.check`. The folder itself is made at the start of a run."""
        return check_folder(self._folder)

    def close(self) -> None:
        """Nothing is held."""


def _read(path: Path) -> Letter:
    try:
        return decode_letter(path.read_bytes(), str(path))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
