"""The type in `RecordProcessor[Order]` names the decoder, and `options_as` that of the options."""

import dataclasses
from typing import Any, Generic, TypedDict, TypeVar

import msgspec
import pytest

from kclrun import RecordProcessor
from kclrun.errors import ProcessorLoadError, SettingsError
from kclrun.loading import decoded_options, load_decoding, value_type
from kclrun.model.record import RecordBatch
from kclrun.testing import make_record, run_processor

T = TypeVar("T")
Other = TypeVar("Other")


class Order(msgspec.Struct):
    total: int


class Base(RecordProcessor[T]):
    def process_records(self, batch, checkpointer):
        pass


class Mixin(Generic[Other]):
    pass


class Named(RecordProcessor[Order]):
    def process_records(self, batch, checkpointer):
        pass


class Plain(RecordProcessor):
    def process_records(self, batch, checkpointer):
        pass


class Through(Base[Order]):
    pass


class Below(Through):
    pass


class Mixed(Mixin[bytes], Base[dict[str, int]]):
    pass


class Renamed(Base[Other], Generic[Other]):
    pass


class RenamedOrder(Renamed[Order]):
    pass


class Anything(RecordProcessor[Any]):
    pass


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (Named, Order),
        (Through, Order),
        (Below, Order),
        (Mixed, dict[str, int]),
        (RenamedOrder, Order),
        (Plain, None),
        (Base, None),
        (Renamed, None),
        (Anything, None),
    ],
)
def test_the_type_of_the_values_is_found_through_the_classes_between(processor, expected):
    assert value_type(processor) == expected


def value_of(processor, data, setting=None):
    rule = load_decoding(setting, processor, [], lambda: bytes)
    return RecordBatch([make_record(data)], _decoding=rule)[0].value


def test_the_setting_goes_before_decode_as_and_that_before_the_type():
    class Declares(Named):
        decode_as = "text"

    assert value_of(Named, b'{"total": 7}') == Order(7)
    assert value_of(Declares, b'{"total": 7}') == '{"total": 7}'
    assert value_of(Declares, b'{"total": 7}', "json") == {"total": 7}


def test_a_type_that_json_does_not_make_needs_a_decoder_of_its_own():
    class Blob(RecordProcessor[bytes]):
        def process_records(self, batch, checkpointer):
            pass

    class Read(Blob):
        decode_as = "text"

    with pytest.raises(ProcessorLoadError, match=r"RecordProcessor\[bytes\]: JSON cannot be"):
        load_decoding(None, Blob, [], lambda: bytes)
    assert value_of(Read, b"x") == "x"


class Address(msgspec.Struct):
    city: str = ""


class Options(msgspec.Struct, rename="kebab"):
    limit: int
    deny_list: list[Address] = []
    by_name: dict[str, int] = {}


@dataclasses.dataclass
class Data:
    limit: int
    address: Address = dataclasses.field(default_factory=Address)


class Typed(TypedDict):
    limit: int


def taking(kind):
    return type("Takes", (Plain,), {"options_as": kind})


@pytest.mark.parametrize(
    ("kind", "given", "made"),
    [
        (None, {"any": 1}, {"any": 1}),
        (
            Options,
            {"limit": 2, "deny-list": [{"city": "Rome"}], "by-name": {"free": 1}},
            Options(2, [Address("Rome")], {"free": 1}),
        ),
        (Data, {"limit": 2, "address": {"city": "Rome"}}, Data(2, Address("Rome"))),
        (Typed, {"limit": 2}, {"limit": 2}),
        (dict[str, int], {"limit": 2}, {"limit": 2}),
    ],
)
def test_options_are_made_of_the_settings(kind, given, made):
    assert decoded_options(taking(kind), given) == made


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (Options, {}, "missing required field `limit`"),
        (Options, {"limit": "secret"}, "Expected `int`, got `str` - at `$.limit`"),
        (Options, {"limit": 1, "limmit": 2}, "has no limmit; did you mean limit?"),
        (Options, {"limit": 1, "deny_list": []}, "has no deny_list; did you mean deny-list?"),
        (Options, {"limit": 1, "deny-list": [{}, {"town": "x"}]}, "has no deny-list[1].town"),
        (Data, {"limit": 1, "address": {"citty": "x"}}, "has no address.citty; did you mean city?"),
        (Typed, {"limit": 1, "more": 2}, "has no more"),
        (int, {"limit": 1}, "Expected `int`, got `object`"),
    ],
)
def test_an_option_that_the_type_does_not_know_is_refused_by_its_name(kind, given, words):
    with pytest.raises(SettingsError) as caught:
        decoded_options(taking(kind), given)
    assert words in str(caught.value)
    assert str(caught.value).startswith("options: Takes takes ")
    assert "secret" not in str(caught.value)


def test_a_processor_finds_its_options_in_both_contexts():
    seen = []

    class Singles(RecordProcessor[Order]):
        options_as = Options

        def initialize(self, context):
            seen.append(context.options)

        def process_record(self, record, context):
            seen.append((context.options, record.value.total))

    run_processor(Singles, [b'{"total": 3}'], settings={"options": {"limit": 5}})

    assert seen == [Options(5), (Options(5), 3)]
