"""`leases` and its verbs against rows in memory: what they say, write, wait for, and end with."""

import json

import pytest

from kclrun.model.lease import ANYBODY, OFFERED, Halt, Handoff, OwnerId
from kclrun.model.sequence import SHARD_END
from kclrun.model.time import WallTime
from kclrun.protocol.writes import ConditionFailed, OutcomeUnknown, Refused, Throttled, Unavailable
from tests.unit.cli.memory_site import BEGUN, JAVA, A, B, key

ZERO = key(0)
PLAN = [
    f"{ZERO}: {A} has it, at TRIM_HORIZON",
    "It finishes its batch, checkpoints and gives it away; another owner takes it",
]
TO_B = [PLAN[0], PLAN[1].replace("another owner", B)]
UNCHANGED = "Nothing was changed. To do it, add --yes"
ASKED = f"{ZERO}: asked {A}"
DROPPED = "it dropped the request, or no other owner took the lease within 2 s"
HALT = Halt("ValueError: bad row\nin line 7", WallTime(1.0))


def test_without_yes_the_plan_is_shown_and_nothing_is_asked(site, call):
    site.plant(0, A)
    site.plant(1, B)

    assert call("leases release 0") == (0, [*PLAN, UNCHANGED], [])
    assert call("leases move 0 --to host2") == (0, [*TO_B, UNCHANGED], [])
    assert site.row(0).handoff is None


@pytest.mark.parametrize(
    ("verb", "answer", "code", "said", "reported"),
    [
        ("release", "offer", 0, f"{B} has it now", None),
        ("release", "offer_to_a_third", 0, "kclrun:az3:host3:nonce has it now", None),
        (
            "release",
            "release",
            0,
            "released; it has no owner, for none was in sight to take it",
            None,
        ),
        (
            "release",
            "drop",
            1,
            None,
            f"{A} still has it: {DROPPED}",
        ),
        (
            "release",
            "end",
            0,
            "the shard ended meanwhile; its children are leases of their own",
            None,
        ),
        (
            "release",
            "offer_only",
            1,
            "given away, waits for its taker",
            "given away, and not taken yet; see  kclrun leases --age",
        ),
        ("move", "offer", 0, f"{B} has it now", None),
        ("move", "offer_to_a_third", 1, "kclrun:az3:host3:nonce has it now", None),
        (
            "move",
            "release",
            1,
            "released; it has no owner, for none was in sight to take it",
            None,
        ),
    ],
)
def test_each_way_a_request_can_go_is_reported(site, call, verb, answer, code, said, reported):
    site.plant(0, A)
    site.plant(1, B)
    site.live(A, B, answer=answer)

    to = ("--to", "host2") if verb == "move" else ()
    found = call(f"leases {verb} 0 --yes --wait 3s", *to)

    lines = [*(TO_B if verb == "move" else PLAN), ASKED, *([f"{ZERO}: {said}"] if said else [])]
    assert found == (code, lines, [f"{ZERO}: {reported}"] if reported else [])
    # Looked at twice a second, and no longer than asked for.
    assert set(site.clock.slept) <= {0.5}
    assert site.clock.now - BEGUN - 60 == (
        3.0 if answer == "offer_only" else len(site.clock.slept) / 2
    )


def test_a_request_that_nobody_answers_is_given_up_and_stays(site, call):
    site.plant(0, A)
    site.clock.now += 0.0001  # the row keeps milliseconds

    code, _, reported = call("leases release 0 --yes --wait 1s")

    assert (code, reported) == (
        1,
        [
            f"{ZERO}: still with {A} after 1 s: it is in a long batch, or has ended",
            "The ask stays for 30 s; see  kclrun leases --age",
        ],
    )
    assert site.clock.slept == [0.5, 0.5]
    assert site.row(0).handoff == Handoff(ANYBODY, WallTime(BEGUN + 60))
    code, said, reported = call("leases release 0 --yes")
    assert (code, said) == (1, [])
    assert reported == [
        f"{ZERO}: was asked for by an operator already; {A} answers or drops that within 30 s"
    ]


