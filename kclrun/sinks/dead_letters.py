"""Dead letters in a folder: each is one JSON line in a file of its own, named by its record and by
the owner that gave it up.

`cat` over the files is JSON Lines. Implements `ports.LetterStore`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kclrun.errors import SettingsError, SinkError
from kclrun.model.letter import (
    TAKEN_OVER,
    KeptLetter,
    Letter,
    LetterPlace,
    Takeover,
    classified,
    decode_letter,
    decode_takeover,
)
from kclrun.ports import LetterStore
from kclrun.sinks.durable_files import check_folder, publish_file, remove_unfinished, sync_folder


def letter_store(place: LetterPlace, elsewhere: Callable[[], LetterStore]) -> LetterStore:
    """The letters at this place; `elsewhere` opens those that are not in a folder."""
    return elsewhere() if place.path is None else LetterFolder(Path(place.path))


class LetterFolder:
    """Letters in a folder of this machine, or in a folder that machines share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Folders of shards in which no file of a killed process is left unfinished.
        self._clean: set[Path] = set()

    def keep(self, letter: Letter) -> None:
        """As `LetterStore.keep`. The same letter may be kept twice, and is then there once."""
        self._publish(letter)

    def take_over(self, takeover: Takeover) -> None:
        """As `LetterStore.take_over`."""
        self._publish(takeover)

    def _publish(self, content: Letter | Takeover) -> None:
        path = self._folder / content.name
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                for parent in (path.parent.parent, self._folder):
                    sync_folder(parent)
            publish_file(path, msgspec.json.encode(content) + b"\n")
            if path.parent not in self._clean:
                remove_unfinished(path.parent)
                self._clean.add(path.parent)
        except OSError as error:
            raise SinkError(f"cannot keep the dead letter {path}: {error.strerror}") from error

    def kept(self) -> Iterator[KeptLetter]:
        """As `LetterStore.kept`."""
        for shard in sorted(self._folder.glob("*/*/")):
            files = shard.glob("[!.]*.json")
            read = ((path, decode_letter(_read(path), str(path))) for path in files)
            found = [KeptLetter(letter, str(path), (path,)) for path, letter in read]
            takeovers = map(_takeover, shard.glob(f"[!.]*{TAKEN_OVER}"))
            yield from classified(found, takeovers)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        """As `LetterStore.remove`."""
        for each in kept:
            for path in each.handles:
                path.unlink(missing_ok=True)

    def check(self) -> str:
        """As `LetterStore.check`. A run makes the folder itself at its start."""
        return check_folder(self._folder)

    def close(self) -> None:
        """Nothing is held."""


def _takeover(path: Path) -> Takeover:
    takeover = decode_takeover(_read(path))
    if takeover is None:
        raise SettingsError(f"{path}: it is not what an owner of a lease left there")
    return takeover


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
