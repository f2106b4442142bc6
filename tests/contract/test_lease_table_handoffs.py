"""Asks, offers, forced takes and hand-overs, over every lease table [P16, P17, P18]."""

from typing import Any

import pytest

from kclrun.aws.rows import encode_row
from kclrun.errors import IndexMissing, InvariantViolation
from kclrun.model.lease import OFFERED, DiedOn, Handoff, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import LATEST, SHARD_END, ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.protocol.writes import (
    Applied,
    Ask,
    Checkpoint,
    Claim,
    ConditionFailed,
    Decline,
    End,
    HandOver,
    LeaseChange,
    Offer,
    Release,
    Renew,
    ResumeLease,
    Take,
    Withdraw,
)
from tests.contract.lease_tables import (
    AT_5,
    AT_7_2,
    AT_9,
    HELD,
    JAVA,
    KEY,
    ME,
    OTHER,
    UNOWNED,
    Subject,
    changed,
)

pytest_plugins = ("tests.contract.lease_table_fixtures",)

THIRD = OwnerId("kclrun:c:host:3")
AT = WallTime(1_700_000_000.25)
ASK = Handoff(OTHER, AT)
ASKED = changed(HELD, handoff=ASK)
OFFERED_ROW = changed(HELD, owner=OFFERED, offered_to=OTHER, offered_by=ME)
# Attributes of hand-offs, whatever stands in them.
LITTER = {"handoffTo", "handoffAt", "offeredTo", "offeredBy"}
LITTERED = changed(ASKED, offered_to=THIRD, offered_by=THIRD)


def take(seen_owner: OwnerId | None, *, forced: bool = False) -> Take:
    return Take(KEY, ME, seen_owner, 4, 10.0, "LATEST", forced)


def litter_of(subject: Subject) -> set[str]:
    raw = subject.raw(KEY)
    assert raw is not None
    return raw.keys() & LITTER


# Asks


def test_an_ask_is_noted_and_nothing_else_changes(subject):
    table = subject.with_rows(HELD)

    assert table.write(Ask(KEY, OTHER, ME, AT)) == Applied(ASKED)
    assert table.read(KEY) == ASKED


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(HELD, owner=THIRD), id="another owner"),
        pytest.param(UNOWNED, id="no owner"),
        pytest.param(changed(HELD, checkpoint=SHARD_END), id="ended"),
        pytest.param(changed(HELD, handoff=Handoff(THIRD, AT)), id="asked for by another"),
        pytest.param(ASKED, id="asked for by me"),
    ],
)
def test_an_ask_is_refused_and_the_row_stays(subject, row):
    table = subject.with_rows(row)

    assert table.write(Ask(KEY, OTHER, ME, AT)) == ConditionFailed(row)
    assert table.read(KEY) == row


def test_an_ask_seen_for_too_long_is_replaced(subject):
    table = subject.with_rows(changed(HELD, handoff=Handoff(THIRD, AT)))

    outcome = table.write(Ask(KEY, OTHER, ME, WallTime(AT + 30.0), seen=Handoff(THIRD, AT)))

    assert outcome == Applied(changed(HELD, handoff=Handoff(OTHER, WallTime(AT + 30.0))))


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(HELD, handoff=Handoff(OTHER, AT)), id="another asker"),
        pytest.param(changed(HELD, handoff=Handoff(THIRD, WallTime(AT + 1.0))), id="a newer ask"),
        pytest.param(HELD, id="no ask any more"),
        pytest.param(
            changed(HELD, owner=OTHER, handoff=Handoff(THIRD, AT)), id="another owner, same ask"
        ),
        pytest.param(
            changed(HELD, checkpoint=SHARD_END, handoff=Handoff(THIRD, AT)), id="ended, same ask"
        ),
    ],
)
def test_an_ask_that_is_not_the_one_seen_is_not_replaced(subject, row):
    table = subject.with_rows(row)

    assert table.write(Ask(KEY, OTHER, ME, AT, Handoff(THIRD, AT))) == ConditionFailed(row)
    assert table.read(KEY) == row


