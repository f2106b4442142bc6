"""An entry among the dead letters that cannot be used, or that the stream does not take, is named
and stays; all others are listed, redriven and dropped."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kclrun.aws import put_records
from kclrun.cli.program import run_program
from kclrun.errors import InvalidRequest, NotFound
from kclrun.model.letter import LETTER_VERSION, LETTERS_MAX, letters_of_files
from kclrun.outputs.dead_letters import LetterFolder
from kclrun.ports import StreamSummary
from tests.support.letters import letter

FIRST, SECOND, THIRD = (f"shardId-00000000000{number}" for number in range(3))


@pytest.fixture(autouse=True)
def no_lease(monkeypatch):
    """No record is read any more."""
    monkeypatch.setattr("kclrun.cli.dead_letters.command.leases_now", lambda _: {})


@pytest.fixture
def config(tmp_path):
    """Three letters, one in each of three shards; the processor takes all."""
    folder = LetterFolder(tmp_path / "letters")
    for number, shard in enumerate((FIRST, SECOND, THIRD), start=11):
        folder.keep(letter(number, shard_id=shard))
    (tmp_path / "shop.py").write_text(
        "import os\n"
        "from kclrun import RecordProcessor\n"
        "class Orders(RecordProcessor):\n"
        "    def process_records(self, batch, checkpointer):\n"
        "        if any(record.data == b'end' for record in batch): os._exit(3)\n"
    )
    file = tmp_path / "app.yaml"
    file.write_text(
        "application: shop\nstream: orders\nprocessor: shop:Orders\n"
        f"on_error: {{then: dead-letter, dead_letter: {{path: {tmp_path / 'letters'}}}}}\n"
    )
    return file


def run(config: Path, *words: str) -> int:
    return run_program(["dead-letters", *words, "--config", str(config)])


def numbers_left(config: Path) -> list[str]:
    store = LetterFolder(config.parent / "letters")
    return [kept.letter.sequence_number for kept in store.kept(lambda _: None)]


def encoded(**fields: object) -> bytes:
    return msgspec.json.encode(letter(9, shard_id=SECOND, **fields))


ODD = {
    "nothing": b"",
    "half a letter": encoded()[:40],
    "another object": b'{"a": 1}',
    "bytes": b"\xff\xfe\x00",
    "a newer version": encoded(version=LETTER_VERSION + 1),
    "no position": encoded(sequence_number="ten"),
    "a sentinel": encoded(sequence_number="LATEST"),
    "a time that no calendar has": encoded(given_up_at=1e300),
    "a time before 1970": encoded(given_up_at=-1.0),
    "a folder": None,
    "a pipe": "pipe",
    "a link to nothing": "link",
}


def leave(path: Path, content: bytes | str | None) -> None:
    """What another program left at this path."""
    match content:
        case None:
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(path.parent / "gone")
        case bytes():
            path.write_bytes(content)


@pytest.mark.parametrize("verb", ["list", "list --json", "drop", "redrive"])
def test_what_is_not_a_letter_is_named_and_all_others_go_on(config, capfd, verb):
    folder = config.parent / "letters" / "orders" / SECOND
    paths = {odd: folder / f"{number}-0.json" for number, odd in enumerate(ODD, start=100)}
    for odd, path in paths.items():
        leave(path, ODD[odd])
    is_list = verb.startswith("list")

    assert run(config, *verb.split(), *(() if is_list else ("--yes",))) == 65

    reported = capfd.readouterr()
    assert f"{len(ODD)} entries among the dead letters cannot be used" in reported.err
    assert [odd for odd, path in paths.items() if str(path) not in reported.err] == []
    match verb:
        case "list":
            assert [line.split()[3] for line in reported.out.splitlines()] == ["11", "12", "13"]
        case "list --json":
            assert [shown["position"] for shown in json.loads(reported.out)] == ["11", "12", "13"]
        case _:
            assert numbers_left(config) == []
    assert [odd for odd, path in paths.items() if not os.path.lexists(path)] == []


def test_a_takeover_that_cannot_be_read_leaves_out_its_shard_only(config, capfd):
    """It may say that letters of its shard do not count."""
    (config.parent / "letters" / "orders" / SECOND / "5.0.9.taken-over").write_bytes(b"{}")

    assert run(config, "redrive", "--yes") == 65

    assert "the dead letters beside it are left out" in capfd.readouterr().err
    files = sorted(path.name for path in (config.parent / "letters").rglob("*.json"))
    assert files == ["12-0.json"]


def test_very_many_odd_entries_are_counted(config, capsys):
    folder = config.parent / "letters" / "orders" / SECOND
    for number in range(30):
        (folder / f"{number}-1.json").write_bytes(b"x")

    assert run(config, "list") == 65

    error = capsys.readouterr().err
    assert "30 entries among the dead letters cannot be used" in error
    assert error.count("it is not a dead letter") == 20
    assert "… and 10 more" in error


def test_a_letter_is_shown_beside_an_odd_entry(config, capsys):
    (config.parent / "letters" / "orders" / SECOND / "9-0.json").write_bytes(b"x")

    assert run(config, "show", "12") == 0
    assert "9-0.json: it is not a dead letter" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["processor", "stream"])
def test_letters_of_another_stream_stay_and_those_of_ours_go(config, capfd, to, kinesis):
    LetterFolder(config.parent / "letters").keep(letter(5, stream="returns"))

    assert run(config, "redrive", "--yes", "--to", to) == 65

    reported = capfd.readouterr().err
    assert "1 dead letters of returns: not a stream of this application; they stay" in reported
    assert numbers_left(config) == ["5"]


@pytest.mark.seconds
def test_a_letter_that_ends_the_process_of_the_processor_stays_alone(config, capfd):
    folder = LetterFolder(config.parent / "letters")
    for number, data in ((14, b"x"), (15, b"end"), (16, b"x")):
        folder.keep(letter(number, shard_id=FIRST, data=data))

    assert run(config, "redrive", "--yes", "--set", "fetch.batch_max=1") == 65

    assert "15: the process of the processor ended" in capfd.readouterr().err
    assert numbers_left(config) == ["15"]


class Stream:
    """A stream that keeps what it takes, and refuses a request with a record that it does not."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.refused: dict[str, str] = {}
        self.record_bytes_max = 2**20

    def summary(self) -> StreamSummary:
        return StreamSummary("orders", "arn", "ACTIVE", 24, 1, 0.0, self.record_bytes_max)

    def send(self, client, stream, batch):
        for entry in batch:
            if why := self.refused.get(entry.partition_key):
                raise InvalidRequest(f"PutRecords: {why}", operation="PutRecords", code="X")
        self.taken += [entry.partition_key for entry in batch]


