"""Log lines: what stands on them, what never does, and that they block nobody."""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import warnings

import boto3
import pytest

from kclrun.config.schema import LogSettings, Settings
from kclrun.observe.events import CATALOGUE, FIELDS, INNER_FIELDS, LEVELS, level_of
from kclrun.observe.loggers import LoggerLevels
from kclrun.observe.logs import (
    LINE_BYTES_MAX,
    EventLog,
    LineSink,
    RateLimit,
    clean_text,
    configure_lease_logging,
    log_of,
)
from tests.support.descriptors import open_descriptors

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
    """What is not known and figures of the protocol say nothing to them, nor to machines the steps
    before a lease is read; a shard is called as in the table."""
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
    noted = noted[2:]
    assert people == [
        "00:00:01 info    lease_claimed shard=12 position=44444…123456",
        '00:00:01 info    lease_released shard=12 reason=""',
    ]
    assert debugging[2].endswith("lease_claimed shard=12 counter=2 position=44444…123456")
    assert [json.loads(line)["event"] for line in machines] == [event for event, _ in noted]
    assert json.loads(machines[0])["position"] == position
    assert json.loads(machines[1])["former"] is None


def test_a_traceback_is_lines_as_text_and_none_of_them_passes_for_one_of_the_log(lines):
    reported = 'Traceback:\n  File "a.py"\n00:00:01 error fake\r\x1b[2J\x85x\nKeyError: 1'

    lines.log(as_json=False).note("processor_raised", error="KeyError: 1", traceback=reported)
    lines.log().note("processor_raised", traceback=reported)

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