def test_an_ask_without_a_time_can_be_replaced(subject):
    subject.plant(encode_row(HELD) | {"handoffTo": {"S": THIRD}})
    seen = subject.table.read(KEY)
    assert seen is not None
    assert seen.handoff == Handoff(THIRD, WallTime(0.0))

    for row in (changed(seen, owner=OTHER), changed(seen, checkpoint=SHARD_END)):
        subject.plant(encode_row(row))
        assert subject.table.write(Ask(KEY, OTHER, ME, AT, seen.handoff)) == ConditionFailed(row)
    subject.plant(encode_row(HELD) | {"handoffTo": {"S": THIRD}})
    newer = subject.table.write(Ask(KEY, OTHER, ME, AT, Handoff(THIRD, WallTime(1.0))))
    replaced = subject.table.write(Ask(KEY, OTHER, ME, AT, seen.handoff))

    assert newer == ConditionFailed(seen)
    assert replaced == Applied(ASKED)


def test_an_ask_from_time_0_does_not_stand_for_one_with_a_time(subject):
    row = changed(HELD, handoff=Handoff(THIRD, AT))
    table = subject.with_rows(row)

    undated = Handoff(THIRD, WallTime(0.0))
    assert table.write(Ask(KEY, OTHER, ME, AT, undated)) == ConditionFailed(row)


def test_a_time_without_an_asker_stands_in_nobodys_way(subject):
    subject.plant(encode_row(HELD) | {"handoffAt": {"N": "7"}})

    assert subject.table.read(KEY) == HELD
    assert subject.table.write(Ask(KEY, OTHER, ME, AT)) == Applied(ASKED)


@pytest.mark.parametrize("at", [AT, None], ids=["dated", "undated"])
def test_a_withdrawn_ask_is_gone_and_nothing_else_changes(subject, at):
    when = {} if at is None else {"handoffAt": {"N": "7"}}
    subject.plant(encode_row(HELD) | {"handoffTo": {"S": OTHER}} | when)

    assert subject.table.write(Withdraw(KEY, OTHER)) == Applied(HELD)
    assert subject.table.read(KEY) == HELD
    assert litter_of(subject) == set()


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(HELD, id="no ask any more"),
        pytest.param(changed(HELD, handoff=Handoff(THIRD, AT)), id="asked for by another"),
        pytest.param(OFFERED_ROW, id="offered to me"),
    ],
)
def test_only_our_own_ask_is_withdrawn(subject, row):
    table = subject.with_rows(row)

    assert table.write(Withdraw(KEY, OTHER)) == ConditionFailed(row)
    assert table.read(KEY) == row


def test_a_declined_offer_is_one_to_whoever_comes_by_the_one_who_declined(subject):
    table = subject.with_rows(OFFERED_ROW)

    declined = changed(OFFERED_ROW, offered_to=None, offered_by=OTHER, counter=5)
    assert table.write(Decline(KEY, OTHER, 4)) == Applied(declined)
    assert table.read(KEY) == declined
    assert litter_of(subject) == {"offeredBy"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(OFFERED_ROW, counter=5), id="another counter"),
        pytest.param(changed(OFFERED_ROW, offered_to=THIRD), id="offered to another"),
        pytest.param(changed(OFFERED_ROW, offered_to=None), id="offered to whoever comes"),
        pytest.param(changed(OFFERED_ROW, owner=ME), id="an owner"),
        pytest.param(changed(OFFERED_ROW, owner=None), id="no owner"),
    ],
)
def test_only_an_offer_to_us_as_it_was_seen_is_declined(subject, row):
    table = subject.with_rows(row)

    assert table.write(Decline(KEY, OTHER, 4)) == ConditionFailed(row)
    assert table.read(KEY) == row


STAYS: dict[str, LeaseChange] = {
    "renew": Renew(KEY, ME, 4),
    "renew with throughput": Renew(KEY, ME, 4, 12.5),
    "claim": Claim(KEY, ME, 4),
    "claim after the wait": Claim(KEY, ME, 4, has_waited=True),
    "checkpoint": Checkpoint(KEY, ME, 4, AT_9, AT_5),
}
DROPS: dict[str, LeaseChange] = {
    "take from another": take(ME),
    "end": End(KEY, ME, 4, AT_5),
    "release": Release(KEY, ME, 4, AT_5, AT_5),
    "checkpoint and release": Release(KEY, ME, 4, AT_9, AT_5),
}


@pytest.mark.parametrize("name", STAYS)
def test_an_ask_stays_through_the_owners_other_writes(subject, name):
    table = subject.with_rows(ASKED)

    outcome = table.write(STAYS[name])

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.handoff == ASK


