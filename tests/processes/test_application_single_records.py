"""Records of a shard at the same time, in whole applications: killed, drained, stuck."""

import contextlib
import os
import random
import signal
import sqlite3
from collections import defaultdict

import pytest

from tests.processes.test_application_dead_letters import letters_at

pytest_plugins = ("tests.processes.ledger_rig.fixtures",)

KEYS = 20


class Singles:
    """An application with `concurrency`, its notes of calls and its rows."""

    def __init__(self, application, stream, folder, kind, **settings):
        self.calls_path = folder / "calls"
        self.database = folder / "rows.db"
        options = {"calls": str(self.calls_path), **settings.pop("options", {})}
        self.app = application(
            stream,
            processor=f"single_processor:{kind}",
            **settings.pop("at_once", {"concurrency": {"records": 16}}),
            options=options,
            output={
                "sql": f"sqlite:///{self.database}",
                "table": "numbers",
                "schema": "key string, n long",
                "create": True,
            },
            **settings,
        )

    def calls(self):
        """(process, key, n) of each call that returned."""
        with contextlib.suppress(FileNotFoundError):
            lines = self.calls_path.read_text().splitlines()
            return [(int(pid), key, int(n)) for pid, key, n in map(str.split, lines)]
        return []

    def rows(self):
        with contextlib.suppress(sqlite3.OperationalError):  # not made yet
            connection = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)
            with contextlib.closing(connection):
                return connection.execute("SELECT key, n FROM numbers").fetchall()
        return []

    def until_rows(self, count):
        self.app.until(lambda: len(self.rows()) >= count, 90)

    def judge(self, source, without=frozenset()):
        """Each record's row once; each called; and each key in its order within a process."""
        put = {(key, n) for rows in source.put.values() for _, key, n in rows} - without
        rows = self.rows()
        assert sorted(rows) == sorted(put)
        assert {(key, n) for _, key, n in self.calls()} == put
        by_key = defaultdict(list)
        for pid, key, n in self.calls():
            by_key[pid, key].append(n)
        assert all(numbers == sorted(set(numbers)) for numbers in by_key.values())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Tasks", pytest.param("Threads", marks=pytest.mark.slow)])
def test_killed_in_the_middle_each_row_is_there_once_and_the_poisons_are_letters(
    embedded_aws, application, producer, tmp_path, kind
):
    poisons = {("key-3", 5), ("key-4", 30), ("key-9", 31)}
    stream, place = embedded_aws.stream(shards=2), {"path": str(tmp_path / "letters")}
    singles = Singles(
        *(application, stream, tmp_path, kind),
        options={"poisons": sorted(f"{key}:{n}" for key, n in poisons)},
        on_error={"retries": 1, "backoff": "20ms", "then": "dead-letter", "dead_letter": place},
    )
    source = producer(stream, 2_500, seed=7, keys=KEYS, reshards=[(1_200, "split", 0)]).start()
    source.join()
    app, chance, killed = singles.app.start(), random.Random(7), []

    def is_done():
        if len(killed) < 3 and len(singles.calls()) > 500 * (len(killed) + 1) and app.lease_pids():
            killed.append(chance.choice(app.lease_pids()))
            os.kill(killed[-1], signal.SIGKILL)
        return len(singles.rows()) >= source.total_put - len(poisons)

    app.until(is_done, 90)
    assert killed
    assert app.stop() == 0
    singles.judge(source, poisons)
    assert len(letters_at(place, embedded_aws)) == len(poisons)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Tasks", "Threads"])
def test_drained_in_the_middle_and_started_again_each_record_is_called_once(
    embedded_aws, application, producer, tmp_path, kind
):
    stream = embedded_aws.stream(shards=2)
    singles = Singles(application, stream, tmp_path, kind)
    source = producer(stream, 3_000, seed=8, keys=KEYS).start()
    source.join()
    app = singles.app.start()
    app.until(lambda: len(singles.calls()) > 500)

    assert app.stop() == 0

    called = len(singles.calls())
    assert called < source.total_put
    assert len(singles.rows()) == called  # the drain covers all that was called
    app.start()
    singles.until_rows(source.total_put)
    assert app.stop() == 0
    assert len(singles.calls()) == source.total_put
    singles.judge(source)


@pytest.mark.long
def test_leases_that_share_a_process_give_single_records_in_the_order_of_the_shard(
    embedded_aws, application, producer, tmp_path
):
    stream = embedded_aws.stream(shards=3)
    shared = {"at_once": {"leases": {"per_process": 4}}}
    singles = Singles(application, stream, tmp_path, "Tasks", **shared)
    source = producer(stream, 600, seed=10, keys=KEYS).start()
    source.join()
    app = singles.app.start()

    singles.until_rows(source.total_put)

    assert app.stop() == 0
    singles.judge(source)
    assert not app.of("process_stalled")
    for rows in source.put.values():
        own = {(key, n) for _, key, n in rows}
        called = [(key, n) for _, key, n in singles.calls() if (key, n) in own]
        assert called == [(key, n) for _, key, n in rows]


@pytest.mark.slow
def test_a_coroutine_that_stands_still_is_named_with_its_stack_and_its_record_goes_on_elsewhere(
    embedded_aws, application, producer, tmp_path
):
    stream = embedded_aws.stream(shards=1)
    stall = {"stall": "4s", "leases": {"failover": "3s"}}
    singles = Singles(
        application, stream, tmp_path, "Tasks", options={"stuck": "key-3:20"}, **stall
    )
    source = producer(stream, 1_000, seed=9, keys=KEYS).start()
    source.join()
    app = singles.app.start()

    app.until(lambda: app.of("process_stalled"))

    app.cure.touch()
    (story,) = app.of("process_stalled")
    assert story["reason"] == "user code has not returned"
    text = app.log_path.read_text(errors="replace")
    numbers = {f"{key}:{n}": number for rows in source.put.values() for number, key, n in rows}
    at = numbers["key-3:20"]
    assert f"Coroutine of process_record for the record at {at}" in text
    assert "in stands_still" in text
    # All others but those of its key went on meanwhile.
    assert len({each[1:] for each in singles.calls()}) > source.total_put * 0.9
    singles.until_rows(source.total_put)
    assert app.stop() == 0
    singles.judge(source)
