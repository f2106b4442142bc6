"""`record.value`: payloads into values, decoders by name, and reasons without payload."""

import dataclasses
import enum
import pickle
import textwrap
from typing import Literal, NamedTuple, TypedDict

import msgspec
import pytest

from kclrun.codec.values import BY_NAME, decoder_of_type, decoding
from kclrun.errors import (
    HaltShard,
    ProcessorLoadError,
    RecordError,
    RetryLater,
    SettingsError,
    UndecodableRecord,
)
from kclrun.loading import load_decoder, load_decoding
from kclrun.model.record import Record, RecordBatch
from kclrun.processor import RecordProcessor
from tests.support.tables import over_rows

SECRET = "4111-1111"


class Suit(enum.Enum):
    SPADES = "spades"


class Card(msgspec.Struct, forbid_unknown_fields=True, tag=True):
    suit: Suit = Suit.SPADES
    kind: Literal["ace", "king"] = "ace"
    value: int = 1
    names: dict[str, int] = {}

    def __post_init__(self):
        if self.value == 99:
            raise ValueError(SECRET)


class Joker(msgspec.Struct, tag=True):
    pass


@dataclasses.dataclass
class Flight:
    carrier: str


class Leg(NamedTuple):
    to: str


class Row(TypedDict):
    n: int


def record(data, number=1):
    return Record(data, "k", str(number))


def given(data, decode):
    """A record as user code gets it."""
    found = record(data)
    return RecordBatch([found], _decoding=decoding(decode))[0]


@over_rows(
    ("decode", "data", "value"),
    [
        (BY_NAME["json"], b'{"a": [1, null]}', {"a": [1, None]}),
        (BY_NAME["text"], "é".encode(), "é"),
        (BY_NAME["msgpack"], msgspec.msgpack.encode({"a": 1}), {"a": 1}),
        (decoder_of_type(Joker | Card), b'{"type":"Card","value":7}', Card(value=7)),
        (decoder_of_type(Flight), b'{"carrier":"AA"}', Flight("AA")),
        (decoder_of_type(Leg), b'["LGA"]', Leg("LGA")),
        (decoder_of_type(list[Row]), b'[{"n":1}]', [{"n": 1}]),
        (bytes.hex, b"\xff", "ff"),
    ],
)
def test_a_payload_is_decoded_as_named(decode, data, value):
    assert given(data, decode).value == value


@over_rows(
    ("decode", "data", "reason"),
    [
        (BY_NAME["json"], SECRET.encode(), "JSON is malformed: trailing characters (byte 5)"),
        (BY_NAME["json"], b'"a', "Input data was truncated"),
        (BY_NAME["json"], b'"\xff"', "not UTF-8 at byte 0"),
        (BY_NAME["json"], b"[" * 100_000, "nested too deeply"),
        (BY_NAME["text"], b"a\xff", "not UTF-8 at byte 1"),
        (
            BY_NAME["msgpack"],
            b"\xc1",
            r"MessagePack data is malformed: invalid opcode",
        ),
        (decoder_of_type(Card), b'{"type":"Card","value":"4111"}', "got `str` - at `$.value`"),
        (decoder_of_type(Card), b'{"type":"Card","suit":"4111"}', "Invalid enum value - at `$.su"),
        (decoder_of_type(Card), b'{"type":"Card","kind":"4111"}', "Invalid enum value - at `$.ki"),
        (decoder_of_type(Card), b'{"type":"Card","4111":1}', "contains unknown field"),
        (
            decoder_of_type(list[Card]),
            b'[{"type":"Card","x` - at `$.4111":1}]',
            "contains unknown field",
        ),
        (decoder_of_type(Card), b'{"type":"Card","names":{"4111":""}}', "at `$.names[...]`"),
        (decoder_of_type(Card | Joker), b'{"type":"4111"}', "Invalid value - at `$.type`"),
        (decoder_of_type(Card), b'{"type":"Card","value":99}', "it raised ValueError"),
        (int, SECRET.encode(), "it raised ValueError"),
    ],
)
def test_what_cannot_be_decoded_says_why_and_where_and_never_quotes(decode, data, reason):
    bad = given(data, decode)
    with pytest.raises(UndecodableRecord) as caught:
        _ = bad.value
    assert caught.value.record is bad
    assert str(caught.value).startswith("the record at 1 cannot be decoded: ")
    assert reason in str(caught.value)
    # Nor may a traceback that shows causes.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    assert "4111" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [RetryLater(1.0), HaltShard("no"), SettingsError("x"), MemoryError()]
)
def test_what_is_not_a_matter_of_the_record_is_raised_as_it_is(error):
    def decode(_):
        raise error

    with pytest.raises(type(error)) as caught:
        _ = given(b"", decode).value
    assert caught.value is error


