"""Dead letters in a folder: each once, whole, under the name of its record."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.sinks.dead_letters import LETTER_VERSION, Letter, LetterFolder


def letter(number: int = 11, sub: int = 0, **fields: object) -> Letter:
    values = {
        "application": "shop",
        "processor": "shop:Orders",
        "stream": "orders",
        "shard_id": "shardId-000000000002",
        "sequence_number": str(number),
        "sub_sequence_number": sub,
        "partition_key": "k",
        "explicit_hash_key": None,
        "arrived_at": 5.0,
        "data": b"\x00\xff",
        "error": "ValueError: x",
        "raised_at": "shop.py:3 in process",
        "traceback": "Traceback",
        "calls": 3,
        "given_up_at": 9.0,
    }
    return Letter(**(values | fields))  # type: ignore[arg-type]


def test_a_letter_is_one_line_of_json_in_a_file_named_by_its_record(tmp_path: Path) -> None:
    LetterFolder(tmp_path).keep(letter(11, 4))

    (file,) = tmp_path.rglob("*.json")
    assert file == tmp_path / "orders" / "shardId-000000000002" / "11-4.json"
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {
        "version": LETTER_VERSION,
        **msgspec.structs.asdict(letter(11, 4)),
        "data": "AP8=",
    }


def test_a_letter_that_is_kept_again_is_there_once_and_is_the_last(tmp_path: Path) -> None:
    folder = LetterFolder(tmp_path)
    folder.keep(letter(calls=3))
    folder.keep(letter(calls=5))

    (kept,) = folder.kept()
    assert kept.letter.calls == 5


def test_letters_come_shard_by_shard_in_the_order_of_their_records(tmp_path: Path) -> None:
    folder = LetterFolder(tmp_path)
    last = "shardId-000000000010"
    for each in (letter(100), letter(99, 1), letter(99), letter(7, shard_id=last)):
        folder.keep(each)
    folder.keep(letter(1, stream="another"))

    found = [(each.letter.stream, each.letter.position) for each in folder.kept()]
    assert found == [
        ("another", str(ExtendedSequenceNumber("1", 0))),
        *[("orders", str(ExtendedSequenceNumber(*at))) for at in (("99", 0), ("99", 1))],
        *[("orders", str(ExtendedSequenceNumber(*at))) for at in (("100", 0), ("7", 0))],
    ]


def test_a_folder_that_is_not_there_has_no_letters(tmp_path: Path) -> None:
    assert list(LetterFolder(tmp_path / "none").kept()) == []


def test_a_letter_is_on_the_disk_with_its_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    LetterFolder(tmp_path / "letters").keep(letter())

    # The folders that were made, the file, and its name in its folder.
    names = ["orders", "letters", synced[2], "shardId-000000000002"]
    assert synced == names
    assert synced[2].startswith(".11-0.json.")


def test_a_letter_that_cannot_be_kept_is_an_error_that_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "orders").write_text("not a folder")

    with pytest.raises(SinkError, match=r"cannot keep the dead letter .*/11-0\.json"):
        LetterFolder(tmp_path).keep(letter())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "it is not a dead letter"),
        ("\udc80", "it is not a dead letter"),
        (None, "Is a directory"),
        (f'{{"version": {LETTER_VERSION + 1}}}', "it is not a dead letter"),
    ],
)
def test_a_file_that_is_not_a_letter_is_named(
    tmp_path: Path, content: str | None, words: str
) -> None:
    folder = tmp_path / "orders" / "a"
    folder.mkdir(parents=True)
    if content is None:
        (folder / "1-0.json").mkdir()
    else:
        (folder / "1-0.json").write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(SettingsError, match=rf"1-0\.json: {words}"):
        list(LetterFolder(tmp_path).kept())


def test_a_letter_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    LetterFolder(tmp_path).keep(letter(version=LETTER_VERSION + 1))

    with pytest.raises(SettingsError, match="newer version of kclrun"):
        list(LetterFolder(tmp_path).kept())


def test_a_letter_that_is_being_written_is_not_one_yet(tmp_path: Path) -> None:
    folder = LetterFolder(tmp_path)
    folder.keep(letter())
    (tmp_path / "orders" / "shardId-000000000002" / ".12-0.json.aa.partial").write_text("{")
    (tmp_path / "orders" / "shardId-000000000002" / ".hidden.json").write_text("{")

    assert len(list(folder.kept())) == 1
