"""The contract of `ports.Output`, for each place of `output_places`.

A place that stores its cursor holds each row once, whatever is lost or late; any other holds each
row at least once.
"""

import random

import msgspec
import pytest

from kclrun.errors import KclrunError, SettingsError, SinkError, Superseded
from kclrun.model.output import Cursor, RowsOf
from kclrun.model.row_schema import RowSchema
from kclrun.model.sequence import TRIM_HORIZON, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from tests.contract import (
    dynamodb_places,
    message_places,
    output_places,
    own_places,
    sql_places,
)

PLACES = (
    output_places.PLACES
    | sql_places.PLACES
    | message_places.PLACES
    | dynamodb_places.PLACES
    | own_places.PLACES
)
# Rows are there once: the cursor is at the destination. Elsewhere they are there at least once.
SENDING = {**message_places.PLACES, **dynamodb_places.PLACES, **own_places.SENDING}
STORING = [name for name in PLACES if name not in SENDING]
STORES = pytest.mark.parametrize("place", STORING, indirect=True)


def meets(*faults, names=PLACES):
    """The places, each with those of the faults that can be made there."""
    found = [(name, fault) for name in names for fault in faults if fault in PLACES[name].faults]
    return pytest.mark.parametrize(("place", "fault"), found, indirect=["place"])


START = Cursor(TRIM_HORIZON)
# A history takes up to seconds, most of them waits for a disk: `bin/test` plays the first, and the
# large rows of parts have no other.
SEEDS = range(104_000, 104_003)
HISTORIES = [
    pytest.param(name, seed, marks=pytest.mark.slow if seed > SEEDS[0] else ())
    for name in STORING
    for seed in (SEEDS[:1] if "parts" in name else SEEDS)
]
OF = RowsOf(
    application="orders",
    stream="clicks",
    stream_created_at=WallTime(1_700_000_000.0),
    shard_id="shardId-000000000007",
    generation=0,
    token=10,
)


@pytest.fixture(params=PLACES)
def place(request, tmp_path):
    made = made_place(request, tmp_path)
    yield made
    made.close()


def made_place(request, tmp_path):
    """The place that the parameter names, with the server it needs."""
    kind = PLACES[request.param]
    servers = ("aws", "postgres", "mariadb")
    server = next((each for each in servers if getattr(kind, f"needs_{each}")), None)
    return kind(request.getfixturevalue(server) if server else None, tmp_path)


def at(number):
    """The cursor after the row `number`: each record gives one row."""
    return Cursor(ExtendedSequenceNumber(str(10**20 + number)))


def owner(token, **changes):
    return msgspec.structs.replace(OF, token=token, **changes)


def emit(output, first, last, *, upto=None, of=OF, gap=0):
    """Add the rows first..last, two of them at a time. After row 6 come `gap` records without a
    row."""
    for start in range(first, last + 1, 2):
        end = min(start + 1, last)
        rows = [{"shard": of.shard_id, "n": n} for n in range(start, end + 1)]
        cursor = at(end + (gap if end > 6 else 0))
        output.add(
            [output.encode(row)[0] for row in rows],
            cursor if end < last else at(upto) if upto else cursor,
        )


def begun(place, of, cursor=START):
    output = place.open(of)
    output.begin(cursor)
    return output


def numbers(place, of=OF):
    return [row["n"] for row in place.rows() if row["shard"] == of.shard_id]


def assert_holds(place, last, of=OF):
    """The rows 1..last are there: once and in order, or at least once."""
    found = numbers(place, of)
    if place.open(of).stores_cursor:
        assert found == list(range(1, last + 1))
    else:
        assert sorted(set(found)) == list(range(1, last + 1))


def persist(output, tries=8):
    """Commit as the host does: again after each failure."""
    for _ in range(tries):
        try:
            return output.commit()
        except Superseded:
            raise
        except SinkError:
            pass
    raise AssertionError(f"no commit in {tries} tries")


def test_rows_are_there_in_order_after_their_commit_with_its_cursor(place):
    output = place.open(OF)
    assert output.begin(START) == START
    assert output.commit() == START
    emit(output, 1, 5)
    if output.stores_cursor:
        assert place.rows() == []
    assert output.commit() == at(5)
    assert_holds(place, 5)
    emit(output, 6, 6)
    emit(output, 7, 9, upto=12)
    assert output.commit() == at(12)
    assert_holds(place, 9)
    assert output.commit() == at(12)
    output.close()
    output.close()
    assert place.rows()[0] == {"shard": OF.shard_id, "n": 1}
    assert_holds(place, 9)


