"""`kclrun reset` against rows in memory: what it refuses, says, writes, and leaves if it is cut."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kclrun.model.lease import OFFERED, Halt, Lease
from kclrun.model.output import Cursor, StoredCursors
from kclrun.model.sequence import LATEST, SHARD_END, TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.stream import stream_key
from kclrun.model.time import WallTime
from kclrun.operating.reset import position_at
from kclrun.protocol.writes import Applied, CreateLease, OutcomeUnknown, Refused, Take
from tests.unit.cli.memory_site import CONFIG, JAVA, A, Called, Site, key, site_for

UNCHANGED = "Nothing was changed. To do it, add --yes"
DONE = "The next fleet to start begins there."
MID = ExtendedSequenceNumber("49500000000000000000000000000000000000000000000000000007")
Call = Callable[..., Called]


@pytest.fixture
def site(monkeypatch, tmp_path):
    """Shard 0 was read to its end, shards 2 and 3 came of it; shard 1 has no children."""
    site = site_for(monkeypatch, tmp_path)
    site.clock.now += 3600.0
    split(site)
    site.plant(0, A, SHARD_END, children=frozenset({key(2), key(3)}), counter=9)
    site.plant(1, A, MID, counter=5, outputs=StoredCursors(MID, (("x", Cursor(MID)),)))
    site.plant(2, A, MID, parents=frozenset({key(0)}), halt=Halt("poison", WallTime(1.0)))
    site.plant(3, None, TRIM_HORIZON, parents=frozenset({key(0)}))
    return site


def split(site: Site, name: str = "orders") -> None:
    now = WallTime(site.clock.now)
    stream = site.kinesis.stream(name, None, now)
    site.kinesis.split_shard(stream, key(0), 2**126, now)
    site.clock.now += 3600.0


def rows(site: Site) -> dict[str, Lease]:
    return {row.key: row for page in site.rows.scan() for row in page.leases}


def fate(site: Site) -> dict[int, tuple[ExtendedSequenceNumber, int, bool]]:
    """By the number of the shard: position, generation, and whether it is halted."""
    return {
        int(row.key[-2:]): (row.checkpoint, row.generation, row.halt is not None)
        for row in rows(site).values()
    }


def test_without_yes_the_plan_names_every_row_and_nothing_is_written(site, call):
    before = rows(site)

    code, said, reported = call("reset --to TRIM_HORIZON")

    assert (code, reported) == (0, [])
    removed = "removed: it comes again when its parents end"
    assert said == [
        "orders, table orders: to TRIM_HORIZON, generation 1",
        f"  {key(0)}: SHARD_END to TRIM_HORIZON",
        f"  {key(1)}: 49500…000007 to TRIM_HORIZON",
        f"  {key(2)}: 49500…000007, {removed}",
        f"  {key(3)}: TRIM_HORIZON, {removed}",
        "What the processor itself did elsewhere, it does again for records read again.",
        "Leases have owners: with --yes nothing is written while one of them renews.",
        "Stop the fleet first.",
        UNCHANGED,
    ]
    assert rows(site) == before
    assert site.clock.slept == []


def instant(site: Site, before_s: float) -> tuple[str, ExtendedSequenceNumber]:
    at = site.clock.now - before_s
    return site.clock.strftime("%Y-%m-%dT%H:%M:%SZ", site.clock.gmtime(at)), position_at(
        WallTime(at)
    )


def test_the_rows_are_those_of_a_first_sync_one_generation_up(site, call):
    before_the_split, at_before = instant(site, 5400.0)
    after_the_split, at_after = instant(site, 600.0)

    for generation, (to, position, shards) in enumerate(
        [
            ("TRIM_HORIZON", TRIM_HORIZON, (0, 1)),
            ("LATEST", LATEST, (1, 2, 3)),
            ("LATEST", LATEST, (1, 2, 3)),
            (before_the_split, at_before, (0, 1)),
            (after_the_split, at_after, (1, 2, 3)),
        ],
        start=1,
    ):
        code, said, _ = call(f"reset --to {to} --yes")

        assert (code, said[-1]) == (0, DONE)
        assert fate(site) == dict.fromkeys(shards, (position, generation, False))
        for row in rows(site).values():
            assert (row.owner, row.outputs, row.children) == (None, None, frozenset())
            assert row.latest_pinned_at == (site.clock.now if position == LATEST else None)
    code, said, _ = call("doctor")
    assert code == 0, said


def test_a_fleet_that_lives_and_java_workers_are_not_reset(site, call):
    site.live(A)

    code, _, reported = call("reset --to TRIM_HORIZON --yes")

    assert code == 78
    assert "2 leases are being renewed, by kclrun:az1:host1:nonce" in "\n".join(reported)
    assert {row.generation for row in rows(site).values()} == {0}

    site.plant(1, JAVA, MID)
    code, _, reported = call("reset --to TRIM_HORIZON")
    assert code == 78
    assert "1 leases belong to Java workers, java-worker among them" in reported[0]


def test_a_manager_that_starts_while_the_counters_are_watched_is_seen(site, call):
    site.clock.acts.append(lambda: site.rows.write(Take(key(3), A, None, 1, 1.0, "LATEST")))

    assert call("reset --to TRIM_HORIZON --yes")[0] == 78


# Two rows to begin, two to halt, two to remove, two to finish. A manager that takes a row which is
# only to be finished is no obstacle.
REFUSED = Refused("AccessDeniedException", "no")


@pytest.mark.parametrize(
    ("outcome", "cut", "code"),
    [*((REFUSED, cut, 77) for cut in range(8)), *((None, cut, 75) for cut in range(6))],
)
def test_a_reset_that_is_cut_leaves_halted_leases_that_name_it_and_is_made_again(
    site, call, monkeypatch, outcome, cut, code
):
    write, sent = site.rows.write, []

    def cutting(change: Any) -> Any:
        sent.append(change)
        if len(sent) != cut + 1:
            return write(change)
        if outcome is not None:
            return outcome
        row = rows(site)[change.key]
        taken = msgspec.structs.replace(row, counter=row.counter + 7, owner=A)
        site.rows._put(change.key, taken)
        return write(change)

    with monkeypatch.context() as patched:
        patched.setattr("kclrun.cli.leases.rows._AT_ONCE", 1)
        patched.setattr(site.rows, "write", cutting)
        got, _, reported = call("reset --to TRIM_HORIZON --yes")

    assert got == code
    assert reported[-1].startswith("The reset is not complete: the leases that it began are halted")
    halts = [row.halt.reason for row in rows(site).values() if row.halt is not None]
    assert any(each.startswith("a reset to TRIM_HORIZON was begun at 2023-") for each in halts)
    assert call("reset --to TRIM_HORIZON --yes")[0] == 0
    assert fate(site) == dict.fromkeys((0, 1), (TRIM_HORIZON, 2, False))


def test_each_row_that_a_stage_cannot_write_is_named_and_the_others_are_written(
    site, call, monkeypatch
):
    write = site.rows.write
    bad = {key(0), key(2)}
    monkeypatch.setattr(
        site.rows, "write", lambda change: REFUSED if change.key in bad else write(change)
    )

    code, _, reported = call("reset --to TRIM_HORIZON --yes")

    assert code == 77
    assert {line.split(":")[0] for line in reported[1:-1]} == bad
    assert reported[-1].startswith("The reset is not complete")
    assert rows(site)[key(1)].checkpoint == TRIM_HORIZON


def test_a_write_whose_answer_is_lost_is_not_made_twice(site, call, monkeypatch):
    write, lost = site.rows.write, set()

    def losing(change: Any) -> Any:
        outcome = write(change)
        if isinstance(outcome, Applied) and change not in lost:
            lost.add(change)
            return OutcomeUnknown("timed out")
        return outcome

    monkeypatch.setattr(site.rows, "write", losing)

    code, said, _ = call("reset --to TRIM_HORIZON --yes")

    assert (code, said[-1]) == (0, DONE)
    assert fate(site) == dict.fromkeys((0, 1), (TRIM_HORIZON, 1, False))
    assert {row.counter for row in rows(site).values()} == {10, 6}


# One shard alone


def test_one_shard_is_reset_alone_and_its_children_wait(site, call):
    assert call("reset --to LATEST --shard 1 --yes")[0] == 0
    assert fate(site)[1] == (LATEST, 1, False)
    assert fate(site)[0] == (SHARD_END, 0, False)

    site.plant(2, None, TRIM_HORIZON, parents=frozenset({key(0)}))
    assert call("reset --to TRIM_HORIZON --shard 0 --yes")[0] == 0
    assert fate(site)[0] == (TRIM_HORIZON, 2, False)
    assert fate(site)[2] == (TRIM_HORIZON, 0, False)


def test_a_shard_whose_children_have_begun_is_not_reset_alone(site, call):
    code, _, reported = call("reset --to TRIM_HORIZON --shard 0")

    assert code == 78
    assert f"{key(2)} descends from {key(0)} and has begun" in reported[0]
    assert call("reset --to TRIM_HORIZON --shard 0 --shard 2")[0] == 0
    site.plant(7, None, MID)
    assert "is not listed any more" in call("reset --to LATEST --shard 7")[2][0]
    assert call("reset --to LATEST --shard 8")[0] == 66


# Refused, and said


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("reset --to LATEST --outputs keep", 64, "would begin where it stands, and so undo"),
        ("reset --to LATEST --shard 1 --stream orders", 64, "leave --stream out"),
        (
            "reset --to LATEST --set state.store=kept",
            78,
            "With --state drop each lease begins with",
        ),
        (
            "reset --to TRIM_HORIZON --set state.store=kept",
            78,
            "at the checkpoints as they are with  kclrun state rebuild",
        ),
        ("reset --to LATEST --state drop", 78, "the settings have no `state:`"),
        (
            "reset --to LATEST --shard 1 --state drop --set state.store=kept",
            78,
            "an empty state begins where a whole stream begins anew",
        ),
        ("reset --to nowhere.json", 78, "nowhere.json cannot be read: No such file"),
        (
            "reset --to LATEST --stream other",
            78,
            "other is not a stream of this application: orders",
        ),
        ("reset --to yesterday", 64, "'--to': expected TRIM_HORIZON, LATEST, 2026-03-01T06:00:00Z"),
        ("reset --to 2023-11-01T00:00:00Z", 78, "orders keeps records for 24 h, and was created"),
        ("reset --to 2923-11-01T00:00:00Z", 64, "to come are read with LATEST"),
    ],
)
def test_what_cannot_be_reset_is_reported(call, line, code, words):
    got, _, reported = call(line)

    assert got == code
    assert words in " ".join(reported)


def test_dropped_state_goes_with_the_rows_and_the_plan_says_so(site, call):
    site.plant(1, A, MID, state_version="v1")
    dropping = "reset --to TRIM_HORIZON --state drop --set state.store=kept"

    said = call(dropping)[1]
    assert "  state: dropped, with its timers: each lease begins with an empty one" in said
    assert call(f"{dropping} --yes")[0] == 0
    assert {row.state_version for row in rows(site).values()} == {None}


# To kept positions


def keep(site: Site, call: Call) -> Path:
    """What `leases --json` prints now, in a file."""
    file = site.folder / "kept.json"
    file.write_text("\n".join(call("leases --json")[1]))
    return file


def numbered(site: Site) -> tuple[ExtendedSequenceNumber, ...]:
    """A record of shard 1, and a later one of shard 2."""
    first, later = site.put(2**127), site.put(1, after_s=60.0)
    return tuple(ExtendedSequenceNumber(text) for text in (*first, *later))


def test_kept_positions_are_put_back_and_what_came_of_them_waits_again(site, call):
    one, two = numbered(site)
    site.plant(0, A, SHARD_END, children=frozenset({key(2), key(3)}), counter=9)
    site.plant(1, A, TRIM_HORIZON)
    site.plant(2, A, two, parents=frozenset({key(0)}))
    site.plant(3, A, TRIM_HORIZON, parents=frozenset({key(0)}))
    now = keep(site, call)
    file = site.folder / "former.json"
    kept = [
        {"shard": key(0), "checkpoint": "TRIM_HORIZON"},
        {"shard": key(1), "checkpoint": f"{one}+3"},
    ]
    file.write_text(msgspec.json.encode(kept).decode())

    code, said, reported = call(f"reset --to {file} --yes")

    assert (code, reported) == (0, ["Watching the counters for 1 s …"])
    assert f"  {key(0)}: SHARD_END to TRIM_HORIZON" in said
    assert any(line.endswith("forward, what is between is skipped") for line in said)
    assert f"  {key(3)}: TRIM_HORIZON, removed: it comes again when its parents end" in said
    assert fate(site) == {0: (TRIM_HORIZON, 1, False), 1: (one, 1, False)}

    code, said, _ = call(f"reset --to {now} --yes")

    assert code == 0
    assert fate(site) == {
        0: (SHARD_END, 2, False),
        1: (TRIM_HORIZON, 2, False),
        2: (two, 2, False),
        3: (TRIM_HORIZON, 2, False),
    }
    assert call("doctor")[0] == 0


def test_kept_positions_that_would_lose_or_reorder_records_are_refused(site, call):
    one, two = numbered(site)
    horizon, end = "TRIM_HORIZON", "SHARD_END"
    file = site.folder / "kept.json"
    for lines, more, words in (
        ({0: horizon}, "", f"lead to no lease of {key(1)}"),
        ({1: str(one), 2: horizon, 0: end}, "", f"lead to no lease of {key(3)}"),
        ({0: horizon, 1: str(one), 2: str(two)}, "", "they are not of one moment"),
        ({0: horizon, 1: str(MID)}, "", f"{key(1)} never had a record 49500"),
        ({0: horizon, 1: horizon, 7: horizon}, "", f"{key(7)} is not listed any more"),
        ({1: "LATEST", 0: horizon}, "", "`starts_at` does not say of which instant"),
        ({1: "yesterday", 0: horizon}, "", "'yesterday' is not a checkpoint"),
        ({}, "", "has no position"),
        ({0: horizon, 1: str(one)}, "--shard 0", f"{key(2)} descends from {key(0)} and has begun"),
        ({0: end, 1: str(one)}, "--shard 0", "had ended when its position was kept"),
        ({0: horizon}, "--shard 1", f"the kept positions do not have {key(1)}"),
    ):
        kept = [{"shard": key(shard), "checkpoint": at} for shard, at in lines.items()]
        file.write_text(msgspec.json.encode(kept).decode())

        code, _, reported = call(f"reset --to {file} {more}")

        assert code == 78, (lines, reported)
        assert words in " ".join(reported)
    for text in ("", "{}", '[{"shard": 3}]', '[{"shard": "s", "checkpoint": "1"}, 7]', "\0"):
        file.write_text(text)
        assert "is not what  kclrun leases --json  prints" in call(f"reset --to {file}")[2][0]
    assert {row.generation for row in rows(site).values()} == {0}


def test_one_shard_goes_to_its_kept_position(site, call):
    one, _ = numbered(site)
    file = site.folder / "kept.json"
    file.write_text(msgspec.json.encode([{"shard": key(1), "checkpoint": str(one)}]).decode())

    assert call(f"reset --to {file} --shard 1 --yes")[0] == 0
    assert fate(site)[1] == (one, 1, False)
    assert fate(site)[0] == (SHARD_END, 0, False)


def test_a_table_with_a_broken_row_or_of_a_stream_without_leases_is_refused(site, call):
    for number in range(4):
        site.rows.uproot(key(number))
    assert "orders has no lease yet" in call("reset --to LATEST")[2][0]

    site.rows.plant({"leaseKey": {"S": "shardId-9"}})
    assert "shardId-9 cannot be read as a lease" in call("reset --to LATEST")[2][0]


def test_the_plan_says_what_becomes_of_each_output_and_of_dead_letters(site, call):
    site.plant(0, OFFERED, MID, generation=3)
    site.configure(
        CONFIG + "processor: mine:Mine\non_error: {then: dead-letter, dead_letter: {path: dead}}\n"
        "output: {path: rows}\n"
        "outputs:\n"
        "  objects: {s3: 's3://bucket/in'}\n"
        "  items: {dynamodb: things}\n"
        "  queue: {sqs: q}\n"
    )

    _, said, reported = call("reset --to LATEST")
    assert reported == []

    text = "\n".join(said)
    assert "generation 4" in text
    assert "  output: rows go to new files, SHARD.4.jsonl in rows; those of before stay" in said
    assert "outputs.objects: rows appear again, in folders …/SHARD/4/ of s3://bucket/in" in text
    assert "outputs.items: items are put again into things, over those of the same key" in text
    assert "outputs.queue: messages are sent again" in text
    assert "Dead letters stay." in text

    for more, words in (
        ("", "output: rows are inserted again into t, beside those of before"),
        (", write: upsert, key: [id]", "output: rows appear again in t, and replace those of the"),
    ):
        site.configure(
            CONFIG + f"processor: mine:Mine\noutput: {{sql: 'sqlite:///x.db', table: t{more}}}\n"
        )
        assert words in "\n".join(call("reset --to LATEST")[1])


def test_of_several_streams_one_is_reset_and_the_others_stay(site, call):
    for number in range(4):
        site.rows.uproot(key(number))
    site.make_stream("audits", 1)
    site.configure(
        "application: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
        "leases: {failover: 1s}\nstreams: [{name: orders}, {name: audits}]\n"
    )
    keys = {}
    for name in ("orders", "audits"):
        summary = site.stream(name).summary()
        keys[name] = stream_key(summary.arn, summary.created_at)
        lease = Lease(key=key(0, f"{keys[name]}:"), checkpoint=MID)
        assert isinstance(site.rows.write(CreateLease(lease)), Applied)

    code, said, _ = call("reset --to LATEST --stream audits --yes")

    assert (code, said[-1]) == (0, DONE)
    found = rows(site)
    assert found[key(0, f"{keys['orders']}:")].checkpoint == MID
    assert found[key(0, f"{keys['audits']}:")].checkpoint == LATEST
    assert len(found) == 2
    assert call("reset --to TRIM_HORIZON --yes")[0] == 0
    assert {row.generation for row in rows(site).values()} == {1, 2}
