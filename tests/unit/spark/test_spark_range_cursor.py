"""One range of a shard, request by request: what is read, what is left out, what counts as lost."""

import re

import pytest

from kclrun.errors import DataLoss, InvariantViolation
from kclrun.model.reading import Fetch, FetchedPage
from kclrun.model.record import IteratorType, Record
from kclrun.model.shard import HASH_KEY_MAX, ChildShard, HashRange
from kclrun.spark.executor.range_cursor import AskRetention, RangeCursor
from kclrun.spark.offsets import Hint, ShardRange
from kclrun.spark.positions import SHARD_END, TRIM_HORIZON, after, at_timestamp, before
from tests.support.tables import over_rows

NOW = 1_700_000_000.0
CHILDREN = (ChildShard("t", ("s",), HashRange(0, HASH_KEY_MAX)),)


def page(numbers="", following="i", behind_ms=1000, *, children=()):
    records = [Record(b"", "k", number, 0.0) for number in numbers.split()]
    return FetchedPage(records, following, behind_ms, children)


def closing(numbers="", *, children=CHILDREN):
    return page(numbers, None, 0, children=children)


EMPTY_TIP = page("", "i", 0)


def cursor(begin, end, *, tolerates_loss=False, **more):
    wanted = ShardRange("s", begin, end, **more)
    return RangeCursor(wanted, stream="orders", tolerates_loss=tolerates_loss, token_now=NOW)


def read(made, *pages, every_s=1.0, retention_hours=24.0):
    """The requests as text, and the numbers read, while there are answers."""
    answers, asked, taken, now = iter(pages), [], [], 0.0
    for _ in range(200):
        match made.request():
            case None:
                assert next(answers, None) is None, "it ended before these pages"
                return " ".join([*asked, "done"]), " ".join(taken)
            case AskRetention():
                asked.append("retention")
                taken += [each.sequence_number for each in made.judge(retention_hours, NOW)]
            case Fetch(iterator, limit):
                answer = next(answers, None)
                if answer is None:
                    return " ".join(asked), " ".join(taken)
                asked.append(f"{iterator}:{limit}" if limit < 10_000 else iterator)
                now += every_s
                taken += [each.sequence_number for each in made.take(answer, now)]
            case start:
                asked.append(
                    {
                        IteratorType.TRIM_HORIZON: "oldest",
                        IteratorType.AT_TIMESTAMP: f"{start.timestamp}s",
                        IteratorType.AT_SEQUENCE_NUMBER: f"@{start.sequence_number}",
                    }[start.kind]
                )
                made.opened("o")
    raise AssertionError(f"no end: {asked}")


# By claim: the range, the pages; the requests, and the records that are read.
READS = {
    "after a record, that one is read and left out": (
        (after("3"), after("5")),
        [page("3 4 5 6")],
        ("@3 o done", "4 5"),
    ),
    "before a record, it is read": (
        (before("3"), before("5")),
        [page("3 4 5")],
        ("@3 o done", "3 4"),
    ),
    "inside an aggregate, it is read": (
        (after("3", 1), after("4")),
        [page("3 4")],
        ("@3 o done", "3 4"),
    ),
    "from the oldest on": ((TRIM_HORIZON, after("5")), [page("4 5")], ("oldest o done", "4 5")),
    "from a time on": ((at_timestamp(1_500), after("5")), [page("4 5")], ("1.5s o done", "4 5")),
    "page after page": (
        (after("3"), after("6")),
        [page("3 4"), page(), page("5"), EMPTY_TIP, page("6")],
        ("@3 o i i i i done", "4 5 6"),
    ),
    "the anchor may come late": (
        (before("3"), after("4")),
        [page(), EMPTY_TIP, page("3 4")],
        ("@3 o i i done", "3 4"),
    ),
    "to the end of the shard": (
        (after("3"), SHARD_END),
        [page("3 4"), closing("5")],
        ("@3 o i done", "4 5"),
    ),
    "a null iterator that names no children is read again": (
        (after("3"), SHARD_END),
        [page("3 4"), closing("5", children=()), closing("5", children=())],
        ("@3 o i @5 o done", "4 5"),
    ),
    "numbers are compared by their size": (
        (after("9"), before("11")),
        [page("9 10 11")],
        ("@9 o done", "10"),
    ),
}


@over_rows(("bounds", "pages", "found"), READS.values())
def test_a_range_is_read_record_by_record(bounds, pages, found):
    made = cursor(*bounds)

    assert read(made, *pages) == found
    assert made.notices == []


HINTED = Hint("t", NOW - 239.9)
# The range, the first page of the driver's iterator, and whether reading goes on with it.
TOKENS = [
    ((before("3"), after("5")), page("3 4"), True),
    ((before("3"), after("5")), page("2 3"), False),
    ((before("3"), after("5")), page("4"), False),
    ((after("3", 1), after("5")), page("3 4"), True),
    ((after("3", 1), after("5")), page("4"), False),
    ((after("3"), after("5")), page("4"), True),
    ((after("3"), after("5")), page("5"), True),
    ((after("3"), before("5")), page("5"), True),
    ((after("3"), after("5")), page("6"), False),
    ((after("3"), SHARD_END), page("6"), True),
    ((after("3"), after("5")), page(), True),
    ((after("3"), after("5")), EMPTY_TIP, False),
    ((after("3"), after("5")), closing(), False),
]


@over_rows(("bounds", "first", "is_used"), TOKENS)
def test_the_drivers_iterator_is_left_where_its_page_cannot_be_at_the_beginning(
    bounds, first, is_used
):
    made = cursor(*bounds, hint=HINTED)
    assert made.is_hinted
    asked, taken = read(made, first)

    assert asked.startswith("t @3" if not is_used else "t")
    assert ("@3" in asked) is not is_used
    assert taken == "" or is_used
    assert made.is_hinted == (is_used and not first.records)


