"""Owners of one shard over a real database, also as processes of their own."""

import os
import random
import signal
import threading
import time

from kclrun.errors import SettingsError, SinkError, Superseded
from kclrun.model.output import Cursor, OutputDestination, RowsOf
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.outputs.sql import SqlOutput

BEGIN = Cursor(ExtendedSequenceNumber("TRIM_HORIZON"))
SCHEMA = "n long NOT NULL, text string"


def at(number):
    return Cursor(ExtendedSequenceNumber(str(number)))


def rows_of(token=1, **changed):
    reported = {"application": "a", "stream": "s", "stream_created_at": 1.5, "generation": 0}
    return RowsOf(**(reported | {"shard_id": "shardId-000000000000", "token": token} | changed))


def place_at(url, **changed):
    reported = {"table": "rides", "schema": SCHEMA, "creates_table": True}
    return OutputDestination(**({"name": "output", "sql": url} | reported | changed))


def row(number):
    return {"n": number, "text": f"of {number}"}


def add(output, first, last):
    """The rows of the records first to last."""
    rows = [output.encode(row(number))[0] for number in range(first, last + 1)]
    output.add(rows, at(last))


def run_owner(url, token, last, seed, stops):
    """A process that owns the shard until another one has taken over, or until `last`.

    With `stops` it stops itself once, anywhere in the first commits or between them, and never ends
    before it did.
    """
    chance = random.Random(seed)
    output = SqlOutput(place_at(url), rows_of(token))
    stop = threading.Timer(chance.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGSTOP))
    try:
        there = persist(lambda: output.begin(BEGIN))
        if stops:
            stop.start()
        done = 0 if there == BEGIN else int(there.position.sequence_number)
        while done < last:
            upto = min(last, done + chance.randint(1, 9))
            add(output, done + 1, upto)
            persist(output.commit)
            done = upto
    except (Superseded, SettingsError):
        pass
    finally:
        if stops:
            stop.join()
        output.close()


def persist(call):
    """The result of a call, which is repeated while the database cannot be used."""
    while True:
        try:
            return call()
        except Superseded:
            raise
        except SinkError:
            time.sleep(0.01)
