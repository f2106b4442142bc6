"""All rows of a lease table in one file, before anything of it is mended.

A line a row, as DynamoDB's JSON has it, so that `aws dynamodb put-item --item` puts one back.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kclrun.aws.rows import Item
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from kclrun.sinks.durable_files import sync, sync_folder, write_at

__all__ = ["backup_name", "write_backup"]


def backup_name(table: str, at: WallTime) -> str:
    """The table and the second: `orders-20260301T060000Z.jsonl`."""
    return f"{table}-{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%M%SZ}.jsonl"


def write_backup(place: Path, items: Sequence[Item]) -> None:
    """Durable when it returns, readable for its owner alone; never over a file that is there.

    Raises: SettingsError, naming the file and why.
    """
    content = b"".join(msgspec.json.encode(item) + b"\n" for item in items)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(place, flags, 0o600)
        try:
            write_at(descriptor, content, 0)
            sync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(place.absolute().parent)
    except OSError as error:
        raise SettingsError(
            f"--backup {place}: {error.strerror}; nothing was changed in the table"
        ) from None
