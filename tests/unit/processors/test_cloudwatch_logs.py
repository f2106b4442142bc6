"""Subscriptions of CloudWatch Logs: each line is a row once, however records were put together."""

import gzip
import json

import pytest

from kclrun.testing import make_record, run_processor
from processors import cloudwatch_logs
from processors.cloudwatch_logs import LogEvents, some_subscriptions, subscriptions
from tests.support.tables import over_rows

PAYLOADS = [payload for _, payload in some_subscriptions()]


def data(*ids, **fields):
    events = [{"id": each, "timestamp": 5, "message": f"line {each}"} for each in ids]
    plain = {"messageType": "DATA_MESSAGE", "logGroup": "g", "logStream": "s", "logEvents": events}
    return json.dumps(plain | fields).encode()


def zipped(content):
    """Without the time, which would be a part of the names of tests."""
    return gzip.compress(content, mtime=0)


def ids(payload):
    return [event.id for sent in subscriptions(payload) for event in sent.log_events]


def test_each_line_of_a_log_is_a_row_and_a_control_message_is_none():
    run = run_processor(
        LogEvents, [make_record(each) for each in PAYLOADS], settings={"decode": subscriptions}
    )

    assert len(run.rows) == 100
    assert run.rows[0] == {
        "id": "0-0",
        "at_ms": 1_780_000_000_000,
        "log_group": "/shop/web",
        "log_stream": "host-0",
        "message": "GET /0",
    }


@over_rows(
    "payload",
    [
        zipped(data("a", "b")),
        zipped(data("a")) + zipped(data("b")),
        zipped(data("a") + data("b")),
        zipped(data("a") + b"\n" + data("b") + b"\n"),
        zipped(data("a")) + zipped(b"") + zipped(data("b")),
        zipped(data("a", futureField={"x": 1})) + zipped(data("b")),
        # One object over two members.
        zipped(data("a", "b")[:30]) + zipped(data("a", "b")[30:]),
    ],
)
def test_members_and_objects_may_be_several(payload):
    assert ids(payload) == ["a", "b"]


@over_rows(
    ("payload", "words"),
    [
        (data("a"), "not gzip"),
        (zipped(data("a"))[:-9], "cut short"),
        (zipped(data("a")) + b"xxx", "not gzip"),
        (zipped(b"[1]"), "Expected `object`"),
        (zipped(b"{"), "Expecting"),
        (zipped(b"\xff"), "codec"),
    ],
)
def test_another_payload_is_given_up_with_its_reason(payload, words):
    with pytest.raises(ValueError, match=words):
        subscriptions(payload)


def test_a_record_that_inflates_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(cloudwatch_logs, "_INFLATED_BYTES_MAX", 1_000)

    with pytest.raises(ValueError, match="more than 1000 bytes"):
        subscriptions(zipped(bytes(2_000)))


def test_a_payload_that_cannot_be_read_does_not_hold_up_the_others():
    records = [make_record(b"x", ordinal=0), make_record(PAYLOADS[1], ordinal=1)]

    run = run_processor(
        LogEvents, records, settings={"decode": subscriptions, "on_error": {"then": "skip"}}
    )

    assert len(run.rows) == 5
    assert len(run.given_up) == 1
