"""Rows of redriven letters at each destination of `test_outputs`: beside those of the run, and once
wherever a cursor is stored [K13]."""

import contextlib
import random
import sqlite3

import pytest

from kclrun.cli.dead_letters.user_process import LetterRefused, LetterRows
from kclrun.errors import SinkError
from kclrun.model.output import OutputDestination
from kclrun.outputs.sql import SqlOutput
from tests.contract import own_places
from tests.contract.dynamodb_places import Items
from tests.contract.message_places import PLACES as MESSAGES
from tests.contract.test_outputs import OF, PLACES, at, begun, emit, made_place, owner, persist
from tests.support.letters import letter

# A message that is not taken is repeated for 10 s, again and again.
STORMED = [name for name in PLACES if name not in {"reference", *MESSAGES, *own_places.SENDING}]
MAIN = OutputDestination(name="output", sql="sqlite:///unused")


@pytest.fixture(params=[name for name in PLACES if name != "reference"])
def place(request, tmp_path):
    made = made_place(request, tmp_path)
    yield made
    made.close()


def of_run(number):
    """The letter of a record of the run."""
    return letter(
        10**20 + number,
        application=OF.application,
        stream=OF.stream,
        shard_id=OF.shard_id,
        stream_created_at=OF.stream_created_at,
    )


def redriver(place, opened=lambda output: output):
    return LetterRows([MAIN], lambda _, of: opened(place.open(of)), sleep=lambda _: None)


def rows_of(*numbers):
    return {"output": [{"shard": OF.shard_id, "n": n} for n in numbers]}


def assert_there(place, *expected):
    found = sorted(row["n"] for row in place.rows() if row["shard"] == OF.shard_id)
    if not place.open(OF).stores_cursor:
        found = sorted(set(found))
    assert found == sorted(expected)


def test_rows_of_letters_are_there_once_beside_those_of_the_run_that_goes_on(place):
    run = begun(place, OF, at(0))
    emit(run, 1, 4)
    run.commit()
    # Record 4 is where the next roll begins, and the cursor of the database.
    for number in (2, 4, 2):
        redriver(place).write(of_run(number), rows_of(100 + number, 200 + number))
    emit(run, 5, 6)
    run.commit()
    redriver(place).write(of_run(4), rows_of(104, 204))

    assert_there(place, 1, 2, 3, 4, 5, 6, 102, 104, 202, 204)
    following = place.open(owner(11))
    assert following.begin(at(6)) == at(6)  # the chain of the run knows nothing of letters


def test_of_two_redrives_at_the_same_moment_one_writes_the_rows_and_both_succeed(place):
    class Overtaken:
        """Another redrive does all of it before this one's commit."""

        def __init__(self, output):
            self._output = output

        def commit(self):
            redriver(place).write(of_run(2), rows_of(102))
            return self._output.commit()

        def __getattr__(self, name):
            return getattr(self._output, name)

    redriver(place, Overtaken).write(of_run(2), rows_of(102))

    assert_there(place, 102)


@pytest.mark.parametrize("place", STORMED, indirect=True)
# `bin/test` plays the first: a history takes up to a second.
@pytest.mark.parametrize(
    "seed",
    [
        106_200,
        pytest.param(106_201, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (106_202, 106_203)),
    ],
)
def test_rows_are_there_once_whatever_is_lost_or_late_and_however_often_it_is_resumed(place, seed):
    chance = random.Random(seed)
    run = begun(place, OF, at(0))
    left, done = list(range(1, 7)), 0
    while left:
        number = chance.choice(left)
        if chance.random() < 0.7:
            place.fail(chance.choice(sorted(place.faults)), chance.choice([1, 1, 8]))
        try:
            redriver(place).write(of_run(number), rows_of(100 + number))
        except SinkError:
            continue  # its letter stays, and is redriven again
        finally:
            if chance.random() < 0.5:
                place.land()
        if chance.random() < 0.7:  # else the redrive was killed before it removed the letter
            left.remove(number)
        done += 1
        emit(run, done, done, upto=done)
        persist(run, tries=100)
    place.land()

    assert_there(place, *range(1, done + 1), *range(101, 107))


def test_an_item_that_a_later_commit_wrote_is_not_replaced_by_a_letter(aws, tmp_path):
    """The mark of an item says which commit wrote it, not which record: either may be newer."""
    place = Items(aws, tmp_path)
    run = begun(place, OF, at(0))
    emit(run, 1, 3, upto=10)
    run.commit()

    with pytest.raises(LetterRefused, match="which of the two is newer"):
        redriver(place).write(of_run(9), rows_of(1))
    # A commit that ends with the letter's record has nothing newer.
    redriver(place).write(of_run(10), rows_of(1, 4))
    redriver(place).write(of_run(10), rows_of(1, 4))
    emit(run, 1, 1, upto=11)
    run.commit()
    assert_there(place, 1, 2, 3, 4)
    place.close()


@pytest.mark.parametrize("name", [name for name in MESSAGES if "fifo" in name])
def test_a_message_of_a_letter_is_not_taken_for_one_of_the_run(aws, tmp_path, name):
    """A commit of the run that begins at the letter's record may have the same first row."""
    place = MESSAGES[name](aws, tmp_path)
    run = begun(place, OF, at(2))
    emit(run, 3, 3)
    run.commit()
    for _ in range(2):  # the second time within five minutes
        redriver(place).write(of_run(2), rows_of(3))

    assert [row["n"] for row in place.rows()] == [3, 3]
    place.close()


def test_where_one_output_refuses_a_row_of_a_letter_no_output_gets_its_rows(tmp_path):
    url = f"sqlite:///{tmp_path / 'rows.db'}"
    with contextlib.closing(sqlite3.connect(tmp_path / "rows.db")) as connection, connection:
        connection.execute("CREATE TABLE open (n INTEGER)")
        connection.execute("CREATE TABLE picky (n INTEGER CHECK (n < 5))")
    places = [OutputDestination(name=name, sql=url, table=name) for name in ("open", "picky")]
    redriver = LetterRows(places, SqlOutput, sleep=lambda _: None)

    with pytest.raises(LetterRefused, match=r"outputs\.picky: .*column n"):
        redriver.write(of_run(1), {"open": [{"n": 1}], "picky": [{"n": 9}]})
    redriver.write(of_run(2), {"open": [{"n": 2}], "picky": [{"n": 2}]})

    with contextlib.closing(sqlite3.connect(tmp_path / "rows.db")) as connection:
        found = connection.execute("SELECT n FROM open").fetchall()
    assert found == [(2,)]
