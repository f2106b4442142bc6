"""Log lines: what stands on them, what never does, and that they block nobody."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time

import pytest

from kclrun.observe.events import CATALOGUE, FIELDS, INNER_FIELDS, LEVELS, STEPS
from kclrun.observe.logs import (
    LINE_BYTES_MAX,
    EventLog,
    LineSink,
    RateLimit,
    clean_text,
    configure_lease_logging,
)

CANARIES = {
    "secret key": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "access key": "AKIAIOSFODNN7EXAMPLE",
    "iterator": "AAAAAAAAAAHSywljv0zEgPX4NyKdZ5wryMzP9yALs8NeKbUjp1IxtZs1Sp+KEd9I6AJ9ZG4lNR1",
    "session token": "IQoJb3JpZ2luX2VjEJr" + "aB3" * 60,
    "payload": "eyJjYXJkIjoiNDExMTExMTExMTExMTExMSIsIm5hbWUiOiJBbm4ifQ0123456789",
}


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "log"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    sink = LineSink(fd)
    yield Lines(path, sink)
    sink.close()
    os.close(fd)


class Lines:
    def __init__(self, path, sink):
        self.path = path
        self.sink = sink

    def log(self, **more):
        settings = {"app": "orders", "owner": "kclrun:az1:h:n", "clock": lambda: 1.5, **more}
        return EventLog(self.sink, **settings)

    def raw(self):
        return self.path.read_text().splitlines()

    def read(self):
        return [json.loads(line) for line in self.raw()]


def test_a_line_is_json_with_its_head_first(lines):
    lines.log(shard="shard-1").note("lease_claimed", counter=7, position="123")

    (line,) = lines.read()
    assert list(line)[:6] == ["ts", "level", "event", "app", "owner", "shard"]
    assert line["ts"] == "1970-01-01T00:00:01.500Z"
    assert line["counter"] == 7
    assert line["pid"] == os.getpid()


def test_a_line_as_text_has_the_same_words(lines):
    lines.log(as_json=False).note("lease_lost", shard="shard-1", reason="another owner")

    assert lines.raw() == ['00:00:01 warning lease_lost shard=shard-1 reason="another owner"']


def test_a_line_as_text_is_for_people(lines):
    """What is not known, figures of the protocol and the steps before a lease is read say nothing
    to them; a shard is called as in the table."""
    shard, position = "shardId-000000000012", "4" * 50 + "123456"
    noted = (
        ("lease_created", {"position": "LATEST"}),
        ("lease_taken", {"former": "kclrun::a:b"}),
        ("lease_claimed", {"counter": 2, "position": position}),
        ("lease_released", {"former": None, "position": None, "reason": ""}),
    )
    for log in (lines.log(as_json=False), lines.log(as_json=False, level="debug"), lines.log()):
        for event, fields in noted:
            log.note(event, shard=shard, **fields)

    people, debugging, machines = lines.raw()[:2], lines.raw()[2:6], lines.raw()[6:]
    assert people == [
        "00:00:01 info    lease_claimed shard=12 position=44444…123456",
        '00:00:01 info    lease_released shard=12 reason=""',
    ]
    assert debugging[2].endswith("lease_claimed shard=12 counter=2 position=44444…123456")
    assert [json.loads(line)["event"] for line in machines] == [event for event, _ in noted]
    assert json.loads(machines[2])["position"] == position
    assert json.loads(machines[3])["former"] is None


def test_a_traceback_is_lines_as_text_and_none_of_them_passes_for_one_of_the_log(lines):
    told = 'Traceback:\n  File "a.py"\n00:00:01 error fake\r\x1b[2J\x85x\nKeyError: 1'

    lines.log(as_json=False).note("processor_raised", error="KeyError: 1", traceback=told)
    lines.log().note("processor_raised", traceback=told)

    *text, as_json = lines.raw()
    assert text == [
        '00:00:01 warning processor_raised error="KeyError: 1"',
        "    | Traceback:",
        '    |   File "a.py"',
        "    | 00:00:01 error fake\\r\\x1b[2J\\x85x",
        "    | KeyError: 1",
    ]
    assert json.loads(as_json)["traceback"].startswith('Traceback:\n  File "a.py"\n')


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.parametrize("as_json", [True, False])
def test_no_secret_survives_in_a_text(lines, name, as_json):
    log = lines.log(as_json=as_json)

    log.note("processor_failed", error=f"failed on {CANARIES[name]}!", traceback=CANARIES[name])

    assert CANARIES[name] not in lines.path.read_text()
    assert CANARIES[name][:30] not in lines.path.read_text()


def test_what_has_to_be_read_is_not_taken_for_a_secret():
    text = (
        "shardId-000000000001 at 49590338271490256608559692538361571095921575989136588898 in"
        " /home/user/projects/something/processors/orders/aggregate, sha"
        " 3f786850e387550fdab836ed7e6dc881de23001b"
    )

    assert clean_text(text) == text


def test_a_field_that_the_catalogue_does_not_name_is_withheld(lines):
    lines.log().note("lease_claimed", payload="the payload", counter=1)

    (line,) = lines.read()
    assert "the payload" not in json.dumps(line)
    assert line["withheld"] == "payload"
    assert not {"payload", "data", "partition_key", "iterator", "token", "secret"} & FIELDS


def test_no_text_forges_a_line(lines):
    evil = 'x\n{"level":"error","event":"fake"}\r\x1b[2J\u2028\x00'
    lines.log(as_json=False).note("lease_lost", shard=evil, reason=evil)
    lines.log().note("lease_lost", reason=evil)

    assert len(lines.raw()) == 2
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u2028]", lines.path.read_text())


def test_a_long_text_keeps_its_beginning_and_its_end_and_the_line_fits_a_pipe(lines):
    text = "first line\n" + "ä middle of it, " * 2000 + "\nValueError: last"

    lines.log().note("processor_failed", error=text, traceback=text, detail=text)

    (raw,) = lines.path.read_bytes().splitlines()
    assert len(raw) < LINE_BYTES_MAX
    line = json.loads(raw)
    assert line["error"].startswith("first line")
    assert line["traceback"].endswith("ValueError: last")


def test_a_field_cannot_pass_for_the_head_of_a_line(lines):
    lines.log().write("lease_lost", {"owner": "java-1", "level": "debug"})

    (line,) = lines.read()
    assert line["owner"] == "kclrun:az1:h:n"
    assert line["row_owner"] == "java-1"


def test_lines_below_the_level_are_not_written(lines):
    log = lines.log(level="warning")
    log.note("lease_claimed")
    log.note("lease_lost")

    assert [line["event"] for line in lines.read()] == ["lease_lost"]


def test_a_lease_that_talks_too_much_is_counted_and_others_are_not_silenced(lines):
    now = [0.0]
    log = lines.log(clock=lambda: now[0])
    for _ in range(500):
        log.note("printed", shard="loud", text="x")
    log.note("printed", shard="calm", text="y")
    now[0] = 10.0
    log.note("printed", shard="loud", text="x")

    read = lines.read()
    assert len(read) == 52
    assert read[-2]["shard"] == "calm"
    assert read[-1]["suppressed"] == 450


def test_the_limit_remembers_a_bounded_number_of_sources():
    limit = RateLimit(burst=1)
    for number in range(5000):
        limit.admit(f"shard-{number}", 0.0)

    assert len(limit._sources) <= 1024


def test_a_full_pipe_costs_lines_and_never_waits():
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    log = EventLog(sink, app="a", owner="o", clock=iter(range(10**6)).__next__)
    for _ in range(2000):
        log.note("printed", text="x " * 500)

    # Nobody reads: a write that waits would never come back.
    assert sink.dropped > 0
    # The descriptor that siblings share is as it was.
    assert os.get_blocking(write_fd)

    while len(os.read(read_fd, 65536)) == 65536:
        pass
    log.note("printed", text="after")
    told = [json.loads(line) for line in os.read(read_fd, 65536).splitlines()]
    assert [line["event"] for line in told[-2:]] == ["lines_dropped", "printed"]
    sink.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_closed_reader_is_survived():
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    os.close(read_fd)

    assert not sink.write(b"x\n")
    sink.close()
    os.close(write_fd)
    # Nor is a descriptor that is not there at all an error.
    assert not LineSink(write_fd).write(b"x\n")


def test_lines_of_many_writers_do_not_mix():
    read_fd, write_fd = os.pipe()
    sinks = [LineSink(write_fd) for _ in range(4)]

    def write(number):
        for _ in range(50):
            while not sinks[number].write(bytes([65 + number]) * 3000 + b"\n"):
                time.sleep(0.001)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    data = b""
    while data.count(b"\n") < 200:
        data += os.read(read_fd, 65536)
    for thread in threads:
        thread.join()
    assert all(len(line) == 3000 and len(set(line)) == 1 for line in data.splitlines())
    for sink in sinks:
        sink.close()
    os.close(read_fd)
    os.close(write_fd)


@contextlib.contextmanager
def user_code(lines):
    """A lease process's print and logging, put back at the end."""
    root = logging.getLogger()
    saved = sys.stdout, sys.stderr, root.handlers[:], root.level
    log = lines.log(shard="shard-1")
    configure_lease_logging(log)
    try:
        yield
    finally:
        sys.stdout, sys.stderr, root.handlers[:] = saved[0], saved[1], saved[2]
        root.setLevel(saved[3])
        logging.captureWarnings(capture=False)