def test_a_request_of_another_is_not_taken_for_ours(site, call):
    """The owner dropped ours, and another manager asks."""
    site.plant(0, A)

    def another() -> None:
        row = site.row(0)
        site.rows._put(
            ZERO,
            type(row)(
                key=ZERO,
                checkpoint=row.checkpoint,
                owner=A,
                counter=9,
                handoff=Handoff(B, WallTime(5.0)),
            ),
        )

    site.clock.acts.append(another)
    code, _, reported = call("leases release 0 --yes")

    assert (code, len(site.clock.slept)) == (1, 1)
    assert "it dropped the request" in reported[0]


@pytest.mark.parametrize("failover_s", [1.0, 3.0])
def test_a_move_to_an_owner_that_renews_nothing_changes_nothing(site, call, failover_s):
    site.plant(0, A, failover_s=failover_s)
    site.plant(1, B)
    site.live(A)

    code, said, reported = call("leases move 0 --yes", "--to", B)

    assert (code, said) == (1, TO_B)
    assert reported == [
        f"{B} has renewed nothing for {failover_s:g} s: it seems to be gone. Nothing changed"
    ]
    assert site.clock.slept == [0.5] * round(failover_s * 2)
    assert site.row(0).handoff is None


@pytest.mark.parametrize(
    ("outcome", "code", "reported"),
    [
        (
            ConditionFailed(),
            1,
            "has just got another owner or request (no owner: the row is gone)",
        ),
        (OutcomeUnknown("time-out"), 69, "no answer; look again before repeating (time-out)"),
        (Throttled("slow down"), 69, "nothing happened, try again (slow down)"),
        (Unavailable("503"), 69, "nothing happened, try again (503)"),
        (Refused("AccessDenied", "no grant"), 77, "refused: no grant"),
    ],
)
def test_a_request_that_is_not_written_is_reported(site, call, outcome, code, reported):
    site.plant(0, A)
    site.rows.outcomes = [outcome]

    assert call("leases release 0 --yes") == (code, PLAN, [f"{ZERO}: {reported}"])

    site.plant(0, A, halt=HALT)
    site.rows.outcomes = [outcome]
    code_of_resume, said, at_end = call("leases resume 0 --yes")
    if isinstance(outcome, ConditionFailed):
        left = "Changed by another operator just now, or gone, and left alone: shardId-000000000000"
        assert (code_of_resume, said[1:], at_end) == (1, [], [left])
    else:
        assert (code_of_resume, said[1:], at_end) == (code, [], [f"{ZERO}: {reported}"])


def test_the_row_that_was_just_changed_is_named_by_its_new_owner(site, call):
    site.plant(0, A)
    site.plant(1, B)
    site.rows.outcomes = [ConditionFailed(site.row(1))]

    assert f"another owner or request ({B})" in call("leases release 0 --yes")[2][0]


