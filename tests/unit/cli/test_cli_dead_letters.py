"""`kclrun dead-letters` over a folder: what it shows, what it chooses, and what it removes."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kclrun.aws import put_records
from kclrun.cli.dead_letters.redrive import _GrowingRows
from kclrun.cli.dead_letters.user_process import Redriven
from kclrun.cli.program import run_program
from kclrun.errors import Unavailable
from kclrun.model.letter import LetterOwner, Takeover
from kclrun.model.record import PutEntry
from kclrun.outputs.dead_letters import LetterFolder
from tests.support.letters import letter
from tests.unit.cli.memory_site import Clock

SECOND = "shardId-000000000001"
UNCHANGED = "Nothing was changed. To do it, add --yes\n"


@pytest.fixture(autouse=True)
def no_lease(monkeypatch):
    """No record is read any more."""
    monkeypatch.setattr("kclrun.cli.dead_letters.command.leases_now", lambda _: {})


@pytest.fixture
def config(tmp_path):
    folder = LetterFolder(tmp_path / "letters")
    folder.keep(letter(11, data=b"hello", given_up_at=1_800_000_000.0))
    folder.keep(letter(12, 3, error="KeyError: 'price'", partition_key="other"))
    folder.keep(letter(13, shard_id=SECOND, data=b"\x1b[2J"))
    file = tmp_path / "app.yaml"
    file.write_text(
        "application: shop\nstream: orders\nprocessor: shop:Orders\n"
        f"on_error: {{then: dead-letter, dead_letter: {{path: {tmp_path / 'letters'}}}}}\n"
    )
    return file


def left(config: Path) -> list[str]:
    return [kept.letter.sequence_number for kept in LetterFolder(config.parent / "letters").kept()]


def test_a_line_says_where_when_and_why(config, capsys):
    assert run_program(["dead-letters", "list", "--config", str(config)]) == 0

    reported = capsys.readouterr()
    assert reported.out.splitlines() == [
        "1970-01-01T00:00:09Z  orders  shardId-000000000001  13  ValueError: x",
        "2027-01-15T08:00:00Z  orders  shardId-000000000002  11  ValueError: x",
        "1970-01-01T00:00:09Z  orders  shardId-000000000002  12/3  KeyError: 'price'",
    ]
    assert reported.err == "3 dead letters\n"


def test_letters_above_the_most_of_a_call_wait_for_the_next_one(config, capsys, monkeypatch):
    monkeypatch.setattr("kclrun.cli.dead_letters.command.LETTERS_MAX", 2)
    assert run_program(["dead-letters", "drop", "--yes", "--config", str(config)]) == 0
    reported = capsys.readouterr()
    assert left(config) == ["12"]
    assert (reported.out, reported.err.split(":")[0]) == (
        "Dropping 2 dead letters\n",
        "There are more",
    )

    assert run_program(["dead-letters", "drop", "--yes", "--config", str(config)]) == 0
    assert (left(config), capsys.readouterr().err) == ([], "")


def test_a_letter_behind_the_most_of_a_call_is_shown(config, capsys, monkeypatch):
    monkeypatch.setattr("kclrun.cli.dead_letters.command.LETTERS_MAX", 1)
    assert run_program(["dead-letters", "show", "12/3", "--config", str(config)]) == 0
    assert "KeyError: 'price'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--shard", "1"], ["13"]),
        (["--shard", SECOND], ["13"]),
        (["--key", "other"], ["12"]),
        (["--error", "KeyError"], ["12"]),
        (["--since", "2027-01-15"], ["11"]),
        (["--since", "2027-01-15T00:00:00Z"], ["11"]),
        (["--since", "2027-01-15 00:00:00"], ["11"]),
        (["--since", "36500d"], ["11", "12", "13"]),
        (["--shard", "1", "--shard", "2", "--key", "k"], ["11", "13"]),
        (["--shard", "2", "--key", "k"], ["11"]),
        (["--shard", "7"], []),
    ],
)
def test_letters_are_chosen_by_all_that_is_asked_and_dropped_with_yes(
    config, capsys, monkeypatch, options, numbers
):
    monkeypatch.setattr("kclrun.cli.times.time", Clock(1_900_000_000.0))
    before = left(config)

    assert run_program(["dead-letters", "drop", "--config", str(config), *options]) == 0
    assert left(config) == before
    plan = capsys.readouterr().out
    count = "1 dead letter" if len(numbers) == 1 else f"{len(numbers)} dead letters"
    assert plan.startswith(f"Would drop {count}\n")
    assert ("--yes" in plan) == bool(numbers)

    assert run_program(["dead-letters", "drop", "--config", str(config), *options, "--yes"]) == 0
    done = f"Dropping {count}\n"
    assert capsys.readouterr().out == (done if numbers else f"{done}Nothing to do.\n")
    assert left(config) == [number for number in before if number not in numbers]


def test_an_error_is_whole_in_the_list_and_in_the_letter(config, capsys):
    trace = "Traceback:\n  in \x1b price\n"
    LetterFolder(config.parent / "letters").keep(letter(14, error="x" * 61, traceback=trace))
    assert run_program(["dead-letters", "list", "--config", str(config), "--error", "xx"]) == 0
    assert capsys.readouterr().out.split()[-1] == "x" * 61
    assert run_program(["dead-letters", "show", "14", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"error          {'x' * 61}, after 3 calls" in lines
    assert lines[-2:] == ["  Traceback:", "    in � price"]


@pytest.mark.parametrize("verb", ["list", "redrive", "drop"])
def test_an_empty_text_of_an_error_chooses_no_letter(config, capsys, verb):
    """As of a variable that is not set: it is a part of every error."""
    line = ["dead-letters", verb, "--config", str(config), "--error", ""]
    assert run_program([*line, "--yes"] if verb != "list" else line) == 64
    assert "--error is empty" in capsys.readouterr().err
    assert len(left(config)) == 3


@pytest.mark.parametrize("named", ["49680…608018", "49680...608018", "1608018"])
@pytest.mark.parametrize("verb", ["show {}", "drop --position {}", "redrive --position {}"])
def test_a_short_form_of_a_position_names_one_letter(config, capsys, verb, named):
    folder = LetterFolder(config.parent / "letters")
    folder.keep(letter(int(f"49680{'1' * 45}608018"), error="the one"))
    folder.keep(letter(int(f"49680{'2' * 45}608019")))

    code = run_program(["dead-letters", *verb.format(named).split(), "--config", str(config)])

    assert code == 0
    out = capsys.readouterr().out
    assert any(part in out for part in ("the one", "Would drop 1 dead letter\n", "1 dead letter"))


def test_a_short_form_of_several_positions_names_them_and_does_nothing(config, capsys):
    folder = LetterFolder(config.parent / "letters")
    positions = [f"49680{digit * 45}608018" for digit in "12"]
    for position in positions:
        folder.keep(letter(int(position)))
    before = left(config)

    for verb in (["show"], ["drop", "--yes", "--position"], ["redrive", "--yes", "--position"]):
        code = run_program(["dead-letters", *verb, "49680…608018", "--config", str(config)])

        assert code == 64
        reported = capsys.readouterr().err
        assert "49680…608018 is short for several positions" in reported
        assert all(position in reported for position in positions)
    assert left(config) == before


def test_a_whole_position_is_no_short_form_of_a_longer_one(config, capsys):
    LetterFolder(config.parent / "letters").keep(letter(112))

    assert run_program(["dead-letters", "show", "11", "--config", str(config)]) == 0
    assert capsys.readouterr().out.count("position ") == 1


def test_an_empty_position_chooses_no_letter(config, capsys):
    code = run_program(["dead-letters", "drop", "--yes", "--position", "", "--config", str(config)])

    assert code == 64
    assert "The position is empty" in capsys.readouterr().err
    assert len(left(config)) == 3


def test_a_letter_is_one_line_of_the_list_whatever_its_text(config, capsys):
    folder = LetterFolder(config.parent / "letters")
    folder.keep(letter(14, error="a\nb\x1b[2J", partition_key="k\nerror          none"))
    (config.parent / "app.yaml").chmod(0o600)
    assert run_program(["dead-letters", "list", "--config", str(config), "--error", "a\n"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("  14  a\\nb\\x1b[2J")
    assert run_program(["dead-letters", "show", "14", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "partition key  k\\nerror          none" in lines
    assert "error          a\\nb\\x1b[2J, after 3 calls" in lines


def test_letters_go_back_into_their_stream_and_stay_until_they_are_there(
    config, capsys, monkeypatch
):
    sent: list[list[str]] = []
    line = ["dead-letters", "redrive", "--to", "stream", "--config", str(config)]

    def send(client: str, stream: str, batch: tuple[PutEntry, ...]) -> None:
        assert (client, stream) == ("client", "orders")
        if len(sent) == 1 and len(left(config)) == 2:
            raise Unavailable("away")
        sent.append([each.partition_key for each in batch])

    monkeypatch.setattr(
        "kclrun.cli.services.Aws",
        lambda _: SimpleNamespace(kinesis_client="client", admin_of=lambda _: None),
    )
    monkeypatch.setattr(put_records, "send_all", send)

    def one_by_one(entries: Iterable[PutEntry], *, one_a_key: bool) -> list[list[PutEntry]]:
        assert one_a_key
        return [[each] for each in entries]

    monkeypatch.setattr(put_records, "batches", one_by_one)
    assert run_program(line) == 0
    plan = f"Would put 3 dead letters of orders back\n{UNCHANGED}"
    assert (capsys.readouterr().out, len(left(config)), sent) == (plan, 3, [])

    assert run_program([*line, "--yes"]) == 69
    assert capsys.readouterr().out == ""
    assert len(left(config)) == 2
    monkeypatch.setattr(put_records, "send_all", lambda *_: sent.append(["again"]))
    assert run_program([*line, "--yes"]) == 0
    assert (left(config), sent[1:]) == ([], [["again"], ["again"]])


def test_one_letter_is_shown_whole_and_its_payload_harmless(config, capsys):
    for position in ("11", "12/3", "13"):
        assert run_program(["dead-letters", "show", position, "--config", str(config)]) == 0

    reported = capsys.readouterr().out
    assert "payload        hello\n" in reported
    assert "payload        base64 AP8=\n" in reported
    assert "\x1b" not in reported
    assert "partition key  other\n" in reported
    assert "error          KeyError: 'price', after 3 calls\n" in reported


@pytest.mark.parametrize(
    ("arguments", "more", "code", "words"),
    [
        (["show", "99"], "", 78, "there is no dead letter at 99"),
        (["list"], "--set on_error={}", 78, "this application keeps no dead letters"),
        (
            ["list"],
            "--set on_error.dead_letter.path=/mising",
            0,
            "0 dead letters: the folder /mising does not exist",
        ),
        (["redrive", "--to", "stream", "--yes"], "--set stream=b", 78, "letters of orders: not"),
        (["redrive", "--yes"], "--set processor=", 78, "processor"),
        (["redrive", "--yes"], "--set state.store=kept", 78, "state is changed by its lease"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_words(config, capsys, arguments, more, code, words):
    line = ["dead-letters", *arguments, "--config", str(config), *more.split()]

    assert run_program(line) == code
    assert words in capsys.readouterr().err
    assert len(left(config)) == 3


PROCESSOR = """
from kclrun import RecordProcessor, RetryLater


