"""Dead letters in a folder: each once, whole, under the name of its record."""

import json
import os
import time
from pathlib import Path

import msgspec
import pytest

from kclrun.errors import SettingsError, SinkError
from kclrun.model.letter import LETTER_VERSION
from kclrun.outputs.dead_letters import LetterFolder
from tests.support.letters import letter


def test_a_letter_is_one_line_of_json_in_a_file_named_by_its_record(tmp_path):
    kept = letter(11, 4, stream_created_at=5.5, generation=1, token=7, owner_since=8.5)
    LetterFolder(tmp_path).keep(kept)

    (file,) = tmp_path.rglob("*.json")
    assert file == tmp_path / "orders" / "shardId-000000000002" / "11-4.1.7.json"
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == {
        **{
            name: value for name, value in msgspec.structs.asdict(kept).items() if name != "data_at"
        },
        "data": "AP8=",
    }


def test_a_letter_is_on_the_disk_with_its_name_before_it_counts(tmp_path, monkeypatch):
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


def test_a_letter_that_cannot_be_kept_is_an_error_that_names_its_file(tmp_path):
    (tmp_path / "orders").write_text("not a folder")

    with pytest.raises(SinkError, match=r"cannot keep the dead letter .*/11-0\.json"):
        LetterFolder(tmp_path).keep(letter())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", "it is not a dead letter"),
        ("\udc80", "it is not a dead letter"),
        (None, "it is not a file"),
        (f'{{"version": {LETTER_VERSION + 1}}}', "it is not a dead letter"),
        (msgspec.json.encode(letter(sequence_number="LATEST")).decode(), "it is not a dead letter"),
        (msgspec.json.encode(letter(sequence_number="ten")).decode(), "it is not a dead letter"),
        (msgspec.json.encode(letter(sub=-1)).decode(), "it is not a dead letter"),
    ],
)
def test_a_file_that_is_not_a_letter_is_named(tmp_path, content, words):
    folder = tmp_path / "orders" / "a"
    folder.mkdir(parents=True)
    if content is None:
        (folder / "1-0.json").mkdir()
    else:
        (folder / "1-0.json").write_bytes(content.encode(errors="surrogateescape"))

    with pytest.raises(SettingsError, match=rf"1-0\.json: {words}"):
        list(LetterFolder(tmp_path).kept())


def test_what_killed_processes_left_unfinished_a_day_ago_goes_with_the_next_letter(tmp_path):
    shard = tmp_path / "orders" / "shardId-000000000002"
    shard.mkdir(parents=True)
    old, new = (shard / f".{name}.json.aa.partial" for name in ("1-0", "2-0"))
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (time.time() - 86_401, time.time() - 86_401))
    folder = LetterFolder(tmp_path)

    folder.keep(letter())

    assert (old.exists(), new.exists()) == (False, True)
    os.utime(new, (time.time() - 86_401, time.time() - 86_401))
    folder.keep(letter())
    assert new.exists(), "one look for each owner: a folder of letters may be large"


def test_a_letter_that_is_being_written_is_not_one_yet(tmp_path):
    folder = LetterFolder(tmp_path)
    folder.keep(letter())
    (tmp_path / "orders" / "shardId-000000000002" / ".12-0.json.aa.partial").write_text("{")
    (tmp_path / "orders" / "shardId-000000000002" / ".hidden.json").write_text("{")

    assert len(list(folder.kept())) == 1
