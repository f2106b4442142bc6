"""`pause` and `resume` against rows in memory: what they say, write, and end with."""

import pytest

from kclrun.model.lease import Halt, LeaseKey, Pause, Scope
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import WallTime
from kclrun.protocol.writes import ChangePause, ConditionFailed, CreateLease, Refused, Throttled
from tests.unit.cli.memory_site import BEGUN, JAVA, A, B, key

ZERO, ONE = key(0), key(1)
NOW = WallTime(BEGUN + 60)
UNCHANGED = "Nothing was changed. To do it, add --yes"
SEEN = "Owners see it with their next renewal, within 0.3 s"
STOPS = "finishes its batch, checkpoints, keeps it and reads no more"

READS_ON = "is not a kclrun manager and READS ON; it is paused once a kclrun manager takes it"


def test_without_yes_the_plan_is_shown_and_nothing_is_paused(site, call):
    site.plant(0, A)
    site.plant(1, JAVA)

    assert call("pause --all --for 30m") == (
        0,
        [
            f"{ZERO}: {A} {STOPS}",
            f"{ONE}: {JAVA} {READS_ON}",
            UNCHANGED,
        ],
        [],
    )
    assert (site.row(0).pause, site.row(1).pause) == (None, None)


@pytest.mark.parametrize(
    ("words", "paused"),
    [
        ("--all", {0: Pause(NOW, scope=Scope.ALL), 1: Pause(NOW, scope=Scope.ALL)}),
        ("--stream orders", dict.fromkeys((0, 1), Pause(NOW, scope=Scope.STREAM))),
        ("1", {0: None, 1: Pause(NOW)}),
        ("0 --for 30m", {0: Pause(NOW, WallTime(NOW + 1_800)), 1: None}),
    ],
)
def test_each_reach_writes_its_rows_and_no_counter(site, call, words, paused):
    site.plant(0, A)
    site.plant(1, B)
    site.plant(2, A, SHARD_END)

    code, said, reported = call(f"pause {words} --yes")

    count = sum(each is not None for each in paused.values())
    leases = "1 lease" if count == 1 else "2 leases"
    assert (code, said[-1], reported) == (0, f"{leases} changed. {SEEN}", [])
    assert {number: site.row(number).pause for number in paused} == paused
    assert {site.row(number).counter for number in (0, 1, 2)} == {1}
    assert site.row(2).pause is None, "an ended lease reads nothing"
    code, said, _ = call("pause 2 --yes")
    assert (code, said[0]) == (0, "shardId-000000000002: has ended, so nothing of it is read")


def test_rows_that_appear_while_the_others_are_written_are_paused_too(site, call, monkeypatch):
    site.plant(0, A)
    write, late = type(site.rows).write, [1, 2]

    def write_and_create(rows, change):
        if late and isinstance(change, ChangePause):
            site.plant(late.pop(), None)
        return write(rows, change)

    monkeypatch.setattr(type(site.rows), "write", write_and_create)

    code, said, _ = call("pause --all --yes")

    assert (code, said[-1]) == (0, f"3 leases changed. {SEEN}")
    assert all(site.row(number).pause for number in (0, 1, 2))


def test_rows_that_appear_faster_than_they_are_written_are_named(site, call, monkeypatch):
    site.plant(0, A)
    write, late = type(site.rows).write, list(range(6, 0, -1))

    def write_and_create(rows, change):
        if isinstance(change, ChangePause):
            site.plant(late.pop(), None)
        return write(rows, change)

    monkeypatch.setattr(type(site.rows), "write", write_and_create)
    code, said, reported = call("pause --all --yes")
    assert (code, said[-1]) == (1, f"5 leases changed. {SEEN}")
    assert reported == [f"Not changed, because they appeared meanwhile: {key(5)}. Run it again"]


