"""What is told of an exception of user code: its place, its record, and the frames to read."""

import itertools
import json
import linecache
import sys

import msgspec
import pytest

from kclrun.calling.tracebacks import describe
from kclrun.codec.kpl import drop_until
from kclrun.compat.kclpy import adapter
from kclrun.model.record import Record, RecordBatch
from kclrun.model.sequence import ExtendedSequenceNumber
from tests.support.tables import over_rows

GOOD, POISON = b'{"amount": 1}', b'{"secret": 2}'


def batch(*payloads):
    records = [Record(data, "the-key", str(100 + n)) for n, data in enumerate(payloads)]
    return RecordBatch(records)


def failure_of(call, given):
    try:
        call(given)
    except Exception as error:
        return describe(error, given.records)
    raise AssertionError("it did not raise")


def amount(record):
    return json.loads(record.data)["amount"]


def in_a_loop(given):
    for record in given:
        json.loads(record.data)["amount"]


def in_a_loop_with_numbers(given):
    for _number, record in enumerate(given, 1):
        amount(record)


def in_a_comprehension(given):
    return [json.loads(record.data)["amount"] for record in given]


def in_a_generator(given):
    return sum(json.loads(one.data)["amount"] for one in given)


def in_a_function_that_is_mapped(given):
    return list(map(amount, given))


def by_index(given):
    for index in range(len(given)):
        record = given[index]
        json.loads(record.data)["amount"]


def in_a_handler(given):
    for record in given:
        try:
            json.loads(record.data)["amount"]
        except KeyError as error:
            raise ValueError("no amount") from error


def one_by_keyword(before, *, record):
    return before + json.loads(record.data)["amount"]


def in_a_function_that_takes_it_by_keyword(given):
    total = 0
    for one in given:
        total = one_by_keyword(total, record=one)


def in_a_while_loop(given):
    left = list(given)
    while left:
        record = left.pop(0)
        json.loads(record.data)["amount"]


def in_a_slice(given):
    first = given[0]
    for record in given[1:]:
        assert first is not None
        amount(record)


def deep_in_a_library(given):
    for record in given:
        json.loads(record.data + b"}")


@over_rows(
    "call",
    [
        in_a_loop,
        in_a_loop_with_numbers,
        in_a_generator,
        in_a_function_that_is_mapped,
        by_index,
        in_a_handler,
        in_a_function_that_takes_it_by_keyword,
        in_a_while_loop,
        in_a_slice,
    ],
)
def test_the_record_that_the_failing_line_works_on_is_named(call):
    failure = failure_of(call, batch(GOOD, GOOD, POISON, GOOD))

    assert failure.record == "3 of 4, at 102"
    assert failure.position == ExtendedSequenceNumber("102")


def test_the_record_of_a_comprehension_is_named_where_python_keeps_its_variable():
    failure = failure_of(in_a_comprehension, batch(GOOD, GOOD, POISON, GOOD))

    # From 3.12 on it is part of the function around it, and its variable is cleared [PEP 709].
    is_forgotten = sys.version_info >= (3, 12)
    not_known = "not known: one of 4, from 100 to 103"
    assert failure.record == (not_known if is_forgotten else "3 of 4, at 102")


def after_the_loop(given):
    for record in given:
        json.loads(record.data)
    raise OSError("the database is away")


def of_two_records(given):
    for record, other in itertools.pairwise(given):
        raise ValueError(len(record.data) - len(other.data))


def left_behind_and_read_in_another_loop(given):
    for record in given:
        json.loads(record.data)
    for number in range(3):
        raise ValueError(len(record.data) + number)


def by_hand(given):
    record = given[0]
    json.loads(record.data)["total"]


def without_any(given):
    rows = [json.loads(record.data) for record in given]
    for row in rows:
        row["amount"]


@over_rows(
    "call",
    [after_the_loop, of_two_records, left_behind_and_read_in_another_loop, by_hand, without_any],
)
def test_no_record_is_named_that_may_not_be_the_one(call):
    failure = failure_of(call, batch(GOOD, GOOD, POISON))

    assert failure.record == "not known: one of 3, from 100 to 102"
    assert failure.position is None


def test_the_only_record_of_a_batch_is_the_one():
    assert failure_of(after_the_loop, batch(POISON)).record == "1 of 1, at 100"


def test_the_place_within_the_batch_counts_what_a_checkpoint_covers_already():
    given = batch(GOOD, GOOD, POISON)
    left = drop_until(given.records, ExtendedSequenceNumber("100"))

    with pytest.raises(KeyError) as raised:
        in_a_loop(left)

    assert describe(raised.value, given.records).record == "3 of 3, at 102"


def test_the_line_named_is_that_of_user_code_and_not_of_the_library_it_called():
    failure = failure_of(deep_in_a_library, batch(GOOD))

    line = deep_in_a_library.__code__.co_firstlineno + 2
    assert failure.raised_at.endswith(f"test_tracebacks.py:{line} in deep_in_a_library")
    assert not failure.raised_at.startswith("/"), "it is relative to where it was imported from"
    assert "JSONDecodeError" in failure.error


def test_user_code_that_is_installed_as_a_library_has_its_innermost_line_named():
    try:
        json.loads("{")
    except ValueError as raised:
        error = raised.with_traceback(raised.__traceback__.tb_next)

    assert describe(error).raised_at.endswith(" in raw_decode")


def one(depth):
    return other(depth - 1) if depth else json.loads("{")


def other(depth):
    return one(depth - 1) if depth else json.loads("{")


