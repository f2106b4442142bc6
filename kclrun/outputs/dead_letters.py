"""Dead letters in a folder: each is one JSON line in a file of its own, named by its record and by
the owner that gave it up.

`cat` over the files is JSON Lines. Implements `ports.LetterStore`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kclrun.errors import SettingsError, SinkError
from kclrun.files.durable import check_folder, publish_file, remove_unfinished, sync_folder
from kclrun.model.letter import (
    LETTER_BYTES_MAX,
    TAKEN_OVER,
    KeptLetter,
    Letter,
    Takeover,
    Unusable,
    letters_of_files,
    refuse_entry,
)


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

    def kept(self, unusable: Unusable = refuse_entry) -> Iterator[KeptLetter]:
        for stream in _folders_in(self._folder, refuse_entry):
            for shard in _folders_in(stream, unusable):
                names = _names_in(shard, unusable)
                yield from letters_of_files(_ShardFolder(shard), names, unusable)

    def remove(self, kept: Sequence[KeptLetter]) -> None:
        for letter in kept:
            for path in letter.handles:
                path.unlink(missing_ok=True)

    def check(self) -> str:
        """As `LetterStore.check`. A run makes the folder itself at its start."""
        return check_folder(self._folder)

    def close(self) -> None:
        """Nothing is held."""


class _ShardFolder:
    """The files of the letters of one shard. Implements `model.letter.LetterFiles`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        try:
            state = path.stat()
            # To read a pipe is to wait for its writer.
            if not stat.S_ISREG(state.st_mode):
                raise SettingsError(f"{path}: it is not a file")
            if state.st_size > LETTER_BYTES_MAX:
                raise SettingsError(
                    f"{path}: it is not a dead letter: it has {state.st_size} bytes"
                )
            return path.read_bytes()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.is_symlink():
                return None  # another reader removed it
            raise SettingsError(f"{path}: {error.strerror}") from None

    def located(self, name: str) -> tuple[str, Path]:
        path = self._folder / name
        return str(path), path


def _folders_in(folder: Path, unusable: Unusable) -> list[Path]:
    return [path for name in _names(folder, unusable) if (path := folder / name).is_dir()]


def _names_in(shard: Path, unusable: Unusable) -> list[str]:
    """The names of letters and takeovers. Files that are being published begin with a dot."""
    return [
        name
        for name in _names(shard, unusable)
        if name.endswith((".json", TAKEN_OVER)) and not name.startswith(".")
    ]


def _names(folder: Path, unusable: Unusable) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unusable(f"{folder}: {error.strerror}")
        return []
