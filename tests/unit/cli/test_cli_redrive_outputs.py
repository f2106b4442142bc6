"""`kclrun dead-letters redrive` with outputs that a fleet writes, too: SQLite and rolled files."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.dead_letters.redrive import leases_now, settled
from kclrun.cli.program import run_program
from kclrun.errors import NotFound
from kclrun.model.lease import Lease, LeaseKey
from kclrun.model.letter import Letter
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.outputs.dead_letters import LetterFolder
from tests.support.letters import letter

# Each redrive is a process.
pytestmark = pytest.mark.seconds

FIRST, SECOND = "shardId-000000000001", "shardId-000000000002"
CREATED = 1_700_000_000.5
PROCESSOR = """
from datetime import datetime, UTC
from kclrun import RecordProcessor

class Orders(RecordProcessor):
    def initialize(self, context):
        self.context, self.kept = context, []

    def process_records(self, batch, checkpointer):
        for record in batch:
            if record.data == b"bad":
                raise ValueError("still bad")
            n, options = int(record.sequence_number), self.context.options
            row = {"n": n, "at": datetime.fromtimestamp(n, UTC)}
            if options.get("buffers"):
                self.kept.append(row)
                if len(self.kept) < 2:
                    return
            self.context.emit(row)
            more = {"more": 1} if n == options.get("misfit") else {}
            self.context.emit(row | more, to="files" if n != options.get("lost") else "nowhere")
