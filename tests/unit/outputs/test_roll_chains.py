"""What `kclrun files verify` finds, and that each row stays when its advice is followed."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kclrun.model.output import Cursor, RollRecord, roll_begin, roll_name
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.outputs.roll_chains import ADVICE, UNFINISHED_S, Part, RollFile, Wrong, findings_of
from tests.examples import examples
from tests.support.tables import over_rows

OLD = 3600.0
HOW_TO = Path(__file__).parents[3] / "docs/how-to/rows-to-s3-and-files.md"


def cursor(at):
    return Cursor(ExtendedSequenceNumber(at if isinstance(at, str) else str(10**20 + at)))


def number(begin):
    return 0 if begin.position.is_sentinel else int(begin.position.sequence_number) - 10**20


def file(part, begin, *, folder="/a", commit="", record=None, age_s=OLD, inode=0):
    name = f"{roll_name(cursor(begin))}.{commit}.{part.name.lower()}"
    return RollFile(
        folder=folder,
        name=name,
        part=part,
        begin=cursor(begin),
        age_s=age_s,
        inode=inode,
        commit=commit,
        record=record,
    )


def roll(begin, end, token=1, *, folder="/a", commit="", has_rows=True, inode=0):
    """The files of a finished roll."""
    commit = commit or f"{folder}{token}"
    record = RollRecord(end=str(cursor(end)), commit=commit, token=token)
    rows = [file(Part.ROWS, begin, folder=folder, inode=inode)] if has_rows else []
    return [file(Part.RECORD, begin, folder=folder, record=record), *rows]


def chain(*cuts, **of):
    return [each for begin, end in pairwise(cuts) for each in roll(begin, end, **of)]


def found(files):
    """Where what is wrong begins, by kind."""
    begins = {each.path: f"{each.folder[1:]}{number(each.begin)}" for each in files}
    seen = {}
    for finding in findings_of(files):
        seen.setdefault(finding.kind, []).append(begins[finding.path])
    return {kind: sorted(each) for kind, each in seen.items()}


A, B = {"folder": "/a", "token": 5}, {"folder": "/b", "token": 9}
CASES = {
    "a whole chain": (chain("TRIM_HORIZON", 3, 5, 9), {}),
    "a chain over two hosts": (chain("LATEST", 3, 5, **A) + chain(5, 7, 9, **B), {}),
    "a reader removed the first rolls": (
        roll(1, 3, has_rows=False) + roll(3, 5, has_rows=False) + chain(5, 6),
        {},
    ),
    # R7: host A is lost before the row moved; the next owner begins where A did.
    "R7, other cuts": (chain(1, 3, 6, **A) + chain(1, 4, 8, **B), {Wrong.TWICE: ["a1", "a3"]}),
    "R7, the same cuts": (
        chain(1, 3, 6, **A) + chain(1, 3, 6, 8, **B),
        {Wrong.TWICE: ["a1", "a3"]},
    ),
    "R7, the former owner was further": (
        chain(1, 3, 6, **A) + chain(1, 4, **B),
        {Wrong.TWICE: ["a1"], Wrong.OVERLAP: ["a3"]},
    ),
    # P19: A's late checkpoint is at 3, so the lease goes on from A's roll and not from B's.
    "a late checkpoint of the lost owner": (
        chain(1, 3, **A) + chain(1, 4, **B) + chain(3, 6, folder="/b", token=10),
        {Wrong.TWICE: ["b1"]},
    ),
    "the checkpoint was moved back": (
        chain(1, 4, 8, **A) + chain(6, 9, folder="/a", token=6),
        {Wrong.OVERLAP: ["a4"]},
    ),
    "a roll before the first record of two days": (
        chain("TRIM_HORIZON", 3, **A) + chain("TRIM_HORIZON", 4, **B),
        {Wrong.OVERLAP: ["a0"]},
    ),
    "what has the other's rows was read and removed": (
        chain(1, 3, **A) + roll(1, 3, 9, folder="/b", has_rows=False) + chain(3, 5, **B),
        {Wrong.OVERLAP: ["a1"]},
    ),
    "a copy": (
        chain(1, 3, 5) + chain(1, 3, folder="/b", token=1, commit="/a1", inode=7),
        {Wrong.COPY: ["b1"]},
    ),
    "one folder by two paths": (
        chain(1, 3, 5) + chain(1, 3, 5, folder="/b", token=1, commit="/a1"),
        {},
    ),
    "a roll in the middle is gone": (chain(1, 3) + chain(5, 7), {Wrong.MISSING: ["a5"]}),
    "a record is gone": (chain(1, 3)[1:] + chain(3, 7), {Wrong.NO_RECORD: ["a1"]}),
    "a record cannot be read": (
        [file(Part.RECORD, 1), file(Part.ROWS, 1), *chain(3, 7)],
        {Wrong.NO_RECORD: ["a1"]},
    ),
    "rows that were listed before their record": ([file(Part.ROWS, 1, age_s=1)], {}),
    "the owner ended between record and rows": (
        [roll(1, 3, commit="c1")[0], file(Part.OWN_ROWS, 1, commit="c1")],
        {Wrong.NOT_VISIBLE: ["a1"]},
    ),
    "a roll that grows": ([file(Part.OWN_ROWS, 1, commit="c1")], {}),
    "a roll of an owner that was killed": (
        [
            file(part, 1, commit="c1", age_s=UNFINISHED_S + 1)
            for part in (Part.OWN_ROWS, Part.OWN_RECORD)
        ],
        {Wrong.UNFINISHED: ["a1", "a1"]},
    ),
}


@over_rows(("files", "wrong"), CASES.values())
def test_what_is_wrong_is_found_and_nothing_else(files, wrong):
    assert found(files) == wrong


_ROLLS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(1, 3),
        st.integers(1, 3),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=2,
    max_size=5,
)


@pytest.mark.seconds
@examples(500)
@given(_ROLLS)
def test_each_row_is_still_visible_when_all_that_is_there_twice_is_removed(drawn):
    files, rows = [], {}
    for index, (begin, length, token, has_rows, at_sentinel) in enumerate(drawn):
        named = "TRIM_HORIZON" if at_sentinel else begin
        made = roll(
            named, begin + length, token, folder=f"/{index}", commit=str(index), has_rows=has_rows
        )
        files += made
        rows |= {each.path: range(begin, begin + length) for each in made[1:]}
    removed = {each.path for each in findings_of(files) if each.kind is Wrong.TWICE}

    left = {row for path, of_file in rows.items() if path not in removed for row in of_file}

    assert left == {row for of_file in rows.values() for row in of_file}


@over_rows("begin", ["TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", 0, 17])
def test_the_name_of_a_roll_says_where_it_begins(begin):
    for at in (cursor(begin), Cursor(ExtendedSequenceNumber("7", 123), 4)):
        assert roll_begin(roll_name(at)) == at
    assert roll_begin(f"{roll_name(cursor(begin))}0x") is None
    assert roll_begin("007-000001") is None


def test_each_kind_is_explained_on_its_page():
    page = HOW_TO.read_text()

    assert set(ADVICE) == set(Wrong)
    assert [each for each in Wrong if f"| `{each}` |" not in page] == []
