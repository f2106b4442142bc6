"""Transitions: whole there and back, bounded in every text, one error for anything else."""

import msgspec
import pytest

from kclrun.errors import MalformedFrame
from kclrun.ipc.messages import TRACEBACK_BYTES_MAX, decode_report, encode_report
from kclrun.ipc.ring import ENTRY_BYTES_MAX
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber
from kclrun.protocol import reports
from kclrun.traffic.hot_keys import HotKey, ShardHeat
from tests.support.tables import over_rows

AT = ExtendedSequenceNumber("49671" * 11, 7)
LONGEST = ExtendedSequenceNumber("9" * 129, 2**63 - 1)

EACH = [
    reports.LeaseClaimed(12, AT),
    reports.StartUnclaimed("somebody else was faster"),
    reports.Checkpointed(SHARD_END, 13),
    reports.ShardEnded(("shardId-000000000001", "shardId-000000000002")),
    reports.LeaseReleased(AT),
    reports.LeaseKept(),
    reports.LeaseLost("another owner"),
    reports.ProcessReplaced("its rows are tried one call at a time"),
    reports.ProcessBroke("the disk is full"),
    reports.ProcessorFailed("process_records", "ValueError: no", 2, AT, "Traceback …"),
    reports.ProcessorFailed(
        "process_records", "MemoryError", 2, AT, "Traceback …", is_host_fault=True
    ),
    reports.ProcessorFailed("initialize", "ValueError: no", 1, None, "Traceback …"),
    reports.ProcessorRaised(
        "process_records", "ValueError: no", "orders.py:7 in f", "1 of 2", "Traceback …", 2, 4.0
    ),
    reports.ProcessorRaised("process_records", "RetryLater: away", "", "", "", 0, 4.0, waits=3),
    reports.ProcessorWaited("process_records", 3, 12.5),
    reports.ProcessorRecovered("process_records", 3),
    reports.RecordGivenUp(
        AT, "ValueError: no", "orders.py:7 in f", "Traceback …", 4, is_skipped=True
    ),
    reports.GilHeld(12.5),
    reports.RecordsExpired(AT, "replay what was lost"),
    reports.RowsWereRefused(AT, 2, "column n", ("a", "b")),
    reports.ProcessWarned("asked for a new one"),
]


@over_rows("transition", EACH)
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


LIMITS_BYTES = {
    "where": 512,
    "reason": 512,
    "how": 512,
    "raised_at": 512,
    "record": 512,
    "error": 2048,
    "detail": 2048,
    "traceback_text": 8192,
}


@over_rows("report", EACH)
def test_each_text_of_a_report_has_its_limit_and_reaches_it(report):
    texts = [name for name in report.__struct_fields__ if name in LIMITS_BYTES]
    fits = {name: "x" * LIMITS_BYTES[name] for name in texts}
    too_long = {name: text + "x" for name, text in fits.items()}

    def travelled(values):
        sent = msgspec.structs.replace(report, **values)
        return msgspec.structs.asdict(decode_report(encode_report(sent)))

    assert travelled(fits).items() >= fits.items()
    cut = travelled(too_long)
    assert {name: len(cut[name].encode()) for name in texts} == {n: LIMITS_BYTES[n] for n in texts}
    assert all("…" in cut[name] for name in texts)


def test_every_text_that_a_report_has_is_among_those_limited():
    texts = {
        name
        for kind in reports.AnyReport.__args__
        for name, annotation in kind.__annotations__.items()
        if annotation == "str"
    }
    assert texts == LIMITS_BYTES.keys()


def test_a_text_that_was_not_cut_by_its_writer_is_cut_by_its_reader():
    written = msgspec.msgpack.encode(reports.LeaseLost("x" * 600))

    assert len(decode_report(written).reason.encode()) == 512


def test_an_end_may_have_sixteen_children():
    ended = reports.ShardEnded(("s",) * 16)
    assert decode_report(encode_report(ended)) == ended


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
    accents = reports.LeaseLost("é" * 256)
    assert decode_report(encode_report(accents)) == accents


@over_rows(
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


def test_the_traffic_of_a_shard_travels_whole_and_one_that_no_shard_has_is_refused():
    keys = (HotKey("3" * 39, 0.5),) * 5
    heat = ShardHeat(91.5, 9e5, 312.0, 9e5, 0.25, 12_000, 0.05, "keys", keys, "2" * 39, 0.5)

    assert decode_report(encode_report(heat)) == heat
    assert len(encode_report(heat)) < 512, "a report each half a window is nothing to a ring"
    for wrong in (float("nan"), -1.0):
        with pytest.raises(MalformedFrame, match="a traffic that no shard has"):
            decode_report(encode_report(msgspec.structs.replace(heat, in_bytes_per_s=wrong)))
    key = msgspec.structs.replace(heat, keys=(HotKey("customer-4711", 0.5),))
    with pytest.raises(MalformedFrame):
        decode_report(encode_report(key))