@pytest.mark.parametrize(
    ("line", "code", "reported"),
    [
        ("release 0", 1, "has no owner: the next manager with room takes it by itself"),
        ("move 1 --to host1", 1, "java-worker, which is not a kclrun manager"),
        ("move 2 --to host1", 1, f"is with {A} already"),
        ("move 2 --to java-worker --yes", 64, f"{A}  (leases: 1)"),
        ("release 9", 66, f"table orders has no lease for {key(9)}"),
        ("release 9", 66, "Those it has:  kclrun leases"),
        ("resume 9 2", 66, f"table orders has no lease for {key(9)}"),
        ("--owner host1", 64, "--owner goes with --explain."),
        ("--endpoint http://h", 64, "--manager and --show-keys go with --hot."),
        ("--show-keys", 64, "--manager and --show-keys go with --hot."),
        ("--explain --owner hostess", 64, "is not a kclrun owner in the table"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(site, call, line, code, reported):
    site.plant(0)
    site.plant(1, JAVA)
    site.plant(2, A)

    found, said, at_end = call(f"leases {line}")

    assert (found, said) == (code, [])
    assert reported in "\n".join(at_end)


def test_halted_leases_go_on_once_each_also_if_they_are_named_twice(site, call):
    for number in (0, 1):
        site.plant(number, A, halt=HALT)
    site.plant(2, A)
    plan = [
        f"{key(n)}: goes on after TRIM_HORIZON; it was halted because: ValueError: bad row"
        for n in (0, 1)
    ] + [f"{key(2)}: is neither halted nor paused"]

    assert call("leases resume 0 1", ZERO, "2") == (0, [*plan, UNCHANGED], [])
    assert site.row(0).halt == HALT
    done = "2 leases changed. Owners see it with their next renewal, within 0.3 s"
    assert call("leases resume 0 1", ZERO, "2", "--yes") == (0, [*plan, done], [])
    assert site.row(0).halt is site.row(1).halt is None
    assert call("leases resume 2 --yes") == (0, [plan[2], "Nothing to do."], [])


def test_the_first_failure_of_several_is_the_exit_code_and_the_others_go_on(site, call):
    for number in (0, 1):
        site.plant(number, A, halt=HALT)
    site.rows.outcomes = [Unavailable("503")]

    code, said, reported = call("leases resume 0 1 --yes")

    assert (code, said[-1].partition(".")[0], len(reported)) == (69, "1 lease changed", 1)


# The table


def test_the_table_says_who_renews_and_what_is_halted(site, call):
    site.plant(0, A)
    site.plant(1, B, halt=HALT)
    site.plant(2, None)
    site.plant(3, A, checkpoint=SHARD_END)
    site.live(A)

    code, said, reported = call("leases --age")

    assert (code, reported) == (0, ["Watching the counters for 1 s …"])
    assert [line.split()[:1] + line.split()[6:7] for line in said[:5]] == [
        ["shard", "renewing"],
        [ZERO, "yes"],
        [key(1), "NO"],
        [key(2), "-"],
        [key(3), "-"],
    ]
    remedy = f"kclrun leases --config {site.config} resume {key(1)} --yes"
    assert said[5:] == ["", f"1 halted: fix the cause, then: {remedy}"]
    assert site.clock.slept == [1.0]


def test_totals_and_json_come_without_a_remedy(site, call):
    site.plant(0, A)
    site.plant(1, B, halt=HALT)
    site.plant(2, A, checkpoint=SHARD_END)
    site.plant(3, JAVA)

    assert call("leases --by group")[1] == [
        "group   owned  halted  paused  offered  unowned",
        "(none)  1      0       0       0        0",
        "az1     1      0       0       0        0",
        "az2     0      1       0       0        0",
    ]
    totals = json.loads("\n".join(call("leases --by owner --json")[1]))
    assert totals == {JAVA: {"owned": 1}, A: {"owned": 1}, B: {"halted": 1}}
    lines = json.loads("\n".join(call("leases --json")[1]))
    assert [(each["shard"], each["state"], each["is_renewed"]) for each in lines] == [
        (ZERO, "owned", None),
        (key(1), "halted", None),
        (key(2), "ended", None),
        (key(3), "owned", None),
    ]


def test_a_row_that_is_no_lease_is_named_and_a_missing_table_too(site, call):
    site.rows.plant({"leaseKey": {"S": "bro\x1bken"}, "checkpoint": {"S": "7"}})
    assert call("leases")[2] == ["bro�ken: this row cannot be read as a lease; it is left alone"]
    site.rows.is_there = False
    for line in ("leases", "leases release 0", "leases resume 0", "lag", "doctor"):
        code, _, reported = call(line)
        assert code == 66
        assert reported[0].endswith("there is no lease table orders; the first start makes it")


def test_three_halted_leases_are_named_and_more_are_not(site, call):
    for number in range(3):
        site.plant(number, A, halt=HALT)
    assert f" resume {key(0)} {key(1)} {key(2)} --yes" in call("leases")[1][-1]
    site.plant(3, A, halt=HALT)
    assert " resume SHARD... --yes" in call("leases")[1][-1]


# Several streams


def test_of_several_streams_a_shard_is_found_by_what_only_one_has(site, call):
    site.configure(
        "application: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
        "streams: [{name: orders}, {name: audits}]\n"
    )
    for number, stream in ((0, "1:orders:9:"), (0, "1:audits:8:"), (1, "1:audits:8:")):
        site.plant(number, A, stream=stream, halt=HALT)

    def resumed(shard: str) -> tuple[int, str]:
        code, said, reported = call("leases resume", shard)
        return code, (said or reported)[-2 if said else -1]

    assert resumed("1")[1].startswith(f"1:audits:8:{key(1)}: goes on")
    assert resumed(f"orders:{ZERO}")[1].startswith(f"1:orders:9:{ZERO}: goes on")
    code, reported = resumed("0")
    assert code == 64
    assert f"Several streams have a shard {ZERO}: name audits:{ZERO} or orders:{ZERO}." in reported
    # Its stream was deleted and made again: names do not tell the rows apart.
    site.plant(1, A, stream="1:audits:7:", halt=HALT)
    code, reported = resumed("1")
    assert f"name 1:audits:7:{key(1)} or 1:audits:8:{key(1)}." in reported
    assert call("leases resume 5")[0] == 66


def test_of_one_stream_a_row_of_several_is_not_meant(site, call):
    site.plant(0, A, stream="1:audits:8:")
    assert call("leases resume 0")[0] == 66


# What each owner would do


def test_explained_is_what_each_live_owner_would_do_and_one_that_joins(site, call):
    for number in range(4):
        site.plant(number, A)
    site.plant(4)
    site.plant(5, B)
    site.plant(6, A, checkpoint=SHARD_END)
    site.live(A)

    code, said, reported = call("leases --explain")
    assert (code, reported) == (0, ["Watching the counters for 1 s …"])
    assert said[0] == f"{A} (4 leases)"
    assert any(f"take shard {key(4)}" in line for line in said)
    # B was seen not to renew it.
    assert any(f"take shard {key(5)}" in line for line in said)
    assert not any(B in line and "leases)" in line for line in said)

    (new,) = json.loads("\n".join(call("leases --explain --owner new --json")[1]))
    assert (new["owner"].split(":")[2], new["leases"]) == ("new", 0)
    assert {each["key"] for each in new["decisions"]} >= {key(4), key(5)}
    assert call("leases --explain --owner host2")[1][0] == f"{B} (1 lease)"


def test_of_several_streams_the_plan_is_for_the_leases_of_those(site, call):
    site.configure(
        "application: orders\nprocessor: mine:Mine\naws: {region: us-east-1}\n"
        "leases: {failover: 1s}\nstreams: [{name: orders}]\n"
    )
    created = int(site.stream().summary().created_at)
    site.plant(0, None, stream=f"123456789012:orders:{created}:")
    site.plant(1, None, stream="123456789012:audits:9:")

    said = call("leases --explain --owner new")[1]
    assert said[1].endswith(f":orders:{created}:{ZERO}: it has no owner")
    assert len(said) == 2


def test_an_owner_may_hold_leases_of_any_number(site, call):
    """Twenty of the owners that fit are named, and how many there are."""
    for number in range(21):
        site.plant(number, OwnerId(f"kclrun:az1:host{number:02}:nonce"))

    message = " ".join(call("leases --explain --owner host")[2])
    assert "host19" in message
    assert "host20" not in message
    assert "… 21 in all" in message
    site.rows.uproot(key(20))
    assert "in all" not in " ".join(call("leases --explain --owner host")[2])


def test_a_plan_over_a_broken_row_and_offers_reads_the_table_twice(site, call):
    site.plant(0, A)
    site.plant(1, OwnerId(OFFERED), offered_by=A, offered_to=B)
    site.live(A)
    code, said, _ = call("leases --explain")
    assert (code, said[0]) == (0, f"{A} (1 lease)")
    assert site.clock.slept == [1.0]
