"""`explain`: what the next cycle of one owner would do, in sentences."""

import msgspec

from kclrun.leases.policy import ManagerPolicy
from kclrun.model.lease import OFFERED, Handoff, Lease, Load
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.operating.explaining import explain

replace = msgspec.structs.replace
ME, OTHER = "kclrun:a:me:n", "kclrun:a:other:n"


def leases(owner, count, **fields):
    name = (owner or "free").split(":")[-2 if owner and ":" in owner else 0]
    return [
        Lease(key=f"{name}-{number}", checkpoint=TRIM_HORIZON, owner=owner, **fields)
        for number in range(count)
    ]


def sentences(*rows, still=(), apart_s=11.0, **policy):
    later = tuple(
        lease if lease.key in still else replace(lease, counter=lease.counter + 1) for lease in rows
    )
    reported = explain(tuple(rows), later, ManagerPolicy(me=ME, **policy), apart_s=apart_s)
    return [each.sentence for each in reported]


def test_a_balanced_owner_does_nothing_and_says_how_things_stand():
    reported = explain(
        tuple(leases(ME, 5)), tuple(leases(ME, 5)), ManagerPolicy(me=ME), apart_s=11.0
    )

    assert (reported[0].action, reported[0].key) == ("nothing", None)
    assert reported[0].sentence == (
        "nothing: balanced: one owner holds 5 of 5; we have 5, target 5"
    )


def test_a_heavy_owner_says_what_it_would_exchange_and_with_whom():
    heavy, light = Load(900.0, 0.9), Load(100.0, 0.1)
    rows = [*leases(ME, 2, load=heavy), *leases(OTHER, 2, load=light)]

    (reported,) = sentences(*rows)

    assert reported.startswith("give me-")
    assert reported.partition(": ")[2] == (
        "our load is 1.80 of an owner's mean, its load 0.20, if that lasts a minute"
    )
    assert f" to {OTHER} and ask for other-" in reported
    assert sentences(*rows, balance="counts")[0].startswith("nothing: balanced")


def test_an_expired_lease_is_taken_and_says_for_how_long_nobody_renewed_it():
    rows = [*leases(ME, 1), *leases("java-1", 1)]

    assert sentences(*rows, still={"java-1-0"}) == [
        "take shard java-1-0: expired: java-1 did not renew it for 11 s"
    ]


def test_what_the_dead_left_beyond_our_target_is_offered_in_their_name():
    dead = "kclrun:a:dead:n"
    rows = [*leases(ME, 3), *leases(OTHER, 2), *leases(dead, 1)]

    (reported,) = sentences(*rows, still={"dead-0"})

    assert reported.startswith(f"offer shard dead-0 in the name of {dead}: expired: {dead} did not")
    assert reported.endswith("for 11 s, and we are at our target")


def test_an_unowned_lease_is_taken():
    assert sentences(*leases(None, 1)) == ["take shard free-0: it has no owner"]


def test_a_lease_is_asked_for_with_the_numbers_that_speak_for_it():
    assert sentences(*leases(ME, 5), *leases(OTHER, 8))[0].endswith(
        ": it has 8, we have 5, target 7"
    )


def test_a_lease_is_taken_by_force_from_a_java_worker():
    reported = sentences(*leases("java", 3))

    assert len(reported) == 1
    assert reported[0].startswith("take shard java-")
    assert "by force from java: it has 3, we have 0, target 2" in reported[0]


def test_offered_leases_say_who_gives_them_and_when_we_take_them():
    mine = Lease(key="a", checkpoint=TRIM_HORIZON, owner=OFFERED, offered_by=OTHER, offered_to=ME)
    theirs = replace(mine, key="b", offered_to="kclrun:a:third:n")

    reported = sentences(mine, theirs, *leases(OTHER, 2), *leases(ME, 3))

    assert reported[0] == f"take shard a at once: {OTHER} offers it to us"
    assert reported[1].startswith("take shard b in 3.1 s unless another owner does: ")
    assert reported[1].endswith("we are at our target")


def test_a_full_owner_says_so():
    reported = sentences(*leases(ME, 2), *leases(OTHER, 9), leases_max=2)

    assert reported == [
        "nothing: 2 owners hold 2 to 9 of 11; we have 2, target 2; full: leases.max is 2"
    ]


def test_what_is_on_its_way_is_said_instead_of_balanced():
    asked = leases(OTHER, 6, handoff=Handoff(ME, 1.0))

    assert sentences(*asked[:3], *leases("kclrun:a:third:n", 3)) == [
        "nothing: 3 owners hold 0 to 3 of 6; we have 3, target 2; 3 on their way to us"
    ]
