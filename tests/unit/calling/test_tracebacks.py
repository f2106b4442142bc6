"""What is told of an exception of user code: its place, its record, and the frames to read."""

import itertools
import json
import linecache

import pytest

from kclrun.calling.tracebacks import describe
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


def one(depth):
    return other(depth - 1) if depth else json.loads("{")


def other(depth):
    return one(depth - 1) if depth else json.loads("{")


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


def test_code_without_a_source_still_has_its_place():
    names = {}
    exec("def call(given):\n    for record in given:\n        raise ValueError\n", names)

    failure = failure_of(names["call"], batch(GOOD, POISON))

    assert failure.raised_at.endswith(" in failure_of")
    assert failure.record.startswith("not known")