"""


def letters_of(config: Path) -> LetterFolder:
    return LetterFolder(config.parent / "letters")


def left(config: Path) -> list[int]:
    return [int(each.letter.sequence_number) for each in letters_of(config).kept()]


@pytest.fixture
def leases(monkeypatch):
    """The lease table; without it (`missing`) the service says so."""
    rows: dict[str, Lease] = {}

    def scan() -> Iterator[SimpleNamespace]:
        if "missing" in rows:
            raise NotFound("no table")
        yield SimpleNamespace(leases=tuple(rows.values()))

    aws = SimpleNamespace(
        kinesis=WireEndpoint("http://127.0.0.1:1", "us-east-1", "us-east-1"),
        credentials=SimpleNamespace(current=lambda: WireCredentials("key", "secret")),
        table=SimpleNamespace(scan=scan),
    )
    monkeypatch.setattr("kclrun.cli.services.Aws", lambda _: aws)
    return rows


def lease(shard: str, at: str, created: float | None = CREATED) -> Lease:
    checkpoint = SHARD_END if at == "SHARD_END" else ExtendedSequenceNumber(at)
    made = None if created is None else WallTime(created)
    return Lease(key=LeaseKey(shard), checkpoint=checkpoint, stream_created_at=made)


def kept(number: int, shard: str = FIRST, **more: object) -> Letter:
    fields = {"data": b"x", "stream_created_at": CREATED, **more}
    return letter(number, shard_id=shard, **fields)


@pytest.fixture
def shop(tmp_path):
    (tmp_path / "shop.py").write_text(PROCESSOR)
    file = tmp_path / "app.yaml"
    schema = "n long NOT NULL, at timestamp"
    outputs = {
        "files": {"path": str(tmp_path / "files"), "roll": {}, "format": "json", "schema": schema},
    }
    settings = {
        "application": "shop",
        "stream": "orders",
        "processor": "shop:Orders",
        "on_error": {
            "then": "dead-letter",
            "retries": 0,
            "dead_letter": {"path": str(tmp_path / "letters")},
        },
        "output": {
            "sql": f"sqlite:///{tmp_path / 'rows.db'}",
            "table": "orders",
            "schema": schema,
            "create": True,
        },
        "outputs": outputs,
    }
    file.write_text(json.dumps(settings))
    for each in (kept(11), kept(13), kept(12, SECOND)):
        letters_of(file).keep(each)
    return file


def redrive(config: Path, *more: str) -> int:
    return run_program(["dead-letters", "redrive", "--config", str(config), "--yes", *more])


def in_sql(config: Path) -> list[int]:
    try:
        with closing(sqlite3.connect(config.parent / "rows.db")) as database:
            return [n for (n,) in database.execute("SELECT n FROM orders ORDER BY n")]
    except sqlite3.OperationalError:
        return []


def in_files(config: Path) -> list[int]:
    files = (config.parent / "files").glob("**/[!.]*.json*")
    return sorted(json.loads(line)["n"] for file in files for line in file.read_text().splitlines())


def test_rows_of_letters_reach_every_output_with_their_types_and_the_letters_go(
    shop, leases, capfd
):
    assert redrive(shop) == 0

    assert capfd.readouterr().out == "Processed 3 of 3 dead letters of orders\n"
    assert (in_sql(shop), in_files(shop), left(shop)) == ([11, 12, 13], [11, 12, 13], [])
    made = sorted(
        str(each.relative_to(shop.parent)) for each in shop.parent.glob("files/**/*.json*")
    )
    assert made[0].startswith(
        "files/shop/orders/20231114T221320Z/shardId-000000000001/0-redriven/11-"
    )


@pytest.mark.long
def test_a_redrive_that_was_killed_before_it_removed_the_letters_is_repeated_without_a_second_row(
    shop, leases, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as now:
        now.setattr(LetterFolder, "remove", killed)
        with pytest.raises(Killed):
            redrive(shop)
    assert (in_sql(shop), len(left(shop))) == ([11, 13], 3)

    assert redrive(shop) == 0
    # A former owner of the lease that comes back keeps the letter of its record again.
    letters_of(shop).keep(kept(11, given_up_at=99.0))
    assert redrive(shop) == 0
    assert (in_sql(shop), in_files(shop), left(shop)) == ([11, 12, 13], [11, 12, 13], [])


@pytest.mark.parametrize(
    ("rows", "waiting"),
    [
        ([], []),
        ([lease(FIRST, "12"), lease(SECOND, "12")], [13]),
        ([lease(FIRST, "SHARD_END"), lease(SECOND, "TRIM_HORIZON")], [12]),
        ([lease(FIRST, "10", created=None)], [11, 13]),
        # The stream was made again: nothing reads the records of the old one.
        ([lease(FIRST, "10", created=CREATED + 9)], []),
        # Among several streams, a lease of another one says nothing.
        ([lease(f"1:other:1700000000:{FIRST}", "10")], []),
        ([lease(f"1:orders:1700000000:{FIRST}", "10")], [11, 13]),
        (["missing"], []),
    ],
)
def test_a_letter_waits_until_no_process_reads_its_record_again(shop, leases, capfd, rows, waiting):
    leases.update({getattr(each, "key", "missing"): each for each in rows})

    known = leases_now(ConfigChoice(shop).load().settings)
    ready = settled(known, [*letters_of(shop).kept()])

    numbers = [int(each.letter.sequence_number) for each in ready]
    assert sorted(numbers) == sorted({11, 12, 13} - set(waiting))
    reported = (
        f"{len(waiting)} dead letters of orders wait for the checkpoint of their shard to pass them"
    )
    assert (reported in capfd.readouterr().err) == bool(waiting)


def test_letters_that_wait_stay_and_the_exit_code_says_so(shop, leases):
    leases[FIRST] = lease(FIRST, "12")

    assert redrive(shop) == 65

    assert (left(shop), in_sql(shop), in_files(shop)) == ([13], [11, 12], [11, 12])


@pytest.mark.parametrize(
    ("options", "words", "stays"),
    [
        ("misfit: 11", "the row does not fit outputs.files.schema: column more", 11),
        ("lost: 13", "there is no outputs.nowhere in the settings", 13),
    ],
)
def test_a_letter_whose_rows_one_output_refuses_stays_and_no_output_has_them(
    shop, leases, capfd, options, words, stays
):
    assert redrive(shop, "--set", f"options={{{options}}}") == 65

    assert words in capfd.readouterr().err
    others = sorted({11, 12, 13} - {stays})
    assert (left(shop), in_sql(shop), in_files(shop)) == ([stays], others, others)


@pytest.mark.long
def test_what_fails_again_stays_and_a_database_that_is_away_keeps_every_letter(shop, leases, capfd):
    letters_of(shop).keep(kept(12, data=b"bad"))
    away = f"output.sql=sqlite:///{shop.parent}/none/rows.db"
    assert redrive(shop, "--set", away, "--shard", "1") == 65
    assert "shardId-000000000001: output: cannot begin at table orders" in capfd.readouterr().err
    assert (in_files(shop), len(left(shop))) == ([], 4)

    assert redrive(shop) == 65
    assert (left(shop), in_sql(shop)) == ([12], [11, 12, 13])


def test_under_manual_checkpoints_a_letter_goes_only_once_the_processor_has_checkpointed_it(
    shop, leases
):
    assert (
        redrive(shop, "--set", "checkpoint.every=manual", "--set", "options={buffers: true}") == 65
    )

    assert (len(left(shop)), in_sql(shop)) == (3, [])