@pytest.mark.parametrize("name", DROPS)
def test_every_trace_of_a_hand_off_goes_with_the_lease(subject, name):
    table = subject.with_rows(LITTERED)

    assert isinstance(table.write(DROPS[name]), Applied)

    assert litter_of(subject) == set()


@pytest.mark.parametrize("throughput", [None, 12.5])
def test_a_renewal_can_drop_an_ask_and_nothing_else(subject, throughput):
    table = subject.with_rows(changed(ASKED, throughput_kbps=12.5, taken_from=JAVA))

    outcome = table.write(Renew(KEY, ME, 4, throughput, drops_ask=True))

    assert outcome == Applied(changed(HELD, counter=5, throughput_kbps=12.5, taken_from=JAVA))
    assert litter_of(subject) == set()


def test_half_an_ask_is_dropped_too(subject):
    subject.plant(encode_row(HELD) | {"handoffAt": {"N": "7"}})

    assert subject.table.write(Renew(KEY, ME, 4, drops_ask=True)) == Applied(
        changed(HELD, counter=5)
    )
    assert litter_of(subject) == set()


# Offers


@pytest.mark.parametrize("to", [None, OTHER], ids=["to whoever comes", "to the asker"])
def test_an_offer_gives_the_lease_away_and_stays_where_it_is(subject, to):
    table = subject.with_rows(LITTERED)

    outcome = table.write(Offer(KEY, ME, 4, AT_5, AT_5, to))

    assert outcome == Applied(changed(HELD, counter=5, owner=OFFERED, offered_to=to, offered_by=ME))
    assert litter_of(subject) == {"offeredBy"} | ({"offeredTo"} if to else set())


@pytest.mark.parametrize("to", [None, OTHER], ids=["to whoever comes", "to the asker"])
def test_an_offer_with_a_moved_position_is_a_checkpoint_too(subject, to):
    table = subject.with_rows(changed(LITTERED, died_on=DiedOn("host-1", AT_5)))

    outcome = table.write(Offer(KEY, ME, 4, AT_7_2, AT_5, to))

    assert outcome == Applied(
        changed(
            HELD,
            counter=5,
            owner=OFFERED,
            offered_to=to,
            offered_by=ME,
            checkpoint=AT_7_2,
            owner_switches=0,
            pending=None,
        )
    )


# Ways in which a row is not where an owner saw it, each of them alone.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "a counter ahead": {"counter": 5},
    "a counter behind": {"counter": 3},
    "a position ahead": {"checkpoint": AT_9},
    "a record ahead in the first": {"checkpoint": ExtendedSequenceNumber("5", 1)},
    "a record ahead in the second": {"checkpoint": ExtendedSequenceNumber("7", 3)},
    "ended": {"checkpoint": SHARD_END},
}
OWNED_ELSEWHERE: dict[str, dict[str, Any]] = {
    "another owner": {"owner": OTHER},
    "offered": {"owner": OFFERED},
    "no owner": {"owner": None},
}


def test_an_offer_after_deaths_says_where_and_progress_or_a_resume_forgets_it(subject):
    died = DiedOn("host-1", AT_5)
    table = subject.with_rows(changed(HELD, handoff=Handoff(THIRD, AT)))

    offered = table.write(Offer(KEY, ME, 4, AT_5, AT_5, died_on=died))

    expected = changed(HELD, counter=5, owner=OFFERED, offered_by=ME, died_on=died)
    assert offered == Applied(expected)
    assert table.read(KEY) == expected
    assert expected.failed_slot == "host-1"
    taken = table.write(Take(KEY, OTHER, OFFERED, 5, 10.0, "LATEST"))
    assert isinstance(taken, Applied)
    assert taken.row is not None
    assert taken.row.died_on == died
    moved = table.write(Checkpoint(KEY, OTHER, 6, AT_9, AT_5))
    assert isinstance(moved, Applied)
    assert moved.row is not None
    assert moved.row.died_on is None
    table.write(Offer(KEY, OTHER, 7, AT_9, AT_9, died_on=DiedOn("host-2", AT_9)))
    table.write(ResumeLease(KEY))
    assert table.read(KEY) == changed(moved.row, counter=8, owner=OFFERED, offered_by=OTHER)


