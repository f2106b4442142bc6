"""DynamoDB outputs: an item is that of all records up to its mark, whatever is late [R8].

The contract of all outputs is in test_outputs.
"""

import random
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest

from kclrun.aws.errors import ErrorReply
from kclrun.aws.outputs.dynamodb import MARK
from kclrun.aws.wire import RefusedReply, WireReply
from kclrun.errors import LimitExceeded, RowsRefused, SettingsError, SinkError, Superseded
from tests.contract.dynamodb_places import Items
from tests.contract.test_outputs import OF, START, at, persist

PARENT, CHILD = "shardId-000000000007", "shardId-000000000012"


@pytest.fixture
def place(aws, tmp_path):
    made = Items(aws, tmp_path)
    yield made
    made.close()


def owner(place, **changed):
    output = place.open(msgspec.structs.replace(OF, **changed))
    output.begin(START)
    return output


def put(output, n, value, upto, *, shard="k"):
    """The row of one key."""
    output.add([output.encode({"shard": shard, "n": n, "value": value})[0]], at(upto))


def values(place):
    return {item["n"]: item["value"] for item in place.items()}


def test_of_two_rows_for_one_item_the_last_one_stays_also_if_the_commit_is_repeated(place):
    output = owner(place)
    for value in ("first", "last"):
        put(output, 1, value, 1)
    place.fail("lost reply")
    assert persist(output) == at(1)
    assert values(place) == {1: "last"}
    mark = place.items()[0][MARK]
    assert (mark["of"], mark["shard"]) == ("orders/clicks", PARENT)


@pytest.mark.parametrize("seed", range(105_100, 105_108))
def test_items_are_those_of_all_records_however_owners_cut_them_into_commits(place, seed):
    """Owners follow each other, former ones go on, and requests are lost or late. The processor
    counts the records of each key, and puts the count: an older item would be a lost update."""
    chance = random.Random(seed)
    records = [chance.randrange(4) for _ in range(40)]  # the key of each
    counts = [records[: n + 1].count(key) for n, key in enumerate(records)]
    row, owners = 0, []
    while row < len(records):
        if not owners or chance.random() < 0.05:
            owners.append([owner(place), row])
        each = chance.choice(owners[-2:])
        match chance.choice(["add", "add", "commit", "land", "fail"]):
            case "add":
                upto = min(len(records), each[1] + chance.randint(1, 7))
                for n in range(each[1], upto):
                    put(each[0], records[n], counts[n], n + 1)
                each[1] = upto
            case "commit":
                try:
                    each[0].commit()
                except SinkError:
                    continue
                if each is owners[-1]:
                    row = each[1]
            case "land":
                place.land()
            case "fail" if not place._faults:
                place.fail(chance.choice(sorted(place.faults)))
    place.land()
    assert values(place) == {key: records.count(key) for key in records}


def test_a_child_overwrites_its_ancestors_items_and_a_late_parent_brings_none_back(place):
    parent, child = owner(place), owner(place, shard_id=CHILD)
    put(parent, 1, "of the parent", 900)
    parent.commit()
    put(parent, 1, "late", 901)
    place.fail("late")
    with pytest.raises(SinkError, match="cannot put items"):
        parent.commit()

    put(child, 1, "of the child", 2)
    child.commit()
    place.land()
    assert values(place) == {1: "of the child"}
    with pytest.raises(SettingsError, match=f"items of {CHILD} with keys of {PARENT}"):
        parent.commit()


def test_after_a_reset_and_in_a_new_stream_all_items_are_written_again(place):
    old = owner(place)
    put(old, 1, "old", 900)
    old.commit()
    for value, changed in (
        ("reset", {"generation": 10}),
        ("new", {"stream_created_at": OF.stream_created_at + 900, "shard_id": CHILD}),
    ):
        output = owner(place, **changed)
        put(output, 1, value, 1)
        output.commit()
        assert values(place) == {1: value}
        put(old, 1, "zombie", 901)
        with pytest.raises(Superseded):
            old.commit()
    assert values(place) == {1: "new"}


