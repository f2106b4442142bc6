"""The file of `--report`: replaced whole or not at all [S13].

May not know what a report holds: any struct is written. Look next: `observe/report.py`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from kclrun.errors import SettingsError
from kclrun.sinks.durable_files import sync, sync_folder

__all__ = ["write_report"]


def write_report(path: Path, report: msgspec.Struct) -> None:
    """Replace the file whole or not at all [S13]. Raises: SettingsError naming it.

    The temporary name cannot be guessed, and is made anew: `--report` may well name a place in
    /tmp, where others could have put a link under a name of their choice.
    """
    data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    except OSError as error:
        raise SettingsError(f"cannot write the report {path}: {error.strerror}") from None


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            sync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