@pytest.mark.each_value
@pytest.mark.parametrize("to", [None, OTHER], ids=["to whoever comes", "to the asker"])
@pytest.mark.parametrize("last", [AT_5, AT_7_2], ids=str)
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
@pytest.mark.parametrize("other", ELSEWHERE | OWNED_ELSEWHERE)
def test_an_offer_is_refused_and_the_row_stays(subject, to, last, moves, other):
    as_seen = changed(HELD, checkpoint=last)
    row = changed(as_seen, **(ELSEWHERE | OWNED_ELSEWHERE)[other])
    change = Offer(KEY, ME, 4, AT_9 if moves else last, last, to)

    assert subject.with_rows(row).write(change) == ConditionFailed(row)
    assert subject.table.read(KEY) == row
    assert isinstance(subject.with_rows(as_seen).write(change), Applied)


def test_an_offered_lease_is_taken_as_anybodys(subject):
    table = subject.with_rows(OFFERED_ROW)

    outcome = table.write(Take(KEY, OTHER, OFFERED, 4, 10.0, "LATEST"))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.owner == OTHER
    assert outcome.row.owner_switches == HELD.owner_switches + 1
    assert litter_of(subject) == set()


# Finding offers


def rows_of(count: int, **fields: Any) -> list[Lease]:
    return [
        changed(OFFERED_ROW, key=LeaseKey(f"shardId-{number:012}"), **fields)
        for number in range(count)
    ]


def test_offered_rows_are_found_and_no_others(indexed):
    offered = changed(OFFERED_ROW, key=LeaseKey("shardId-offered"))
    owned = [
        changed(HELD, key=LeaseKey(f"shardId-{owner}"), owner=owner)
        for owner in (ME, JAVA, None, OwnerId(f"{OFFERED}-not"))
    ]
    table = indexed.with_rows(offered, *owned)

    assert table.offered(10) == (offered,)


def test_without_offers_none_are_found(indexed):
    assert indexed.with_rows(HELD).offered(10) == ()


def test_a_broken_offered_row_hides_no_other(indexed):
    table = indexed.with_rows(OFFERED_ROW)
    indexed.plant({"leaseKey": {"S": "broken"}, "leaseOwner": {"S": OFFERED}})

    assert table.offered(10) == (OFFERED_ROW,)


def test_among_many_offered_rows_some_are_chosen_at_random(indexed):
    rows = rows_of(30)
    table = indexed.with_rows(*rows)

    assert {row.key for row in table.offered(30)} == {row.key for row in rows}
    looks = [table.offered(10) for _ in range(20)]
    assert all(len({row.key for row in look}) == 10 for look in looks)
    # The same ten of thirty in twenty looks: one chance in 30 million, nineteen times over.
    assert len({frozenset(row.key for row in look) for look in looks}) > 1


def test_more_offered_rows_than_one_request_may_name_are_all_read(indexed):
    rows = rows_of(105)
    table = indexed.with_rows(*rows)

    assert {row.key for row in table.offered(1_000)} == {row.key for row in rows}


def test_a_table_without_the_index_says_so(subject):
    with pytest.raises(IndexMissing):
        subject.with_rows(OFFERED_ROW).offered(10)


# Takes by force


def test_a_take_by_force_notes_whom_it_was_taken_from(subject):
    table = subject.with_rows(changed(HELD, owner=JAVA))

    outcome = table.write(take(JAVA, forced=True))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert (outcome.row.owner, outcome.row.taken_from) == (ME, JAVA)
    assert outcome.row.owner_switches == HELD.owner_switches + 1


def test_a_take_by_force_notes_the_instant_of_latest(subject):
    table = subject.with_rows(changed(HELD, owner=JAVA, checkpoint=LATEST))

    outcome = table.write(changed(take(JAVA, forced=True), latest_pinned_at=AT))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert (outcome.row.taken_from, outcome.row.latest_pinned_at) == (JAVA, AT)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(changed(HELD, owner=OwnerId("another-java")), id="another owner"),
        pytest.param(UNOWNED, id="no owner"),
        pytest.param(changed(HELD, owner=JAVA, counter=5), id="counter moved"),
    ],
)
def test_a_take_by_force_fails_when_the_row_is_not_as_seen(subject, row):
    table = subject.with_rows(row)

    assert table.write(take(JAVA, forced=True)) == ConditionFailed(row)
    assert table.read(KEY) == row