def test_items_of_another_application_are_not_overwritten_and_those_without_a_mark_are(place):
    place.client.put_item(TableName=place.name, Item={"shard": {"S": "k"}, "n": {"N": "1"}})
    first = owner(place)
    put(first, 1, "ours", 1)
    first.commit()
    other = owner(place, application="billing")
    put(other, 1, "theirs", 9)
    with pytest.raises(SettingsError, match="items of orders/clicks"):
        other.commit()
    assert values(place) == {1: "ours"}


def test_values_are_what_dynamodb_has_for_them(place):
    output = owner(place)
    row = {
        "shard": "k",
        "n": Decimal("1.50"),
        "f": 0.1,
        "i": 10**37,
        "t": True,
        "none": None,
        "b": b"\0",
        "l": [1, "a", None],
        "m": {"x": 1.5},
        "d": date(2013, 1, 31),
        "z": datetime(2013, 1, 31, tzinfo=UTC),
        "u": UUID(int=7),
        "s": {"b", "a"},
        "e": "",
    }
    output.add([output.encode(row)[0], output.encode(row | {"n": 1.5})[0]], at(1))
    output.commit()

    [item] = place.client.scan(TableName=place.name)["Items"]
    del item[MARK]
    assert item == {
        "shard": {"S": "k"},
        "n": {"N": "1.5"},
        "f": {"N": "0.1"},
        "i": {"N": str(10**37)},
        "t": {"BOOL": True},
        "none": {"NULL": True},
        "b": {"B": b"\0"},
        "e": {"S": ""},
        "l": {"L": [{"N": "1"}, {"S": "a"}, {"NULL": True}]},
        "m": {"M": {"x": {"N": "1.5"}}},
        "d": {"S": "2013-01-31"},
        "z": {"S": "2013-01-31T00:00:00+00:00"},
        "u": {"S": str(UUID(int=7))},
        "s": {"SS": ["a", "b"]},
    }


def test_a_page_of_a_proxy_is_not_an_item_that_was_put(place):
    output, pages = owner(place), [b"<html>", b""]
    ask = output._client.ask
    output._client.ask = lambda *request: WireReply(200, pages.pop()) if pages else ask(*request)

    put(output, 1, "kept", 1)
    assert persist(output) == at(1)

    assert values(place) == {1: "kept"}
    assert pages == []


class NumberOfALibrary(float):
    """A float with a text of its own, such as NumPy's."""

    def __repr__(self):
        return f"library.float64({float(self)})"


def test_a_float_of_a_library_is_a_number_and_zero_is_one_key_whatever_its_sign(place):
    output = owner(place)
    for n, value in ((-0.0, "first"), (0, "second"), (Decimal("-0.00"), "last")):
        put(output, n, value, 1)
    put(output, NumberOfALibrary(1.5), "of a library", 1)
    output.commit()

    assert values(place) == {0: "last", 1.5: "of a library"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"shard": "secret"}, "column n is of the key .* the row has no value"),
        ({"shard": "secret", "n": None}, "column n is of the key"),
        ({"shard": "secret", "n": "secret"}, "column n: the key of .* has the type N"),
        ({"shard": "", "n": 1}, "column shard is of the key: it takes 1 to 2,048 bytes"),
        ({"shard": "secret" * 400, "n": 1}, "column shard is of the key"),
        ({"shard": "k", "n": float("nan")}, "column n: a number that is not finite"),
        ({"shard": "k", "n": 10**38 + 1}, "column n: a number with more than 38 digits"),
        ({"shard": "k", "n": 1e300}, "column n: a number with more than 38 digits, or too great"),
        ({"shard": "k", "n": 1, "x": object()}, "column x: DynamoDB has no type for object"),
        ({"shard": "k", "n": 1, "x": {1: "secret"}}, "column x: a map whose names are not texts"),
        ({"shard": "k", "n": 1, "x": {"secret", 2}}, "column x: "),
        ({"shard": "k", "n": 1, "x": "secret\ud800"}, "column x: a text with half a surrogate"),
        ({"shard": "k", "n": 1, MARK: "secret"}, MARK),
        ({"shard": "k", "n": 1, 7: "secret"}, "column 7 cannot be"),
    ],
)
def test_a_row_that_is_not_an_item_names_the_column_and_not_the_value(place, row, words):
    output = owner(place)
    with pytest.raises(TypeError, match=words) as refused:
        output.encode(row)
    assert "secret" not in str(refused.value)


