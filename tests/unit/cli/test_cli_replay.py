"""The pieces of `kclrun replay`: its settings and its plan, what it refuses, and how rows of two
versions are compared."""

import json

import pytest

from kclrun.cli.config_options import Configuration
from kclrun.cli.program import run_program
from kclrun.cli.replay.command import _claim_folder, _show, compare, files_of
from kclrun.config.load import settings_of
from kclrun.config.units import parse_start
from kclrun.errors import SettingsError
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.comparing import Comparison, Difference
from kclrun.operating.replay import (
    ReplayOptions,
    plan_lines,
    refuse_keys,
    refuse_label,
    replay_of,
    replay_table,
    settings_of_replay,
)
from kclrun.outputs.emitted_rows import CursorRows

NOW = WallTime(1_900_000_000.0)
FOLDER = "/rows"
TEXT = """
application: orders
stream: orders
processor: mine:Mine
fetch: {mode: fan-out, consumer: orders}
leases: {table: orders-leases, failover: 3s}
observe: {listen: 9400, cloudwatch: {}}
instance: {watch: on, termination_hook: drain}
on_error: {then: dead-letter, dead_letter: {s3: s3://letters/orders}}
state: {store: s3://state/orders}
until: caught-up
summary: mine:told
output: {path: rows}
outputs:
  objects: {s3: s3://rows/orders, format: parquet, schema: n long}
  sql: {sql: 'sqlite:///rows.db', table: rows, schema: n long, create: true}
  queue: {sqs: orders.fifo, key: [n]}
"""


def settings(text=TEXT):
    return settings_of(text, environment={}, now=NOW)


def asked(**changes):
    start = parse_start("2026-03-01T06:00:00Z", NOW, "--from")
    return ReplayOptions(**{"start": start, "until_at": WallTime(1772348400.5), **changes})


def test_a_replay_has_nothing_in_common_with_the_fleet_but_the_stream():
    live = settings()

    made = settings_of_replay(live, asked(), FOLDER)

    table = "orders-replay-20260301T060000.000Z-20260301T070000.500Z"
    assert (made.application, made.table, made.start) == (
        table,
        table,
        "2026-03-01T06:00:00.000+00:00",
    )
    assert (made.until, made.leases.create, made.leases.cleanup) == ("caught-up", True, False)
    assert (made.fetch.mode, made.fetch.consumer) == ("polling", None)
    assert (made.observe.listen, made.observe.cloudwatch, made.instance.watch) == (
        None,
        None,
        False,
    )
    assert made.instance.termination_hook is None
    assert made.on_error.dead_letter.path == "/rows/dead-letters"
    assert made.on_error.dead_letter.s3 is None
    assert made.state.store == "/rows/state"
    assert made.output.path == "/rows/output"
    assert {name: output.path for name, output in made.outputs.items()} == {
        name: f"/rows/{name}" for name in ("objects", "sql", "queue")
    }
    assert {output.format for output in made.outputs.values()} == {None}  # JSON lines
    assert (made.stream, made.processor, made.leases.failover) == ("orders", "mine:Mine", 3)


def test_with_the_same_outputs_files_and_state_are_still_its_own():
    made = settings_of_replay(settings(), asked(has_same_outputs=True), FOLDER)

    assert made.outputs == settings().outputs
    assert (made.output.path, made.state.store) == ("/rows/output", "/rows/state")
    lines = "\n".join(plan_lines(settings(), made, asked(has_same_outputs=True)))
    assert lines == (
        "orders: from 2026-03-01T06:00:00.000Z up to 2026-03-01T07:00:00.500Z\n"
        "  leases: of its own, in table orders-replay-20260301T060000.000Z-20260301T070000.500Z;"
        " those of the fleet are not touched\n"
        "  output: JSON lines in /rows/output, a file a shard\n"
        "  outputs.objects: THE SAME place s3://rows/orders: more objects, named by the replay\n"
        "  outputs.sql: THE SAME table rows: its rows are inserted again\n"
        "  outputs.queue: THE SAME destination: messages are sent again\n"
        "  state: begins empty, in /rows/state: what records before the range left is missing\n"
        "  dead letters: in /rows/dead-letters\n"
        "  What the processor itself does elsewhere, it does again."
    )