@pytest.mark.parametrize("name", CANARIES)
@pytest.mark.parametrize("most", [20, 60, 200, pytest.param(2048, marks=pytest.mark.seconds)])
def test_no_part_of_a_secret_survives_where_a_text_is_cut(name, most):
    secret = CANARIES[name]
    # Around the cut in the middle, and here and there: each place of a text of 2048 takes seconds.
    cut = range(max(0, most // 2 - len(secret) - 10), min(most, most // 2 + 10))
    for before in {*cut, *range(0, most, 1 + most // 50)}:
        shown = clean_text("." * before + secret + "." * most, most)
        assert len(shown) == most
        assert secret[:8] not in shown
        shown = clean_text("." * most + secret + "." * before, most)
        assert secret[-8:] not in shown


def test_a_text_is_cut_in_its_middle_to_the_size_it_may_have():
    assert clean_text("abcdefghij", 10) == "abcdefghij"
    assert clean_text("abcdefghijk", 10) == "abcd…ghijk"
    assert clean_text("x " * 1024) == "x " * 1024
    assert len(clean_text("x " * 1024 + "x")) == 2048


@pytest.mark.parametrize(
    ("fields", "characters"),
    [(1, 2048), (3, 800), (4, 800), (8, 200), (16, 200), (25, 60), (70, 20)],
)
def test_a_line_that_is_too_long_for_a_pipe_keeps_as_much_of_each_field_as_fits(
    lines, fields, characters
):
    names = sorted(FIELDS, key=lambda name: (len(name), name))[:fields]
    texts = dict.fromkeys(names, "x-" * 5000)
    # One character too many is cut as any other text is.
    texts[names[0]] = "x-" * (characters // 2) + "x"
    lines.log().write("logged", texts)

    assert LINE_BYTES_MAX == 4096  # PIPE_BUF
    [line] = lines.read()
    assert {len(line[name]) for name in names} == {characters}


def test_a_line_of_too_many_fields_is_cut_at_its_end_and_still_one_line(lines):
    lines.log().write("logged", dict.fromkeys(FIELDS, "\u2028" * 300))

    raw = lines.path.read_bytes()
    assert len(raw) == LINE_BYTES_MAX
    assert raw.index(b"\n") == LINE_BYTES_MAX - 1


def test_numbers_have_three_places_and_a_time_its_milliseconds(lines):
    lines.log(clock=lambda: 1.0459).note("lease_lost", seconds=1.23456, attempts=7)
    lines.log(as_json=False).note("lease_lost", seconds=0.0004, status=True)

    as_json, text = lines.raw()
    reported = json.loads(as_json)
    assert (reported["ts"], reported["seconds"], reported["attempts"]) == (
        "1970-01-01T00:00:01.045Z",
        1.235,
        7,
    )
    assert text == "00:00:01 warning lease_lost seconds=0.0 status=True"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1" * 20, "1" * 20),
        ("1" * 21, "11111…111111"),
        ("a" * 21, "a" * 21),
        ("two words", '"two words"'),
        ("", '""'),
        (7, "7"),
    ],
)
def test_a_value_as_text_is_quoted_where_it_must_be_and_a_position_is_short(lines, value, shown):
    lines.log(as_json=False).note("lease_lost", reason=value)

    assert lines.raw() == [f"00:00:01 warning lease_lost reason={shown}"]


@pytest.mark.parametrize(
    ("event", "level"),
    [("lease_lost", "warning"), ("start_failed", "error"), ("printed", "info"), ("none", "info")],
)
def test_the_level_is_that_of_the_catalogue_unless_the_line_has_one(lines, event, level):
    log = lines.log()
    log.note(event)
    log.note(event, level="error")
    log.note(event, level="no such level")

    assert level_of(event) == level
    assert [line["level"] for line in lines.read()] == [level, "error", level]


@pytest.mark.parametrize(
    ("wanted", "is_terminal", "as_json"),
    [("json", True, True), ("text", False, False), ("auto", True, False), ("auto", False, True)],
)
def test_the_log_is_json_for_machines_and_words_for_a_terminal_unless_asked(
    monkeypatch, wanted, is_terminal, as_json
):
    settings = Settings(application="orders", stream="orders", log=LogSettings(format=wanted))
    monkeypatch.setattr("kclrun.observe.logs.sys.stderr.isatty", lambda: is_terminal)

    assert log_of(settings, "me", None).as_json == as_json


@pytest.mark.parametrize("user", ["me:CANARY", "CANARY", "me:CAN@CANARY", ":CANARY"])
def test_a_url_in_a_line_has_neither_user_nor_password(user):
    said = clean_text(f"cannot reach https://{user}@collector:4318/v1/traces (refused)")
    assert "CANARY" not in said
    assert said.endswith("@collector:4318/v1/traces (refused)")


def test_what_has_to_be_read_is_not_taken_for_a_secret():
    text = (
        "shardId-000000000001 at 49590338271490256608559692538361571095921575989136588898 in"
        " /home/user/projects/something/processors/orders/aggregate, sha"
        " 3f786850e387550fdab836ed7e6dc881de23001b, cannot write"
        " s3://bucket/Prefix2/orders/clicks/20260102T030405Z/shardId-000000000001/0/0-TRIM_HORIZON"
    )

    assert clean_text(text) == text
    for path in (
        "cannot read /srv/Data2026/processors/shop/OrdersProcessor/settings/app.yaml: denied",
        "file=/opt/Team7/releases/2026/11/29/shop/Orders/lib/python3/site",
        "s3://bucket/Team7/orders/Clicks/2026/11/29/hour/part/x",
        "'/home/me/work_2/Data2026/processors/shop/OrdersProcessor/settings'",
    ):
        assert clean_text(path) == path
    for secret in (
        f"/home/{CANARIES['secret key']}/x/y",
        f"/a/b/c/d key={CANARIES['secret key']}",
        f"https://hooks.example/{CANARIES['secret key']}/a/b/c",
        CANARIES["secret key"],
    ):
        assert "[withheld]" in clean_text(secret)
    roll = "/20260102T030405Z/shardId-0"
    assert clean_text(f"{CANARIES['secret key']}{roll}") == "[withheld]-0"


def test_a_field_that_the_catalogue_does_not_name_is_withheld(lines):
    lines.log().note("lease_claimed", payload="the payload", counter=1)

    (line,) = lines.read()
    assert "the payload" not in json.dumps(line)
    assert line["withheld"] == "payload"
    lines.log().write("lease_claimed", {"é" * 150: 1, "ü" * 150: 2})
    assert lines.read()[1]["withheld"] == "é" * 150 + "," + "ü" * 49
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

    assert len(limit._sources) == 1024
    # The one that was silent the longest is forgotten: it may speak again.
    assert limit.admit("shard-0", 0.0) == 0
    assert limit.admit("shard-4999", 0.0) is None


def test_a_source_may_burst_fifty_lines_and_then_write_ten_a_second():
    limit = RateLimit()

    def admitted(now):
        count = 0
        while limit.admit("s", now) is not None:
            count += 1
        return count

    assert [admitted(now) for now in (100.0, 100.09, 101.0, 500.0)] == [50, 0, 10, 50]
    # A clock that was set back takes nothing away and gives nothing.
    assert limit.admit("s", 400.0) is None
    assert limit.admit("s", 400.1) == 2


def test_a_full_pipe_costs_lines_and_never_waits():
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    log = EventLog(sink, app="a", owner="o", clock=iter(range(10**6)).__next__)
    for _ in range(200):
        log.note("printed", text="x " * 500)

    # Nobody reads: a write that waits would never come back.
    assert sink.dropped > 0
    # The descriptor that siblings share is as it was.
    assert os.get_blocking(write_fd)

    while len(os.read(read_fd, 65536)) == 65536:
        pass
    log.note("printed", text="after")
    reported = [json.loads(line) for line in os.read(read_fd, 65536).splitlines()]
    assert [line["event"] for line in reported[-2:]] == ["lines_dropped", "printed"]
    sink.close()
    os.close(read_fd)
    os.close(write_fd)


def test_a_closed_reader_is_survived():
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    os.close(read_fd)

    assert not sink.write(b"x\n")
    assert not sink.write(b"x\n")
    assert sink.dropped == 2
    sink.close()
    os.close(write_fd)
    # Nor is a descriptor that is not there at all an error.
    assert not LineSink(write_fd).write(b"x\n")


def test_a_closed_sink_has_no_descriptor_left_and_writes_nowhere():
    before = open_descriptors()
    read_fd, write_fd = os.pipe()
    sink = LineSink(write_fd)
    assert sink.write(b"x\n")

    sink.close()
    sink.close()

    assert not sink.write(b"y\n")
    assert os.read(read_fd, 10) == b"x\n"
    os.close(read_fd)
    os.close(write_fd)
    assert open_descriptors() <= before


def test_a_pipe_that_cannot_be_opened_again_is_written_while_it_has_room(monkeypatch):
    """Another user's, as under sudo."""

    def refused(*_):
        raise PermissionError

    read_fd, write_fd = os.pipe()
    monkeypatch.setattr(os, "open", refused)
    sink = LineSink(write_fd)

    assert sink.write(b"x\n")
    assert os.read(read_fd, 10) == b"x\n"
    while sink.write(b"y" * LINE_BYTES_MAX):
        pass
    assert sink.dropped == 1
    os.read(read_fd, LINE_BYTES_MAX)
    assert sink.write(b"z\n")
    os.close(read_fd)
    assert not sink.write(b"z\n")
    sink.close()
    os.fstat(write_fd)  # the caller's descriptor stays
    os.close(write_fd)


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
def user_code(lines, shard="shard-1", shard_here=lambda: "", levels=None, **how):
    """A lease process's print and logging, put back at the end."""
    root = logging.getLogger()
    saved = sys.stdout, sys.stderr, root.handlers[:], root.level
    log = lines.log(shard=shard, **how)
    levels = levels or LoggerLevels(how.get("level", "info"), {}, ())
    configure_lease_logging(log, levels, shard_here)
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
    assert [line["resource"] for line in read] == ["stdout", "stdout", "stderr"]
    assert {line["shard"] for line in read} == {"shard-1"}


def test_in_a_shared_process_each_line_is_put_together_for_the_shard_that_prints_it(lines):
    here = ["shard-1"]
    with user_code(lines, shard=lambda: here[0], shard_here=lambda: here[0]):
        for here[0], text in (
            ("shard-1", "I am "),
            ("shard-2", "We are two\n"),
            ("shard-1", "one\n"),
        ):
            sys.stdout.write(text)

    assert [(line["shard"], line["text"]) for line in lines.read()] == [
        ("shard-2", "We are two"),
        ("shard-1", "I am one"),
    ]


def test_a_line_that_never_ends_is_written_in_pieces_and_an_empty_one_is_not(lines):
    with user_code(lines):
        assert sys.stdout.write("x" * 2048) == 2048
        assert lines.raw() == []
        assert sys.stdout.write("y" * 2050) == 2050
        assert sys.stdout.write("\n\n") == 2

    assert [line["text"] for line in lines.read()] == ["x" * 2048, "y" * 2048, "yy"]


def test_code_that_bypasses_python_gets_the_descriptors_of_the_streams(lines):
    with user_code(lines):
        assert (sys.stdout.fileno(), sys.stderr.fileno()) == (1, 2)
        assert sys.stdout.writable()
        assert sys.stdout.encoding == "utf-8"


@pytest.mark.parametrize(
    ("number", "level"),
    [(50, "error"), (40, "error"), (39, "warning"), (30, "warning"), (29, "info"), (20, "info"),
     (19, "debug"), (1, None)],
)  # fmt: skip
def test_a_level_of_logging_is_the_next_lower_of_ours(lines, number, level):
    with user_code(lines, level="debug"):
        logging.getLogger("orders").log(number, "said")

    assert [line["level"] for line in lines.read()] == ([level] if level else [])


def test_debug_lines_of_user_code_need_the_level_and_warnings_are_lines(lines):
    with user_code(lines):
        logging.getLogger("orders").debug("not told")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            # pytest has put a function of its own there.
            logging.captureWarnings(capture=False)
            logging.captureWarnings(capture=True)
            warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    with user_code(lines, level="debug"):
        logging.getLogger("orders").debug("told")

    warned, reported = lines.read()
    assert (warned["level"], warned["logger"]) == ("warning", "py.warnings")
    assert "DeprecationWarning: deprecated" in warned["message"]
    assert (reported["level"], reported["message"]) == ("debug", "told")


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
    levels = LoggerLevels("debug", {"botocore": "debug"}, (), {"boto3": boto3.__file__}.get)
    with user_code(lines, level="debug", levels=levels):
        logging.getLogger("boto3").info("a library is at warning")
        for name in ("boto3", "urllib3", "s3transfer"):
            assert logging.getLogger(name).level == logging.INFO
        logger = logging.getLogger("botocore.auth")
        logging.getLogger("botocore").setLevel(logging.DEBUG)
        logger.debug("x-amz-security-token: canary")
        logger.info("told")
        logging.getLogger("orders.botocore").debug("another's")
    logging.getLogger("botocore").setLevel(logging.INFO)

    assert [line["message"] for line in lines.read()] == ["told", "another's"]


def test_the_catalogue_is_well_formed():
    assert FIELDS >= INNER_FIELDS
    for event, kind in CATALOGUE.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", event)
        assert kind.level in LEVELS
        assert kind.meaning


def test_what_user_code_logs_goes_by_its_logger_and_what_it_prints_by_the_level(lines):
    levels = LoggerLevels("warning", {"mylib": "debug"}, ())
    with user_code(lines, level="debug", printed_level="warning", levels=levels):
        logging.getLogger("mylib.part").debug("named")
        logging.getLogger("orders").info("not shown")
        logging.getLogger("orders").warning("shown")
        print("not shown")
    logging.getLogger("mylib").setLevel(logging.NOTSET)

    assert [line["message"] for line in lines.read()] == ["named", "shown"]
