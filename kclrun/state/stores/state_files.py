"""Versions of the keyed state as files of a folder that all machines of the application share.

Implements `ports.ClaimStore`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kclrun.errors import SinkError
from kclrun.files.durable import create_file, failing, make_folder, publish_file, remove_unfinished

_SUFFIX: Final = ".state"


class StateFiles:
    """`<root>/<folder>/<shard>/<name>.state`. A name is written by one process only, whole or not
    at all."""

    def __init__(self, root: Path, folder: str) -> None:
        self._root = root
        self._folder = root / folder
        # Folders of shards in which no file of a killed process is left unfinished.
        self._clean: set[Path] = set()

    def create(self, shard: str, name: str, content: bytes) -> None:
        path = self._path(shard, name)
        with failing(path, "write"):
            make_folder(path.parent)
            publish_file(path, content)
            if path.parent not in self._clean:
                remove_unfinished(path.parent)
                self._clean.add(path.parent)

    def claim(self, shard: str, name: str, content: bytes) -> bytes:
        path = self._path(shard, name)
        with failing(path, "write"):
            make_folder(path.parent)
            return content if create_file(path, content) else path.read_bytes()

    def read(self, shard: str, name: str) -> bytes | None:
        path = self._path(shard, name)
        with failing(path, "read"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def list(self, shard: str) -> Iterator[tuple[str, float]]:
        folder = self._folder / shard
        with failing(folder, "list"):
            now = time.time()
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                try:
                    written_at = path.stat().st_mtime
                except FileNotFoundError:
                    continue
                yield path.name.removesuffix(_SUFFIX), now - written_at

    def shards(self) -> Iterator[str]:
        with failing(self._folder, "list"):
            for folder in sorted(self._folder.glob("*/")):
                if any(folder.glob(f"*{_SUFFIX}")):
                    yield folder.name

    def delete(self, shard: str, names: Sequence[str]) -> None:
        """As `VersionStore`; so are the files that killed processes left unfinished: each may be as
        large as the state."""
        for name in names:
            path = self._path(shard, name)
            with failing(path, "remove"):
                path.unlink(missing_ok=True)
        folder = self._folder / shard
        with failing(folder, "clean up"):
            remove_unfinished(folder)

    def check(self) -> str:
        """As `VersionStore`: a file of our own is written, read and removed."""
        shard, name = "probe", secrets.token_hex(8)
        self.create(shard, name, b"")
        if self.read(shard, name) != b"":
            raise SinkError(f"{self._path(shard, name)} was not there after it was written")
        self.delete(shard, [name])
        return f"the folder {self._root}"

    def close(self) -> None:
        """Nothing is held."""

    def _path(self, shard: str, name: str) -> Path:
        return self._folder / shard / f"{name}{_SUFFIX}"