def test_an_item_may_have_400_kilobytes_as_dynamodb_counts_them(place):
    output = owner(place)
    near = {"shard": "k", "n": 1, "text": '"' * (390 * 1024)}
    encoded, size = output.encode(near)
    assert size > 400 * 1024  # as JSON
    output.add([encoded], at(1))
    output.commit()
    with pytest.raises(LimitExceeded, match="an item above"):
        output.encode(near | {"more": "x" * 16_384})


@pytest.mark.parametrize(
    ("schema", "reported"),
    [
        ("shard string, n decimal(5,0), more boolean", None),
        ("shard string, more int", "the schema lacks n, which is of the key of the table"),
        ("shard string, n string", "column n is string: the key of the table"),
        ("shard array<string>, n long", "column shard is array<string>: the key of the table"),
    ],
)
def test_a_check_refuses_a_schema_whose_rows_lack_the_key(place, schema, reported):
    output = place.open(OF, schema=schema)
    if reported is None:
        assert output.check() == f"the table {place.name}; may write: proven"
    else:
        with pytest.raises(SettingsError, match=re.escape(reported)):
            output.check()
    assert place.rows() == []


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.fixture
def indexed(place):
    """A table with a global index (driver, ride) and a local one (shard, fare)."""
    name, kinds = f"{place.name}-indexed", {"shard": "S", "n": "N"}
    others = {"driver": "S", "ride": "B", "fare": "N"}
    place.client.create_table(
        TableName=name,
        KeySchema=schema_of("shard", "n"),
        AttributeDefinitions=[
            {"AttributeName": each, "AttributeType": kind}
            for each, kind in (kinds | others).items()
        ],
        GlobalSecondaryIndexes=[index_of("by-driver", "driver", "ride")],
        LocalSecondaryIndexes=[index_of("by-fare", "shard", "fare")],
        BillingMode="PAY_PER_REQUEST",
    )
    output = place.open(OF, dynamodb=name)
    output.begin(START)
    return output


def schema_of(*names):
    return [
        {"AttributeName": name, "KeyType": role}
        for name, role in zip(names, ("HASH", "RANGE"), strict=True)
    ]


def index_of(name, *names):
    return {
        "IndexName": name,
        "KeySchema": schema_of(*names),
        "Projection": {"ProjectionType": "ALL"},
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"driver": None}, "column driver: the index by-driver of .* has the type S"),
        ({"driver": ""}, "column driver: the index by-driver of .* takes 1 to 2,048 bytes"),
        ({"driver": 5}, "column driver: the index by-driver of .* has the type S"),
        ({"driver": "secret" * 400}, "column driver: .* takes 1 to 2,048 bytes"),
        ({"ride": b""}, "column ride: the index by-driver of .* takes 1 to 1,024 bytes"),
        ({"ride": b"secret" * 200}, "column ride: .* takes 1 to 1,024 bytes"),
        ({"ride": "secret"}, "column ride: the index by-driver of .* has the type B"),
        ({"fare": "secret"}, "column fare: the index by-fare of .* has the type N"),
        ({"fare": None}, "column fare: the index by-fare of .* has the type N"),
        ({"x": nested(40)}, "column x: lists and maps nested deeper than 32 levels"),
        ({"x": {"y": {"": "secret"}}}, "column x: a map with an empty name"),
        ({"x": {"secret", ""}}, "column x: a set with an empty member"),
        ({"x": {b"secret", b""}}, "column x: a set with an empty member"),
        ({"x": {0.1, Decimal("0.1")}}, "column x: a set with two members of one value"),
        ({"x": {1, "secret"}}, "column x: a set whose members are not all texts"),
        ({"x": {None}}, "column x: a set whose members are not all texts"),
    ],
)
def test_what_an_index_or_a_type_of_the_table_refuses_is_refused_at_the_row(indexed, more, words):
    with pytest.raises(TypeError, match=words) as refused:
        indexed.encode({"shard": "k", "n": 1} | more)
    assert "secret" not in str(refused.value)