class Orders(RecordProcessor):
    def initialize(self, context):
        print("user code may print")
        if context.options.get("is_closed"):
            raise ConnectionError("the warehouse is closed")
        self.context = context

    def process_records(self, batch, checkpointer):
        for record in batch:
            if record.data == b"bad":
                raise ValueError("still bad")
            if self.context.options.get("releases"):
                self.context.release()
            if self.context.options.get("emits"):
                where = f"{self.context.application} {self.context.stream} {self.context.shard_id}"
                self.context.emit({"at": record.sequence_number, "where": where})
"""


@pytest.fixture
def shop(config):
    (config.parent / "shop.py").write_text(PROCESSOR)
    folder = LetterFolder(config.parent / "letters")
    folder.keep(letter(12, data=b"bad"))
    folder.keep(letter(14, 1, data=b"x"))
    return config


def redrive(config: Path, *more: str) -> int:
    return run_program(["dead-letters", "redrive", "--config", str(config), *more])


def test_a_redrive_processes_letters_in_order_and_keeps_those_that_fail_again(shop, capfd):
    rows = shop.parent / "rows"
    more = ("--set", "options={emits: true}", "--set", f"output.path={rows}")

    assert redrive(shop, *more) == 0
    assert capfd.readouterr().out == f"Would process 5 dead letters of orders\n{UNCHANGED}"
    assert redrive(shop, *more, "--yes", "--set", "on_error.retries=0") == 65

    reported = capfd.readouterr()
    assert reported.out == "Processed 4 of 5 dead letters of orders\n"
    assert "shardId-000000000002: ValueError: still bad" in reported.err
    assert "user code may print" in reported.err
    assert left(shop) == ["12"]
    files = sorted(rows.glob("redriven-*.jsonl"))
    assert [line for file in files for line in file.read_text().splitlines()] == [
        '{"at":"13","where":"shop orders shardId-000000000001"}',
        '{"at":"11","where":"shop orders shardId-000000000002"}',
        '{"at":"12","where":"shop orders shardId-000000000002"}',
        '{"at":"14","where":"shop orders shardId-000000000002"}',
    ]


def test_two_redrives_of_a_shard_in_the_same_second_keep_the_rows_of_both(tmp_path, monkeypatch):
    """By two operators; or of two streams, whose shards have the same ids."""
    began = time.gmtime(0)
    monkeypatch.setattr(time, "gmtime", lambda: began)
    for number in (1, 2):
        _GrowingRows(tmp_path).keep(SECOND, Redriven(rows=[{"n": number}]))
    files = tmp_path.glob(f"redriven-1970-01-01T00-00-00Z-{SECOND}-*.jsonl")
    assert sorted(file.read_text() for file in files) == ['{"n":1}\n', '{"n":2}\n']


@pytest.mark.parametrize(
    ("options", "words", "still"),
    [
        ("{is_closed: true}", "ConnectionError: the warehouse is closed", 5),
        ("{emits: true}", "set output.path", 5),
        ("{releases: true}", "", 3),
    ],
)
def test_what_a_redrive_did_not_process_stays_a_letter(shop, capfd, options, words, still):
    more = ("--yes", "--set", f"options={options}", "--set", "on_error.retries=0")
    # One record a batch: what gives its lease away has been given one of its shard.
    assert redrive(shop, *more, "--set", "fetch.batch_max=1") == 65

    assert words in capfd.readouterr().err
    assert len(left(shop)) == still


def test_a_redrive_decodes_and_checks_rows_as_the_runs_do(shop, capfd):
    (shop.parent / "shop.py").write_text(
        "from kclrun import RecordProcessor\n"
        "class Orders(RecordProcessor):\n"
        "    def initialize(self, context): self.emit = context.emit\n"
        "    def process_records(self, batch, checkpointer):\n"
        "        for record in batch: self.emit({'n': record.value})\n"
        "def length(data): return len(data) if data != b'hello' else 'five'\n"
    )
    rows = shop.parent / "rows"
    more = ("--set", f"output.path={rows}", "--set", "output.schema=n long, m string")

    assert redrive(shop, "--yes", "--set", "decode=shop:length", *more) == 65

    assert "column n: expected long, got str" in capfd.readouterr().err
    assert left(shop) == ["11"]
    lines = [line for file in rows.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == 4
    assert all(line.endswith(',"m":null}') for line in lines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import os\nos._exit(3)\n", "the process of the processor ended"),
        ("raise OSError('no licence')\n", "no licence"),
        ("class Orders: pass\n", "not a subclass of RecordProcessor"),
    ],
)
def test_user_code_that_does_not_load_leaves_all_letters(shop, capfd, content, words):
    (shop.parent / "shop.py").write_text(content)

    assert redrive(shop, "--yes") == 65
    assert words in capfd.readouterr().err
    assert len(left(shop)) == 5


def test_letters_of_uncommitted_work_are_left_out_and_told(config, capsys):
    folder = LetterFolder(config.parent / "letters")
    folder.keep(letter(14, shard_id=SECOND, token=5, owner_since=1.0))
    by = LetterOwner(token=9, since=2.0)
    folder.take_over(Takeover(taken_over_at="13", stream="orders", shard_id=SECOND, by=by))
    reported = "1 more do not count: their owner was lost before its checkpoint"

    def run(*words: str) -> str:
        assert run_program(["dead-letters", *words, "--config", str(config)]) == 0
        out, err = capsys.readouterr()
        assert (reported in err) == (words in {("list",), ("redrive",)})
        return out

    assert [line.split()[3] for line in run("list").splitlines()] == ["13", "11", "12/3"]
    assert [line.split()[3] for line in run("list", "--uncommitted").splitlines()] == ["14"]
    assert run("redrive").startswith("Would process 3 dead letters of orders")
    assert "uncommitted    it does not count" in run("show", "14")
    assert run("drop", "--uncommitted", "--yes") == "Dropping 1 dead letter\n"
    assert left(config) == ["13", "11", "12"]