def test_words_of_a_decoder_of_ours_are_the_reason():
    def decode(_):
        raise RecordError("no header")

    with pytest.raises(UndecodableRecord, match=r"cannot be decoded: no header$"):
        _ = given(b"", decode).value


def test_a_value_is_decoded_at_its_first_use_and_again_when_the_record_is_given_again():
    calls = []
    rule = decoding(lambda data: calls.append(data) or {"n": 1})
    one, other = records = [record(b"1"), record(b"2", 2)]
    batch = RecordBatch(records, _decoding=rule)
    assert calls == []

    assert batch[0].value is one.value
    one.value["n"] = "an attempt that raised wrote this"
    RecordBatch(records, _decoding=rule)
    assert one.value == {"n": 1}
    assert calls == [b"1", b"1"]
    assert msgspec.structs.replace(one, data=b"3").value == {"n": 1}
    assert calls[2:] == [b"3"]
    assert other == record(b"2", 2)


def test_a_record_is_compared_shown_and_pickled_as_the_service_sent_it():
    plain, found = record(b"1"), given(b"1", BY_NAME["json"])
    for _ in range(2):
        assert (plain, hash(plain), repr(plain)) == (found, hash(found), repr(found))
        assert pickle.loads(pickle.dumps(found)) == plain
        assert found.value == 1
    with pytest.raises(SettingsError, match="decode: is missing"):
        _ = pickle.loads(pickle.dumps(found)).value


# By name.


MODULE = """
    import msgspec

    class Order(msgspec.Struct):
        n: int

    class Plain:
        pass

    orders = list[Order]
    number = 7

    def from_csv(data):
        return data.split(b",")

    def two(data, more):
        pass

    async def later(data):
        pass

    def many(data):
        yield data
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "order_values.py").write_text(textwrap.dedent(MODULE))
    return tmp_path


def opened():
    return lambda data: ("glue", data)


@pytest.mark.parametrize(
    ("said", "data", "value"),
    [
        ("json", b"1", 1),
        ("glue", b"1", ("glue", b"1")),
        ("order_values:orders", b'[{"n": 1}]', None),
        ("order_values:from_csv", b"a,b", [b"a", b"b"]),
        (list[int], b"[1]", [1]),
        (dict, b"{}", {}),
    ],
)
def test_a_decoder_is_named_by_a_word_a_type_or_a_function(folder, said, data, value):
    found = load_decoder(said, [folder], opened)(data)
    assert found == value if value is not None else found[0].n == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("order_values:nothing", "order_values.py defines no nothing"),
        ("order_values:Plain", "is the class Plain: neither a type for JSON"),
        ("order_values:number", "is of type int: neither a type for JSON"),
        ("order_values:two", "cannot be called with the payload's bytes alone"),
        ("order_values:later", "is `async def` or has a `yield`"),
        ("order_values:many", "is `async def` or has a `yield`"),
        ("csv", "expected module:name, got 'csv'"),
        (7, "is of type int: neither a type for JSON"),
        (bytes.hex, "neither a type for JSON"),
        (list[int] | list[str], "JSON cannot be decoded into"),
    ],
)
def test_another_thing_is_refused_with_the_settings_name(folder, said, words):
    with pytest.raises(ProcessorLoadError) as caught:
        load_decoder(said, [folder], opened)
    assert str(caught.value).startswith("decode")
    assert words in str(caught.value)


class Declared(RecordProcessor):
    decode_as = dict[str, int]

    def process_records(self, batch, checkpointer):
        pass


def test_the_setting_comes_before_what_the_class_declares(folder):
    def value(setting, kind, data):
        found = record(data)
        rule = load_decoding(setting, kind, [folder], opened)
        return RecordBatch([found], _decoding=rule)[0].value

    assert value(None, Declared, b'{"a": 1}') == {"a": 1}
    assert value("text", Declared, b'{"a": 1}') == '{"a": 1}'
    with pytest.raises(SettingsError, match=r"decode: is missing; .* `decode_as`"):
        value(None, type("Silent", (Declared,), {"decode_as": None}), b"")
    with pytest.raises(ProcessorLoadError, match=r"decode_as of \S*Glued: glue needs a permission"):
        load_decoding(None, type("Glued", (Declared,), {"decode_as": "glue"}), [], opened)
    with pytest.raises(ProcessorLoadError, match=r"decode_as of \S*Odd is of type int"):
        load_decoding(None, type("Odd", (Declared,), {"decode_as": 7}), [], opened)


def test_without_the_extra_glue_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"glue needs fastavro and grpc_tools.*kclrun\[glue\]"):
        load_decoder("glue", [], opened)