def test_a_resume_takes_every_mark_away_and_leaves_halts(site, call):
    standing, over = Pause(NOW, scope=Scope.ALL), Pause(WallTime(1.0), WallTime(2.0))
    site.plant(0, A, pause=standing, halt=Halt("bad row", WallTime(1.0)))
    site.plant(1, B, pause=over)
    site.plant(2, A, SHARD_END, pause=standing)
    site.plant(3, A)

    code, said, reported = call("resume --all --yes")

    assert (code, reported) == (0, [])
    assert said == [
        f"{ZERO}: goes on after TRIM_HORIZON; it stays halted: kclrun resume {ZERO} ends that",
        f"{ONE}: the pause is over already, and its mark goes",
        f"{key(2)}: the pause is over already, and its mark goes",
        f"3 leases changed. {SEEN}",
    ]
    assert [site.row(number).pause for number in range(4)] == [None] * 4
    assert site.row(0).halt is not None
    stays = f"{ZERO}: is not paused; it stays halted: kclrun resume {ZERO} ends that"
    assert call("resume --all") == (0, [stays, "Nothing to do."], [])
    assert call("resume 3")[1] == [f"{key(3)}: is neither halted nor paused", "Nothing to do."]


def test_one_shard_of_a_paused_application_can_be_resumed(site, call):
    for number in (0, 1):
        site.plant(number, A)
    call("pause --all --yes")

    call("resume 1 --yes")

    assert site.row(0).pause == Pause(NOW, scope=Scope.ALL)
    assert site.row(1).pause is None


def test_a_pause_that_stands_is_reported_and_replaced_unless_it_is_the_same(site, call):
    site.plant(0, A)
    call("pause 0 --yes")

    since = "paused since 2023-11-14T22:14:20Z, until it is resumed"
    assert call("pause 0 --yes") == (0, [f"{ZERO}: is {since} already", "Nothing to do."], [])
    code, said, _ = call("pause 0 --for 10s --yes")
    assert (code, said[0]) == (0, f"{ZERO}: {A} {STOPS}; now it is {since}")
    assert site.row(0).pause == Pause(NOW, WallTime(NOW + 10))


@pytest.mark.parametrize(
    ("outcome", "code", "reported"),
    [
        (
            ConditionFailed(),
            1,
            f"Changed by another operator just now, or gone, and left alone: {ZERO}",
        ),
        (Throttled("slow down"), 69, f"{ZERO}: nothing happened, try again (slow down)"),
        (Refused("AccessDenied", "no"), 77, f"{ZERO}: refused: no"),
    ],
)
def test_a_write_that_does_not_apply_is_reported_and_not_repeated(
    site, call, outcome, code, reported
):
    site.plant(0, A)
    site.rows.outcomes.append(outcome)

    assert call("pause 0 --yes")[::2] == (code, [reported])
    assert site.row(0).pause is None


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("", "Name shards, or give --stream NAME, or --all."),
        ("0 --all", "Name shards, or give --stream NAME, or --all."),
        ("--stream other", "--stream: the stream is orders."),
        ("--all --for 0s", "--for is more than 0s."),
    ],
)
def test_a_reach_that_is_not_one_is_refused(site, call, words, reported):
    site.plant(0, A)

    code, _, lines = call(f"pause {words} --yes")

    assert (code, lines[-1]) == (64, f"Error: {reported}")


def test_an_older_pause_does_not_come_back_over_a_newer_decision(site):
    """Two operators at once, and a write that arrives late: the condition names the pause seen."""
    site.plant(0, A)
    first, second = Pause(NOW), Pause(WallTime(NOW + 1), scope=Scope.ALL)
    site.rows.write(ChangePause(ZERO, first, None))

    late = site.rows.write(ChangePause(ZERO, second, None))

    assert isinstance(late, ConditionFailed)
    assert site.row(0).pause == first


def test_a_row_created_again_by_its_owner_keeps_its_pause(site):
    site.plant(0, A, pause=Pause(NOW))
    row = site.row(0)
    site.rows._rows.clear()

    site.rows.write(CreateLease(row))

    assert site.rows.read(LeaseKey(ZERO)).pause == Pause(NOW)