def test_unsent_bytes_are_those_that_the_next_commit_sends(place):
    output = begun(place, OF)
    assert output.unsent_bytes == 0
    emit(output, 1, 4)
    if output.stores_cursor:
        assert output.unsent_bytes > 0
    output.commit()
    assert output.unsent_bytes == 0


@STORES
def test_rows_that_were_not_committed_are_dropped_by_close(place):
    output = begun(place, OF)
    emit(output, 1, 2)
    output.commit()
    emit(output, 3, 9)
    output.close()
    assert numbers(place) == [1, 2]
    assert place.open(owner(11)).begin(START) == at(2)
    assert numbers(place) == [1, 2]


@STORES
def test_the_next_owner_learns_how_far_the_destination_is_and_goes_on_there(place):
    first = begun(place, OF)
    for last in (2, 4, 5):
        emit(first, last - 1 if last < 5 else 5, last)
        first.commit()
    for token, cursor in ((11, START), (12, at(2)), (13, at(5))):
        assert place.open(owner(token)).begin(cursor) == at(5)
    second = begun(place, owner(14), at(4))
    emit(second, 6, 7)
    assert second.commit() == at(7)
    assert_holds(place, 7)


@meets("throttled", "lost request", "lost reply", "conflict", "a proxy's page")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_commit_that_is_repeated_writes_its_rows_once(place, fault, times):
    output = begun(place, OF)
    emit(output, 1, 3)
    place.fail(fault, times)
    assert persist(output, tries=times + 1) == at(3)
    emit(output, 4, 5)
    assert output.commit() == at(5)
    assert_holds(place, 5)


@meets("late")
def test_a_request_that_arrives_after_its_repetition_changes_nothing(place, fault):
    """V1: one owner, a time-out, a repetition, and then the first request arrives."""
    output = begun(place, OF)
    emit(output, 1, 3)
    place.fail(fault, 2)
    cursor = persist(output)
    emit(output, 4, 5)
    place.land()
    assert (cursor, persist(output)) == (at(3), at(5))
    assert_holds(place, 5)


@meets("late", names=STORING)
@pytest.mark.parametrize(
    "gap", [0, pytest.param(10, marks=pytest.mark.long)], ids=["", "after records without rows"]
)
@pytest.mark.parametrize("lands", ["before begin", "before add", "before commit", "after commit"])
def test_a_late_request_of_a_former_owner_and_the_next_owner_write_each_row_once(
    place, fault, lands, gap
):
    """V2, V3. With a gap the lease's row says (checkpoint: after the gap, output: before it)."""
    former = begun(place, OF)
    emit(former, 1, 2)
    former.commit()
    emit(former, 3, 6, upto=6 + gap)
    place.fail(fault)
    with pytest.raises(SinkError):
        former.commit()

    if lands == "before begin":
        place.land()
    after = place.open(owner(11))
    cursor = after.begin(at(2))
    if lands == "before add":
        place.land()
    last = 2 if cursor == at(2) else 6
    emit(after, last + 1, 4 if last < 4 else 7, gap=gap)
    if lands == "before commit":
        place.land()
    try:
        after.commit()
    except Superseded:
        after = place.open(owner(12))
        assert after.begin(at(2)) == at(6 + gap)
    place.land()
    present = numbers(place)
    assert present == list(range(1, len(present) + 1))
    assert len(present) >= 4

    final = begun(place, owner(13), at(2))
    emit(final, len(present) + 1, 9, gap=gap)
    assert final.commit() == at(9 + gap)
    assert_holds(place, 9)


@STORES
def test_a_former_owner_that_goes_on_never_adds_rows_behind_the_next_owners(place):
    former = begun(place, OF)
    emit(former, 1, 3)
    after = begun(place, owner(11))
    emit(after, 1, 4)
    assert after.commit() == at(4)
    with pytest.raises(Superseded):
        former.commit()
    with pytest.raises(Superseded):
        former.commit()
    former.close()
    assert_holds(place, 4)
    emit(after, 5, 5)
    assert after.commit() == at(5)
    assert_holds(place, 5)