@over_rows(
    ("expected", "pages", "limits"),
    [
        (1, [], [4]),
        (10, [], [13]),
        (100, [], [112]),
        (9_089, [], [10_000]),
        (10, ["4 5"], [13, 11]),
        (2, ["4 5"], [5, 250]),
        (1, ["4 5"], [4, 250]),
        (0, [], [250]),
        (2, ["4 5", " ".join(map(str, range(6, 206)))], [5, 250, 400]),
    ],
)
def test_a_tenth_more_records_are_wanted_than_are_expected_and_then_more_and_more(
    expected, pages, limits
):
    made = cursor(before("4"), after("9999"), hint=Hint(records_expected=expected))
    made.opened("o")
    seen = []
    for numbers in [*pages, None]:
        seen.append(made.request().limit)
        if numbers is not None:
            made.take(page(numbers), 0.0)

    assert seen == limits


# By claim: the range, the pages, a second apart if not said; the loss that is named, what is still
# read where a loss is allowed.
LOSSES = {
    "it begins with a record that is gone": (
        (before("3"), after("5"), {}),
        [page("4 5")],
        ("the record it begins with, 3, was trimmed before it was read", "4 5"),
    ),
    "it goes on after a record that is gone": (
        (after("3"), after("5"), {}),
        [page("4 5")],
        ("the record it goes on after, 3, was trimmed before it was read", "4 5"),
    ),
    "a lease was inside a record that is gone": (
        (after("3", 1), after("5"), {}),
        [page("4 5")],
        (
            "that the lease was at, 3, was trimmed, so whatever followed it may be gone as well",
            "4 5",
        ),
    ),
    "its last record is gone": (
        (after("3"), after("5"), {}),
        [page("3 4"), page("6")],
        ("the record it ends at, 5, was trimmed before it was read", "4"),
    ),
    "the shard ended before its last record": (
        (after("3"), after("5"), {}),
        [page("3 4"), closing()],
        ("the shard ended before the record the range ends at, 5", "4"),
    ),
    "all is gone, and no record comes for a minute": (
        (TRIM_HORIZON, after("5"), {}),
        [EMPTY_TIP] * 61,
        ("the record it ends at, 5, was trimmed", ""),
    ),
    "all is gone, anchor and bound": (
        (before("3"), after("5"), {}),
        [EMPTY_TIP] * 61,
        ("the record it begins with, 3, was trimmed before it was read", ""),
    ),
    "the shard ended before the anchor": (
        (before("3"), SHARD_END, {}),
        [closing()],
        ("the record it begins with, 3, was trimmed before it was read", ""),
    ),
    "the tip was seen longer ago than the retention": (
        (after("3"), after("5"), {"as_of_ms": round((NOW - 86_400) * 1000) - 1}),
        [page("4 5")],
        ("3, was trimmed, and it was last seen at its tip longer ago than the 24 h", "4 5"),
    ),
}


@over_rows(("bounds", "pages", "loss"), LOSSES.values())
def test_a_loss_is_an_error_or_where_it_is_allowed_one_notice(bounds, pages, loss):
    begin, end, more = bounds
    words, rest = loss
    with pytest.raises(DataLoss, match=re.escape(words)) as raised:
        read(cursor(begin, end, **more), *pages)
    # What may never have been there is not said to be gone.
    is_known = begin != after(begin.number) and begin.sub_sequence_number is None
    verb = "are" if is_known or words.startswith(("the record it ends", "the shard")) else "may be"
    assert f"records of s of stream orders {verb} gone: " in str(raised.value)
    assert f"range  {begin} to {end}" in str(raised.value)

    for allowed in ({"tolerates_loss": True}, {"is_from_horizon": True}):
        made = cursor(begin, end, **more, **allowed)
        asked, taken = read(made, *pages)
        assert taken == rest
        assert asked.endswith("done")
        assert len(made.notices) == 1
        assert words in made.notices[0]
        assert made.notices[0].endswith("The query goes on with what is left.")


def test_a_record_that_is_gone_is_no_loss_if_the_tip_was_seen_within_the_retention():
    made = cursor(after("3"), after("5"), as_of_ms=round((NOW - 86_400) * 1000))

    assert read(made, page("4 5")) == ("@3 o retention done", "4 5")
    assert made.notices == []


@pytest.mark.parametrize("bounds", [(TRIM_HORIZON, after("5")), (before("3"), after("5"))])
def test_silence_of_less_than_a_minute_is_no_loss_and_a_gap_is_not_silence(bounds):
    quiet = [EMPTY_TIP] * 60

    assert read(cursor(*bounds), *quiet, page(), *quiet, page("3 4 5"))[1] == "3 4 5"


def test_a_shard_that_is_missing_is_a_loss_and_the_end():
    with pytest.raises(DataLoss, match=r"the shard is not in the stream any more \(gone\)"):
        cursor(after("3"), after("5")).missing("gone")
    made = cursor(after("3"), after("5"), tolerates_loss=True)
    made.missing("gone")

    assert made.request() is None
    assert len(made.notices) == 1


@pytest.mark.parametrize(
    ("begin", "end"), [(after("3"), TRIM_HORIZON), (after("3"), at_timestamp(1))]
)
def test_a_range_ends_at_a_record_or_at_the_end_of_a_shard(begin, end):
    with pytest.raises(InvariantViolation, match=f"s: a range cannot end at {end}"):
        cursor(begin, end)
    with pytest.raises(InvariantViolation, match="after the end of a shard"):
        cursor(SHARD_END, SHARD_END)
