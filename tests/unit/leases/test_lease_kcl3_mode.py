"""A KCL 3 fleet of an early version, whose mode is in another table: when it is read, what is told.

The mode in the lease table itself is `test_lease_manager.py`'s.
"""

import itertools

from kclrun.leases import commands as c
from kclrun.leases import events as e
from kclrun.leases.policy import ManagerPolicy, is_seldom
from tests.unit.leases.manager_life import JAVA, ME, OTHER, ManagerLife, row, rows_of

NATIVE = "CLIENT_VERSION_3X"
COMPATIBLE = "CLIENT_VERSION_UPGRADE_FROM_2X"


def watching(*rows):
    """A manager that reads the mode, and sees these rows."""
    return ManagerLife(*rows, reads_kcl3_mode=True)


def reads_of(life, seconds):
    """When it asks in so many seconds of scans; each question is answered: nothing there."""
    began, asked = life.now, []
    while life.now < began + seconds:
        life.scan()
        if life.asked(c.ReadKcl3Mode):
            asked.append(life.now - began)
            life.say(e.Kcl3ModeRead(None))
    return asked


def test_a_manager_alone_reads_the_mode_once_a_minute():
    asked = reads_of(watching(), 600)

    assert asked[0] < 66, "at random within the first minute, at the next scan"
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(pauses) >= 7
    assert all(59 < pause < 66 for pause in pauses)


def test_one_of_many_leaves_most_of_the_reads_to_the_others():
    others = [row(f"s{n}", f"kclrun:g:host{n}:n") for n in range(3)]

    asked = reads_of(watching(*others), 1000)

    assert 3 <= len(asked) <= 5  # every four minutes


def test_who_scans_seldom_leaves_all_of_them_to_the_others():
    others = [row(f"s{n}", f"kclrun:a:host{n}:n") for n in range(1000)]

    life = watching(*others)

    assert is_seldom(ManagerPolicy(me=ME), {other.owner for other in others} | {ME})
    assert reads_of(life, 3_000) == []


def test_where_no_such_fleet_can_be_nothing_is_read():
    assert reads_of(ManagerLife(), 300) == []


def test_no_second_question_is_asked_before_the_first_is_answered():
    life = watching()
    asked = 0
    for _ in range(60):
        life.scan()
        asked += len(life.asked(c.ReadKcl3Mode))

    assert (asked, life.now > 300) == (1, True)


def test_a_fleet_that_leaves_the_shared_protocol_there_is_reported_once_with_what_to_do():
    life = watching(*rows_of(OTHER, 2, "s"))

    notes = []
    for mode in (None, COMPATIBLE, NATIVE, NATIVE):
        life.say(e.Kcl3ModeRead(mode))
        notes += life.asked(c.Note)
        life.scan()
        notes += [note for note in life.asked(c.Note) if note.event == "kcl3_native"]

    (reported,) = notes
    assert (reported.event, reported.level, reported.fields["what"]) == (
        "kcl3_native",
        "error",
        str([NATIVE]),
    )
    assert "CoordinatorState" in reported.fields["reason"]
    assert life.core.native_mode == NATIVE


def test_the_advice_to_a_fleet_without_java_workers_stops_nothing():
    life = watching(row("s0", JAVA, 3), row("s1", OTHER, 3))
    life.say(e.Kcl3ModeRead(NATIVE))
    (both,) = [note.fields["reason"] for note in life.asked(c.Note)]
    life.rows["s0"] = row("s0", OTHER, 4)

    notes = []
    for _ in range(5):
        life.scan()
        notes += [note for note in life.asked(c.Note) if note.event == "kcl3_native"]

    (alone,) = [note.fields["reason"] for note in notes]
    assert "stop every worker" in both
    assert "stop" not in alone
    assert "delete the one item Migration3.0" in alone


def test_a_mode_in_the_lease_table_counts_before_the_other():
    life = watching()

    life.say(e.LeasesScanned((), kcl3_mode=COMPATIBLE))
    life.say(e.Kcl3ModeRead(NATIVE))

    assert (life.core.native_mode, life.notes()) == (None, [])


def test_a_mode_that_we_may_not_read_is_said_once_and_never_asked_for_again():
    life = watching()
    while not life.asked(c.ReadKcl3Mode):
        life.scan()

    life.say(e.Kcl3ModeUnreadable("GetItem: AccessDenied"))

    assert life.asked(c.Note)[0].fields == {"reason": "GetItem: AccessDenied"}
    assert life.notes() == ["kcl3_mode_unreadable"]
    assert reads_of(life, 300) == []
