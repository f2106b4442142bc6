"""Reads the last committed batch from the files of a Structured Streaming checkpoint.

    offsets/17   where batch 17 ends in every source: a version, metadata, one line a source
    commits/17   written once batch 17 is in the sink

Source: Spark's `OffsetSeqLog` and `CommitLog`, version 1 of either. Reads files and nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec

from kclrun.errors import OffsetRefused, SettingsError
from kclrun.spark.offsets import Offset, decode_offset, parts_of

_VERSION: Final = "v1"
_BATCH: Final = re.compile(r"(?:0|[1-9][0-9]{0,17})\Z")
_NO_OFFSET: Final = "-"
# Ten thousand shards of 150 bytes are 1.5 MB; a file far above that is not one of Spark's.
_FILE_BYTES_MAX: Final = 64 * 2**20
_SHOWN_MAX: Final = 100


class CommittedBatch(msgspec.Struct, frozen=True):
    """The last batch that is committed, and the end of each of its sources, as JSON texts.

    `is_another_begun`: one more was planned and not committed; its rows may be in the sink.
    """

    batch_id: int
    sources: tuple[str, ...]
    is_another_begun: bool


def local_folder(place: str) -> Path:
    """The folder that a path or file: URL names. Raises: SettingsError for other stores."""
    parts = urlsplit(place)
    if parts.scheme in {"s3", "s3a", "s3n"}:
        raise SettingsError(
            f"{place} is in S3: copy what is needed of it, and name the copy\n"
            f"  aws s3 sync s3://{parts.netloc}{parts.path} checkpoint"
            " --exclude '*' --include 'offsets/*' --include 'commits/*'"
        )
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    if "://" in place:
        raise SettingsError(f"{place}: expected a folder; copy offsets/ and commits/ into one")
    return Path(place)


def read_committed(folder: Path) -> CommittedBatch:
    """The last committed batch. Raises: SettingsError for a folder that is not a checkpoint, or of
    a query that has not committed a batch; OffsetRefused for a file of another version."""
    commits, offsets = (_batches(folder, name) for name in ("commits", "offsets"))
    if not commits:
        raise SettingsError(
            f"{folder}: no batch is committed there: the query has read nothing to its end"
        )
    batch_id = max(commits)
    if batch_id not in offsets:
        raise SettingsError(f"{folder}: offsets/{batch_id} is missing, and commits/{batch_id} not")
    version, _, *sources = _text(folder / "offsets" / str(batch_id)).split("\n")
    if version != _VERSION:
        raise OffsetRefused(
            f"{folder}: offsets/{batch_id} is of version {version[:_SHOWN_MAX]!r}, this kclrun"
            f" knows {_VERSION}"
        )
    return CommittedBatch(batch_id, tuple(sources), max(offsets) > batch_id)


def offset_of_stream(batch: CommittedBatch, arn: str) -> Offset:
    """The end of the one kclrun source of the batch that reads this stream.

    Raises: OffsetRefused if there is none, or several.
    """
    offsets = [each for text in batch.sources for each in _offsets(text)]
    found = [offset for offset in offsets if offset.streams[""].arn == arn]
    if len(found) == 1:
        return found[0]
    if found:
        raise OffsetRefused(
            f"the query reads {arn} in {len(found)} sources, each at its own place: one"
            " application has one position in a shard, so none of them can be its own"
        )
    others = (
        ", ".join(sorted({each.streams[""].arn for each in offsets})) or "no kclrun source at all"
    )
    raise OffsetRefused(f"the checkpoint is not of {arn}: it has {others}\nCheck `stream`")


def _offsets(text: str) -> tuple[Offset, ...]:
    """The offset of each stream that a source reads; none for sources of another kind."""
    if text == _NO_OFFSET:
        return ()
    try:
        plain = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return ()
    if not isinstance(plain, dict):
        return ()
    if {"v", "streams", "t"} <= plain.keys():
        return tuple(parts_of(decode_offset(plain)).values())
    is_ours = {"v", "stream", "created", "shards"} <= plain.keys()
    return (decode_offset(plain),) if is_ours else ()


def _batches(folder: Path, name: str) -> frozenset[int]:
    try:
        entries = [each.name for each in (folder / name).iterdir()]
    except OSError as error:
        raise SettingsError(
            f"{folder} is no checkpoint of Structured Streaming: {name}/ cannot be read"
            f" ({error.strerror})"
        ) from None
    return frozenset(int(entry) for entry in entries if _BATCH.match(entry))


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise OffsetRefused(f"{file} is larger than any offset of Spark's")
        return content.decode()
    except OSError as error:
        raise SettingsError(f"{file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise OffsetRefused(f"{file} is not text") from None