@pytest.mark.parametrize("seen", [None, OTHER, OFFERED])
def test_nobody_but_a_java_owner_can_be_taken_from_by_force(subject, seen):
    row = changed(HELD, owner=seen)
    table = subject.with_rows(row)

    with pytest.raises(InvariantViolation, match="by force"):
        table.write(take(seen, forced=True))
    assert table.read(KEY) == row


@pytest.mark.parametrize("seen", [None, OTHER, OFFERED, ME])
def test_whom_it_was_taken_from_stays_through_later_takes(subject, seen):
    """Whoever starts on the row must still wait [P18]."""
    table = subject.with_rows(changed(HELD, owner=seen, taken_from=JAVA))

    outcome = table.write(take(seen))

    assert isinstance(outcome, Applied)
    assert outcome.row is not None
    assert outcome.row.taken_from == JAVA


def test_only_a_claim_that_waited_forgets_whom_it_was_taken_from(subject):
    forced = changed(HELD, taken_from=JAVA)
    table = subject.with_rows(forced)

    assert table.write(Claim(KEY, ME, 4)) == Applied(changed(forced, counter=5))
    assert table.write(Claim(KEY, ME, 5, has_waited=True)) == Applied(changed(HELD, counter=6))


# Hand-overs to a KCL 3 worker [R8]

HANDED = changed(HELD, owner=JAVA, checkpoint_owner=ME)
NEXT_ELSEWHERE: dict[str, dict[str, Any]] = {
    "another next owner": {"owner": OwnerId("another-java")},
    "no next owner": {"owner": None},
    "another's to hand over": {"checkpoint_owner": OTHER},
    "handed over already": {"checkpoint_owner": None},
}
HAND_OVERS: dict[str, HandOver] = {
    "hand over": HandOver(KEY, ME, JAVA, 4, AT_5, AT_5),
    "checkpoint and hand over": HandOver(KEY, ME, JAVA, 4, AT_9, AT_5),
}


def test_a_hand_over_lets_the_next_owner_begin(subject):
    table = subject.with_rows(changed(HANDED, handoff=ASK, offered_to=OTHER, offered_by=OTHER))

    outcome = table.write(HAND_OVERS["hand over"])

    assert outcome == Applied(changed(HELD, owner=JAVA, counter=5, owner_switches=4))
    raw = subject.raw(KEY)
    assert raw is not None
    assert not raw.keys() & (LITTER | {"checkpointOwner"})


def test_a_hand_over_with_a_moved_position_is_a_checkpoint_too(subject):
    table = subject.with_rows(HANDED)

    outcome = table.write(HAND_OVERS["checkpoint and hand over"])

    assert outcome == Applied(
        changed(HELD, owner=JAVA, counter=5, owner_switches=0, checkpoint=AT_9, pending=None)
    )


@pytest.mark.each_value
@pytest.mark.parametrize("last", [AT_5, AT_7_2], ids=str)
@pytest.mark.parametrize("moves", [False, True], ids=["stays", "moves"])
@pytest.mark.parametrize("other", ELSEWHERE | NEXT_ELSEWHERE)
def test_a_hand_over_is_refused_and_the_row_stays(subject, last, moves, other):
    as_seen = changed(HANDED, checkpoint=last)
    row = changed(as_seen, **(ELSEWHERE | NEXT_ELSEWHERE)[other])
    change = HandOver(KEY, ME, JAVA, 4, AT_9 if moves else last, last)

    assert subject.with_rows(row).write(change) == ConditionFailed(row)
    assert subject.table.read(KEY) == row
    assert isinstance(subject.with_rows(as_seen).write(change), Applied)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(Ask(KEY, OTHER, ME, AT), id="ask"),
        pytest.param(Ask(KEY, OTHER, ME, AT, ASK), id="ask again"),
        pytest.param(Withdraw(KEY, OTHER), id="withdraw"),
        pytest.param(Decline(KEY, OTHER, 4), id="decline"),
        pytest.param(take(JAVA, forced=True), id="force"),
        *(pytest.param(change, id=name) for name, change in HAND_OVERS.items()),
    ],
)
def test_none_of_them_resurrects_a_deleted_row(subject, change):
    """I5."""
    table = subject.with_rows()

    assert table.write(change) == ConditionFailed(None)
    assert subject.raw(KEY) is None
