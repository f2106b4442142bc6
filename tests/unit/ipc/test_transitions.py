"""Transitions: whole there and back, bounded in every text, one error for anything else."""

import msgspec
import pytest

from kclrun.errors import MalformedFrame
from kclrun.ipc import transitions
from kclrun.ipc.ring import ENTRY_BYTES_MAX
from kclrun.ipc.transitions import (
    TRACEBACK_BYTES_MAX,
    Broke,
    Checkpointed,
    Claimed,
    Drained,
    Failed,
    GilHeld,
    Lost,
    Raised,
    RecordsExpired,
    Recovered,
    Released,
    ShardEnded,
    Started,
    Unclaimed,
    Warned,
    decode,
    encode,
)
from kclrun.model.sequence import SHARD_END, ExtendedSequenceNumber

AT = ExtendedSequenceNumber("49671" * 11, 7)
LONGEST = ExtendedSequenceNumber("9" * 129, 2**63 - 1)

EACH = [
    Started(4711),
    Claimed(12, AT),
    Unclaimed("somebody else was faster"),
    Checkpointed(SHARD_END, 13),
    ShardEnded(("shardId-000000000001", "shardId-000000000002")),
    Released(AT),
    Lost("another owner"),
    Broke("the disk is full"),
    Failed("process_records", "ValueError: no", AT, "Traceback …", 2),
    Failed("process_records", "MemoryError", AT, "Traceback …", 2, is_host_fault=True),
    Failed("initialize", "ValueError: no", None, "Traceback …", 1),
    Raised(
        "process_records", "ValueError: no", "orders.py:7 in f", "1 of 2", "Traceback …", 2, 4.0
    ),
    Recovered("process_records", 3),
    Drained(),
    GilHeld(12.5),
    RecordsExpired(AT, "replay what was lost"),
    Warned("iterator_expired", "asked for a new one"),
]


@pytest.mark.parametrize("transition", EACH, ids=lambda transition: type(transition).__name__)
def test_a_transition_is_read_as_it_was_written(transition):
    assert decode(encode(transition)) == transition


def test_every_kind_of_transition_is_among_those_tried():
    assert {type(transition) for transition in EACH} == set(transitions.Transition.__args__)


def test_the_largest_failure_fits_an_entry():
    failed = Failed("w" * 9999, "é" * 9999, LONGEST, "↯" * 99999, 2**63, "é" * 999, "é" * 999)
    assert len(encode(failed)) <= ENTRY_BYTES_MAX
    assert decode(encode(failed)) == failed


LIMITS_BYTES = {
    "where": 512,
    "reason": 512,
    "how": 512,
    "event": 512,
    "raised_at": 512,
    "record": 512,
    "error": 2048,
    "detail": 2048,
    "traceback_text": 8192,
}


@pytest.mark.parametrize("transition", EACH, ids=lambda transition: type(transition).__name__)
def test_each_text_of_a_transition_has_its_limit_and_reaches_it(transition):
    texts = [name for name in transition.__struct_fields__ if name in LIMITS_BYTES]
    fits = {name: "x" * LIMITS_BYTES[name] for name in texts}
    too_long = {name: text + "x" for name, text in fits.items()}

    assert (
        msgspec.structs.asdict(msgspec.structs.replace(transition, **fits)).items() >= fits.items()
    )
    cut = msgspec.structs.asdict(msgspec.structs.replace(transition, **too_long))
    assert {name: len(cut[name].encode()) for name in texts} == {n: LIMITS_BYTES[n] for n in texts}
    assert all("…" in cut[name] for name in texts)


def test_every_text_that_a_transition_has_is_among_those_limited():
    texts = {
        name
        for kind in transitions.Transition.__args__
        for name, annotation in kind.__annotations__.items()
        if annotation == "str"
    }
    assert texts == LIMITS_BYTES.keys()


def test_an_end_may_have_sixteen_children():
    ended = ShardEnded(("s",) * 16)
    assert decode(encode(ended)) == ended


def test_an_error_keeps_its_beginning_and_a_traceback_its_end():
    failed = Failed("w", "E" + "x" * 5000, None, "x" * 20000 + "ValueError: no", 1)
    assert failed.error.startswith("Ex")
    assert failed.error.endswith("…")
    assert failed.traceback_text.startswith("…x")
    assert failed.traceback_text.endswith("ValueError: no")
    assert len(failed.traceback_text.encode()) == TRACEBACK_BYTES_MAX


def test_undecodable_file_names_in_an_error_travel():
    lost = decode(encode(Lost("no such file: 'a\udcffb'")))
    assert lost.reason == r"no such file: 'a\udcffb'"
    assert Lost("é" * 256).reason == "é" * 256


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode(["Claimed", 1, ["not a number", 0]]),
        msgspec.msgpack.encode(["Claimed", 1, ["123", -1]]),
        msgspec.msgpack.encode(["Nonsense"]),
        msgspec.msgpack.encode(["ShardEnded", ["s"] * 17]),
        msgspec.msgpack.encode(["Started", "secret-token"]),
        b"\x91" * 100_000,
    ],
)
def test_hostile_bytes_raise_one_error_that_shows_none_of_them(payload):
    with pytest.raises(MalformedFrame) as caught:
        decode(payload)
    assert "secret" not in str(caught.value)
    assert len(str(caught.value)) < 200