def test_an_item_may_lack_the_keys_of_an_index_and_may_be_nested_32_levels_deep(indexed):
    rows = [{"shard": "k", "n": 1}, {"shard": "k", "n": 2, "driver": "d", "x": nested(31)}]
    indexed.add([indexed.encode(row)[0] for row in rows], at(1))
    assert indexed.commit() == at(1)


def test_a_schema_with_a_column_of_another_type_than_its_index_is_refused_at_the_check(
    place, indexed
):
    output = place.open(OF, dynamodb=indexed._table, schema="shard string, n long, driver long")
    with pytest.raises(SettingsError, match="column driver is long: the index by-driver"):
        output.check()


def test_an_item_that_the_table_refuses_names_the_column_at_the_commit_and_in_a_trial(place):
    """A rule of the service that no check here knows."""
    output = owner(place)
    ask, trials = output._client.ask, []

    def answer(operation, body):
        if b'"picky"' not in body:
            return ask(operation, body)
        trials.append(b"attribute_exists(#k) AND attribute_not_exists(#k)" in body)
        words = "The value of n is not for this item: secret"
        return RefusedReply(400, ErrorReply(code="ValidationException", message=words))

    output._client.ask = answer
    good, bad = (
        output.encode({"shard": "k", "n": n, "of": of})[0] for n, of in ((1, "all"), (2, "picky"))
    )
    output.add([good, bad], at(1))
    with pytest.raises(RowsRefused, match=r"refuses an item: ValidationException, column n$"):
        output.commit()
    assert trials == [False]

    tried = owner(place)
    tried._client.ask = answer
    tried.try_rows([output.encode({"shard": "k", "n": 3})[0]], ())
    with pytest.raises(TypeError, match=r"refuses an item: ValidationException, column n$"):
        tried.try_rows([good, bad], ())
    assert trials == [False, True]
    assert {row["n"] for row in place.rows()} <= {1}, "a trial puts no item"


@pytest.mark.parametrize("does", ["commit", "trial"])
def test_a_refusal_by_an_index_that_the_table_got_after_the_start_names_its_column(place, does):
    output = owner(place)
    row = output.encode({"shard": "k", "n": 1, "driver": None})[0]
    place.client.update_table(
        TableName=place.name,
        AttributeDefinitions=[
            {"AttributeName": name, "AttributeType": kind}
            for name, kind in (("shard", "S"), ("n", "N"), ("driver", "S"))
        ],
        GlobalSecondaryIndexUpdates=[{"Create": index_of("by-driver", "driver", "n")}],
    )
    output.add([row], at(1))
    does = {"commit": output.commit, "trial": lambda: output.try_rows([row], ())}[does]
    try:
        with pytest.raises((RowsRefused, TypeError), match=r"ValidationException, column driver$"):
            does()
        with pytest.raises(TypeError, match="column driver: the index by-driver"):
            output.encode({"shard": "k", "n": 2, "driver": 5})
    finally:
        place.client.update_table(
            TableName=place.name,
            GlobalSecondaryIndexUpdates=[{"Delete": {"IndexName": "by-driver"}}],
        )


def test_a_table_may_be_named_by_its_arn(place):
    arn = place.client.describe_table(TableName=place.name)["Table"]["TableArn"]
    output = place.open(OF, dynamodb=arn)
    output.begin(START)
    put(output, 1, "by its ARN", 1)

    assert persist(output) == at(1)
    assert values(place) == {1: "by its ARN"}
    assert "may write: proven" in output.check()