def test_a_print_of_user_code_carries_the_shard(lines):
    with user_code(lines):
        print("one\ntwo", 3)
        print("no end yet", end="")
        print("problem", file=sys.stderr)

    read = lines.read()
    assert [line["text"] for line in read] == ["one", "two 3", "problem"]
    assert {line["shard"] for line in read} == {"shard-1"}


def test_logging_of_user_code_carries_shard_level_and_exception(lines):
    with user_code(lines):
        try:
            raise ValueError("bad value")
        except ValueError:
            logging.getLogger("orders").exception("it failed: %s", 5)
        logging.getLogger("orders").info("wrong %d", "format")

    first, second = lines.read()
    assert (first["level"], first["logger"], first["shard"]) == ("error", "orders", "shard-1")
    assert first["message"].startswith("it failed: 5")
    assert first["message"].endswith("ValueError: bad value")
    assert first["message"].splitlines()[1] == "Traceback (most recent call last):"
    assert "could not be formatted" in second["message"]


def test_botocore_never_logs_its_debug_lines(lines):
    with user_code(lines):
        logger = logging.getLogger("botocore.auth")
        logging.getLogger("botocore").setLevel(logging.DEBUG)
        logger.debug("x-amz-security-token: canary")
        logger.info("told")

    assert [line["message"] for line in lines.read()] == ["told"]


def test_the_catalogue_is_well_formed():
    assert CATALOGUE.keys() >= STEPS
    assert FIELDS >= INNER_FIELDS
    for event, kind in CATALOGUE.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", event)
        assert kind.level in LEVELS
        assert kind.meaning
