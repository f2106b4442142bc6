import click
import pytest

from kclrun.cli.leases.command import Explanation, find_owner, owners_alive, print_explanations
from kclrun.model.lease import ANYBODY, OFFERED, Handoff, Lease, LeaseKey, OwnerId
from kclrun.model.sequence import SHARD_END, TRIM_HORIZON
from kclrun.model.time import WallTime
from kclrun.operating.changes import CannotAsk, plan_ask
from kclrun.operating.explaining import Explained
from kclrun.operating.summaries import lease_summary
from kclrun.protocol.writes import Ask
from tests.support.tables import over_rows

KEY = LeaseKey("shardId-000000000001")
A, B = OwnerId("kclrun:az1:hosta:abc"), OwnerId("kclrun:az2:hostb:def")
NOW = WallTime(1_800_000_000.125)


def lease(owner: str | None = A, **more: object) -> Lease:
    fields = {"key": KEY, "checkpoint": TRIM_HORIZON, "counter": 7}
    return Lease(**(fields | more), owner=OwnerId(owner) if owner else None)  # type: ignore[arg-type]


def test_a_release_is_an_ask_on_behalf_of_anybody():
    assert plan_ask(lease(), None, NOW) == Ask(KEY, ANYBODY, asked=A, asked_at=NOW)


def test_a_move_is_an_ask_on_behalf_of_the_new_owner():
    assert plan_ask(lease(), B, NOW) == Ask(KEY, B, asked=A, asked_at=NOW)


@over_rows(
    ("row", "why"),
    [
        (lease(None), "has no owner"),
        (lease(checkpoint=SHARD_END), "has ended"),
        (lease(OFFERED), "given away already, and waits"),
        (lease(OFFERED, offered_to=B), f"meant for {B}"),
        (lease("java-worker-17"), "not a kclrun manager and cannot be asked"),
        (lease(B), f"is with {B} already"),
        (lease(handoff=Handoff(B, NOW)), f"asked for by {B} already"),
        (lease(handoff=Handoff(ANYBODY, NOW)), "asked for by an operator already"),
    ],
)
def test_whoever_cannot_be_asked_is_not_and_the_reason_is_said(row, why):
    planned = plan_ask(row, B, NOW)

    assert isinstance(planned, CannotAsk)
    assert why in planned.why


def test_an_owner_is_found_by_its_id_or_by_what_only_its_id_has():
    leases = [lease(A), lease(B), lease("java"), lease(None), lease(OFFERED)]

    assert find_owner(A, leases, "--to") == A
    assert find_owner("hostb", leases, "--to") == B
    assert find_owner("kclrun:az2", leases, "--to") == B


@over_rows("named", ["java", "hostc", "host", "offered", "", "kclrun:"])
def test_any_other_owner_is_refused_with_those_there_are(named):
    with pytest.raises(click.UsageError) as refused:
        find_owner(named, [lease(A), lease(A), lease(B), lease("java"), lease(OFFERED)], "--to")

    assert f"{A}  (leases: 2)" in refused.value.message
    assert f"{B}  (leases: 1)" in refused.value.message


def test_of_several_that_are_meant_only_those_are_named():
    third = OwnerId("kclrun:az3:other:xyz")
    with pytest.raises(click.UsageError, match="is a part of several owners") as refused:
        find_owner("host", [lease(A), lease(B), lease(third)], "--to")
    assert A in refused.value.message
    assert third not in refused.value.message


def test_the_option_that_names_no_owner_is_that_of_the_command_line():
    for option in ("--to", "--owner"):
        with pytest.raises(click.UsageError, match=f"^{option} hostc is not a kclrun owner"):
            find_owner("hostc", [lease(A)], option)


def test_owners_of_ended_leases_are_no_owners():
    with pytest.raises(click.UsageError, match=r"There is none\."):
        find_owner(A, [lease(A, checkpoint=SHARD_END)], "--to")


def test_a_row_says_who_asks_and_who_gave():
    asked = lease_summary(lease(handoff=Handoff(B, NOW)), NOW)
    offered = lease_summary(lease(OFFERED, offered_to=B, offered_by=A), NOW)

    assert (asked.state, asked.note) == ("owned", f"asked for by {B}")
    assert (offered.state, offered.note) == ("offered", f"given away by {A}, meant for {B}")
    assert lease_summary(lease(OFFERED), NOW).note == "given away"
    assert (
        lease_summary(lease(handoff=Handoff(ANYBODY, NOW)), NOW).note == "asked for by an operator"
    )


def test_only_owners_that_were_seen_to_renew_or_take_are_alive():
    one, two, three = (LeaseKey(f"shardId-00000000000{n}") for n in (1, 2, 3))
    earlier = [lease(A, key=one), lease(B, key=two), lease("java", key=three)]
    later = [lease(A, key=one, counter=8), lease(B, key=two), lease("java", key=three, counter=8)]

    assert owners_alive(earlier, later) == (A,)
    assert owners_alive(earlier, [*later[:1], lease(B, key=three, counter=8)]) == (A, B)


def test_each_owner_has_a_paragraph(capsys):
    decided = (Explained("ask", KEY, "ask \x1b[1m for it"),)
    print_explanations([Explanation(A, 1, decided), Explanation(B, 4, decided)])

    assert capsys.readouterr().out.splitlines() == [
        f"{A} (1 lease)",
        "  ask �[1m for it",
        "",
        f"{B} (4 leases)",
        "  ask �[1m for it",
    ]
    print_explanations([])
    assert "--owner new" in capsys.readouterr().out