def test_the_innermost_thirty_frames_are_reported():
    failure = failure_of(lambda _: one(60), batch(GOOD))

    assert failure.traceback_text.count("  File ") == 30
    assert "raw_decode" in failure.traceback_text or "decode" in failure.traceback_text
    assert "failure_of" not in failure.traceback_text


def test_a_repetition_has_the_same_error_place_and_record():
    first, again = (failure_of(in_a_loop, batch(GOOD, POISON)) for _ in range(2))

    assert first.is_as(again)
    for changed in ({"error": "x"}, {"raised_at": "x"}, {"record": "x"}):
        assert not first.is_as(msgspec.structs.replace(again, **changed))
    assert first.is_as(msgspec.structs.replace(again, traceback_text=""))


class Script:
    """As amazon_kclpy's: called through code of ours."""

    def process_records(self, _given):
        raise KeyError("amount")


def test_frames_of_our_own_are_left_out_wherever_they_stand(tmp_path):
    source = tmp_path / "ours.py"
    source.write_text("def call(script, given):\n    script.process_records(given)\n")
    call = compile(source.read_text(), adapter.__file__, "exec")
    names = {}
    exec(call, names)  # a frame that lies in a file of ours

    failure = failure_of(lambda given: names["call"](Script(), given), batch(GOOD))

    assert "in process_records" in failure.traceback_text
    assert adapter.__file__ not in failure.traceback_text
    assert failure.traceback_text.splitlines()[-1] == "KeyError: 'amount'"
    assert failure.traceback_text.startswith("Traceback (most recent call last):")


def ours():
    """A function that lies in a file of ours, and calls what it is given."""
    names = {}
    exec(compile("def ours(call):\n    return call()\n", adapter.__file__, "exec"), names)
    return names["ours"]


def raised_through_ours(name):
    def no_price():
        raise KeyError(name)

    try:
        ours()(no_price)
    except KeyError as error:
        return error
    raise AssertionError


def in_a_group(_):
    raise ExceptionGroup("two", [raised_through_ours("first"), raised_through_ours("second")])


def in_a_group_of_a_cause(_):
    raise ValueError("no") from ExceptionGroup("one", [raised_through_ours("first")])


def while_another_is_handled(_):
    try:
        ours()(lambda: {}["first"])
    except KeyError:
        raise ValueError("no")  # noqa: B904 - the case


@pytest.mark.parametrize(
    "call", [in_a_group, in_a_group_of_a_cause, while_another_is_handled], ids=lambda c: c.__name__
)
def test_frames_of_our_own_are_left_out_of_causes_contexts_and_groups(call):
    failure = failure_of(call, batch(GOOD, POISON))

    assert "KeyError: 'first'" in failure.traceback_text
    assert adapter.__file__ not in failure.traceback_text


def test_a_chain_of_many_causes_is_reported_and_its_first_eight_without_frames_of_our_own():
    def raise_one(number):
        raise ValueError(number)

    error = None
    for number in range(10):
        try:
            ours()(lambda number=number: raise_one(number))
        except ValueError as raised:
            raised.__cause__ = error
            error = raised

    text = describe(error, batch(GOOD).records).traceback_text

    assert [f"ValueError: {number}" in text for number in range(10)] == [True] * 10
    assert text.count(adapter.__file__) == 2


def test_the_cause_is_reported_with_its_frames_and_neither_payload_nor_key():
    failure = failure_of(in_a_handler, batch(GOOD, POISON))

    assert "KeyError: 'amount'" in failure.traceback_text
    assert "direct cause" in failure.traceback_text
    reported = f"{failure}"
    assert "secret" not in reported
    assert "the-key" not in reported


def test_an_exception_that_was_raised_nowhere_and_one_that_hides_itself_are_reported():
    class Hiding(Exception):
        def __str__(self):
            raise RuntimeError

        __cause__ = property(lambda self: 1 / 0)

    assert describe(ValueError("x")).raised_at == ""
    assert describe(Hiding()).error == "Hiding"


@pytest.mark.parametrize(
    ("lines", "record"),
    [(20_000, "2 of 2, at 101"), (20_001, "not known: one of 2, from 100 to 101")],
)
def test_a_source_of_more_than_20000_lines_is_not_looked_into(monkeypatch, lines, record):
    source = "def call(given):\n    for record in given:\n        record.data[5:][99]\n"
    written = source.splitlines(keepends=True)
    written += ["\n"] * (lines - len(written))
    monkeypatch.setitem(linecache.cache, "/generated.py", (1, None, written, "/generated.py"))
    names = {}
    exec(compile(source.replace("[5:][99]", "[7:][0]"), "/generated.py", "exec"), names)

    failure = failure_of(names["call"], batch(b"0123456789", b"01234"))

    assert failure.raised_at == "/generated.py:3 in call"
    assert failure.record == record


def test_a_source_of_one_line_is_looked_into(monkeypatch):
    source = "def call(given): return sum(record.data[7] for record in given)\n"
    monkeypatch.setitem(linecache.cache, "/short.py", (1, None, [source], "/short.py"))
    names = {}
    exec(compile(source, "/short.py", "exec"), names)

    assert failure_of(names["call"], batch(b"0123456789", b"01234")).record == "2 of 2, at 101"


def test_code_without_a_source_still_has_its_place():
    names = {}
    exec("def call(given):\n    for record in given:\n        raise ValueError\n", names)

    failure = failure_of(names["call"], batch(GOOD, POISON))

    assert failure.raised_at.endswith(" in failure_of")
    assert failure.record.startswith("not known")
