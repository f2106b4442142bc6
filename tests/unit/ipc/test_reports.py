"""Transitions: whole there and back, bounded in every text, one error for anything else."""

import msgspec
import pytest

from kclrun.errors import MalformedFrame
from kclrun.ipc.messages import TRACEBACK_BYTES_MAX, decode_report, encode_report
from kclrun.ipc.ring import ENTRY_BYTES_MAX
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol import reports

AT = ExtendedSequenceNumber("49671" * 11, 7)
LONGEST = ExtendedSequenceNumber("9" * 129, 2**63 - 1)

EACH = [
    reports.LeaseClaimed(12, AT),
    reports.StartUnclaimed("somebody else was faster"),
    reports.Checkpointed(SHARD_END, 13),
    reports.ShardEnded(("shardId-000000000001", "shardId-000000000002")),
    reports.LeaseReleased(AT),
    reports.LeaseLost("another owner"),
    reports.ProcessBroke("the disk is full"),
    reports.ProcessorFailed("process_records", "ValueError: no", 2, AT, "Traceback …"),
    reports.ProcessorFailed(
        "process_records", "MemoryError", 2, AT, "Traceback …", is_host_fault=True
    ),
    reports.ProcessorFailed("initialize", "ValueError: no", 1, None, "Traceback …"),
    reports.ProcessorRaised(
        "process_records", "ValueError: no", "orders.py:7 in f", "1 of 2", "Traceback …", 2, 4.0
    ),
    reports.ProcessorRecovered("process_records", 3),
    reports.GilHeld(12.5),
    reports.RecordsExpired(AT, "replay what was lost"),
    reports.ProcessWarned("asked for a new one"),
]


@pytest.mark.parametrize("transition", EACH, ids=lambda transition: type(transition).__name__)
def test_a_transition_is_read_as_it_was_written(transition):
    assert decode_report(encode_report(transition)) == transition


def test_every_kind_of_transition_is_among_those_tried():
    assert {type(transition) for transition in EACH} == set(reports.AnyReport.__args__)


def test_the_largest_failure_fits_an_entry():
    texts = ("↯" * 99999, "é" * 999, "é" * 999)
    failed = reports.ProcessorFailed("w" * 9999, "é" * 9999, 2**63, LONGEST, *texts)
    assert len(encode_report(failed)) <= ENTRY_BYTES_MAX
    once = decode_report(encode_report(failed))
    assert decode_report(encode_report(once)) == once


def test_an_error_keeps_its_beginning_and_a_traceback_its_end():
    texts = ("E" + "x" * 5000, "x" * 20000 + "ValueError: no")
    failed = decode_report(encode_report(reports.ProcessorFailed("w", texts[0], 1, None, texts[1])))
    assert failed.error.startswith("Ex")
    assert failed.error.endswith("…")
    assert failed.traceback_text.startswith("…x")
    assert failed.traceback_text.endswith("ValueError: no")
    assert len(failed.traceback_text.encode()) == TRACEBACK_BYTES_MAX


def test_undecodable_file_names_in_an_error_travel():
    lost = decode_report(encode_report(reports.LeaseLost("no such file: 'a\udcffb'")))
    assert lost.reason == r"no such file: 'a\udcffb'"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode(["LeaseClaimed", 1, ["not a number", 0]]),
        msgspec.msgpack.encode(["LeaseClaimed", 1, ["123", -1]]),
        msgspec.msgpack.encode(["Nonsense"]),
        msgspec.msgpack.encode(["ShardEnded", ["s"] * 17]),
        msgspec.msgpack.encode(["GilHeld", "secret-token"]),
        b"\x91" * 100_000,
    ],
)
def test_hostile_bytes_raise_one_error_that_shows_none_of_them(payload):
    with pytest.raises(MalformedFrame) as caught:
        decode_report(payload)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200