def test_the_name_tells_ranges_keys_and_labels_apart_and_no_key_is_in_it():
    start = parse_start("TRIM_HORIZON", NOW, "--from")
    names = [
        asked().name,
        asked(until_at=WallTime(1772348400.501)).name,
        asked(start=start).name,
        asked(keys=("customer-7",)).name,
        asked(keys=("customer-7", "b")).name,
        asked(label="audit").name,
        asked(side="A", processor="a:B").name,
    ]

    assert len(set(names)) == len(names)
    assert asked(keys=("a", "b")).name == asked(keys=("b", "a")).name
    assert not any("customer" in name for name in names)
    assert "customer" not in repr(replay_of(settings(), asked(keys=("customer-7",))))
    with pytest.raises(SettingsError, match="letters, digits"):
        refuse_label("a-b")
    with pytest.raises(SettingsError, match="characters"):
        replay_table(
            settings(TEXT.replace("application: orders", f"application: {'a' * 230}")), asked()
        )


def test_more_keys_than_a_start_command_has_room_for_are_refused():
    refuse_keys(["k" * 256] * 32)

    with pytest.raises(SettingsError, match="--key: 8,193 bytes, at most 8,192: each start of a"):
        refuse_keys(["k" * 256] * 32 + ["k"])


@pytest.mark.parametrize(
    ("said", "code", "part"),
    [
        ((), 64, "--from TIME and --to TIME"),
        (("--from", "2026-03-01T06:00:00Z", "--to", "2026-03-01T06:00:00Z"), 64, "empty"),
        (
            ("--from", "LATEST", "--to", "2026-03-01T06:00:00Z"),
            64,
            "expected TRIM_HORIZON, 2026-03-01T06:00:00Z",
        ),
        (("--from", "TRIM_HORIZON", "--to", "LATEST"), 64, "'--to': expected 2026-03-01T06:00:00Z"),
        (("--from", "TRIM_HORIZON", "--to", "2999-03-01T06:00:00Z"), 64, "in the future"),
        (("--from", "TRIM_HORIZON", "--to", "2026-03-01T06:00:00Z", "--as", "a/b"), 78, "--as"),
        (
            (
                "--from",
                "TRIM_HORIZON",
                "--to",
                "2026-03-01T06:00:00Z",
                "--set",
                "engine=spark",
                "--set",
                "spark.checkpoint=/tmp/none",
            ),
            78,
            "as a batch",
        ),
        (("--set", "aws.endpoint=embedded", "--list"), 78, "nothing to replay"),
    ],
)
def test_what_no_replay_can_be_made_of_is_refused_in_words(tmp_path, capsys, said, code, part):
    config = tmp_path / "app.yaml"
    config.write_text("application: orders\nstream: orders\nprocessor: mine:Mine\n")

    assert run_program(["replay", "--config", str(config), *said]) == code
    assert part in capsys.readouterr().err


def write(folder, shard, *records):
    """The file of a shard; each record is (number, its rows as (output, row))."""
    with CursorRows.open(folder, shard, TRIM_HORIZON) as rows:
        for number, emitted in records:
            position = ExtendedSequenceNumber(str(number))
            rows.begin_batch()
            for to, row in emitted:
                rows.keep(to, json.dumps(row).encode() + b"\n")
            rows.end_batch(position)
        rows.make_durable(position)