@pytest.fixture
def kinesis(monkeypatch):
    stream = Stream()
    aws = SimpleNamespace(kinesis_client="client", admin_of=lambda _: stream)
    monkeypatch.setattr("kclrun.cli.services.Aws", lambda _: aws)
    monkeypatch.setattr(put_records, "send_all", stream.send)
    return stream


REFUSED = {
    "an empty key": ({"partition_key": ""}, "a partition key has 0 characters"),
    "a long key": ({"partition_key": "k" * 300}, "a partition key has 300 characters"),
    "no hash key": ({"explicit_hash_key": "x"}, "a hash key is not a decimal number"),
    "an empty hash key": ({"explicit_hash_key": ""}, "a hash key is not a decimal number"),
    "a hash key too high": ({"explicit_hash_key": str(2**128)}, "a hash key is not a decimal"),
    "a large payload": ({"data": bytes(2**20)}, "a record has 1048577 bytes, its key"),
    "refused by the service": ({"partition_key": "refused"}, "PutRecords: not this one"),
}


@pytest.mark.parametrize("odd", REFUSED)
def test_a_letter_that_the_stream_refuses_is_named_and_those_behind_it_go_back(
    config, capsys, kinesis, odd
):
    fields, words = REFUSED[odd]
    kinesis.refused = {"refused": "not this one"}
    folder = LetterFolder(config.parent / "letters")
    for number, more in ((14, {}), (15, fields), (16, {"partition_key": "b"}), (17, {})):
        folder.keep(letter(number, shard_id=SECOND, **more))

    assert run(config, "redrive", "--yes", "--to", "stream") == 65

    reported = capsys.readouterr()
    assert reported.out == "Put back 6 of 7 dead letters of orders\n"
    assert f"{SECOND}, 15: it stays a dead letter: {words}" in reported.err
    assert numbers_left(config) == ["15"]
    assert kinesis.taken == ["k", "k", "k", "b", "k", "k"]


def test_very_many_refused_letters_are_counted(config, capsys, kinesis):
    folder = LetterFolder(config.parent / "letters")
    for number in range(100, 130):
        folder.keep(letter(number, partition_key=""))

    assert run(config, "redrive", "--yes", "--to", "stream") == 65

    error = capsys.readouterr().err
    assert error.count("it stays a dead letter") == 20
    assert "… and 10 more that the stream never takes" in error


def test_what_is_wrong_with_one_stream_does_not_stop_the_others(
    config, capsys, kinesis, monkeypatch
):
    config.write_text(
        config.read_text().replace(
            "stream: orders", "streams: [{name: a}, {name: orders}, {name: z}]"
        )
    )
    folder = LetterFolder(config.parent / "letters")
    for stream in ("a", "z"):
        folder.keep(letter(5, stream=stream))

    def send(client, stream, batch):
        if stream == "a":
            raise NotFound("PutRecords: the stream a does not exist", operation="PutRecords")
        kinesis.taken.append(stream)

    monkeypatch.setattr(put_records, "send_all", send)

    assert run(config, "redrive", "--yes", "--to", "stream") == 66
    assert "the stream a does not exist" in capsys.readouterr().err
    assert set(kinesis.taken) == {"orders", "z"}
    assert numbers_left(config) == ["5"]


class Files:
    """Very many files of letters; counts those that are in memory at once."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, name):
        self.reads += 1
        return msgspec.json.encode(letter(int(name.partition("-")[0])))

    def located(self, name):
        return name, name


def test_letters_of_a_shard_are_read_as_they_are_taken():
    files = Files()
    names = [f"{number}-0.0.5.json" for number in reversed(range(LETTERS_MAX * 2))]

    found = letters_of_files(files, names, lambda _: None)
    first = [next(found).letter.sequence_number for _ in range(3)]

    assert (first, files.reads) == (["0", "1", "2"], 3)


def test_a_call_takes_no_more_payloads_than_it_can_hold(config, capfd, monkeypatch):
    monkeypatch.setattr("kclrun.cli.dead_letters.command.TAKEN_BYTES_MAX", 3)

    assert run(config, "redrive", "--yes") == 0
    assert "There are more" in capfd.readouterr().err
    assert numbers_left(config) == ["12", "13"]
    assert run(config, "list") == 0  # a list holds none
    assert len(capfd.readouterr().out.splitlines()) == 2