@pytest.mark.parametrize(("place", "seed"), HISTORIES, indirect=["place"])
def test_whatever_is_lost_late_or_repeated_each_row_is_there_once(place, seed):
    """Owners follow one another while former ones go on, and each takes up where the row of the
    lease, or the destination, says. A record may give no row."""
    chance = random.Random(seed)
    faults = sorted(place.faults - {"refused"})
    silent = {n for n in range(1, 61) if chance.random() < 0.3}
    token, row, owners = 10, (START, 0), []
    while row[1] < 60:
        if not owners or chance.random() < 0.15:
            token += 1
            output = place.open(owner(token))
            try:
                cursor = output.begin(row[0])
            except SinkError:
                continue
            reached = 0 if cursor == START else int(cursor.position.sequence_number) - 10**20
            owners.append([token, output, max(reached, row[1]), False])
        each = chance.choice(owners[-3:])
        _, output, done, is_unresolved = each
        match chance.choice(["add", "add", "commit", "commit", "land", "fail"]):
            case "add" if done < 60 and not is_unresolved:
                upto = min(60, done + chance.randint(1, 4))
                wanted = [n for n in range(done + 1, upto + 1) if n not in silent]
                rows = [output.encode({"shard": OF.shard_id, "n": n})[0] for n in wanted]
                try:
                    if rows:
                        output.add(rows, at(upto))
                except Superseded:
                    owners.remove(each)
                except SinkError:
                    continue
                each[2] = upto
            case "commit":
                try:
                    cursor = output.commit()
                except Superseded:
                    owners.remove(each)
                    continue
                except SinkError:
                    each[3] = True
                    continue
                each[3] = False
                if each[0] == token:  # a former owner's checkpoint is refused by the lease table
                    row = (cursor, max(row[1], each[2]))
            case "land":
                place.land()
            case "fail" if faults:
                place.fail(chance.choice(faults))
    place.land()
    assert numbers(place) == [n for n in range(1, 61) if n not in silent]


@pytest.mark.each_value
@STORES
@pytest.mark.parametrize(
    "other",
    [
        {"shard_id": "shardId-000000000008"},
        {"generation": 1},
        {"application": "billing"},
        {"stream": "views"},
        {"stream_created_at": WallTime(1_700_000_900.0)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_cursors_are_kept_apart_by_all_that_names_the_rows(place, other):
    one, two = OF, owner(10, **other)
    first, second = begun(place, one), begun(place, two)
    emit(first, 1, 4, of=one)
    first.commit()
    emit(second, 1, 2, of=two)
    assert second.commit() == at(2)
    assert place.open(owner(11)).begin(START) == at(4)
    assert place.open(owner(11, **other)).begin(START) == at(2)
    assert sorted((row["shard"], row["n"]) for row in place.rows()) == sorted(
        [(one.shard_id, n) for n in range(1, 5)] + [(two.shard_id, n) for n in (1, 2)]
    )


@STORES
def test_a_token_at_the_destination_above_ours_is_an_error_in_words(place):
    output = begun(place, owner(50))
    emit(output, 1, 1)
    output.commit()
    with pytest.raises(SettingsError, match="token 50"):
        place.open(owner(49)).begin(START)


def test_a_row_that_can_never_be_written_names_its_column_and_not_its_value(place):
    output = begun(place, OF)
    row = {"shard": OF.shard_id, "n": object()}
    # As `Context.emit` does.
    check = dict if place.schema is None else RowSchema.parse(place.schema).check
    with pytest.raises((TypeError, KclrunError), match=r"\bn'?:") as raised:
        output.encode(check(row))
    assert "object at" not in str(raised.value)
    encoded, size = output.encode({"shard": OF.shard_id, "n": 1})
    assert size > 0
    output.add([encoded], at(1))
    output.commit()
    assert_holds(place, 1)


@meets("refused")
def test_a_failed_commit_says_what_failed_and_is_repeated(place, fault):
    output = begun(place, OF)
    emit(output, 1, 2)
    place.fail(fault)
    with pytest.raises(SinkError) as refused:
        output.commit()
    assert place.name in str(refused.value)
    assert output.commit() == at(2)
    assert_holds(place, 2)


def test_a_check_names_the_destination_and_leaves_no_row(place):
    assert place.open(OF).check()
    assert place.open(OF).check()
    assert place.rows() == []
    assert place.open(OF).begin(START) == START
    missing = place.open_missing()
    if missing is not None:
        with pytest.raises(KclrunError):
            missing.check()