def test_rows_are_matched_by_record_output_and_number(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    same = ("output", {"n": 1})
    write(a, "s0", (9, [same]), (10, [same, ("x", {"n": 2}), ("output", {"n": 3, "gone": None})]))
    write(b, "s0", (9, [same]), (10, [("x", {"n": 2}), same, ("output", {"n": 4})]), (12, [same]))
    write(a, "s1", (5, [same]))
    counts = Comparison()

    found = list(compare(a, b, counts))

    assert [(each.shard, each.at, each.to, each.kind, each.changed) for each in found] == [
        ("s0", "10", "output", "changed", ("n", "gone")),
        ("s0", "12", "output", "only in B", ()),
        ("s1", "5", "output", "only in A", ()),
    ]
    assert (counts.equal, counts.changed, counts.only_a, counts.only_b) == (3, 1, 1, 1)
    assert not counts.is_same


def test_rows_of_a_call_that_raised_are_not_among_those_that_are_compared(tmp_path):
    with CursorRows.open(tmp_path, "s0", TRIM_HORIZON) as rows:
        rows.begin_batch()
        rows.keep("output", b'{"n":1}\n')
        rows.take_back_batch()
        rows.begin_batch()
        rows.keep("output", b'{"n":2}\n')
        rows.cover(ExtendedSequenceNumber("7"))  # user code checkpoints, and goes on
        rows.keep("output", b'{"n":3}\n')
        rows.end_batch(ExtendedSequenceNumber("7"))
        rows.make_durable(ExtendedSequenceNumber("7"))

    lines = [json.loads(line) for line in (tmp_path / "s0.jsonl").read_text().splitlines()]
    assert lines == [
        {"at": "7", "ordinal": 0, "to": "output", "row": {"n": 2}},
        {"at": "7", "ordinal": 1, "to": "output", "row": {"n": 3}},
    ]


def claim(folder, label="", processor=None, *, is_new=True):
    side = "A" if processor else ""
    each = asked(label=label, processor=processor, side=side)
    configuration = Configuration(settings(), folder, folder / "app.yaml")
    _claim_folder(files_of(configuration, each, folder), is_new=is_new)


def test_a_folder_belongs_to_one_replay_and_is_never_taken_with_files_of_another(tmp_path):
    folder = tmp_path / "rows"
    claim(folder)
    claim(folder)  # the start failed before there was a lease table
    (folder / "output").mkdir()
    claim(folder, is_new=False)
    with pytest.raises(SettingsError, match="has files already"):
        claim(folder)  # its leases were removed: reading begins anew, and the rows are there
    with pytest.raises(SettingsError, match="has files already"):
        claim(folder, "other")
    with pytest.raises(SettingsError, match="has files already"):
        claim(folder, "other", is_new=False)


def test_a_comparison_begins_its_own_folder_anew_and_no_other(tmp_path):
    folder = tmp_path / "rows"
    claim(folder, processor="a:B")
    (folder / "s0.jsonl").touch()
    claim(folder, processor="a:B", is_new=False)
    assert (folder / "s0.jsonl").exists()
    claim(folder, processor="a:B")
    assert not (folder / "s0.jsonl").exists()
    (folder / ".kclrun-replay").unlink()
    (folder / "notes").touch()
    with pytest.raises(SettingsError, match="has files already"):
        claim(folder, processor="a:B")


@pytest.mark.parametrize(("is_terminal", "shown"), [(False, 50), (True, 20)])
def test_a_comparison_shows_all_differences_in_a_pipe(
    tmp_path, capsys, monkeypatch, is_terminal, shown
):
    found = [
        Difference("a", str(number), "output", 0, {"n": 1}, {"n": 2}, ("n",))
        for number in range(50)
    ]
    counts = Comparison()
    counts.changed = 50
    monkeypatch.setattr("kclrun.cli.tables.terminal_width", lambda: 100 if is_terminal else None)

    _show(iter(found), counts, tmp_path / "differences.jsonl")

    out = capsys.readouterr().out
    assert out.count("n: 1 → 2") == shown
    assert ("… and 30 more" in out) == is_terminal
    assert len((tmp_path / "differences.jsonl").read_text().splitlines()) == 50
