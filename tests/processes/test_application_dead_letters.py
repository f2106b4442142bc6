"""Records that fail become dead letters, each once and whole, and their shard goes on; [I13]."""

import os
import random
import signal

import msgspec
import pytest

from kclrun.destinations import open_letters
from kclrun.model.letter import LetterDestination
from kclrun.model.wire import WireCredentials, WireEndpoint
from tests.seeds import seed_of

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

RECORDS = 6_000
KEYS = 50


def letters_at(place, aws):
    """The letters at `on_error.dead_letter` that count."""
    kinesis = WireEndpoint(aws.embedded.kinesis_endpoint, "us-east-1", "us-east-1")
    keys, at = WireCredentials("AKIAEXAMPLEEXAMPLE", "secret"), LetterDestination(**place)
    return [
        each.letter
        for each in open_letters(at, kinesis, lambda: keys).kept()
        if not each.is_uncommitted
    ]


@pytest.mark.parametrize("kind", ["path", pytest.param("stream", marks=pytest.mark.slow)])
def test_records_that_fail_are_kept_once_while_processes_are_killed_and_can_be_put_back(
    embedded_aws, application, producer, tmp_path, kind
):
    rng = random.Random(seed_of(4))
    # Each key has a record with such a number.
    poisons = {f"key-{key}:{rng.randrange(RECORDS // KEYS // 2)}" for key in range(0, KEYS, 2)}
    stream = embedded_aws.stream(shards=2)
    place = {kind: str(tmp_path / "letters") if kind == "path" else embedded_aws.stream(shards=1)}

    def letters():
        return letters_at(place, embedded_aws)

    app = application(
        stream,
        options={"poisons": sorted(poisons)},
        on_error={
            "retries": 1,
            "backoff": "20ms",
            "then": "dead-letter",
            "dead_letter": place,
        },
    )
    source = producer(stream, RECORDS, seed=4, rate=2_000, keys=KEYS)
    app.start("--report", str(tmp_path / "report.json"))
    app.until(lambda: app.of("lease_claimed"))
    source.start()
    killed = []

    def is_read():
        seen = len(app.ledger.delivered)
        if len(killed) < 4 and seen > 1_000 * (len(killed) + 1) and app.lease_pids():
            killed.append(rng.choice(app.lease_pids()))
            os.kill(killed[-1], signal.SIGKILL)
        return source.is_done and seen == source.total_put - len(poisons)

    app.until(is_read, 90)
    app.until(lambda: set(killed) <= {ended["process"] for ended in app.of("process_exited")})
    app.until(lambda: len(letters()) == len(poisons))

    put = {number: (key, n) for rows in source.put.values() for number, key, n in rows}
    found = letters()
    assert {f"{key}:{n}" for key, n in (put[each.sequence_number] for each in found)} == poisons
    for letter in found:
        key, n = put[letter.sequence_number]
        data = msgspec.json.decode(letter.data)
        assert (data["key"], data["n"], letter.partition_key) == (key, n, key)
        assert (letter.application, letter.stream) == (app.table, stream)
        assert letter.error == "ValueError: this record is poison"
        assert letter.raised_at.startswith("ledger_processor.py:")
    # A batch that was killed before its checkpoint gives its letters again, into the same files.
    named = {line["position"] for line in app.of("record_dead_lettered")}
    assert named == {letter.sequence_number for letter in found}
    assert not app.of("lease_halted")
    for batch in app.ledger.batches:
        numbers = [int(number) for number, _, _ in batch.records]
        assert numbers == sorted(numbers)

    listed = app.cli("dead-letters", "list", "--config", str(app.config))
    assert f"{len(poisons)} dead letters" in listed.stderr
    app.cure.touch()
    plan = app.cli("dead-letters", "redrive", "--to", "stream", "--config", str(app.config))
    assert plan.stdout.splitlines() == [
        f"Would put {len(poisons)} dead letters of {stream} back",
        "Nothing was changed. To do it, add --yes",
    ]
    done = app.cli(
        "dead-letters", "redrive", "--to", "stream", "--config", str(app.config), "--yes"
    )
    assert (done.returncode, letters()) == (0, []), done.stderr
    app.until(lambda: len(app.ledger.delivered) == source.total_put)
    assert app.stop() == 0
    totals = msgspec.json.decode((tmp_path / "report.json").read_bytes())["totals"]
    # A process that is killed takes the counts of its last moment along.
    assert (
        len(poisons) - len(killed) <= totals["dead_letters"] <= len(app.of("record_dead_lettered"))
    )
    # A batch with several such records has one retry before it is divided.
    assert totals["skipped"] == 0
    assert totals["retries"] > 0


def test_an_outage_halts_the_shard_and_leaves_no_letter(
    embedded_aws, application, producer, tmp_path
):
    stream = embedded_aws.stream(shards=1)
    source = producer(stream, 200, seed=5, keys=1)
    source.start().join()
    ((_, rows),) = source.put.items()
    app = application(
        stream,
        options={"poisons": [f"{key}:{n}" for _, key, n in rows]},
        on_error={
            "retries": 0,
            "then": "dead-letter",
            "dead_letter": {"path": str(tmp_path / "letters")},
        },
    )

    app.start()
    app.until(lambda: app.of("lease_halted"))

    (halted,) = app.of("lease_halted")
    reason = embedded_aws.rows(app.table)[halted["shard"]]["haltReason"]
    assert "it looks like an outage, and nothing was given up; the last error: " in reason
    assert letters_at({"path": str(tmp_path / "letters")}, embedded_aws) == []
    assert app.stop() == 0


@pytest.mark.long
def test_r12_a_letter_of_a_killed_process_is_not_redriven_if_its_record_then_succeeds(
    embedded_aws, application, producer, tmp_path
):
    stream = embedded_aws.stream(shards=1)
    source = producer(stream, 200, seed=6, keys=1)
    source.start().join()
    ((_, rows),) = source.put.items()
    place = {"path": str(tmp_path / "letters")}
    app = application(
        stream,
        options={"poisons": [f"{key}:{n}" for _, key, n in rows[50:51]]},
        checkpoint={"every": "60s"},
        on_error={"retries": 0, "then": "dead-letter", "dead_letter": place},
    )
    app.start()
    app.until(lambda: app.of("record_dead_lettered"))
    app.cure.touch()
    for pid in app.lease_pids():
        os.kill(pid, signal.SIGKILL)

    app.until(lambda: len(app.ledger.delivered) == source.total_put)
    assert app.stop() == 0

    listed = app.cli("dead-letters", "list", "--config", str(app.config))
    assert listed.stderr.startswith("0 dead letters\n1 more do not count"), listed.stderr
    redriven = app.cli("dead-letters", "redrive", "--config", str(app.config), "--yes")
    assert (redriven.returncode, redriven.stdout) == (0, "Nothing to do.\n"), redriven.stderr
